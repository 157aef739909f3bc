"""Spelling: text to ids where the name of a token is a token only if a template says so.

A tokenizer file lists names such as "<|im_end|>" and takes each for a token wherever it stands, also where a user
typed it. Here text is always only text; tokens are inserted by name, and every text between them is encoded as the
file encodes it between the same tokens.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import tokenizers

from omnijax.data.tokenizer import Tokenizer, TokenizerFile
from omnijax.errors import UserError

# The tokens a model writes inside an answer. In an assistant's text they are tokens where the tokenizer has them: read
# as letters, they would teach it to spell what it knows as one token.
OWN_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class Before(Enum):
    """What stands before a text: some tokenizers put a space between, so they must be told."""

    NOTHING = "nothing"
    TOKEN = "token"
    TEXT = "text"  # a text that is cut where its labels begin is still one text


@dataclass(frozen=True, eq=False)
class Spelling:
    """How one tokenizer writes text and named tokens.

    tokens:  id of every named token; runs of white space, which some files list among them, are text
    eos_id:  the token that ends a document
    names:   finds all of them, with the white space that a token swallows
    own:     finds those of `OWN_WORDS` that there are
    encoders: text to ids, by what stands before the text
    """

    tokens: Mapping[str, int]
    eos_id: int
    names: re.Pattern[str]
    own: re.Pattern[str]
    encoders: Mapping[Before, Callable[[str], list[int]]]

    def token_id(self, name: str) -> int:
        if name not in self.tokens:
            raise UserError(
                f"the tokenizer has no token {name!r}, which the chat template writes: give the model's own"
            )
        return self.tokens[name]

    def encode(self, text: str, before: Before) -> list[int]:
        """The ids of `text`; whatever it spells, none is a named token."""
        return self.encoders[before](text)

    def split(self, text: str, names: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
        """The pieces of `text`, none empty: (name, True) for a token and (text, False) between them."""
        place = 0
        for match in names.finditer(text):
            if match.start() > place:
                yield text[place : match.start()], False
            yield match.group().strip(), True
            place = match.end()
        if place < len(text):
            yield text[place:], False


def spelling(tokenizer: Tokenizer) -> Spelling:
    """The spelling of a tokenizer; one that is no `TokenizerFile` encodes every text as it does."""
    return _spelling(tokenizer, tokenizer.fingerprint)


def any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds each of `names`, the longest where several begin."""
    return _alternatives({name: re.escape(name) for name in names})


@lru_cache(maxsize=4)
def _spelling(tokenizer: Tokenizer, fingerprint: str) -> Spelling:
    if not isinstance(tokenizer, TokenizerFile):

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text).tolist()

        named = tokenizer.named_tokens
        own = any_of(name for name in OWN_WORDS if name in named)
        return Spelling(named, tokenizer.eos_id, any_of(named), own, dict.fromkeys(Before, encode))
    eos_id = tokenizer.eos_id  # first: it is what refuses a file that cannot be read
    file = tokenizer.file
    # What is special, `encode_special_tokens` takes for letters in the copies that are opened below.
    every = list(file.get("added_tokens") or ())
    every = [token if token["content"].isspace() else token | {"special": True} for token in every]
    file = file | {"added_tokens": every}
    added = [token for token in every if not token["content"].isspace()]
    tokens = {token["content"]: int(token["id"]) for token in added}
    whole = _plain(file)
    bare = file | {part: _without_prefix(file.get(part)) for part in ("normalizer", "pre_tokenizer")}
    inner = whole if bare == file else _plain(bare)
    only_first = '"prepend_scheme": "first"' in json.dumps([file.get("normalizer"), file.get("pre_tokenizer")])
    return Spelling(
        tokens,
        eos_id,
        _alternatives({token["content"]: _as_the_file_finds(token) for token in added}),
        any_of(name for name in OWN_WORDS if name in tokens),
        {Before.NOTHING: whole, Before.TOKEN: inner if only_first else whole, Before.TEXT: inner},
    )


def _plain(file: dict[str, Any]) -> Callable[[str], list[int]]:
    """The encoder of a `tokenizer.json` that finds no named token in any text."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(file | {"truncation": None, "padding": None}))
    tokenizer.encode_special_tokens = True
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _without_prefix(node: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no space before a text, and else is the same."""
    if isinstance(node, list):
        return [_without_prefix(item) for item in node]
    if not isinstance(node, dict):
        return node
    match node.get("type"):
        case "Prepend":
            return {"type": "Sequence", "normalizers": []}
        case "Metaspace":
            return {key: value for key, value in node.items() if key != "add_prefix_space"} | {
                "prepend_scheme": "never"
            }
        case "ByteLevel":
            return node | {"add_prefix_space": False}
    return {key: _without_prefix(value) for key, value in node.items()}


def _as_the_file_finds(token: dict[str, Any]) -> str:
    before, after = (r"\s*" if token.get(side) else "" for side in ("lstrip", "rstrip"))
    return before + re.escape(token["content"]) + after


def _alternatives(patterns: Mapping[str, str]) -> re.Pattern[str]:
    longest_first = sorted(patterns, key=len, reverse=True)
    return re.compile("|".join(patterns[name] for name in longest_first) or r"(?!)")
