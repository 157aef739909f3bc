"""Mixture of experts: each token goes to the few experts its router chose, wherever they live.

    moe = MixtureOfExperts(router=Router(...), experts=...)
    y, routing = moe(x, real)

Inside, every device works on its own tokens and its own experts (`shard_map`, manual over the whole mesh). Which mesh
axes those are, the table in use says: `batch` and `length` place tokens, `experts`, `expert_embed` and `expert_mlp`
place weights. Letters: T tokens of a device, k choices of each, n devices that share the experts, D width.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from omnijax.errors import UserError
from omnijax.nn.experts import apply_experts
from omnijax.nn.router import Router, Routing, measure
from omnijax.sharding import activation_spec, constrain, current_rules, parameter_spec


class MixtureOfExperts(nnx.Module):
    """The sum of what a token's experts make of it, each by its weight, and of the `shared` expert's output if any.

    `experts` is a module that holds arrays with a leading axis `experts`, and a function `expert` of `omnijax.nn
    .grouped.Expert` to apply them.
    """

    def __init__(self, *, router: Router, experts: Any, shared: nnx.Module | None = None):
        self.router, self.experts, self.shared = router, experts, shared

    def __call__(self, x: Float[Array, "B S D"], real: Bool[Array, "B S"]) -> tuple[Float[Array, "B S D"], Routing]:
        """Padding (`real` is false) goes to no expert and is counted nowhere."""
        logits = self.router(x)
        correction = None if self.router.correction is None else self.router.correction[...]
        variables = {str(path[0]): variable for path, variable in nnx.to_flat_state(nnx.state(self.experts))}
        kernels = {name: variable[...] for name, variable in variables.items()}
        # Inside a scan over layers an array has lost its first axis, and its names have not.
        axes = {name: variable.axes[-kernels[name].ndim :] for name, variable in variables.items()}
        y, choice, dropped = dispatch(
            self.experts.expert, kernels, axes, x, logits, correction, real, self.router.select
        )
        routing = measure(logits, self.router.probabilities(logits), choice, dropped, real)
        return (y if self.shared is None else y + self.shared(x)), routing


Split = Sequence[tuple[str | None, Any]]
"""The name of each axis of a kernel, and the mesh axes that split it."""


def dispatch(
    expert,
    kernels: Mapping[str, Float[Array, "X ..."]],
    axes: Mapping[str, Sequence[str | None]],
    x: Float[Array, "B S D"],
    logits: Float[Array, "B S E"],
    correction: Float[Array, " E"] | None,
    real: Bool[Array, "B S"],
    select,
) -> tuple[Float[Array, "B S D"], Int[Array, "B S k"], Int[Array, "B S"]]:
    """Apply experts to the tokens that choose them; returns outputs, choices, and how many of a token's were dropped.

    `axes` names the axes of `kernels`. Raises `UserError` where the table gives experts mesh axes that do not split
    tokens.
    """
    spec = activation_spec(x.shape, "batch", "length", None)
    rules = current_rules()
    if spec is None or rules is None or jax.sharding.get_abstract_mesh().size == 1:
        return _per_device(expert, select, {}, None, x, logits, real, kernels, correction)
    specs = {name: parameter_spec(axes[name], kernel.shape) or PartitionSpec() for name, kernel in kernels.items()}
    split = {name: tuple(zip(axes[name], specs[name], strict=True)) for name in kernels}
    _check_tokens_are_split(spec, split)
    mesh = jax.sharding.get_abstract_mesh()
    tokens = PartitionSpec(*spec[:2])
    x, logits = (constrain(a, "batch", "length", None) for a in (x, logits))
    return jax.shard_map(
        functools.partial(_per_device, expert, select, split, rules.layout),
        in_specs=(spec, spec, tokens, specs, PartitionSpec()),
        out_specs=(spec, spec, tokens),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )(x, logits, real, dict(kernels), correction)


def _per_device(expert, select, split, layout, x, logits, real, kernels, correction):
    """One device's tokens [B, S], through its own and others' experts."""
    choice, weight = select(logits.reshape(-1, logits.shape[-1]), correction)
    chosen = jnp.where(real.reshape(-1, 1), choice, logits.shape[-1])
    tokens = x.reshape(-1, x.shape[-1])
    kernels = {name: _whole(kernel, split.get(name, ())) for name, kernel in kernels.items()}
    devices, parts = (_axes_of(split, name) for name in ("experts", "expert_mlp"))
    if parts:
        # Each part of an expert's hidden width makes a summand of its output; a bias that is not split, all add.
        share = 1 / lax.axis_size(parts)
        added = {name for name in kernels if name.endswith("bias") and "expert_mlp" not in dict(split[name])}
        kernels = {name: k * share if name in added else k for name, k in kernels.items()}
    compute = functools.partial(_compute, expert, kernels)
    if not devices:
        y, dropped = compute(tokens, chosen, weight), jnp.zeros_like(chosen[:, 0])
    elif layout.moe == "all_gather":
        y, dropped = _gather(compute, devices, tokens, chosen, weight, logits.shape[-1])
    else:
        y, dropped = _exchange(compute, devices, tokens, chosen, weight, logits.shape[-1], layout.capacity)
    if parts:
        y = lax.psum(y, parts)
    return y.reshape(x.shape), choice.reshape(*x.shape[:2], -1), dropped.reshape(x.shape[:2])


def _compute(expert, kernels, x, choice, weight, share=1):
    """`apply_experts`, of arrays that all vary over the same mesh axes, so that each of its results does."""
    arrays = (kernels, x, choice, weight)
    everywhere = frozenset().union(*map(_varying, jax.tree.leaves(arrays)))

    def vary(a: Array) -> Array:
        missing = tuple(everywhere - _varying(a))
        return lax.pcast(a, missing, to="varying") if missing else a

    return apply_experts(expert, *jax.tree.map(vary, arrays), share=share).astype(x.dtype)


def _varying(a: Array) -> frozenset[str]:
    """The manual mesh axes along which devices hold different values."""
    return jax.typeof(a).manual_axis_type.varying


def _gather(compute, devices, x, choice, weight, experts):
    """All tokens of all n devices meet this device's experts, and each device gets the sum over all for its own."""
    x, choice, weight = (lax.all_gather(a, devices, tiled=True) for a in (x, choice, weight))
    here = experts // lax.axis_size(devices)
    choice = choice - lax.axis_index(devices) * here
    y = compute(x, jnp.where((choice >= 0) & (choice < here), choice, here), weight, share=lax.axis_size(devices))
    y = lax.psum_scatter(y, devices, tiled=True)
    return y, jnp.zeros_like(choice[: len(y), 0])


