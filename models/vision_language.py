"""What the vision-language families of Qwen share: their configs, and Hugging Face's names of both parts."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from models.omni import OmniModel
from models.vision.hf_inputs import MEDIA_INPUTS, read_media
from models.vision.patches import Grid
from omnijax.errors import UserError
from omnijax.hf_layout import Names, within
from omnijax.nn.remat import Remat
from omnijax.units import UnitShape

IMAGE = "image"
"""The modality of pictures and clips alike, as one tower reads both."""


@dataclass(frozen=True)
class VisionLanguageConfig:
    """A language model and a tower, named as in a `config.json`; subclasses say of which families they are."""

    text_config: Any
    vision_config: Any
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    HF_TYPE: ClassVar[str]
    HF_CLASS: ClassVar[str]
    HF_ALIASES: ClassVar[Mapping[str, str]] = {}
    TEXT: ClassVar[Any]
    VISION: ClassVar[Any]

    def __post_init__(self) -> None:
        self.check_width("tower", self.vision_config.out_width)

    def check_width(self, tower: str, made: int) -> None:
        """Raises `UserError` where a tower's tokens are of another width than the text model's."""
        if made != (read := self.text_config.hidden_size):
            raise UserError(
                f"{type(self).__name__}: the {tower} gives tokens of width {made}, the text model has {read}"
            )

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> Any:
        """Read a `config.json`; older ones have the fields of the text model beside `vision_config`.

        Whether the head is tied is the text model's to say; where it does not, the outer config's.
        """
        if values.get("model_type", cls.HF_TYPE) != cls.HF_TYPE:
            raise UserError(f"{name}: model_type {values['model_type']!r} is not this family's, {cls.HF_TYPE!r}")
        values = {cls.HF_ALIASES.get(key, key): value for key, value in values.items()}
        parts, fields = cls.towers(), {field.name: field for field in dataclasses.fields(cls)}
        for part in parts:
            if not isinstance(values.get(part), Mapping):
                raise UserError(f"{name}: has no {part}, which a {cls.HF_TYPE} needs")
        text = values.get("text_config")
        if text is None:
            text = {key: value for key, value in values.items() if key not in set(fields) | {"model_type"}}
        elif "tie_word_embeddings" in values:
            text = {"tie_word_embeddings": values["tie_word_embeddings"], **text}
        own = [key for key in fields if key not in ("text_config", *parts)]
        given = {key: values[key] for key in own if key in values}
        if wrong := [key for key, value in given.items() if type(value) is not int or value < 0]:
            raise UserError(f"{name}: {wrong[0]} = {given[wrong[0]]!r} must be a whole number, 0 or more")
        if missing := sorted(key for key in own if key not in given and fields[key].default is dataclasses.MISSING):
            raise UserError(f"{name}: lacks {', '.join(missing)}")
        towers = {part: tower.from_hf(values, name) for part, tower in parts.items()}
        return cls(text_config=cls.TEXT.from_hf(text, name), **towers, **given)

    @classmethod
    def towers(cls) -> dict[str, Any]:
        """The classes of the towers' configs, by field."""
        return {"vision_config": cls.VISION}

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this config."""
        theirs = {ours: key for key, ours in self.HF_ALIASES.items()}
        values: dict[str, Any] = {"architectures": [self.HF_CLASS], "model_type": self.HF_TYPE}
        values |= {theirs.get(field.name, field.name): getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {part: getattr(self, part).to_hf() for part in self.towers()}
        values["text_config"] = {key: x for key, x in self.text_config.to_hf().items() if key != "architectures"}
        return values | {"tie_word_embeddings": self.tie_word_embeddings}

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint is of a part that the family here does without."""
        return False

    def clip_runs(self, grids: Sequence[Grid], seconds: Any = None) -> list[tuple[Grid, float]]:
        """(grid, positions from frame to frame) of each run of placeholder tokens that these clips have.

        `seconds` are those between the frames of each clip, where the processor says them.
        """
        return [(grid, 1.0) for grid in grids]

    def attention_costs(self) -> tuple[tuple[int | None, int], ...]:
        """Those of the text model."""
        return self.text_config.attention_costs()

    @property
    def units(self) -> dict[str, UnitShape]:
        """The units that it reads, by modality."""
        return {IMAGE: self.vision_config.unit}

    @property
    def vocab_size(self) -> int:
        return self.text_config.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.text_config.hidden_size

    @property
    def tie_word_embeddings(self) -> bool:
        return self.text_config.tie_word_embeddings


class VisionLanguageModel(OmniModel):
    """A tower before a language model whose positions have three axes."""

    MEDIA_INPUTS: ClassVar[tuple[str, ...]] = MEDIA_INPUTS

    def __init__(self, config: Any, backbone: Any, *, rngs: nnx.Rngs, remat: Remat = "none", **options: Any):
        text = config.text_config
        options["rope_axes"] = text.rope_scaling.axes(text.head_dim // 2)
        encoders = {IMAGE: config.vision_config.build(rngs=rngs, remat=remat)}
        super().__init__(config, encoders=encoders, backbone=backbone(text, rngs=rngs, remat=remat, **options))

    def read_media(self, inputs: Mapping[str, Any], tokens: Any, segments: Any) -> tuple[Any, Any, Any]:
        """Positions, media and slots of a transformers processor's arrays; see `models.vision.hf_inputs`."""
        return read_media(self.config, inputs, tokens, segments)


def part_names(backbone: Names, tower: Names, *, text: Mapping[str, str], visual: str) -> Names:
    """The names of both parts, where those of the text model begin with `text`, the tower's with `visual`."""
    return {
        **within("backbone", backbone, text),
        **within(f"encoders.{IMAGE}", tower, {"visual.": visual, "model.visual.": visual}),
    }
