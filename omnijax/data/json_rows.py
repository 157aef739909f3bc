"""Rows as JSON: an object a line (`.jsonl`), or a list of objects or one object (`.json`).

Both are found by the bytes of each row. A `.json` file is read whole once, when its index is made, and then a row at a
time like the other.
"""

import json
import re
from array import array
from collections.abc import Iterator
from threading import Lock
from typing import Any

import numpy as np
import pyarrow

from omnijax.data.files import StoredFile
from omnijax.data.refusal import Refusal
from omnijax.data.row_index import Index, Kind
from omnijax.errors import UserError

JSON_BYTES = 2 << 30
"""The largest `.json` file; indexing takes about twice its size in memory."""

_ONE_WHOLE_FILE = Lock()  # at a time, so that indexing many takes no more memory than the largest
_SPACE = re.compile(r"[ \t\n\r]*")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def index_lines(file: StoredFile) -> Index:
    """The lines of a `.jsonl` file that are not blank, by first byte and end; they are parsed when they are read."""
    starts, ends, blank, place = array("Q"), array("Q"), 0, 0
    with file.open() as stream:
        for line in stream:
            end = place + len(line)
            if line.isspace():
                blank += 1
            else:
                starts.append(place)
                ends.append(end)
            place = end
    return _index(starts, ends, {"blank lines": blank} if blank else {})


def index_whole(file: StoredFile) -> Index:
    """The objects of a `.json` file, by first byte and end; raises `UserError` where it is not JSON or too large."""
    if file.size > JSON_BYTES:
        raise UserError(
            f"{file} has {file.size:,} bytes, and a .json file is read whole, up to {JSON_BYTES:,}: "
            "write it as .jsonl, an object a line"
        )
    starts, ends = array("Q"), array("Q")
    with _ONE_WHOLE_FILE:
        # One character a byte, so that places in the text are places in the file; JSON's own marks are ASCII.
        text = file.read(0, file.size).decode("latin-1")
        try:
            for start, end in _spans(text, len(_BYTE_ORDER_MARK) * text.startswith(_BYTE_ORDER_MARK.decode("latin-1"))):
                starts.append(start)
                ends.append(end)
        except (ValueError, RecursionError) as error:
            mend = "mend it, or name it .jsonl if it holds an object a line"
            raise UserError(f"{file} is not a JSON list or object ({error}): {mend}") from error
    return _index(starts, ends, {})


def read_json(file: StoredFile, index: Index, row: int) -> dict[str, Any]:
    """Parse one row; raises `Refusal` for what is not a JSON object."""
    start, end = (index.table[side][row].as_py() for side in ("start", "end"))
    return parse_object(file.read(start, end), f"at byte {start}")


def parse_object(content: bytes, where: str) -> dict[str, Any]:
    """`content` as a JSON object in UTF-8; raises `Refusal` where it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"is not JSON {where} ({error}): it must be one JSON object; mend the row") from error
    if not isinstance(value, dict):
        raise Refusal(f"is a JSON {type(value).__name__} {where}: it must be an object; mend the row")
    return value


JSON_LINES = Kind("jsonl-1", index_lines, read_json)
JSON = Kind("json-1", index_whole, read_json)


def _spans(text: str, place: int) -> Iterator[tuple[int, int]]:
    """Where each item of a JSON list begins and ends, or the one value that is no list."""
    decode = json.JSONDecoder().raw_decode

    def skip_space(place: int) -> int:
        return _SPACE.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too

    place = skip_space(place)
    if listed := text.startswith("[", place):
        place = skip_space(place + 1)
    closed = listed and text.startswith("]", place)
    while not closed:
        _, end = decode(text, place)
        yield place, end
        place = skip_space(end)
        closed = not listed or text.startswith("]", place)
        if not closed:
            if not text.startswith(",", place):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
            place = skip_space(place + 1)
    end = skip_space(place + listed)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _index(starts: array, ends: array, skipped: dict[str, int]) -> Index:
    table = pyarrow.table({"start": np.frombuffer(starts, np.uint64), "end": np.frombuffer(ends, np.uint64)})
    return Index(table, len(starts), skipped)
