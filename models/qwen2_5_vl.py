"""Qwen2.5-VL (arXiv 2502.13923): a tower with windows before Qwen2.5; clips are placed in time by the second."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax import nnx

from models.qwen2 import Qwen2, Qwen2Config
from models.vision.patches import Grid
from models.vision.qwen2_5_vl import Qwen2_5VLVision, Qwen2_5VLVisionConfig
from models.vision_language import VisionLanguageConfig, VisionLanguageModel, part_names
from omnijax.hf_layout import Names
from omnijax.nn.rope import MultimodalRope


@dataclass(frozen=True)
class Qwen2_5VLTextConfig(Qwen2Config):
    """Qwen2's, with positions of three axes."""

    rope_theta: float = 1000000.0
    rope_scaling: MultimodalRope = field(default=MultimodalRope((16, 24, 24)))

    HF_TYPE: ClassVar[str] = "qwen2_5_vl_text"
    HF_CLASS: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    ROPE_TYPES: ClassVar[dict[str, type]] = {"default": MultimodalRope, "mrope": MultimodalRope}


@dataclass(frozen=True)
class Qwen2_5VLConfig(VisionLanguageConfig):
    """The whole model's."""

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    HF_TYPE: ClassVar[str] = "qwen2_5_vl"
    HF_CLASS: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    TEXT: ClassVar[Any] = Qwen2_5VLTextConfig
    VISION: ClassVar[Any] = Qwen2_5VLVisionConfig

    def clip_runs(self, grids: Sequence[Grid], seconds: Any = None) -> list[tuple[Grid, float]]:
        """As the base class has it; time goes on by the second."""
        between = [1.0] * len(grids) if seconds is None else [float(each) for each in seconds]
        return [(grid, self.vision_config.tokens_per_second * s) for grid, s in zip(grids, between, strict=True)]

    def build(self, **options: Any) -> "Qwen2_5VL":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen2_5VL(self, **options)


class Qwen2_5VL(VisionLanguageModel):
    """Published checkpoints say `visual` and `model`; transformers 5 has both inside `model`."""

    Config = Qwen2_5VLConfig

    HF_NAMES: ClassVar[Names] = part_names(Qwen2.HF_NAMES, Qwen2_5VLVision.HF_NAMES, text={}, visual="visual.")
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (
        part_names(
            Qwen2.HF_NAMES,
            Qwen2_5VLVision.HF_NAMES,
            text={"model.": "model.language_model."},
            visual="model.visual.",
        ),
    )

    def __init__(self, config: Qwen2_5VLConfig, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(config, Qwen2, rngs=rngs, **options)
