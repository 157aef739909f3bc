"""What the backward pass recomputes instead of keeping, and where it keeps the rest."""

from collections.abc import Callable
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

Remat = Literal["none", "full", "dots", "offload"]
"""`none` keeps everything, `full` keeps only what enters a layer, `dots` also keeps the results of matrix products;
`offload` recomputes like `full`, and keeps what enters a layer in the host's memory."""

LAYER_INPUT = "layer input"

_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def rematerialise(body: Callable, remat: Remat) -> Callable:
    """Wrap the body of a scan over layers, `body(x, layer) -> (x, y)`, in a policy."""
    if remat == "none":
        return body

    def named(x: Array, layer: object) -> tuple:
        return body(checkpoint_name(x, LAYER_INPUT), layer)

    # A scan needs no guard against common subexpressions.
    return jax.checkpoint(named if remat == "offload" else body, policy=_POLICIES[remat], prevent_cse=False)
