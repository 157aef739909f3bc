"""What the fields of a config take: their types, checked strictly, and their ranges."""

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any


def ranged(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field whose number, or the numbers of whose tuple, lie in a range; without a default it is required.

    The config loader checks the range. `None` passes, where the type allows it.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata=metadata)


_COMPARISONS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def range_error(value: Any, metadata: Mapping[str, Any]) -> str:
    """The range, such as "above 0 and at most 1", of a value that is not in it; "" if it is, or has no range."""
    bounds = {name: metadata[name] for name in _COMPARISONS if name in metadata}
    several = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
    numbers = [number for number in several if number is not None]
    inside = all(_COMPARISONS[name](number, bound) for number in numbers for name, bound in bounds.items())
    return "" if inside else " and ".join(f"{name.replace('_', ' ')} {bound}" for name, bound in bounds.items())


@dataclass(frozen=True)
class Field:
    """A field of a dataclass or a parameter of a function; `default` is MISSING where it is required."""

    annotation: Any
    default: Any
    metadata: Mapping[str, Any]


@functools.cache
def fields_of(target: Any) -> dict[str, Field]:
    """The fields of a dataclass, or the parameters of a function, that can be given by name."""
    hints = typing.get_type_hints(target)
    if is_frozen(target):
        fields = [field for field in dataclasses.fields(target) if field.init]
        made = {field.name: field.default_factory() for field in fields if field.default_factory is not MISSING}
        defaults = {field.name: made.get(field.name, field.default) for field in fields}
        return {field.name: Field(hints[field.name], defaults[field.name], field.metadata) for field in fields}
    return {
        name: Field(hints.get(name, Any), MISSING if parameter.default is parameter.empty else parameter.default, {})
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def is_frozen(thing: Any) -> bool:
    """Whether it is a frozen dataclass (the class, not an instance)."""
    parameters = getattr(thing, "__dataclass_params__", None)
    return isinstance(thing, type) and parameters is not None and parameters.frozen


def convert(value: Any, annotation: Any) -> Any:
    """The value as its type has it, or MISSING if it is not of the type.

    Only lists become tuples and ints become floats. A bool is no int, and `Any` and protocols take everything.
    """
    kind, options = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind is Any or getattr(kind, "_is_protocol", False):
        return value
    if kind in (typing.Union, types.UnionType):
        exact_first = sorted(options, key=lambda option: option is not type(value))
        return next((made for option in exact_first if (made := convert(value, option)) is not MISSING), MISSING)
    if kind is typing.Literal:
        return value if any(type(value) is type(option) and value == option for option in options) else MISSING
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if kind in (bool, int, float, str):
        return value if type(value) is kind else MISSING
    if kind in (tuple, list, abc.Sequence):
        sequence = value if isinstance(value, tuple | list) else ()
        fixed = kind is tuple and options and options[-1] is not Ellipsis
        kinds = options if fixed else (options[:1] or (Any,)) * len(sequence)
        items = [convert(*pair) for pair in zip(sequence, kinds, strict=False)]
        if sequence is not value or len(value) != len(kinds) or any(item is MISSING for item in items):
            return MISSING
        return items if kind is list else tuple(items)
    if kind in (dict, abc.Mapping):
        of_key, of_value = options or (Any, Any)
        made = {key: convert(item, of_value) for key, item in value.items()} if isinstance(value, dict) else MISSING
        wrong = made is MISSING or any(convert(key, of_key) is MISSING or made[key] is MISSING for key in made)
        return MISSING if wrong else made
    if kind is abc.Callable:
        return value if callable(value) else MISSING
    if kind is type and isinstance(value, type) and options:
        return value if issubclass(value, options[0]) else MISSING
    return value if isinstance(value, types.NoneType if kind is None else kind) else MISSING


def describe(annotation: Any) -> str:
    """A type in words: "an int or None", "one of 'a', 'b'", "a tuple[int, ...]"."""
    kind, options = typing.get_origin(annotation), typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        return " or ".join(map(describe, options))
    if kind is typing.Literal:
        return f"{'one of ' if len(options) > 1 else ''}{', '.join(map(repr, options))}"
    if annotation in (None, types.NoneType):
        return "None"
    if annotation is Any:
        return "a value"
    plain = not kind and isinstance(annotation, type)
    name = annotation.__name__ if plain else re.sub(r"[\w.]*\.(?=\w)", "", str(annotation))
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def mend(value: Any, annotation: Any) -> str:
    """How to write a value of the wrong type, as ": write 5"; "" where that is anyone's guess."""
    choices: list[Any] = []
    if isinstance(value, str):
        with contextlib.suppress(ValueError, SyntaxError, TypeError):
            if convert(ast.literal_eval(value), annotation) is not MISSING:
                return f": write {value} without quotes"
        literals = [literal for kind in (annotation, *typing.get_args(annotation)) for literal in typing.get_args(kind)]
        choices += difflib.get_close_matches(value, [text for text in literals if isinstance(text, str)], n=1)
        choices += [value.capitalize() == "True"] if value.lower() in ("true", "false") else []
    elif isinstance(value, int | float) and math.isfinite(value):
        choices += [str(value), *(number for number in (False, True, round(value)) if number == value)]
    choices += [(value,)] if isinstance(value, str | int | float) else []
    return next((f": write {choice!r}" for choice in choices if convert(choice, annotation) is not MISSING), "")
