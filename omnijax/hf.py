"""Hugging Face checkpoints both ways: safetensors slices straight into sharded arrays, and sharded arrays to files."""

import dataclasses
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array
from safetensors.numpy import save_file

from omnijax import parameters
from omnijax.errors import UserError
from omnijax.hf_batch import to_batch as to_batch
from omnijax.hf_files import files_by_tensor, open_tensors, read_config
from omnijax.hf_layout import Names, Piece, from_tensor, pieces, tensor_shape, tensor_slices, to_tensor
from omnijax.parameters import Description, Parameters
from omnijax.sharding import Rules

logger = logging.getLogger(__name__)

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
    config = family.Config.from_hf(read_config(folder), name=str(folder / "config.json"))
    model = parameters.abstract_model(config, **options)
    described = parameters.describe(model)
    if mesh is None or rules is None:
        where: dict[str, Any] = dict.fromkeys(described, parameters.first_device())
    else:
        where = dict(parameters.shardings(model, mesh, rules))
    return parameters.merge(nnx.graphdef(model), load_parameters(family, config, folder, described, where, dtype))


def load_parameters(
    family: Any,
    config: Any,
    folder: Path,
    described: Mapping[str, Description],
    where: Mapping[str, Any],
    dtype: jnp.dtype = jnp.float32,
    *,
    may_grow: bool = False,
) -> Parameters:
    """The parameters of a folder, `described` by path, each laid out as `where` says.

    With `may_grow` a vocabulary may have more rows than the folder: the new ones begin as the mean of the others, so
    that their logits are no outliers. Raises `UserError` as `load` does.
    """
    files = files_by_tensor(folder)
    if left := sorted(name for name in files if config.leaves_out(name)):
        what = f"{len(left)} tensors of layers this family does without are left: {left[0]}, ..."
        logger.warning("%s: %s", folder, what)
        files = {name: file for name, file in files.items() if name not in set(left)}
    names = names_in(family, files)
    sources = {path: pieces(path, described, names) for path in described}
    _account(folder, files, sources, tied=config.tie_word_embeddings)
    arrays: Parameters = {}
    for path, each in described.items():
        stored = each
        if may_grow and each.rows is not None:
            stored = dataclasses.replace(each, rows=min(each.rows, _rows(files[sources[path][0].name], sources[path])))
        read = _reader(files, sources[path], stored, np.dtype(dtype), folder)
        if stored.rows != each.rows:
            read = _grown(read, stored, each)
        arrays[path] = jax.make_array_from_callback(each.shape, where[path], read)
    return arrays


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
    has them); `like` is the folder the model came from: its `config.json`, tokenizer files and layout of tensors are
    carried over. Raises `UserError` where `path` already holds a model, or `like` another one.
    """
    folder, leads = Path(path), jax.process_index() == 0
    if (folder / "config.json").exists():
        raise UserError(f"{folder} already holds a model; choose another folder")
    values = parameters.split(model)[1]
    dtype = jnp.dtype(dtype or next(iter(values.values())).dtype)
    config = model.config.to_hf() if like is None else _config_like(model.config, Path(like))
    folder.mkdir(parents=True, exist_ok=True)
    names = type(model).HF_NAMES if like is None else names_in(type(model), files_by_tensor(Path(like)))
    parts, total = [], 0
    for number, part in enumerate(_parts(tensors(model, values, names), dtype, shard_bytes), 1):
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


def tensors(model: Any, values: Mapping[str, Array], names: Names | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """`values`, given by our parameter paths (weights, or gradients), under their Hugging Face names and layout.

    `names` is the layout, by default that of the family's published checkpoints. One layer is fetched at a time, by
    every process of a cluster alike.
    """
    described = parameters.describe(model)
    for path, value in values.items():
        each = described[path]
        found = pieces(path, described, names or type(model).HF_NAMES)
        if each.axes[0] != "layers":
            x = _to_host(value)[: each.rows]
            yield from ((piece.name, to_tensor(x, piece, 0)) for piece in found)
            continue
        for layer, group in itertools.groupby(found, lambda piece: piece.fixed[0]):
            x = _to_host(value[layer])
            yield from ((piece.name, to_tensor(x, piece, 1)) for piece in group)


def names_in(family: Any, tensors: Iterable[str]) -> Names:
    """The layout of a checkpoint with these tensors: of those the family has, the one whose names are there."""
    layouts = (family.HF_NAMES, *getattr(family, "HF_OTHER_NAMES", ()))
    kinds = {re.sub(r"\d+", "#", name) for name in tensors}
    return max(layouts, key=lambda names: len(kinds & {re.sub(r"\{\w+\}", "#", name) for name in names}))


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
    if float(jnp.finfo(x.dtype).max) > largest and (np.isfinite(x) & (np.abs(x) > largest)).any():
        raise UserError(f"{name}: a weight is beyond the largest {dtype}, {largest:g}; choose bfloat16 or float32")
    return x.astype(dtype)


def _to_host(x: Array | np.ndarray) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _config_like(config: Any, like: Path) -> dict[str, Any]:
    original = read_config(like)
    if type(config).from_hf(original, name=str(like / "config.json")) != config:
        raise UserError(f"{like / 'config.json'} describes another model than the one to save; leave `like` out")
    return {key: value for key, value in original.items() if key not in ("dtype", "torch_dtype")}


def _account(folder: Path, files: Mapping[str, Path], sources: Mapping[str, list[Piece]], *, tied: bool) -> None:
    """Every tensor is read, and every parameter has its tensors; else a `UserError` lists the names."""
    wanted = {piece.name for found in sources.values() for piece in found}
    unread = {name for name in set(files) - wanted if not DERIVED.match(name)}
    if tied and "lm_head.weight" in unread:  # some exporters write the tied head a second time
        unread.remove("lm_head.weight")
        (table,) = (found[0].name for path, found in sources.items() if path.endswith("embed_tokens.embedding"))
        head, embedding = (_read_whole(files, name) for name in ("lm_head.weight", table))
        if not np.array_equal(head, embedding):
            raise UserError(f"{folder}: tie_word_embeddings is true but lm_head.weight differs from the embedding")
    for kind, names in (("missing", wanted - set(files)), ("not read by this family", unread)):
        if names:
            raise UserError(f"{folder}: {len(names)} tensors are {kind}: {', '.join(sorted(names))}")


def _read_whole(files: Mapping[str, Path], name: str) -> np.ndarray:
    with open_tensors(files[name]) as tensors:
        return tensors.get_tensor(name)


def _reader(
    files: Mapping[str, Path], sources: list[Piece], described: Description, dtype: np.dtype, folder: Path
) -> Callable[[Any], np.ndarray]:
    """A callback that reads the part of a parameter one device holds."""

    def read(index: tuple[slice, ...]) -> np.ndarray:
        ranges = [range(*cut.indices(size)) for cut, size in zip(index, described.shape, strict=True)]
        out = np.zeros([len(held) for held in ranges], dtype)  # zeros, as rows that fill up a table are
        for piece in sources:
            if all(number in ranges[axis] for axis, number in piece.fixed.items()):
                part = _cast(_read_piece(files, piece, described, index, folder), dtype, piece.name)
                place = [slice(None)] * out.ndim
                if described.rows is not None:
                    place[0] = slice(0, len(part))
                where = [
                    piece.fixed[axis] - ranges[axis][0] if axis in piece.fixed else place[axis]
                    for axis in range(out.ndim)
                ]
                out[tuple(where)] = part
        return out

    return read


def _rows(file: Path, sources: list[Piece]) -> int:
    """Rows of a table as the file has it."""
    with open_tensors(file) as tensors:
        return int(tensors.get_slice(sources[0].name).get_shape()[0])


def _grown(
    read: Callable[[Any], np.ndarray], stored: Description, grown: Description
) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """The callback of a table with more rows than are stored: these are the mean of the others."""
    assert stored.rows is not None
    assert grown.rows is not None
    first, last = stored.rows, grown.rows

    def read_grown(index: tuple[slice, ...]) -> np.ndarray:
        out = read(index)
        held = np.arange(*index[0].indices(grown.shape[0]))
        if (new := (held >= first) & (held < last)).any():
            everything = read((slice(0, first), *index[1:]))
            out[new] = everything.astype(np.float64).mean(0).astype(out.dtype)
        return out

    return read_grown


def _read_piece(
    files: Mapping[str, Path], piece: Piece, described: Description, index: tuple[slice, ...], folder: Path
) -> np.ndarray:
    """What part `index` of a parameter has of one tensor."""
    with open_tensors(files[piece.name]) as opened:
        tensor = opened.get_slice(piece.name)
        if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            what = f"{folder}: {piece.name} is {tensor.get_dtype()}, not floating point of 16 bits or more"
            raise UserError(f"{what}; quantised weights are not supported")
        found, expected = list(tensor.get_shape()), list(tensor_shape(described, piece))
        if found != expected:
            raise UserError(f"{folder}: {piece.name} has shape {found}, config.json makes it {expected}")
        block = tensor[tensor_slices(described, piece, index)]
    return from_tensor(block, described, piece, index)
