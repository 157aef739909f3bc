"""The names that a gin file can use: what its imports define and what the types of the root reach."""

import difflib
import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from omnijax.errors import UserError
from omnijax.fields import fields_of, is_frozen

Names = dict[str, Any]  # dotted name -> what it names


@dataclass(frozen=True)
class Import:
    """`module` and the name it goes by, "" without `as`."""

    module: str
    alias: str
    where: str


def visible(root: type, imports: Iterable[Import]) -> Names:
    """Everything that has a name: what the root's types reach, and what the imported modules define."""
    names: Names = {}
    aliases: dict[str, str] = {}

    def reach(annotation: Any) -> None:
        if is_frozen(annotation) and full_name(annotation) not in names:
            names[full_name(annotation)] = annotation
            for field in fields_of(annotation).values():
                reach(field.annotation)
                reach(type(field.default))
        for option in typing.get_args(annotation):
            reach(option)

    reach(root)
    for line in (Import(root.__module__, "", ""), *imports):
        if line.alias and aliases.setdefault(line.alias, line.module) != line.module:
            raise UserError(f"{line.where}: {line.alias} is {aliases[line.alias]} already: choose another name")
        module = import_module(line)
        for name, thing in vars(module).items():
            inside = f"{getattr(thing, '__module__', '')}.".startswith(f"{line.module}.")
            offered = inside or name in getattr(module, "__all__", ())
            if not name.startswith("_") and (is_frozen(thing) or (callable(thing) and offered)):
                reach(thing)
                names[f"{line.alias or line.module}.{name}"] = thing
    return names


def import_module(line: Import) -> types.ModuleType:
    try:
        return importlib.import_module(line.module)
    except ImportError as error:
        missing = error.name or ""
        if not isinstance(error, ModuleNotFoundError) or not f"{line.module}.".startswith(f"{missing}."):
            raise UserError(f"{line.where}: cannot import {line.module}: {error}") from error
        parent, _, last = missing.rpartition(".")
        siblings = pkgutil.iter_modules(getattr(sys.modules[parent], "__path__", []) if parent else None)
        nearest = [f"{parent}.{name}".lstrip(".") for name in near(last, (sibling.name for sibling in siblings))]
        if hasattr(sys.modules.get(parent), last):
            nearest = [parent]
        raise UserError(f"{line.where}: there is no module {missing}{did_you_mean(nearest)}") from None


def full_name(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def short_name(target: Any) -> str:
    return f"{target.__module__.rpartition('.')[2]}.{target.__qualname__}"


def named(names: Names, name: str) -> list[Any]:
    """What a name may mean: the thing of this very name, or else those whose names end in it."""
    ending = {id(thing): thing for known, thing in names.items() if known.endswith(f".{name}")}
    return [names[name]] if name in names else list(ending.values())


def find(names: Names, name: str, where: str, field: str = "") -> Any:
    """The dataclass or function of a name, of which an ending is enough if no other, or none with `field`, has it."""
    found = named(names, name)
    if len(found) > 1 and field:
        found = [thing for thing in found if is_frozen(thing) and field in fields_of(thing)] or found
    if len(found) > 1:
        raise UserError(f"{where}: {name} is ambiguous: write {' or '.join(sorted(map(full_name, found)))}")
    if not found:
        endings = {".".join(known.split(".")[-1 - name.count(".") :]) for known in names}
        classes = {thing.__name__: short_name(thing) for thing in reversed(names.values()) if is_frozen(thing)}
        last = name.rpartition(".")[2]
        whole = [ending for ending in near(name, endings) if near(last, [ending.rpartition(".")[2]])]
        nearest = whole or [classes[word] for word in near(last, classes)]
        hint = did_you_mean(nearest) or f"; import its module in a line like `from {__package__} import config`"
        raise UserError(f"{where}: there is no {name}{hint}")
    if not is_frozen(found[0]) and not inspect.isfunction(found[0]):
        raise UserError(f"{where}: {name} cannot be bound: it is neither a frozen dataclass nor a plain function")
    return found[0]


def fields_named(names: Names, name: str) -> list[str]:
    """The fields of this name that any section has, as `module.Section.field`."""
    sections = dict.fromkeys(thing for thing in names.values() if is_frozen(thing) and name in fields_of(thing))
    return [f"{short_name(section)}.{name}" for section in sections]


def near(word: str, words: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, sorted(words), n=1)


def did_you_mean(choices: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(dict.fromkeys(choices[:3]))}?" if choices else ""
