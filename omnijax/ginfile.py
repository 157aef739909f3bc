"""Load gin files strictly: every name, type and range is checked, and no global state is kept.

`load` reads the files (`omnijax.ginsyntax`), binds each name to a field, builds the tree from its root, and writes the
tree down as a gin file again. Only frozen dataclasses and plain functions can be bound. A field whose type is a frozen
dataclass, and that has no default, is built without being bound. Scopes are gin's: `@a/x.F()` reads `a/x.F.field`
before `x.F.field`, and so do the sections below it. A file's bindings replace those of the files it includes, and
overrides replace both; every other second binding is refused.
"""

import collections
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

from omnijax.errors import UserError
from omnijax.fields import Field, convert, describe, fields_of, is_frozen, mend, range_error
from omnijax.ginnames import (
    Import,
    Names,
    did_you_mean,
    fields_named,
    find,
    full_name,
    named,
    near,
    short_name,
    visible,
)
from omnijax.ginsyntax import COMMAND_LINE, PYTHON_WORDS, Binding, File, Macro, Reference, parse_value, read

PLAIN = (type(None), bool, int, float, str)
Key = tuple[str, Any, str]  # scope, dataclass or function, field; a macro's is ("", None, its name)


@dataclass(frozen=True)
class Loaded:
    """The tree that a config describes, and the gin file of everything in it, which loads to an equal tree."""

    value: Any
    text: str


@dataclass(frozen=True)
class Section:
    """A dataclass or function called in a scope: its arguments, with sections in place of values, and result."""

    scope: str
    target: Any
    arguments: Mapping[str, Any]
    value: Any


@dataclass(frozen=True)
class Tree:
    """What is known while a tree is built. A section is None while it is being built, so that cycles are seen."""

    names: Names
    bindings: Mapping[Key, Binding]
    used: set[Key]
    sections: dict[tuple[str, Any], Section | None]
    modules: set[str]


def load(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, root: type) -> Loaded:
    """Build `root`, a frozen dataclass, from a gin file and overrides such as `Section.field=value`.

    Raises `UserError` for every mistake in the files and the overrides.
    """
    file = read(os.fspath(path))
    names = visible(root, file.imports)
    replacements = [parse_override(override, names) for override in overrides]
    replaced = unique((key_of(replacement, names), replacement) for replacement in replacements)
    tree = Tree(names, {**merge(file, names), **replaced}, set(), {}, set())
    value = build(tree, root, "", os.fspath(path)).value
    for key, binding in tree.bindings.items():
        if key not in tree.used:
            raise UserError(f"{binding.where}: {binding.name} is never used: {why_unused(tree, key)}")
    return Loaded(value, resolved_text(tree, root))


# Bindings


def parse_override(text: str, names: Names) -> Binding:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not re.fullmatch(r"(\w+/)*\w+(\.\w+)*", name):
        word = name.lstrip("-").replace("-", "_")
        right = (fields_named(names, word) or [word if "." in word else "Section.field"])[0]
        raise UserError(f"{COMMAND_LINE}: {text!r} is not Section.field=value: write {right}={value or 'value'}")
    if not value or value in PYTHON_WORDS:
        right = PYTHON_WORDS.get(value, "\"''\" for empty text")
        raise UserError(f"{COMMAND_LINE}: {name} = {value or 'nothing'} is not a value: write {name}={right}")
    try:
        parsed = parse_value(value)
    except ValueError:
        raise UserError(
            f"{COMMAND_LINE}: {name} = {value} is not a value: check its brackets, and quotes around text within"
        ) from None
    return Binding(name, parsed, COMMAND_LINE, value if type(parsed) in (int, float) else None)


def merge(file: File, names: Names) -> dict[Key, Binding]:
    """The bindings of a file and of those it includes, which it may replace; two includes may not disagree."""
    merged = [(key, binding) for included in file.includes for key, binding in merge(included, names).items()]
    # A file that is included twice, by two includes, does not disagree with itself.
    inherited = {(key, binding.where): binding for key, binding in merged}
    return {
        **unique((key, binding) for (key, _), binding in inherited.items()),
        **unique((key_of(binding, names), binding) for binding in file.bindings),
    }


def unique(bindings: Iterable[tuple[Key, Binding]]) -> dict[Key, Binding]:
    bound: dict[Key, Binding] = {}
    for key, binding in bindings:
        first = bound.setdefault(key, binding)
        if first is not binding:
            raise UserError(f"{binding.where}: {binding.name} is bound twice, first at {first.where}: remove one")
    return bound


