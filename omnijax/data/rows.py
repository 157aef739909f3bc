"""Rows: random access to a table of dicts that lies in many files, of any kinds, anywhere."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tqdm import tqdm

from omnijax.data.array_record_rows import ARRAY_RECORD
from omnijax.data.arrow_rows import ARROW, PARQUET
from omnijax.data.documents import Concatenation, Table
from omnijax.data.files import StoredFile, find_files, reading
from omnijax.data.json_rows import JSON, JSON_LINES
from omnijax.data.refusal import Refusal
from omnijax.data.row_index import Kind, index_file, local_copy, open_index
from omnijax.data.sample import RowId
from omnijax.data.tar_rows import TAR
from omnijax.errors import BadRow, UserError

KINDS: Mapping[str, Kind] = {
    ".jsonl": JSON_LINES,
    ".json": JSON,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    ".array_record": ARRAY_RECORD,
    ".tar": TAR,
}

Rows = Table[dict[str, Any], RowId]
"""Random access to rows: `len(rows)`, `rows[i]`, `rows.row_id(i)`."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FileRows:
    """The rows of one file. It holds names only: workers open the file and its index themselves."""

    source: str
    file: StoredFile
    kind: Kind
    index: str  # path of its index
    rows: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = range(self.rows)[index]
        with reading(f"the index {self.index!r} of {self.file}"):
            opened = open_index(self.index)
        try:
            return self.kind.read(self.file, opened, row)
        except Refusal as refusal:
            raise BadRow(self.row_id(row), str(refusal)) from refusal

    def row_id(self, index: int) -> RowId:
        return RowId(self.source, self.file.name, range(self.rows)[index])


@dataclass(frozen=True, eq=False)
class SourceRows(Concatenation[dict[str, Any], RowId]):
    """The rows of all files of a source; `skipped` counts what was found beside rows, by name."""

    skipped: Mapping[str, int]


def open_rows(
    paths: str | Sequence[str], *, name: str, index_cache: str | None = "~/.cache/omnijax/rows"
) -> SourceRows:
    """Open the rows of files, folders and globs of these, local or at URLs of fsspec such as "gs://bucket/*.tar".

    A name's ending tells the kind: `KINDS`. Indexes are made where `index_cache` has none for the file as it is now;
    with None they last as long as this process. The same holds for the copies of remote ArrayRecord files.

    A row's id has the source's `name`, the file's path below the deepest folder that holds all `paths`, and the row's
    number in the file, blank lines not counted. A row that cannot be read raises `BadRow`, with its id, when it is
    asked for; everything else raises `UserError` here: nothing found, a file that is not whole, no rows at all.
    """
    files, skipped = find_files(paths, KINDS)

    def open_file(file: StoredFile) -> FileRows:
        kind = next(kind for suffix, kind in KINDS.items() if file.name.endswith(suffix))
        if kind is ARRAY_RECORD:
            file = local_copy(file, index_cache)
        index = index_file(kind, file, index_cache)
        return FileRows(name, file, kind, index, open_index(index).rows)

    with ThreadPoolExecutor(8) as threads:
        waiting = threads.map(open_file, files)
        bar = tqdm(waiting, f"indexing {name}", len(files), leave=False, unit="file", delay=2, disable=None)
        parts = tuple(bar)
    for part in parts:
        skipped.update(open_index(part.index).skipped)
        skipped["files without rows"] += not len(part)
    ends = tuple(accumulate(map(len, parts)))
    if not ends[-1]:
        raise UserError(f"source {name!r} has no row in its {len(parts)} files: give files with rows")
    skipped = +skipped  # without zeros
    kinds = Counter(f".{part.file.name.rpartition('.')[2]}" for part in parts)
    _report(name, ends[-1], kinds, skipped)
    return SourceRows(parts, ends, dict(skipped))


def _report(name: str, rows: int, kinds: Counter[str], skipped: Counter[str]) -> None:
    def listed(counts: Counter[str]) -> str:
        return ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))

    if skipped:
        logger.warning("source %s: %s rows; files: %s; not read: %s", name, f"{rows:,}", listed(kinds), listed(skipped))
    else:
        logger.info("source %s: %s rows; files: %s", name, f"{rows:,}", listed(kinds))
