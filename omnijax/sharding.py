"""Named axes, and the tables that map them to a mesh: the whole of distribution.

A model names the axes of its arrays. A table (`Rules`) says, line by line, over which mesh axes a name is split:

    Rules(
        parameters=lines(embed="data expert sequence | data expert | none", mlp="tensor"),
        activations=lines(batch="replica data expert", length="sequence"),
    )

A line lists mesh axes; `|` separates alternatives, of which the first that divides the array is taken *and reported*;
`none` leaves the axis whole; a leading `optional` allows a parameter line that the model at hand does not use. What a
table cannot place is refused with a `UserError`; nothing is replicated or dropped in silence.
"""

import contextlib
import contextvars
import dataclasses
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from omnijax.errors import UserError

MESH_AXES = ("replica", "data", "expert", "sequence", "tensor")

PARAMETER_AXES = {
    "layers": "layers of one stack, scanned",
    "vocab": "token ids",
    "embed": "width of the residual stream",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of one head",
    "latent": "narrow vector that queries, or keys and values, of all heads are made of",
    "latent_out": "the same, where a kernel makes it",
    "mlp": "hidden width of a feed-forward layer",
    "experts": "experts of a layer",
    "expert_embed": "width of the residual stream in an expert",
    "expert_mlp": "hidden width of an expert",
    "router_experts": "experts, as the router scores them",
}

ACTIVATION_AXES = {
    "batch": "rows",
    "length": "tokens of a row",
    "act_embed": "width of the residual stream",
    "act_heads": "query heads while tokens are split",
    "act_kv_heads": "key and value heads while tokens are split",
    "act_mlp": "hidden width of a feed-forward layer",
    "act_vocab": "token ids in the output projection",
    "attention_length": "tokens of a row inside attention",
    "attention_heads": "heads inside attention",
}


@dataclass(frozen=True)
class Line:
    """One line of a table: the mesh axes that may split the axis `name`, best first."""

    name: str
    alternatives: tuple[tuple[str, ...], ...]
    optional: bool = False


def lines(**table: str) -> tuple[Line, ...]:
    """Parse `name="data expert | none"` lines. Unknown mesh axes are a `UserError`."""
    return tuple(_parse_line(name, text) for name, text in table.items())


AttentionLayout = Literal["ulysses", "ring"]
ExpertLayout = Literal["all_gather", "all_to_all"]


@dataclass(frozen=True)
class Layout:
    """How queries meet keys where `length` is split, and tokens their experts where `experts` is. Else a `UserError`.

    attention:
        ulysses: tokens are exchanged for heads, so that each device has all tokens of some heads, as the lines
                 `attention_length` and `attention_heads` say
        ring:    queries stay where they are and keys travel from device to device, so that `length` needs no heads to
                 split
    chunks: Ulysses exchanges so many groups of heads one after the other, so that while one is computed the next can be
            on its way; the numbers are the same
    moe:
        all_gather: every device sees the tokens of all devices it shares experts with, and none is ever dropped
        all_to_all: a device sends each other one at most `capacity` times an even share of its choices; what is beyond
                    is dropped, and counted
    """

    attention: AttentionLayout = "ulysses"
    chunks: int = 1
    moe: ExpertLayout = "all_gather"
    capacity: float = 1.25

    def __post_init__(self) -> None:
        _check_name(self.attention, get_args(AttentionLayout), "layout", kind="attention")
        _check_name(self.moe, get_args(ExpertLayout), "layout", kind="moe")
        if self.chunks < 1 or (self.chunks > 1 and self.attention == "ring"):
            allowed = "1 with a ring, which is computed in rounds" if self.attention == "ring" else "at least 1"
            raise UserError(f"layout: chunks {self.chunks} must be {allowed}")
        if not self.capacity > 0:
            raise UserError(f"layout: capacity {self.capacity} must be positive; 1 is an even share, 1.25 the default")


@dataclass(frozen=True)
class Rules:
    """A sharding table. Names outside the vocabulary, or listed twice, are a `UserError`.

    `parts` has tables of their own for parts of the model, by the path of each, e.g. "encoders.image". Rows lie the
    same in all of them, as a row owns its media.
    """

    parameters: tuple[Line, ...]
    activations: tuple[Line, ...]
    layout: Layout = field(default_factory=Layout)
    parts: tuple[tuple[str, "Rules"], ...] = ()

    def of(self, path: str) -> "Rules":
        """The table of the part that `path` is, or is in; else this one."""
        return next((rules for part, rules in self.parts if f"{path}.".startswith(f"{part}.")), self)

    def __post_init__(self) -> None:
        for part, rules in self.parts:
            if first_axes(rules.activations, "batch") != first_axes(self.activations, "batch"):
                raise UserError(f"table of {part}: its line of batch must be that of the whole model's table")
        for section, vocabulary in (("parameters", PARAMETER_AXES), ("activations", ACTIVATION_AXES)):
            seen: set[str] = set()
            for line in getattr(self, section):
                _check_name(line.name, vocabulary, f"{section} table")
                if line.name in seen:
                    raise UserError(f"{section} table: axis '{line.name}' has two lines; keep one")
                if line.optional and section == "activations":
                    raise UserError(f"activations table: '{line.name}' is optional, as every line here; drop the word")
                seen.add(line.name)


