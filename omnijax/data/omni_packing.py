"""Omni packing: whole samples, chosen so that all the budgets of a row fill together.

A row has a budget of tokens and, for each modality, one of units (and one of encoded features where it is given). What
fills it best is chosen from a window of the next items. The arrays have one shape whatever was chosen: a modality that
no item of the row has is all padding.

Packing is a pure function of the items in their order. Its state is small JSON: the next item's number, the numbers
and sizes of the items that wait, and counts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int32, Shaped

from omnijax.data.budgets import Budgets, Piece, Size, plan_row
from omnijax.data.packing import Row, empty_row
from omnijax.errors import BadRow, UserError
from omnijax.units import UnitShape

logger = logging.getLogger(__name__)

OF_UNITS = ("features", "unit_positions", "unit_grid", "unit_valid")


@dataclass(frozen=True, eq=False)
class MediaItem:
    """A sample's media of one modality, laid end to end; units as in `omnijax.batch.Media`.

    slots:   which encoded feature of these units stands at each token of the sample, -1 for none
    encoded: M, how many features an encoder makes of the N units, as many of each; feature m is of unit m * N // M
    """

    features: Shaped[np.ndarray, "N *unit"]
    unit_positions: Int32[np.ndarray, "N *place"]
    unit_grid: Int32[np.ndarray, "N 3"]
    unit_valid: Int32[np.ndarray, "N"]
    slots: Int32[np.ndarray, "n"]
    encoded: int


@dataclass(frozen=True, eq=False)
class Item:
    """One prepared sample.

    trained:   the token is a label
    positions: 0, 1, ... by default
    ends:      after how many tokens it may be cut: where a message with a label ends, rising
    notes:     what was done to its media beside decoding them, to be counted
    document:  it is plain text without media or positions, which may go on in another row as another segment
    """

    tokens: Int32[np.ndarray, "n"]
    trained: Bool[np.ndarray, "n"]
    row_id: str
    source: int = 0
    positions: Int32[np.ndarray, "n *axes"] | None = None
    media: Mapping[str, MediaItem] = field(default_factory=dict)
    ends: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    document: bool = False

    def costs(self) -> dict[str, int]:
        """What it takes of each budget, by the names of `Budgets.limits`."""
        units = {name: len(media.features) for name, media in self.media.items()}
        encoded = {f"encoded {name}": media.encoded for name, media in self.media.items()}
        return {"tokens": self.tokens.size, **units, **encoded}


Read = Callable[[int], Item | None]
"""Gives item n of a shard, None past the last one."""


def first_messages(item: Item, end: int) -> Item | None:
    """The first `end` tokens of an item, and the media that stand there; None where `end` lies inside a medium."""
    media = {}
    for name, whole in item.media.items():
        left_out = whole.slots[end:]
        encoded = int(left_out[left_out >= 0].min(initial=whole.encoded))
        units, rest = divmod(encoded * len(whole.features), max(whole.encoded, 1))
        if rest or whole.slots[:end].max(initial=-1) >= encoded:
            return None
        arrays = {each: getattr(whole, each)[:units] for each in OF_UNITS}
        media[name] = MediaItem(**arrays, slots=whole.slots[:end], encoded=encoded)
    return replace(
        item,
        tokens=item.tokens[:end],
        trained=item.trained[:end],
        positions=None if item.positions is None else item.positions[:end],
        media=media,
        ends=tuple(each for each in item.ends if each <= end),
    )


@dataclass(frozen=True)
class FirstFit:
    """Packs items into rows of the same shapes.

    Args:
        shapes: of the units, for every modality that has a budget.
        position: shape of a token's position: () or (3,).
        look_ahead: how many items wait for the row that they fit best.
        over: what becomes of an item beyond a budget: "drop" leaves it out; "cut" leaves out its last messages with
            their media, as few as it takes, and all of it where the first one is too much; "raise" is a `BadRow`.
        split_text: a document longer than a row goes on from row to row; else it is beyond the budget of tokens.

    A row begins with the item that waits longest, so none waits for more than `look_ahead` rows and those that longer
    documents before it take. Such a document has at least half of the tokens of a row once it waits longest, and
    before that what the others leave.
    """

    budgets: Budgets
    shapes: Mapping[str, UnitShape] = field(default_factory=dict)
    position: tuple[int, ...] = ()
    look_ahead: int = 64
    over: Literal["drop", "cut", "raise"] = "raise"
    split_text: bool = True

    def __post_init__(self) -> None:
        if self.look_ahead < 1 or self.budgets.tokens < 2:
            raise UserError(
                f"packing rows of {self.budgets.tokens} tokens with look_ahead {self.look_ahead}: "
                "give at least 2 tokens, or a row could have no target, and look ahead at least 1 item"
            )

    def next_row(self, read: Read, state: dict[str, Any]) -> tuple[Row, dict[str, Any]]:
        """The row that follows `state`, {} at first, and the state after it; only padding once all items are packed.

        The row's arrays are those of `empty_row`; `batch_fields` sorts them. Its items are documents 1, 2, ... in
        their order. `read` is asked for new items, in their order, for their sizes, and for those of the row once more:
        those that it keeps while they are new or in the state's "waiting" are prepared once. Raises `UserError` where
        an item is not what it was when its size was read, `BadRow` as `over` says, and what `read` raises.

        The counts in the state: read = packed + dropped + empty + len(waiting), in items; those `cut` are packed too,
        in part; `lost_tokens` are those of dropped items and cut messages; "media/NOTE" counts the items' notes.
        """

        def size_of(number: int) -> Size | None:
            if (item := read(number)) is None:
                return None
            kept = self.fitted(item)
            lost = item.tokens.size - (kept.tokens.size if kept else 0)
            if lost:
                logger.info("%s: over a budget: %s of %s tokens left out", item.row_id, lost, item.tokens.size)
            return Size(self._costs(kept) if kept else (0,), lost, item.notes)

        pieces, state = plan_row(self.budgets, self.look_ahead, size_of, state)
        row, row_ids, used = self.empty_row(), list[str](), Counter[str]()
        for segment, piece in enumerate(pieces, 1):
            item = read(piece.number)
            kept = self.fitted(item) if item else None
            if kept is None or self._costs(kept) != piece.costs:
                raise UserError(
                    f"item {piece.number} of the data state took {list(piece.costs)} of {list(self.budgets.limits())} "
                    "and does not now: the data changed; bring it back or start the data anew"
                )
            _lay(row, kept, piece, segment, used)
            row_ids.append(f"{kept.row_id}[{piece.first}:{piece.end}]")
        return Row(row, tuple(row_ids)), state

    def fitted(self, item: Item) -> Item | None:
        """What `over` and `split_text` leave of an item: all, its first messages, or nothing."""
        over = self._over(item)
        if not over or (item.document and self.split_text):
            return item
        if self.over == "raise":
            raise BadRow(
                item.row_id,
                f"takes {item.costs()[over[0]]} of the budget of {over[0]}, which is {self.budgets.limits()[over[0]]} "
                "a row: raise the budget (of tokens: Data.length, else Data.units), or have it dropped or cut "
                "(Data.over_length)",
            )
        parts = (first_messages(item, end) for end in reversed(item.ends) if self.over == "cut")
        return next((part for part in parts if part and not self._over(part)), None)

    def empty_row(self) -> dict[str, Shaped[np.ndarray, "..."]]:
        """The arrays of `packing.Row`, and for each modality "slots.NAME" [S] and "media.NAME.FIELD" [N, ...]."""
        row: dict[str, np.ndarray] = empty_row(self.budgets.tokens).arrays
        row["positions"] = np.zeros((self.budgets.tokens, *self.position), np.int32)
        for name, units in self.budgets.units.items():
            shape = self.shapes[name]
            row[f"slots.{name}"] = np.full(self.budgets.tokens, -1, np.int32)
            row[f"media.{name}.features"] = np.zeros((units, *shape.features), shape.dtype)
            row[f"media.{name}.unit_segments"] = np.zeros(units, np.int32)
            row[f"media.{name}.unit_positions"] = np.zeros((units, *shape.position), np.int32)
            row[f"media.{name}.unit_grid"] = np.zeros((units, 3), np.int32)
            row[f"media.{name}.unit_valid"] = np.zeros(units, np.int32)
        return row

    def _costs(self, item: Item) -> tuple[int, ...]:
        costs = item.costs()
        return tuple(costs.get(name, 0) for name in self.budgets.limits())

    def _over(self, item: Item) -> list[str]:
        if unknown := item.media.keys() - self.budgets.units:
            raise BadRow(item.row_id, f"has {min(unknown)}, for which a row has no budget: give one, or drop such rows")
        limits = self.budgets.limits()
        return [name for name, cost in zip(limits, self._costs(item), strict=True) if cost > limits[name]]


def _lay(row: dict[str, np.ndarray], item: Item, piece: Piece, segment: int, used: Counter[str]) -> None:
    """Write a piece into a row behind what is `used` of each budget, and count it in."""
    place = slice(used["tokens"], used["tokens"] + piece.tokens)
    targets = item.tokens[piece.first + 1 : piece.end + 1]  # one fewer than tokens where the item ends here
    aimed = slice(place.start, place.start + targets.size)
    positions = np.arange(piece.tokens) if item.positions is None else item.positions
    row["tokens"][place] = item.tokens[piece.first : piece.end]
    row["segment_ids"][place] = segment
    row["positions"][place] = positions[:, None] if positions.ndim < row["positions"].ndim else positions
    row["targets"][aimed] = targets
    row["weights"][aimed] = item.trained[piece.first + 1 : piece.end + 1]
    row["sources"][place] = item.source
    for name, media in item.media.items():
        units = slice(used[name], used[name] + len(media.features))
        for each in OF_UNITS:
            array, whole = getattr(media, each), row[f"media.{name}.{each}"]
            if array.shape[1:] != whole.shape[1:] or array.dtype != whole.dtype:
                raise ValueError(
                    f"{item.row_id}: {name} {each} {array.dtype}{array.shape} in {whole.dtype}{whole.shape}"
                )
            whole[units] = array
        row[f"media.{name}.unit_segments"][units] = segment
        row[f"slots.{name}"][place] = np.where(media.slots < 0, -1, media.slots + used[f"encoded {name}"])
    used.update(item.costs() | {"tokens": piece.tokens})


def batch_fields(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Batch`: `slots` and `media` as dicts by modality (a `Media` as a dict of its fields)."""
    fields: dict[str, Any] = {"media": {}, "slots": {}}
    for name, array in arrays.items():
        match name.split("."):
            case "media", modality, each:
                fields["media"].setdefault(modality, {})[each] = array
            case "slots", modality:
                fields["slots"][modality] = array
            case _:
                fields[name] = array
    return fields


