"""What the backward pass recomputes instead of keeping."""

from collections.abc import Callable
from typing import Literal

import jax

Remat = Literal["none", "full", "dots"]
"""`none` keeps everything, `full` keeps only what enters a layer, `dots` also keeps the results of matrix products."""

_POLICIES = {"full": "nothing_saveable", "dots": "dots_with_no_batch_dims_saveable"}


def rematerialise(body: Callable, remat: Remat) -> Callable:
    """Wrap the body of a scan over layers in a policy; a scan needs no guard against common subexpressions."""
    if remat == "none":
        return body
    policy = getattr(jax.checkpoint_policies, _POLICIES[remat])
    return jax.checkpoint(body, policy=policy, prevent_cse=False)
