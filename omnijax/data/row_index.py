"""Indexes: what finds a row of a file without reading the others, made once and kept on disk.

An index is a small Arrow file that is mapped, not read: resident is what was looked at. It is named by the file it is
of, its size and version, so a changed file has another, and it is written beside its place and renamed, so two
processes may make the same one at once.
"""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import pyarrow
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import atomic_write

from omnijax.data.files import StoredFile, one_line, reading
from omnijax.errors import UserError


@dataclass(frozen=True)
class Index:
    """How to find the rows of one file.

    table:   what its kind looks up, in one chunk
    rows:    how many there are
    skipped: what the file holds beside rows, counted by name
    """

    table: pyarrow.Table
    rows: int
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """One way to store rows, as module-level functions.

    layout: names what the index holds; to be changed when that changes
    index:  finds the rows of a file; raises `UserError` for one that is not whole
    read:   row number r of a file; raises `Refusal` where that one cannot be read
    """

    layout: str
    index: Callable[[StoredFile], Index]
    read: Callable[[StoredFile, Index, int], dict[str, Any]]


def index_file(kind: Kind, file: StoredFile, folder: str | None) -> str:
    """The path of the index of `file`, made now unless `folder` has it; None keeps it as long as this process."""
    path = _kept_path(folder, file, f"{kind.layout}.arrow")
    try:
        open_index(path)
    except (OSError, pyarrow.ArrowInvalid):  # there is none, or a machine stopped before it was on the disk
        index = kind.index(file)
        notes = {"file": str(file), "rows": str(index.rows), "skipped": json.dumps(index.skipped)}
        table = index.table.replace_schema_metadata(notes)
        with _writing(path), atomic_write(path) as stream, pyarrow.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table)
            os.fsync(stream.fileno())  # or a renamed file could be empty after a crash
    return path


@lru_cache(maxsize=256)  # each holds a mapping
def open_index(path: str) -> Index:
    """The index at `path`, mapped; the ones used last stay open in this process."""
    table = pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()
    notes = table.schema.metadata
    return Index(table, int(notes[b"rows"]), json.loads(notes[b"skipped"]))


def local_copy(file: StoredFile, folder: str | None) -> StoredFile:
    """`file` itself where it is on the local disk, else a copy kept in `folder` as its index is."""
    if file.local:
        return file
    path = _kept_path(folder, file, os.path.basename(file.name))
    if not os.path.exists(path):
        with _writing(path), tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as beside:
            part = os.path.join(beside, "part")
            with reading(file):
                file.filesystem.get_file(file.path, part)
            os.replace(part, path)
    return StoredFile(LocalFileSystem(), path, file.name, file.size, file.version)


def _kept_path(folder: str | None, file: StoredFile, ending: str) -> str:
    folder = os.path.expanduser(folder) if folder else _scratch()
    with _writing(folder):
        os.makedirs(folder, exist_ok=True)
    key = hashlib.sha256(f"{file} {file.size} {file.version}".encode()).hexdigest()
    return os.path.join(folder, f"{key[:32]}.{ending}")


@cache
def _scratch() -> str:
    folder = tempfile.mkdtemp(prefix="omnijax-rows-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        mend = "free the place, or give another index_cache (None keeps nothing)"
        raise UserError(f"the index {path!r} cannot be written ({one_line(error)}): {mend}") from error
