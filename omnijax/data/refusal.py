"""How the parts of a reader that do not know the row say that it cannot be used."""

import reprlib
from typing import Any

_QUOTE = reprlib.Repr()
_QUOTE.maxstring = 100


class Refusal(Exception):
    """Why a row cannot be used; whoever knows the row makes a `BadRow` of it."""


def describe(value: Any) -> str:
    """A value that came with a row, in few words: a text is quoted, anything else named by its type.

    Never by its contents: these may be millions of bytes, or a number too long to print.
    """
    if isinstance(value, str):
        return _QUOTE.repr(value)
    name = type(value).__name__
    return "null" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