def key_of(binding: Binding, names: Names) -> Key:
    scope, _, dotted = binding.name.rpartition("/")
    selector, _, name = dotted.rpartition(".")
    if not selector:
        return "", None, binding.name
    target = find(names, selector, binding.where, field=name)
    fields = fields_of(target)
    if name not in fields:
        nearest = [f"{selector}.{field}" for field in near(name, fields)] + fields_named(names, name)
        hint = did_you_mean(nearest) or f"; it has {', '.join(fields) or 'no fields'}"
        raise UserError(f"{binding.where}: {selector} has no field {name}{hint}")
    return scope, target, name


def why_unused(tree: Tree, key: Key) -> str:
    _, target, name = key
    if target is None:
        read_ones = [macro for _, owner, macro in tree.used if owner is None]
        return f"no value is %{name}{did_you_mean([*near(name, read_ones), *fields_named(tree.names, name)])}"
    calls = [section for section in tree.sections.values() if section and section.target is target]
    if calls:
        read_names = (f"{in_scope(section.scope, short_name(target))}.{name}" for section in calls)
        return f"what is read is {' and '.join(read_names)}"
    reference = f"@{short_name(target)}()"
    takers = (
        f"{in_scope(section.scope, short_name(section.target))}.{field}"
        for section in tree.sections.values()
        if section and is_frozen(target)
        for field, expected in fields_of(section.target).items()
        if target in (expected.annotation, *typing.get_args(expected.annotation))
    )
    taker = next(takers, "")
    return f"nothing is {reference}" + (f"; did you mean to write {taker} = {reference} too?" if taker else "")


def in_scope(scope: str, name: str) -> str:
    return f"{scope}/{name}" if scope else name


# Building


def build(tree: Tree, target: Any, scope: str, where: str, unbound: str = "") -> Section:
    """Call a dataclass or function with its bindings; `unbound` is the field it is for, if that field is not bound."""
    if (scope, target) in tree.sections:
        section = tree.sections[scope, target]
        if section is None:
            cycle = [short_name(name) for (_, name), done in tree.sections.items() if done is None]
            raise UserError(f"{where}: {' -> '.join([*cycle, short_name(target)])} is endless: bind one differently")
        return section
    tree.sections[scope, target] = None
    tree.modules.add(target.__module__)
    arguments, values = {}, {}
    for name, field in fields_of(target).items():
        label = f"{in_scope(scope, short_name(target))}.{name}"
        key = nearest_key(tree, scope, target, name)
        if key:
            tree.used.add(key)
            binding = tree.bindings[key]
            arguments[name] = expand(tree, binding.value, scope, binding)
            arguments[name], values[name] = accept(arguments[name], field, binding)
        elif field.default is not MISSING:
            arguments[name] = expand(tree, field.default, scope, Binding(label, field.default, where))
            values[name] = convert(realise(arguments[name]), field.annotation)
            if values[name] is MISSING or range_error(values[name], field.metadata):
                raise TypeError(f"{label}: its own default {field.default!r} is not allowed")
        elif is_frozen(field.annotation):
            arguments[name] = build(tree, field.annotation, scope, where, unbound=label)
            values[name] = arguments[name].value
        else:
            other = f", or bind {unbound}" if unbound else ""
            raise UserError(f"{where}: {label} is required: bind it to {describe(field.annotation)}{other}")
    if inspect.isabstract(target):
        raise UserError(f"{where}: {short_name(target)} is what several classes share: give one of these")
    try:
        value = target(**values)
    except UserError as error:
        about = "" if target.__name__ in str(error) else f"{short_name(target)}: "
        raise UserError(f"{where}: {about}{error}") from error
    section = tree.sections[scope, target] = Section(scope, target, arguments, value)
    return section


def nearest_key(tree: Tree, scope: str, target: Any, name: str) -> Key | None:
    """The binding of the longest scope that `scope` begins with."""
    parts = scope.split("/") if scope else []
    scopes = ("/".join(parts[:count]) for count in range(len(parts), -1, -1))
    return next((key for outer in scopes if (key := (outer, target, name)) in tree.bindings), None)


