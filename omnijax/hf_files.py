"""The files of a Hugging Face folder, read strictly: what is cut off, or no such file at all, is one line."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from omnijax.errors import UserError


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The `config.json` of a folder; `UserError` where there is none, or no JSON object in it."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise UserError(f"{folder}: no config.json here; give the folder of a Hugging Face checkpoint")
    return _read_object(file)


def files_by_tensor(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor. `UserError` where the folder has no weights, or not all that its index lists."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{index}: it has no weight_map of tensor names to files; fetch it again")
        files = {name: folder / file for name, file in weight_map.items()}
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise UserError(f"{index}: lists {', '.join(missing)}, which the folder lacks; fetch the missing files")
        return files
    file = folder / "model.safetensors"
    if not file.is_file():
        raise UserError(f"{folder}: neither model.safetensors nor model.safetensors.index.json here")
    with open_tensors(file) as tensors:
        return dict.fromkeys(tensors.keys(), file)


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """A safetensors file, opened; `UserError` where it is cut off, is none, or lacks a tensor that is asked for."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except SafetensorError as error:
        with open(file, "rb") as content:
            is_pointer = content.read(40).startswith(b"version https://git-lfs")
        if is_pointer:
            raise UserError(f"{file} is only a pointer of git-lfs; fetch the weights: git lfs pull") from None
        raise UserError(f"{file} is damaged, or no safetensors file ({error}); fetch it again") from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}); fetch it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{file} is a JSON {type(values).__name__}; it must be an object; fetch it again")
    return values
