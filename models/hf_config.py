"""A family's config dataclass from a Hugging Face `config.json`, in both spellings that are about, and back."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from omnijax.errors import UserError

Config = TypeVar("Config")

logger = logging.getLogger(__name__)

# What says nothing about the maths of a model.
INERT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "max_position_embeddings",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


# What changes the maths, and no family here has: taken as absent only where it says nothing.
FOREIGN = frozenset({"quantization_config", "partial_rotary_factor", "rope_interleaved", "logit_scale", "num_experts"})


def read(
    cls: type[Config],
    values: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any],
    name: str,
    rope_types: Mapping[str, type],
) -> Config:
    """An instance of the dataclass `cls` from the keys of a `config.json` that are named as its fields.

    `fixed` holds keys the family supports with one value only, e.g. `hidden_act="silu"`; another value is a
    `UserError`. `rope_types` maps the kinds of rotary scaling the family has to their dataclasses, for the field
    `rope_scaling`. Keys that are neither known nor inert are logged by name.
    """
    values = _one_spelling(values, rope_types, name)
    fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, only in fixed.items():
        if key in values and values[key] != only:
            raise UserError(f"{name}: {key} = {values[key]!r} is not supported for this family, only {only!r}")
    for key in sorted(FOREIGN & set(values) - fields):
        if values[key] not in (None, False) and not (key == "partial_rotary_factor" and values[key] == 1.0):
            raise UserError(f"{name}: {key} = {values[key]!r} changes the model, and is not supported for this family")
    unknown = [key for key in values if key not in fields | INERT | set(fixed) and values[key] is not None]
    if unknown:
        logger.warning("%s: keys this family does not know, and does without: %s", name, ", ".join(sorted(unknown)))
    known = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in fields}
    return cls(**known)


def _one_spelling(values: Mapping[str, Any], rope_types: Mapping[str, type], name: str) -> dict[str, Any]:
    """transformers 5 keeps `rope_theta` inside `rope_parameters`; hub files keep it beside `rope_scaling`."""
    flat = dict(values)
    scaling = dict(flat.pop("rope_scaling", None) or {})
    scaling |= dict(flat.pop("rope_parameters", None) or {})
    if "rope_theta" in scaling:
        flat["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    if kind in rope_types:
        flat["rope_scaling"] = rope_types[kind](**scaling)
    elif kind != "default":
        choices = ", ".join(f"'{choice}'" for choice in ("default", *rope_types))
        raise UserError(f"{name}: rope type '{kind}' is not supported for this family, only {choices}")
    return flat


def write(config: Any, *, fixed: Mapping[str, Any], rope_types: Mapping[str, type], **header: Any) -> dict[str, Any]:
    """The `config.json` of a config, in the spelling every version of transformers reads; `header` goes first."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    scaling = values.get("rope_scaling")
    if scaling is not None:
        kind = next(name for name, cls in rope_types.items() if isinstance(scaling, cls))
        values["rope_scaling"] = {"rope_type": kind, **dataclasses.asdict(scaling)}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {**header, **fixed, **{key: value for key, value in values.items() if value is not None}}
