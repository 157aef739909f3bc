"""Rotary position embedding (Su et al. 2021, sec. 3.2.2), in the rotate-half layout of Llama and its kin.

Phases, cosines and sines are float32 whatever the model computes in: a bf16 phase is wrong by whole turns at 4,096.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

Rotation = tuple[Float32[Array, "B S half"], Float32[Array, "B S half"]]
"""Cosine and sine of every token's phases."""


def inverse_frequencies(head_dim: int, theta: float) -> Float32[np.ndarray, " half"]:
    """Radians per position of each pair of channels: `theta ** (-2 i / head_dim)`."""
    return (1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)


def rotation(positions: Int[Array, "B S"], frequencies: Float32[np.ndarray, " half"]) -> Rotation:
    """Cosine and sine tables of `positions`."""
    phase = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(phase), jnp.sin(phase)


def rotate(x: Float[Array, "B S H D"], by: Rotation) -> Float[Array, "B S H D"]:
    """Turn channel pairs (i, i + D/2) of `x` by the tables of `rotation`; the result has the dtype of `x`."""
    cos, sin = (table[:, :, None, :] for table in by)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
