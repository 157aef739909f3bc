"""The Jinja template that comes with a tokenizer, as a template of ours.

Jinja writes one string, in which nobody can tell the template's "<|im_end|>" from one that a user typed. So whatever
in a sample spells the name of a token goes in as a character of private use, and so does each media part; afterwards
the characters become text and media again, and every name that stands there is the template's own.

Labels are what the template's `{% generation %}` blocks write, where it has them. Where it has none, they are found by
rendering again: less of the messages, to see where a generation prompt and a turn end, and all of them with private
characters around their contents. Each must agree with the rendering proper, on the very sample; a sample whose labels
cannot be told so is refused.
"""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from omnijax.data.jinja_file import CLOSE, OPEN, JinjaFile, read_jinja
from omnijax.data.refusal import Refusal
from omnijax.data.sample import Part, Sample
from omnijax.data.spelling import OWN_WORDS, Spelling, any_of, spelling
from omnijax.data.templates import Segment, Text, Token, Turn, messages_of
from omnijax.data.tokenizer import TokenizerFile
from omnijax.errors import BadRow, UserError

Span = tuple[int, int]
# By number of message, where its content begins and ends in a rendering. A begin is None where the template writes the
# beginning anew, as Qwen3 does with thinking.
Edges = dict[int, tuple[int | None, int]]
PRIVATE = re.compile("([\U00100000-\U0010ffff])")  # private use plane 16


@dataclass(frozen=True)
class JinjaTemplate:
    """A Hugging Face chat template; it renders as in `apply_chat_template`.

    path: a `tokenizer_config.json`, a `.jinja` file beside one, or the folder that holds them
    date: what the template takes for today, as "2025-08-31"

    `sample.extra` are the template's variables, but for "fields", which are the messages' own by number.
    Raises `UserError` at first use where there is no template, and `BadRow` for a sample that cannot be told exactly.
    """

    path: str
    tokenizer: TokenizerFile
    date: str | None = None

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.date or "2025-08-31")
        except ValueError as error:
            raise UserError(f"JinjaTemplate.date is {self.date!r}: give it as '2025-08-31'") from error

    def __call__(self, sample: Sample) -> Iterator[Turn]:
        """The turns of a sample; each ends with a label, but for the last, which holds what stands after them."""
        file = self._file
        try:
            conversation = _Conversation(sample, file, self.date, spelling(self.tokenizer))
            labels = conversation.labels()
        except Refusal as refusal:
            raise BadRow(sample.row, str(refusal)) from refusal
        place = 0
        for start, end in labels:
            yield [*conversation.segments(place, start, False), *conversation.segments(start, end, True)]
            place = end
        yield list(conversation.segments(place, len(conversation.text), False))

    @cached_property
    def _file(self) -> JinjaFile:
        return read_jinja(self.path)


