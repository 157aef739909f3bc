"""A family's config dataclass from a Hugging Face `config.json`, in both spellings that are about, and back."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from omnijax.errors import UserError
from omnijax.fields import convert, describe, fields_of
from omnijax.nn.rope import YarnScaling

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
        "num_nextn_predict_layers",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
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
    return _typed(cls, {key: value for key, value in values.items() if key in fields}, name)


def _typed(cls: type[Config], values: Mapping[str, Any], what: str) -> Config:
    """An instance of `cls`, each value of which has the type of its field: strings, for one, are no numbers."""
    converted = {}
    for key, value in values.items():
        annotation = fields_of(cls)[key].annotation
        converted[key] = convert(value, annotation)
        if converted[key] is dataclasses.MISSING:
            raise UserError(f"{what}: {key} = {value!r} is not {describe(annotation)}; correct it")
    return cls(**converted)


def _one_spelling(values: Mapping[str, Any], rope_types: Mapping[str, type], name: str) -> dict[str, Any]:
    """transformers 5 keeps `rope_theta` inside `rope_parameters`; hub files keep it beside `rope_scaling`.

    Without either, or with null, the family's own default holds.
    """
    flat = dict(values)
    scaling: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = flat.pop(key, None) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"{name}: {key} = {value!r} is not an object or null")
        scaling |= value
    if not scaling:
        return flat
    if "rope_theta" in scaling:
        flat["rope_theta"] = scaling.pop("rope_theta")
    kind = str(scaling.pop("rope_type", scaling.pop("type", "default")))
    if kind in rope_types:
        flat["rope_scaling"] = _scaling(rope_types[kind], scaling, f"{name}: rope type '{kind}'")
    elif kind == "default":
        flat["rope_scaling"] = None
    else:
        choices = ", ".join(f"'{choice}'" for choice in ("default", *rope_types))
        raise UserError(f"{name}: rope type '{kind}' is not supported for this family, only {choices}")
    return flat


def _scaling(cls: type[Config], values: Mapping[str, Any], what: str) -> Config:
    given = {key: value for key, value in values.items() if value is not None}
    needed = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if missing := [key for key, must in needed.items() if must and key not in given]:
        raise UserError(f"{what} lacks {', '.join(missing)}")
    if unknown := sorted(set(given) - set(needed)):
        raise UserError(f"{what} has {', '.join(unknown)}, which is none of {', '.join(needed)}")
    return _typed(cls, given, what)


def write(config: Any, *, fixed: Mapping[str, Any], rope_types: Mapping[str, type], **header: Any) -> dict[str, Any]:
    """The `config.json` of a config, in the spelling every version of transformers reads; `header` goes first."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    values = {name: getattr(config, name) for name in defaults}
    # A null that is not the default says something, and of `rope_scaling` only a type of its own says it.
    values = {name: value for name, value in values.items() if value is not None or defaults[name] is not None}
    if "rope_scaling" in values:
        scaling = values["rope_scaling"]
        kind = next((name for name, cls in rope_types.items() if isinstance(scaling, cls)), "default")
        numbers = {} if scaling is None else dataclasses.asdict(scaling)
        numbers = {key: value for key, value in numbers.items() if value is not None}
        values["rope_scaling"] = {"rope_type": kind, **numbers}
        if isinstance(scaling, YarnScaling):  # transformers warns where the two disagree
            values["max_position_embeddings"] = scaling.context
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {**header, **fixed, **values}
