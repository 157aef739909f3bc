"""Hugging Face checkpoints both ways: safetensors slices straight into sharded arrays, and sharded arrays to files."""

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Array
from safetensors import safe_open
from safetensors.numpy import save_file

from omnijax import parameters
from omnijax.errors import UserError
from omnijax.hf_batch import to_batch as to_batch
from omnijax.parameters import Description
from omnijax.sharding import Rules

# Files beside the weights that `save` carries over.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)

# Buffers that older checkpoints carry and every model computes for itself.
DERIVED = re.compile(r".*\.rotary_emb\.inv_freq$")


def load(
    family: Any,
    path: str | os.PathLike[str],
    dtype: jnp.dtype = jnp.float32,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    **options: Any,
) -> Any:
    """The model of a Hugging Face folder, e.g. `load(models.family_of(path), path)`.

    Each device reads only the slices it holds. `options` go to the model's `build` (`remat`, `loss`). Raises
    `UserError` for a missing folder or file, and for tensors that are missing, unread, or of another shape.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise UserError(f"{folder}: no config.json here; give the folder of a Hugging Face checkpoint")
    config = family.Config.from_hf(json.loads(config_file.read_text()), name=str(config_file))
    model = parameters.abstract_model(config, **options)
    described = parameters.describe(model)
    files = _files_by_tensor(folder)
    sources = {path: _tensor_names(path, described, family.HF_NAMES) for path in described}
    _account(folder, files, sources, tied=config.tie_word_embeddings)
    if mesh is None or rules is None:
        where: dict[str, Any] = dict.fromkeys(described, SingleDeviceSharding(jax.devices()[0]))
    else:
        where = dict(parameters.shardings(model, mesh, rules))
    arrays = {
        path: jax.make_array_from_callback(
            each.shape, where[path], _reader(files, sources[path], each, np.dtype(dtype), folder)
        )
        for path, each in described.items()
    }
    return parameters.merge(nnx.graphdef(model), arrays)


def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    dtype: jnp.dtype | None = None,
    like: str | os.PathLike[str] | None = None,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a Hugging Face folder that transformers loads: safetensors files, their index, and `config.json`.

    One layer of one parameter is on the host beside the file being written. `dtype` casts (default: as the model
    has them); `like` is the folder the model came from: its `config.json` and tokenizer files are carried over.
    Raises `UserError` where `path` already holds a model, or `like` another one.
    """
    folder, leads = Path(path), jax.process_index() == 0
    if (folder / "config.json").exists():
        raise UserError(f"{folder} already holds a model; choose another folder")
    values = parameters.split(model)[1]
    dtype = jnp.dtype(dtype or next(iter(values.values())).dtype)
    config = model.config.to_hf() if like is None else _config_like(model.config, Path(like))
    folder.mkdir(parents=True, exist_ok=True)
    parts, total = [], 0
    for number, part in enumerate(_parts(tensors(model, values), dtype, shard_bytes), 1):
        if leads:
            save_file(part, folder / f"part-{number}", metadata={"format": "pt"})
        parts.append(list(part))
        total += sum(x.nbytes for x in part.values())
    if not leads:
        return
    files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        files = ["model.safetensors"]
    for number, file in enumerate(files, 1):
        (folder / f"part-{number}").rename(folder / file)
    if len(parts) > 1:
        weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    # Last, so that a folder with a config.json is a whole one.
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype.name}, indent=2))
    if like is not None:
        for name in COMPANIONS:
            if (Path(like) / name).is_file():
                shutil.copy(Path(like) / name, folder / name)


def tensors(model: Any, values: Mapping[str, Array]) -> Iterator[tuple[str, np.ndarray]]:
    """`values`, given by our parameter paths (weights, or gradients), under their Hugging Face names and layout.

    They are fetched one layer at a time, by every process of a cluster alike.
    """
    described = parameters.describe(model)
    for path, value in values.items():
        each = described[path]
        names = _tensor_names(path, described, type(model).HF_NAMES)
        layers = [value] if each.axes[0] != "layers" else (value[layer] for layer in range(len(names)))
        for name, layer in zip(names, layers, strict=True):
            x = _to_host(layer)[: each.rows]
            if each.inputs is not None:
                outputs = math.prod(x.shape[each.inputs :])
                x = x.reshape(-1, outputs).T if each.inputs else x.reshape(outputs)
            yield name, x


