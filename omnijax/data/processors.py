"""Several processors as one, for models that see and hear."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnijax.data.omni_packing import UnitShape
from omnijax.data.processing import Medium, Processor
from omnijax.data.sample import Part, RowId
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import UserError


@dataclass(frozen=True)
class Processors:
    """What has the name of `audio`'s units goes there, all else to `vision`."""

    vision: Processor
    audio: Processor

    def __post_init__(self) -> None:
        if both := sorted(set(self.vision.units) & set(self.audio.units)):
            raise UserError(f"Processors: both vision and audio make units of {both[0]!r}: give one for each")

    @property
    def units(self) -> Mapping[str, UnitShape]:
        return {**self.vision.units, **self.audio.units}

    @property
    def position(self) -> tuple[int, ...]:
        return max(self.vision.position, self.audio.position, key=len)

    @property
    def frame_rate(self) -> float:
        return self.vision.frame_rate

    def settings(self) -> dict[str, Any]:
        return {"vision": self.vision.settings(), "audio": self.audio.settings()}

    def check(self, tokenizer: Tokenizer, model: Any) -> None:
        """Raises `UserError` where one of them does not fit."""
        self.vision.check(tokenizer, model)
        self.audio.check(tokenizer, model)

    def load(self, part: Part, row: RowId, tokenizer: Tokenizer) -> Medium:
        return (self.audio if part.kind in self.audio.units else self.vision).load(part, row, tokenizer)
