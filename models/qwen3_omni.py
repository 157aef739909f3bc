"""The thinker of Qwen3-Omni (arXiv 2509.17765): Qwen3-VL's tower and one for sound before Qwen3 with experts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax import nnx

from models.audio.qwen3_omni import Qwen3OmniAudio, Qwen3OmniAudioConfig
from models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from models.qwen3_vl import ROPE, ROPE_TYPES, check_levels, own_stack
from models.thinker import Thinker, ThinkerConfig, layouts
from models.vision.qwen3_vl import Qwen3VLVision, Qwen3VLVisionConfig
from omnijax.hf_layout import Names
from omnijax.nn.rope import MultimodalRope


@dataclass(frozen=True)
class Qwen3OmniTextConfig(Qwen3MoeConfig):
    """Qwen3-MoE's, with positions of three axes."""

    rope_theta: float = 1000000.0
    norm_topk_prob: bool = True
    rope_scaling: MultimodalRope = field(default=ROPE)

    HF_TYPE: ClassVar[str] = "qwen3_omni_moe_text"
    HF_CLASS: ClassVar[str] = "Qwen3OmniMoeThinkerForConditionalGeneration"
    ROPE_TYPES: ClassVar[dict[str, type]] = ROPE_TYPES


@dataclass(frozen=True)
class Qwen3OmniVisionConfig(Qwen3VLVisionConfig):
    """Qwen3-VL's tower."""

    HF_TYPES: ClassVar[tuple[str, ...]] = ("qwen3_omni_moe_vision_encoder",)


@dataclass(frozen=True)
class Qwen3OmniConfig(ThinkerConfig):
    """The thinker's."""

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    audio_config: Qwen3OmniAudioConfig = field(default_factory=Qwen3OmniAudioConfig)
    audio_token_id: int = 151646
    audio_start_token_id: int = 151647
    audio_end_token_id: int = 151648
    position_id_per_seconds: int = 25

    HF_TYPE: ClassVar[str] = "qwen3_omni_moe_thinker"
    HF_WHOLE_TYPE: ClassVar[str] = "qwen3_omni_moe"
    HF_CLASS: ClassVar[str] = "Qwen3OmniMoeThinkerForConditionalGeneration"
    TEXT: ClassVar[Any] = Qwen3OmniTextConfig
    VISION: ClassVar[Any] = Qwen3OmniVisionConfig
    AUDIO: ClassVar[Any] = Qwen3OmniAudioConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self)

    def build(self, **options: Any) -> "Qwen3Omni":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen3Omni(self, **options)


class Qwen3Omni(Thinker):
    """Published checkpoints are of the whole model; of these the thinker is read."""

    Config = Qwen3OmniConfig

    HF_NAMES, *_others = layouts(
        Qwen3Moe.HF_NAMES, Qwen3Moe.HF_OTHER_NAMES[0], Qwen3VLVision.HF_OTHER_NAMES[0], Qwen3OmniAudio.HF_NAMES
    )
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = tuple(_others)

    def __init__(self, config: Qwen3OmniConfig, *, rngs: nnx.Rngs, splits: Sequence[int] = (), **options: Any):
        super().__init__(config, Qwen3Moe, rngs=rngs, splits=own_stack(config, splits), **options)
