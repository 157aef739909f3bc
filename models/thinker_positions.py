"""Positions of tokens among pictures, clips and sounds: TMRoPE (Qwen2.5-Omni, arXiv 2503.20215, sec. 2.2); numpy only.

A token has three positions, (time, height, width). In text they are one and the same number, and so they are in sounds,
whose tokens count on. A frame of a clip stands at its second times `per_second`. The tokens of a clip's own sound stand
among those of its frames, both counted from the same start. What follows goes on after the last token's largest
position, by one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Shaped

from models.vision.patches import Grid
from omnijax.errors import UserError

TEXT, IMAGE, VIDEO, AUDIO = range(4)
NAMES = ("text", "image", "video", "audio")


@dataclass(frozen=True)
class Timing:
    """How a family places clips and their sound in time.

    per_second: positions a second
    chunk:      positions of a stretch in which the frames stand before the sound, as in Qwen2.5-Omni, where times are
                cut to whole numbers and the two tokens that begin such a clip share a position, as do those that end
                it; None: each token of the sound stands where its own time puts it, as in Qwen3-Omni
    """

    per_second: int
    chunk: int | None = None

    def times(self, frames: int, seconds: float) -> Float32[np.ndarray, " frames"]:
        """Positions of frames that are so many seconds apart, from the first one on."""
        # In this order and in float32, as transformers does: other products may lie beyond another whole number.
        times = np.arange(frames, dtype=np.float32) * np.float32(seconds) * np.float32(self.per_second)
        return times if self.chunk is None else np.trunc(times)

    def order(self, times: Float32[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
        """By what tokens at these times are sorted; frames come before sounds where it is the same."""
        if self.chunk is None:
            return times
        # A chunk's number, where no token is more than one chunk after the token before it.
        index = np.arange(len(times))
        return np.minimum.accumulate(times // self.chunk - index) + index


@dataclass(frozen=True)
class Placed:
    """One medium: its kind, its (time, height, width) in patches or its count of tokens, and where these stand."""

    kind: int
    item: Any
    places: Int[np.ndarray, " n"]


def thinker_positions(
    kinds: Int[np.ndarray, " n"],
    begins_sound: Bool[np.ndarray, " n"],
    media: Mapping[int, Iterator[Any]],
    timing: Timing,
    merge: int,
) -> tuple[Float32[np.ndarray, "n 3"], list[Placed]]:
    """Positions of the tokens of one document, and the media among them.

    `kinds` says what each token stands for, `begins_sound` which are the tokens that sounds begin with: right before a
    clip's first token one says that the clip has its sound in it. `media` has, by kind and in order, the grid of each
    picture, (grid, seconds between its frames) of each clip, and the number of tokens of each sound; what this document
    does not need stays in the iterators. Raises `UserError` where tokens and media disagree.
    """
    positions = np.zeros((len(kinds), 3), np.float32)
    found = list[Placed]()
    place, start, ends_sound = 0, np.float32(0), False
    while place < len(kinds):
        following = np.flatnonzero(kinds[place:])
        first = place + int(following[0]) if following.size else len(kinds)
        kind = int(kinds[first]) if following.size else TEXT
        has_sound = bool(kind == VIDEO and first and begins_sound[first - 1])
        count = np.arange(first - place, dtype=np.float32)
        if timing.chunk is not None:
            count[1:] -= ends_sound
            count[-1:] -= has_sound and first - place > 1
        if count.size:
            positions[place:first] = start + count[:, None]
            start = positions[first - 1, 0] + 1
        if kind != TEXT:
            run, own = _run(kind, has_sound, media, timing, merge, first)
            _check(kinds[first : first + len(run)], own, first)
            positions[first : first + len(run)] = start + run
            start = start + run[-1].max() + 1
            for each, item, sound in own:
                found.append(Placed(each, item, first + np.flatnonzero(sound)))
        else:
            run = np.zeros((0, 3))
        place, ends_sound = first + len(run), has_sound
    return positions, found


def _run(
    kind: int, has_sound: bool, media: Mapping[int, Iterator[Any]], timing: Timing, merge: int, first: int
) -> tuple[Float32[np.ndarray, "n 3"], list[tuple[int, Any, Bool[np.ndarray, " n"]]]]:
    """The positions of a run of media tokens from its start on, and whose each of them is."""
    items = {each: _next(media, each, first) for each in ((VIDEO, AUDIO) if has_sound else (kind,))}
    parts, keys = [], []
    for each, item in items.items():
        if each == AUDIO:
            own = np.repeat(np.arange(item, dtype=np.float32)[:, None], 3, axis=1)
        else:
            grid, seconds = (item, 1.0) if each == IMAGE else item
            own = _frames(grid, timing.times(grid[0], seconds), merge)
        parts.append(own)
        keys.append(timing.order(own[:, 0]) if has_sound else np.zeros(len(own)))
    order = np.argsort(np.concatenate(keys), kind="stable")
    owner = np.repeat(list(items), [len(part) for part in parts])[order]
    grids = {each: item[0] if each == VIDEO else item for each, item in items.items()}
    return np.concatenate(parts)[order], [(each, item, owner == each) for each, item in grids.items()]


def _frames(grid: Grid, times: Float32[np.ndarray, " T"], merge: int) -> Float32[np.ndarray, "n 3"]:
    place = np.stack(np.indices((grid[0], grid[1] // merge, grid[2] // merge)), -1).reshape(-1, 3).astype(np.float32)
    place[:, 0] = times[place[:, 0].astype(int)]
    return place


def _next(media: Mapping[int, Iterator[Any]], kind: int, first: int) -> Any:
    item = next(media[kind], None)
    if item is None:
        raise UserError(f"token {first} stands for {NAMES[kind]}, and no more of them were given: give one for each")
    return item


def _check(kinds: Int[np.ndarray, " n"], own: list[tuple[int, Any, Bool[np.ndarray, " n"]]], first: int) -> None:
    expected = sum(kind * mask for kind, _, mask in own)
    if not np.size(expected) or len(kinds) != np.size(expected) or (kinds != expected).any():
        what = " and ".join(f"{NAMES[kind]} {item} with {int(mask.sum())} tokens" for kind, item, mask in own)
        raise UserError(
            f"placeholder tokens from number {first} on are not those of {what}: give a grid or frames for each, in "
            f"order"
        )
