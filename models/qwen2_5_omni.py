"""The thinker of Qwen2.5-Omni (arXiv 2503.20215): Qwen2.5-VL's tower and one for sound before Qwen2.5."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax import nnx

from models.audio.qwen2_5_omni import Qwen2_5OmniAudio, Qwen2_5OmniAudioConfig
from models.qwen2 import Qwen2, Qwen2Config
from models.thinker import Thinker, ThinkerConfig, layouts
from models.thinker_positions import Timing
from models.vision.qwen2_5_vl import Qwen2_5VLVision, Qwen2_5VLVisionConfig
from omnijax.errors import UserError
from omnijax.hf_layout import Names, Part
from omnijax.nn.rope import MultimodalRope


@dataclass(frozen=True)
class Qwen2_5OmniTextConfig(Qwen2Config):
    """Qwen2's, with positions of three axes."""

    vocab_size: int = 152064
    hidden_size: int = 3584
    intermediate_size: int = 18944
    num_hidden_layers: int = 28
    num_attention_heads: int = 28
    num_key_value_heads: int = 4
    rope_theta: float = 1000000.0
    rope_scaling: MultimodalRope = field(default=MultimodalRope((16, 24, 24)))

    HF_TYPE: ClassVar[str] = "qwen2_5_omni_text"
    HF_CLASS: ClassVar[str] = "Qwen2_5OmniThinkerForConditionalGeneration"
    ROPE_TYPES: ClassVar[dict[str, type]] = {"default": MultimodalRope, "mrope": MultimodalRope}


@dataclass(frozen=True)
class Qwen2_5OmniVisionConfig(Qwen2_5VLVisionConfig):
    """That of Qwen2.5-VL's tower."""

    HF_TYPES: ClassVar[tuple[str, ...]] = ("qwen2_5_omni_vision_encoder",)

    def build(self, **options: Any) -> "Qwen2_5OmniVision":
        """The tower with fresh float32 parameters."""
        return Qwen2_5OmniVision(self, **options)


def _vision_names() -> Names:
    joined = {name: path for name, path in Qwen2_5VLVision.HF_NAMES.items() if ".attn.qkv." not in name}
    return joined | {
        f"visual.blocks.{{layer}}.attn.{name}.{theirs}": Part(f"layers.attn.qkv.{ours}", index)
        for index, name in enumerate("qkv")
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    }


class Qwen2_5OmniVision(Qwen2_5VLVision):
    """Qwen2.5-VL's tower; checkpoints have its queries, keys and values apart."""

    Config = Qwen2_5OmniVisionConfig

    HF_NAMES: ClassVar[Names] = _vision_names()
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = ({f"thinker.{name}": path for name, path in HF_NAMES.items()},)


@dataclass(frozen=True)
class Qwen2_5OmniConfig(ThinkerConfig):
    """The thinker's."""

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    audio_config: Qwen2_5OmniAudioConfig = field(default_factory=Qwen2_5OmniAudioConfig)
    audio_token_id: int = 151646
    audio_start_token_id: int = 151647
    audio_end_token_id: int = 151648
    position_id_per_seconds: int = 25
    seconds_per_chunk: int = 2

    HF_TYPE: ClassVar[str] = "qwen2_5_omni_thinker"
    HF_WHOLE_TYPE: ClassVar[str] = "qwen2_5_omni"
    HF_CLASS: ClassVar[str] = "Qwen2_5OmniThinkerForConditionalGeneration"
    HF_ALIASES: ClassVar[dict[str, str]] = {
        f"{kind}_token_index": f"{kind}_token_id" for kind in ("image", "video", "audio")
    }
    TEXT: ClassVar[Any] = Qwen2_5OmniTextConfig
    VISION: ClassVar[Any] = Qwen2_5OmniVisionConfig
    AUDIO: ClassVar[Any] = Qwen2_5OmniAudioConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds_per_chunk < 1:
            raise UserError("Qwen2_5OmniConfig.seconds_per_chunk must be positive")

    @property
    def timing(self) -> Timing:
        return Timing(self.position_id_per_seconds, chunk=self.position_id_per_seconds * self.seconds_per_chunk)

    def build(self, **options: Any) -> "Qwen2_5Omni":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen2_5Omni(self, **options)


class Qwen2_5Omni(Thinker):
    """Published checkpoints are of the whole model; of these the thinker is read."""

    Config = Qwen2_5OmniConfig

    HF_NAMES, *_others = layouts(Qwen2.HF_NAMES, Qwen2.HF_NAMES, Qwen2_5OmniVision.HF_NAMES, Qwen2_5OmniAudio.HF_NAMES)
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = tuple(_others)

    def __init__(self, config: Qwen2_5OmniConfig, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, Qwen2, rngs=rngs, **options)
