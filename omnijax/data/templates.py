"""Chat templates: how messages become text, each family in a few lines to be read beside its published template.

A template is a function of a sample that yields turns. A turn is a sequence of segments: the tokens and the words that
the template writes itself, each with whether it is a label, and the sample's own parts, which know that of themselves.
So labels are made where the text is made, and no text is ever searched for them.

A label is what the model has to write: a trained part and the token that ends its turn. Headers are not, nor is the
newline after the end. Each template gives the text of the family's published template for messages of `system`, `user`
and `assistant`; tools are for `JinjaTemplate`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from omnijax.data.sample import Part, Role, Sample
from omnijax.errors import BadRow


@dataclass(frozen=True)
class Token:
    """A token that the template writes, by name."""

    name: str
    trained: bool = False


@dataclass(frozen=True)
class Text:
    """Words that the template writes; a token's name in them is only text."""

    text: str
    trained: bool = False


@dataclass(frozen=True)
class End:
    """The token that ends a document, whatever its name."""

    trained: bool


Segment = Token | Text | End | Part
Turn = Sequence[Segment]
Template = Callable[[Sample], Iterable[Turn]]


@dataclass(frozen=True)
class Message:
    """The parts of one message, and what else a row says of it; trained where its last part is, and its end with it."""

    role: Role
    parts: tuple[Part, ...]
    fields: Mapping[str, Any]

    @property
    def trained(self) -> bool:
        return self.parts[-1].trained

    def trimmed(self) -> tuple[Part, ...]:
        """The parts without white space at either end of the message."""
        parts = list(self.parts)
        parts[0] = replace(parts[0], text=parts[0].text.lstrip())
        parts[-1] = replace(parts[-1], text=parts[-1].text.rstrip())
        return tuple(parts)


def messages_of(sample: Sample) -> tuple[Message, ...]:
    """The messages of a sample, in order; `sample.extra["fields"]` has their fields by number."""
    fields = sample.extra.get("fields", {})
    groups = ((number, tuple(parts)) for number, parts in groupby(sample.parts, key=lambda part: part.message))
    return tuple(Message(parts[0].role, parts, fields.get(number, {})) for number, parts in groups)


def chatml(sample: Sample, system: str | None = None) -> Iterator[Turn]:
    """ChatML, as Qwen3-VL and Qwen3-Instruct-2507 have it; `system` is said where a sample has no system message."""
    messages = _messages(sample)
    if system is not None and messages[0].role != "system":
        yield _chatml_turn("system", [Text(system)], False)
    for message in messages:
        yield _chatml_turn(message.role, message.parts, message.trained)


def qwen3(sample: Sample) -> Iterator[Turn]:
    """ChatML with thinking (Qwen3, hybrid).

    As published, the thinking of an answer is kept after the last question and left out before it, and a last answer
    that came without gets an empty block; that block is no label, because in the mode without thinking it is given.
    """
    messages = _messages(sample)
    last_question = max((n for n, m in enumerate(messages) if m.role == "user"), default=len(messages))
    for number, message in enumerate(messages):
        if message.role != "assistant":
            yield _chatml_turn(message.role, message.parts, message.trained)
            continue
        thinking, answer = _split_thinking(message)
        segments: list[Segment] = list(answer)
        last = number == len(messages) - 1
        if number > last_question and thinking is not None and (thinking.text or last):
            label = thinking.trained
            segments = [Token("<think>", label), Text("\n", label), thinking, Text("\n", label)]
            segments += [Token("</think>", label), Text("\n\n", label), *answer]
        elif number > last_question and last:
            first = replace(answer[0], text=answer[0].text.lstrip("\n"))
            segments = [Token("<think>"), Text("\n\n"), Token("</think>"), Text("\n\n"), first, *answer[1:]]
        yield _chatml_turn(message.role, segments, message.trained)


def llama3(sample: Sample) -> Iterator[Turn]:
    """Llama 3: every message without white space at its ends."""
    for number, message in enumerate(_messages(sample)):
        start = () if number else (Token("<|begin_of_text|>"),)
        yield *start, *_llama3_turn(message.role, message.trimmed(), message.trained)


def llama3_1(sample: Sample, date: str = "26 Jul 2024") -> Iterator[Turn]:
    """Llama 3.1 and later: a system message always, which begins with two dates; `date` is today's, by default a fixed
    one, as published."""
    messages = _messages(sample)
    system, rest = _leading_system(messages)
    dates = Text(f"Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n")
    text, label = (system.trimmed(), system.trained) if system else ((), False)
    yield Token("<|begin_of_text|>"), *_llama3_turn("system", (dates, *text), label)
    for message in rest:
        yield _llama3_turn(message.role, message.trimmed(), message.trained)


