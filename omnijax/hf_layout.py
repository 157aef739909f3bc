"""Where a checkpoint's tensors lie in our parameters: which part each one is, and in what order its axes stand.

A linear map's tensor is `[outputs, inputs]`, each flattened; ours keeps every axis, inputs first. Layers, and often
experts, are tensors of their own there and stacked here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from omnijax.parameters import STACKED, Description, layers_of


@dataclass(frozen=True)
class Part:
    """What a tensor holds of the parameter `path`, where that is not simply all of a layer.

    index:        the item of the parameter's axis without a name, e.g. 0 for the gate of a kernel of gate and up
    inputs_first: whether the tensor is `[inputs, outputs]`
    """

    path: str
    index: int | None = None
    inputs_first: bool = False


Names = Mapping[str, str | Part]
"""Hugging Face name -> our path, or part of it. In names `{layer}` and `{expert}` are numbers, in paths `layers` stands
for any stack and pattern position."""


def within(part: str, names: Names, prefixes: Mapping[str, str]) -> Names:
    """The names of a model that is a `part` of a larger one, where they begin otherwise: `prefixes` are new by old."""
    found: dict[str, str | Part] = {}
    for name, value in names.items():
        old = next((old for old in prefixes if name.startswith(old)), "")
        path = replace(value, path=f"{part}.{value.path}") if isinstance(value, Part) else f"{part}.{value}"
        found[prefixes.get(old, "") + name.removeprefix(old)] = path
    return found


@dataclass(frozen=True)
class Piece:
    """One tensor: the part of a parameter where the axes `fixed` have these indices.

    groups: our other axes in the order of theirs; each group is one axis of the tensor
    """

    name: str
    fixed: dict[int, int]
    groups: tuple[tuple[int, ...], ...]


def pieces(path: str, described: Mapping[str, Description], names: Names) -> list[Piece]:
    """The tensors a parameter is made of, layer by layer."""
    each, match = described[path], STACKED.fullmatch(path)
    key = f"{match[1]}layers.{match[4]}" if match else path
    parts = [
        (name, value if isinstance(value, Part) else Part(value))
        for name, value in names.items()
        if key == (value.path if isinstance(value, Part) else value)
    ]
    if not parts:
        raise KeyError(f"the family's HF_NAMES has no line for {path}")
    layers: list[tuple[int | None, dict[int, int]]] = [(None, {})]
    if match:
        layers = [(layer, {0: number}) for number, layer in enumerate(layers_of(path, described))]
    found = []
    for layer, at_layer in layers:
        for name, part in parts:
            at_part = at_layer if part.index is None else at_layer | {each.axes.index(None): part.index}
            options: list[tuple[int | None, dict[int, int]]] = [(None, at_part)]
            if "{expert}" in name:
                axis = each.axes.index("experts")
                options = [(expert, at_part | {axis: expert}) for expert in range(each.shape[axis])]
            for expert, fixed in options:
                groups = _groups(each, fixed, inputs_first=part.inputs_first)
                found.append(Piece(name.format(layer=layer, expert=expert), fixed, groups))
    return found


def tensor_shape(described: Description, piece: Piece) -> tuple[int, ...]:
    """The shape of a piece's tensor, without the rows that fill up a table."""
    sizes = list(described.shape)
    if described.rows is not None:
        sizes[0] = described.rows
    return tuple(math.prod(sizes[axis] for axis in group) for group in piece.groups)


def to_tensor(x: np.ndarray, piece: Piece, first_axis: int) -> np.ndarray:
    """The tensor of a piece; `x` holds the parameter's axes from `first_axis` on."""
    chosen = x[tuple(piece.fixed.get(first_axis + axis, slice(None)) for axis in range(x.ndim))]
    kept = [first_axis + axis for axis in range(x.ndim) if first_axis + axis not in piece.fixed]
    order = [kept.index(axis) for group in piece.groups for axis in group]
    sizes = dict(zip(kept, chosen.shape, strict=True))
    return chosen.transpose(order).reshape([math.prod(sizes[axis] for axis in group) for group in piece.groups])


def tensor_slices(described: Description, piece: Piece, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices of a piece's tensor that hold part `index` of the parameter; only outermost axes are cut."""
    ranges = []
    for outer, *inner in piece.groups:
        start, stop, _ = index[outer].indices(_size(described, outer))
        stride = math.prod(described.shape[axis] for axis in inner)
        ranges.append(slice(start * stride, stop * stride))
    return tuple(ranges)


def from_tensor(block: np.ndarray, described: Description, piece: Piece, index: tuple[slice, ...]) -> np.ndarray:
    """Part `index` of the parameter, less the axes that are fixed, from what `tensor_slices` cut out."""
    sizes: list[int] = []
    for rows, (_, *inner) in zip(block.shape, piece.groups, strict=True):
        sizes += [
            rows // math.prod(described.shape[axis] for axis in inner),
            *(described.shape[axis] for axis in inner),
        ]
    axes = [axis for group in piece.groups for axis in group]
    block = block.reshape(sizes).transpose(np.argsort(axes))
    outermost = {group[0] for group in piece.groups}
    return block[tuple(slice(None) if axis in outermost else index[axis] for axis in sorted(axes))]


def _size(described: Description, axis: int) -> int:
    return described.rows if axis == 0 and described.rows is not None else described.shape[axis]


def _groups(described: Description, fixed: Mapping[int, int], *, inputs_first: bool) -> tuple[tuple[int, ...], ...]:
    axes = described.axes
    leading = [axis for axis, name in enumerate(axes) if name in ("layers", "experts") and axis not in fixed]
    rest = [axis for axis, name in enumerate(axes) if name not in ("layers", "experts") and axis not in fixed]
    if described.inputs is None:
        return tuple((axis,) for axis in leading + rest)
    inputs, outputs = tuple(rest[: described.inputs]), tuple(rest[described.inputs :])
    ordered = (inputs, outputs) if inputs_first else (outputs, inputs)
    return (*((axis,) for axis in leading), *(group for group in ordered if group))
