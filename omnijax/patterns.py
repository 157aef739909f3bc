"""Patterns that name parameters: `encoders.image`, `*.q_proj`, `backbone.layers.24-`.

A parameter of a layer goes by the number of that layer, through all stacks of its part of the model, as in
`backbone.layers.7.mlp.up_proj.kernel`. A pattern names what is called so, and all that is inside of it. In it `*`
stands for anything, dots as well, and a number may be a range with both its ends: `0-3`, `24-` or `-3`.
"""

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping

from omnijax.errors import UserError
from omnijax.parameters import STACKED, Description, layers_of

RANGE = re.compile(r"(?=.*\d)(\d*)-(\d*)")
CUT = ("", "backbone.")
"""The parts whose stacks `Compute.splits` cuts: a model that is a decoder and nothing else, or that of a larger one."""


def named(patterns: Iterable[str], described: Mapping[str, Description], setting: str) -> dict[str, str]:
    """The paths of the parameters that patterns name, each with the last pattern that does.

    `setting` stands in the `UserError` for a pattern that names nothing, or some layers of a stack and not all.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        fits = _matcher(pattern)
        paths = [path for path in described if _is_named(path, fits, described, f"{setting}: {pattern!r}")]
        if not paths:
            raise UserError(f"{setting}: {pattern!r} names no parameter of this model; {_nearest(pattern, described)}")
        found |= dict.fromkeys(paths, pattern)
    return found


def part_of(path: str) -> str:
    """The part of a model that a parameter is of: `encoders.image`, `backbone`; "model" where there are no parts."""
    first, second, *_ = path.split(".")
    if first in ("encoders", "decoders"):
        return f"{first}.{second}"
    return first if first == "backbone" else "model"


def _is_named(path: str, fits: Callable[[str], bool], described: Mapping[str, Description], what: str) -> bool:
    match = STACKED.fullmatch(path)
    if match is None:
        return fits(path)
    part, position, rest = match[1], int(match[3]), match[4]
    layers = layers_of(path, described)
    fitting = {fits(f"{part}layers.{layer}.{rest}") for layer in layers}
    if len(fitting) == 1:
        return fitting.pop()
    first = layers[0] - position
    last = first + len(layers) * layers.step - 1
    hits = [fits(f"{part}layers.{layer}.{rest}") for layer in range(first, last + 1)]
    edges = [n for n, (before, after) in enumerate(itertools.pairwise(hits), 1) if before != after]
    what = f"{what} names some of {part}layers.{first}-{last}, which are one stack, and not all"
    if part not in CUT:
        raise UserError(f"{what}; name the whole of it, or nothing of it")
    if inside := [edge for edge in edges if edge % layers.step]:
        start = first + inside[0] - inside[0] % layers.step
        raise UserError(
            f"{what}; a pattern of {layers.step} layers repeats there, which stay together: let a range begin, or end "
            f"before, layer {start} or {start + layers.step} in place of {first + inside[0]}"
        )
    raise UserError(f"{what}; add {', '.join(str(first + edge) for edge in edges)} to Compute.splits")


def _matcher(pattern: str) -> Callable[[str], bool]:
    ranges, segments = [], []
    for segment in pattern.split("."):
        if found := RANGE.fullmatch(segment):
            ranges.append((int(found[1] or 0), int(found[2]) if found[2] else math.inf))
            segments.append(r"(\d+)")
        else:
            segments.append(".*".join(map(re.escape, segment.split("*"))))
    expression = re.compile(r"\.".join(segments) + r"(?:\..*)?")

    def fits(name: str) -> bool:
        match = expression.fullmatch(name)
        return match is not None and all(
            least <= int(number) <= most for number, (least, most) in zip(match.groups(), ranges, strict=True)
        )

    return fits


def _nearest(pattern: str, described: Mapping[str, Description]) -> str:
    """What there is of similar names, or else at the top of the model."""
    last: dict[str, int] = {}
    names = {path: path for path in described}
    for path in described:
        if match := STACKED.fullmatch(path):
            last[match[1]] = max(last.get(match[1], 0), layers_of(path, described)[-1])
            names[path] = f"{match[1]}layers.#.{match[4]}"
    choices = dict[str, None]()
    for name in names.values():
        words = name.split(".")
        for count in range(1, len(words) + 1):
            part = ".".join(words[:count])
            choices[re.sub(r"((?:.*\.)?)layers\.#", lambda m: f"{m[1]}layers.0-{last[m[1]]}", part)] = None
            choices[f"*.{words[count - 1]}"] = None
    near = difflib.get_close_matches(pattern, choices, n=3)
    parts = {path: part_of(path) for path in described}
    tops = dict.fromkeys(part if part != "model" else names[path].split(".")[0] for path, part in parts.items())
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"its parts are {', '.join(tops)}"