def _parts(
    named: Iterator[tuple[str, np.ndarray]], dtype: np.dtype, shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Group tensors into files of at most `shard_bytes`, or of one tensor that is larger."""
    part: dict[str, np.ndarray] = {}
    for name, x in named:
        x = np.ascontiguousarray(_cast(x, dtype, name))
        if part and sum(other.nbytes for other in part.values()) + x.nbytes > shard_bytes:
            yield part
            part = {}
        part[name] = x
    yield part


def _cast(x: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """`x` in another dtype; `UserError` where that is no floating point, or too narrow for a finite number of `x`."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UserError(f"{name}: weights cannot be cast to {dtype}; choose float32, bfloat16 or float16")
    largest = float(jnp.finfo(dtype).max)
    if jnp.finfo(x.dtype).max > largest and (np.isfinite(x) & (np.abs(x) > largest)).any():
        raise UserError(f"{name}: a weight is beyond the largest {dtype}, {largest:g}; choose bfloat16 or float32")
    return x.astype(dtype)


def _to_host(x: Array | np.ndarray) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _config_like(config: Any, like: Path) -> dict[str, Any]:
    original = json.loads((like / "config.json").read_text())
    if type(config).from_hf(original, name=str(like / "config.json")) != config:
        raise UserError(f"{like / 'config.json'} describes another model than the one to save; leave `like` out")
    return {key: value for key, value in original.items() if key not in ("dtype", "torch_dtype")}


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {name: folder / file for name, file in weight_map.items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise UserError(f"{index}: lists {', '.join(missing)}, which the folder lacks; fetch the missing files")
        return files
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UserError(f"{folder}: neither model.safetensors nor model.safetensors.index.json here")
    with safe_open(file, framework="numpy") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _tensor_names(path: str, described: Mapping[str, Description], table: Mapping[str, str]) -> list[str]:
    """Names of the tensors one of our parameters is made of: one, or one a layer if it is stacked."""
    match = re.fullmatch(r"stacks\.(\d+)\.blocks\.(\d+)\.(.*)", path)
    key = f"layers.{match[3]}" if match else path
    names = {ours: theirs for theirs, ours in table.items()}
    if key not in names:
        raise KeyError(f"the family's HF_NAMES has no line for {path}")
    if not match:
        return [names[key]]
    stack, position = int(match[1]), int(match[2])
    first = sum(layers for other, (layers, _) in _stacks(described).items() if other < stack)
    layers, period = _stacks(described)[stack]
    return [names[key].format(layer=first + layer) for layer in range(position, layers, period)]


def _stacks(described: Mapping[str, Description]) -> dict[int, tuple[int, int]]:
    """(layers, period) of every stack."""
    stacks: dict[int, tuple[int, int]] = {}
    for path, each in described.items():
        if match := re.match(r"stacks\.(\d+)\.blocks\.(\d+)\.", path):
            stack, period = int(match[1]), int(match[2]) + 1
            period = max(period, stacks.get(stack, (0, 0))[1])
            stacks[stack] = (each.shape[0] * period, period)
    return stacks


def _account(folder: Path, files: Mapping[str, Path], sources: Mapping[str, list[str]], *, tied: bool) -> None:
    """Every tensor is read, and every parameter has its tensors; else a `UserError` lists the names."""
    wanted = set(itertools.chain.from_iterable(sources.values()))
    unread = {name for name in set(files) - wanted if not DERIVED.match(name)}
    if tied and "lm_head.weight" in unread:  # some exporters write the tied head a second time
        unread.remove("lm_head.weight")
        head, embedding = (
            _read_whole(files, name) for name in ("lm_head.weight", sources["embed_tokens.embedding"][0])
        )
        if not np.array_equal(head, embedding):
            raise UserError(f"{folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding")
    for kind, names in (("missing", wanted - set(files)), ("not read by this family", unread)):
        if names:
            raise UserError(f"{folder}: {len(names)} tensors are {kind}: {', '.join(sorted(names))}")


def _read_whole(files: Mapping[str, Path], name: str) -> np.ndarray:
    with safe_open(files[name], framework="numpy") as tensors:
        return tensors.get_tensor(name)


def _reader(
    files: Mapping[str, Path], names: list[str], described: Description, dtype: np.dtype, folder: Path
) -> Callable[[Any], np.ndarray]:
    """A callback that reads the part of a parameter one device holds."""
    stacked = described.axes[0] == "layers"
    shape = described.shape[1:] if stacked else described.shape
    if described.rows is not None:
        shape = (described.rows, *shape[1:])

    def read(index: tuple[slice, ...]) -> np.ndarray:
        inner = index[1:] if stacked else index
        chosen = names[index[0]] if stacked else names
        parts = [_read_slice(files, name, shape, described.inputs, inner, folder) for name in chosen]
        parts = [_cast(part, dtype, name) for name, part in zip(chosen, parts, strict=True)]
        if described.rows is not None:
            return _filled_up(parts[0], inner[0], described.shape[0])
        return np.stack(parts) if stacked else parts[0]

    return read


def _filled_up(part: np.ndarray, wanted: slice, rows: int) -> np.ndarray:
    """A part of a table with the rows of zeros that fill up `wanted` of its `rows`."""
    start, stop, _ = wanted.indices(rows)
    return np.pad(part, ((0, stop - start - len(part)), (0, 0)))


def _read_slice(
    files: Mapping[str, Path],
    name: str,
    shape: tuple[int, ...],
    inputs: int | None,
    index: tuple[slice, ...],
    folder: Path,
) -> np.ndarray:
    """Part `index` of a tensor in our layout; theirs is `[outputs, inputs]` of a linear map, each flattened."""
    axes = list(range(len(shape)))
    groups = (
        [[axis] for axis in axes] if inputs is None else [group for group in (axes[inputs:], axes[:inputs]) if group]
    )
    with safe_open(files[name], framework="numpy") as tensors:
        tensor = tensors.get_slice(name)
        expected = [math.prod(shape[axis] for axis in group) for group in groups]
        if list(tensor.get_shape()) != expected:
            raise UserError(f"{folder}: {name} has shape {tensor.get_shape()}, config.json makes it {expected}")
        ranges = []
        for outer, *inner in groups:
            start, stop, _ = index[outer].indices(shape[outer])
            stride = math.prod(shape[axis] for axis in inner)
            ranges.append(slice(start * stride, stop * stride))
        block = tensor[tuple(ranges)]
    if not jnp.issubdtype(block.dtype, jnp.floating):
        raise UserError(f"{folder}: {name} is {block.dtype}, not floating point; quantised weights are not supported")
    # The outermost axis of each group is cut by now: unflatten, order as ours, cut the others.
    sizes: list[int] = []
    for rows, (_, *inner) in zip(block.shape, groups, strict=True):
        sizes += [rows // math.prod(shape[axis] for axis in inner), *(shape[axis] for axis in inner)]
    block = block.reshape(sizes).transpose(np.argsort([axis for group in groups for axis in group]))
    outermost = {group[0] for group in groups}
    return block[tuple(slice(None) if axis in outermost else index[axis] for axis in axes)]
