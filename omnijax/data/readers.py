"""Files opened as documents: an index in memory, the texts on disk until they are asked for.

Every read opens its file anew, so an opened file holds no handle, can be pickled and may be read from several threads.
"""

import json
import mmap
import os
from bisect import bisect_right
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from jaxtyping import Int64

from omnijax.errors import UserError


@dataclass(frozen=True, eq=False)
class JsonLinesFile:
    """One JSON object a line; rows are named by line number, from 1."""

    path: str
    key: str
    starts: Int64[np.ndarray, "documents"]  # byte offset of each line
    lines: Int64[np.ndarray, "documents"]  # its number, from 1
    blank_lines: int

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> str:
        with open(self.path, "rb") as file:
            file.seek(self.starts[index])
            line = file.readline()
        where = f"{self.path!r} line {self.lines[index]}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # brackets can be too deep to read
            raise UserError(f"{where} is not JSON ({error}): it must be one JSON object; mend the line") from error
        if not isinstance(row, dict):
            raise UserError(f"{where} is a JSON {type(row).__name__}: it must be an object; mend the line")
        if self.key not in row:
            raise UserError(f"{where} has no field {self.key!r}: {_choices(self.key, list(row))}")
        text = row[self.key]
        if not isinstance(text, str):
            raise UserError(f"{where} field {self.key!r} is a {type(text).__name__}: it must be a string; mend it")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
            raise UserError(f"{where} field {self.key!r} is not valid Unicode ({error}): mend the line") from error
        return text

    def row_id(self, index: int) -> str:
        return f"jsonl:{self.path}:{self.lines[index]}"


@dataclass(eq=False)
class ParquetFile:
    """One string column, a row a document, numbered from 0; the last decoded row group is kept."""

    path: str
    column: str
    ends: tuple[int, ...]  # row group g holds the rows up to ends[g]
    kept: tuple[int, Any] = (-1, None)  # (row group, its values): replaced whole, so threads never see half of it

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __getitem__(self, index: int) -> str:
        index = range(len(self))[index]
        group = bisect_right(self.ends, index)
        kept, values = self.kept
        if kept != group:
            try:
                with pyarrow.parquet.ParquetFile(self.path) as file:
                    # By name: 'a.b' may also be the field b of a struct a, which is read along.
                    values = file.read_row_group(group, columns=[self.column]).column(self.column)
            except (OSError, pyarrow.ArrowException) as error:
                reason = f"row group {group} cannot be read ({str(error).splitlines()[0]})"
                raise UserError(f"{self.path!r} {reason}: write the file again, or leave it out") from error
            self.kept = (group, values)
        where = f"{self.path!r} row {index} column {self.column!r}"
        try:
            text = values[index - (self.ends[group - 1] if group else 0)].as_py()
        except UnicodeDecodeError as error:
            raise UserError(f"{where} is not UTF-8 ({error}): write the file again with valid text") from error
        if text is None:
            raise UserError(f"{where} is null: it must be a string; drop it")
        return text

    def row_id(self, index: int) -> str:
        return f"parquet:{self.path}:{range(len(self))[index]}"


@dataclass(frozen=True, eq=False)
class PlainTextFile:
    """UTF-8 text, a piece a document, numbered from 0."""

    path: str
    spans: Int64[np.ndarray, "documents 2"]  # first byte and end of each piece

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> str:
        start, end = self.spans[index].tolist()
        with open(self.path, "rb") as file:
            file.seek(start)
            piece = file.read(end - start)
        try:
            return piece.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path!r} piece {index} is not UTF-8 ({error}): convert the file to UTF-8") from error

    def row_id(self, index: int) -> str:
        return f"text:{self.path}:{range(len(self))[index]}"


def open_json_lines(path: str, key: str) -> JsonLinesFile:
    """Index the lines of one file that are not blank."""
    starts, lines, start, number = [], [], 0, 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                starts.append(start)
                lines.append(number)
            start += len(line)
    return JsonLinesFile(path, key, np.array(starts, np.int64), np.array(lines, np.int64), number - len(lines))


def open_parquet(path: str, column: str) -> ParquetFile:
    """Read the footer of one file; raises `UserError` where it is not Parquet or has no such string column."""
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            schema = file.schema_arrow
    except pyarrow.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path!r} is not a Parquet file ({reason}): write it again, or name other files") from error
    if column not in schema.names:
        raise UserError(f"{path!r} has no column {column!r}: {_choices(column, schema.names)}")
    if schema.names.count(column) > 1:
        raise UserError(f"{path!r} has {schema.names.count(column)} columns {column!r}: rename all but one")
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"{path!r} column {column!r} is {kind}: it must be string; name another column")
    return ParquetFile(path, column, tuple(np.cumsum(sizes).tolist()))


def open_plain_text(path: str, separator: str | None) -> PlainTextFile:
    """Find the pieces of one file as `text.split(separator)` would; with no separator the file is one piece."""
    size = os.path.getsize(path)
    spans, start = [], 0
    if separator is not None and size:  # an empty file cannot be mapped
        mark = separator.encode()
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            while (end := content.find(mark, start)) >= 0:
                spans.append((start, end))
                start = end + len(mark)
    spans.append((start, size))
    return PlainTextFile(path, np.array(spans, np.int64))


def _choices(name: str, names: list[str]) -> str:
    nearest = get_close_matches(name, names, 1)
    return f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(map(repr, names[:8])) or 'none'}"
