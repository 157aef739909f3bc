"""Positions of tokens among pictures and clips: M-RoPE (Qwen2-VL, arXiv 2409.12191, sec. 2.1.2); numpy only.

A token has three positions, (time, height, width), which are one and the same number in text. Those of a picture's or
a clip's tokens count on from the text before it: time by frames, height and width by merged tokens. The text after it
goes on at the longer side of a frame, however many frames there are, as transformers 5 has it (version 4 and the paper
go on after the largest position of all). How the families differ is in the runs:

    Qwen2-VL    one run a picture or clip
    Qwen2.5-VL  one run too; time goes on by the seconds between two frames x `tokens_per_second`
    Qwen3-VL    one run a frame, as text (its moment) stands before each
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32

from models.vision.patches import Grid
from omnijax.errors import UserError


@dataclass(frozen=True)
class MediaRun:
    """The placeholder tokens of one picture or clip, one after the other.

    first:    place of the first of them
    grid:     (time, height, width) in patches
    interval: positions from a frame to the next one; fractions are cut off, of each frame's own product
    """

    first: int
    grid: Grid
    interval: float = 1.0

    def tokens(self, merge: int) -> int:
        """How many they are."""
        time, height, width = self.grid
        return time * (height // merge) * (width // merge)


def mrope_positions(length: int, runs: Sequence[MediaRun], merge: int) -> tuple[Int32[np.ndarray, "n 3"], int]:
    """The positions of the `length` tokens of one document, and the one of a token that followed them.

    `runs` are in order; all other tokens are text.
    """
    positions = np.empty((length, 3), np.int32)
    place, start = 0, 0  # of the next token, and its position
    for run in (*runs, None):
        first = length if run is None else run.first
        if first < place:
            raise ValueError(f"{length} tokens: a run ends at {place}, behind the next one's first at {first}")
        positions[place:first] = np.arange(start, start + first - place)[:, None]
        start += first - place
        if run is not None:
            time, height, width = run.grid
            place = first + run.tokens(merge)
            grid = np.stack(tuple(np.indices((time, height // merge, width // merge), np.int32)), -1).reshape(-1, 3)
            # In float32, as transformers does: in float64 a product may lie on the other side of a whole number.
            grid[:, 0] = (grid[:, 0].astype(np.float32) * np.float32(run.interval)).astype(np.int32)
            positions[first:place] = start + grid
            start += max(height, width) // merge
    return positions, start


def each_frame(grids: Iterable[Grid]) -> list[Grid]:
    """The frames of clips, each as a picture: what Qwen3-VL takes for the grids of its runs."""
    return [(1, height, width) for time, height, width in grids for _ in range(time)]


def find_runs(
    kinds: Int[np.ndarray, "n"], media: Mapping[int, Iterable[tuple[Grid, float]]], merge: int
) -> list[MediaRun]:
    """The runs in the tokens of a document: `kinds` is 0 for text, else a key of `media`.

    `media` has the (grid, interval) of each picture, clip or frame of a kind, in order; those of an iterator that are
    not needed stay in it, so that it may serve one document after another. Raises `UserError` where tokens and grids
    disagree.
    """
    left = {kind: iter(grids) for kind, grids in media.items()}
    runs, place = list[MediaRun](), 0
    while (following := np.flatnonzero(kinds[place:])).size:
        first = place + int(following[0])
        kind = int(kinds[first])
        grid, interval = next(left[kind], ((0, 0, 0), 1.0))
        runs.append(run := MediaRun(first, tuple(map(int, grid)), float(interval)))
        place = first + max(run.tokens(merge), 1)
        if not run.tokens(merge) or not (kinds[first:place] == kind).all() or place > kinds.size:
            raise UserError(
                f"placeholder tokens from number {first} on are not the {run.tokens(merge)} of a grid {run.grid}: "
                f"give a grid for each picture and clip, in order"
            )
    return runs
