"""Tokenizers: text to ids and back. Both are config dataclasses; neither adds special tokens."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int, Int32

from omnijax.errors import UserError

RESERVED = re.compile(r"[<\[]\|?(reserved(_special_token)?|unused|extra|placeholder)_?\d+\|?[>\]]")
"""Tokens that a file holds in reserve."""

Ids = Sequence[int] | Int[np.ndarray, "tokens"]


class Tokenizer(ABC):
    """What `config.Data.tokenizer` may be; derive from it to bring your own."""

    @property
    @abstractmethod
    def eos_id(self) -> int:
        """The token that ends a document."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """All ids are below it."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Differs between tokenizers that may give different ids."""

    @property
    def named_tokens(self) -> dict[str, int]:
        """Tokens that have a name, as those that stand for media do; none but where a tokenizer says so."""
        return {}

    @abstractmethod
    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        """The ids of `text`, with no special tokens added."""

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """The text of `ids`; the end of a document is left out, broken UTF-8 becomes U+FFFD."""

    @abstractmethod
    def predicted_bytes(self, text: str) -> int:
        """UTF-8 bytes of `text` past its first token, which nothing predicts: the divisor of bits per byte."""


@dataclass(frozen=True)
class Bytes(Tokenizer):
    """UTF-8 bytes are the ids 0..255; 256 ends a document; then come those of `extra`, named tokens of your own.

    No text has such a token, whatever it spells: templates and processors write them.
    """

    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_extra("Bytes", self.extra)

    @property
    def eos_id(self) -> int:
        return 256

    @property
    def vocab_size(self) -> int:
        return 257 + len(self.extra)

    @property
    def fingerprint(self) -> str:
        return " ".join(("bytes", *map(repr, self.extra)))

    @property
    def named_tokens(self) -> dict[str, int]:
        return {name: 257 + number for number, name in enumerate(self.extra)}

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> str:
        return bytes(int(token) for token in ids if token < self.eos_id).decode(errors="replace")

    def predicted_bytes(self, text: str) -> int:
        return max(len(_utf8(text)) - 1, 0)


@dataclass(frozen=True)
class TokenizerFile(Tokenizer):
    """A Hugging Face `tokenizer.json`, read at first use; `eos` is the token that ends a document.

    Special tokens spelled out in a text are recognised and none is decoded, as in Hugging Face. Truncation and padding
    that the file asks for are switched off. `extra` are special tokens of your own: each takes the name of one that the
    file holds in reserve, such as "<|reserved_special_token_0|>", and where there is none left, an id of its own behind
    all others. Raises `UserError` at first use where the file cannot be read or has no token `eos`, and for a text that
    its model cannot encode.
    """

    path: str
    eos: str
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_extra("TokenizerFile", self.extra)

    @cached_property
    def eos_id(self) -> int:
        token = self._tokenizer.token_to_id(self.eos)
        if token is None:
            nearest = get_close_matches(self.eos, self._vocabulary, 3, cutoff=0.3)
            mend = f"did you mean {' or '.join(map(repr, nearest))}?" if nearest else "name the end of a document"
            raise UserError(f"TokenizerFile.eos {self.eos!r} is not a token of {self.path!r}: {mend}")
        return token

    @cached_property
    def vocab_size(self) -> int:
        if not self._vocabulary:
            raise UserError(f"TokenizerFile.path {self.path!r} has no tokens: give another tokenizer.json")
        return max(self._vocabulary.values()) + 1  # not their number: ids may leave gaps

    @cached_property
    def fingerprint(self) -> str:
        own = "".join(f" {name!r}" for name in self.extra)
        return f"sha256 {hashlib.sha256(self._content).hexdigest()[:16]} eos {self.eos_id}{own}"

    @cached_property
    def file(self) -> dict[str, Any]:
        """What is in the `tokenizer.json`, with the `extra` tokens."""
        try:
            file = json.loads(self._content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"TokenizerFile.path {self.path!r} is no tokenizer.json ({error}): give one") from error
        return with_tokens(file, self.extra, f"TokenizerFile.extra of {self.path!r}") if self.extra else file

    def encode(self, text: str) -> Int32[np.ndarray, "tokens"]:
        return np.array(self._encoding(text).ids, np.int32)

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def predicted_bytes(self, text: str) -> int:
        spans = self._encoding(text).offsets
        return len(text[spans[0][1] :].encode()) if spans else 0

    def _encoding(self, text: str) -> tokenizers.Encoding:
        _utf8(text)  # of what is not, the library says only that it must be str
        tokenizer = self._tokenizer
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # bare: a word or letter is new, and the model has no token for what is unknown
            reason = " ".join(str(error).split())
            shown = text if len(text) < 40 else f"{text[:40]}..."
            mend = "give a tokenizer.json with an unknown token, or of bytes"
            raise UserError(f"TokenizerFile.path {self.path!r} cannot encode {shown!r} ({reason}): {mend}") from error

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        try:
            content = json.dumps(self.file).encode() if self.extra else self._content
            tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except UserError:
            raise
        except Exception as error:  # the library raises bare Exception
            reason = " ".join(str(error).split())
            raise UserError(f"TokenizerFile.path {self.path!r} is no tokenizer.json ({reason}): give one") from error
        # A file saved for inference may cut every text at 512 tokens or fill it up: neither belongs in packed rows.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def _content(self) -> bytes:
        try:
            return Path(self.path).expanduser().read_bytes()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UserError(f"TokenizerFile.path {self.path!r} cannot be read ({reason}): give one that can") from error


def with_tokens(file: dict[str, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    """A `tokenizer.json` with these special tokens: under reserved ids first, else behind all others.

    Raises `UserError` for a token that it has already.
    """
    added = [dict(token) for token in file.get("added_tokens") or ()]
    vocabulary = file.get("model", {}).get("vocab")
    model = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    ids = {**model, **{token["content"]: int(token["id"]) for token in added}}
    spare = sorted((token for token in added if RESERVED.fullmatch(token["content"])), key=lambda token: token["id"])
    following = max((*ids.values(), len(vocabulary or ()) - 1)) + 1
    for name in names:
        if name in ids:
            raise UserError(f"{what}: {name!r} is a token already: leave it out")
        if spare:
            token = spare.pop(0)
            if token["content"] in model:
                model[name] = model.pop(token["content"])
            token |= {"content": name, "special": True}
        else:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": following, "content": name, "special": True, **flags})
            following += 1
    whole = file | {"added_tokens": sorted(added, key=lambda token: token["id"])}
    return whole if not isinstance(vocabulary, dict) else whole | {"model": file["model"] | {"vocab": model}}


def _check_extra(tokenizer: str, extra: tuple[str, ...]) -> None:
    if len(set(extra)) < len(extra) or any(not name.strip() for name in extra):
        raise UserError(f"{tokenizer}.extra = {extra!r} must be names, each once")


def _utf8(text: str) -> bytes:
    """`text` in UTF-8; a `UserError` where it cannot be: half a surrogate pair, as of a byte that is no text."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"a text is not valid Unicode ({error}): mend its character {error.start}") from error
