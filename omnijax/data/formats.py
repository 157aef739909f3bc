"""Rows of the formats in use, read into one `Sample`.

A format is a small function from a row to messages. Rows are recognised by their fields; one that could be of two
formats is refused until the config names one. What a model would learn from is not dropped in silence: a medium that
nothing asks for, a marker without a medium and a field of a part that nothing reads make a bad row.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from omnijax.data.references import MediaOptions, find_media
from omnijax.data.refusal import Refusal, describe
from omnijax.data.sample import Kind, Part, Role, RowId, Sample
from omnijax.errors import BadRow

Format = Literal["text", "messages", "sharegpt", "qwen_vl", "llama_factory", "veomni", "class_to_image"]
Row = Mapping[Any, Any]

MEDIA: tuple[Kind, ...] = ("image", "video", "audio")
_MEMBER_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"), "image"),
    **dict.fromkeys(("avi", "mkv", "mov", "mp4", "webm"), "video"),
    **dict.fromkeys(("flac", "m4a", "mp3", "ogg", "opus", "wav"), "audio"),
}
"""What the members of a tar archive hold, by their extension."""


@dataclass(frozen=True)
class FormatOptions(MediaOptions):
    """How the rows of a source are read.

    format: what they are; None: each is recognised by its fields
    text:   the field that plain text stands in
    kinds:  media beside images, videos and audios that rows may have, each by its name
    """

    format: Format | None = None
    text: str = "text"
    kinds: tuple[Kind, ...] = ()

    @property
    def media(self) -> tuple[Kind, ...]:
        """The kinds of media that a row may have."""
        return *MEDIA, *self.kinds


def to_sample(row: Any, row_id: RowId, options: FormatOptions) -> Sample:
    """Read a row; raises `BadRow`, and nothing else, whatever the row is.

    Trained is what the assistant says, unless its message has `weight` 0 or `loss` false, and any plain text.
    `extra` holds what the row has of these: "tools", and "fields": what messages have beside role and content (tool
    calls, names, ...), by the number of the message.
    """
    try:
        if not isinstance(row, Mapping):
            raise Refusal(f"the row is {describe(row)}: it must have named fields")
        row = {name: value for name, value in row.items() if value is not None}  # tables fill absent fields with null
        row = _from_members(row, options) if "__key__" in row else row
        messages = _READERS[options.format or recognise(row, options)](row, options)
        parts = [part for number, message in enumerate(messages) for part in _parts(message, number, options)]
    except Refusal as refusal:
        raise BadRow(row_id, str(refusal)) from refusal
    fields = {number: message.fields for number, message in enumerate(messages) if message.fields}
    extra = {"tools": row.get("tools"), "fields": fields}
    return Sample(row_id, tuple(parts), {name: value for name, value in extra.items() if value})


def _from_members(row: Row, options: FormatOptions) -> Row:
    """A row of a WebDataset as those of other files are: the fields of `json`, `txt` as text, media as columns."""
    parts: list[Mapping[Any, Any]] = []
    media: dict[str, list[Any]] = {}
    for name, value in row.items():
        if kind := _MEMBER_KINDS.get(str(name).rpartition(".")[2]):
            media.setdefault(f"{kind}s", []).append(value)
        elif name == "json" and not isinstance(value, Mapping):
            raise Refusal(f"its member json is {describe(value)}: it must be an object")
        elif name == "json":
            parts.append({key: each for key, each in value.items() if each is not None})
        else:
            parts.append({options.text if name == "txt" else name: value})
    fields: dict[Any, Any] = {}
    for part in (*parts, media):
        if double := sorted(map(str, part.keys() & fields.keys())):
            raise Refusal(f"two of its members have {double[0]}: keep one of them")
        fields |= part
    return fields


def recognise(row: Row, options: FormatOptions) -> Format:
    """The format of a row that has no null fields; raises `Refusal` where that is none, or could be two."""
    found = [name for name in (options.text, "messages", "conversations") if name in row]
    if len(found) != 1:
        which = " and ".join(found) if found else f"none of {options.text}, messages and conversations"
        raise Refusal(f"its format is not clear, as it has {which}: name the format of the source")
    value, media = row[found[0]], any(_columns(row, options).values())
    if found == ["messages"]:
        turns = value if isinstance(value, list) else []
        contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
        if any(isinstance(content, list) for content in contents):
            return "messages"
        if not media and any(
            isinstance(content, str) and _marker(options.media).search(content) for content in contents
        ):
            raise Refusal("its format is not clear, as it has a marker but no media: name the format of the source")
        return "llama_factory" if media else "messages"
    if found == ["conversations"]:
        if isinstance(value, str | bytes):
            return "veomni" if value.lstrip()[:1] in ("[", b"[") else "class_to_image"
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and value[0].get("role") is not None:
            return "veomni"
        if not media:
            return "sharegpt"
        return "qwen_vl" if "image" in row or "video" in row else "llama_factory"
    if media:
        raise Refusal(f"its format is not clear, as it has media beside {options.text}: name the format of the source")
    return "text"


class _Medium(NamedTuple):
    """A medium inside a message; a value of None stands for the next one of the row's columns."""

    kind: Kind
    value: Any


