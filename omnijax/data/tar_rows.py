"""Rows as WebDataset tar shards (`.tar`): members that stand together and share a key are one row.

The key is a member's path up to the first dot of its base name, the rest is its extension. Members are found once and
read where they lie; nothing is unpacked to disk, and nothing is unpickled.
"""

import json
import posixpath
import tarfile
from typing import Any

import pyarrow

from omnijax.data.files import StoredFile, one_line
from omnijax.data.refusal import Refusal
from omnijax.data.row_index import Index, Kind
from omnijax.errors import UserError

MEMBERS = pyarrow.schema(
    [
        ("key", pyarrow.string()),
        ("extensions", pyarrow.list_(pyarrow.string())),
        ("starts", pyarrow.list_(pyarrow.uint64())),
        ("ends", pyarrow.list_(pyarrow.uint64())),
    ]
)


def index_tar(file: StoredFile) -> Index:
    """Find the members; raises `UserError` where the archive is not whole or a row's members are apart.

    Members without a key are counted. Folders are not: they hold nothing of their own.
    """
    rows: dict[str, dict[str, Any]] = {}
    keyless, last = 0, None
    with file.open() as stream:
        try:
            archive = tarfile.TarFile(fileobj=stream, encoding="utf-8", errors="strict")
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # or it keeps all
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    mend = "pack plain files (tar --dereference --hard-dereference)"
                    raise UserError(f"{file} member {member.name!r} is a link or no plain file: {mend}")
                key, extension = split_name(member.name)
                if not key:
                    keyless += 1
                    continue
                if key in rows and (key != last or extension in rows[key]["extensions"]):
                    mend = "pack each once, those of a row one after the other (tar --sort=name)"
                    raise UserError(f"{file} member {member.name!r} is double, or apart from its row {key!r}: {mend}")
                row = rows.setdefault(key, {"key": key, "extensions": [], "starts": [], "ends": []})
                row["extensions"].append(extension)
                row["starts"].append(member.offset_data)
                row["ends"].append(member.offset_data + member.size)
                last = key
            # Where tarfile meets a damaged header after the first, it takes it for the end.
            stream.seek(archive.offset)
            closed = stream.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
        except (tarfile.TarError, UnicodeDecodeError) as error:
            mend = "pack it again, uncompressed and with names in UTF-8"
            raise UserError(f"{file} is no whole tar archive ({one_line(error)}): {mend}") from error
    if not closed:
        raise UserError(f"{file} has no end mark after its last whole member: it was cut or damaged; pack it again")
    table = pyarrow.Table.from_pylist(list(rows.values()), schema=MEMBERS)
    return Index(table, len(rows), {"members without a key": keyless} if keyless else {})


def read_tar(file: StoredFile, index: Index, row: int) -> dict[str, Any]:
    """`__key__` and {extension: content} of one row: json, txt and cls are decoded, all else is bytes."""
    found = index.table.slice(row, 1).to_pylist()[0]
    first = found["starts"][0]
    content = file.read(first, found["ends"][-1])
    members = zip(found["extensions"], found["starts"], found["ends"], strict=True)
    decoded = {
        extension: _decode(found["key"], extension, content[start - first : end - first])
        for extension, start, end in members
    }
    return {"__key__": found["key"], **decoded}


def split_name(name: str) -> tuple[str, str]:
    """(key, extension in lower case) of a member's path; both empty where it has none."""
    folder, base = posixpath.split(name)
    stem, _, extension = base.partition(".")
    return (posixpath.join(folder, stem), extension.lower()) if stem and extension else ("", "")


def _decode(key: str, extension: str, content: bytes) -> Any:
    try:
        match extension.rpartition(".")[2]:
            case "json":
                return json.loads(content)
            case "txt":
                return content.decode()
            case "cls":
                return int(content)
    except (ValueError, RecursionError) as error:
        kind = {"json": "JSON", "txt": "UTF-8", "cls": "a whole number"}[extension.rpartition(".")[2]]
        raise Refusal(f"has a member {key}.{extension} that is not {kind} ({one_line(error)}): mend it") from error
    return content


TAR = Kind("tar-1", index_tar, read_tar)