def with_parts(backbone: Rules, parts: dict[str, Rules]) -> Rules:
    """The table of a composed model: `parts` by their paths, e.g. `{"encoders.image": @vision_tower.table()}`."""
    return dataclasses.replace(backbone, parts=tuple(parts.items()))


@dataclass(frozen=True)
class Placement:
    """Where one array lives: its names, shape, spec, and every alternative that had to be taken."""

    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    spec: PartitionSpec
    fallbacks: tuple[str, ...] = ()


def place(
    table: Sequence[Line], names: Sequence[str | None], shape: Sequence[int], sizes: Mapping[str, int], what: str
) -> Placement:
    """Resolve one array against a table on a mesh with axis `sizes`; `None` names an axis that is never split.

    A mesh axis of size 1 (or absent) vanishes from the spec. Raises `UserError` when the table has no line for a
    name, when no alternative divides, or when a mesh axis would split two axes of the array (whatever its size, so
    that a table fails on a laptop rather than on the cluster). `what` names the array in those messages.
    """
    if len(names) != len(shape):
        raise ValueError(f"{what}: {len(names)} axis names {tuple(names)} for shape {tuple(shape)}")
    entries: list[tuple[str, ...]] = []
    fallbacks: list[str] = []
    owner: dict[str, str] = {}
    for name, size in zip(names, shape, strict=True):
        if name is None:
            entries.append(())
            continue
        axes = _first_dividing(_line(table, name, what), size, sizes, what, fallbacks)
        for axis in axes:
            if axis in owner:
                raise UserError(
                    f"{what}: mesh axis '{axis}' splits both '{owner[axis]}' and '{name}' of {tuple(names)}; "
                    f"take it out of one of the two lines"
                )
            owner[axis] = name
        entries.append(tuple(axis for axis in axes if sizes.get(axis, 1) > 1))
    spec = PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))
    return Placement(tuple(names), tuple(shape), spec, tuple(fallbacks))


def place_parameters(
    arrays: Mapping[str, tuple[Sequence[str | None], Sequence[int]]], rules: Rules, mesh: Mesh | AbstractMesh
) -> dict[str, Placement]:
    """Placements of all parameters, given as `path -> (axis names, shape)`.

    Raises `UserError` as `place` does, for a name outside the vocabulary, and for a line that no parameter uses.
    """
    placements, used = {}, dict[Rules, set[str | None]]()
    for path, (names, shape) in arrays.items():
        table = rules.of(path)
        for name in names:
            if name is not None:
                _check_name(name, PARAMETER_AXES, f"parameter {path}")
        placements[path] = place(table.parameters, names, shape, dict(mesh.shape), f"parameter {path}")
        used.setdefault(table, set()).update(names)
    for part, table in (("this model", rules), *rules.parts):
        for line in table.parameters:
            if line.name not in used.get(table, ()) and not line.optional:
                raise UserError(
                    f"parameters table: no parameter of {part} has an axis '{line.name}'; "
                    f'delete the line or write "optional {_describe(line)}"'
                )
    return placements


# The table enters jit's cache key, so two tables never share a compiled program.
_rules = jax.make_user_context(default_value=None)
_recorder: contextvars.ContextVar[list[Placement] | None] = contextvars.ContextVar("recorder", default=None)


@contextlib.contextmanager
def use(mesh: Mesh | AbstractMesh, rules: Rules) -> Iterator[None]:
    """Inside this context `constrain` applies `rules` on `mesh`; an abstract mesh serves tracing without devices."""
    entered = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with entered, _rules(rules):
        yield


@contextlib.contextmanager
def part(path: str) -> Iterator[None]:
    """Inside this context, `constrain` applies the table of a part of the model, if it has one of its own."""
    rules = current_rules()
    with contextlib.nullcontext() if rules is None else _rules(rules.of(path)):
        yield


@contextlib.contextmanager
def without_rules() -> Iterator[None]:
    """Inside this context `constrain` is the identity: for a program that is traced to be read, of any size."""
    with _rules(None):
        yield


@contextlib.contextmanager
def record() -> Iterator[list[Placement]]:
    """Collect the placement of every activation that is traced inside this context."""
    placements: list[Placement] = []
    token = _recorder.set(placements)
    try:
        yield placements
    finally:
        _recorder.reset(token)


