"""Which keys a query sees, as one interval per query: exact for packed rows, and O(length) in memory.

`segment_ids` number the documents of a row: 0 is padding, and each document is one contiguous run of equal ids.
Query i sees the keys [start[i], end[i]); an interval with end <= start is empty, as is that of every padding token.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from omnijax.sharding import constrain

Span = tuple[Int[Array, "B S"], Int[Array, "B S"]]


def document(segment_ids: Int[Array, "B S"]) -> Span:
    """Every token sees its whole document."""
    # Whole rows on every device: one small gather here, instead of one for each step below.
    segment_ids = constrain(segment_ids, "batch", "attention_length")
    length = segment_ids.shape[1]
    index = jnp.arange(length, dtype=jnp.int32)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    last = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    start = lax.cummax(jnp.where(first, index, 0), axis=1)
    end = lax.cummin(jnp.where(last, index + 1, length), axis=1, reverse=True)
    real = segment_ids > 0
    return jnp.where(real, start, 0), jnp.where(real, end, 0)


def causal(segment_ids: Int[Array, "B S"]) -> Span:
    """Every token sees its document up to and including itself."""
    start, end = document(segment_ids)
    return start, jnp.minimum(end, jnp.arange(1, segment_ids.shape[1] + 1, dtype=jnp.int32))


def window(span: Span, size: int | Int[Array, ""]) -> Span:
    """Of what `span` lets it see, every token keeps itself, the `size - 1` tokens before it, and all after it.

    `size` may be traced, so that layers with different windows run in one scan; one as large as the row changes
    nothing. This narrows the spans of self-attention, where query i and key i are the same token.
    """
    start, end = span
    return jnp.minimum(end, jnp.maximum(start, jnp.arange(start.shape[1], dtype=jnp.int32) + 1 - size)), end
