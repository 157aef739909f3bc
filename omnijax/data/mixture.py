"""Mixtures: several sources in given proportions, and from which of them a shard's next item comes.

A shard draws from the member that is furthest behind its share, so the shares hold for any number of items, not only
on average. What a member is behind is all the state there is. Shards begin at different points of that cycle, or all
rows of a batch would turn to the rarest member at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from omnijax.data.documents import Table, split
from omnijax.data.order import Order
from omnijax.data.sources import Source
from omnijax.errors import UserError
from omnijax.fields import ranged

Weight = float | tuple[tuple[int, float], ...]
By = Literal["rows", "tokens"]
Stop = Literal["first", "all", "never"]
Interpolation = Literal["constant", "linear"]

TOKENS_OF_AN_ITEM = 1024  # by order of magnitude: how far apart shards begin in a mixture by tokens


@dataclass(frozen=True)
class Member:
    """One source of a mixture.

    name:   in metrics and messages
    weight: its share, relative to the other weights; or ((step, weight), ...), where step counts those done before and
            the first is 0
    epochs: passes over the source before it has ended; None: without end
    """

    name: str
    source: Source
    weight: Weight = 1.0
    epochs: int | None = ranged(None, at_least=1)


@dataclass(frozen=True)
class Mixture:
    """Sources in proportion to their weights; it may stand where a source does.

    by:            whether weights are shares of the rows that are read or of their tokens
    stop:          when there are no more rows: once the `first` member has ended, once `all` have (the others share
                   what an ended one would have got), or `never`
    interpolation: what a weight is between two steps of its schedule: `constant`, as at the earlier, or `linear`
    """

    members: tuple[Member, ...]
    by: By = "rows"
    stop: Stop = "never"
    interpolation: Interpolation = "constant"

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if not names or "" in names or len(set(names)) < len(names):
            raise UserError(f"Mixture.members have the names {names}: give at least one, each with a name of its own")
        for member in self.members:
            if mistake := _mistake(member.weight):
                raise UserError(f"Mixture member {member.name!r} has weight {member.weight!r}: {mistake}")
            if self.stop == "never" and member.epochs is not None:
                raise UserError(
                    f"Mixture member {member.name!r} has epochs {member.epochs}, but Mixture.stop is 'never': "
                    "leave epochs out, or set stop to 'first' or 'all'"
                )
        endless = [member.name for member in self.members if member.epochs is None]
        if endless and (self.stop == "all" or (self.stop == "first" and len(endless) == len(names))):
            raise UserError(
                f"Mixture.stop is {self.stop!r}, but {', '.join(map(repr, endless))} never ends: give it epochs, "
                "or set stop to 'never'"
            )
        weights = [member.weight for member in self.members]
        for step in sorted({step for weight in weights for step, _ in _points(weight)}):
            if not any(weight_at(weight, step, self.interpolation) for weight in weights):
                raise UserError(f"all weights of the mixture are 0 at step {step}: give one of its members some")


def source_names(source: Source | Mixture) -> tuple[str, ...]:
    """The names of a mixture's members; a source alone has none."""
    return tuple(member.name for member in source.members) if isinstance(source, Mixture) else ()


def members_of(source: Source | Mixture) -> tuple[Member, ...]:
    """The members of a mixture; a source alone is the only one, without a name."""
    return source.members if isinstance(source, Mixture) else (Member("", source),)


def open_members(source: Source | Mixture, holdout: float = 0.0) -> tuple[list[Table[Any, Any]], list[Table[Any, Any]]]:
    """The rows of a source, or of each member of a mixture, to train on, and those of each that are held out.

    Raises `UserError` where there are none.
    """
    train: list[Table[Any, Any]] = []
    heldout: list[Table[Any, Any]] = []
    for member in members_of(source):
        try:
            documents = member.source.open()
            if not len(documents):
                raise UserError("it has no row: give it some, or leave it out")
            first, last = split(documents, holdout) if holdout else (documents, None)
        except UserError as error:
            raise UserError(f"Mixture member {member.name!r}: {error}" if member.name else str(error)) from error
        train.append(first)
        heldout += [] if last is None else [last]
    return train, heldout


def deal_members(source: Source | Mixture, sizes: Sequence[int], shards: int, seed: int) -> "Deal":
    """How a source, or the members of a mixture, of so many rows each, are dealt to shards."""
    if not isinstance(source, Mixture):
        return Deal(tuple(sizes), shards, seed)
    return Deal(
        sizes=tuple(sizes),
        shards=shards,
        seed=seed,
        names=tuple(member.name for member in source.members),
        weights=tuple(member.weight for member in source.members),
        epochs=tuple(member.epochs for member in source.members),
        by=source.by,
        stop=source.stop,
        interpolation=source.interpolation,
    )