_Pieces = tuple[str | _Medium, ...]


@dataclass(frozen=True)
class _Message:
    """`fields`: whatever it says beside its role and content."""

    role: Role
    trained: bool
    pieces: _Pieces
    fields: dict[Any, Any] = field(default_factory=dict)


# The formats


def _read_text(row: Row, options: FormatOptions) -> list[_Message]:
    """Plain text: one document."""
    return [_Message("document", True, (_text(row.get(options.text)),))]


def _read_messages(row: Row, options: FormatOptions) -> list[_Message]:
    """`messages` of OpenAI and Hugging Face: text, or a list of parts; text is never searched for markers."""
    return _read_turns(row, row.get("messages"), options, lambda role, content: _listed(content, options))


def _read_sharegpt(row: Row, options: FormatOptions) -> list[_Message]:
    """`conversations` (from, value), with the markers <image>, <video> and <audio> in any turn."""
    return _read_turns(row, row.get("conversations"), options, lambda role, content: _marked(content, options))


def _read_qwen_vl(row: Row, options: FormatOptions) -> list[_Message]:
    """`conversations` beside `image` and `video`; markers count in what the user says, and are text in answers."""

    def split(role: Role, content: Any) -> _Pieces:
        return _marked(content, options) if role == "user" else (_text(content),)

    return _read_turns(row, row.get("conversations"), options, split)


def _read_llama_factory(row: Row, options: FormatOptions) -> list[_Message]:
    """`messages` or `conversations` with markers in any turn, beside `images`, `videos` and `audios`.

    <video><audio> for one file asks for both tracks of a clip: it is one video with its sound.
    """
    turns = row.get("messages", row.get("conversations"))
    messages = _read_turns(row, turns, options, lambda role, content: _marked(content, options))
    return [replace(message, pieces=_join_tracks(message.pieces)) for message in messages]


def _read_veomni(row: Row, options: FormatOptions) -> list[_Message]:
    """`conversations`, also as JSON text, of parts {"type", "value"} or with markers; media in columns, in order."""
    turns = row.get("conversations")
    if isinstance(turns, str | bytes):
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"conversations is not JSON ({error})") from error

    def split(role: Role, content: Any) -> _Pieces:
        return _listed(content, options) if isinstance(content, list) else _marked(content, options)

    return _read_turns(row, turns, options, split)


def _read_class_to_image(row: Row, options: FormatOptions) -> list[_Message]:
    """`conversations` is the name of a class, or several with commas between: the first asks for the image."""
    name = _text(row.get("conversations")).split(",")[0].strip()
    if not name:
        raise Refusal("conversations is an empty class name: give one")
    turns = [{"role": "user", "content": name}, {"role": "assistant", "content": [{"type": "image"}]}]
    return _read_turns(row, turns, options, lambda role, content: _listed(content, options))


_READERS: dict[Format, Callable[[Row, FormatOptions], list[_Message]]] = {
    "text": _read_text,
    "messages": _read_messages,
    "sharegpt": _read_sharegpt,
    "qwen_vl": _read_qwen_vl,
    "llama_factory": _read_llama_factory,
    "veomni": _read_veomni,
    "class_to_image": _read_class_to_image,
}


# What they share


_ROLES: dict[str, Role] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}
_TYPES: dict[str, Kind] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
}


def _read_turns(row: Row, turns: Any, options: FormatOptions, split: Callable[[Role, Any], _Pieces]) -> list[_Message]:
    """The messages of a chat: the content of every turn is split, then the row's media are dealt to their places."""
    if not isinstance(turns, list) or not turns:
        raise Refusal(f"its turns are {describe(turns)}: they must be a list of at least one message")
    system = row.get("system", "")
    messages = [_Message("system", False, (_text(system),))] if system != "" else []
    for number, turn in enumerate(turns):
        try:
            messages.append(_read_turn(turn, split))
        except Refusal as refusal:
            raise Refusal(f"turn {number}: {refusal}") from refusal
    if sum(message.role == "system" for message in messages[:2]) > 1:
        raise Refusal("it has two system messages: keep one of them")
    columns = _columns(row, options)
    for kind, values in columns.items():
        places = sum(piece == (kind, None) for message in messages for piece in message.pieces)
        if places != len(values):
            raise Refusal(f"its turns ask for {kind}s: {places}, but it gives {len(values)}: each needs one")
    queues = {kind: iter(values) for kind, values in columns.items()}
    return [replace(message, pieces=tuple(_deal(message.pieces, queues))) for message in messages]


