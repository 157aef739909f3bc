"""Files on a disk or behind fsspec: found, told from their later versions, read in ranges. None stays open."""

import os
import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import fsspec
import fsspec.core
from fsspec.implementations.local import LocalFileSystem

from omnijax.errors import UserError

# Files that libraries put beside the rows, though their suffix is one of rows.
METADATA = frozenset({"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"})

MARKS = "*?["  # of a glob


@dataclass(frozen=True)
class StoredFile:
    """One file as it was found.

    path:    its path in `filesystem`
    name:    its path below the root of its source, which no machine changes
    size:    in bytes
    version: differs where the contents may differ
    """

    filesystem: fsspec.AbstractFileSystem
    path: str
    name: str
    size: int
    version: str

    def __str__(self) -> str:
        return repr(_url(self.filesystem, self.path))

    @property
    def local(self) -> bool:
        return isinstance(self.filesystem, LocalFileSystem)

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`; raises `UserError` where the file no longer has them."""
        if start == end:  # object stores have no empty ranges
            return b""
        with reading(self):
            content = self.filesystem.cat_file(self.path, start, end)
        if len(content) != end - start:
            raise UserError(f"{self} lost bytes since it was opened: leave files alone while they are read")
        return content

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The file from its start; an `OSError` on the way is a `UserError`."""
        with reading(self), self.filesystem.open(self.path, "rb") as stream:
            yield stream


@contextmanager
def reading(file: object) -> Iterator[None]:
    """Turn the `OSError` of a file that cannot be read into a `UserError` that names `file`."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing, or links to what is: bring it back, or name other files") from error
    except PermissionError as error:
        raise UserError(f"{file} may not be read ({one_line(error)}): give this user the right to read it") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read ({one_line(error)}): mend it, or name other files") from error


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def find_files(paths: str | Sequence[str], suffixes: Collection[str]) -> tuple[list[StoredFile], Counter[str]]:
    """The files with one of `suffixes` at `paths`, and how many others lie there, by reason.

    Each path is a file, a folder (read with all folders in it) or a glob of these, on the local disk or a URL that
    fsspec knows. Files come in the order of `paths`, those of one path sorted by name. Names are relative to the
    deepest folder that holds every path, so they do not change when files are added.

    Raises `UserError` for a path with nothing to read, for a file that is named twice or is a broken link, and for
    paths on several file systems.
    """
    paths = [paths] if isinstance(paths, str) else list(paths)
    if not paths:
        raise UserError("no path is given: name files, folders or globs")
    skipped: Counter[str] = Counter()
    places = [_place(path) for path in paths]
    filesystem = places[0][0]
    if any(other is not filesystem for other, _ in places):
        raise UserError(f"paths {paths} lie on several file systems: make them one source each")
    filesystem.invalidate_cache()  # a listing from before would hide what changed
    found: dict[str, str] = {}
    roots = []
    for given, (_, path) in zip(paths, places, strict=True):
        with reading(repr(given)):
            root, files = _files_at(filesystem, path, given)
        roots.append(root)
        count = len(found)
        for file, reason in sorted(files.items()):
            reason = reason or _unlisted(file, suffixes)
            if reason and file == path:
                packed = path.endswith((".gz", ".bz2", ".xz", ".zst", ".tgz"))
                mend = "unpack it" if packed else f"a name must end in {', '.join(suffixes)}"
                raise UserError(f"{given!r} is no file of rows that can be read at random ({reason}): {mend}")
            if reason:
                skipped[reason] += 1
            elif file in found:
                raise UserError(f"{_url(filesystem, file)!r} is in both {found[file]!r} and {given!r}: name it once")
            else:
                found[file] = given
        if len(found) == count:
            raise UserError(f"{given!r} holds no file of rows: their names end in {', '.join(suffixes)}")
    root = posixpath.commonpath(roots)
    return [_stored(filesystem, path, posixpath.relpath(path, root)) for path in found], skipped


def _place(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        mend = "mend the URL, or install what it needs"
        raise UserError(f"{path!r} cannot be reached ({one_line(error)}): {mend}") from error


def _files_at(filesystem: fsspec.AbstractFileSystem, path: str, given: str) -> tuple[str, dict[str, str]]:
    """(root, {file: why it is not to be read, or ""}) of one path."""
    try:
        kind = filesystem.info(path)["type"]
    except FileNotFoundError:
        kind = "nothing"
    if kind == "directory":
        return path, _in_folder(filesystem, path)
    if kind == "file":
        return posixpath.dirname(path), {path: ""}
    if isinstance(filesystem, LocalFileSystem) and os.path.islink(path):
        raise UserError(f"{given!r} is a link to {os.readlink(path)!r}, which is missing: bring it back")
    matches = filesystem.glob(path, detail=True) if set(path) & set(MARKS) else {}
    if not matches:
        raise UserError(f"nothing is at {given!r}: give a file, a folder, or a glob like 'data/*.jsonl' that matches")
    files: dict[str, str] = {}
    for match, info in matches.items():
        folder = info["type"] == "directory" or (info.get("islink") and filesystem.isdir(match))
        files |= _in_folder(filesystem, match) if folder else {match: ""}
    fixed = path[: min(path.index(mark) for mark in MARKS if mark in path)]
    return posixpath.dirname(fixed), files


def _in_folder(filesystem: fsspec.AbstractFileSystem, folder: str) -> dict[str, str]:
    """{file: why it is not to be read, or ""} of a folder and those in it. Links to folders could go in circles."""
    local = isinstance(filesystem, LocalFileSystem)
    files: dict[str, str] = {}
    for path in _walk(folder) if local else filesystem.find(folder):
        below = posixpath.relpath(path, folder).split("/")
        if any(part.startswith((".", "_")) for part in below):
            files[path] = "hidden files"
        elif below[-1] in METADATA:
            files[path] = "metadata files"
        else:
            files[path] = "links to folders" if local and os.path.isdir(path) else ""
    return files


def _walk(folder: str) -> Iterator[str]:
    """As fsspec's `find`, which leaves out folders that may not be listed; here that is a `PermissionError`."""

    def stop(error: OSError) -> None:
        raise error

    for parent, folders, names in os.walk(folder, onerror=stop):
        paths = [posixpath.join(parent, name) for name in [*folders, *names]]
        yield from (path for path in paths if os.path.islink(path) or not os.path.isdir(path))


def _unlisted(path: str, suffixes: Collection[str]) -> str:
    if path.endswith(tuple(suffixes)):
        return ""
    return f"{posixpath.splitext(path)[1] or 'suffixless'} files"


def _stored(filesystem: fsspec.AbstractFileSystem, path: str, name: str) -> StoredFile:
    with reading(repr(_url(filesystem, path))):
        if not isinstance(filesystem, LocalFileSystem):
            return StoredFile(filesystem, path, name, int(filesystem.size(path)), str(filesystem.ukey(path)))
        stat = os.stat(path)
    # The time of the last change, beside that of the contents: a copy may bring the latter along.
    version = f"{stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    return StoredFile(filesystem, path, name, stat.st_size, version)


def _url(filesystem: fsspec.AbstractFileSystem, path: str) -> str:
    return path if isinstance(filesystem, LocalFileSystem) else filesystem.unstrip_protocol(path)
