"""peft reads our adapters, and gives our logits. Needs the extra `peer`; run with `-m peer`."""

import importlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from models.llama import LlamaConfig
from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from omnijax import hf, lora, parameters, tune
from omnijax.config import Lora, Tune
from omnijax.hf_adapter import save_adapter
from omnijax.mesh import make_mesh
from sharding_rules import qwen2_5_vl, qwen3
from tests.test_peer import SIZES
from tests.test_peer_moe import CONFIGS as PEERS
from tests.test_vision_language import TINY

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

MOE = Qwen3MoeConfig(**SIZES, moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2)
CASES: dict[str, tuple[Any, Lora]] = {
    "llama": (LlamaConfig(**SIZES, mlp_bias=True), Lora(("*_proj",), rank=3, alpha=5.0, dropout=0.1)),
    "qwen3": (Qwen3Config(**SIZES), Lora(("*.q_proj", "*.down_proj"), rank=4, alpha=6.5, rslora=True)),
    "experts": (MOE, Lora(("*",), rank=3, alpha=7.0)),
    "shared experts": (PEERS["latent"], Lora(("*_proj", "*.experts"), rank=3, alpha=9.0)),
    "experts with biases": (PEERS["sinks, plain"], Lora(("*.experts", "*.o_proj"), rank=3, alpha=9.0)),
    "one of the experts' kernels": (MOE, Lora(("*.experts.down_kernel", "*.k_proj"), rank=3, rslora=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_peft_gives_our_logits(name: str, tmp_path: Path) -> None:
    import peft
    import torch
    import transformers

    config, settings = CASES[name]
    table = importlib.import_module(f"sharding_rules.{config.HF_TYPE}").table()
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    base = parameters.build_model(config, mesh, table, seed=1)
    model = tune.begin(base, Tune(lora=settings), mesh, table)
    graphdef, params = parameters.split(model)
    params = {
        path: 0.3 * jax.random.normal(jax.random.key(n), x.shape) if path.endswith("lora_b") else x
        for n, (path, x) in enumerate(params.items())
    }
    hf.save(base, tmp_path / "base")
    save_adapter(model, params, type(base), settings, tmp_path / "adapter", base=str(tmp_path / "base"))
    merged = parameters.merge(parameters.split(base)[0], lora.merged(model, params, settings))
    hf.save(merged, tmp_path / "merged")
    tokens = np.random.default_rng(0).integers(1, config.vocab_size, (2, 21))
    batch = hf.to_batch(base, {"input_ids": tokens})
    adapted = parameters.merge(graphdef, params)
    ours = np.asarray(adapted.logits(adapted(batch).hidden))
    plain = np.asarray(base.logits(base(batch).hidden))
    assert np.abs(ours - plain).max() > 0.05 * np.abs(plain).max()

    def load(folder: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, attn_implementation="eager")

    theirs = peft.PeftModel.from_pretrained(load("base"), tmp_path / "adapter")
    found = peft.get_peft_model_state_dict(theirs)
    assert sum(x.numel() for x in found.values()) == sum(
        x.size for path, x in params.items() if path.endswith(("lora_a", "lora_b"))
    )
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    for peer in (theirs, load("merged")):
        with torch.no_grad():
            logits = peer(torch.tensor(tokens)).logits.numpy()
        np.testing.assert_allclose(logits, ours, atol=5e-5 * np.abs(ours).max())


def test_our_first_adapters_are_as_theirs(tmp_path: Path) -> None:
    """The spread of A, and B of zeros."""
    import peft
    import transformers

    config = CASES["qwen3"][0]
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    base = parameters.build_model(config, mesh, qwen3.table(), seed=1)
    hf.save(base, tmp_path)
    names = ("q_proj", "o_proj", "down_proj")
    settings = peft.LoraConfig(r=32, target_modules=list(names))
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), settings)
    state = peft.get_peft_model_state_dict(theirs)
    model = tune.begin(base, Tune(lora=Lora(tuple(f"*.{name}" for name in names), rank=32)), mesh, qwen3.table())
    params = parameters.split(model)[1]
    for name in names:
        ours = np.asarray(next(x for path, x in params.items() if path.endswith(f"{name}.lora_a")))
        peers = np.concatenate([x.numpy().ravel() for key, x in state.items() if f"{name}.lora_A" in key])
        assert np.std(ours) == pytest.approx(np.std(peers), rel=0.05)
        assert np.abs(ours).max() == pytest.approx(np.abs(peers).max(), rel=0.02)
        assert not any(x.any() for key, x in state.items() if f"{name}.lora_B" in key)


def test_the_adapters_of_a_vision_language_model_find_their_places(tmp_path: Path) -> None:
    """In the tower, where queries, keys and values are one map, in its merger, and in the language model."""
    import peft
    import transformers

    table, settings = qwen2_5_vl.table(), Lora(("encoders.*.qkv", "*.merger", "backbone.*.v_proj"), rank=2)
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    base = parameters.build_model(TINY["qwen2_5_vl"], mesh, table, seed=1)
    model = tune.begin(base, Tune(lora=settings), mesh, table)
    params = parameters.split(model)[1]
    hf.save(base, tmp_path / "base")
    save_adapter(model, params, type(base), settings, tmp_path / "adapter")
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base")
    found = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(loaded, tmp_path / "adapter"))
    assert len(found) == 2 * (2 + 2 + 3)
    assert sum(x.numel() for x in found.values()) == sum(x.size for path, x in params.items() if lora.is_adapter(path))
    ours = np.asarray(params["encoders.image.stacks.0.blocks.0.attn.qkv.lora_a"][1])
    (peers,) = (x for key, x in found.items() if key.endswith("blocks.1.attn.qkv.lora_A.weight"))
    np.testing.assert_array_equal(peers.numpy(), ours.T)
