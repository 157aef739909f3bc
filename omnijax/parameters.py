"""A model taken apart: its static definition, and its parameters as one dict from dotted path to array.

Training, checkpoints and Hugging Face names all speak of these paths, e.g. `stacks.0.blocks.0.mlp.up_proj.kernel`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from omnijax.sharding import Placement, Rules, place_parameters

Parameters = dict[str, Array]

STACKED = re.compile(r"((?:.*\.)?)stacks\.(\d+)\.blocks\.(\d+)\.(.*)")
"""The path of a parameter with one array for many layers: part of the model, stack, position in its pattern, rest."""


@dataclass(frozen=True)
class Description:
    """What is known of a parameter without its values.

    inputs:  how many axes a kernel contracts
    rows:    real rows of a table that is filled up
    precise: whether a forward pass needs it in float32
    frozen:  whether it is not trained
    """

    axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    inputs: int | None = None
    rows: int | None = None
    precise: bool | None = None
    frozen: bool | None = None


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Parameters]:
    """The static definition of a model, and its parameters by path."""
    graphdef, state = nnx.split(model)
    return graphdef, {path: variable.get_value() for path, variable in _variables(state)}


def merge(graphdef: nnx.GraphDef, parameters: Mapping[str, Array]) -> Any:
    """The model again; the inverse of `split`."""
    tree: dict = {}
    for path, value in parameters.items():
        *parents, leaf = (int(key) if key.isdigit() else key for key in path.split("."))
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = value
    return nnx.merge(graphdef, tree)


def describe(model: nnx.Module) -> dict[str, Description]:
    """Axis names and shape of every parameter; `model` may be abstract."""
    return {
        path: Description(
            variable.axes,
            variable.shape,
            *(variable.get_metadata().get(name) for name in ("inputs", "rows", "precise", "frozen")),
        )
        for path, variable in _variables(nnx.state(model))
    }


def layers_of(path: str, described: Mapping[str, Description]) -> range:
    """The layers that a parameter of a stack has arrays for, numbered through all stacks of its part of the model."""
    found = STACKED.fullmatch(path)
    if found is None:
        raise ValueError(f"{path} is not a parameter of a stack")
    part, stack, position = found[1], int(found[2]), int(found[3])
    stacks: dict[int, tuple[int, int]] = {}  # how many periods a stack has, and of how many layers each
    for other, each in described.items():
        if (match := STACKED.fullmatch(other)) and match[1] == part:
            number, period = int(match[2]), int(match[3]) + 1
            stacks[number] = (each.shape[0], max(period, stacks.get(number, (0, 0))[1]))
    first = sum(repeats * period for number, (repeats, period) in stacks.items() if number < stack)
    repeats, period = stacks[stack]
    return range(first + position, first + repeats * period, period)


def shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter."""
    return {path: each.shape for path, each in describe(model).items()}


def freeze(model: nnx.Module, paths: Collection[str]) -> None:
    """Mark the parameters with these paths as not trained, in `model` itself, which may be abstract."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and ".".join(map(str, path)) in paths:
            node.set_metadata(frozen=True)


def trained(model: nnx.Module, params: Mapping[str, Any]) -> dict[str, Any]:
    """Of `params`, by path, those that are trained."""
    return {path: params[path] for path, each in describe(model).items() if not each.frozen}


def placements(model: nnx.Module, mesh: Mesh | AbstractMesh, rules: Rules) -> dict[str, Placement]:
    """Where every parameter lives. Raises `UserError` where the table cannot place one."""
    described = {path: (each.axes, each.shape) for path, each in describe(model).items()}
    return place_parameters(described, rules, mesh)


def shardings(model: nnx.Module, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """The same as shardings for `jax.jit`."""
    return {path: NamedSharding(mesh, each.spec) for path, each in placements(model, mesh, rules).items()}


def first_device() -> NamedSharding:
    """The whole of an array on the first device."""
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("all",)), PartitionSpec())


def abstract_model(config: Any, **options: Any) -> Any:
    """The model a config describes, with shapes in place of arrays; takes no memory."""
    return nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0), **options))


def build_model(
    config: Any, mesh: Mesh, rules: Rules, *, seed: int = 0, given: Mapping[str, Array] | None = None, **options: Any
) -> Any:
    """A model with fresh float32 parameters, each made where it lives; the same values on every mesh.

    `config` is a model config (`models.qwen3.Qwen3Config`, ...); `options` go to its `build` (`remat`, `loss`). Those
    `given` by path are taken, and not made.
    """
    abstract, given = abstract_model(config, **options), given or {}
    made = {path: where for path, where in shardings(abstract, mesh, rules).items() if path not in given}

    def initialise(key: Array) -> Parameters:
        fresh = split(config.build(rngs=nnx.Rngs(key), **options))[1]
        return {path: fresh[path] for path in made}

    make: Callable = jax.jit(initialise, out_shardings=made)
    return merge(nnx.graphdef(abstract), make(jax.random.key(seed, impl="threefry2x32")) | dict(given))


def cast(parameters: Mapping[str, Array], dtype: jnp.dtype, model: nnx.Module) -> Parameters:
    """The parameters a forward pass of `model` computes with: in `dtype`, but for those it needs in float32."""
    precise = {path for path, each in describe(model).items() if each.precise}
    return {path: value if path in precise else value.astype(dtype) for path, value in parameters.items()}


def _variables(state: nnx.State) -> list[tuple[str, nnx.Variable]]:
    flat = nnx.to_flat_state(state)
    return [(".".join(str(key) for key in path), variable) for path, variable in flat]
