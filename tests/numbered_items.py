"""Streams whose items are made of their numbers, in a module that workers import without jax."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omnijax.data.budgets import Budgets
from omnijax.data.mixture import Deal
from omnijax.data.omni_packing import FirstFit, Item, MediaItem
from omnijax.data.packing import ConcatenateAndSplit, Packer
from omnijax.data.shards import Pipeline
from omnijax.errors import BadRow
from omnijax.units import UnitShape

DEADLY = 10_000


@dataclass(frozen=True)
class Numbers:
    """A table of the numbers below `size`."""

    name: str
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return range(self.size)[index]

    def row_id(self, index: int) -> str:
        return f"{self.name}:{index}"


class Awkward(Exception):
    """It can be pickled, and not be read back."""

    def __init__(self, *, reason: str):
        super().__init__(reason)


@dataclass(frozen=True)
class Samples:
    """Items of 1 to 60 tokens, a third of them with an image of up to 6 units.

    bad: what some raise; None is `Awkward`
    """

    rows: Numbers
    source: int = 0
    bad: Mapping[int, Exception | None] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        return {"samples": 1}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        number, row_id = self.rows[index], self.rows.row_id(index)
        if number in self.bad:
            raise self.bad[number] or Awkward(reason=f"{number} is odd")
        if number == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        length, units = 1 + number * 37 % 60, number * 5 % 7 if number % 3 == 0 else 0
        media = {"image": image(number, length, units)} if units and units <= length else {}
        trained = np.arange(length) % 2 == 1
        name = f"{row_id} with jax" if os.environ.get("WATCH_JAX") and "jax" in sys.modules else row_id
        return Item(np.full(length, number % 251, np.int32), trained, name, self.source, media=media)


def image(number: int, length: int, units: int) -> MediaItem:
    slots = np.full(length, -1, np.int32)
    slots[:units] = np.arange(units)
    grid = np.tile(np.array([[1, 1, units]], np.int32), (units, 1))
    return MediaItem(
        np.full((units, 4), number, np.float32),
        np.zeros((units,), np.int32),
        grid,
        np.full(units, 4, np.int32),
        slots,
        units,
    )


PACKERS: dict[str, Packer] = {
    "split": ConcatenateAndSplit(64),
    "first fit": FirstFit(Budgets(64, {"image": 8}), {"image": UnitShape((4,))}, look_ahead=12),
}
SIZES = (50, 17, 9)
BAD = {number: BadRow(f"a:{number}", "its image is cut off") for number in (3, 4, 31)}


def pipeline(
    packer: str = "first fit",
    *,
    rows: int = 8,
    shards: int = 8,
    bad: Mapping[int, Exception | None] = BAD,
    **options: Any,
) -> Pipeline:
    """Three members, the first with bad rows, by tokens and with a schedule; the options are of `Deal`."""
    tables = [Numbers(name, size) for name, size in zip("abc", SIZES, strict=True)]
    items = tuple(Samples(table, number, bad if table.name == "a" else {}) for number, table in enumerate(tables))
    weights = (3.0, ((0, 1.0), (9, 2.0)), 1.0)
    given: dict[str, Any] = {"names": ("a", "b", "c"), "weights": weights, "epochs": (None,) * 3, "by": "tokens"}
    return Pipeline(items, Deal(SIZES, shards, 5, **(given | options)), PACKERS[packer], rows, 1000)
