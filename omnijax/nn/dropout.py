"""Dropout (Srivastava et al. 2014) whose choice is the same on every mesh and in every micro-batch.

It depends on the seed, the step, the number of the row in the global batch, the number of the place in the model, and
the place in the row: on nothing that says where, or with which other rows, it is computed.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from omnijax.sharding import constrain

# Not a part of jit's cache key, and need not be: it holds arrays of the step that is being traced.
_keys: contextvars.ContextVar[Array | None] = contextvars.ContextVar("keys", default=None)


def row_keys(seed: int, step: Int[Array, ""], rows: int) -> Key[Array, " B"]:
    """A key for each row of the global batch of a step."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, constrain(jnp.arange(rows), "batch"))


@contextlib.contextmanager
def use_keys(keys: Key[Array, " B"]) -> Iterator[None]:
    """Inside this context `dropout` drops; `keys` are those of the rows that are computed."""
    token = _keys.set(keys)
    try:
        yield
    finally:
        _keys.reset(token)


def dropout(x: Float[Array, "B *rest"], rate: float, number: Float[Array, ""]) -> Float[Array, "B *rest"]:
    """`x` with a share `rate` of its elements 0, and the others larger for it; outside of `use_keys`, `x` as it is.

    `number` tells this place in the model from all others.
    """
    keys = _keys.get()
    if keys is None:
        return x
    if len(keys) != len(x):
        raise ValueError(f"dropout: {len(keys)} keys of rows for {len(x)} rows")

    def kept(key: Key[Array, ""]) -> Array:
        return jax.random.bernoulli(jax.random.fold_in(key, number.astype(jnp.int32)), 1 - rate, x.shape[1:])

    return jnp.where(jax.vmap(kept)(keys), x / (1 - rate), 0)
