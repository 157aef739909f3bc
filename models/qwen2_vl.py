"""Qwen2-VL (arXiv 2409.12191): pictures and clips of any resolution before Qwen2."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax import nnx

from models.qwen2 import Qwen2, Qwen2Config
from models.vision.qwen2_vl import Qwen2VLVision, Qwen2VLVisionConfig
from models.vision_language import VisionLanguageConfig, VisionLanguageModel, part_names
from omnijax.hf_layout import Names
from omnijax.nn.rope import MultimodalRope


@dataclass(frozen=True)
class Qwen2VLTextConfig(Qwen2Config):
    """Qwen2's, with positions of three axes."""

    rope_theta: float = 1000000.0
    rope_scaling: MultimodalRope = field(default=MultimodalRope((16, 24, 24)))

    HF_TYPE: ClassVar[str] = "qwen2_vl_text"
    HF_CLASS: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    ROPE_TYPES: ClassVar[dict[str, type]] = {"default": MultimodalRope, "mrope": MultimodalRope}


@dataclass(frozen=True)
class Qwen2VLConfig(VisionLanguageConfig):
    """The whole model's."""

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    HF_TYPE: ClassVar[str] = "qwen2_vl"
    HF_CLASS: ClassVar[str] = "Qwen2VLForConditionalGeneration"
    TEXT: ClassVar[Any] = Qwen2VLTextConfig
    VISION: ClassVar[Any] = Qwen2VLVisionConfig

    def build(self, **options: Any) -> "Qwen2VL":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen2VL(self, **options)


class Qwen2VL(VisionLanguageModel):
    """Published checkpoints say `visual` and `model`; transformers 5 has both inside `model`."""

    Config = Qwen2VLConfig

    HF_NAMES: ClassVar[Names] = part_names(Qwen2.HF_NAMES, Qwen2VLVision.HF_NAMES, text={}, visual="visual.")
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (
        part_names(
            Qwen2.HF_NAMES,
            Qwen2VLVision.HF_NAMES,
            text={"model.": "model.language_model."},
            visual="model.visual.",
        ),
    )

    def __init__(self, config: Qwen2VLConfig, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, Qwen2, rngs=rngs, **options)
