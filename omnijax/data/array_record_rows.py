"""Rows as ArrayRecord files (`.array_record`), through Grain's own reader, which reads local files only."""

import json
from functools import lru_cache
from typing import Any

import pyarrow
from array_record.python.array_record_module import ArrayRecordReader

from omnijax.data.files import StoredFile, one_line, reading
from omnijax.data.refusal import Refusal
from omnijax.data.row_index import Index, Kind
from omnijax.errors import UserError


def index_array_record(file: StoredFile) -> Index:
    """Count the records; raises `UserError` where the file is not whole."""
    return Index(pyarrow.table({}), _reader(file).num_records())


def read_array_record(file: StoredFile, index: Index, row: int) -> dict[str, Any]:
    """The JSON object that a record spells, else {"record": its bytes}."""
    reader = _reader(file)
    try:
        (record,) = reader.read(row, row + 1)  # read([row]) takes longer the more records there are
    except RuntimeError as error:
        raise Refusal(f"cannot be read ({one_line(error)}): write the file again") from error
    if record.startswith(b"{"):
        try:
            return json.loads(record)
        except (ValueError, RecursionError):
            pass
    return {"record": record}


ARRAY_RECORD = Kind("array_record-1", index_array_record, read_array_record)


@lru_cache(maxsize=64)  # each holds a file handle and the places of its chunks
def _reader(file: StoredFile) -> ArrayRecordReader:
    with reading(file), open(file.path, "rb"):
        pass  # the reader tells a file that may not be read from a damaged one only in words
    random_access = "readahead_buffer_size:0,max_parallelism:0"
    reader = ArrayRecordReader(file.path, random_access, file_reader_buffer_size=1 << 15)
    if not reader.ok():
        try:
            reader.close()
            reason = "damaged"
        except RuntimeError as error:
            reason = one_line(error)
        raise UserError(f"{file} is no whole ArrayRecord file ({reason}): write it again or delete it")
    return reader
