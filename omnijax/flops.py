"""Floating-point operations of a step, for MFU.

Convention: a training step is three forward passes (one forward, two backward; recomputation is not counted). A
forward pass is two operations per weight of every matrix product and real token (of a layer's experts, those a token
chooses), output head included, embedding lookup excluded, plus attention over the query-key pairs that are really
attended: causal, within a document, within the window. Padding counts nothing. Of an encoder of media the products are
counted for every unit that is no padding, without its attention.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from omnijax.batch import Media
from omnijax.parameters import Description, describe, merge, split
from omnijax.sharding import without_rules
from omnijax.units import UnitShape

# Dense bf16 peak of one device in FLOP/s, by a word of jax's device_kind; NVIDIA data sheets, without sparsity.
# The first word that fits counts, so the cards that run slower than their namesakes come first.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "GB200": 2500e12,
    "B200": 2250e12,
}


@dataclass(frozen=True)
class Cost:
    """Forward operations: `per_token` of the matrix products; per attended pair of every layer, with its window.

    per_unit: of an encoder's products, by modality
    """

    per_token: int
    attention: tuple[tuple[int | None, int], ...]
    per_unit: Mapping[str, float] = field(default_factory=dict)


def forward_cost(model: Any, attention_costs: tuple[tuple[int | None, int], ...]) -> Cost:
    """The cost of a model, which may be abstract; `attention_costs` as `config.attention_costs()` gives them.

    Those are multiply-adds. A language model has them in a part of its own, `backbone`, where it has encoders.
    """
    backbone = getattr(model, "backbone", model)
    described = describe(backbone)
    weights = sum(_used(each, backbone) for path, each in described.items() if path.endswith("kernel"))
    head = described.get("lm_head.embedding", described["embed_tokens.embedding"])
    per_token = 2 * (weights + (head.rows or head.shape[0]) * head.shape[1])
    units = getattr(model.config, "units", {})
    per_unit = {name: unit_cost(model.encoders[name], unit) for name, unit in units.items()}
    return Cost(per_token, tuple((window, 2 * pairs) for window, pairs in attention_costs), per_unit)


def unit_cost(encoder: Any, unit: UnitShape) -> float:
    """Operations that an encoder, which may be abstract, does for one unit: its products of weights."""
    graphdef, params = split(encoder)
    count = unit.multiple
    integers: list[Any] = [
        jax.ShapeDtypeStruct((1, count, *shape), jnp.int32) for shape in ((), unit.position, (3,), ())
    ]
    features: Any = jax.ShapeDtypeStruct((1, count, *unit.features), unit.dtype)
    media = Media(features, *integers)
    shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in params.items()}
    with without_rules():
        traced = jax.make_jaxpr(lambda params, media: merge(graphdef, params)(media))(shapes, media)
    return _products(traced.jaxpr) / count


def _products(jaxpr: Any) -> int:
    """Operations of a program's products of rows and one matrix, which those of attention are not."""
    total = 0
    for equation in jaxpr.eqns:
        given = equation.params
        if equation.primitive.name == "dot_general":
            (contracted, _), (per_row, _) = given["dimension_numbers"]
            rows, matrix = (variable.aval for variable in equation.invars)
            total += 0 if per_row else 2 * rows.size * matrix.size // math.prod(rows.shape[axis] for axis in contracted)
        elif equation.primitive.name == "scan":
            total += given["length"] * _products(given["jaxpr"].jaxpr)
        else:
            inner = [each for value in given.values() for each in (value if isinstance(value, tuple) else (value,))]
            total += sum(_products(getattr(each, "jaxpr", each)) for each in inner if hasattr(each, "eqns"))
    return total


def _used(kernel: Description, model: Any) -> int:
    """How many of a kernel's weights a token meets."""
    size = math.prod(kernel.shape)
    if "experts" not in kernel.axes:
        return size
    return size // kernel.shape[kernel.axes.index("experts")] * model.config.num_experts_per_tok


def training_flops(
    cost: Cost, segment_ids: Int[np.ndarray, "B S"], media: Mapping[str, Int[np.ndarray, "B N"]] | None = None
) -> float:
    """Operations of one training step on these rows; `media` are the `unit_segments` of each modality."""
    lengths = document_lengths(segment_ids)
    attention = 0.0
    for window in {window for window, _ in cost.attention}:
        per_pair = sum(flops for other, flops in cost.attention if other == window)
        attention += per_pair * attended_pairs(lengths, window)
    units = sum(cost.per_unit[name] * float((segments > 0).sum()) for name, segments in (media or {}).items())
    return 3.0 * (cost.per_token * float(lengths.sum()) + attention + units)


def document_lengths(segment_ids: Int[np.ndarray, "B S"]) -> Int[np.ndarray, " documents"]:
    """Lengths of all documents of all rows."""
    rows, length = segment_ids.shape
    distinct = segment_ids.astype(np.int64) + np.arange(rows)[:, None] * (length + 1)
    return np.unique(distinct[segment_ids > 0], return_counts=True)[1]


def attended_pairs(lengths: Int[np.ndarray, " documents"], window: int | None) -> int:
    """Query-key pairs of causal attention in documents of these lengths, each query seeing at most `window` keys."""
    lengths = lengths.astype(np.int64)
    full = lengths if window is None else np.minimum(lengths, window)
    return int((full * (full + 1) // 2 + (lengths - full) * full).sum())


def peak_flops(device_kind: str, given_tflops: float | None) -> float | None:
    """Peak of one device in FLOP/s: the config's figure, else the built-in list's, else None."""
    if given_tflops is not None:
        return given_tflops * 1e12
    return next((peak for word, peak in PEAKS.items() if word in device_kind), None)
