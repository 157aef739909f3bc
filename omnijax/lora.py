"""Adapters of a model, as `config.Lora` has them: put in place, begun, and merged into the kernels in the end."""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from omnijax import parameters
from omnijax.config import Lora
from omnijax.errors import UserError
from omnijax.nn.lora import LoraExperts, LoraLinear, adapter_names
from omnijax.nn.projections import Axes, Linear
from omnijax.parameters import Description, Parameters
from omnijax.patterns import named
from omnijax.sharding import Rules

ADAPTERS = ("lora_a", "lora_b", "lora_number")


def is_adapter(path: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return path.endswith(ADAPTERS)


def insert(model: nnx.Module, lora: Lora) -> set[str]:
    """Put adapters in place in an abstract `model`; returns the paths of the kernels that have one.

    Raises `UserError` where a pattern names none that can have one.
    """
    described, modules = parameters.describe(model), _adaptable(model)
    able = {f"{name}.{kernel}" for name, (_, kernels) in modules.items() for kernel in kernels}
    for pattern in lora.patterns:
        if not able & set(named([pattern], described, "Lora.patterns")):
            raise UserError(f"Lora.patterns: {pattern!r} names no kernel of a linear map or of experts")
    chosen = able & set(named(lora.patterns, described, "Lora.patterns"))
    if not chosen:
        raise UserError("Lora.patterns is empty; name the kernels that have an adapter, e.g. ('*.q_proj', '*.v_proj')")
    for name, (module, kernels) in modules.items():
        if adapted := tuple(kernel for kernel in kernels if f"{name}.{kernel}" in chosen):
            _replace(model, name, _with_adapters(module, adapted, lora, name))
    return chosen


def fresh(model: nnx.Module, mesh: Mesh, rules: Rules, *, seed: int) -> Parameters:
    """The adapters that a run begins with, each made where it lives; the same values on every mesh.

    A is uniform as of He et al. 2015 with a = sqrt(5), the default of linear maps in PyTorch; B is 0.
    """
    described = parameters.describe(model)
    where = {path: x for path, x in parameters.shardings(model, mesh, rules).items() if is_adapter(path)}
    numbers = _numbers(described)

    def make(key: Array) -> Parameters:
        made = {}
        for path in where:
            each = described[path]
            if path.endswith("lora_a"):
                bound = _inputs(each) ** -0.5
                own = jax.random.fold_in(key, zlib.crc32(path.encode()))
                made[path] = jax.random.uniform(own, each.shape, jnp.float32, -bound, bound)
            elif path.endswith("lora_b"):
                made[path] = jnp.zeros(each.shape, jnp.float32)
            else:
                made[path] = numbers[path] + jnp.arange(math.prod(each.shape), dtype=jnp.float32).reshape(each.shape)
        return made

    return jax.jit(make, out_shardings=where)(jax.random.key(seed, impl="threefry2x32")) if where else {}


def merged(model: nnx.Module, params: Mapping[str, Array], lora: Lora | None) -> Parameters:
    """Of a model with adapters, the parameters of one without that computes the same: s A B is added to its kernels."""
    described = parameters.describe(model)
    found = {path: x for path, x in params.items() if not is_adapter(path)}
    for path, kernel in found.items():
        a, b = paths_of(path)
        if lora is not None and a in params:
            lead = kernel.shape[: leading_axes(described[path])]
            left, right = params[a].reshape(*lead, -1, lora.rank), params[b].reshape(*lead, lora.rank, -1)
            change = jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)
            found[path] = kernel + lora.scale() * change.reshape(kernel.shape)
    return found


def paths_of(kernel: str) -> tuple[str, str]:
    """The paths of A and B of a kernel."""
    module, _, name = kernel.rpartition(".")
    a, b = adapter_names(name)
    return f"{module}.{a}", f"{module}.{b}"


def leading_axes(described: Description) -> int:
    """How many axes a kernel has before its inputs: layers, experts."""
    return sum(name in ("layers", "experts") for name in described.axes)


def _adaptable(model: nnx.Module) -> dict[str, tuple[nnx.Module, tuple[str, ...]]]:
    """Every module that can have adapters, by path, and the names of its kernels."""
    found: dict[str, tuple[nnx.Module, tuple[str, ...]]] = {}
    for path, node in nnx.iter_graph(model):
        name = ".".join(map(str, path))
        if isinstance(node, Linear):
            found[name] = node, ("kernel",)
        elif isinstance(node, nnx.Module) and hasattr(node, "expert"):
            described = parameters.describe(node)
            found[name] = node, tuple(kernel for kernel, each in described.items() if each.inputs)
    return found


def _with_adapters(module: Any, adapted: tuple[str, ...], lora: Lora, name: str) -> nnx.Module:
    adapters: dict[str, nnx.Param] = {}
    for kernel in adapted:
        variable = getattr(module, kernel)
        axes: Axes = tuple(zip(variable.axes, variable.shape, strict=True))
        lead = sum(axis in ("layers", "experts") for axis, _ in axes)
        rank, outputs = (None, lora.rank), lead + variable.inputs
        a, b = adapter_names(kernel)
        adapters[a] = _abstract((*axes[:outputs], rank), inputs=variable.inputs)
        adapters[b] = _abstract((*axes[:lead], rank, *axes[outputs:]), inputs=1)
    if not isinstance(module, Linear):
        if lora.dropout:
            raise UserError(
                f"Lora.dropout = {lora.dropout}: adapters of experts have none, and {name} has them; set it to 0, or "
                f"leave experts out of Lora.patterns"
            )
        return LoraExperts(module, adapters, adapted=adapted, scale=lora.scale())
    stacked = axes[:1] if axes[0][0] == "layers" else ()
    number = _abstract(stacked, precise=True, frozen=True) if lora.dropout else None
    return LoraLinear(module, **adapters, scale=lora.scale(), rate=lora.dropout, lora_number=number)


def _abstract(axes: Axes, **metadata: Any) -> nnx.Param:
    shape = tuple(size for _, size in axes)
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=tuple(name for name, _ in axes), **metadata)


def _replace(model: Any, name: str, module: nnx.Module) -> None:
    *parents, last = name.split(".")
    for key in parents:
        model = model[int(key)] if key.isdigit() else getattr(model, key)
    if last.isdigit():
        model[int(last)] = module
    else:
        setattr(model, last, module)


def _numbers(described: Mapping[str, Description]) -> dict[str, int]:
    """The first number of each adapter that has dropout; its layers have the following ones."""
    found, count = {}, 0
    for path in sorted(path for path in described if path.endswith("lora_number")):
        found[path], count = count, count + math.prod(described[path].shape)
    return found


def _inputs(described: Description) -> int:
    """How many numbers of its input a column of A has."""
    first = leading_axes(described)
    return math.prod(described.shape[first : first + (described.inputs or 0)])