@dataclass(frozen=True)
class Deal:
    """Which row of which member each shard reads next; one member without end by default.

    Shard v of V has the rows v, v + V, v + 2V, ... of each member's own endless order. `places` are how many of them it
    has read of each member, and `owed` how many rows (or tokens) each member is behind its share in this shard.
    """

    sizes: tuple[int, ...]
    shards: int
    seed: int
    names: tuple[str, ...] = ("data",)
    weights: tuple[Weight, ...] = (1.0,)
    epochs: tuple[int | None, ...] = (None,)
    by: By = "rows"
    stop: Stop = "never"
    interpolation: Interpolation = "constant"

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise UserError(f"the data has {self.shards} shards: give at least 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"data seed is {self.seed}: it must lie in 0..{2**32 - 1}")
        members = zip(self.names, self.sizes, self.epochs, strict=True)
        limited = [(f"of {name!r} ", size * epochs) for name, size, epochs in members if epochs is not None]
        for name, rows in [("", sum(self.sizes)), *limited]:
            if rows < self.shards:
                mend = f"give more documents, or at most {rows} shards"
                raise UserError(f"{rows} documents {name}for {self.shards} shards: each shard needs its own; {mend}")

    def orders(self) -> list[Order]:
        """The order of each member's rows."""
        return [Order(size, self.seed, member) for member, size in enumerate(self.sizes)]

    def shares(self, step: int) -> list[float]:
        """What part of the rows or tokens each member has at a step; they sum to 1."""
        weights = [weight_at(weight, step, self.interpolation) for weight in self.weights]
        return [weight / sum(weights) for weight in weights]

    def first_owed(self, shard: int) -> list[float]:
        """What the members of a shard are behind before its first row: as if it had been drawing for a while.

        Over the shards, each member is at evenly spread points of its cycle.
        """
        shares = self.shares(0)
        largest = shares.index(max(shares))
        owed = [-(Order(self.shards, self.seed, member)[shard] + 0.5) / self.shards for member in range(len(shares))]
        owed[largest] -= sum(owed)
        for _ in range(2 * len(shares)):  # until what the largest is ahead or behind is no more than one row
            owed = settle(owed, shares, owed.index(max(owed)), 1)
        return owed if self.by == "rows" else [each * TOKENS_OF_AN_ITEM for each in owed]

    def draw(
        self, shard: int, places: Sequence[int], owed: Sequence[float], shares: Sequence[float]
    ) -> tuple[int, list[float]] | None:
        """The member that the shard reads next, and the shares of those it was chosen from; None where none is left."""
        ended = [
            epochs is not None and shard + self.shards * read >= epochs * size
            for epochs, size, read in zip(self.epochs, self.sizes, places, strict=True)
        ]
        if self.stop == "all":
            if all(ended):
                return None
            shares = [0.0 if over else share for share, over in zip(shares, ended, strict=True)]
            if not any(shares):
                left = [name for name, over in zip(self.names, ended, strict=True) if not over]
                raise UserError(
                    f"of the mixture, only {', '.join(map(repr, left))} are left, which now have weight 0: "
                    "raise the epochs of the others, or the weights"
                )
            shares = [share / sum(shares) for share in shares]
        candidates = [member for member, share in enumerate(shares) if share]
        member = max(candidates, key=lambda member: (owed[member], shares[member], -member))
        return None if ended[member] else (member, list(shares))


def settle(owed: Sequence[float], shares: Sequence[float], member: int, amount: int) -> list[float]:
    """What the members are behind after one of them gave `amount` rows or tokens."""
    after = [each + share * amount for each, share in zip(owed, shares, strict=True)]
    after[member] -= amount
    return after


def weight_at(weight: Weight, step: int, interpolation: Interpolation) -> float:
    """A weight at a step; it stays what it is at the schedule's last point."""
    points = _points(weight)
    if interpolation == "linear":
        steps, values = zip(*points, strict=True)
        return float(np.interp(step, steps, values))
    return [value for first, value in points if first <= step][-1]


def _points(weight: Weight) -> tuple[tuple[int, float], ...]:
    return weight if isinstance(weight, tuple) else ((0, float(weight)),)


def _mistake(weight: Weight) -> str:
    points = _points(weight)
    if not points or points[0][0] != 0 or any(after <= before for (before, _), (after, _) in pairwise(points)):
        return "the steps of its schedule must rise from 0"
    if not all(math.isfinite(value) and value >= 0 for _, value in points):
        return "it must be a number of at least 0"
    return "" if any(value for _, value in points) else "it is never drawn; leave it out"
