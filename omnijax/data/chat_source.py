"""Chats as a source of training: rows of any file and format, written by a template, with exact labels."""

import dataclasses
import hashlib
import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from omnijax.data.chat import Rendered
from omnijax.data.documents import Table
from omnijax.data.formats import MEDIA, Format, FormatOptions, to_sample
from omnijax.data.jinja_file import read_jinja
from omnijax.data.jinja_template import JinjaTemplate
from omnijax.data.mixture import Mixture, members_of
from omnijax.data.omni_packing import Item
from omnijax.data.processing import Medium, Processor, make_item, render_media
from omnijax.data.rows import Rows, open_rows
from omnijax.data.sample import Part, Sample
from omnijax.data.sources import Source
from omnijax.data.templates import TEMPLATES, Template
from omnijax.data.tokenizer import Tokenizer, TokenizerFile
from omnijax.errors import BadRow, UserError

WITH_DATE = ("llama3.1", "gpt_oss")  # those built-in templates that say what day it is


@dataclass(frozen=True)
class Chat(Source):
    """Conversations; what the assistant says, and the end of its turns, is trained. Plain text is all trained.

    path:     files, folders or globs of these, of any kind that `omnijax.data.rows` opens, local or at a URL
    template: one of `omnijax.data.templates.TEMPLATES`, or the path of a tokenizer's Jinja template: its
              `tokenizer_config.json`, a `.jinja` file beside one, or the folder that holds them
    system:   said where a conversation has no system message
    date:     what a template that says the date takes for today; a Jinja template wants it as "2025-08-31"
    format:   of the rows; None: each is recognised by its fields
    text:     the field that plain text stands in
    left_out: texts of a row that the template writes nowhere, such as the thinking of earlier answers: `raise` makes
              it a bad row, `allow` trains on what is left
    processor: what makes media ready for the model, such as `models.vision.processor.Qwen2VLProcessor`; what it has
              units of may stand in rows by that name, as pictures do; None: a row with media is a bad row
    media_root: the folder that paths of media start from; None: a row with a path is a bad row
    outside_root: such paths may lead out of that folder
    allow_urls: media may be at http and https URLs
    name:     of the source, in the ids of its rows
    index_cache: folder for the indexes of files; None: they are made anew in each process
    """

    path: str | tuple[str, ...]
    template: str = "chatml"
    system: str | None = None
    date: str | None = None
    format: Format | None = None
    text: str = "text"
    left_out: Literal["raise", "allow"] = "raise"
    processor: Processor | None = None
    media_root: str | None = None
    outside_root: bool = False
    allow_urls: bool = False
    name: str = "chat"
    index_cache: str | None = "~/.cache/omnijax/rows"

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES and not Path(self.template).expanduser().exists():
            raise UserError(
                f"Chat.template = {self.template!r} is neither a file nor one of {', '.join(TEMPLATES)}: give one"
            )
        if self.date is not None and self.template in set(TEMPLATES) - set(WITH_DATE):
            raise UserError(
                f"Chat.date = {self.date!r}, and the template {self.template!r} says none: leave it out; "
                f"{' and '.join(WITH_DATE)} do, and Jinja templates may"
            )

        processor = self.processor
        if processor is not None and (isinstance(processor, type) or not isinstance(processor, Processor)):
            raise UserError(
                f"Chat.processor = {processor!r} is no processor: give one, such as @processor.Qwen2VLProcessor()"
            )
        if processor is None and (self.media_root is not None or self.outside_root or self.allow_urls):
            raise UserError(
                "Chat.media_root, outside_root and allow_urls say where media are, and nothing reads them: give a "
                "Chat.processor, or leave them out"
            )

    def open(self) -> Rows:
        """Open the files; raises `UserError` where there are no rows. Rows are checked when read."""
        return open_rows(self.path, name=self.name, index_cache=self.index_cache)

    def items(self, rows: Table[Any, Any], tokenizer: Tokenizer, number: int) -> "ChatItems":
        """The conversations of these rows; raises `UserError` where the tokenizer lacks what the template needs."""
        return ChatItems(rows, self, tokenizer, number)

    def make_template(self, tokenizer: Tokenizer) -> Template:
        """The function that writes a sample."""
        if self.template in TEMPLATES:
            template: Any = TEMPLATES[self.template]
            return template if self.date is None else partial(template, date=self.date)
        if not isinstance(tokenizer, TokenizerFile):
            raise UserError(
                f"Chat.template = {self.template!r} belongs to a tokenizer.json, and Data.tokenizer is a "
                f"{type(tokenizer).__name__}: give that TokenizerFile, or one of {', '.join(TEMPLATES)}"
            )
        return JinjaTemplate(self.template, tokenizer, self.date)


