"""Which families there are; `family_of` reads which one a Hugging Face folder holds."""

import importlib
import os
from pathlib import Path
from typing import Any

from omnijax.errors import UserError
from omnijax.hf_files import read_config

FAMILIES = {
    "deepseek_v3": "models.deepseek_v3:DeepseekV3",
    "gpt_oss": "models.gpt_oss:GptOss",
    "llama": "models.llama:Llama",
    "qwen2": "models.qwen2:Qwen2",
    "qwen2_5_omni": "models.qwen2_5_omni:Qwen2_5Omni",
    "qwen2_5_omni_thinker": "models.qwen2_5_omni:Qwen2_5Omni",
    "qwen2_5_vl": "models.qwen2_5_vl:Qwen2_5VL",
    "qwen2_vl": "models.qwen2_vl:Qwen2VL",
    "qwen3": "models.qwen3:Qwen3",
    "qwen3_moe": "models.qwen3_moe:Qwen3Moe",
    "qwen3_omni_moe": "models.qwen3_omni:Qwen3Omni",
    "qwen3_omni_moe_thinker": "models.qwen3_omni:Qwen3Omni",
    "qwen3_vl": "models.qwen3_vl:Qwen3VL",
    "qwen3_vl_moe": "models.qwen3_vl:Qwen3VLMoe",
}
"""`model_type` of a `config.json` -> where its class is."""


def family_of(path: str | os.PathLike[str]) -> Any:
    """The class of the family whose weights lie in the folder `path`.

    Raises `UserError` where there is no `config.json`, or where its `model_type` is none of `FAMILIES`.
    """
    return family_named(read_config(path).get("model_type"), str(path))


def family_named(model_type: Any, where: str) -> Any:
    """The class of a `model_type`; `where` stands in the `UserError` if there is none."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"{where}: model_type {model_type!r} is not supported; one of {', '.join(FAMILIES)}")
    module, name = FAMILIES[model_type].split(":")
    return getattr(importlib.import_module(module), name)


def hugging_face(path: str) -> Any:
    """The model config of a Hugging Face folder: `config.Train.model = @families.hugging_face()` in a gin file."""
    return family_of(path).Config.from_hf(read_config(path), name=str(Path(path) / "config.json"))
