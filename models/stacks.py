"""Layers in stacks, each scanned over its layers.

A stack is `(pattern, repeats)`: its layers repeat a short pattern of blocks. One scan step runs one period, so the
program is as long as the pattern, not as the model. Layers are numbered through all stacks, from 0.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from omnijax.errors import UserError
from omnijax.nn import merge, rope, spans
from omnijax.nn.moe import MixtureOfExperts
from omnijax.nn.remat import Remat, rematerialise
from omnijax.nn.router import Routing
from omnijax.sharding import constrain

MakeBlock = Callable[[nnx.Rngs], nnx.Module]


@dataclass(frozen=True)
class StackPlan:
    """`repeats` periods of `pattern`; `windows` holds the sliding window of every layer, or None for no limit."""

    pattern: tuple[MakeBlock, ...]
    repeats: int
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.windows) != self.repeats * len(self.pattern):
            raise ValueError(f"{len(self.windows)} windows for {self.repeats} x {len(self.pattern)} layers")


def plan_stacks(
    kinds: Sequence[Hashable], make: Callable[[Any], MakeBlock], windows: Sequence[int | None]
) -> tuple[StackPlan, ...]:
    """The stacks with the fewest blocks in their patterns, all told, for layers of these kinds; fewer stacks win ties.

    `make(kind)` gives what makes a block of a kind.
    """
    count = len(kinds)
    # Of the layers from each on: (blocks to compile, stacks, the period and repeats of the first stack).
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * (count + 1)
    for first in reversed(range(count)):
        options = []
        for period in range(1, count - first + 1):
            repeats = 1
            while _repeats(kinds, first, period, repeats):
                repeats += 1
            for each in range(1, repeats + 1):
                rest = best[first + period * each]
                options.append((period + rest[0], 1 + rest[1], period, each))
        best[first] = min(options)
    plans, first = [], 0
    while first < count:
        _, _, period, repeats = best[first]
        pattern, last = tuple(make(kind) for kind in kinds[first : first + period]), first + period * repeats
        plans.append(StackPlan(pattern, repeats, tuple(windows[first:last])))
        first = last
    return tuple(plans)


def split_plans(plans: Sequence[StackPlan], splits: Sequence[int]) -> tuple[StackPlan, ...]:
    """The same layers, with a stack that begins at each layer of `splits`.

    Raises `UserError` for a layer that is not there, or lies inside the pattern its stack repeats.
    """
    count = sum(len(plan.windows) for plan in plans)
    for layer in splits:
        if not 0 < layer < count:
            raise UserError(f"splits = {tuple(splits)}: layer {layer} is not in 1..{count - 1}")
    found, first = list[StackPlan](), 0
    for plan in plans:
        period, last = len(plan.pattern), first + len(plan.windows)
        edges = [first, *sorted({layer for layer in splits if first < layer < last}), last]
        for start, end in itertools.pairwise(edges):
            if (start - first) % period:
                raise UserError(
                    f"splits: layer {start} lies inside a pattern of {period} layers that repeats from layer {first}: "
                    f"split at layer {start - (start - first) % period} or {start + -(start - first) % period}"
                )
            windows = plan.windows[start - first : end - first]
            found.append(StackPlan(plan.pattern, len(windows) // period, windows))
        first = last
    return tuple(found)


def _repeats(kinds: Sequence[Hashable], first: int, period: int, times: int) -> bool:
    """Whether the `period` layers from `first` on stand there once more after so many times."""
    start = first + period * times
    return list(kinds[start : start + period]) == list(kinds[first : first + period])


class Block(nnx.Module):
    """A pre-norm residual layer: attention, then a feed-forward network or a mixture of experts."""

    def __init__(self, *, input_layernorm, self_attn, post_attention_layernorm, mlp):
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def __call__(
        self, x: Float[Array, "B S E"], rotation: rope.Rotation, span: spans.Span, real: Bool[Array, "B S"]
    ) -> tuple[Float[Array, "B S E"], Routing | None]:
        """The layer's output, and what its router did if it has one."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, span)
        x = constrain(x, "batch", "length", "act_embed")
        hidden = self.post_attention_layernorm(x)
        y, routing = self.mlp(hidden, real) if is_routed(self) else (self.mlp(hidden), None)
        return constrain(x + y, "batch", "length", "act_embed"), routing


def is_routed(block: Any) -> bool:
    """Whether a block has experts."""
    return isinstance(block.mlp, MixtureOfExperts)


class Deepstack(NamedTuple):
    """What a tower adds to the tokens `slots` point from, after each of the first layers (arXiv 2406.04334)."""

    features: Float[Array, "layers B M E"]
    slots: Int32[Array, "B S"]


class Stack(nnx.Module):
    """Layers whose parameters are stacked along a leading `layers` axis, one stack of arrays per pattern position."""

    def __init__(self, plan: StackPlan, *, remat: Remat, rngs: nnx.Rngs):
        self.blocks = nnx.List([_stacked(make, plan.repeats, rngs) for make in plan.pattern])
        self.repeats, self.windows, self.remat = plan.repeats, plan.windows, remat

    def __call__(
        self,
        x: Float[Array, "B S E"],
        rotation: rope.Rotation,
        span: spans.Span,
        real: Bool[Array, "B S"],
        deepstack: Deepstack | None = None,
    ) -> tuple[Float[Array, "B S E"], tuple[Routing | None, ...]]:
        """The last layer's output, and for each position of the pattern its layers' routing, stacked."""
        graphdefs, states = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        windows = self._windows(x.shape[1])

        def period(x, scanned):
            states, windows, features = scanned
            routings = []
            for index, (graphdef, state) in enumerate(zip(graphdefs, states, strict=True)):
                limited = span if windows is None else spans.window(span, windows[index])
                x, routing = nnx.merge(graphdef, state)(x, rotation, limited, real)
                routings.append(routing)
                if deepstack is not None:
                    x = merge.add(x, features[index], deepstack.slots)
            return x, tuple(routings)

        features = None
        if deepstack is not None:
            features = deepstack.features.reshape(self.repeats, len(self.blocks), *deepstack.features.shape[1:])
        body = rematerialise(period, self.remat)
        return jax.lax.scan(body, x, (states, windows, features), length=self.repeats)

    def _windows(self, length: int) -> Int32[Array, "repeats period"] | None:
        if all(window is None for window in self.windows):
            return None
        # What differs between layers only by a number is scanned, so that they share one program.
        numbers = [length if window is None else window for window in self.windows]
        return jnp.asarray(numbers, jnp.int32).reshape(self.repeats, -1)


def in_layer_order(routings: Sequence[tuple[Routing | None, ...]]) -> Routing | None:
    """The routing of all layers that have experts, given by stack and position; None where there is none."""
    stacks = [[routing for routing in stack if routing is not None] for stack in routings]
    layers = [
        jax.tree.map(lambda *xs: jnp.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *stack) for stack in stacks if stack
    ]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *layers) if layers else None


def _stacked(make: MakeBlock, repeats: int, rngs: nnx.Rngs) -> nnx.Module:
    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None, "axes": "layers"})
    def make_all(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return make_all(rngs)
