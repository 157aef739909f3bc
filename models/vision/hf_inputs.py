"""The arrays of a transformers processor of Qwen's vision families as media, slots and positions; numpy only."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from models.vision.patches import Grid, merge_positions, window_order
from models.vision.positions import find_runs, mrope_positions
from omnijax.errors import UserError

KINDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
MEDIA_INPUTS = ("mm_token_type_ids", "second_per_grid_ts", *(name for names in KINDS.values() for name in names))

Units = dict[str, np.ndarray]
"""The units of one item, by the fields of `omnijax.batch.Media`, in the tower's order."""


def read_media(
    config: Any, inputs: Mapping[str, Any], tokens: Int[np.ndarray, "B S"], segments: Int[np.ndarray, "B S"]
) -> tuple[Int[np.ndarray, "B S 3"], dict[str, Units], dict[str, Int[np.ndarray, "B S"]]]:
    """(positions, fields of each `Media`, slots); pictures and clips stand in the order of their placeholder tokens.

    Raises `UserError` where grids, patches and placeholder tokens do not fit each other.
    """
    vision = config.vision_config
    merge = vision.spatial_merge_size
    ids = {"image": config.image_token_id, "video": config.video_token_id}
    pictures = Pictures(inputs, vision)
    media = {
        1: iter([(grid, 1.0) for grid in pictures.grids["image"]]),
        2: iter(config.clip_runs(pictures.grids["video"], inputs.get("second_per_grid_ts"))),
    }
    positions = np.zeros((*tokens.shape, 3), np.int32)
    slots = np.full(tokens.shape, -1, np.int32)
    rows = []
    for row in range(len(tokens)):
        rows.append(own := list[Units]())
        encoded = 0
        for segment in range(1, segments[row].max() + 1):
            (places,) = np.nonzero(segments[row] == segment)
            document = tokens[row, places]
            kinds = np.where(document == ids["image"], 1, np.where(document == ids["video"], 2, 0))
            runs = find_runs(kinds, media, merge)
            positions[row, places], _ = mrope_positions(len(document), runs, merge)
            for run in runs:
                units, order = pictures.take(("image", "video")[kinds[run.first] - 1], run.grid, segment)
                slots[row, places[run.first : run.first + len(order)]] = encoded + order
                encoded += len(order)
                own.append(units)
    pictures.check_all_taken()
    return positions, {"image": stacked(rows, pictures.empty, least=merge**2)}, {"image": slots}


class Pictures:
    """The pixels of pictures and clips that a processor gave, and how many of their patches were taken so far."""

    def __init__(self, inputs: Mapping[str, Any], vision: Any):
        self.grids = {kind: _grids(inputs.get(names[1]), names[1]) for kind, names in KINDS.items()}
        self._pixels = {
            kind: _pixels(inputs.get(KINDS[kind][0]), self.grids[kind], KINDS[kind][0], vision) for kind in KINDS
        }
        self._merge, self._window = vision.spatial_merge_size, getattr(vision, "window", None)
        self._taken = dict.fromkeys(KINDS, 0)

    def take(self, kind: str, grid: Grid, segment: int) -> tuple[Units, Int[np.ndarray, " M"]]:
        """The units of the next item of a kind, and for each of its tokens the number of its feature among them."""
        first, count = self._taken[kind], int(np.prod(grid))
        self._taken[kind] += count
        patches, place = self._pixels[kind][first : first + count], merge_positions(grid, self._merge)
        order = np.arange(count) if self._window is None else window_order(place, self._window)
        units = {
            "features": patches[order],
            "unit_segments": np.full(count, segment, np.int32),
            "unit_positions": place[order],
            "unit_grid": np.tile(np.array(grid, np.int32), (count, 1)),
            "unit_valid": np.full(count, patches.shape[1], np.int32),
        }
        return units, np.argsort(order[:: self._merge**2])

    def check_all_taken(self) -> None:
        """Raises `UserError` where patches are left that no placeholder token stands for."""
        for kind, names in KINDS.items():
            if self._taken[kind] != len(self._pixels[kind]):
                raise UserError(
                    f"to_batch: {names[0]} has {len(self._pixels[kind])} patches, and the placeholder tokens of "
                    f"input_ids stand for {self._taken[kind]}"
                )

    @property
    def empty(self) -> Units:
        """No units at all."""
        return {
            "features": self._pixels["image"][:0],
            "unit_segments": np.zeros(0, np.int32),
            "unit_positions": np.zeros((0, 3), np.int32),
            "unit_grid": np.zeros((0, 3), np.int32),
            "unit_valid": np.zeros(0, np.int32),
        }


def stacked(rows: Sequence[Sequence[Units]], empty: Units, *, least: int) -> Units:
    """The units of all rows, filled up to one number of them, at least `least`."""
    joined = [{name: np.concatenate([x, *(units[name] for units in row)]) for name, x in empty.items()} for row in rows]
    size = max(least, *(len(row["features"]) for row in joined))

    def filled(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, size - len(x)), *((0, 0),) * (x.ndim - 1)))

    return {name: np.stack([filled(row[name]) for row in joined]) for name in empty}


def _grids(value: Any, name: str) -> list[Grid]:
    grids = np.zeros((0, 3), np.int64) if value is None else np.asarray(value)
    if grids.ndim != 2 or grids.shape[1] != 3:
        raise UserError(f"to_batch: {name} must be [items, 3] (time, height, width), not {grids.shape}")
    return [tuple(map(int, grid)) for grid in grids]


def _pixels(value: Any, grids: list[Grid], name: str, vision: Any) -> Float[np.ndarray, "N P"]:
    size = int(np.prod(vision.patch_shape))
    pixels = np.zeros((0, size), np.float32) if value is None else np.asarray(value, np.float32)
    wanted = sum(int(np.prod(grid)) for grid in grids)
    if pixels.shape != (wanted, size):
        raise UserError(f"to_batch: {name} is {pixels.shape}; its grids have {wanted} patches of {size} values")
    return pixels
