"""What the thinkers of Qwen's omni families share: a text model that reads pictures, clips and sounds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from models import thinker_inputs
from models.omni import OmniModel
from models.thinker_positions import AUDIO, IMAGE, VIDEO, Timing
from models.vision_language import VisionLanguageConfig, part_names
from omnijax.errors import UserError
from omnijax.hf_layout import Names, within
from omnijax.nn.remat import Remat
from omnijax.units import UnitShape


@dataclass(frozen=True)
class ThinkerConfig(VisionLanguageConfig):
    """A text model and two towers, named as in a `config.json`; subclasses say of which families they are."""

    audio_config: Any
    audio_token_id: int
    audio_start_token_id: int
    audio_end_token_id: int
    position_id_per_seconds: int

    HF_WHOLE_TYPE: ClassVar[str]
    """`model_type` of a checkpoint that has a part that speaks, too."""
    AUDIO: ClassVar[Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_width("audio tower", self.audio_config.out_width)
        if self.position_id_per_seconds < 1:
            raise UserError(f"{type(self).__name__}.position_id_per_seconds must be positive")

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> Any:
        """Read a `config.json` of a thinker, or of a whole model, of which the thinker is read."""
        if values.get("model_type") == cls.HF_WHOLE_TYPE:
            if not isinstance(values.get("thinker_config"), Mapping):
                raise UserError(f"{name}: has no thinker_config, which a {cls.HF_WHOLE_TYPE} needs")
            values = {**values["thinker_config"], "model_type": cls.HF_TYPE}
        return super().from_hf(values, name)

    @classmethod
    def towers(cls) -> dict[str, Any]:
        return {"vision_config": cls.VISION, "audio_config": cls.AUDIO}

    def leaves_out(self, tensor: str) -> bool:
        return tensor.startswith(("talker.", "token2wav.", "code2wav."))

    @property
    def timing(self) -> Timing:
        """How clips and their sound are placed in time."""
        return Timing(self.position_id_per_seconds)

    @property
    def units(self) -> dict[str, UnitShape]:
        return {"image": self.vision_config.unit, "audio": self.audio_config.unit}

    def placeholders(self) -> dict[int, int]:
        """The token that stands for each kind of medium."""
        return {IMAGE: self.image_token_id, VIDEO: self.video_token_id, AUDIO: self.audio_token_id}


class Thinker(OmniModel):
    """Towers for pictures and for sounds before a language model whose positions have three axes."""

    MEDIA_INPUTS: ClassVar[tuple[str, ...]] = thinker_inputs.MEDIA_INPUTS

    def __init__(self, config: Any, backbone: Any, *, rngs: nnx.Rngs, remat: Remat = "none", **options: Any):
        text = config.text_config
        options["rope_axes"] = text.rope_scaling.axes(text.head_dim // 2)
        towers = {"image": config.vision_config, "audio": config.audio_config}
        encoders = {name: tower.build(rngs=rngs, remat=remat) for name, tower in towers.items()}
        super().__init__(config, encoders=encoders, backbone=backbone(text, rngs=rngs, remat=remat, **options))

    def read_media(self, inputs: Mapping[str, Any], tokens: Any, segments: Any) -> tuple[Any, Any, Any]:
        """Positions, media and slots of a transformers processor's arrays; see `models.thinker_inputs`."""
        return thinker_inputs.read_media(self.config, inputs, tokens, segments)


def layouts(backbone: Names, in_memory: Names, vision: Names, audio: Names) -> tuple[Names, Names, Names]:
    """The names of a thinker's checkpoint, of a whole model's, and those transformers 5 has in memory.

    The names of the parts begin with `model.` and `lm_head.`, `visual.`, `audio_tower.`.
    """

    def layout(text: Names, model: str, outer: str, towers: str) -> Names:
        prefixes = {"model.": model, "lm_head.": f"{outer}lm_head."}
        sound = within("encoders.audio", audio, {"audio_tower.": f"{towers}audio_tower."})
        return {**part_names(text, vision, text=prefixes, visual=f"{towers}visual."), **sound}

    return (
        layout(backbone, "model.", "", ""),
        layout(backbone, "thinker.model.", "thinker.", "thinker."),
        layout(in_memory, "model.language_model.", "", "model."),
    )
