"""Sampling against a loop by hand, on one device and on eight."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3 import Qwen3Config
from omnijax import parameters
from omnijax.batch import Batch
from omnijax.errors import UserError
from omnijax.sampling import sample
from sharding_rules import qwen3 as rules
from tests.meshes import on

CONFIG = Qwen3Config(
    vocab_size=38,
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    initializer_range=0.5,
)
PROMPT = np.array([5, 0, 31])
CONTEXT, TOKENS = 8, 12


@functools.cache
def model():
    with on(None, rules.table()) as mesh:
        return parameters.build_model(CONFIG, mesh, rules.table(), seed=2)


def last_logits(tokens: list[int]) -> jax.Array:
    """Logits after `tokens`, a whole document without padding."""
    return _last_logits(*parameters.split(model()), jnp.array([tokens], jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(graphdef: nnx.GraphDef, params: parameters.Parameters, row: jax.Array) -> jax.Array:
    merged = parameters.merge(graphdef, params)
    zeros, index = jnp.zeros_like(row), jnp.arange(row.size, dtype=jnp.int32)[None]
    batch = Batch(row, zeros + 1, index, zeros, jnp.zeros(row.shape), zeros)
    return merged.logits(merged(batch).hidden)[0, -1]


@functools.cache
def greedy() -> list[int]:
    """The likeliest continuation: each token after the last `CONTEXT` tokens before it."""
    tokens = PROMPT.tolist()
    for _ in range(TOKENS):
        tokens.append(int(last_logits(tokens[-CONTEXT:]).argmax()))
    return tokens[len(PROMPT) :]


def test_greedy_sampling_is_the_loop_by_hand() -> None:
    """The prompt grows to the whole context, and slides on."""
    assert len(PROMPT) + TOKENS > CONTEXT + 3
    assert len(set(greedy())) > 3
    assert sample(model(), PROMPT, tokens=TOKENS, context=CONTEXT, temperature=0).tolist() == greedy()


def test_greedy_sampling_is_the_same_on_a_mesh() -> None:
    expected = greedy()
    with on("data 2 x sequence 2 x tensor 2", rules.table()) as mesh:
        split = parameters.build_model(CONFIG, mesh, rules.table(), seed=2)
        assert sample(split, PROMPT, tokens=TOKENS, context=CONTEXT, temperature=0).tolist() == expected


def test_a_long_prompt_counts_from_its_end() -> None:
    long = np.concatenate([np.arange(20), PROMPT, greedy()[:5]])
    found = sample(model(), long, tokens=TOKENS - 5, context=CONTEXT, temperature=0)
    assert found.tolist() == greedy()[5:]


def test_a_seed_decides() -> None:
    first, again, other = (
        sample(model(), PROMPT, tokens=TOKENS, context=CONTEXT, temperature=1.0, seed=seed).tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_from_the_softmax(temperature: float) -> None:
    """With a context of one token this is a Markov chain: its surprise, on average, is the entropy of its softmaxes."""
    chain = sample(model(), PROMPT, tokens=1000, context=1, temperature=temperature)
    logits = np.stack([last_logits([token]) for token in range(CONFIG.vocab_size)]).astype(np.float64)
    logits /= temperature
    log_probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(log_probabilities) * log_probabilities).sum(-1)
    before = np.concatenate([PROMPT[-1:], chain[:-1]])
    excess = -log_probabilities[before, chain] - entropy[before]
    assert abs(excess.mean()) < 4 * excess.std() / np.sqrt(excess.size)
    assert 0.2 < entropy.mean() < np.log(CONFIG.vocab_size) - 0.1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": []}, "sample: the prompt is empty; give at least one token"),
        ({"prompt": [[1, 2]]}, r"sample: the prompt is int64 of shape \(1, 2\); it must be one row of ids"),
        ({"prompt": [1.5]}, r"sample: the prompt is float64 of shape \(1,\); it must be one row of ids"),
        ({"prompt": [3, 38]}, "sample: the prompt has ids from 3 to 38; the vocabulary is 0 to 37"),
        ({"prompt": [-1, 3]}, "sample: the prompt has ids from -1 to 3; the vocabulary is 0 to 37"),
        ({"context": 0}, "sample: tokens 3 and context 0 must be positive"),
        ({"context": 7}, "axis 'length' of size 7 is not divided by sequence = 2"),
        ({"tokens": -1}, "sample: tokens -1 and context 8 must be positive"),
        ({"temperature": -0.5}, "sample: temperature -0.5 must be a number from 0"),
        ({"temperature": math.nan}, "sample: temperature nan must be a number from 0"),
    ],
)
def test_refusals(changed: dict, message: str) -> None:
    arguments = {"prompt": [1], "tokens": 3, "context": 8} | changed
    with on("data 2 x sequence 2 x tensor 2", rules.table()), pytest.raises(UserError, match=message):
        sample(model(), np.array(arguments.pop("prompt")), **arguments)
