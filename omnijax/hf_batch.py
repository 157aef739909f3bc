"""Batches from the arrays of a transformers processor."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from omnijax.batch import Batch
from omnijax.errors import UserError


def to_batch(model: nnx.Module, inputs: Mapping[str, Any]) -> Batch:
    """The arrays a transformers processor returns (`input_ids`, `attention_mask`, `labels`, ...) as a `Batch`.

    `labels` are not shifted and use -100, as there; a label that starts a document is never a target. A packed row
    needs `segment_ids` [B, S] (1.., 0 for padding) or, for a single row, `cu_seqlens`: documents are never guessed,
    and positions that restart without them are a `UserError`, as is an input no text model reads.
    """
    known = {"input_ids", "attention_mask", "labels", "position_ids", "segment_ids", "cu_seqlens"}
    if unknown := sorted(set(inputs) - known):
        raise UserError(f"to_batch: this model does not read {', '.join(unknown)}; it reads {', '.join(sorted(known))}")
    given = {name: np.asarray(value) for name, value in inputs.items() if value is not None}
    tokens = given["input_ids"].astype(np.int32)
    length = tokens.shape[1]
    positions = given.get("position_ids", np.broadcast_to(np.arange(length), tokens.shape)).astype(np.int32)
    if "segment_ids" in given:
        segments = given["segment_ids"]
    elif "cu_seqlens" in given:
        if tokens.shape[0] != 1:
            raise UserError(f"to_batch: cu_seqlens speak of one row, input_ids has {tokens.shape[0]}; give segment_ids")
        segments = np.searchsorted(given["cu_seqlens"], np.arange(length), side="right")[None]
        segments = np.where(np.arange(length) < given["cu_seqlens"][-1], segments, 0)
    else:
        segments = given.get("attention_mask", np.ones_like(tokens))
        if ((np.diff(positions, axis=1) < 0) & (segments[:, 1:] > 0)).any():
            raise UserError("to_batch: position_ids restart inside a row; give segment_ids or cu_seqlens with them")
    segments = segments.astype(np.int32)
    labels = given.get("labels", np.full_like(tokens, -100))
    follows = np.zeros(tokens.shape, bool)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0) & (labels[:, 1:] != -100)
    targets = np.zeros_like(tokens)
    targets[:, :-1] = labels[:, 1:]
    arrays: dict[str, np.ndarray] = {
        "tokens": tokens,
        "segment_ids": segments,
        "positions": positions,
        "targets": np.where(follows, targets, 0),
        "weights": follows.astype(np.float32),
        "sources": np.zeros_like(tokens),
    }
    on_device: dict[str, Any] = {name: jnp.asarray(x) for name, x in arrays.items()}
    return Batch(**on_device)
