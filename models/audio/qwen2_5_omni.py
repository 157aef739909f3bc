"""The audio tower of Qwen2.5-Omni (Technical Report, arXiv 2503.20215, sec. 2.2): chunks of 2 s, each on its own."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.audio.config import AudioConfig
from models.audio.layers import (
    EPS,
    Convolution,
    encode,
    encoder_stack,
    inside,
    joined,
    layer_names,
    named,
    sinusoids,
    unit_axes,
    unit_spans,
    zero_padding,
)
from models.audio.mel import halved, qwen2_5_omni_tokens
from omnijax.batch import Media
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn.norms import LayerNorm
from omnijax.nn.projections import Linear, param
from omnijax.nn.remat import Remat
from omnijax.sharding import constrain


@dataclass(frozen=True)
class Qwen2_5OmniAudioConfig(AudioConfig):
    """A chunk has `2 * n_window` frames; `output_dim` is the width of the tokens."""

    n_window: int = 100
    output_dim: int = 3584
    initializer_range: float = 0.02

    HF_TYPE: ClassVar[str] = "qwen2_5_omni_audio_encoder"

    def __post_init__(self) -> None:
        super().__post_init__()
        # With an odd one, transformers pools across the edge of two chunks.
        if self.n_window % 2 or not 2 <= self.n_window <= self.max_source_positions:
            raise UserError(
                f"Qwen2_5OmniAudioConfig.n_window = {self.n_window} must be even, and from 2 to "
                f"max_source_positions = {self.max_source_positions}"
            )

    @property
    def unit_frames(self) -> int:
        """Frames of a chunk."""
        return 2 * self.n_window

    @property
    def unit_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.n_window // 2

    def tokens(self, frames: int) -> int:
        """Tokens of a clip."""
        return qwen2_5_omni_tokens(frames)

    def build(self, **options: Any) -> "Qwen2_5OmniAudio":
        """The tower with fresh float32 parameters."""
        return Qwen2_5OmniAudio(self, **options)


def _hf_names(prefix: str) -> Names:
    return {
        f"{prefix}audio_bos_eos_token.weight": "audio_bos_eos_token",
        **named(prefix, ("conv1", "conv2", "proj"), "kernel"),
        **layer_names(prefix),
        **named(prefix, ("ln_post",), "scale"),
    }


class Qwen2_5OmniAudio(nnx.Module):
    """Log-mel frames of chunks to one token for each four frames."""

    Config = Qwen2_5OmniAudioConfig

    HF_NAMES: ClassVar[Names] = _hf_names("audio_tower.")
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (_hf_names("thinker.audio_tower."),)

    def __init__(self, config: Qwen2_5OmniAudioConfig, *, rngs: nnx.Rngs, remat: Remat = "none"):
        c, width, std = config, config.d_model, config.initializer_range
        out = ("embed", c.output_dim)
        self.config = c
        self.conv1 = Convolution(c.num_mel_bins, width, 1, stride=1, std=std, rngs=rngs)
        self.conv2 = Convolution(width, width, 1, stride=2, std=std, rngs=rngs)
        self.stacks = nnx.List([encoder_stack(c, k_bias=False, std=std, remat=remat, rngs=rngs)])
        self.ln_post = LayerNorm("embed", width, eps=EPS, rngs=rngs)
        self.proj = Linear(((None, width),), (out,), std=std, bias=True, rngs=rngs)
        # Checkpoints have it, and nothing reads it.
        self.audio_bos_eos_token = param(rngs, nnx.initializers.normal(std), ((None, 2), out))

    def __call__(self, media: Media) -> Float[Array, "B M out"]:
        """`n_window / 2` tokens a unit; units are chunks `[num_mel_bins, 2 * n_window]` of `unit_valid` frames.

        The first `halved(unit_valid) // 2` tokens of a unit are those of its frames.
        """
        c, valid = self.config, media.unit_valid
        x = constrain(media.features, *unit_axes(4)).swapaxes(2, 3)
        x = zero_padding(self.conv1(zero_padding(x, valid)), valid)
        x = self.conv2(x)
        x = joined(x + jnp.asarray(sinusoids(c.n_window, c.d_model), x.dtype))
        real = media.unit_segments > 0
        span = unit_spans(real, inside(halved(valid), c.n_window) & real[..., None])
        x = encode(self.stacks[0], x, span)
        x = x.reshape(x.shape[0], -1, 2, x.shape[-1]).mean(axis=2)
        return constrain(self.proj(self.ln_post(x)), "batch", "length", "act_embed")
