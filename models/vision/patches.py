"""Patches of pictures and clips, in the order their tower reads them; numpy only."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped

Grid = Sequence[int]
"""(time, height, width) of an item, in patches."""


def merge_positions(grid: Grid, merge: int) -> Int[np.ndarray, "N 3"]:
    """(time, height, width) of the patches of an item: frame by frame, blocks of `merge` x `merge` row by row.

    `merge` divides the grid's height and width.
    """
    time, height, width = grid
    place = np.stack(np.indices((time, height, width), np.int32), -1)
    blocks = place.reshape(time, height // merge, merge, width // merge, merge, 3)
    return blocks.swapaxes(2, 3).reshape(-1, 3)


def window_order(positions: Int[np.ndarray, "N 3"], window: int) -> Int[np.ndarray, " N"]:
    """Where in merge order each patch of window order stands: frame by frame, windows row by row.

    `window` is the side of a window in patches, a multiple of the merge; windows at the right and lower border may be
    smaller.
    """
    time, row, column = positions[:, 0], positions[:, 1] // window, positions[:, 2] // window
    return np.lexsort((column, row, time))  # stable: inside a window, merge order stays


def patchify(
    frames: Shaped[np.ndarray, "T H W C"], patch: int, merge: int, temporal: int
) -> tuple[Shaped[np.ndarray, "N P"], tuple[int, int, int]]:
    """Patches `[C, temporal, patch, patch]` of a picture (T = 1) or clip, flattened, in merge order, and their grid.

    Height and width are multiples of `patch * merge`; the last frame is repeated until `temporal` divides their number.
    """
    frames = np.concatenate([frames, np.repeat(frames[-1:], -len(frames) % temporal, axis=0)])
    time, height, width = len(frames) // temporal, frames.shape[1] // patch, frames.shape[2] // patch
    split = frames.reshape(time, temporal, height // merge, merge, patch, width // merge, merge, patch, frames.shape[3])
    # (time, row of blocks, column of blocks, row in block, column in block, channel, frame, row, column)
    patches = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return patches.reshape(time * height * width, -1), (time, height, width)
