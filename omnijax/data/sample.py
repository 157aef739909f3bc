"""A sample: what one row of any format means, before a template or a tokenizer has seen it."""

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = str
"""Of a part: "text", "image", "video", "audio", or what a processor calls media of its own."""
Role = Literal["system", "user", "assistant", "tool", "document"]
"""Who says a part; a `document` is plain text for pretraining, without a template."""


@dataclass(frozen=True)
class RowId:
    """Where a row came from: the name of its source, its file, and its number in that file, from 0."""

    source: str
    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.source}:{self.file}:{self.row}"


@dataclass(frozen=True)
class MediaReference:
    """An image, clip or sound that is not decoded yet; exactly one of the three says where it is.

    path:   a file, already resolved against the root and seen to lie inside it, or a URL the config allows
    data:   the encoded bytes
    frames: the pictures of a video, in order, each a reference
    audio:  the track that belongs to a video given as frames, or that replaces the video's own
    """

    path: str | None = None
    data: bytes | None = None
    frames: "tuple[MediaReference, ...] | None" = None
    audio: "MediaReference | None" = None


@dataclass(frozen=True)
class Part:
    """One piece of a message.

    message: number of the message it belongs to, from 0; parts of one message follow each other
    trained: whether a model learns to produce it
    text:    of a text part; may be empty
    media:   of any other part
    """

    kind: Kind
    role: Role
    message: int
    trained: bool
    text: str = ""
    media: MediaReference | None = None


@dataclass(frozen=True)
class Sample:
    """The parts of a row in order; `extra` holds what a template may use beside them (`tools`, ...)."""

    row: RowId
    parts: tuple[Part, ...]
    extra: dict[str, Any] = field(default_factory=dict)