def _exchange(compute, devices, x, choice, weight, experts, capacity):
    """Each choice travels to its expert's device and back; a device takes so many from each other, the first ones."""
    n, k = lax.axis_size(devices), choice.shape[1]
    here = experts // n
    room = min(choice.size, math.ceil(capacity * choice.size / n))
    flat = choice.reshape(-1)
    device = jnp.minimum(flat // here, n)  # n: nobody's
    goes = device[:, None] == jnp.arange(n)
    place = jnp.where(goes, jnp.cumsum(goes, axis=0) - 1, 0).sum(-1)  # how many went to the same device before
    served = (device < n) & (place < room)
    # Which choice stands in which of the n x room places; one past the last where none does.
    address = jnp.where(served, device * room + place, n * room)
    taken = jnp.full_like(flat, flat.size, shape=n * room).at[address].set(jnp.arange(flat.size), mode="drop")

    def send(values: Array, empty: Any) -> Array:
        sent = values.at[taken].get(mode="fill", fill_value=empty)
        return lax.all_to_all(sent, devices, 0, 0, tiled=True)

    tokens = x.at[taken // k].get(mode="fill", fill_value=0)
    arrived = lax.all_to_all(tokens, devices, 0, 0, tiled=True)
    y = compute(arrived, send(flat % here, here)[:, None], send(weight.reshape(-1), 0)[:, None])
    y = lax.all_to_all(y, devices, 0, 0, tiled=True)
    out = jnp.zeros_like(x, jnp.float32).at[taken // k].add(y, mode="drop").astype(x.dtype)
    return out, ((device < n) & ~served).reshape(choice.shape).sum(1, dtype=jnp.int32)


def _whole(kernel: Array, split: Split) -> Array:
    """An expert's weights with every axis gathered that other devices hold a part of, and this one needs."""
    for axis, (name, mesh_axes) in enumerate(split):
        if mesh_axes and name not in ("experts", "expert_mlp"):
            kernel = lax.all_gather(kernel, mesh_axes, axis=axis, tiled=True)
    return kernel


def _axes_of(split: Mapping[str, Split], name: str) -> Any:
    """The mesh axes that split the axis `name` of any kernel."""
    return next((dict(pairs)[name] for pairs in split.values() if dict(pairs).get(name)), None)


def _check_tokens_are_split(spec: PartitionSpec, split: Mapping[str, Split]) -> None:
    axes = _axes_of(split, "experts")
    splitting = {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        if axis not in splitting:
            raise UserError(
                f"experts are split over the mesh axis '{axis}', which splits no tokens: every device along it would "
                f"do the same work; add '{axis}' to the line of batch or length, or take it from that of experts"
            )
