"""Samples as rows of tokens that know which of them are labels.

`render` turns a sample into tokens by a template; `cut_messages` fits one that is too long into a row; `next_token`
gives the arrays that a loss wants.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int32

from omnijax.data.sample import Part, Sample
from omnijax.data.spelling import OWN_WORDS, Before, Spelling, spelling
from omnijax.data.templates import End, Template, Text, Token, Turn
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow


@dataclass(frozen=True, eq=False)
class MediaTokens:
    """The tokens that stand for one media part; the processor of a model's family decides them.

    placeholder: where an encoded feature will stand. Those are never labels of the text; the tokens around them are
        where the part is trained.
    before: text before these tokens, one with the text that it meets
    """

    tokens: Int32[np.ndarray, "n"]
    placeholder: Bool[np.ndarray, "n"]
    before: str = ""


Slots = Callable[[Part], MediaTokens]
_Piece = tuple[str | int | tuple[Part, MediaTokens], bool]


@dataclass(frozen=True, eq=False)
class Rendered:
    """A sample as n tokens.

    trained:     the token is a label: something the model has to write
    placeholder: an encoded feature stands here
    media:       (position of the first of its tokens, part), in order
    ends:        the position after each turn that has a label: the places where a row may be cut
    left_out:    texts of the sample that the template wrote nowhere, such as the thinking of earlier answers
    """

    tokens: Int32[np.ndarray, "n"]
    trained: Bool[np.ndarray, "n"]
    placeholder: Bool[np.ndarray, "n"]
    media: tuple[tuple[int, Part], ...]
    ends: tuple[int, ...]
    left_out: tuple[str, ...]


def render(sample: Sample, template: Template, tokenizer: Tokenizer, slots: Slots | None = None) -> Rendered:
    """The tokens of a sample; `slots` gives those of a media part, None where a model reads only text.

    Texts that meet are tokenized as one, but cut where labels begin, as they are when a model is asked to go on there.
    Parts of a `document` need no template: they stand one after another, with the end of a document after the last.
    Raises `BadRow` for a sample that cannot be rendered exactly, `UserError` where template and tokenizer do not fit.
    """
    spell = spelling(tokenizer)
    tokens, placeholder, trained = [np.zeros(0, np.int32)], [np.zeros(0, np.bool_)], [np.zeros(0, np.bool_)]
    media: list[tuple[int, Part]] = []
    ends: list[int] = []
    written: list[str] = []
    size, before = 0, Before.NOTHING
    document = _is_document(sample)
    for turn in _document(sample) if document else template(sample):
        first = len(trained)
        written += [segment.text for segment in turn if isinstance(segment, Text | Part)]
        for piece, label in _pieces(_segments(turn, spell, sample, slots)):
            if isinstance(piece, tuple):
                part, run = piece
                media.append((size, part))
            else:
                ids = spell.encode(piece, before) if isinstance(piece, str) else [piece]
                run = MediaTokens(np.array(ids, np.int32), np.zeros(len(ids), np.bool_))
            before = Before.TEXT if isinstance(piece, str) else Before.TOKEN
            size += run.tokens.size
            tokens.append(run.tokens)
            placeholder.append(run.placeholder)
            trained.append(~run.placeholder & label)
        if any(labels.any() for labels in trained[first:]):
            ends.append(size)
    return Rendered(
        np.concatenate(tokens),
        np.concatenate(trained),
        np.concatenate(placeholder),
        tuple(media),
        tuple(ends),
        () if document else tuple(_left_out(sample, written)),
    )


def cut_messages(rendered: Rendered, limit: int, policy: Literal["drop", "cut"]) -> tuple[Rendered | None, int]:
    """(what fits into `limit` tokens, how many of its turns with labels are lost).

    "drop" keeps all or nothing. "cut" keeps the first turns, up to the last with a label that fits whole; so no media
    item is ever cut. None where nothing is kept. The earlier turns stay as they were rendered before the cut.
    """
    if rendered.tokens.size <= limit:
        return rendered, 0
    kept = [end for end in rendered.ends if end <= limit] if policy == "cut" else []
    lost = len(rendered.ends) - len(kept)
    if not kept:
        return None, lost
    end = kept[-1]
    media = tuple((position, part) for position, part in rendered.media if position < end)
    return Rendered(
        rendered.tokens[:end], rendered.trained[:end], rendered.placeholder[:end], media, tuple(kept), rendered.left_out
    ), lost


def next_token(rendered: Rendered) -> tuple[Int32[np.ndarray, "n"], Float32[np.ndarray, "n"]]:
    """(targets, weights): what follows each token, and 1 where that is a label; both 0 at the last token."""
    targets = np.zeros_like(rendered.tokens)
    targets[:-1] = rendered.tokens[1:]
    weights = np.zeros(targets.size, np.float32)
    weights[:-1] = rendered.trained[1:]
    return targets, weights


def _pieces(segments: Iterable[_Piece]) -> Iterator[_Piece]:
    """The texts, token ids and media of a turn, each with whether it is a label; texts that meet are one."""
    groups = groupby(segments, key=lambda segment: (isinstance(segment[0], str), segment[1]))
    for (is_text, label), group in groups:
        if is_text:
            yield "".join(str(text) for text, _ in group), label
        else:
            yield from group


def _segments(turn: Turn, spell: Spelling, sample: Sample, slots: Slots | None) -> Iterator[_Piece]:
    for segment in turn:
        match segment:
            case Token():
                yield spell.token_id(segment.name), segment.trained
            case End():
                yield spell.eos_id, segment.trained
            case Part() if segment.kind != "text":
                run = _media_tokens(segment, slots, sample)
                if run.before:
                    yield run.before, segment.trained
                yield (segment, run), segment.trained
            case Part() if segment.role == "assistant":
                for text, is_token in spell.split(segment.text, spell.own):
                    yield spell.token_id(text) if is_token else text, segment.trained
            case Part() | Text() if segment.text:
                yield segment.text, segment.trained


def _media_tokens(part: Part, slots: Slots | None, sample: Sample) -> MediaTokens:
    if slots is None:
        raise BadRow(
            sample.row,
            f"message {part.message} has the part {part.kind!r}, and the model reads only text: "
            "drop such rows, or train a model that takes it",
        )
    return slots(part)


def _is_document(sample: Sample) -> bool:
    documents = [part.role == "document" for part in sample.parts]
    if any(documents) and not all(documents):
        raise BadRow(sample.row, "it has a document among messages, where a row is either: make it two rows")
    return any(documents)


def _document(sample: Sample) -> Iterator[Turn]:
    *parts, last = sample.parts
    for part in parts:
        yield (part,)
    yield last, End(last.trained)


def _left_out(sample: Sample, written: list[str]) -> Iterator[str]:
    """The texts of messages, their fields and tools that are not in what was written, white space aside.

    Thinking and answer count for themselves; what was written as JSON counts as written.
    """
    everything = _squeezed("".join(written))
    parts = (text for part in sample.parts for text in re.split("|".join(OWN_WORDS), part.text))
    for text in (*parts, *_strings(sample.extra.get("fields")), *_strings(sample.extra.get("tools"))):
        as_json = json.dumps(text, ensure_ascii=False)[1:-1]
        if _squeezed(text) not in everything and _squeezed(as_json) not in everything:
            yield text


def _strings(value: Any) -> Iterator[str]:
    """The texts in JSON, without those that only name what a value is."""
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield from _strings(item) if key not in ("type", "id", "tool_call_id") else ()
        case list() | tuple():
            for item in value:
                yield from _strings(item)


def _squeezed(text: str) -> str:
    return "".join(text.split())
