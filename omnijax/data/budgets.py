"""Budgets: which items make a row, from their sizes alone, and which budgets a sample of items asks for."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from omnijax.errors import UserError

MOST_UNPACKED = 10_000  # items one after the other of which nothing is packed, before that is called a mistake


@dataclass(frozen=True)
class Budgets:
    """What a row holds: tokens, and by modality units; encoded features too where units do not say it."""

    tokens: int
    units: Mapping[str, int] = field(default_factory=dict)
    encoded: Mapping[str, int] = field(default_factory=dict)

    def limits(self) -> dict[str, int]:
        """All of them, by one name each: "tokens", "image", "encoded image"."""
        encoded = {f"encoded {name}": limit for name, limit in self.encoded.items()}
        return {"tokens": self.tokens, **self.units, **encoded}


class Size(NamedTuple):
    """What an item takes of each budget, in the order of `Budgets.limits`; no tokens: it is not packed.

    `lost` of its tokens are left out because it is beyond a budget. `notes` are counted.
    """

    costs: tuple[int, ...]
    lost: int = 0
    notes: tuple[str, ...] = ()


SizeOf = Callable[[int], Size | None]
"""Gives the size of item n, None past the last one."""


class Piece(NamedTuple):
    """The tokens `first` to `end` of item `number`, which takes `costs` as a whole."""

    number: int
    first: int
    end: int
    costs: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.end - self.first

    def takes(self) -> tuple[int, ...]:
        """Its share of each budget."""
        return (self.tokens, *self.costs[1:])


def plan_row(
    budgets: Budgets, look_ahead: int, size_of: SizeOf, state: Mapping[str, Any]
) -> tuple[list[Piece], dict[str, Any]]:
    """The pieces of the row that follows `state`, in order, and the state after it; `FirstFit` says what they obey."""
    window, length = _Window(budgets, look_ahead, size_of, state), budgets.tokens
    window.refill()
    room = np.array(list(budgets.limits().values()))
    oldest, pieces = window.waiting[:1], list[Piece]()
    reserved = length - length // 2 if oldest and oldest[0].tokens > length else 0
    room[0] -= reserved
    chosen = window.best(room) if reserved else oldest
    while chosen:
        pieces += chosen
        room -= np.sum([piece.takes() for piece in chosen], 0)
        window.take(chosen)
        window.refill()
        chosen = window.best(room)
    room[0] += reserved
    if room[0] > length // 64:  # a shorter piece has too little to learn from
        pieces += window.split(int(room[0]))
    return sorted(pieces), window.state()


def choose(costs: Int64[np.ndarray, "items budgets"], room: Int64[np.ndarray, "budgets"]) -> list[int]:
    """The items, in their order, that fill the room of a row best; all of them where they fit together.

    An item's value is the dot product of its share of the room and everybody's, so that a budget counts for as much as
    it is in demand. Rows are tried that begin with each item and go on with the most valuable that fit; the row of
    most value is taken.
    """
    fitting = np.flatnonzero((costs <= room).all(1))
    costs = costs[fitting]
    if (costs.sum(0) <= room).all():
        return fitting.tolist()
    shares = costs / np.maximum(room, 1)
    demand = costs.sum(0) / np.maximum(room, 1)
    # As integers, sums do not depend on the machine, and so no row does.
    values = np.rint(shares * demand * 2**20).astype(np.int64).sum(1)
    order = np.argsort(-values, kind="stable")
    costs, values = costs[order], values[order]
    left = (room - costs).T.copy()  # of the row that begins with each item
    taken = np.eye(len(costs), dtype=bool)  # [item, row]
    for item, cost in enumerate(costs.tolist()):
        fits = ~taken[item]
        for budget, share in zip(left, cost, strict=True):
            fits &= budget >= share
        for budget, share in zip(left, cost, strict=True):
            budget -= share * fits
        taken[item] |= fits
    return sorted(fitting[order[taken[:, (values @ taken).argmax()]]].tolist())


class _Window:
    """The items that wait, oldest first, while a row is planned."""

    def __init__(self, budgets: Budgets, look_ahead: int, size_of: SizeOf, state: Mapping[str, Any]):
        self._budgets, self._look_ahead, self._size_of = budgets, look_ahead, size_of
        self.waiting = [
            Piece(number, first, costs[0], tuple(costs)) for number, first, costs in state.get("waiting", ())
        ]
        self._next, self._counts = state.get("next", 0), Counter(state.get("counts", {}))

    def refill(self) -> None:
        """Let items wait until `look_ahead` do."""
        unpacked = 0
        while len(self.waiting) < self._look_ahead and (size := self._size_of(self._next)) is not None:
            if packed := size.costs[0] > 0:
                self.waiting.append(Piece(self._next, 0, size.costs[0], size.costs))
            unpacked = 0 if packed else unpacked + 1
            if unpacked == MOST_UNPACKED:
                raise UserError(
                    f"none of {unpacked} items, up to number {self._next}, fits a row of {self._budgets.limits()}: "
                    "raise these budgets, or give other data"
                )
            self._next += 1
            self._counts["read"] += 1
            self._counts["lost_tokens"] += size.lost
            self._counts["cut"] += packed and size.lost > 0
            self._counts["dropped"] += not packed and size.lost > 0
            self._counts["empty"] += not packed and not size.lost
            self._counts.update(f"media/{note}" for note in size.notes)

    def best(self, room: Int64[np.ndarray, "budgets"]) -> list[Piece]:
        """What fills the room best of the items that are no longer than a row."""
        whole = [piece for piece in self.waiting if piece.tokens <= self._budgets.tokens]
        costs = np.array([piece.takes() for piece in whole], np.int64).reshape(-1, room.size)
        return [whole[index] for index in choose(costs, room)]

    def take(self, pieces: Sequence[Piece]) -> None:
        taken = {piece.number for piece in pieces}
        self.waiting = [piece for piece in self.waiting if piece.number not in taken]
        self._counts["packed"] += len(pieces)

    def split(self, tokens: int) -> list[Piece]:
        """The next tokens of the oldest item that is longer than a row, if there is one."""
        for index, piece in enumerate(self.waiting):
            if piece.tokens > self._budgets.tokens:
                middle = piece.first + tokens
                self.waiting[index] = piece._replace(first=middle)
                return [piece._replace(end=middle)]
        return []

    def state(self) -> dict[str, Any]:
        waiting = [[piece.number, piece.first, list(piece.costs)] for piece in self.waiting]
        return {"next": self._next, "waiting": waiting, "counts": dict(self._counts)}


@dataclass(frozen=True)
class Proposal:
    """Budgets, and what becomes of a sample of items in them.

    fill:   by budget, the share that is not padding
    wasted: by budget, the operations a row that go into padding
    waste:  the share of all operations that do
    lost:   items beyond a budget
    """

    budgets: Budgets
    fill: dict[str, float]
    wasted: dict[str, float]
    waste: float
    lost: int


def propose_budgets(
    costs: Sequence[Mapping[str, int]],
    lengths: Iterable[int],
    flops: Mapping[str, float],
    *,
    look_ahead: int = 64,
    split_text: bool = True,
    multiple: int = 8,
) -> list[Proposal]:
    """Budgets for items like these, best first: those that lose the fewest items, then those that waste least.

    Args:
        costs: of a sample of items, tokens and units as `Item.costs` gives them.
        lengths: the tokens of a row to propose for.
        flops: operations of one token ("tokens") and of one unit of each modality, attention aside.
        split_text: what has no units is a document, and split where it is longer than a row.
        multiple: what the budgets of units are a multiple of.

    The units are what rows full of tokens have on average, or up to twice that, but no fewer than the largest item
    has, or the 99th percentile of items. Each choice is tried on all the items.
    """
    units = {name: np.array([each.get(name, 0) for each in costs]) for name in flops if name != "tokens"}
    units = {name: each for name, each in units.items() if each.any()}
    tokens = sum(each["tokens"] for each in costs)
    candidates = set()
    for length in lengths:
        for quantile in (1, 0.99):
            least = {name: np.quantile(each[each > 0], quantile, method="higher") for name, each in units.items()}
            for slack in (1, 1.125, 1.25, 1.5, 2):
                needs = [max(slack * length * each.sum() / tokens, least[name]) for name, each in units.items()]
                candidates.add((length, *(-int(-need // multiple) * multiple for need in needs)))
    proposals = [
        _try(Budgets(length, dict(zip(units, budgets, strict=True))), costs, flops, look_ahead, split_text)
        for length, *budgets in sorted(candidates)
    ]
    return sorted(proposals, key=lambda proposal: (proposal.lost, proposal.waste))


def _try(
    budgets: Budgets, costs: Sequence[Mapping[str, int]], flops: Mapping[str, float], look_ahead: int, split_text: bool
) -> Proposal:
    limits = budgets.limits()

    def size_of(number: int) -> Size | None:
        if number == len(costs):
            return None
        takes = tuple(costs[number].get(name, 0) for name in limits)
        over = [name for name, each in zip(limits, takes, strict=True) if each > limits[name]]
        is_split = split_text and over == ["tokens"] and not any(takes[1:])
        return Size((0,), takes[0]) if over and not is_split else Size(takes)

    state: dict[str, Any] = {"next": 0}
    used, rows = np.zeros(len(limits), np.int64), 0
    while state["next"] < len(costs):  # the rows after that, with ever less to choose from, are no measure
        pieces, state = plan_row(budgets, look_ahead, size_of, state)
        used += np.sum([piece.takes() for piece in pieces], 0, dtype=np.int64)
        rows += 1
    fill = {name: float(each / (rows * limits[name])) for name, each in zip(limits, used, strict=True)}
    wasted = {name: (1 - share) * limits[name] * flops[name] for name, share in fill.items()}
    waste = sum(wasted.values()) / sum(limit * flops[name] for name, limit in limits.items())
    return Proposal(budgets, fill, wasted, waste, state["counts"]["dropped"])
