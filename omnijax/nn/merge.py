"""Where encoded media meet text."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from omnijax.sharding import constrain


def merge(x: Float[Array, "B S E"], features: Float[Array, "B M E"], slots: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """The embeddings of a row, with feature `slots[b, s]` of its own row at token s; -1 leaves the token as it is.

    A gather, so every token says what stands there, and none can be off by one because another is missing. A feature
    that no token asks for has a gradient of 0.
    """
    return jnp.where((slots >= 0)[..., None], _gathered(features, slots).astype(x.dtype), x)


def add(x: Float[Array, "B S E"], features: Float[Array, "B M E"], slots: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    """As `merge`, but the feature is added to what stands there."""
    return x + jnp.where((slots >= 0)[..., None], _gathered(features, slots).astype(x.dtype), 0)


def _gathered(features: Float[Array, "B M E"], slots: Int[Array, "B S"]) -> Float[Array, "B S E"]:
    # Whole on every device that has some of the row: its tokens and its media are split at other places.
    features = constrain(features, "batch", "attention_length", None)
    found = jnp.take_along_axis(features, jnp.maximum(slots, 0)[..., None], axis=1)
    return constrain(found, "batch", "length", "act_embed")
