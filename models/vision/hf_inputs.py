"""The arrays of a transformers processor of Qwen's vision families as media, slots and positions; numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from models.vision.patches import Grid, merge_positions, window_order
from models.vision.positions import find_runs, mrope_positions
from omnijax.errors import UserError

KINDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
MEDIA_INPUTS = ("mm_token_type_ids", "second_per_grid_ts", *(name for names in KINDS.values() for name in names))


@dataclass
class _Row:
    """The units of a row so far, in the tower's order."""

    units: list[dict[str, np.ndarray]] = field(default_factory=list)
    tokens: int = 0


def read_media(
    config: Any, inputs: Mapping[str, Any], tokens: Int[np.ndarray, "B S"], segments: Int[np.ndarray, "B S"]
) -> tuple[Int[np.ndarray, "B S 3"], dict[str, dict[str, np.ndarray]], dict[str, Int[np.ndarray, "B S"]]]:
    """(positions, fields of each `Media`, slots); pictures and clips stand in the order of their placeholder tokens.

    Raises `UserError` where grids, patches and placeholder tokens do not fit each other.
    """
    vision = config.vision_config
    merge, window = vision.spatial_merge_size, getattr(vision, "window", None)
    ids = {"image": config.image_token_id, "video": config.video_token_id}
    grids = {kind: _grids(inputs.get(names[1]), names[1]) for kind, names in KINDS.items()}
    pixels = {kind: _pixels(inputs.get(KINDS[kind][0]), grids[kind], KINDS[kind][0], vision) for kind in KINDS}
    runs_of = {1: grids["image"], 2: grids["video"]}
    media = {
        1: iter([(grid, 1.0) for grid in runs_of[1]]),
        2: iter(config.clip_runs(runs_of[2], inputs.get("second_per_grid_ts"))),
    }
    used = dict.fromkeys(KINDS, 0)
    positions = np.zeros((*tokens.shape, 3), np.int32)
    slots = np.full(tokens.shape, -1, np.int32)
    rows = []
    for row in range(len(tokens)):
        rows.append(own := _Row())
        for segment in range(1, segments[row].max() + 1):
            (places,) = np.nonzero(segments[row] == segment)
            document = tokens[row, places]
            kinds = np.where(document == ids["image"], 1, np.where(document == ids["video"], 2, 0))
            runs = find_runs(kinds, media, merge)
            positions[row, places], _ = mrope_positions(len(document), runs, merge)
            for run in runs:
                kind, count = ("image", "video")[kinds[run.first] - 1], int(np.prod(run.grid))
                place = merge_positions(run.grid, merge)
                order = np.arange(count) if window is None else window_order(place, window)
                patches = pixels[kind][used[kind] : used[kind] + count]
                used[kind] += count
                merged = count // merge**2
                here = places[run.first : run.first + merged]
                slots[row, here] = own.tokens + np.argsort(order[:: merge**2] // merge**2)
                own.tokens += merged
                own.units.append(
                    {
                        "features": patches[order],
                        "unit_segments": np.full(count, segment, np.int32),
                        "unit_positions": place[order],
                        "unit_grid": np.tile(np.array(run.grid, np.int32), (count, 1)),
                        "unit_valid": np.full(count, patches.shape[1], np.int32),
                    }
                )
    for kind, names in KINDS.items():
        if used[kind] != len(pixels[kind]):
            raise UserError(
                f"to_batch: {names[0]} has {len(pixels[kind])} patches, and the placeholder tokens of input_ids stand "
                f"for {used[kind]}"
            )
    return positions, _stacked(rows, pixels["image"].shape[1], merge**2), {"image": slots}


def _grids(value: Any, name: str) -> list[Grid]:
    grids = np.zeros((0, 3), np.int64) if value is None else np.asarray(value)
    if grids.ndim != 2 or grids.shape[1] != 3:
        raise UserError(f"to_batch: {name} must be [items, 3] (time, height, width), not {grids.shape}")
    return [tuple(map(int, grid)) for grid in grids]


def _pixels(value: Any, grids: list[Grid], name: str, vision: Any) -> np.ndarray:
    size = int(np.prod(vision.patch_shape))
    pixels = np.zeros((0, size), np.float32) if value is None else np.asarray(value, np.float32)
    wanted = sum(int(np.prod(grid)) for grid in grids)
    if pixels.shape != (wanted, size):
        raise UserError(f"to_batch: {name} is {pixels.shape}; its grids have {wanted} patches of {size} values")
    return pixels


def _stacked(rows: list[_Row], size: int, merged: int) -> dict[str, dict[str, np.ndarray]]:
    """Rows filled up to one number of units, at least those of a token."""
    empty = {
        "features": np.zeros((0, size), np.float32),
        "unit_segments": np.zeros(0, np.int32),
        "unit_positions": np.zeros((0, 3), np.int32),
        "unit_grid": np.zeros((0, 3), np.int32),
        "unit_valid": np.zeros(0, np.int32),
    }
    joined = [
        {name: np.concatenate([x, *(unit[name] for unit in row.units)]) for name, x in empty.items()} for row in rows
    ]
    units = max(merged, *(len(row["features"]) for row in joined))

    def filled(x: np.ndarray) -> np.ndarray:
        return np.pad(x, ((0, units - len(x)), *((0, 0),) * (x.ndim - 1)))

    return {"image": {name: np.stack([filled(row[name]) for row in joined]) for name in empty}}
