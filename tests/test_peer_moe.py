"""DeepSeek-V3 and gpt-oss against transformers: one layer of attention, and fresh models. Run with `-m peer`."""

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.deepseek_v3 import DeepseekV3Config, LatentAttention
from models.families import family_named
from models.gpt_oss import GptOssConfig, attention_with_sinks
from omnijax import hf, parameters
from omnijax.hf_layout import pieces, to_tensor
from omnijax.mesh import make_mesh
from omnijax.nn import rope, spans
from omnijax.nn.rope import YarnScaling
from tests.test_peer import check

pytestmark = pytest.mark.peer

SIZES: dict[str, Any] = {"vocab_size": 84, "hidden_size": 40, "intermediate_size": 24, "num_hidden_layers": 3}
LATENT = SIZES | {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 9,
    "qk_rope_head_dim": 10,
    "v_head_dim": 7,
    "rms_norm_eps": 1e-3,
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_routed_experts": 15,
    "n_group": 5,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
GROUPED = SIZES | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "sliding_window": 5,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}
CONFIGS = {
    "latent": DeepseekV3Config(**LATENT),
    "latent, whole queries": DeepseekV3Config(**LATENT | {"q_lora_rank": None, "attention_bias": False}),
    "latent, halves": DeepseekV3Config(**LATENT, rope_interleave=False),
    "latent, yarn": DeepseekV3Config(**LATENT, rope_scaling=YarnScaling(40.0, 17, mscale=0.7, mscale_all_dim=1.3)),
    "latent, yarn of the paper": DeepseekV3Config(**LATENT, rope_scaling=YarnScaling(4.0, 19, beta_fast=6.0)),
    "sinks": GptOssConfig(**GROUPED, rope_scaling=YarnScaling(32.0, 24, truncate=False)),
    "sinks, given factor": GptOssConfig(**GROUPED, rope_scaling=YarnScaling(8.0, 30, attention_factor=1.7)),
    "sinks, plain": GptOssConfig(**GROUPED, rope_scaling=None, attention_bias=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fresh_model_runs_there(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = CONFIGS[name]
    rules = importlib.import_module(f"sharding_rules.{config.HF_TYPE}")
    model = parameters.build_model(config, make_mesh(data=1, devices=jax.devices()[:1]), rules.table(), seed=1)
    hf.save(model, tmp_path / "out")
    check(model, tmp_path / "out", config.vocab_size, caplog)


@pytest.mark.parametrize("name", CONFIGS)
def test_attention(name: str) -> None:
    """Outputs and all gradients of a layer on packed rows, with a window where there is one."""
    config, random = CONFIGS[name], np.random.default_rng(0)
    make = LatentAttention if isinstance(config, DeepseekV3Config) else attention_with_sinks
    module = make(config, rngs=nnx.Rngs(0))
    graphdef, fresh = parameters.split(module)
    params = {path: jnp.asarray(0.3 * random.normal(size=x.shape), jnp.float32) for path, x in fresh.items()}
    x, d_out = random.normal(size=(2, 2, 23, config.hidden_size)).astype(np.float32)
    segments = np.repeat([[1, 2], [1, 2]], [11, 12], axis=1).astype(np.int32)
    positions = np.concatenate([np.arange(11), np.arange(12)])[None].repeat(2, 0)
    by = rope.rotation(
        jnp.asarray(positions),
        rope.inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling),
        rope.attention_factor(config.rope_scaling),
    )
    span = spans.causal(jnp.asarray(segments))
    if config.windows()[0] is not None:
        span = spans.window(span, config.windows()[0])
    out, pull = jax.vjp(lambda params, x: parameters.merge(graphdef, params)(x, by, span), params, jnp.asarray(x))
    d_params, d_x = pull(jnp.asarray(d_out))
    found = theirs(config, module, d_params) | {"out": out, "input": d_x}
    start, end = (np.asarray(bound)[..., None] for bound in span)
    seen = (start <= np.arange(23)) & (np.arange(23) < end)
    expected = peer_attention(config, theirs(config, module, params), x, d_out, positions, seen)
    assert set(found) == set(expected)
    for key, value in expected.items():
        error = np.abs(np.asarray(found[key]) - value).max() / np.abs(value).max()
        assert error < 1e-5, f"{key}: {error:.2e}"


def theirs(config: Any, module: nnx.Module, values: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Parameters of attention, or their gradients, under the names and in the layout of transformers."""
    names = {
        name.split("self_attn.")[1]: path.removeprefix("layers.self_attn.")
        for name, path in family_named(config.HF_TYPE, "").HF_NAMES.items()
        if "self_attn." in name
    }
    described = parameters.describe(module)
    found = [(x, piece) for path, x in values.items() for piece in pieces(path, described, names)]
    return {piece.name: to_tensor(np.asarray(x), piece, 0) for x, piece in found}


def peer_attention(config, weights, x, d_out, positions, seen) -> dict[str, np.ndarray]:
    """Output, gradient of the input, and gradients by name."""
    import torch
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.gpt_oss import modeling_gpt_oss

    prefix = config.HF_CLASS.removesuffix("ForCausalLM")
    peer = {"DeepseekV3": modeling_deepseek_v3, "GptOss": modeling_gpt_oss}[prefix]
    values = {key: value for key, value in config.to_hf().items() if key not in ("architectures", "model_type")}
    peer_config = getattr(peer, f"{prefix}Config")(**values, attn_implementation="eager")
    layer = getattr(peer, f"{prefix}Attention")(peer_config, 0)
    layer.load_state_dict({name: torch.tensor(value) for name, value in weights.items()}, strict=True)
    inputs = torch.tensor(x, requires_grad=True)
    tables = getattr(peer, f"{prefix}RotaryEmbedding")(peer_config)(inputs, torch.tensor(positions))
    mask = torch.where(torch.tensor(seen), 0.0, -torch.inf)[:, None]
    out, _ = layer(hidden_states=inputs, position_embeddings=tables, attention_mask=mask)
    out.backward(torch.tensor(d_out))
    gradients = {name: value.grad.numpy() for name, value in layer.named_parameters()}
    return gradients | {"out": out.detach().numpy(), "input": inputs.grad.numpy()}
