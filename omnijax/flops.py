"""Floating-point operations of a step, for MFU.

Convention: a training step is three forward passes (one forward, two backward; recomputation is not counted). Of a
weight that is frozen it is two, or one where nothing before it is trained; of an encoder, one, and two for the share of
its weights that is trained. A forward pass is two operations per weight of every matrix product and real token (of a
layer's experts, those a token chooses), output head included, embedding lookup excluded, plus attention over the
query-key pairs that are really attended: causal, within a document, within the window. Padding counts nothing. Of an
encoder of media the products are counted for every unit that is no padding, without its attention.
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
from omnijax.parameters import STACKED, Description, describe, layers_of, merge, split
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


WEIGHTS = ("kernel", "lora_a", "lora_b")
"""How the paths of matrices end."""


@dataclass(frozen=True)
class Cost:
    """Forward operations: `per_token` of the matrix products; per attended pair of every layer, with its window.

    per_unit:    of an encoder's products, by modality
    step:        operations of a whole training step per token, in matrix products
    first:       the first layer that has a backward pass
    unit_passes: how many forward passes a training step is, of an encoder
    """

    per_token: int
    attention: tuple[tuple[int | None, int], ...]
    per_unit: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    first: int = 0
    unit_passes: Mapping[str, float] = field(default_factory=dict)


def forward_cost(model: Any, attention_costs: tuple[tuple[int | None, int], ...]) -> Cost:
    """The cost of a model, which may be abstract; `attention_costs` as `config.attention_costs()` gives them.

    Those are multiply-adds. A language model has them in a part of its own, `backbone`, where it has encoders.
    """
    backbone = getattr(model, "backbone", model)
    described = describe(backbone)
    whole = describe(model) if backbone is not model else {}
    first = _first_layer(described, any(not each.frozen for path, each in whole.items() if path.startswith("encoders")))
    head = described.get("lm_head.embedding", described["embed_tokens.embedding"])
    per_token = 2 * (head.rows or head.shape[0]) * head.shape[1]
    step = (3 - bool(head.frozen)) * per_token
    for path, each in described.items():
        if path.endswith(WEIGHTS):
            before = STACKED.fullmatch(path) is not None and layers_of(path, described)[-1] < first
            cost = 2 * _used(each, backbone)
            per_token, step = per_token + cost, step + (3 - bool(each.frozen) - before) * cost
    units = getattr(model.config, "units", {})
    per_unit = {name: unit_cost(model.encoders[name], unit) for name, unit in units.items()}
    passes = {name: 1 + 2 * _trained_share(model.encoders[name]) for name in per_unit}
    attention = tuple((window, 2 * pairs) for window, pairs in attention_costs)
    return Cost(per_token, attention, per_unit, step, first, passes)


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


def _first_layer(described: Mapping[str, Description], media_are_trained: bool) -> int:
    """The first layer of a language model that has, or comes after, anything that is trained."""
    trained = [path for path, each in described.items() if not each.frozen]
    if media_are_trained or "embed_tokens.embedding" in trained:
        return 0
    layers = [layers_of(path, described)[0] for path in trained if STACKED.fullmatch(path)]
    return min(layers, default=1 + max(layers_of(path, described)[-1] for path in described if STACKED.fullmatch(path)))


def _trained_share(encoder: Any) -> float:
    sizes = [
        (math.prod(each.shape), not each.frozen) for path, each in describe(encoder).items() if path.endswith(WEIGHTS)
    ]
    return sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)


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
        passes = [3 if layer >= cost.first else 1 for layer in range(len(cost.attention))]
        own = zip(passes, cost.attention, strict=True)
        per_pair = sum(times * flops for times, (other, flops) in own if other == window)
        attention += per_pair * attended_pairs(lengths, window)
    counts = {name: float((segments > 0).sum()) for name, segments in (media or {}).items()}
    units = sum(cost.unit_passes[name] * cost.per_unit[name] * count for name, count in counts.items())
    return cost.step * float(lengths.sum()) + attention + units


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
