"""Sampling from a language model by running it whole for every token: slow for long contexts, right for any model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from omnijax import parameters
from omnijax.batch import Batch
from omnijax.errors import UserError
from omnijax.sharding import split_count


def sample(
    model: Any,
    prompt: Int[np.ndarray, " P"],
    *,
    tokens: int,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> Int[np.ndarray, " tokens"]:
    """`tokens` new ids after `prompt`; `temperature` 0 takes the likeliest id.

    The model sees the last `context` tokens at most. Raises `UserError` for an empty prompt, or a context the mesh
    cannot split.
    """
    if not len(prompt):
        raise UserError("sample: the prompt is empty; give at least one token")
    if context % split_count("length"):
        raise UserError(f"sample: context {context} is not divided by the {split_count('length')} parts of length")
    prompt = np.asarray(prompt, np.int32)[-context:]
    window = np.zeros(context, np.int32)
    window[: len(prompt)] = prompt
    graphdef, params = parameters.split(model)
    run = _sampler(graphdef, split_count("batch"), tokens)
    return np.asarray(run(params, window, len(prompt), temperature, jax.random.key(seed)))


def _sampler(graphdef: nnx.GraphDef, rows: int, tokens: int) -> Callable[..., Array]:
    def next_token(params: parameters.Parameters, carry: tuple, _: None) -> tuple[tuple, Array]:
        window, filled, temperature, key = carry
        key, this_key = jax.random.split(key)
        index = jnp.arange(window.size, dtype=jnp.int32)
        segments = (index < filled).astype(jnp.int32)
        # Every data shard samples the same row: a mesh that splits rows needs one each.
        row = {
            "tokens": window,
            "segment_ids": segments,
            "positions": index,
            "targets": index * 0,
            "sources": index * 0,
        }
        batch = Batch(
            **{name: jnp.tile(x, (rows, 1)) for name, x in row.items()}, weights=jnp.zeros((rows, window.size))
        )
        model = parameters.merge(graphdef, params)
        hidden = model(batch).hidden
        logits = model.logits(hidden)[0, filled - 1]
        drawn = jax.random.categorical(this_key, logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32)
        full = filled == window.size
        window = jnp.where(full, jnp.roll(window, -1), window)
        filled = jnp.where(full, filled, filled + 1)
        return (window.at[filled - 1].set(token), filled, temperature, key), token

    def run(params: parameters.Parameters, window: Array, filled: int, temperature: float, key: Array) -> Array:
        carry = (window, jnp.asarray(filled), jnp.asarray(temperature), key)
        return jax.lax.scan(lambda carry, _: next_token(params, carry, _), carry, None, length=tokens)[1]

    return jax.jit(run)
