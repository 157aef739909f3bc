"""The configs of vision towers: how they are read from a `config.json`, and what those of Qwen share."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from omnijax.errors import UserError
from omnijax.units import UnitShape


@dataclass(frozen=True)
class TowerConfig:
    """How a tower's config is read; subclasses have the fields."""

    HF_TYPES: ClassVar[tuple[str, ...]]
    HF_ALIASES: ClassVar[Mapping[str, str]] = {}
    HF_FIXED: ClassVar[Mapping[str, Any]]
    ELSEWHERE: ClassVar[tuple[str, ...]]
    """Keys that say nothing about a tower's weights or sums."""
    tie_word_embeddings: ClassVar[bool] = False

    @property
    def out_width(self) -> int:
        """Width of the tower's tokens."""
        values: Any = self
        return getattr(values, "out_hidden_size", None) or values.hidden_size

    @property
    def unit(self) -> UnitShape:
        """A patch."""
        values: Any = self
        return UnitShape((math.prod(values.patch_shape),), (3,), multiple=getattr(values, "spatial_merge_size", 1) ** 2)

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> Any:
        """Read a `vision_config`, alone or in a whole model's config.

        Raises `UserError` for another family's, and for what this one does not have.
        """
        values = values.get("thinker_config", values)
        values = values.get("vision_config", values)
        kind = values.get("model_type", cls.HF_TYPES[0])
        if kind not in cls.HF_TYPES:
            raise UserError(f"{name}: vision model_type {kind!r} is none of {', '.join(cls.HF_TYPES)}")
        values = {cls.HF_ALIASES.get(key, key): value for key, value in values.items() if key != "model_type"}
        rope = dict(values.pop("rope_parameters", None) or values.pop("rope_scaling", None) or {})
        if rope.get("rope_type", "axial") != "axial" or set(rope) - {"rope_type", "rope_theta"}:
            raise UserError(f"{name}: vision rope_parameters {rope} must be of type axial, with a rope_theta alone")
        rope.pop("rope_type", None)
        values |= rope
        fields = [field.name for field in dataclasses.fields(cls)]
        for key in [key for key in values if key not in fields]:
            value = values.pop(key)
            if key in cls.HF_FIXED:
                if value != cls.HF_FIXED[key]:
                    raise UserError(f"{name}: vision {key} = {value!r} must be {cls.HF_FIXED[key]!r}")
            elif key not in cls.ELSEWHERE:
                raise UserError(f"{name}: vision_config has an unknown key {key!r}; known are {', '.join(fields)}")
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@dataclass(frozen=True)
class VisionConfig(TowerConfig):
    """Fields are named as in the `vision_config` of a `config.json`."""

    depth: int = 32
    num_heads: int = 16
    in_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    rope_theta: float = 10000.0
    initializer_range: float = 0.02

    HF_ALIASES: ClassVar[Mapping[str, str]] = {"in_chans": "in_channels"}
    ELSEWHERE: ClassVar[tuple[str, ...]] = ("torch_dtype", "dtype", "spatial_patch_size", "tokens_per_second")

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of the tower alone."""
        values = dataclasses.asdict(self)
        rope = {"rope_type": "axial", "rope_theta": values.pop("rope_theta")}
        return {"model_type": self.HF_TYPES[0], **values, "rope_parameters": rope, **self.HF_FIXED}

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint is of another part of the model."""
        return "visual." not in tensor

    def check_heads(self, width: int) -> None:
        """Raises `UserError` where heads do not divide the width, or a head has no quarters to turn."""
        if width % (4 * self.num_heads):
            raise UserError(
                f"{type(self).__name__}: width {width} must be a multiple of 4 x {self.num_heads} heads, as each head "
                f"turns pairs of channels by height and by width"
            )

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """(channels, frames, height, width) of one patch."""
        return self.in_channels, self.temporal_patch_size, self.patch_size, self.patch_size
