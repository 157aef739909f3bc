"""A reference as an open file, and whatever goes wrong with it as a `BadRow`."""

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import av
import av.container
import fsspec

from omnijax.data.refusal import Refusal, describe
from omnijax.data.sample import Kind, MediaReference, RowId
from omnijax.errors import BadRow, UserError

CUT_OFF = "ends in the middle of a packet: fetch it anew or drop the row"
_STATE_THEIR_LENGTH = ("matroska,webm", "flv", "flac", "aiff", "au")


@contextmanager
def opened(reference: MediaReference, kind: Kind, row: RowId) -> Iterator[BinaryIO]:
    """The encoded bytes of a reference, as a binary file that can seek.

    Whatever goes wrong with it until it is closed, here or in a decoder, is raised as a `BadRow` that names the row,
    the medium and the reason: a decoder may raise anything on damaged bytes.
    """
    name = name_of(reference, kind)
    try:
        try:
            file = _open(reference)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise Refusal(f"cannot be opened ({reason}): bring it back or drop the row") from error
        with file:
            yield file
    except UserError:
        raise
    except Refusal as refusal:
        raise BadRow(row, f"{name} {refusal}") from refusal
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadRow(row, f"{name} cannot be decoded ({reason}): mend the file or drop the row") from error


def name_of(reference: MediaReference, kind: Kind) -> str:
    """A medium in words, for a message."""
    if reference.frames is not None:
        return f"{kind} of {len(reference.frames)} pictures"
    return (
        f"{kind} of {len(reference.data)} bytes" if reference.data is not None else f"{kind} {describe(reference.path)}"
    )


def _open(reference: MediaReference) -> BinaryIO:
    if reference.data is not None:
        if not reference.data:
            raise Refusal("has no bytes: mend the row or drop it")
        return io.BytesIO(reference.data)
    if reference.path is None:
        raise Refusal("is neither a path nor bytes: mend the row or drop it")
    scheme = reference.path.partition("://")[0]
    if scheme in ("http", "https"):
        try:
            files = fsspec.filesystem(scheme)  # not fsspec.open, which follows "::" in a URL into other file systems
        except ImportError as error:
            raise UserError(f"media at URLs need a package that is missing ({error})") from error
        return files.open(reference.path)
    if not stat.S_ISREG(os.stat(reference.path).st_mode):  # a pipe or a device would never end
        raise Refusal("is a folder or a device: give a file")
    if not os.path.getsize(reference.path):
        raise Refusal("is an empty file: mend it or drop the row")
    return open(reference.path, "rb")


def container(file: BinaryIO) -> av.container.InputContainer:
    """The streams of a video or audio file, from its beginning; close it before the file.

    The bytes decide the format, not the name; nothing they refer to (another file, a URL, a socket) is opened.
    """
    file.seek(0)
    head = file.read(12)
    file.seek(0)
    options = {"protocol_whitelist": "none"}
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        options["probesize"] = "32768"  # its header says all; the default decodes up to 5 MB to look for more
    return av.open(file, "r", metadata_errors="replace", container_options=options)


def check_length(streams: av.container.InputContainer, seconds: float) -> None:
    """Raises `Refusal` where a file holds clearly less than its header states, in formats that PyAV lets end early."""
    stated = (streams.duration or 0) / av.time_base
    if streams.format.name in _STATE_THEIR_LENGTH and seconds < stated - max(0.5, 0.02 * stated):
        raise Refusal(f"holds {seconds:.2f} s of the {stated:.2f} s its header states: fetch it anew or drop the row")
