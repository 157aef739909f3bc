"""Qwen3-VL, dense and with experts (arXiv 2511.21631): interleaved positions, deepstack, a run of tokens a frame."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flax import nnx

from models.qwen3 import Qwen3, Qwen3Config
from models.qwen3_moe import Qwen3Moe, Qwen3MoeConfig
from models.vision.patches import Grid
from models.vision.positions import each_frame
from models.vision.qwen3_vl import Qwen3VLVision, Qwen3VLVisionConfig
from models.vision_language import VisionLanguageConfig, VisionLanguageModel, part_names
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn.rope import MultimodalRope

ROPE_TYPES: dict[str, type] = {"default": MultimodalRope, "mrope": MultimodalRope}
ROPE = MultimodalRope((24, 20, 20), mrope_interleaved=True)


@dataclass(frozen=True)
class Qwen3VLTextConfig(Qwen3Config):
    """Qwen3's, with positions of three axes."""

    rope_theta: float = 5000000.0
    rope_scaling: MultimodalRope = field(default=ROPE)

    HF_TYPE: ClassVar[str] = "qwen3_vl_text"
    HF_CLASS: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    ROPE_TYPES: ClassVar[dict[str, type]] = ROPE_TYPES


@dataclass(frozen=True)
class Qwen3VLMoeTextConfig(Qwen3MoeConfig):
    """Qwen3-MoE's, with positions of three axes; the chosen experts' weights always sum to 1."""

    rope_theta: float = 5000000.0
    norm_topk_prob: bool = True
    rope_scaling: MultimodalRope = field(default=ROPE)

    HF_TYPE: ClassVar[str] = "qwen3_vl_moe_text"
    HF_CLASS: ClassVar[str] = "Qwen3VLMoeForConditionalGeneration"
    ROPE_TYPES: ClassVar[dict[str, type]] = ROPE_TYPES


@dataclass(frozen=True)
class Qwen3VLConfig(VisionLanguageConfig):
    """The whole model's."""

    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653

    HF_TYPE: ClassVar[str] = "qwen3_vl"
    HF_CLASS: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    TEXT: ClassVar[Any] = Qwen3VLTextConfig
    VISION: ClassVar[Any] = Qwen3VLVisionConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        check_levels(self)

    def clip_runs(self, grids: Sequence[Grid], seconds: Any = None) -> list[tuple[Grid, float]]:
        """A run for each frame, as the text of its moment stands before it."""
        return [(grid, 1.0) for grid in each_frame(grids)]

    def build(self, **options: Any) -> "Qwen3VL":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen3VL(self, **options)


@dataclass(frozen=True)
class Qwen3VLMoeConfig(Qwen3VLConfig):
    """The whole model's, with experts."""

    HF_TYPE: ClassVar[str] = "qwen3_vl_moe"
    HF_CLASS: ClassVar[str] = "Qwen3VLMoeForConditionalGeneration"
    TEXT: ClassVar[Any] = Qwen3VLMoeTextConfig

    def build(self, **options: Any) -> "Qwen3VLMoe":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return Qwen3VLMoe(self, **options)


def check_levels(config: Any) -> None:
    """Raises `UserError` where the tower has features for more layers than there are."""
    levels, layers = len(config.vision_config.deepstack_visual_indexes), config.text_config.num_hidden_layers
    if levels > layers:
        raise UserError(f"{type(config).__name__}: the tower has features for {levels} layers, the text model {layers}")


def own_stack(config: Any, splits: Sequence[int]) -> list[int]:
    """`splits`, and where the layers that the tower's features enter after end, so that they are a stack."""
    levels = len(config.vision_config.deepstack_visual_indexes)
    return sorted({levels} - {config.text_config.num_hidden_layers} | set(splits))


def _names(backbone: Names) -> Names:
    text = {"model.": "model.language_model."}
    return part_names(backbone, Qwen3VLVision.HF_NAMES, text=text, visual="model.visual.")


class Qwen3VL(VisionLanguageModel):
    """The tower's features enter after each of the backbone's first layers, which are a stack of their own."""

    Config = Qwen3VLConfig
    BACKBONE: ClassVar[Any] = Qwen3

    HF_NAMES: ClassVar[Names] = _names(Qwen3.HF_NAMES)

    def __init__(self, config: Qwen3VLConfig, *, rngs: nnx.Rngs, splits: Sequence[int] = (), **options: Any):
        super().__init__(config, self.BACKBONE, rngs=rngs, splits=own_stack(config, splits), **options)


class Qwen3VLMoe(Qwen3VL):
    """Published checkpoints have an array for the experts of a layer."""

    Config = Qwen3VLMoeConfig
    BACKBONE: ClassVar[Any] = Qwen3Moe

    HF_NAMES: ClassVar[Names] = _names(Qwen3Moe.HF_OTHER_NAMES[0])
    HF_OTHER_NAMES: ClassVar[tuple[Names, ...]] = (_names(Qwen3Moe.HF_NAMES),)
