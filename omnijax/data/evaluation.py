"""Held-out text as a finite list of rows: every document once, in order, no shuffling."""

from dataclasses import dataclass
from functools import lru_cache

from omnijax.data.documents import Documents
from omnijax.data.packing import Document, Place, Rows, empty_row, make_document, pack_row, stack_rows
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import UserError


@dataclass(frozen=True)
class Evaluation:
    """`steps`: the packed rows. `bytes`: UTF-8 bytes their targets stand for, so that

        bits per byte = (sum of -log2 p(target) over all weights) / bytes

    A document's end is predicted too but stands for no byte; its first token is not predicted and not counted.
    `empty`: documents without a token, skipped.
    """

    steps: tuple[Rows, ...]
    bytes: int
    empty: int


def evaluation_rows(
    documents: Documents, tokenizer: Tokenizer, length: int, *, rows: int = 1, source: int = 0
) -> Evaluation:
    """Pack all documents into steps of [rows, length], held in memory; only the last step has padding, at its end.

    Every token but the first of each document is predicted exactly once. Raises `UserError` where no document has a
    token, or only ever the one that nothing predicts, and where `length` or `rows` is too small.
    """
    if length < 2 or rows < 1:
        raise UserError(f"evaluation rows of {rows} x {length}: give at least 1 row of at least 2 tokens")

    @lru_cache(maxsize=1)  # a long document is asked for once a row
    def read(number: int) -> Document | None:
        if number == len(documents):
            return None
        return make_document(documents[number], documents.row_id(number), tokenizer)

    packed, place = [], Place()
    while True:
        row, place = pack_row(read, place, length, source)
        if not row.row_ids:
            break
        packed.append(row)
    if not packed:
        raise UserError(f"none of the {len(documents)} evaluation documents has a token: give documents with text")
    packed += [empty_row(length)] * (-len(packed) % rows)
    steps = tuple(stack_rows(packed[first : first + rows]) for first in range(0, len(packed), rows))
    covered = sum(tokenizer.predicted_bytes(documents[number]) for number in range(len(documents)))
    if not covered:  # the divisor of bits per byte
        raise UserError(
            f"none of the {len(documents)} evaluation documents has a second token: hold out more text (Data.holdout)"
        )
    return Evaluation(steps, covered, place.empty)
