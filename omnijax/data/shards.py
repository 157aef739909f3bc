"""Shards: what a stream is made of, and the rows of each shard after a given state. Workers run this; no jax here."""

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from omnijax.data.items import Items
from omnijax.data.mixture import Deal, settle
from omnijax.data.order import Order
from omnijax.data.packing import Packer, Rows, stack_rows
from omnijax.errors import BadRow, UserError

KEPT_BYTES = 2**30
"""Prepared items that a process keeps while they wait for their row, of all shards together; others are made again."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """All that decides the rows of a stream. It pickles small, as its items do, and imports no jax.

    items:         of each member of the mixture
    deal:          which of them a shard reads next
    packer:        makes rows of them
    rows:          of the global batch; a multiple of the shards
    bad_row_limit: how many bad rows may be passed by in all; None: the first one is raised
    """

    items: tuple[Items, ...]
    deal: Deal
    packer: Packer
    rows: int
    bad_row_limit: int | None = None

    def __post_init__(self) -> None:
        rows, shards = self.rows, self.deal.shards
        if rows < 1:
            raise UserError(f"{rows} rows a step over {shards} shards: give at least 1 of each, as many shards as rows")
        if rows % shards:
            fewer = max(number for number in range(1, shards) if rows % number == 0)
            more = shards * (rows // shards + 1)
            raise UserError(
                f"{rows} rows a step over {shards} shards: shards must divide rows; "
                f"set shards to {fewer} or rows to {more}"
            )

    def rows_of(self, held: Collection[int]) -> list[int]:
        """The rows of a batch that these shards make: row r is of shard r mod V."""
        return [row for row in range(self.rows) if row % self.deal.shards in held]

    def item(self, shard: int, member: int, place: int) -> Any:
        """The shard's item number `place` of a member; raises `BadRow`."""
        return self.items[member][self._orders[member][shard + place * self.deal.shards]]

    @cached_property
    def _orders(self) -> list[Order]:
        return self.deal.orders()


@dataclass(frozen=True)
class ShardState:
    """Where a shard is. Nothing in it is ever changed in place.

    packer:  the packer's own state
    places:  rows read of each member
    owed:    rows, or tokens, that each member is behind its share
    step:    steps that are done
    items:   how many the packer was given
    waiting: [number, member, place] of each of those that it needs again
    bad:     bad rows passed by
    ended:   the mixture has no more
    """

    packer: dict[str, Any]
    places: list[int]
    owed: list[float]
    step: int = 0
    items: int = 0
    waiting: list[list[int]] = field(default_factory=list)
    bad: int = 0
    ended: bool = False

    def to_json(self) -> dict[str, Any]:
        """The packer's state, and the rest as its "draws"."""
        draws = {name: value for name, value in vars(self).items() if name != "packer"}
        return {**self.packer, "draws": draws}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "ShardState":
        return cls({name: value for name, value in state.items() if name != "draws"}, **state["draws"])


def first_state(deal: Deal, shard: int) -> ShardState:
    """Where a shard begins."""
    return ShardState({}, [0] * len(deal.sizes), deal.first_owed(shard))


@dataclass(frozen=True)
class Step:
    """What shards give to one step.

    rows:    theirs, in their order
    skipped: a row each, the bad rows of data that were passed by while it was made
    states:  of the shards, after it
    """

    rows: Rows
    skipped: tuple[tuple[BadRow, ...], ...]
    states: dict[int, ShardState]


def make_steps(pipeline: Pipeline, states: Mapping[int, ShardState]) -> Generator[Step, None, None]:
    """Step after step of the shards of `states`, without end: one that has ended gives rows of padding."""
    states, kept = dict(states), Kept()
    shards = [row % pipeline.deal.shards for row in pipeline.rows_of(states)]
    while True:
        packed, skipped = [], []
        for shard in shards:
            reader = _Reader(pipeline, shard, states[shard], kept)
            row, after = pipeline.packer.next_row(reader, states[shard].packer)
            states[shard] = reader.state(after)
            packed.append(row)
            skipped.append(tuple(reader.skipped))
        states = {shard: replace(state, step=state.step + 1) for shard, state in states.items()}
        yield Step(stack_rows(packed), tuple(skipped), dict(states))


class Kept:
    """The prepared items that shards wait with, by shard and number."""

    def __init__(self) -> None:
        self._items: dict[int, dict[int, Any]] = {}
        self._bytes = 0

    def get(self, shard: int, number: int) -> Any | None:
        return self._items.get(shard, {}).get(number)

    def put(self, shard: int, number: int, item: Any) -> None:
        self._items.setdefault(shard, {})[number] = item
        self._bytes += _bytes(item)

    def keep(self, shard: int, waiting: set[int]) -> None:
        """Drop what the shard no longer waits with, and its oldest items where all together are too many bytes."""
        items = self._items.get(shard, {})
        for number in sorted(items):
            if number not in waiting or self._bytes > KEPT_BYTES:
                self._bytes -= _bytes(items.pop(number))


def _bytes(item: Any) -> int:
    return item.tokens.nbytes + sum(media.features.nbytes for media in getattr(item, "media", {}).values())


class _Reader:
    """What a packer reads from while it makes one row: items drawn from the mixture, bad rows passed by."""

    def __init__(self, pipeline: Pipeline, shard: int, before: ShardState, kept: Kept):
        self.skipped: list[BadRow] = []
        self._pipeline, self._shard, self._before, self._kept = pipeline, shard, before, kept
        self._places, self._owed, self._items, self._ended = (
            list(before.places),
            before.owed,
            before.items,
            before.ended,
        )
        self._shares = pipeline.deal.shares(before.step)
        self._origins = {number: (member, place) for number, member, place in before.waiting}

    def __call__(self, number: int) -> Any | None:
        if (item := self._kept.get(self._shard, number)) is not None:
            return item
        if number in self._origins:
            item = self._pipeline.item(self._shard, *self._origins[number])
        elif number == self._items:
            item = self._draw()
        else:
            raise IndexError(f"item {number} of shard {self._shard} neither waits nor is the next, {self._items}")
        if item is not None:
            self._kept.put(self._shard, number, item)
        return item

    def state(self, packer: dict[str, Any]) -> ShardState:
        """The shard's state after the row, which left the packer in this one."""
        waiting = [number for number, *_ in packer.get("waiting", ())]
        self._kept.keep(self._shard, set(waiting))
        return ShardState(
            packer,
            self._places,
            self._owed,
            self._before.step,
            self._items,
            [[number, *self._origins[number]] for number in waiting],
            self._before.bad + len(self.skipped),
            self._ended,
        )

    def _draw(self) -> Any | None:
        """The next item, noted under its number; None where the mixture has no more, or too many rows are bad."""
        deal, limit = self._pipeline.deal, self._pipeline.bad_row_limit
        while not self._ended:
            if limit is not None and self._before.bad + len(self.skipped) > limit:
                return None  # whoever takes the rows counts, and stops
            drawn = deal.draw(self._shard, self._places, self._owed, self._shares)
            if drawn is None:
                self._ended = True
                return None
            member, shares = drawn
            place = self._places[member]
            self._places[member] += 1
            try:
                item = self._pipeline.item(self._shard, member, place)
            except BadRow as error:
                if limit is None:
                    raise
                self.skipped.append(error)
                continue
            self._owed = settle(self._owed, shares, member, 1 if deal.by == "rows" else item.tokens.size)
            self._origins[self._items] = (member, place)
            self._items += 1
            return item
        return None
