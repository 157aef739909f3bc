"""The audio tower of Qwen3-Omni (Technical Report, arXiv 2509.17765, sec. 2.2): chunks of 1 s, windows of chunks."""

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
    exact_gelu,
    inside,
    joined,
    layer_names,
    named,
    sinusoids,
    unit_axes,
    unit_spans,
    zero_padding,
)
from models.audio.mel import QWEN3_CHUNK, QWEN3_TOKENS, halved, qwen3_omni_tokens
from omnijax.batch import Media
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn.norms import LayerNorm
from omnijax.nn.projections import Linear
from omnijax.nn.remat import Remat
from omnijax.sharding import constrain


@dataclass(frozen=True)
class Qwen3OmniAudioConfig(AudioConfig):
    """A window of attention has `n_window_infer` frames; `output_dim` is the width of the tokens."""

    n_window_infer: int = 800
    output_dim: int = 3584
    downsample_hidden_size: int = 480
    initializer_range: float = 0.02

    HF_TYPE: ClassVar[str] = "qwen3_omni_moe_audio_encoder"
    # With another one, transformers counts 13 tokens a chunk all the same.
    HF_FIXED: ClassVar[dict[str, Any]] = {**AudioConfig.HF_FIXED, "n_window": QWEN3_CHUNK // 2}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_window_infer < QWEN3_CHUNK:
            raise UserError(
                f"Qwen3OmniAudioConfig.n_window_infer = {self.n_window_infer} must be at least {QWEN3_CHUNK}, the "
                "frames of a chunk"
            )
        if self.max_source_positions < QWEN3_TOKENS:
            raise UserError(
                f"Qwen3OmniAudioConfig.max_source_positions = {self.max_source_positions} must be at least the "
                f"{QWEN3_TOKENS} tokens of a chunk"
            )

    @property
    def chunks(self) -> int:
        """Chunks in a window."""
        return self.n_window_infer // QWEN3_CHUNK

    @property
    def unit_frames(self) -> int:
        """Frames of a chunk."""
        return QWEN3_CHUNK

    @property
    def unit_tokens(self) -> int:
        """Tokens of a chunk."""
        return QWEN3_TOKENS

    def tokens(self, frames: int) -> int:
        """Tokens of a clip."""
        return qwen3_omni_tokens(frames)

    def build(self, **options: Any) -> "Qwen3OmniAudio":
        """The tower with fresh float32 parameters."""
        return Qwen3OmniAudio(self, **options)


def _hf_names(prefix: str) -> Names:
    return {
        **named(prefix, ("conv2d1", "conv2d2", "conv2d3", "conv_out", "proj1", "proj2"), "kernel"),
        **layer_names(prefix),
        **named(prefix, ("ln_post",), "scale"),
    }


class Qwen3OmniAudio(nnx.Module):
    """Log-mel frames of chunks to 13 tokens a chunk."""

    Config = Qwen3OmniAudioConfig

    HF_NAMES: ClassVar[Names] = _hf_names("audio_tower.")
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (_hf_names("thinker.audio_tower."),)

    def __init__(self, config: Qwen3OmniAudioConfig, *, rngs: nnx.Rngs, remat: Remat = "none"):
        c, width, std = config, config.d_model, config.initializer_range
        hidden, inner, embed = c.downsample_hidden_size, (None, width), ("embed", width)
        self.config = c
        self.conv2d1 = Convolution(1, hidden, 2, stride=2, std=std, rngs=rngs)
        self.conv2d2 = Convolution(hidden, hidden, 2, stride=2, std=std, rngs=rngs)
        self.conv2d3 = Convolution(hidden, hidden, 2, stride=2, std=std, rngs=rngs)
        bands = halved(halved(halved(c.num_mel_bins)))
        self.conv_out = Linear(((None, hidden), (None, bands)), (embed,), std=std, rngs=rngs)
        self.stacks = nnx.List([encoder_stack(c, k_bias=True, std=std, remat=remat, rngs=rngs)])
        self.ln_post = LayerNorm("embed", width, eps=EPS, rngs=rngs)
        self.proj1 = Linear((inner,), (embed,), std=std, bias=True, rngs=rngs)
        self.proj2 = Linear((inner,), (("embed", c.output_dim),), std=std, bias=True, rngs=rngs)

    def __call__(self, media: Media) -> Float[Array, "B M out"]:
        """13 tokens a unit; units are chunks `[num_mel_bins, 100]`, and `unit_positions` their places in the clip.

        The first `halved(halved(halved(unit_valid)))` tokens of a unit are those of its frames.

        The frames behind these are zero, but what the convolutions make of them (of zeros, something) is not set to
        zero again, as in transformers, which fills every chunk up to the longest of its batch. So tokens are equal to
        those of any batch that has one whole chunk, as a clip of at least 1 s has. In batches of shorter clips alone,
        transformers' last tokens depend on which other clips there are; here they never do.
        """
        c, valid, real = self.config, media.unit_valid, media.unit_segments > 0
        x = zero_padding(constrain(media.features, *unit_axes(4)).swapaxes(2, 3), valid)
        # [B, N, bins, frames, channels]; checkpoints join channels and bins.
        x = self.conv2d3(self.conv2d2(self.conv2d1(x.swapaxes(2, 3)[..., None])))
        x = self.conv_out(x.transpose(0, 1, 3, 4, 2))
        x = joined(x + jnp.asarray(sinusoids(QWEN3_TOKENS, c.d_model), x.dtype))
        tokens = inside(halved(halved(halved(valid))), QWEN3_TOKENS) & real[..., None]
        x = encode(self.stacks[0], x, unit_spans(media.unit_positions % c.chunks == 0, tokens))
        x = constrain(exact_gelu(self.proj1(self.ln_post(x))), "batch", "length", "act_embed")
        return constrain(self.proj2(x), "batch", "length", "act_embed")