class _Conversation:
    """One sample as the template writes it: `text`, with characters of private use for what it must not see."""

    def __init__(self, sample: Sample, file: JinjaFile, date: str | None, spell: Spelling):
        self._file, self._date, self._spell = file, date, spell
        self._messages = messages_of(sample)
        self._hidden: dict[str, str | Part] = {}  # what a private character stands for
        self._characters: dict[str, str] = {}  # the private character of a text
        everywhere, in_answers = _names(tuple(spell.tokens))
        patterns = [in_answers if message.role == "assistant" else everywhere for message in self._messages]
        self._contents = [
            "".join(self._hide(part.text, names) if part.kind == "text" else self._private(part) for part in m.parts)
            for m, names in zip(self._messages, patterns, strict=True)
        ]
        self._fields = [self._hide(m.fields, names) for m, names in zip(self._messages, patterns, strict=True)]
        extra = {name: value for name, value in sample.extra.items() if name != "fields"}
        self._variables = self._hide(extra, everywhere)
        self.text, self._blocks = self._blocks_of(self._render(self._contents))
        self._check_media([part for part in sample.parts if part.kind != "text"])

    def segments(self, start: int, end: int, trained: bool) -> Iterator[Segment]:
        """The stretch `text[start:end]` as tokens, texts and media."""
        for piece in PRIVATE.split(self.text[start:end]):
            hidden = self._hidden.get(piece)
            if isinstance(hidden, Part):
                yield hidden
            elif hidden is not None:
                yield Text(hidden, trained)
            else:
                for text, is_token in self._spell.split(piece, self._spell.names):
                    yield Token(text, trained) if is_token else Text(text, trained)

    def labels(self) -> list[Span]:
        """The spans of `text` that are labels, in order."""
        for number, message in enumerate(self._messages):
            if any(part.trained != message.trained for part in message.parts):
                raise Refusal(f"message {number} is trained in part, which no Jinja template tells: use a built-in one")
        answers = {n: m.trained for n, m in enumerate(self._messages) if m.role == "assistant"}
        alone = [n for n, m in enumerate(self._messages) if m.trained and not (self._blocks and n in answers)]
        followers = [number + 1 for number in alone if self._has_calls(number)]
        edges = self._edges({*alone, *followers, *(answers if self._blocks else ())})
        spans = [self._span(number, edges) for number in alone]
        if self._blocks:
            spans += self._trained_blocks(answers, edges)
        spans.sort()
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise self._refusal("writes messages into one another")
        return spans

    def _trained_blocks(self, answers: dict[int, bool], edges: Edges) -> Iterator[Span]:
        """The blocks of the trained answers; white space after a block's last token is no label."""
        inside = [[n for n in answers if n in edges and start <= edges[n][1] <= end] for start, end in self._blocks]
        if outside := {n for n in answers if answers[n] and n in edges} - {n for numbers in inside for n in numbers}:
            raise self._refusal(f"writes message {min(outside)} outside its generation blocks")
        for (start, end), numbers in zip(self._blocks, inside, strict=True):
            if len(set(answers.values())) > 1 and len(numbers) != 1:
                raise self._refusal(f"has a generation block with {len(numbers)} answers, and only some are trained")
            if all(answers[number] for number in numbers or answers):
                yield start, self._without_space(start, end)

    def _span(self, number: int, edges: Edges) -> Span:
        """The label of a message, by the generation prompt, the edges of its content and the token after it."""
        begin, end = edges.get(number, (None, len(self.text)))
        prompt = self._prompt_end(number, end) if self._messages[number].role == "assistant" else None
        if prompt is not None and self._try(number) == self.text[:prompt] and self.text[prompt:begin].strip():
            prompt = None  # the template has no generation prompt, and a header follows
        if prompt is None:
            before = self.text[: begin or 0]
            if begin is None or not before.endswith(("\n", *self._spell.tokens)):
                raise self._refusal(f"does not show where message {number} begins")
            start = begin
        elif begin is None:
            start = prompt
        else:
            # What the prompt has in the mode without thinking is given to the model, so it is no label.
            quiet = self._prompt_end(number, begin, enable_thinking=False)
            start = min(quiet or prompt, begin)
        return start, self._label_end(number, end if number in edges else start, edges)

    def _label_end(self, number: int, end: int, edges: Edges) -> int:
        """Past the token that ends a message whose content ends at `end`; calls of tools stand between the two."""
        calls = self._has_calls(number)
        last = number == len(self._messages) - 1
        following = len(self.text) if last else edges.get(number + 1, (None, 0))[0] or 0
        eos = self._file.special_tokens.get("eos_token", "")
        place = self.text.find(eos, end) if eos else -1
        if place >= 0 and (not self.text[end:place].strip() or (calls and place < following)):
            stop = place + len(eos)  # whatever the template writes after it, here the model stops
        else:
            turn = self._turn_end(number)
            if turn is None or turn < end:
                raise self._refusal(f"does not show where message {number} ends, with {eos!r} as its eos_token")
            stop = self._without_space(end, turn)
        after = self.text[end:stop]
        words = "".join(text for text, is_token in self._spell.split(after, self._spell.names) if not is_token)
        if calls and not words.strip():
            raise Refusal(f"the chat template {self._file.path!r} leaves out the calls of tools: choose one with tools")
        if not after.endswith(tuple(self._spell.tokens)) or (words.strip() and not calls):
            raise self._refusal(f"ends message {number} with {after[:20]!r}, which is no token")
        return stop

    def _has_calls(self, number: int) -> bool:
        return bool(self._messages[number].fields.get("tool_calls"))

    def _prompt_end(self, number: int, limit: int, **variables: Any) -> int | None:
        """Where the prompt for a message ends in `text`; None where it is not so written, up to `limit`."""
        prompt = self._try(number, add_generation_prompt=True, **variables)
        return len(prompt) if prompt and self.text.startswith(prompt) and len(prompt) <= limit else None

    def _turn_end(self, number: int) -> int | None:
        """Where everything up to and with a message ends in `text`; None where that is not so written."""
        through = self._try(number + 1)
        if through and self.text.startswith(through):
            return len(through)
        # The last answer may end in its own way; with a prompt after it, it is not the last.
        before, prompt, after = self._try(number), self._try(number, True), self._try(number + 1, True)
        if before and prompt and after and prompt.startswith(before):
            through = after.removesuffix(prompt[len(before) :])
            if through != after and self.text.startswith(through):
                return len(through)
        return None

    def _edges(self, wanted: Container[int]) -> Edges:
        """Where the contents of the messages `wanted` stand in `text`; without those that say nothing but calls."""
        marks = {
            number: (self._private(""), self._private(""))
            for number, content in enumerate(self._contents)
            if number in wanted and (content.strip() or not self._has_calls(number))
        }
        contents = [_around(text, *marks[n]) if n in marks else text for n, text in enumerate(self._contents)]
        taken = "".join(begin + end for begin, end in marks.values())
        text, found = _take_out(self._blocks_of(self._render(contents))[0], taken)
        if text != self.text:
            raise self._refusal("writes something else where contents are marked")
        edges = {}
        for number, pair in marks.items():
            begins, ends = ([place for mark, place in found if mark == each] for each in pair)
            if len(begins) > 1 or len(ends) != 1:
                raise self._refusal(f"writes the end of message {number} {len(ends)} times")
            edges[number] = (begins[0] if begins else None, ends[0])
        return edges

    def _blocks_of(self, rendered: str) -> tuple[str, list[Span]]:
        """The text without the marks of generation blocks, and the blocks."""
        text, found = _take_out(rendered, OPEN + CLOSE)
        pairs = list(zip(found[::2], found[1::2], strict=False))
        if len(found) % 2 or any((one[0], other[0]) != (OPEN, CLOSE) for one, other in pairs):
            raise self._refusal("has a generation block inside another")
        return text, [(start, end) for (_, start), (_, end) in pairs]

    def _check_media(self, media: Sequence[Part]) -> None:
        hidden = (self._hidden.get(mark) for mark in PRIVATE.findall(self.text))
        written = [part for part in hidden if isinstance(part, Part)]
        if list(map(id, written)) != list(map(id, media)):
            raise Refusal(
                f"the chat template {self._file.path!r} writes {len(written)} media for {len(media)}, or in another "
                "order: choose a template that writes each once"
            )

    def _try(self, count: int, add_generation_prompt: bool = False, **variables: Any) -> str | None:
        """The first messages alone; None where the template refuses them."""
        try:
            variables["add_generation_prompt"] = add_generation_prompt
            rendered = self._render(self._contents[:count], **variables)
        except Refusal:
            return None
        return self._blocks_of(rendered)[0]

    def _render(self, contents: list[str], **variables: Any) -> str:
        messages = [
            {**fields, "role": message.role, "content": content}
            for message, fields, content in zip(self._messages, self._fields, contents, strict=False)
        ]
        given = {"add_generation_prompt": False, **self._variables, **variables}
        return self._file.render(messages, self._date, given)

    def _without_space(self, start: int, end: int) -> int:
        """`end`, without the white space after the last token before it."""
        stop = start + len(self.text[start:end].rstrip())
        return stop if self.text[start:stop].endswith(tuple(self._spell.tokens)) else end

    def _hide(self, value: Any, names: re.Pattern[str]) -> Any:
        """`value`, text or JSON, with private characters for what `names` finds in it."""
        match value:
            case str():
                return names.sub(self._private_text, value)
            case dict():
                return {key: self._hide(item, names) for key, item in value.items()}
            case list() | tuple():
                return [self._hide(item, names) for item in value]
        return value

    def _private_text(self, match: re.Match[str]) -> str:
        text = match.group()
        if text not in self._characters:  # one for each text, not for each place: there are 65,534
            self._characters[text] = self._private(text)
        return self._characters[text]

    def _private(self, hidden: str | Part) -> str:
        character = chr(0x100000 + len(self._hidden))
        self._hidden[character] = hidden
        return character

    def _refusal(self, what: str) -> Refusal:
        return Refusal(
            f"the chat template {self._file.path!r} {what}, so its labels are not sure: "
            "give it generation blocks, or choose a built-in template"
        )


@lru_cache(maxsize=4)
def _names(names: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What is hidden, and what of it in answers: the names of tokens, and characters used to hide."""
    patterns = any_of(names), any_of(name for name in names if name not in OWN_WORDS)
    everywhere, in_answers = (re.compile(f"{pattern.pattern}|{PRIVATE.pattern}") for pattern in patterns)
    return everywhere, in_answers


def _around(text: str, begin: str, end: str) -> str:
    """`text` with marks at both ends, inside the white space there, which templates strip."""
    body = text.strip()
    lead = len(text) - len(text.lstrip()) if body else len(text)
    return text[:lead] + begin + body + end + text[lead + len(body) :]


def _take_out(text: str, marks: str) -> tuple[str, list[tuple[str, int]]]:
    """`text` without the private characters `marks`, and (mark, its place in the rest) for each."""
    kept: list[str] = []
    found: list[tuple[str, int]] = []
    size = 0
    for piece in PRIVATE.split(text):
        if piece and piece in marks and PRIVATE.fullmatch(piece):
            found.append((piece, size))
        else:
            kept.append(piece)
            size += len(piece)
    return "".join(kept), found
