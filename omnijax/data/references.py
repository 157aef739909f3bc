"""Where the media of a row are: paths, bytes, data URIs, structs of these. Nothing is opened here."""

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from omnijax.data.refusal import Refusal, describe
from omnijax.data.sample import Kind, MediaReference
from omnijax.fields import ranged

_BYTES = (bytes, bytearray, memoryview)


@dataclass(frozen=True)
class MediaOptions:
    """Where the media of a source may be.

    root:         folder that paths are relative to; None: a row with a path is refused
    outside_root: paths may lead out of `root`: by "..", by a link, or because they are absolute
    allow_urls:   http and https URLs are references like any other; they are fetched when the medium is decoded
    frame_rate:   pictures a second of videos given as lists of pictures; a row that states another is refused
    ignore:       fields of a medium that may be there although nothing reads them
    """

    root: str | None = None
    outside_root: bool = False
    allow_urls: bool = False
    frame_rate: float = ranged(2.0, above=0.0)
    ignore: tuple[str, ...] = ("detail",)


def find_media(value: Any, kind: Kind, options: MediaOptions) -> MediaReference:
    """The reference that a value of a row stands for; raises `Refusal` where it stands for none.

    An image or a sound is a path, a file:// or data: URI, a URL, bytes, or a struct: {"bytes", "path"}, {"url"}, or
    {"data"} in base64. A video may also be a list of pictures, or a struct of "frames" (that list) or "video", each
    with "audio".
    """
    if isinstance(value, str):
        return _from_text(value, options)
    if isinstance(value, _BYTES):
        return MediaReference(data=bytes(value))
    if kind == "video" and isinstance(value, list):
        if not value:
            raise Refusal("the video is an empty list of pictures")
        return MediaReference(frames=tuple(find_media(picture, "image", options) for picture in value))
    if not isinstance(value, Mapping):
        raise Refusal(f"the {kind} is {describe(value)}: give a path, bytes, a data URI or a struct of these")
    # Tables fill absent fields with null.
    struct = {name: inner for name, inner in value.items() if inner is not None and name not in options.ignore}
    if kind == "video" and ("frames" in struct or "video" in struct):
        return _find_clip(struct, options)
    _check_names(struct, kind, {"bytes", "path"}, {"url"}, {"data", "format"})
    data = struct.get("bytes", struct.get("data"))
    if data is None:
        location = struct.get("path", struct.get("url"))
        if not isinstance(location, str):
            raise Refusal(f"the {kind} struct has neither bytes nor a path: give one of them")
        return _from_text(location, options)
    if isinstance(data, str):
        return MediaReference(data=_from_base64(data))
    if not isinstance(data, _BYTES):
        raise Refusal(f"the bytes of the {kind} are {describe(data)}: give bytes, or base64 text")
    return MediaReference(data=bytes(data))


def _find_clip(struct: dict[Any, Any], options: MediaOptions) -> MediaReference:
    """A video with its sound beside it."""
    _check_names(struct, "video", {"frames", "audio", "video_fps", "audio_fps"}, {"video", "audio"})
    if struct.get("video_fps", options.frame_rate) != options.frame_rate:
        raise Refusal(f"the video's video_fps is not the frame_rate {options.frame_rate} of this source: set it")
    clip = struct.get("frames", struct.get("video"))
    if isinstance(clip, Mapping) or isinstance(clip, list) != ("frames" in struct):
        raise Refusal("the video struct must have a list of pictures as 'frames', or a path or bytes as 'video'")
    found = find_media(clip, "video", options)
    audio = find_media(struct["audio"], "audio", options) if "audio" in struct else None
    return MediaReference(found.path, found.data, found.frames, audio)


def _check_names(struct: dict[Any, Any], kind: Kind, *allowed: set[str]) -> None:
    if not any(set(struct) <= names for names in allowed):
        given = ", ".join(map(describe, list(struct)[:5]))
        structs = " or ".join("{" + ", ".join(sorted(names)) + "}" for names in allowed)
        raise Refusal(f"the {kind} struct has {given}: it may have {structs}")


def _from_text(text: str, options: MediaOptions) -> MediaReference:
    scheme = text.partition(":")[0].lower() if ":" in text else ""
    if scheme == "data":
        return MediaReference(data=_from_data_uri(text))
    if scheme in ("http", "https"):
        if not options.allow_urls:
            raise Refusal(f"{describe(text)} is a URL: set allow_urls, or fetch the file beforehand")
        return MediaReference(path=text)
    if scheme != "file" and "://" in text:
        raise Refusal(f"{describe(text)} is neither a path nor a URI of file, data, http or https")
    return MediaReference(path=_resolve(_path_of_uri(text) if scheme == "file" else text, options))


def _resolve(path: str, options: MediaOptions) -> str:
    """The path with every link followed."""
    if options.root is None:
        raise Refusal(
            f"media path {describe(path)} is relative to nothing: set root, or Chat.media_root, to their folder"
        )
    try:
        root = os.path.realpath(options.root)
        found = os.path.realpath(os.path.join(root, path))
        os.fsencode(found)
    except (ValueError, OSError) as error:  # a NUL, half a surrogate pair
        raise Refusal(f"{describe(path)} cannot be a path ({error})") from error
    if not options.outside_root and not found.startswith(os.path.join(root, "")):
        raise Refusal(f"media path {describe(path)} leads out of the root {root!r}: move the file or set outside_root")
    return found


def _path_of_uri(uri: str) -> str:
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise Refusal(f"{describe(uri)} is not a URI ({error})") from error
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not parts.path:
        raise Refusal(f"{describe(uri)} names no file of this machine: write file:///folder/name")
    return unquote(parts.path, errors="surrogateescape")


def _from_data_uri(uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma:
        raise Refusal(f"data URI {describe(uri)} has no comma: its data stand after one")
    if not uri.isascii():
        raise Refusal(f"data URI {describe(uri)} is not ASCII")
    return _from_base64(unquote(body)) if head.lower().endswith(";base64") else unquote_to_bytes(body)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise Refusal(f"{describe(text)} is not base64 ({error})") from error
