"""Batches from the arrays of a transformers processor."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from omnijax.batch import Batch, Media
from omnijax.errors import UserError

WHOLE = ("attention_mask", "cu_seqlens", "input_ids", "labels", "segment_ids")
KNOWN = (*WHOLE, "position_ids")


def to_batch(model: nnx.Module, inputs: Mapping[str, Any]) -> Batch:
    """The arrays a transformers processor returns (`input_ids`, `attention_mask`, `labels`, ...) as a `Batch`.

    `labels` are not shifted and use -100, as there; a label that starts a document is never a target. A packed row
    needs `segment_ids` [B, S] (1.., 0 for padding) or, for a single row, `cu_seqlens`: documents are never guessed,
    and positions that restart without them are a `UserError`. So are an input no text model reads, arrays that are
    not whole numbers or of another shape than `input_ids`, ids and labels outside the vocabulary, a mask with a hole,
    and inputs that disagree on which tokens are real.
    """
    known = (*KNOWN, *getattr(model, "MEDIA_INPUTS", ()))
    if unknown := sorted(set(inputs) - set(known)):
        raise UserError(f"to_batch: this model does not read {', '.join(unknown)}; it reads {', '.join(known)}")
    given = {name: _whole_numbers(name, inputs[name]) for name in WHOLE if inputs.get(name) is not None}
    if inputs.get("position_ids") is not None:
        # Positions in time may lie between whole numbers, where a model has them.
        reads = np.asarray if known != KNOWN else functools.partial(_whole_numbers, "position_ids")
        given["position_ids"] = reads(inputs["position_ids"])
    tokens = given.get("input_ids", np.zeros(0, np.int64))
    if tokens.ndim != 2 or not tokens.size:
        raise UserError(f"to_batch: input_ids must be a [rows, tokens] array that is not empty, not {tokens.shape}")
    for name, x in given.items():
        if name == "position_ids" and known != KNOWN:
            continue
        if name != "cu_seqlens" and x.shape != tokens.shape:
            raise UserError(f"to_batch: {name} has shape {x.shape}, input_ids {tokens.shape}; they must agree")
    labels = given.get("labels", np.full_like(tokens, -100))
    vocab = model.config.vocab_size  # type: ignore[attr-defined]
    for name, ids in (("input_ids", tokens), ("labels", labels[labels != -100])):
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab:
            raise UserError(f"to_batch: {name} from {ids.min()} to {ids.max()}; the vocabulary is 0 to {vocab - 1}")
    positions, of_axes = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape), None
    if "position_ids" in given:
        positions, of_axes = _positions(given["position_ids"], tokens.shape, positions)
    segments = _segments(given, tokens, positions)
    follows = np.zeros(tokens.shape, bool)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & (labels[:, 1:] != -100)
    targets = np.zeros_like(tokens)
    targets[:, :-1] = labels[:, 1:]
    media, slots = dict[str, Any](), dict[str, Any]()
    if known != KNOWN:
        counted, media, slots = model.read_media(inputs, tokens, segments)  # type: ignore[attr-defined]
        positions = counted if of_axes is None else of_axes.astype(counted.dtype)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "segment_ids": segments,
        "targets": np.where(follows, targets, 0),
        "sources": np.zeros_like(tokens),
    }
    on_device: dict[str, Any] = {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}
    return Batch(
        **on_device,
        positions=jnp.asarray(positions, jnp.float32 if np.issubdtype(positions.dtype, np.floating) else jnp.int32),
        weights=jnp.asarray(follows, jnp.float32),
        media={name: Media(**{each: jnp.asarray(x) for each, x in arrays.items()}) for name, arrays in media.items()},
        slots={name: jnp.asarray(x) for name, x in slots.items()},
    )


def _positions(given: np.ndarray, shape: tuple[int, ...], counted: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions of the text, and those of three axes as [B, S, 3] where there are; these come as [3 or 4, B, S]."""
    if given.shape == shape:
        return given, None
    if given.ndim != 3 or len(given) not in (3, 4) or given.shape[1:] != shape:
        raise UserError(
            f"to_batch: position_ids has shape {given.shape}, input_ids {shape}; it must agree, or have 3 axes, or "
            f"text and 3 axes, in front"
        )
    return (given[0] if len(given) == 4 else counted), given[-3:].transpose(1, 2, 0)


def _segments(given: Mapping[str, np.ndarray], tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The document of every token, 0 for padding; all inputs that speak of it must agree."""
    said = {}
    if "segment_ids" in given:
        said["segment_ids"] = given["segment_ids"]
    if "cu_seqlens" in given:
        said["cu_seqlens"] = _from_edges(given["cu_seqlens"], tokens.shape)
    if "attention_mask" in given or not said:
        said["attention_mask"] = _from_mask(given.get("attention_mask", np.ones_like(tokens)))
    (first, segments), *others = said.items()
    for name, other in others:
        same = (segments > 0) == (other > 0)
        if name == "cu_seqlens":
            same[:, 1:] &= (np.diff(segments, axis=1) != 0) == (np.diff(other, axis=1) != 0)
        if not same.all():
            raise UserError(f"to_batch: {first} and {name} disagree on which tokens are real and belong together")
    if first == "attention_mask":
        inside = (segments[:, 1:] == 1) & (segments[:, :-1] == 1)
        if (inside & (np.diff(positions, axis=1) < 0)).any():
            raise UserError("to_batch: position_ids restart inside a row; give segment_ids or cu_seqlens with them")
    return segments


def _from_edges(edges: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows, length = shape
    if rows != 1:
        raise UserError(f"to_batch: cu_seqlens speak of one row, input_ids has {rows}; give segment_ids alone")
    if edges.ndim != 1 or not edges.size or edges[0] != 0 or (np.diff(edges) <= 0).any() or edges[-1] > length:
        raise UserError(f"to_batch: cu_seqlens {edges.tolist()} must rise from 0 to at most {length}")
    index = np.arange(length)
    return np.where(index < edges[-1], np.searchsorted(edges, index, side="right"), 0)[None]


def _from_mask(mask: np.ndarray) -> np.ndarray:
    if not np.isin(mask, (0, 1)).all():
        raise UserError("to_batch: attention_mask must hold 0 and 1; give segment_ids for packed rows")
    if (np.diff(np.pad(mask, ((0, 0), (1, 1))), axis=1) == 1).sum(1).max() > 1:
        raise UserError("to_batch: attention_mask has a hole inside a row; take the tokens out, or give segment_ids")
    return mask


def _whole_numbers(name: str, value: Any) -> np.ndarray:
    """int64, so that what does not fit the model is seen before it is narrowed."""
    try:
        x = np.asarray(value)
    except ValueError as error:
        raise UserError(f"to_batch: {name} is ragged; pad its rows to one length") from error
    if x.dtype != bool and not np.issubdtype(x.dtype, np.integer):
        raise UserError(f"to_batch: {name} is {x.dtype}; it must hold whole numbers")
    return x.astype(np.int64)
