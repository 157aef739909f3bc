"""DeepSeek-V3: parity with transformers, the laws, and what its config and checkpoints may hold."""

import functools
import json
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.deepseek_v3 import DeepseekV3, DeepseekV3Config
from omnijax import hf, parameters
from omnijax.errors import UserError
from omnijax.nn.rope import YarnScaling
from omnijax.nn.router import sigmoid_of_groups
from omnijax.sharding import AttentionLayout
from sharding_rules import deepseek_v3 as rules
from tests import laws
from tests.meshes import MESHES

SIZES = {
    "vocab_size": 208,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 10,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 56,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "initializer_range": 0.05,
}
YARN = YarnScaling(factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.7)
CONFIGS = {
    "yarn": DeepseekV3Config(**SIZES, q_lora_rank=48, rope_scaling=YARN),
    "whole queries": DeepseekV3Config(**SIZES, q_lora_rank=None, norm_topk_prob=False, rope_interleave=False),
}
CASES = sorted((laws.GOLDEN / "deepseek_v3").iterdir())


@functools.cache
def one_device(name: str) -> dict:
    return laws.run(CONFIGS[name], rules.table(), None)


@pytest.mark.parametrize("batch", [pytest.param("padded", marks=pytest.mark.full), "packed"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(case: Path, batch: str) -> None:
    laws.parity(case, batch)


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


def test_corrections_move_by_a_thousandth_a_step() -> None:
    """In three steps, against an even load: -3, -1, 1 or 3 thousandths, or between where a load was just the mean."""
    correction = one_device("yarn")["parameters"]["stacks.1.blocks.0.mlp.router.correction"]
    assert correction.shape == (2, 16)
    thousandths = np.round(correction * 1000)
    np.testing.assert_allclose(correction, thousandths / 1000, atol=1e-7)
    assert set(np.unique(thousandths)) <= set(range(-3, 4))
    assert thousandths.min() < 0 < thousandths.max()


def test_groups_are_chosen_first_and_by_their_best_two() -> None:
    """Scores 0.9, 0.1 | 0.6, 0.5 | 0.2, 0.3 and a correction that turns all sums negative, and the order of two."""
    scores = np.array([[0.9, 0.1, 0.6, 0.5, 0.2, 0.3]])
    correction = np.array([-2, -2, -2, -1.8, -2, -2])
    options = {"top_k": 2, "groups": 3, "top_groups": 1, "renormalise": False, "scale": 2.5}
    logits = jnp.asarray(np.log(scores / (1 - scores)), jnp.float32)
    choice, weight = sigmoid_of_groups(logits, jnp.asarray(correction, jnp.float32), **options)
    # Groups: -1.1 - 1.9, -1.4 - 1.3, -1.8 - 1.7; the second wins, and weighs without the correction.
    np.testing.assert_array_equal(choice, [[3, 2]])
    np.testing.assert_allclose(weight, [[2.5 * 0.5, 2.5 * 0.6]], rtol=1e-6)
    weight = sigmoid_of_groups(logits, jnp.asarray(correction, jnp.float32), **options | {"renormalise": True})[1]
    np.testing.assert_allclose(weight, [[2.5 * 5 / 11, 2.5 * 6 / 11]], rtol=1e-6)


def test_the_published_sizes_make_671_billion_parameters() -> None:
    """Table 1 and sec. 4.2 of the report; without the module that predicts a second token."""
    shapes = parameters.shapes(parameters.abstract_model(DeepseekV3Config()))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == pytest.approx(671e9, abs=0.5e9)
    assert shapes["stacks.0.blocks.0.mlp.up_proj.kernel"] == (3, 7168, 18432)
    assert shapes["stacks.1.blocks.0.mlp.experts.gate_up_kernel"] == (58, 256, 7168, 2, 2048)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_both_spellings_of_a_config_are_one(case: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [(case / name).read_text() for name in ("config.json", "config_hub_style.json")]
    with caplog.at_level(logging.WARNING):
        first, second = (DeepseekV3Config.from_hf(json.loads(text)) for text in texts)
    assert first == second
    assert not caplog.records
    assert DeepseekV3Config.from_hf(first.to_hf()) == first
    if case.name == "noqlora_yarn":
        assert first.rope_scaling == YarnScaling(8.0, 16, mscale=1.0, mscale_all_dim=1.0)
        assert first.to_hf()["q_lora_rank"] is None
        assert first.to_hf()["max_position_embeddings"] == 128


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 12}, "head_dim = 12 must be 10, or left out"),
        ({"qk_head_dim": 10}, "qk_head_dim = 10 must be 22, or left out"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4 must be 8, as the others are"),
        ({"q_lora_rank": 0}, "q_lora_rank = 0 must be positive"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace = 4 must be 0 to 3"),
        ({"n_group": 16}, "n_group = 16 must be 1 to 8"),
        ({"n_group": 3}, "16 experts do not make 3 groups of equally many"),
        ({"topk_group": 5}, "topk_group = 5 must be 1 to 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 must be 1 to 8"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported for this family, only 'sigmoid'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported for this family"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope type 'yarn' lacks original_max_position_embeddings"),
        ({"rope_scaling": YARN.__dict__ | {"type": "yarn", "finetuned": True}}, "has finetuned, which is none of"),
    ],
)
def test_what_it_has_not_is_refused(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DeepseekV3Config.from_hf(SIZES | change)


def test_a_model_of_one_kind_of_layer_is_one_stack() -> None:
    for dense, kind in ((0, "mlp.router.kernel"), (3, "mlp.up_proj.kernel")):
        config = DeepseekV3Config(**SIZES | {"first_k_dense_replace": dense})
        shapes = parameters.shapes(parameters.abstract_model(config))
        assert shapes[f"stacks.0.blocks.0.{kind}"][0] == 3
        assert not any(path.startswith("stacks.1") for path in shapes)


def test_checkpoints_may_hold_experts_in_one_tensor(tmp_path: Path) -> None:
    """As transformers has them in memory: gate rows first, then up."""
    tensors = load_file(CASES[0] / "model.safetensors")
    experts = range(len([name for name in tensors if "layers.1.mlp.experts" in name]) // 3)
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [[tensors.pop(f"{prefix}.{n}.{name}_proj.weight") for n in experts] for name in ("gate", "up", "down")]
        tensors[f"{prefix}.gate_up_proj"] = np.concatenate([np.stack(each[0]), np.stack(each[1])], axis=1)
        tensors[f"{prefix}.down_proj"] = np.stack(each[2])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((CASES[0] / "config.json").read_text())
    fused, single = (parameters.split(hf.load(DeepseekV3, path))[1] for path in (tmp_path, CASES[0]))
    for path, x in single.items():
        np.testing.assert_array_equal(fused[path], x)


def test_layers_that_predict_further_tokens_are_left_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published checkpoints hold one more layer than `num_hidden_layers`, for multi-token prediction in training."""
    case = CASES[0]
    tensors = load_file(case / "model.safetensors")
    count = json.loads((case / "config.json").read_text())["num_hidden_layers"]
    extra = {f"model.layers.{count}.{name}": np.ones((3, 2), np.float32) for name in ("eh_proj.weight", "enorm.weight")}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((case / "config.json").read_text())
    with caplog.at_level(logging.WARNING):
        model = hf.load(DeepseekV3, tmp_path)
    assert f"2 tensors of layers this family does without are left: model.layers.{count}.eh_proj.weight" in caplog.text
    kept = dict(hf.tensors(model, parameters.split(model)[1]))
    assert set(kept) == set(tensors)
