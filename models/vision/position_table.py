"""Learned positions on a square, interpolated to the grid of each picture: a few gathers for every patch."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Int32

from omnijax.nn.projections import param
from omnijax.sharding import constrain

Tap = tuple[Int32[Array, "B N"], Float32[Array, "B N"]]
"""A place on one side of the table, and its weight."""

Taps = Callable[[Int[Array, "B N"], Int[Array, "B N"], int], Sequence[Tap]]
"""What a patch reads along one side: of its index, the size of its grid, and the side of the table."""


class PositionTable(nnx.Module):
    """`[side x side, embed]`, row by row."""

    def __init__(self, side: int, width: int, taps: Taps, *, std: float, rngs: nnx.Rngs):
        self.embedding = param(rngs, nnx.initializers.normal(std), ((None, side**2), ("embed", width)))
        self.side, self.taps = side, taps

    def __call__(self, positions: Int[Array, "B N 3"], grid: Int[Array, "B N 3"]) -> Float[Array, "B N E"]:
        """`positions` and `grid` are (time, height, width) in patches; frames of a clip have the same positions."""
        # In float32, as the gradient of an entry is a sum over all patches that read it.
        table = constrain(self.embedding[...], None, None)
        wide = table.astype(jnp.float32)
        rows, columns = (self.taps(positions[..., axis], grid[..., axis], self.side) for axis in (1, 2))
        read = jnp.zeros((*positions.shape[:2], table.shape[1]), jnp.float32)
        for row, row_weight in rows:
            for column, column_weight in columns:
                read += wide[row * self.side + column] * (row_weight * column_weight)[..., None]
        return constrain(read.astype(table.dtype), "batch", "length", "act_embed")


def linear_taps(index: Int[Array, "B N"], size: Int[Array, "B N"], side: int) -> list[Tap]:
    """Linear interpolation; the first and the last patch stand on the first and the last entry."""
    # The product first, so that the last patch is the last entry without rounding.
    place = index.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)
    first = jnp.floor(place)
    return [_tap(first, offset, 1 - abs(place - first - offset), side) for offset in (0, 1)]


def cubic_taps(index: Int[Array, "B N"], size: Int[Array, "B N"], side: int) -> list[Tap]:
    """Cubic convolution with a = -0.75 (Keys 1981); a patch stands at its middle."""
    place = (index.astype(jnp.float32) + 0.5) * side / jnp.maximum(size, 1) - 0.5
    first, a = jnp.floor(place), -0.75
    taps = []
    for offset in (-1, 0, 1, 2):
        x = abs(place - first - offset)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        taps.append(_tap(first, offset, jnp.where(x <= 1, near, far), side))
    return taps


def _tap(first: Float32[Array, "B N"], offset: int, weight: Float32[Array, "B N"], side: int) -> Tap:
    return jnp.clip(first.astype(jnp.int32) + offset, 0, side - 1), weight
