"""Tables, such as of documents: random access to items that know where they came from, joined or held out in part."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from omnijax.errors import UserError

Item = TypeVar("Item", covariant=True)
Id = TypeVar("Id", covariant=True)


class Table(Protocol[Item, Id]):
    """A Grain random access source; `row_id(i)` names the source, file and row item i came from."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...

    def row_id(self, index: int, /) -> Id: ...


Documents = Table[str, str]
"""A table of texts."""


@dataclass(frozen=True, eq=False)
class Concatenation(Generic[Item, Id]):
    """Several tables as one, one part after the other."""

    parts: tuple[Table[Item, Id], ...]
    ends: tuple[int, ...]  # part p holds the items up to ends[p]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Item:
        part, inner = self._find(index)
        return part[inner]

    def row_id(self, index: int) -> Id:
        part, inner = self._find(index)
        return part.row_id(inner)

    def _find(self, index: int) -> tuple[Table[Item, Id], int]:
        index = range(len(self))[index]
        part = bisect_right(self.ends, index)
        return self.parts[part], index - (self.ends[part - 1] if part else 0)


@dataclass(frozen=True, eq=False)
class View(Generic[Item, Id]):
    """The items `rows` of another table."""

    table: Table[Item, Id]
    rows: range

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        return self.table[self.rows[index]]

    def row_id(self, index: int) -> Id:
        return self.table.row_id(self.rows[index])


def concatenate(parts: Sequence[Table[Item, Id]]) -> Table[Item, Id]:
    """The items of `parts` (one or more), one part after the other."""
    return parts[0] if len(parts) == 1 else Concatenation(tuple(parts), tuple(accumulate(len(part) for part in parts)))


def split(documents: Table[Item, Id], fraction: float) -> tuple[View[Item, Id], View[Item, Id]]:
    """Hold out the tail: (train, held out), where held out is the fewest last documents that are >= `fraction` of all.

    The fraction counts documents, not bytes. Raises `UserError` where either side would be empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"held-out fraction is {fraction}: it must lie between 0 and 1, both excluded")
    count = len(documents)
    # Exact on the number as it was written: in binary, 0.07 of 100 documents is a little more than 7.
    held = math.ceil(Fraction(str(fraction)) * count)
    if count < 2 or held == count:
        raise UserError(
            f"holding out {fraction} of {count} documents leaves {count - held} to train on: "
            "give more documents or a smaller fraction"
        )
    return View(documents, range(count - held)), View(documents, range(count - held, count))
