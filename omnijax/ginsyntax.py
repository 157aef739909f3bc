"""The syntax of gin files, read by gin's own parser; what the names mean is `omnijax.ginfile`'s."""

import os
import re
import tokenize
import types
from dataclasses import dataclass
from typing import Any

from gin.config_parser import BindingStatement, ConfigParser, ImportStatement, IncludeStatement

from omnijax.errors import UserError
from omnijax.ginnames import Import, did_you_mean, near

COMMAND_LINE = "command line"
PYTHON_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}
# What gin's parser raises; TypeError is an unhashable key of a dict, StopIteration an unexpected end.
SYNTAX_ERRORS = (SyntaxError, tokenize.TokenError, TypeError, StopIteration)


@dataclass(frozen=True)
class Reference:
    """`@name` or, called, `@name()`; the name may have a scope."""

    name: str
    called: bool


@dataclass(frozen=True)
class Macro:
    """`%name`."""

    name: str


@dataclass(frozen=True)
class Binding:
    """`name = value`, as written at `where`; `text` is a number's, which may be meant as text on a command line."""

    name: str
    value: Any
    where: str
    text: str | None = None


@dataclass(frozen=True)
class File:
    """The statements of one file. `imports` are those of its includes as well."""

    imports: tuple[Import, ...]
    includes: tuple["File", ...]
    bindings: tuple[Binding, ...]


def read(path: str, parents: tuple[str, ...] = (), where: str = "") -> File:
    """Read a file and those it includes; `parents` are the files being read, `where` the include statement."""
    prefix = where and f"{where}: "
    if os.path.realpath(path) in parents:
        raise UserError(f"{prefix}{path} includes itself")
    try:
        with open(path, encoding="utf-8-sig") as stream:  # some editors begin a file with a byte order mark
            text = stream.read()
    except FileNotFoundError:
        folder, name = os.path.split(path)
        siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        nearest = [os.path.join(folder, sibling) for sibling in near(name, siblings)]
        raise UserError(f"{prefix}there is no file {path}{did_you_mean(nearest)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{prefix}cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    imports, includes, bindings = [], [], []
    for statement in parse(path, text):
        place = f"{path}:{statement.location.line_num}"
        if isinstance(statement, ImportStatement) and statement.module != "__gin__.dynamic_registration":
            imports.append(Import(statement.module, statement.alias or "", place))
        elif isinstance(statement, IncludeStatement):
            included = os.path.normpath(os.path.join(os.path.dirname(path), statement.filename))
            includes.append(read(included, (*parents, os.path.realpath(path)), place))
            imports.extend(includes[-1].imports)
        elif isinstance(statement, BindingStatement):
            name = ".".join(filter(None, (statement.selector, statement.arg_name)))
            bindings.append(Binding("/".join(filter(None, (statement.scope, name))), statement.value, place))
    return File(tuple(imports), tuple(includes), tuple(bindings))


def parser_of(text: str) -> ConfigParser:
    return ConfigParser(text, types.SimpleNamespace(configurable_reference=Reference, macro=Macro))


def parse(path: str, text: str) -> list[Any]:
    """The gin statements of a text."""
    statements, parser = [], None
    try:
        parser = parser_of(text)
        while statement := parser.parse_statement():
            statements.append(statement)
    except SYNTAX_ERRORS as error:
        number = getattr(error, "lineno", None) or (parser.current_token.start[0] if parser else error.args[1][0])
        lines = text.splitlines()
        name = lines[number - 1].partition("=")[0].strip() if number <= len(lines) else ""
        message = str(error.args[0]).partition("\n")[0] if error.args else "unexpected end of the file"
        if word := re.search(r"Failed to parse token '(.*)'", str(error), re.DOTALL):
            message = f"{word[1]} is not a value: write {PYTHON_WORDS.get(word[1]) or repr(word[1])}"
        elif "-" in name and re.fullmatch(r"[\w./-]+", name):
            message = f"{name} is not a name: write {name.replace('-', '_')}"
        elif "Expected ')'" in message:
            message = "a reference takes no arguments: write @name() and bind name.field = value"
        raise UserError(f"{path}:{number}: {message}") from None
    return statements


def parse_value(text: str) -> Any:
    """The value of a command line. What gin cannot read is taken as text, since a shell takes the quotes away.

    Raises `ValueError` for broken brackets, quotes and references, which are never meant as text.
    """
    try:
        parser = parser_of(f"value = {text}")
        statement = parser.parse_statement()
        if parser.parse_statement() is None:
            return statement.value
    except SYNTAX_ERRORS:
        pass
    if text[0] in "@%'\"([{":
        raise ValueError(text)
    return text