def mistral(sample: Sample) -> Iterator[Turn]:
    """Mistral with the tekken tokenizers, instruct version 7 and later; no default system message.

    Two messages of one role in a row are refused, where the published template joins them.
    """
    around = {"system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "user": ("[INST]", "[/INST]")}
    before: Role | None = None
    for number, message in enumerate(_messages(sample)):
        if message.role == before or (before is None and message.role == "assistant"):
            raise BadRow(
                sample.row,
                f"message {number} is of the {message.role} after {before or 'nothing'}: "
                "this template wants user and assistant in turn, after at most one system message",
            )
        start = () if before else (Token("<s>"),)
        before = message.role
        if message.role == "assistant":
            yield *message.parts, Token("</s>", message.trained)
        else:
            left, right = around[message.role]
            yield *start, Token(left), *message.parts, Token(right, message.trained)


def deepseek_v3(sample: Sample) -> Iterator[Turn]:
    """DeepSeek V3: all system messages first, with an empty line between, and no token around them."""
    messages = _messages(sample)
    opening: list[Segment] = [Token(_barred("begin▁of▁sentence"))]
    for message in messages:
        if message.role == "system":
            opening += [Text("\n\n"), *message.parts] if len(opening) > 1 else message.parts
    yield opening
    for message in messages:
        if message.role == "user":
            yield Token(_barred("User")), *message.parts
        elif message.role == "assistant":
            yield Token(_barred("Assistant")), *message.parts, Token(_barred("end▁of▁sentence"), message.trained)


def gpt_oss(sample: Sample, date: str | None = None, reasoning_effort: str = "medium") -> Iterator[Turn]:
    """GPT-OSS (harmony). The sample's system message is the developer's; `date` is today's, said where it is given.

    A label begins at the answer's channel, since the model writes that too. As published, thinking is kept in the last
    answer, as its analysis, and left out of those before; the last answer ends with `<|return|>`, others `<|end|>`.
    """
    system, messages = _leading_system(_messages(sample))
    today = f"Current date: {date}\n" if date else ""
    yield _harmony(
        "system",
        Text(
            "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
            f"{today}\nReasoning: {reasoning_effort}\n\n"
            "# Valid channels: analysis, commentary, final. Channel must be included for every message."
        ),
    )
    if system and any(part.text or part.media for part in system.parts):
        yield _harmony("developer", Text("# Instructions\n\n"), *system.parts, Text("\n\n"), trained=system.trained)
    for number, message in enumerate(messages):
        if message.role == "system":
            raise BadRow(sample.row, "it has a system message after others, which this template lacks: put it first")
        if message.role == "user":
            yield _harmony("user", *message.parts, trained=message.trained)
            continue
        thinking, answer = _split_thinking(message)
        last, label = number == len(messages) - 1, answer[0].trained
        turn: list[Segment] = [Token("<|start|>"), Text("assistant")]
        if thinking is not None and thinking.text and last:
            turn += [*_channel("analysis", label), thinking, Token("<|end|>", label)]
            turn += [Token("<|start|>", label), Text("assistant", label)]
        end = Token("<|return|>" if last else "<|end|>", message.trained)
        yield [*turn, *_channel("final", label), *answer, end]


def plain(sample: Sample) -> Iterator[Turn]:
    """No template: the messages one after another, and the end of a document after each answer."""
    for message in _messages(sample):
        yield [*message.parts, End(message.trained)] if message.role == "assistant" else message.parts


TEMPLATES: dict[str, Template] = {
    "chatml": chatml,
    "qwen2": partial(chatml, system="You are a helpful assistant."),
    "qwen2.5": partial(chatml, system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": qwen3,
    "llama3": llama3,
    "llama3.1": llama3_1,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "plain": plain,
}


def _messages(sample: Sample) -> tuple[Message, ...]:
    messages = messages_of(sample)
    if not messages:
        raise BadRow(sample.row, "it has no message: give at least one")
    tools = sample.extra.get("tools") or any(m.role == "tool" or m.fields.get("tool_calls") for m in messages)
    if tools:
        raise BadRow(sample.row, "it has tools, which the built-in templates lack: use the tokenizer's JinjaTemplate")
    return messages


def _leading_system(messages: tuple[Message, ...]) -> tuple[Message | None, tuple[Message, ...]]:
    return (messages[0], messages[1:]) if messages[0].role == "system" else (None, messages)


def _chatml_turn(role: Role, segments: Iterable[Segment], trained: bool) -> Turn:
    return Token("<|im_start|>"), Text(f"{role}\n"), *segments, Token("<|im_end|>", trained), Text("\n")


def _llama3_turn(role: Role, segments: Iterable[Segment], trained: bool) -> Turn:
    header = Token("<|start_header_id|>"), Text(role), Token("<|end_header_id|>"), Text("\n\n")
    return *header, *segments, Token("<|eot_id|>", trained)


def _harmony(role: str, *segments: Segment, trained: bool = False) -> Turn:
    return Token("<|start|>"), Text(role), Token("<|message|>"), *segments, Token("<|end|>", trained)


def _channel(name: str, trained: bool) -> Turn:
    return Token("<|channel|>", trained), Text(name, trained), Token("<|message|>", trained)


def _barred(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


def _split_thinking(message: Message) -> tuple[Part | None, tuple[Part, ...]]:
    """(thinking, answer) of a message with a field for thinking, or that begins with `<think>...</think>`.

    Newlines around the thinking and before the answer are left to the template.
    """
    first, *rest = message.parts
    for name in ("reasoning_content", "thinking"):
        if isinstance(given := message.fields.get(name), str):
            return Part("text", message.role, first.message, first.trained, given.strip("\n")), message.parts
    if "</think>" not in first.text:
        return None, message.parts
    thinking = first.text.partition("</think>")[0].rpartition("<think>")[2].strip("\n")
    answer = first.text.rpartition("</think>")[2].lstrip("\n")
    return replace(first, text=thinking), (replace(first, text=answer), *rest)
