"""Which families there are; `family_of` reads which one a Hugging Face folder holds."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

from omnijax.errors import UserError

FAMILIES = {
    "llama": "models.llama:Llama",
    "qwen2": "models.qwen2:Qwen2",
    "qwen3": "models.qwen3:Qwen3",
}
"""`model_type` of a `config.json` -> where its class is."""


def family_of(path: str | os.PathLike[str]) -> Any:
    """The class of the family whose weights lie in the folder `path`.

    Raises `UserError` where there is no `config.json`, or where its `model_type` is none of `FAMILIES`.
    """
    return family_named(_read(path).get("model_type"), str(path))


def family_named(model_type: str | None, where: str) -> Any:
    """The class of a `model_type`; `where` stands in the `UserError` if there is none."""
    if model_type not in FAMILIES:
        raise UserError(f"{where}: model_type {model_type!r} is not supported; one of {', '.join(FAMILIES)}")
    module, name = FAMILIES[model_type].split(":")
    return getattr(importlib.import_module(module), name)


def hugging_face(path: str) -> Any:
    """The model config of a Hugging Face folder: `config.Train.model = @families.hugging_face()` in a gin file."""
    return family_of(path).Config.from_hf(_read(path), name=str(Path(path) / "config.json"))


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(f"{path}: no config.json here; give the folder of a Hugging Face checkpoint")
    return json.loads(file.read_text())
