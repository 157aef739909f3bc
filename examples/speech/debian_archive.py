"""The files of a Debian package, read where there is no dpkg: an `ar` archive (man 5 deb) with a tar inside."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from omnijax.errors import UserError


def files_of(package: Path) -> Iterator[tuple[str, bytes]]:
    """The path, as `usr/share/...`, and the bytes of every file that the package installs; links are left out."""
    for name, content in _members(package.read_bytes()):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                for member in archive:
                    if opened := archive.extractfile(member) if member.isfile() else None:
                        yield member.name.removeprefix("./"), opened.read()
            return
    raise UserError(f"{package} has no data.tar; it is no Debian package: fetch it again")


def _members(archive: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of an `ar` archive: headers of 60 bytes, contents filled up to an even length."""
    start = 8 if archive.startswith(b"!<arch>\n") else len(archive)
    while start < len(archive):
        header = archive[start : start + 60].decode("ascii")
        size = int(header[48:58])
        yield header[:16].rstrip(" /"), archive[start + 60 : start + 60 + size]
        start += 60 + size + size % 2