def current_rules() -> Rules | None:
    """The table in use, or None."""
    return _rules.value


def constrain(x: Array, *names: str | None) -> Array:
    """Lay `x` out as the activation table says; the identity where no table is in use.

    Inside a manual region (`shard_map`) the manual mesh axes are dropped. Raises `UserError` as `place` does.
    """
    spec = activation_spec(x.shape, *names)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def activation_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec | None:
    """The spec `constrain` would apply to an activation of this shape; None where no table is in use."""
    for name in names:
        if name is not None:
            _check_name(name, ACTIVATION_AXES, "activation")
    rules, sizes = current_rules(), _automatic_sizes()
    if rules is None or not sizes:
        return None
    placement = place(rules.activations, names, shape, sizes, f"activation {label(names, shape)}")
    recorder = _recorder.get()
    if recorder is not None:
        recorder.append(placement)
    return placement.spec


def parameter_spec(names: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec | None:
    """Where a parameter lives under the table in use; None where there is none. For code that gathers its own weights.

    Raises `UserError` as `place` does.
    """
    rules, sizes = current_rules(), _automatic_sizes()
    if rules is None or not sizes:
        return None
    return place(rules.parameters, names, shape, sizes, f"parameter {label(names, shape)}").spec


def split_count(name: str, size: int | None = None) -> int:
    """Into how many parts the table splits an activation axis of this size; 1 where no table is in use.

    Without a `size`, the first alternative of the line counts. Raises `UserError` as `place` does.
    """
    _check_name(name, ACTIVATION_AXES, "activation")
    rules, sizes = current_rules(), _automatic_sizes()
    if rules is None:
        return 1
    line = _line(rules.activations, name, "activation")
    axes = line.alternatives[0] if size is None else _first_dividing(line, size, sizes, "activation", [])
    return math.prod(sizes.get(axis, 1) for axis in axes)


def first_axes(table: Sequence[Line], name: str) -> tuple[str, ...]:
    """The mesh axes a table would like to split `name` over. Raises `UserError` where it has no line for it."""
    return _line(table, name, "table").alternatives[0]


def label(names: Sequence[str | None], shape: Sequence[int]) -> str:
    """An array in words, e.g. `[batch 8, length 128, - 3]`."""
    return "[" + ", ".join(f"{name or '-'} {size}" for name, size in zip(names, shape, strict=True)) + "]"


def _automatic_sizes() -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}


def _line(table: Sequence[Line], name: str, what: str) -> Line:
    for line in table:
        if line.name == name:
            return line
    raise UserError(f"{what}: the table has no line for axis '{name}'; add one, e.g. {name}=\"none\"")


def _first_dividing(
    line: Line, size: int, sizes: Mapping[str, int], what: str, fallbacks: list[str]
) -> tuple[str, ...]:
    for index, axes in enumerate(line.alternatives):
        if size % math.prod(sizes.get(axis, 1) for axis in axes) == 0:
            if index:
                first = " ".join(line.alternatives[0])
                fallbacks.append(f"{line.name}: {' '.join(axes) or 'none'}, as {first} does not divide {size}")
            return axes
    tried = ", ".join(
        f"{' x '.join(axes)} = {math.prod(sizes.get(axis, 1) for axis in axes)}" for axes in line.alternatives
    )
    raise UserError(
        f"{what}: axis '{line.name}' of size {size} is not divided by {tried}; "
        f'change the size or the mesh, or end the line with an alternative: {line.name}="{_describe(line)} | none"'
    )


def _parse_line(name: str, text: str) -> Line:
    words = text.split()
    optional = words[:1] == ["optional"]
    alternatives = []
    for part in " ".join(words[optional:]).split("|"):
        axes = tuple(part.split())
        if not axes:
            raise UserError(f'table line {name}="{text}": an alternative is empty; write none for an unsplit axis')
        if axes == ("none",):
            axes = ()
        for axis in axes:
            _check_name(axis, MESH_AXES, f'table line {name}="{text}"', kind="mesh axis")
        if len(set(axes)) != len(axes):
            raise UserError(f'table line {name}="{text}": a mesh axis stands twice in one alternative')
        alternatives.append(axes)
    return Line(name, tuple(alternatives), optional)


def _describe(line: Line) -> str:
    return " | ".join(" ".join(axes) or "none" for axes in line.alternatives)


def _check_name(name: str, vocabulary: Sequence[str] | Mapping[str, str], where: str, kind: str = "axis") -> None:
    if name not in vocabulary:
        near = difflib.get_close_matches(name, list(vocabulary), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"one of {', '.join(vocabulary)}"
        raise UserError(f"{where}: unknown {kind} '{name}'; {hint}")