def expand(tree: Tree, value: Any, scope: str, binding: Binding, macros: tuple[str, ...] = ()) -> Any:
    """A value with its macros replaced, its `@name()` built into sections and its `@name` found."""
    where = binding.where
    if isinstance(value, Macro):
        key = "", None, value.name
        if key not in tree.bindings:
            nearest = near(value.name, (name for _, owner, name in tree.bindings if owner is None))
            hint = did_you_mean(nearest) or f"; write {value.name} = ... in a line of its own"
            raise UserError(f"{where}: %{value.name} has no value{hint}")
        if value.name in macros:
            raise UserError(f"{where}: %{' -> %'.join((*macros, value.name))} is endless: give one a value")
        tree.used.add(key)
        return expand(tree, tree.bindings[key].value, scope, binding, (*macros, value.name))
    if isinstance(value, Reference):
        inner, _, name = value.name.rpartition("/")
        target = find(tree.names, name, where)
        if value.called:
            return build(tree, target, inner or scope, where)
        if inner:
            raise UserError(f"{where}: only a call has a scope: write @{value.name}()")
        return expand(tree, target, scope, binding)
    if isinstance(value, tuple | list):
        return type(value)(expand(tree, item, scope, binding, macros) for item in value)
    if isinstance(value, dict) and all(isinstance(key, PLAIN) for key in value):
        return {key: expand(tree, item, scope, binding, macros) for key, item in value.items()}
    if is_frozen(type(value)):  # a default; its fields can be bound like any section's
        if value != type(value)():
            raise TypeError(f"{binding.name}: a default must have its type's own defaults, but is {value!r}")
        return build(tree, type(value), scope, where)
    if is_frozen(value) or inspect.isfunction(value):
        tree.modules.add(value.__module__)
    elif not isinstance(value, PLAIN):
        raise UserError(f"{where}: {binding.name} = {value!r} cannot be written in a config")
    return value


def realise(value: Any) -> Any:
    """An expanded value with the results of its sections in their place."""
    if isinstance(value, Section):
        return value.value
    if isinstance(value, tuple | list):
        return type(value)(map(realise, value))
    return {key: realise(item) for key, item in value.items()} if isinstance(value, dict) else value


def accept(expanded: Any, field: Field, binding: Binding) -> tuple[Any, Any]:
    """Check the type and range of a bound value; returns it expanded, and as it is passed on."""
    value = realise(expanded)
    converted = convert(value, field.annotation)
    if converted is MISSING and binding.text and convert(binding.text, field.annotation) is not MISSING:
        expanded = value = converted = binding.text
    told = f"{binding.where}: {binding.name} = {written(expanded, short_name)}"
    if converted is MISSING:
        uncalled = is_frozen(value) or inspect.isfunction(value)
        how = f": write @{short_name(value)}()" if uncalled else mend(expanded, field.annotation)
        raise UserError(f"{told} is not {describe(field.annotation)}{how}")
    if wanted := range_error(converted, field.metadata):
        raise UserError(f"{told} must be {wanted}")
    return expanded, converted


# Writing


def written(value: Any, name_of: Callable[[Any], str]) -> str:
    """An expanded value as a gin file has it."""
    if isinstance(value, Section):
        return f"@{in_scope(value.scope, name_of(value.target))}()"
    if is_frozen(value) or inspect.isfunction(value):
        return f"@{name_of(value)}"
    if isinstance(value, tuple | list):
        items = ", ".join(written(item, name_of) for item in value)
        if isinstance(value, list):
            return f"[{items}]"
        return f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {written(item, name_of)}' for key, item in value.items())}}}"
    return repr(value).replace("inf", "1e999") if isinstance(value, float) else repr(value)


def resolved_text(tree: Tree, root: type) -> str:
    """All sections of a built tree with all their fields, each by its whole scope, the root first."""
    modules = sorted(tree.modules)
    last_parts = collections.Counter(module.rpartition(".")[2] for module in modules)
    imports = [
        Import(module, module.replace(".", "_") if last_parts[module.rpartition(".")[2]] > 1 else "", "")
        for module in modules
    ]
    names = visible(root, imports)
    prefixes = {line.module: line.alias or line.module.rpartition(".")[2] for line in imports}

    def name_of(target: Any) -> str:
        name = f"{prefixes[target.__module__]}.{target.__qualname__}"
        return name if named(names, name) == [target] else full_name(target)

    lines = ["from __gin__ import dynamic_registration", ""]
    for line in imports:
        package, _, module = line.module.rpartition(".")
        start = f"from {package} import {module}" if package else f"import {module}"
        lines.append(f"{start} as {line.alias}" if line.alias else start)
    for section in filter(None, tree.sections.values()):
        prefix = in_scope(section.scope, name_of(section.target))
        fields = [f"{prefix}.{name} = {written(value, name_of)}" for name, value in section.arguments.items()]
        lines += ["", *fields] if fields else []
    return "\n".join(lines) + "\n"
