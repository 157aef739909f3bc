"""The same layers in other stacks: a checkpoint outlives a change of where stacks are cut.

Trees of arrays are cut anew at every dict in them, which holds one array for each of some parameters, by path: the
parameters themselves, and the optimizer's moments.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from omnijax.parameters import STACKED, Description, layers_of

Shapes = Mapping[str, Sequence[int]]
"""The shape of every parameter of a model, by path."""


def is_by_path(node: Any) -> bool:
    """Whether a node of a tree is a dict."""
    return isinstance(node, dict)


def layers(shapes: Shapes, paths: Collection[str] | None = None) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter, or of those with `paths`, layer by layer, by name with the number of the layer."""
    places = _places(shapes).items()
    kept = shapes if paths is None else paths
    return {name: tuple(shapes[path][index is not None :]) for name, (path, index) in places if path in kept}


def difference(saved: Shapes, wanted: Shapes) -> str:
    """The first parameter in which two models differ by more than where stacks are cut, in words; "" if none."""
    if layers(saved) == layers(wanted):
        return ""
    paths = (path for path in sorted({*saved, *wanted}) if saved.get(path) != wanted.get(path))
    path = next(paths)
    return f"{path} is {saved.get(path, 'absent')} there and {wanted.get(path, 'absent')} in this config"


def as_saved(wanted: Any, shapes: Shapes, saved: Shapes) -> Any:
    """A tree of shapes, of a model of `shapes`, with its stacks cut as in `saved`."""
    if shapes == saved:
        return wanted
    now, then = _places(shapes), _places(saved)

    def recut(node: Any) -> Any:
        if not is_by_path(node):
            return node
        like = {then[name][0]: node[path] for name, (path, _) in now.items() if path in node}
        return {path: jax.ShapeDtypeStruct(saved[path], x.dtype, sharding=x.sharding) for path, x in like.items()}

    return jax.tree.map(recut, wanted, is_leaf=is_by_path)


def as_wanted(found: Any, wanted: Any, shapes: Shapes, saved: Shapes) -> Any:
    """Arrays that were read with the stacks of `saved`, cut as in `shapes`; `wanted` is a tree of their shardings."""
    if shapes == saved:
        return found
    then = _places(saved)
    sources: dict[str, list[tuple[str, int | None]]] = {}
    for name, (path, _) in _places(shapes).items():
        sources.setdefault(path, []).append(then[name])

    def recut(target: Any, node: Any) -> Any:
        if not is_by_path(target):
            return node

        def cut(node: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {
                path: node[sources[path][0][0]]
                if sources[path][0][1] is None
                else jnp.stack([node[source][index] for source, index in sources[path]])
                for path in target
            }

        return jax.jit(cut, out_shardings=target)(node)

    return jax.tree.map(recut, wanted, found, is_leaf=is_by_path)


def _places(shapes: Shapes) -> dict[str, tuple[str, int | None]]:
    """Where every layer of every parameter is: its path, and the index in its stack if it is in one."""
    described = {path: Description((), tuple(shape)) for path, shape in shapes.items()}
    found: dict[str, tuple[str, int | None]] = {}
    for path in shapes:
        if match := STACKED.fullmatch(path):
            for index, layer in enumerate(layers_of(path, described)):
                found[f"{match[1]}layers.{layer}.{match[4]}"] = path, index
        else:
            found[path] = path, None
    return found
