"""Rows of Arrow tables: Parquet (`.parquet`), and Arrow IPC as a file or a stream (`.arrow`, `.feather`).

They are stored and decoded in groups: Parquet's row groups, Arrow's record batches. Reading a row decodes its group,
and those decoded last are kept, so a shuffled read decodes about one group a row: write files with small ones
(hundreds of rows).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet
from pyarrow import ipc

from omnijax.data.files import StoredFile, one_line, reading
from omnijax.data.refusal import Refusal
from omnijax.data.row_index import Index, Kind
from omnijax.errors import UserError

Value = TypeVar("Value")

GROUP_BYTES = 128 << 20
"""Decoded groups that a process keeps, of all files together; the last one is kept whatever its size."""

FOOTER_BYTES = 64 << 20
"""Parquet footers that a process keeps, likewise."""

FILE_MAGIC = b"ARROW1"
END_OF_STREAM_BYTES = 8
FIRST_COLUMN = ipc.IpcReadOptions(included_fields=[0])  # enough to count rows


class Kept(Generic[Value]):
    """The values that were asked for last, up to `limit` bytes and at least one.

    Threads make them in turn, so many of them hold no more than one beside the kept ones.
    """

    def __init__(self, limit: int):
        self._limit, self._lock = limit, Lock()
        self._values: OrderedDict[object, tuple[Value, int]] = OrderedDict()
        self._bytes = self._last = 0

    def get(self, key: object, make: Callable[[], tuple[Value, int]]) -> Value:
        """The value of `key`; unless it is kept, `make` gives it and its bytes now."""
        with self._lock:
            if key not in self._values:
                self._drop(self._limit - self._last, 0)  # the next is likely as large as the last
                self._values[key] = made = make()
                self._last = made[1]
                self._bytes += self._last
                self._drop(self._limit, 1)
            self._values.move_to_end(key)
            return self._values[key][0]

    def _drop(self, limit: int, least: int) -> None:
        while self._bytes > limit and len(self._values) > least:
            self._bytes -= self._values.popitem(last=False)[1][1]


_groups: Kept[pyarrow.Table] = Kept(GROUP_BYTES)
_footers: Kept[pyarrow.parquet.FileMetaData] = Kept(FOOTER_BYTES)


def index_parquet(file: StoredFile) -> Index:
    """Read the footer; raises `UserError` where the file is not whole."""
    with _whole(file, "Parquet"), _source(file) as source:
        footer = pyarrow.parquet.read_metadata(source)
        sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        return _index(file, footer.schema.to_arrow_schema().names, sizes, range(len(sizes)))


def read_parquet(file: StoredFile, index: Index, row: int) -> dict[str, Any]:
    """One row; raises `Refusal` where its row group is damaged."""

    def decode(source: pyarrow.NativeFile, group: int) -> pyarrow.Table:
        def read_footer() -> tuple[pyarrow.parquet.FileMetaData, int]:
            footer = pyarrow.parquet.read_metadata(source)
            return footer, 8 * footer.serialized_size  # as measured

        footer = _footers.get(file, read_footer)
        table = pyarrow.parquet.ParquetFile(source, metadata=footer, pre_buffer=not file.local)
        return table.read_row_group(group, use_threads=False)  # Grain has threads and workers of its own

    return _read(file, index, row, decode)


def index_arrow(file: StoredFile) -> Index:
    """Find the record batches; raises `UserError` where the file is not whole."""
    with _whole(file, "Arrow"), _source(file) as source:
        if _is_file(source):
            names, found = _file_batches(source)
        else:
            names, found = _stream_batches(file, source)
    return _index(file, names, [rows for rows, _ in found], [place for _, place in found])


def read_arrow(file: StoredFile, index: Index, row: int) -> dict[str, Any]:
    """One row; raises `Refusal` where its record batch is damaged."""

    def decode(source: pyarrow.NativeFile, place: int) -> pyarrow.Table:
        if _is_file(source):
            batch = ipc.open_file(source).get_batch(place)
        else:
            schema = ipc.open_stream(source).schema
            source.seek(place)
            batch = ipc.read_record_batch(ipc.read_message(source), schema)
        return pyarrow.Table.from_batches([batch])

    return _read(file, index, row, decode)


PARQUET = Kind("parquet-1", index_parquet, read_parquet)
ARROW = Kind("arrow-1", index_arrow, read_arrow)


def _read(
    file: StoredFile, index: Index, row: int, decode: Callable[[pyarrow.NativeFile, int], pyarrow.Table]
) -> dict[str, Any]:
    ends = index.table["end"].to_numpy()
    group = int(np.searchsorted(ends, row, side="right"))
    first = int(ends[group - 1]) if group else 0
    place = index.table["place"][group].as_py()

    def decode_group() -> tuple[pyarrow.Table, int]:
        with _source(file) as source:
            group = decode(source, place)
        return group, group.nbytes

    with reading(file):
        try:
            table = _groups.get((file, place), decode_group)
            return table.slice(row - first, 1).to_pylist()[0]
        except UserError:
            raise
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            if getattr(error, "errno", None):
                raise  # what pyarrow itself finds wrong has no number
            mend = "write the file again, or drop it"
            raise Refusal(f"cannot be decoded with its group {group} ({one_line(error)}): {mend}") from error


def _file_batches(source: pyarrow.NativeFile) -> tuple[list[str], list[tuple[int, int]]]:
    """The columns of an IPC file, and (rows, number) of each batch."""
    reader = ipc.open_file(source, options=FIRST_COLUMN)
    return reader.schema.names, [(reader.get_batch(n).num_rows, n) for n in range(reader.num_record_batches)]


def _stream_batches(file: StoredFile, source: pyarrow.NativeFile) -> tuple[list[str], list[tuple[int, int]]]:
    """The columns of an IPC stream, and (rows, first byte) of each batch, found by reading all of it."""
    names = ipc.open_stream(source).schema.names
    source.seek(0)
    reader = ipc.open_stream(source, options=FIRST_COLUMN)
    found, place = [], source.tell()
    for batch in reader:
        found.append((batch.num_rows, place))
        place = source.tell()
    if reader.stats.num_dictionary_batches:
        raise UserError(f"{file} is an Arrow stream with dictionaries, read from files only: write it as an Arrow file")
    if source.tell() != file.size or file.size - place != END_OF_STREAM_BYTES:
        raise UserError(f"{file} does not end as an Arrow stream does: it was cut off, or is several; write it again")
    return names, found


def _is_file(source: pyarrow.NativeFile) -> bool:
    magic = source.read(len(FILE_MAGIC))
    source.seek(0)
    return magic == FILE_MAGIC


@contextmanager
def _source(file: StoredFile) -> Iterator[pyarrow.NativeFile]:
    # Not mapped: what was looked at would be resident, and a file cut meanwhile would end the process.
    if file.local:
        with pyarrow.OSFile(file.path) as source:
            yield source
    else:
        with file.open() as stream, pyarrow.PythonFile(stream, mode="r") as source:
            yield source


@contextmanager
def _whole(file: StoredFile, kind: str) -> Iterator[None]:
    """Name the file in which pyarrow meets what it cannot take."""
    try:
        with reading(file):
            yield
    except pyarrow.ArrowException as error:
        raise UserError(f"{file} is no whole {kind} file ({one_line(error)}): write it again or delete it") from error


def _index(file: StoredFile, names: list[str], sizes: Iterable[int], places: Iterable[int]) -> Index:
    if len(set(names)) < len(names):
        raise UserError(f"{file} has several columns of one name among {names}: rename them")
    ends = np.cumsum(np.array(list(sizes), np.uint64))
    table = pyarrow.table({"end": ends, "place": np.array(list(places), np.uint64)})
    return Index(table, int(ends[-1]) if ends.size else 0)
