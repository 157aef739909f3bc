"""Rotary position embedding (Su et al. 2021, sec. 3.2.2), in the rotate-half layout of Llama and its kin.

Phases, cosines and sines are float32 whatever the model computes in: a bf16 phase is wrong by whole turns at 4,096.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Num

from omnijax.errors import UserError

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

    def kept(self, frequencies: Float64[np.ndarray, " half"], theta: float) -> Float64[np.ndarray, " half"]:
        """The share of each pair's own frequency in the mix."""
        turns = self.original_max_position_embeddings * frequencies / (2 * np.pi)
        return np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)


@dataclass(frozen=True)
class YarnScaling:
    """How YaRN stretches a context (Peng et al. 2023, arXiv 2309.00071, sec. 3.2 and 3.4, and its code).

    Pairs that turn more than `beta_fast` times over the original context keep their frequency, those that turn fewer
    than `beta_slow` times are slowed by `factor`; in between the two are mixed linearly in the index of the pair.
    `truncate` widens the range of mixed pairs to whole indices.

    Cosines and sines are multiplied by `attention_factor`. Where it is None, that is the paper's 0.1 ln(factor) + 1
    or, if both are given, `magnitude` of `mscale` over that of `mscale_all_dim`, as in DeepSeek's code.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position_embeddings < 1 or not 0 < self.beta_slow < self.beta_fast:
            raise UserError(f"{self}: needs factor >= 1, a positive original context, and 0 < beta_slow < beta_fast")

    @property
    def context(self) -> int:
        """Tokens of the stretched context."""
        return round(self.factor * self.original_max_position_embeddings)

    def kept(self, frequencies: Float64[np.ndarray, " half"], theta: float) -> Float64[np.ndarray, " half"]:
        """The share of each pair's own frequency in the mix."""
        half, context = len(frequencies), self.original_max_position_embeddings
        # Pair i turns context / (2 pi) * theta ** (-i / half) times; the pairs that turn so often:
        first, last = (
            half * math.log(context / (2 * np.pi * turns)) / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        return 1 - np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)


Scaling = Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class MultimodalRope:
    """Which pairs of channels turn by time, by height and by width (Qwen2-VL, arXiv 2409.12191, sec. 2.1).

    `mrope_section` counts the pairs of each. They stand in three runs or, interleaved, in turns for as long as height
    and width have any left (Qwen3-VL, arXiv 2511.21631, sec. 2).
    """

    mrope_section: tuple[int, ...]
    mrope_interleaved: bool | None = None

    def axes(self, half: int) -> tuple[int, ...]:
        """The axis of each of `half` pairs: 0 time, 1 height, 2 width. Raises `UserError` if sections do not fit."""
        if len(self.mrope_section) != 3 or sum(self.mrope_section) != half or min(self.mrope_section) < 0:
            raise UserError(f"mrope_section {self.mrope_section} must be three counts that sum to {half} pairs")
        if not self.mrope_interleaved:
            return tuple(axis for axis, count in enumerate(self.mrope_section) for _ in range(count))
        return tuple(pair % 3 if pair < 3 * self.mrope_section[pair % 3] else 0 for pair in range(half))


def inverse_frequencies(head_dim: int, theta: float, scaling: Scaling | None = None) -> Float32[np.ndarray, " half"]:
    """Radians per position of each pair of channels: `theta ** (-2 i / head_dim)`, then scaled."""
    frequencies = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        kept = scaling.kept(frequencies, theta)
        frequencies = kept * frequencies + (1 - kept) * frequencies / scaling.factor
    return frequencies.astype(np.float32)


def magnitude(factor: float, weight: float = 1.0) -> float:
    """How much longer queries and keys should be in a context `factor` times as long (YaRN, eq. 22, for weight 1)."""
    return 0.1 * weight * math.log(factor) + 1.0


def attention_factor(scaling: Scaling | None) -> float:
    """What cosines and sines are multiplied by."""
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.factor, scaling.mscale) / magnitude(scaling.factor, scaling.mscale_all_dim)
    return magnitude(scaling.factor)


def rotation(
    positions: Num[Array, "B S *axes"],
    frequencies: Float32[np.ndarray, " half"],
    attention_factor: float = 1.0,
    axes: Sequence[int] | None = None,
) -> Rotation:
    """Cosine and sine tables of `positions`, each times `attention_factor`.

    Where positions are (time, height, width), `axes` says which of them each pair of channels turns by. Raises
    `UserError` for such positions without `axes`.
    """
    if positions.ndim == 2:
        positions = positions[..., None]
    elif axes is None:
        raise UserError(f"positions {positions.shape} have several axes, and this model turns by one: give [B, S]")
    else:
        positions = positions[..., np.asarray(axes)]
    phase = positions.astype(jnp.float32) * frequencies
    return jnp.cos(phase) * attention_factor, jnp.sin(phase) * attention_factor


def rotate(x: Float[Array, "B S H D"], by: Rotation) -> Float[Array, "B S H D"]:
    """Turn channel pairs (i, i + D/2) of `x` by the tables of `rotation`; the result has the dtype of `x`."""
    cos, sin = (table[:, :, None, :] for table in by)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def deinterleave(x: Float[Array, "B S H D"]) -> Float[Array, "B S H D"]:
    """Even channels, then odd ones: brings the pairs (2 i, 2 i + 1) where `rotate` looks for pairs.

    As queries and keys are reordered alike, their products stay what they are.
    """
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
