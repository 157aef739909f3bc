"""Sampling from a language model by running it whole for every token: slow for long contexts, right for any model."""

import functools
import math
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

    The model sees the last `context` tokens at most. Raises `UserError` for an empty prompt, ids beyond the model's
    vocabulary, numbers out of range, or a context the mesh cannot split.
    """
    prompt = np.asarray(prompt)
    if not prompt.size:
        raise UserError("sample: the prompt is empty; give at least one token")
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise UserError(f"sample: the prompt is {prompt.dtype} of shape {prompt.shape}; it must be one row of ids")
    vocabulary = model.config.vocab_size
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise UserError(
            f"sample: the prompt has ids from {prompt.min()} to {prompt.max()}; the vocabulary is 0 to {vocabulary - 1}"
        )
    if tokens < 1 or context < 1:
        raise UserError(f"sample: tokens {tokens} and context {context} must be positive")
    if not 0 <= temperature < math.inf:
        raise UserError(f"sample: temperature {temperature} must be a number from 0")
    prompt = prompt[-context:].astype(np.int32)
    window = np.zeros(context, np.int32)
    window[: len(prompt)] = prompt
    graphdef, params = parameters.split(model)
    key = jax.random.key(seed)
    rows = split_count("batch")  # Every device that holds rows of its own samples the same row.
    return np.asarray(_sample(graphdef, params, window, len(prompt), temperature, key, rows=rows, tokens=tokens))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("rows", "tokens"))
def _sample(
    graphdef: nnx.GraphDef,
    params: parameters.Parameters,
    window: Int[Array, " context"],
    filled: Int[Array, ""],
    temperature: Array,
    key: Array,
    *,
    rows: int,
    tokens: int,
) -> Int[Array, " tokens"]:
    """Of `window` the first `filled` ids are there; once it is full, the oldest makes room for the newest."""
    model = parameters.merge(graphdef, params)
    index = jnp.arange(window.size, dtype=jnp.int32)

    def next_token(carry: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        window, filled = carry
        segments = (index < filled).astype(jnp.int32)
        row = Batch(window, segments, index, jnp.zeros_like(index), jnp.zeros(window.size), jnp.zeros_like(index))
        batch = jax.tree.map(lambda x: jnp.tile(x, (rows, 1)), row)
        logits = model.logits(model(batch).hidden)[0, filled - 1]
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        token = jnp.where(temperature > 0, drawn, logits.argmax()).astype(jnp.int32)
        full = filled == window.size
        window = jnp.where(full, jnp.roll(window, -1), window)
        filled = jnp.where(full, filled, filled + 1)
        return (window.at[filled - 1].set(token), filled), token

    return jax.lax.scan(next_token, (window, jnp.asarray(filled)), jax.random.split(key, tokens))[1]
