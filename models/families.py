"""Which families there are; `family_of` reads which one a Hugging Face folder holds."""

import importlib
import json
import os
from pathlib import Path

from omnijax.errors import UserError

FAMILIES = {
    "llama": "models.llama:Llama",
    "qwen2": "models.qwen2:Qwen2",
    "qwen3": "models.qwen3:Qwen3",
}
"""`model_type` of a `config.json` -> where its class is."""


def family_of(path: str | os.PathLike[str]) -> type:
    """The class of the family whose weights lie in the folder `path`.

    Raises `UserError` where there is no `config.json`, or where its `model_type` is none of `FAMILIES`.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise UserError(f"{path}: no config.json here; give the folder of a Hugging Face checkpoint")
    model_type = json.loads(file.read_text()).get("model_type")
    if model_type not in FAMILIES:
        raise UserError(f"{file}: model_type {model_type!r} is not supported; one of {', '.join(FAMILIES)}")
    module, name = FAMILIES[model_type].split(":")
    return getattr(importlib.import_module(module), name)
