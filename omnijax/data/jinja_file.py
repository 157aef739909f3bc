"""The Jinja chat template in a tokenizer's files, and the text it makes of messages, as transformers would make it.

`{% generation %}` blocks write `OPEN` and `CLOSE` around their text, since nothing else would show where they were.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from omnijax.data.refusal import Refusal
from omnijax.errors import UserError

OPEN, CLOSE = "\U0010fffc", "\U0010fffd"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class JinjaFile:
    """A template's source, and the special tokens that it may write."""

    path: str
    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, Any]], date: str | None, variables: Mapping[str, Any]) -> str:
        """The text of `messages`; `date` is what the template takes for today.

        Raises `Refusal` where the template fails, `UserError` where it asks for the date and there is none.
        """

        def strftime_now(format: str) -> str:
            if date is None:
                raise UserError(
                    f"the chat template {self.path!r} writes today's date, and rows must not change from day to day: "
                    "give it one, as JinjaTemplate.date = '2025-08-31'"
                )
            return datetime.fromisoformat(date).strftime(format)

        given = {"tools": None, "documents": None, **self.special_tokens, **variables}
        given |= {"messages": messages, "strftime_now": strftime_now}
        try:
            return _compiled(self.source)[0].render(given)
        except UserError:
            raise
        except Exception as error:  # a template is a program of its own, and may fail in any way
            raise Refusal(f"the chat template {self.path!r} fails ({error}): mend the row or the template") from error


def read_jinja(path: str) -> JinjaFile:
    """The template of `path`: a `tokenizer_config.json`, a `.jinja` file, or the folder that holds one of them.

    Special tokens are those of the `tokenizer_config.json` in the same folder. Raises `UserError` where there is no
    template, it is no Jinja, or it writes special tokens that nothing names.
    """
    given = Path(path).expanduser()
    folder = given if given.is_dir() else given.parent
    file = given
    if given.is_dir():
        jinja = folder / "chat_template.jinja"
        file = jinja if jinja.exists() else folder / "tokenizer_config.json"
    config = folder / "tokenizer_config.json"
    try:
        values = json.loads(config.read_text("utf-8")) if config.exists() else {}
        text = file.read_text("utf-8")
        source = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
    except (OSError, ValueError) as error:
        raise UserError(f"chat template {path!r} cannot be read ({error}): give a tokenizer's folder") from error
    if isinstance(source, list):  # several by name
        source = {each["name"]: each["template"] for each in source}.get("default")
    if not source:
        raise UserError(f"{str(file)!r} has no chat_template: give the file that has, or choose a built-in template")
    special = {name: values[name] for name in SPECIAL_TOKENS if values.get(name)}
    special = {name: token["content"] if isinstance(token, dict) else token for name, token in special.items()}
    try:
        _, variables = _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{str(file)!r} line {error.lineno} is no Jinja ({error.message}): mend it") from error
    if missing := sorted({"bos_token", "eos_token"} & variables - set(special)):
        raise UserError(f"{str(file)!r} writes {', '.join(missing)}, which {str(config)!r} does not name: add it there")
    return JinjaFile(path, source, special)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: what the model writes."""

    tags = {"generation"}  # noqa: RUF012, the name and form that Jinja looks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

    def _around(self, caller: Any) -> str:
        return OPEN + caller() + CLOSE


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template, and the variables it reads; its environment has what transformers gives to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source), frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes characters of HTML, which a model would then read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
