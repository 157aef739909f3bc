"""Media in a model whose positions have one axis."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omnijax.data.processing import Medium, Processor
from omnijax.data.sample import Part, RowId
from omnijax.data.tokenizer import Tokenizer
from omnijax.units import UnitShape


@dataclass(frozen=True)
class Counted:
    """Another processor's media, but the positions of their tokens count on one by one, as those of text do."""

    processor: Processor

    @property
    def units(self) -> Mapping[str, UnitShape]:
        return self.processor.units

    @property
    def position(self) -> tuple[int, ...]:
        return ()

    @property
    def frame_rate(self) -> float:
        return self.processor.frame_rate

    def settings(self) -> dict[str, Any]:
        return {"counted": self.processor.settings()}

    def check(self, tokenizer: Tokenizer, model: Any) -> None:
        """Raises what the other processor does."""
        self.processor.check(tokenizer, model)

    def load(self, part: Part, row: RowId, tokenizer: Tokenizer) -> Medium:
        medium = self.processor.load(part, row, tokenizer)
        count = medium.tokens.tokens.size
        return replace(medium, positions=np.arange(count, dtype=np.int32), advance=count)