def measure(arrays: Mapping[str, Shaped[np.ndarray, "rows ..."]]) -> dict[str, float]:
    """How full rows are, and what attention costs in them.

    "fill/tokens", "fill/image", ...: the share of the budget that is not padding.
    "pairs/tokens": query-key pairs a row, causal within documents. "pairs/image", ...: pairs of units a row, where
    each sees all units of its own image, clip or sound. "pairs_max/...": of the row that has most.
    """
    segments = {"tokens": arrays["segment_ids"]}
    pairs = {"tokens": np.array([_causal_pairs(row) for row in arrays["segment_ids"]])}
    for name in batch_fields(arrays)["media"]:
        segments[name] = arrays[f"media.{name}.unit_segments"]
        pairs[name] = arrays[f"media.{name}.unit_grid"].astype(np.int64).prod(-1).sum(1)  # 0 at padding
    return (
        {f"fill/{name}": float((each > 0).mean()) for name, each in segments.items()}
        | {f"pairs/{name}": float(each.mean()) for name, each in pairs.items()}
        | {f"pairs_max/{name}": float(each.max()) for name, each in pairs.items()}
    )


def imbalance(arrays: Mapping[str, Shaped[np.ndarray, "rows ..."]], parts: int) -> dict[str, float]:
    """How much more than the others the busiest of `parts` equal runs of rows has: 1 where all have the same.

    "imbalance/tokens", "imbalance/image", ...: the most over the mean of what is not padding.
    """
    media = batch_fields(arrays)["media"]
    segments = {"tokens": arrays["segment_ids"]} | {name: each["unit_segments"] for name, each in media.items()}
    work = {name: (each > 0).reshape(parts, -1).sum(1) for name, each in segments.items()}
    return {f"imbalance/{name}": float(each.max() / each.mean()) if each.any() else 1.0 for name, each in work.items()}


def _causal_pairs(segment_ids: Int32[np.ndarray, "S"]) -> int:
    lengths = np.bincount(segment_ids[segment_ids > 0])
    return int((lengths * (lengths + 1) // 2).sum())
