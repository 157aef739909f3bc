"""Sampling against a loop over ever longer prefixes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3 import Qwen3Config
from omnijax import hf, parameters
from omnijax.errors import UserError
from omnijax.sampling import sample
from sharding_rules import qwen3 as rules
from tests.meshes import on

SMALL = Qwen3Config(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    initializer_range=0.4,
)
PROMPT = np.array([3, 17, 5], np.int32)


@pytest.fixture(scope="module")
def model():
    return SMALL.build(rngs=nnx.Rngs(2))


def likeliest(model, prefix: list[int]) -> int:
    hidden = model(hf.to_batch(model, {"input_ids": np.array([prefix])})).hidden
    return int(model.logits(hidden)[0, -1].argmax())


@pytest.mark.parametrize("context", [16, 5])
def test_greedy_sampling_is_the_loop(model, context: int) -> None:
    """With a context of 5 the oldest tokens make room, and positions start at 0 in what is left."""
    text = PROMPT.tolist()
    for _ in range(8):
        text.append(likeliest(model, text[-context:]))
    found = sample(model, PROMPT, tokens=8, context=context, temperature=0.0)
    assert found.tolist() == text[3:]
    assert len(set(text[3:])) > 2


def test_a_long_prompt_keeps_its_end(model) -> None:
    long = np.arange(20, dtype=np.int32)
    found = sample(model, long, tokens=1, context=6, temperature=0.0)
    assert found.tolist() == [likeliest(model, long[-6:].tolist())]


def test_a_seed_is_a_sample(model) -> None:
    samples = [sample(model, PROMPT, tokens=12, context=16, temperature=2.0, seed=seed).tolist() for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


def test_temperature_draws_by_the_logits(model) -> None:
    """600 draws of one token, all at once as rows of a batch would be: frequencies follow the softmax."""
    hidden = model(hf.to_batch(model, {"input_ids": PROMPT[None]})).hidden
    expected = np.asarray(jax.nn.softmax(model.logits(hidden)[0, -1] / 1.5))
    draws = [sample(model, PROMPT, tokens=1, context=4, temperature=1.5, seed=seed)[0] for seed in range(600)]
    found = np.bincount(draws, minlength=40) / 600
    assert np.abs(found - expected).max() < 4 * np.sqrt(expected.max() / 600)


def test_a_mesh_samples_the_same() -> None:
    found = []
    for mesh_name in (None, "data 2 x sequence 2 x tensor 2"):
        with on(mesh_name, rules.table()) as mesh:
            model = parameters.build_model(SMALL, mesh, rules.table(), seed=4)
            found.append(sample(model, PROMPT, tokens=8, context=16, temperature=0.0).tolist())
    assert found[0] == found[1]


def test_refusals(model) -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        sample(model, np.zeros(0, np.int32), tokens=1, context=4)
    with on("data 2 x sequence 2 x tensor 2", rules.table()) as mesh:
        split = parameters.build_model(SMALL, mesh, rules.table())
        with pytest.raises(UserError, match="length"):
            sample(split, PROMPT, tokens=1, context=5)
    assert jnp.issubdtype(sample(model, PROMPT, tokens=2, context=4).dtype, jnp.integer)
