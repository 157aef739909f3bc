"""gpt-oss: parity with transformers, the laws, and what its config may hold."""

import functools
import json
import logging
import math

import jax.numpy as jnp
import numpy as np
import pytest

from models.gpt_oss import ClampedSwiGLU, GptOssConfig
from omnijax import parameters
from omnijax.errors import UserError
from omnijax.flops import forward_cost
from omnijax.nn.grouped import ONE_EXPERT
from omnijax.nn.rope import YarnScaling
from omnijax.sharding import AttentionLayout
from sharding_rules import gpt_oss as rules
from tests import laws
from tests.meshes import MESHES

SIZES = {
    "vocab_size": 208,
    "hidden_size": 96,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "sliding_window": 7,
    "num_local_experts": 16,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.5,
    "initializer_range": 0.05,
    "router_aux_loss_coef": 0.3,
}
CONFIGS = {
    "yarn": GptOssConfig(**SIZES, rope_scaling=YarnScaling(8.0, 16, truncate=False)),
    "plain, full layer first": GptOssConfig(
        **SIZES, rope_scaling=None, layer_types=("full_attention", "sliding_attention", "sliding_attention")
    ),
}
CASE = laws.GOLDEN / "gpt_oss" / "yarn"


@functools.cache
def one_device(name: str) -> dict:
    return laws.run(CONFIGS[name], rules.table(), None)


@pytest.mark.parametrize("batch", ["padded", "packed"])
def test_parity(batch: str) -> None:
    laws.parity(CASE, batch)


def test_equivalence() -> None:
    laws.equivalence(CONFIGS["yarn"], rules.table(), "expert 2 x tensor 2 x sequence 2", one_device("yarn"))


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", MESHES)
def test_equivalence_of_every_variant(mesh: str, attention: AttentionLayout, name: str) -> None:
    laws.equivalence(CONFIGS[name], rules.table(attention), mesh, one_device(name))


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_isolation(name: str) -> None:
    laws.isolation(CONFIGS[name])


def test_clamped_experts_by_hand() -> None:
    """One row, one hidden channel. Gate 5 is cut to 2 and up -7 to -2: (1 - 2) * 2 * sigmoid(1.5 * 2), and so on."""
    kernels = {
        "gate_up_kernel": jnp.array([[[5.0, -7.0]]]),
        "gate_up_bias": jnp.array([[1.0, 0.5]]),
        "down_kernel": jnp.array([[3.0]]),
        "down_bias": jnp.array([10.0]),
    }
    expert = ClampedSwiGLU(alpha=1.5, limit=2.0)
    for x, gate, up in ((1.0, 2.0, -2.0), (0.2, 2.0, -0.9), (-0.5, -1.5, 2.0), (-2.0, -9.0, 2.0)):
        hidden = (up + 1) * gate / (1 + np.exp(-1.5 * gate))
        found = expert(kernels, jnp.array([[x]]), jnp.array([0.25]), ONE_EXPERT)
        np.testing.assert_allclose(found, [[0.25 * (3 * hidden + 10)]], rtol=1e-5)


@pytest.mark.parametrize(("layers", "experts", "total", "active"), [(36, 128, 116.83, 5.13), (24, 32, 20.91, 3.61)])
def test_the_published_sizes_make_the_published_models(layers: int, experts: int, total: float, active: float) -> None:
    """Billions of parameters, all and active, as in table 1 of the model card, to all its digits."""
    config = GptOssConfig(num_hidden_layers=layers, num_local_experts=experts)
    model = parameters.abstract_model(config)
    assert sum(math.prod(shape) for shape in parameters.shapes(model).values()) / 1e9 == pytest.approx(total, abs=0.005)
    assert forward_cost(model, config.attention_costs()).per_token / 2e9 == pytest.approx(active, abs=0.005)
    assert config.windows()[:4] == (128, None, 128, None)


def test_both_spellings_of_a_config_are_one(caplog: pytest.LogCaptureFixture) -> None:
    texts = [(CASE / name).read_text() for name in ("config.json", "config_hub_style.json")]
    with caplog.at_level(logging.WARNING):
        first, second = (GptOssConfig.from_hf(json.loads(text)) for text in texts)
    assert first == second
    assert not caplog.records
    assert first.windows() == (6, None, 6)
    assert GptOssConfig.from_hf(first.to_hf()) == first


def test_a_missing_scaling_is_the_family_s_and_a_plain_one_is_none() -> None:
    scaling = YarnScaling(32.0, 4096, truncate=False)
    assert GptOssConfig.from_hf(SIZES).rope_scaling == scaling
    assert GptOssConfig.from_hf(SIZES | {"rope_scaling": None}).rope_scaling == scaling
    plain = GptOssConfig.from_hf(SIZES | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e4})
    assert (plain.rope_scaling, plain.rope_theta) == (None, 1e4)
    assert plain.to_hf()["rope_scaling"] == {"rope_type": "default"}
    assert GptOssConfig.from_hf(plain.to_hf()) == plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be 3 times sliding_attention or full_attention"),
        ({"layer_types": ["full_attention"] * 2 + ["chunked_attention"]}, "layer_types must be 3 times"),
        ({"sliding_window": 0}, "sliding_window = 0 must be positive"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok = 17 must be 1 to 16"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_what_it_has_not_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GptOssConfig.from_hf(SIZES | change)
