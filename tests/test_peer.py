"""transformers reads what we write: no warning, the same logits. Needs the extra `peer`; run with `-m peer`."""

import json
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest

import models
from models.llama import LlamaConfig
from models.qwen2 import Qwen2Config
from models.qwen3 import Qwen3Config
from omnijax import hf
from omnijax.mesh import make_mesh
from omnijax.nn.rope import Llama3Scaling
from omnijax.parameters import build_model
from sharding_rules import qwen3 as rules
from tests import laws

pytestmark = pytest.mark.peer

SIZES = {
    "vocab_size": 88,
    "hidden_size": 60,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
FRESH = {
    "llama": LlamaConfig(**SIZES, mlp_bias=True, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 32)),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}
CASES = sorted(path.parent for path in laws.GOLDEN.glob("*/*/case.json"))


def peer_logits(folder: Path, tokens: np.ndarray, caplog: pytest.LogCaptureFixture) -> np.ndarray:
    """Logits of transformers; a missing, unexpected or mismatched tensor, or any warning, fails."""
    import torch
    import transformers

    logging.getLogger("transformers").propagate = True
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype="auto", attn_implementation="eager"
        )
    assert not any(report.values()), report
    assert not caplog.records, caplog.text
    with torch.no_grad():
        return model.float()(torch.tensor(tokens)).logits.numpy()


def check(model, folder: Path, vocab_size: int, caplog: pytest.LogCaptureFixture) -> None:
    tokens = np.random.default_rng(0).integers(1, vocab_size, (2, 21))
    expected = peer_logits(folder, tokens, caplog)
    logits = np.asarray(model.logits(model(hf.to_batch(model, {"input_ids": tokens})).hidden))
    np.testing.assert_allclose(logits, expected, atol=5e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}-{case.name}")
def test_a_round_trip_changes_nothing(case: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = hf.load(models.family_of(case), case)
    hf.save(model, tmp_path / "out", like=case)
    check(model, tmp_path / "out", model.config.vocab_size, caplog)


@pytest.mark.parametrize("name", FRESH)
def test_a_model_made_here_runs_there(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, mesh = FRESH[name], make_mesh(data=1, devices=_first_device())
    model = build_model(config, mesh, rules.table(), seed=1)
    hf.save(model, tmp_path / "out", shard_bytes=20_000)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == name
    check(model, tmp_path / "out", config.vocab_size, caplog)


@pytest.mark.parametrize("head", ["with lm_head", "without lm_head"])
@pytest.mark.parametrize("tied", [True, False, None])
def test_tied_and_untied_heads_agree(tied: bool | None, head: str, tmp_path: Path, caplog) -> None:
    """Every combination of `tie_word_embeddings` and a stored head that transformers loads gives its logits."""
    from safetensors.numpy import load_file, save_file

    case = laws.GOLDEN / "qwen3" / ("untied" if head == "with lm_head" and not tied else "tied")
    config = json.loads((case / "config.json").read_text())
    del config["tie_word_embeddings"]
    if tied is not None:
        config["tie_word_embeddings"] = tied
    tensors = load_file(case / "model.safetensors")
    if head == "with lm_head":
        tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if head == "without lm_head" and not tied:
        with pytest.raises(ValueError, match=r"1 tensors are missing: lm_head.weight"):
            hf.load(models.family_of(folder), folder)
        return
    check(hf.load(models.family_of(folder), folder), folder, config["vocab_size"], caplog)


def _first_device():
    import jax

    return jax.devices()[:1]
