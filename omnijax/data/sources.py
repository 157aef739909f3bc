"""Sources: what a config names. `source.open()` gives the rows, `source.items(...)` what they are trained as."""

import glob
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnijax.data.documents import Documents, Table, concatenate
from omnijax.data.items import Items, TextItems
from omnijax.data.readers import open_json_lines, open_parquet, open_plain_text
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import UserError


class Source(ABC):
    """What `config.Data.source` may be; derive from it to bring your own."""

    @abstractmethod
    def open(self) -> Table[Any, Any]:
        """The source as random-access rows: documents, unless `items` reads others."""

    def items(self, rows: Table[Any, Any], tokenizer: Tokenizer, number: int) -> Items:
        """What becomes of these rows of the source, which has this number among those of a mixture."""
        return TextItems(rows, tokenizer, number)


@dataclass(frozen=True)
class JsonLines(Source):
    """One document a line: a JSON object whose string `field` is the text. `path` is a file or a glob.

    Blank lines are skipped; each opened file counts them in `blank_lines`.
    """

    path: str
    field: str = "text"

    def open(self) -> Documents:
        """Index the lines of every file; raises `UserError` where no file matches. Rows are checked when read."""
        return concatenate([open_json_lines(path, self.field) for path in matching_files(self.path)])


@dataclass(frozen=True)
class Parquet(Source):
    """One document a row: the string column `field`. `path` is a file or a glob.

    A shuffled stream decodes about one row group a document: write files with small row groups (hundreds of rows).
    """

    path: str
    field: str = "text"

    def open(self) -> Documents:
        """Read the footer of every file; raises `UserError` for no file, no Parquet or no such string column."""
        return concatenate([open_parquet(path, self.field) for path in matching_files(self.path)])


@dataclass(frozen=True)
class PlainText(Source):
    """UTF-8 text: one document a file, or one a piece of `text.split(separator)`. `path` is a file or a glob."""

    path: str
    separator: str | None = None

    def open(self) -> Documents:
        """Find the pieces of every file; raises `UserError` for no file or an empty separator."""
        if self.separator == "":
            raise UserError("PlainText.separator is '': give the text to split at, or None for one document a file")
        return concatenate([open_plain_text(path, self.separator) for path in matching_files(self.path)])


@dataclass(frozen=True)
class PythonText(Source):
    """Text an installed Python module holds: `name` is "module:attribute", a dict with str values or a list of str.

    The default is real English prose that every Python has: its own language reference.
    """

    name: str = "pydoc_data.topics:topics"

    def open(self) -> Documents:
        """Import the module; raises `UserError` where the name leads to no texts."""
        module, _, attribute = self.name.partition(":")
        try:
            value = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            mend = "give 'module:attribute' of an installed module, such as 'pydoc_data.topics:topics'"
            raise UserError(f"PythonText.name {self.name!r} cannot be read ({error}): {mend}") from error
        if not isinstance(value, Mapping | Sequence) or isinstance(value, str | bytes):
            raise UserError(f"{self.name!r} is a {type(value).__name__}: it must be a dict or a list of str")
        texts = dict(value if isinstance(value, Mapping) else enumerate(value))
        for key, text in texts.items():
            if not isinstance(text, str):
                raise UserError(f"{self.name!r} item {key!r} is a {type(text).__name__}: it must be a str")
        return PythonDocuments(self.name, tuple(map(str, texts)), tuple(texts.values()))


@dataclass(frozen=True, eq=False)
class PythonDocuments:
    """Texts in memory, named by their keys."""

    name: str
    keys: tuple[str, ...]
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    def row_id(self, index: int) -> str:
        return f"python:{self.name}:{self.keys[index]}"


def matching_files(path: str) -> list[str]:
    """The file at `path`, or the files its glob matches, sorted by name; raises `UserError` where there is none."""
    path = os.path.expanduser(path)
    if os.path.isfile(path):
        return [path]
    found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not found:
        raise UserError(f"no file matches path {path!r} in {os.getcwd()!r}: give a file or a glob like 'data/*.jsonl'")
    return found
