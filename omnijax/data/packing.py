"""Rows of packed items: what packers have in common, and the one for pretraining.

It lays documents end to end and cuts them into rows of one length. Each document is its tokens and one end-of-document
token. A document that meets the end of a row goes on in the next one, as a new segment. Packing is a pure function of
a place in the documents, so that place is its whole state.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Shaped

from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import UserError


@dataclass(frozen=True)
class Document:
    """One document's tokens, its end included (none at all where the text is empty), and its row id.

    source: the number of the data source that it is from
    """

    tokens: Int32[np.ndarray, "tokens"]
    row_id: str
    source: int = 0


@dataclass(frozen=True)
class Place:
    """Where the next row begins: a document, a token in it, and how many empty documents were skipped before."""

    document: int = 0
    token: int = 0
    empty: int = 0


@dataclass(frozen=True)
class Row:
    """One packed row.

    arrays: `tokens`, `segment_ids` (1.. a document's piece, 0 padding), `positions` (restart at each piece), `targets`
        (the document's next token, also past the end of the row), `weights` (1 where there is a target; 0 at the end
        of a document and at padding) and `sources` (the number of the data source).
    row_ids: one name a piece, with its range of tokens: "jsonl:a.jsonl:7[0:512]".
    """

    arrays: dict[str, Shaped[np.ndarray, "S"]]
    row_ids: tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of one step; arrays and names as in `Row`.

    state:   the stream's state once they are consumed
    metrics: of the data, by name
    """

    arrays: dict[str, Shaped[np.ndarray, "rows S"]]
    row_ids: tuple[tuple[str, ...], ...]
    state: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Packer(Protocol):
    """Makes rows of items, such as `Document`s. A frozen dataclass: its fields are part of what a stream is."""

    def next_row(self, read: Callable[[int], Any], state: dict[str, Any]) -> tuple[Row, dict[str, Any]]:
        """The row that follows `state`, {} at first, and the state after it: a pure function.

        `read(n)` gives item n, and None where the items have ended; new ones are asked for in their order. A row
        without `row_ids` says that they have ended and all are packed. A state is small JSON; its "waiting" lists the
        items that were read and are needed again, each as a list that begins with the item's number, and its "counts"
        are reported.
        """
        ...


@dataclass(frozen=True)
class ConcatenateAndSplit:
    """`pack_row` as a packer."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UserError(f"row length is {self.length}: it must be at least 2, or a row could have no target")

    def next_row(self, read: Callable[[int], Document | None], state: dict[str, Any]) -> tuple[Row, dict[str, Any]]:
        place = Place(**{name: state[name] for name in asdict(Place())}) if state else Place()
        row, place = pack_row(read, place, self.length)
        waiting = [[place.document]] if place.token else []
        return row, asdict(place) | {"waiting": waiting, "counts": {"empty": place.empty}}


def make_document(text: str, row_id: str, tokenizer: Tokenizer, source: int = 0) -> Document:
    """Tokenize a text and close it with the end-of-document token; a text without tokens stays without."""
    tokens = tokenizer.encode(text)
    return Document(np.append(tokens, np.int32(tokenizer.eos_id)) if tokens.size else tokens, row_id, source)


def empty_row(length: int) -> Row:
    """A row of padding: every array [S] is 0."""
    integers = ("tokens", "segment_ids", "positions", "targets", "sources")
    return Row({name: np.zeros(length, np.int32) for name in integers} | {"weights": np.zeros(length, np.float32)}, ())


def pack_row(
    read: Callable[[int], Document | None], place: Place, length: int, source: int | None = None
) -> tuple[Row, Place]:
    """The row that begins at `place`, and the place where the next one begins.

    `read(n)` gives document n, or None past the last one: then the rest of the row is padding. `source` stands for the
    documents' own. Raises `UserError` where a document ends before `place`.
    """
    row = empty_row(length)
    row_ids: list[str] = []
    number, first, empty, filled = place.document, place.token, place.empty, 0
    while filled < length and (document := read(number)) is not None:
        if first and first >= document.tokens.size:
            raise UserError(
                f"the data state stands at token {first} of {document.row_id}, which has {document.tokens.size}: "
                "the documents changed; bring them back or start the data anew"
            )
        if not document.tokens.size:
            number, empty = number + 1, empty + 1
            continue
        end = min(first + length - filled, document.tokens.size)
        targets = document.tokens[first + 1 : end + 1]  # one fewer than tokens where the document ends here
        piece = slice(filled, filled + end - first)
        trained = slice(filled, filled + targets.size)
        row.arrays["tokens"][piece] = document.tokens[first:end]
        row.arrays["segment_ids"][piece] = len(row_ids) + 1
        row.arrays["positions"][piece] = np.arange(end - first)
        row.arrays["targets"][trained] = targets
        row.arrays["weights"][trained] = 1
        row.arrays["sources"][piece] = document.source if source is None else source
        row_ids.append(f"{document.row_id}[{first}:{end}]")
        filled = piece.stop
        number, first = (number + 1, 0) if end == document.tokens.size else (number, end)
    return Row(row.arrays, tuple(row_ids)), Place(number, first, empty)


def stack_rows(rows: Sequence[Row], state: dict[str, Any] | None = None) -> Rows:
    """Rows of one length (one or more) as arrays [rows, S], in their order."""
    arrays = {name: np.stack([row.arrays[name] for row in rows]) for name in rows[0].arrays}
    return Rows(arrays, tuple(row.row_ids for row in rows), state or {})
