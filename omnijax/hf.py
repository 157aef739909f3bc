"""Hugging Face checkpoints: safetensors slices read straight into sharded arrays, and batches from processors."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import Array
from safetensors import safe_open

from omnijax import parameters
from omnijax.batch import Batch
from omnijax.errors import UserError
from omnijax.parameters import Description
from omnijax.sharding import Rules

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


def tensors(model: Any, values: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """`values`, given by our parameter paths (weights, or gradients), under their Hugging Face names and layout."""
    described = parameters.describe(model)
    found = {}
    for path, value in values.items():
        each, host = described[path], np.asarray(value)
        names = _tensor_names(path, described, type(model).HF_NAMES)
        stacked = each.axes[0] == "layers"
        for name, x in zip(names, host if stacked else host[None], strict=True):
            if each.inputs is not None:
                outputs = math.prod(x.shape[each.inputs :])
                x = x.reshape(-1, outputs).T if each.inputs else x.reshape(outputs)
            found[name] = x
    return found


def to_batch(model: nnx.Module, inputs: Mapping[str, Any]) -> Batch:
    """The arrays a transformers processor returns (`input_ids`, `attention_mask`, `labels`, ...) as a `Batch`.

    `labels` are not shifted and use -100, as there; a label that starts a document is never a target. A packed row
    needs `segment_ids` [B, S] (1.., 0 for padding) or, for a single row, `cu_seqlens`: documents are never guessed,
    and positions that restart without them are a `UserError`, as is an input no text model reads.
    """
    known = {"input_ids", "attention_mask", "labels", "position_ids", "segment_ids", "cu_seqlens"}
    if unknown := sorted(set(inputs) - known):
        raise UserError(f"to_batch: this model does not read {', '.join(unknown)}; it reads {', '.join(sorted(known))}")
    given = {name: np.asarray(value) for name, value in inputs.items() if value is not None}
    tokens = given["input_ids"].astype(np.int32)
    length = tokens.shape[1]
    positions = given.get("position_ids", np.broadcast_to(np.arange(length), tokens.shape)).astype(np.int32)
    if "segment_ids" in given:
        segments = given["segment_ids"]
    elif "cu_seqlens" in given:
        if tokens.shape[0] != 1:
            raise UserError(f"to_batch: cu_seqlens speak of one row, input_ids has {tokens.shape[0]}; give segment_ids")
        segments = np.searchsorted(given["cu_seqlens"], np.arange(length), side="right")[None]
        segments = np.where(np.arange(length) < given["cu_seqlens"][-1], segments, 0)
    else:
        segments = given.get("attention_mask", np.ones_like(tokens))
        if ((np.diff(positions, axis=1) < 0) & (segments[:, 1:] > 0)).any():
            raise UserError("to_batch: position_ids restart inside a row; give segment_ids or cu_seqlens with them")
    segments = segments.astype(np.int32)
    labels = given.get("labels", np.full_like(tokens, -100))
    follows = np.zeros(tokens.shape, bool)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & (labels[:, 1:] != -100)
    targets = np.zeros_like(tokens)
    targets[:, :-1] = labels[:, 1:]
    arrays: dict[str, np.ndarray] = {
        "tokens": tokens,
        "segment_ids": segments,
        "positions": positions,
        "targets": np.where(follows, targets, 0),
        "weights": follows.astype(np.float32),
        "sources": np.zeros_like(tokens),
    }
    on_device: dict[str, Any] = {name: jnp.asarray(x) for name, x in arrays.items()}
    return Batch(**on_device)


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

    def read(index: tuple[slice, ...]) -> np.ndarray:
        inner = index[1:] if stacked else index
        chosen = names[index[0]] if stacked else names
        parts = [_read_slice(files, name, shape, described.inputs, inner, folder).astype(dtype) for name in chosen]
        return np.stack(parts) if stacked else parts[0]

    return read


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
    # The outermost axis of each group is cut by now: unflatten, order as ours, cut the others.
    sizes: list[int] = []
    for rows, (_, *inner) in zip(block.shape, groups, strict=True):
        sizes += [rows // math.prod(shape[axis] for axis in inner), *(shape[axis] for axis in inner)]
    block = block.reshape(sizes).transpose(np.argsort([axis for group in groups for axis in group]))
    outermost = {group[0] for group in groups}
    return block[tuple(slice(None) if axis in outermost else index[axis] for axis in axes)]
