"""The exact stream: an endless, shuffled sequence of packed rows that stops and goes on anywhere.

Documents are dealt to V virtual shards, which depend on nothing but the config: shard v takes the documents v, v + V,
v + 2V, ... of the shuffled order and packs them by itself. Row r of every step is the next row of shard r mod V.
Processes and workers take whole shards, so neither their number nor the mesh changes a row.

Every epoch of the order holds each document once, in a new order. Shards fill rows at their own pace, so at one step
some may be in the next epoch already.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from omnijax.data.documents import Documents
from omnijax.data.packing import Document, Place, Rows, make_document, pack_row, stack_rows
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import UserError


def document_order(count: int, seed: int) -> Sequence[int]:
    """The endless order of documents: element n is a number below `count`; each `count` elements are a permutation.

    Every epoch has its own permutation. Elements are computed when asked for, none is kept.
    """
    import grain  # here, not above: grain imports jax, which reading sources and packing do without

    return grain.MapDataset.range(count).seed(seed).shuffle().repeat(reseed_each_epoch=True)


def content_fingerprint(documents: Documents) -> str:
    """Differs where up to 64 documents, spread evenly over all, differ.

    A corpus that was replaced is noticed; one that was edited here and there may not be. A document that cannot be
    read counts as such: its row is refused when its turn comes.
    """
    digest, last = hashlib.sha256(), len(documents) - 1
    for index in sorted({number * last // 63 for number in range(64)}):
        try:
            text = documents[index]
        except UserError:
            text = "unreadable"
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()[:16]


class Stream(Iterator[Rows]):
    """Packed rows without end; `next(stream)` gives the `Rows` of a step, arrays [rows, S].

    Args:
        documents: the texts, in their own order.
        length: S, the tokens of a row; at least 2, so that no row is without a target.
        rows: rows of the global batch; a multiple of `shards`.
        shards: V, the virtual shards; at most the number of documents.
        seed: of the order, 0 to 2**32 - 1.
        source: the number written into `sources`.
        held: the shards this process makes, all by default; a step then has the rows r with r mod V in `held`.

    Raises `UserError` for arguments outside these bounds and for documents without a single token.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        *,
        length: int,
        rows: int,
        shards: int,
        seed: int,
        source: int = 0,
        held: Sequence[int] | None = None,
    ):
        held = range(shards) if held is None else sorted(set(held))
        _check(len(documents), length, rows, shards, seed, held)
        self._documents, self._tokenizer, self._length, self._source = documents, tokenizer, length, source
        self._shards = shards
        self._row_shards = [row % shards for row in range(rows) if row % shards in held]
        self._order = document_order(len(documents), seed)
        self._places = {shard: Place() for shard in held}
        self._last_read: dict[int, tuple[int, Document]] = {}
        # One document with a token is enough for every shard to fill its rows in the end; ordinarily it is the first.
        if not any(tokenizer.encode(documents[number]).size for number in range(len(documents))):
            raise UserError(f"none of the {len(documents)} documents has a token: give documents with text")
        self._stream = {
            "documents": len(documents),
            "length": length,
            "seed": seed,
            "shards": shards,
            "tokenizer": tokenizer.fingerprint,
            "content": content_fingerprint(documents),
            # The seed does not imply it: a version of Grain that shuffles otherwise would go on in another order.
            "grain_order": [int(self._order[number]) for number in range(8)],
        }

    def __next__(self) -> Rows:
        places, packed = dict(self._places), []
        for shard in self._row_shards:
            row, places[shard] = pack_row(partial(self._read, shard), places[shard], self._length, self._source)
            packed.append(row)
        self._places = places  # only now: a row that cannot be read leaves the stream where it was
        return stack_rows(packed, self.state())

    def state(self) -> dict[str, Any]:
        """JSON to go on from after the rows returned so far.

        Where rows are fetched ahead of the step, save the `state` of the last `Rows` consumed instead.
        """
        return {"stream": dict(self._stream), "shards": {str(v): asdict(place) for v, place in self._places.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the same rows as if the stream had never stopped.

        `rows` and `held` may differ from the run that saved it. Raises `UserError`, and changes nothing, where
        anything that decides a shard's rows differs or a held shard is missing.
        """
        _require_same_stream(state, self._stream, "this run")
        missing = [shard for shard in self._places if str(shard) not in state["shards"]]
        if missing:
            raise UserError(f"the data state lacks the shards {missing}: merge the states of all processes first")
        places = {shard: Place(**state["shards"][str(shard)]) for shard in self._places}
        for shard, place in places.items():
            document = self._read(shard, place.document)
            if place.token and place.token >= document.tokens.size:
                raise UserError(
                    f"the data state stands at token {place.token} of {document.row_id}, which has "
                    f"{document.tokens.size}: the documents changed; bring them back or start the data anew"
                )
        self._places = places

    def _read(self, shard: int, number: int) -> Document:
        """The shard's document `number`; the last one is kept, because a long document is read once a row."""
        if self._last_read.get(shard, (None,))[0] != number:
            index = int(self._order[shard + number * self._shards])
            document = make_document(self._documents[index], self._documents.row_id(index), self._tokenizer)
            self._last_read[shard] = (number, document)
        return self._last_read[shard][1]


def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One state from those of all processes (one or more), for any number of processes to restore from.

    Raises `UserError` where they are not states of one stream.
    """
    for state in states:
        _require_same_stream(state, states[0].get("stream", {}), "another process")
    return {**states[0], "shards": {shard: place for state in states for shard, place in state["shards"].items()}}


def _require_same_stream(state: dict[str, Any], stream: dict[str, Any], whose: str) -> None:
    if not isinstance(state, dict) or set(state) != {"stream", "shards"}:
        raise UserError("the data state is not one that Stream.state() gave: it must hold 'stream' and 'shards'")
    for name, value in stream.items():
        saved = state["stream"].get(name)
        if saved != value:
            raise UserError(
                f"the data state has {name} {saved!r}, {whose} has {value!r}: they must agree to go on exactly; "
                f"bring {name} back or start the data anew"
            )


def _check(documents: int, length: int, rows: int, shards: int, seed: int, held: Sequence[int]) -> None:
    if length < 2:
        raise UserError(f"row length is {length}: it must be at least 2, or a row could have no target")
    if rows < 1 or shards < 1:
        raise UserError(f"{rows} rows a step over {shards} shards: give at least 1 of each, as many shards as rows")
    if rows % shards:
        fewer = max(number for number in range(1, shards) if rows % number == 0)
        more = shards * (rows // shards + 1)
        raise UserError(
            f"{rows} rows a step over {shards} shards: shards must divide rows; set shards to {fewer} or rows to {more}"
        )
    if documents < shards:
        mend = f"give more documents, or at most {documents} shards"
        raise UserError(f"{documents} documents for {shards} shards: each shard needs its own; {mend}")
    if not 0 <= seed < 2**32:
        raise UserError(f"data seed is {seed}: it must lie in 0..{2**32 - 1}")
    if not held or held[0] < 0 or held[-1] >= shards:
        raise UserError(f"held shards are {list(held)}: name one or more of 0..{shards - 1}")
