"""Rotary position embedding (Su et al. 2021, sec. 3.2.2), in the rotate-half layout of Llama and its kin.

Phases, cosines and sines are float32 whatever the model computes in: a bf16 phase is wrong by whole turns at 4,096.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

Rotation = tuple[Float32[Array, "B S half"], Float32[Array, "B S half"]]
"""Cosine and sine of every token's phases."""


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches its context (The Llama 3 Herd of Models, arXiv 2407.21783, sec. 3.4.2, and its code).

    Pairs that turn more than `high_freq_factor` times over the original context keep their frequency, those that turn
    fewer than `low_freq_factor` times are slowed by `factor`; in between the two are mixed linearly.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Llama3Scaling | None = None
) -> Float32[np.ndarray, " half"]:
    """Radians per position of each pair of channels: `theta ** (-2 i / head_dim)`, then scaled."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


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
