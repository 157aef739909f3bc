"""The host side of the thinkers' vision (`models.thinker`): patches as in the vision families, other positions.

A clip with its sound is refused: its frames and sounds would have to stand among each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int32

from models.thinker_positions import VIDEO, Timing, thinker_positions
from models.vision.patches import Grid
from models.vision.positions import MediaRun
from models.vision.processor import Qwen2_5VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor, Written
from omnijax.data.media.video import Video
from omnijax.data.processing import Medium
from omnijax.data.sample import Part, RowId
from omnijax.data.spelling import Spelling
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow, UserError
from omnijax.fields import ranged


@dataclass(frozen=True)
class Qwen2_5OmniVisionProcessor(Qwen2_5VLProcessor):
    """Of Qwen2.5-Omni (arXiv 2503.20215): time goes by the second, and text goes on after the largest position.

    tokens_per_second: the model's `position_id_per_seconds`
    """

    tokens_per_second: float | int = ranged(25, above=0)
    image_token: str = "<|IMAGE|>"
    video_token: str = "<|VIDEO|>"
    start: str = "<|vision_bos|>"
    end: str = "<|vision_eos|>"

    MODELS: ClassVar[tuple[str, ...]] = ("qwen2_5_omni_thinker",)
    SIZES: ClassVar[Mapping[str, str]] = Qwen2VLProcessor.SIZES

    def check(self, tokenizer: Tokenizer, model: Any) -> None:
        super().check(tokenizer, model)
        if (wanted := getattr(model, "position_id_per_seconds", self.tokens_per_second)) != self.tokens_per_second:
            raise UserError(
                f"Qwen2_5OmniVisionProcessor.tokens_per_second = {self.tokens_per_second} and the model's "
                f"position_id_per_seconds = {wanted}: they must be the same"
            )

    def clip_tokens(self, spell: Spelling, video: Video, grid: Grid) -> Written:
        return self._one_run(spell, self.video_token, MediaRun(1, grid, self.temporal_patch_size / video.fps))

    def positions(self, length: int, runs: Sequence[MediaRun]) -> tuple[Int32[np.ndarray, "n 3"], int]:
        """The `interval` of a run are seconds here."""
        kinds = np.zeros(length, np.int64)
        for run in runs:
            kinds[run.first : run.first + run.tokens(self.merge)] = VIDEO  # a picture is a clip of one frame
        media = {VIDEO: iter([(run.grid, run.interval) for run in runs])}
        timing = Timing(int(self.tokens_per_second), chunk=1)
        found, _ = thinker_positions(kinds, kinds < 0, media, timing, self.merge)
        return found.astype(np.int32), int(found[-1].max()) + 1


@dataclass(frozen=True)
class Qwen3OmniVisionProcessor(Qwen3VLProcessor):
    """Of Qwen3-Omni (arXiv 2509.17765), pictures only: the frames of its clips stand between whole positions."""

    MODELS: ClassVar[tuple[str, ...]] = ("qwen3_omni_moe_thinker",)

    def load(self, part: Part, row: RowId, tokenizer: Tokenizer) -> Medium:
        if part.kind == "video":
            raise BadRow(
                row, f"message {part.message} has a clip, and rows have no fractions of positions for it: drop it"
            )
        return super().load(part, row, tokenizer)
