"""What the configs of the audio towers share, and how they are read from a `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models import hf_config
from omnijax.errors import UserError
from omnijax.units import UnitShape


@dataclass(frozen=True)
class AudioConfig:
    """Fields are named as in the `audio_config` of a `config.json`."""

    num_mel_bins: int = 128
    encoder_layers: int = 32
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    d_model: int = 1280
    max_source_positions: int = 1500

    HF_TYPE: ClassVar[str]
    HF_FIXED: ClassVar[Mapping[str, Any]] = {"activation_function": "gelu"}
    tie_word_embeddings: ClassVar[bool] = False
    ELSEWHERE: ClassVar[frozenset[str]] = frozenset({"scale_embedding", "conv_chunksize"})
    """Keys that say nothing about a tower's weights or sums."""
    DROPOUT: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"}
    )

    def __post_init__(self) -> None:
        """Raises `UserError` where heads do not divide the width, or it has no halves for sine and cosine."""
        width, heads = self.d_model, self.encoder_attention_heads
        if width < 4 or width % 2 or width % heads:
            what = f"{type(self).__name__}.d_model = {width}"
            raise UserError(f"{what} must be even, at least 4 and a multiple of the {heads} heads")

    @property
    def out_width(self) -> int:
        """Width of the tower's tokens."""
        return getattr(self, "output_dim", self.d_model)

    @property
    def unit(self) -> UnitShape:
        """A chunk of frames."""
        values: Any = self
        return UnitShape((self.num_mel_bins, values.unit_frames))

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> Any:
        """Read an `audio_config`, alone or in a whole model's config.

        Raises `UserError` for another family's, and for what this one does not have.
        """
        for part in ("thinker_config", "audio_config"):
            values = values.get(part, values)
        kind = values.get("model_type", cls.HF_TYPE)
        if kind != cls.HF_TYPE:
            raise UserError(f"{name}: audio model_type {kind!r} is not {cls.HF_TYPE!r}")
        # Without dropout there is nothing to tell; with it, it is named as a key that is not known here.
        silent = {key for key in values if key in cls.ELSEWHERE or (key in cls.DROPOUT and not values[key])}
        values = {key: value for key, value in values.items() if key not in silent}
        return hf_config.read(cls, values, fixed=cls.HF_FIXED, name=name, rope_types={})

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of the tower alone."""
        return hf_config.write(self, fixed=self.HF_FIXED, rope_types={}, model_type=self.HF_TYPE)

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint is of another part of the model."""
        return "audio_tower." not in tensor