def has_chat(source: Source | Mixture) -> bool:
    """Whether a source is of chats, or a member of a mixture is."""
    return any(isinstance(member.source, Chat) for member in members_of(source))


def processors_of(source: Source | Mixture) -> list[Processor]:
    """The processors of the chats in it."""
    chats = [member.source for member in members_of(source) if isinstance(member.source, Chat)]
    return [chat.processor for chat in chats if chat.processor is not None]


@dataclass(frozen=True, eq=False)
class ChatItems:
    """An `Item` of each row."""

    rows: Rows
    chat: Chat
    tokenizer: Tokenizer
    source: int = 0

    def __post_init__(self) -> None:
        self.chat.make_template(self.tokenizer)  # what it refuses is refused here, not at the first row

    def settings(self) -> dict[str, Any]:
        """What decides an item beside its row; of a template in a file, what is in it and not where it lies."""
        kept = ("system", "date", "format", "text", "left_out")
        settings = {name: getattr(self.chat, name) for name in kept} | {"template": self.chat.template}
        if self.chat.template not in TEMPLATES:
            file = read_jinja(self.chat.template)
            content = repr((file.source, sorted(file.special_tokens.items())))
            settings["template"] = f"sha256 {hashlib.sha256(content.encode()).hexdigest()[:16]}"
        if self.chat.processor is not None:
            where = {name: getattr(self.chat, name) for name in ("outside_root", "allow_urls")}
            settings["processor"] = self.chat.processor.settings() | where
        return {"tokenizer": self.tokenizer.fingerprint, "chat": settings}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        sample, rendered, media = self.rendered(index)
        document = all(part.role == "document" for part in sample.parts)
        return make_item(rendered, media, sample.row, self.source, document=document)

    def rendered(self, index: int) -> tuple[Sample, Rendered, list[Medium]]:
        """The sample of a row, its tokens and its media; raises `BadRow` for one that cannot be trained on."""
        sample = self.sample(index)
        row_id = sample.row
        rendered, media = render_media(sample, self._template, self.tokenizer, self.chat.processor)
        if rendered.left_out and self.chat.left_out == "raise":
            raise BadRow(
                row_id,
                f"the template {self.chat.template!r} writes {rendered.left_out[0][:60]!r} nowhere: "
                "mend the row, or set Chat.left_out to 'allow'",
            )
        if rendered.tokens.size and not rendered.trained[1:].any():
            raise BadRow(row_id, "it has no label, as no message of an assistant is trained: leave it out")
        return sample, rendered, media

    def sample(self, index: int) -> Sample:
        """The sample of a row; raises `BadRow` where it is none."""
        return _with_system(to_sample(self.rows[index], self.rows.row_id(index), self._options), self.chat.system)

    @property
    def _options(self) -> FormatOptions:
        chat = self.chat
        if chat.processor is None:
            # Where media lie does not matter: a row that has any is refused when it is rendered, and none is opened.
            return FormatOptions(root="/", outside_root=True, allow_urls=True, format=chat.format, text=chat.text)
        return FormatOptions(
            root=chat.media_root if chat.media_root is None else os.path.expanduser(chat.media_root),
            outside_root=chat.outside_root,
            allow_urls=chat.allow_urls,
            frame_rate=chat.processor.frame_rate,
            format=chat.format,
            text=chat.text,
            kinds=tuple(sorted(set(chat.processor.units) - set(MEDIA))),
        )

    @cached_property
    def _template(self) -> Template:
        return self.chat.make_template(self.tokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        # Anew, without what it keeps: a vocabulary that was loaded is much larger than the name of its file.
        tokenizer: Any = self.tokenizer
        bare = dataclasses.replace(tokenizer) if hasattr(tokenizer, "__dataclass_fields__") else tokenizer
        return type(self), (self.rows, self.chat, bare, self.source)


def _with_system(sample: Sample, system: str | None) -> Sample:
    """The sample with a system message before its own, where it has none and is no document."""
    if system is None or not sample.parts or sample.parts[0].role in ("system", "document"):
        return sample
    return replace(sample, parts=(Part("text", "system", -1, False, system), *sample.parts))
