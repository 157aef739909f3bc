"""Which families there are; `family_of` reads which one a Hugging Face folder holds."""

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any, Literal

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


TOWERS = {
    "vision": (
        "models.vision.qwen2_vl:Qwen2VLVision",
        "models.qwen2_5_omni:Qwen2_5OmniVision",
        "models.vision.qwen2_5_vl:Qwen2_5VLVision",
        "models.vision.qwen3_vl:Qwen3VLVision",
        "models.vision.siglip:SigLIPVision",
    ),
    "audio": (
        "models.audio.qwen2_5_omni:Qwen2_5OmniAudio",
        "models.audio.qwen3_omni:Qwen3OmniAudio",
        "models.audio.whisper:WhisperEncoder",
    ),
}
"""By what they read, where the classes of towers are."""


def family_of(path: str | os.PathLike[str]) -> Any:
    """The class of the family whose weights lie in the folder `path`.

    Raises `UserError` where there is no `config.json`, or where its `model_type` is none of `FAMILIES`.
    """
    return family_named(read_config(path).get("model_type"), str(path))


def family_named(model_type: Any, where: str) -> Any:
    """The class of a `model_type`; `where` stands in the `UserError` if there is none."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(f"{where}: model_type {model_type!r} is not supported; one of {', '.join(FAMILIES)}")
    return _found(FAMILIES[model_type])


def hugging_face(path: str, vocab_size: int | None = None) -> Any:
    """The model config of a Hugging Face folder: `config.Train.model = @families.hugging_face()` in a gin file.

    A `vocab_size` larger than the folder's makes room for new tokens in a composed model.
    """
    config = family_of(path).Config.from_hf(read_config(path), name=str(Path(path) / "config.json"))
    if vocab_size is None:
        return config
    if vocab_size < config.vocab_size:
        raise UserError(f"hugging_face.vocab_size = {vocab_size} is less than the {config.vocab_size} of {path}")
    return dataclasses.replace(config, vocab_size=vocab_size)


def tower(path: str, kind: Literal["vision", "audio"]) -> Any:
    """The config of the tower of a kind in a Hugging Face folder, of a tower alone or of a whole model.

    Raises `UserError` where it has none, or one that is not supported.
    """
    whole = read_config(path)
    values = whole.get("thinker_config", whole)
    values = values.get(f"{kind}_config", values)
    model_type = values.get("model_type", whole.get("model_type"))
    known = dict[str, Any]()
    for place in TOWERS[kind]:
        config = _found(place).Config
        types = getattr(config, "HF_TYPES", None) or (config.HF_TYPE,)
        known |= {each: config for each in types if each not in known}
    if model_type not in known:
        raise UserError(f"{path}: its {kind} tower {model_type!r} is not supported; one of {', '.join(known)}")
    return known[model_type].from_hf(whole, name=str(Path(path) / "config.json"))


def _found(place: str) -> Any:
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