def _read_turn(turn: Any, split: Callable[[Role, Any], _Pieces]) -> _Message:
    if not isinstance(turn, Mapping):
        raise Refusal(f"it is {describe(turn)}: it must have a role and content")
    fields = {name: value for name, value in turn.items() if value is not None}
    name = fields.pop("role", None) or fields.pop("from", None)
    if not isinstance(name, str) or name not in _ROLES:
        raise Refusal(f"its role is {describe(name)}: it must be one of {', '.join(_ROLES)}")
    role = _ROLES[name]
    flags = [fields.pop(flag) for flag in ("weight", "loss") if flag in fields]
    if any(not isinstance(flag, int | float) or flag not in (0, 1) for flag in flags):
        raise Refusal("its weight or loss is neither 0 nor 1: a message is trained or it is not")
    content = fields.pop("content", None)
    content = fields.pop("value", None) if content is None else content
    calls = content is None and "tool_calls" in fields  # a call need not say anything
    return _Message(role, role == "assistant" and all(flags), ("",) if calls else split(role, content), fields)


def _listed(content: Any, options: FormatOptions) -> _Pieces:
    """The pieces of content that is text or a list of parts."""
    if not isinstance(content, list):
        return (_text(content),)
    if not content:
        raise Refusal("its content is an empty list: give a part, or drop the message")
    return tuple(_piece(part, options) for part in content)


def _piece(part: Any, options: FormatOptions) -> str | _Medium:
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, Mapping):
        raise Refusal(f"a part is {describe(part)}: it must have a type")
    given = {name: value for name, value in part.items() if value is not None and name not in options.ignore}
    types = _TYPES | {kind: kind for kind in options.kinds}
    named = given.pop("type", None) or next((kind for kind in ("text", *options.media) if kind in given), None)
    if not isinstance(named, str) or named not in types:
        raise Refusal(f"a part has the type {describe(named)}: it must be one of {', '.join(types)}")
    kind = types[named]
    key = next((key for key in (named, kind, "value") if key in given), None)
    value = given.pop(key) if key else None
    if kind != "text" and value is None and given:  # {"type": "image", "path": ...}
        value, given = given, {}
    if given:
        unread = ", ".join(map(describe, list(given)[:5]))
        raise Refusal(f"a part of type {named} has {unread}, which nothing reads: drop it, or list it in ignore")
    return _text(value) if kind == "text" else _Medium(kind, value)


@cache
def _marker(kinds: tuple[Kind, ...]) -> re.Pattern[str]:
    return re.compile(f"<({'|'.join(map(re.escape, kinds))})>")


def _marked(content: Any, options: FormatOptions) -> _Pieces:
    """The pieces of text with markers; all of its white space is kept."""
    found = _marker(options.media).split(_text(content))
    pieces = [_Medium(kind, None) if number % 2 else kind for number, kind in enumerate(found)]
    return tuple(piece for piece in pieces if piece != "") or ("",)


def _join_tracks(pieces: _Pieces) -> _Pieces:
    joined: list[str | _Medium] = []
    for piece in pieces:
        sound = piece.value if isinstance(piece, _Medium) and piece.kind == "audio" else None
        if isinstance(sound, str | bytes) and joined and joined[-1] == ("video", sound):
            joined[-1] = _Medium("video", {"video": sound, "audio": sound})
        else:
            joined.append(piece)
    return tuple(joined)


def _deal(pieces: _Pieces, queues: dict[Kind, Iterator[Any]]) -> Iterator[str | _Medium]:
    for piece in pieces:
        if isinstance(piece, _Medium) and piece.value is None:
            piece = _Medium(piece.kind, next(queues[piece.kind]))
        yield piece


def _columns(row: Row, options: FormatOptions) -> dict[Kind, list[Any]]:
    """The media beside the turns: `image` or `images`, one or a list of them, and so on."""
    columns: dict[Kind, list[Any]] = {}
    for kind in options.media:
        given = [row[name] for name in (kind, f"{kind}s") if name in row]
        lists = [value if isinstance(value, list) else [value] for value in given]
        if sum(map(bool, lists)) > 1:
            raise Refusal(f"it has both {kind} and {kind}s: keep one of them")
        columns[kind] = [value for values in lists for value in values]
        if None in columns[kind]:
            raise Refusal(f"one of its {kind}s is null: give it, or drop it and its place")
    return columns


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Refusal(f"its text is {describe(value)}: it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise Refusal(f"its text is not valid Unicode ({error})") from error
    return value


def _parts(message: _Message, number: int, options: FormatOptions) -> Iterator[Part]:
    for piece in message.pieces:
        if isinstance(piece, str):
            yield Part("text", message.role, number, message.trained, text=piece)
        else:
            media = find_media(piece.value, piece.kind, options)
            yield Part(piece.kind, message.role, number, message.trained, media=media)
