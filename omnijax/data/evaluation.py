"""Held-out text as a finite list of rows: every document once, in order, no shuffling."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from omnijax.data.documents import Documents
from omnijax.data.items import TextItems
from omnijax.data.packing import Document, Place, Rows, empty_row, pack_row, stack_rows
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow, UserError


@dataclass(frozen=True)
class Evaluation:
    """`steps`: the packed rows. `bytes`: UTF-8 bytes their targets stand for, so that

        bits per byte = (sum of -log2 p(target) over all weights) / bytes

    A document's end is predicted too but stands for no byte; its first token is not predicted and not counted.
    `bytes` is 0 where rows hold chats, whose labels are not all of a text.
    `empty`: documents without a token, skipped. `bad`: those that could not be used, left out. `long`: how many chats
    were longer than a row and so are dropped or cut.
    """

    steps: tuple[Rows, ...]
    bytes: int
    empty: int
    bad: tuple[BadRow, ...] = ()
    long: int = 0


def evaluation_rows(
    documents: Documents,
    tokenizer: Tokenizer,
    length: int,
    *,
    rows: int = 1,
    source: int = 0,
    bad_row_limit: int | None = None,
) -> Evaluation:
    """Pack all documents into steps of [rows, length], held in memory; only the last step has padding, at its end.

    Every token but the first of each document is predicted exactly once. Raises `UserError` where no document has a
    token, or only ever the one that nothing predicts, where `length` or `rows` is too small, and where more documents
    than `bad_row_limit` cannot be used (None: the first one is raised).
    """
    if length < 2 or rows < 1:
        raise UserError(f"evaluation rows of {rows} x {length}: give at least 1 row of at least 2 tokens")
    items = TextItems(documents, tokenizer, source)
    bad: dict[int, BadRow] = {}

    @lru_cache(maxsize=1)  # a long document is asked for once a row
    def read(number: int) -> Document | None:
        if number == len(documents):
            return None
        try:
            return items[number]
        except BadRow as error:
            bad[number] = error
            if bad_row_limit is None or len(bad) > bad_row_limit:
                raise
            return Document(np.zeros(0, np.int32), str(error.row))

    packed, place = [], Place()
    while True:
        row, place = pack_row(read, place, length)
        if not row.row_ids:
            break
        packed.append(row)
    if not packed:
        raise UserError(f"none of the {len(documents)} evaluation documents has a token: give documents with text")
    packed += [empty_row(length)] * (-len(packed) % rows)
    steps = tuple(stack_rows(packed[first : first + rows]) for first in range(0, len(packed), rows))
    covered = sum(tokenizer.predicted_bytes(documents[number]) for number in range(len(documents)) if number not in bad)
    if not covered:  # the divisor of bits per byte
        raise UserError(
            f"none of the {len(documents)} evaluation documents has a second token: hold out more text (Data.holdout)"
        )
    return Evaluation(steps, covered, place.empty - len(bad), tuple(bad.values()))
