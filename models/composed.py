"""An omni model of any parts: towers, projectors and a language model, each from a folder of weights or new.

    config.Train.model = @composed.OmniConfig()
    composed.OmniConfig.backbone = @families.hugging_face()
    composed.OmniConfig.start = "Llama-3.2-1B"
    composed.OmniConfig.encoders = {"audio": @audio/composed.Encoder()}
    audio/composed.Encoder.tower = @audio/families.tower()
    audio/composed.Encoder.projector = @projectors.Projector()
    audio/composed.Encoder.start = "whisper-tiny.en"

Encoders are named as the media they read; two of them may read pictures, each with units of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from flax import nnx
from jaxtyping import Array, Float

from models.families import family_of
from models.omni import OmniModel
from models.projectors import Projector
from omnijax.batch import Media
from omnijax.errors import UserError
from omnijax.nn.remat import Remat
from omnijax.nn.rope import MultimodalRope
from omnijax.units import UnitShape


@dataclass(frozen=True)
class Encoder:
    """A tower, and what brings its features to the language model.

    tower:     its config
    projector: None where the tower's tokens are as wide as the language model's, and go in as they are
    start:     Hugging Face folder that its weights come from; None: they are new, as a projector's always are
    """

    tower: Any
    projector: Projector | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        merged, made = 1 if self.projector is None else self.projector.merged, getattr(self.tower, "unit_tokens", 0)
        if made % merged:
            raise UserError(f"Projector.merged = {merged} must divide the {made} features of a unit of its tower")

    @property
    def unit(self) -> UnitShape:
        """The tower's, so many at a time as make a whole token of the projector."""
        unit, merged = self.tower.unit, 1 if self.projector is None else self.projector.merged
        whole = hasattr(self.tower, "unit_tokens")  # a unit has several features, which `merged` divides
        return unit if whole else replace(unit, multiple=unit.multiple * merged)


class Start(NamedTuple):
    """Where the parameters under `path` come from: a folder, and the family and config that read it."""

    path: str
    folder: str
    family: Any
    config: Any


@dataclass(frozen=True)
class OmniConfig:
    """A language model's config, encoders by the media they read, and the folder of the language model's weights.

    The vocabulary may be larger than that of the weights: the rows of new tokens begin as the mean of the others.
    """

    backbone: Any
    encoders: dict[str, Encoder]
    start: str | None = None

    def __post_init__(self) -> None:
        if not self.encoders:
            raise UserError("OmniConfig.encoders is empty: name one, or train the backbone's own config")
        for name, encoder in self.encoders.items():
            if not name.isidentifier():
                raise UserError(f"OmniConfig.encoders: {name!r} must be a plain word, such as 'image'")
            for value, wanted in ((encoder.tower, "a tower"), (self.backbone, "a language model")):
                if not callable(getattr(value, "build", None)):
                    raise UserError(f"OmniConfig: {value!r} is not the config of {wanted}")
            width, embed = encoder.tower.out_width, self.backbone.hidden_size
            if encoder.projector is None and width != embed:
                raise UserError(
                    f"OmniConfig: tokens of {name!r} have width {width}, the language model {embed}: give its Encoder "
                    "a projector"
                )

    def __hash__(self) -> int:
        return hash((self.backbone, tuple(self.encoders.items()), self.start))

    def starts(self) -> list[Start]:
        """The parts whose weights come from folders."""
        found = []
        if self.start is not None:
            found.append(Start("backbone", self.start, family_of(self.start), self.backbone))
        for name, encoder in self.encoders.items():
            if encoder.start is not None:
                path = f"encoders.{name}" if encoder.projector is None else f"encoders.{name}.tower"
                tower = nnx.eval_shape(lambda config=encoder.tower: config.build(rngs=nnx.Rngs(0)))
                found.append(Start(path, encoder.start, type(tower), encoder.tower))
        return found

    @property
    def units(self) -> dict[str, UnitShape]:
        """The units that it reads, by modality."""
        return {name: encoder.unit for name, encoder in self.encoders.items()}

    def attention_costs(self) -> tuple[tuple[int | None, int], ...]:
        """Those of the language model."""
        return self.backbone.attention_costs()

    @property
    def vocab_size(self) -> int:
        return self.backbone.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.backbone.hidden_size

    @property
    def tie_word_embeddings(self) -> bool:
        return self.backbone.tie_word_embeddings

    def build(self, **options: Any) -> "ComposedModel":
        """The model with fresh float32 parameters; `options` are those of `Decoder`."""
        return ComposedModel(self, **options)


class ProjectedTower(nnx.Module):
    """A tower's features, brought to the language model's width."""

    def __init__(self, tower: nnx.Module, projector: nnx.Module):
        self.tower, self.projector = tower, projector

    def __call__(self, media: Media) -> Float[Array, "B M E"]:
        return self.projector(self.tower(media))  # type: ignore[operator]


class ComposedModel(OmniModel):
    """Parts under the names of their media; checkpoints of a run hold it whole, folders its parts."""

    def __init__(self, config: OmniConfig, *, rngs: nnx.Rngs, remat: Remat = "none", **options: Any):
        backbone = config.backbone
        if isinstance(rope := getattr(backbone, "rope_scaling", None), MultimodalRope):
            options["rope_axes"] = rope.axes(backbone.head_dim // 2)
        encoders = {name: _build(each, backbone.hidden_size, rngs, remat) for name, each in config.encoders.items()}
        for encoder in encoders.values():
            if hasattr(encoder, "with_deepstack"):
                levels = {len(encoder.config.deepstack_visual_indexes)} - {backbone.num_hidden_layers}
                options["splits"] = sorted(levels | set(options.get("splits", ())))
        decoder = backbone.build(rngs=rngs, remat=remat, **options)
        super().__init__(config, encoders=encoders, backbone=decoder)

    def parts(self) -> Mapping[str, Any]:
        """What is saved in a folder of its own: the language model, and each tower."""
        towers = {name: getattr(each, "tower", each) for name, each in self.encoders.items()}
        return {"backbone": self.backbone, **{f"encoders.{name}": tower for name, tower in towers.items()}}


def _build(encoder: Encoder, width: int, rngs: nnx.Rngs, remat: Remat) -> nnx.Module:
    tower = encoder.tower.build(rngs=rngs, remat=remat)
    if encoder.projector is None:
        return tower
    return ProjectedTower(tower, encoder.projector.build(encoder.tower.out_width, width, rngs=rngs))
