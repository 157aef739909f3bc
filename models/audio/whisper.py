"""The encoder of Whisper (Radford et al. 2022, arXiv 2212.04356, sec. 2.2): windows of 30 s, each on its own."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.audio.config import AudioConfig
from models.audio.layers import (
    EPS,
    Convolution,
    encode,
    encoder_stack,
    joined,
    layer_names,
    named,
    sinusoids,
    unit_axes,
    unit_spans,
)
from models.audio.mel import whisper_tokens
from omnijax.batch import Media
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn.norms import LayerNorm
from omnijax.nn.projections import param
from omnijax.nn.remat import Remat
from omnijax.sharding import constrain


@dataclass(frozen=True)
class WhisperConfig(AudioConfig):
    """The encoder's part of a Whisper `config.json`; a window has `2 * max_source_positions` frames."""

    num_mel_bins: int = 80
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1536
    d_model: int = 384
    init_std: float = 0.02

    HF_TYPE: ClassVar[str] = "whisper"
    ELSEWHERE: ClassVar[frozenset[str]] = AudioConfig.ELSEWHERE | {
        "apply_spec_augment",
        "begin_suppress_tokens",
        "classifier_proj_size",
        "decoder_attention_heads",
        "decoder_ffn_dim",
        "decoder_layerdrop",
        "decoder_layers",
        "decoder_start_token_id",
        "forced_decoder_ids",
        "is_encoder_decoder",
        "mask_feature_length",
        "mask_feature_min_masks",
        "mask_feature_prob",
        "mask_time_length",
        "mask_time_min_masks",
        "mask_time_prob",
        "max_length",
        "max_target_positions",
        "median_filter_width",
        "num_hidden_layers",
        "suppress_tokens",
        "tie_word_embeddings",
        "use_weighted_layer_sum",
        "vocab_size",
    }

    @property
    def unit_frames(self) -> int:
        """Frames of a window."""
        return 2 * self.max_source_positions

    @property
    def unit_tokens(self) -> int:
        """Features of a window."""
        return self.max_source_positions

    def tokens(self, frames: int) -> int:
        """Features of a clip, without those of the silence behind it."""
        return whisper_tokens(frames)

    def build(self, **options: Any) -> "WhisperEncoder":
        """The tower with fresh float32 parameters."""
        return WhisperEncoder(self, **options)

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint is of another part of the model."""
        return "encoder." not in tensor


def _hf_names(prefix: str) -> Names:
    return {
        f"{prefix}embed_positions.weight": "embed_positions",
        **named(prefix, ("conv1", "conv2"), "kernel"),
        **layer_names(prefix),
        **named(prefix, ("layer_norm",), "scale"),
    }


class WhisperEncoder(nnx.Module):
    """Log-mel frames of windows to one feature for each two frames."""

    Config = WhisperConfig

    HF_NAMES: ClassVar[Names] = _hf_names("model.encoder.")
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (_hf_names("encoder."),)

    def __init__(self, config: WhisperConfig, *, rngs: nnx.Rngs, remat: Remat = "none"):
        c, width, std = config, config.d_model, config.init_std
        self.config = c
        self.conv1 = Convolution(c.num_mel_bins, width, 1, stride=1, std=std, rngs=rngs)
        self.conv2 = Convolution(width, width, 1, stride=2, std=std, rngs=rngs)

        def positions(key: Array, shape: tuple[int, int], dtype: Any) -> Array:
            return jnp.asarray(sinusoids(*shape), dtype)

        self.embed_positions = param(rngs, positions, ((None, c.max_source_positions), ("embed", width)))
        self.stacks = nnx.List([encoder_stack(c, k_bias=False, std=std, remat=remat, rngs=rngs)])
        self.layer_norm = LayerNorm("embed", width, eps=EPS, rngs=rngs)

    def __call__(self, media: Media) -> Float[Array, "B M E"]:
        """`max_source_positions` features a unit; units are windows `[num_mel_bins, 2 * max_source_positions]`.

        A window is heard whole, as Whisper was trained: the silence behind its `unit_valid` frames is part of it.
        """
        size = self.config.max_source_positions
        if media.features.shape[-1] != 2 * size:
            raise UserError(
                f"WhisperEncoder: units of {media.features.shape[-1]} frames must have {2 * size}, twice "
                f"max_source_positions; fill the window with silence"
            )
        x = constrain(media.features, *unit_axes(4)).swapaxes(2, 3)
        # Checkpoints have this table, but it is never trained: it began as sinusoids, and stays what it was.
        positions = jax.lax.stop_gradient(self.embed_positions[...])
        x = joined(self.conv2(self.conv1(x)) + positions)
        real = media.unit_segments > 0
        span = unit_spans(real, jnp.broadcast_to(real[..., None], (*real.shape, size)))
        return self.layer_norm(encode(self.stacks[0], x, span))
