"""Patterns name parameters by the numbers of layers, whatever stacks these are in."""

from typing import Any

import pytest

from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from omnijax import parameters
from omnijax.errors import UserError
from omnijax.patterns import named, part_of
from tests.test_vision_language import TINY

SIZES: dict[str, Any] = {
    "vocab_size": 56,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
}
DENSE = Qwen3Config(**SIZES)
EVERY_SECOND = Qwen3MoeConfig(
    **SIZES, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=2
)


def described(config: Any, splits: tuple[int, ...] = ()):
    return parameters.describe(parameters.abstract_model(config, splits=splits))


@pytest.mark.parametrize(
    ("pattern", "starts", "ends"),
    [
        ("*", ("",), ("",)),
        ("layers", ("stacks.",), ("",)),
        ("embed_tokens", ("embed_tokens",), ("",)),
        ("*.q_proj", ("stacks.",), (".self_attn.q_proj.kernel",)),
        ("*_proj", ("stacks.",), ("_proj.kernel",)),
        ("*.self_attn.*.scale", ("stacks.",), ("_norm.scale",)),
        ("layers.2-3", ("stacks.1.",), ("",)),
        ("layers.-3.mlp", ("stacks.0.", "stacks.1."), (".mlp.gate_proj.kernel", "up_proj.kernel", "down_proj.kernel")),
        ("layers.4-", ("stacks.2.",), ("",)),
        ("*.2-.mlp.up_proj.kernel", ("stacks.1.", "stacks.2."), ("up_proj.kernel",)),
    ],
)
def test_what_a_pattern_names(pattern: str, starts: tuple[str, ...], ends: tuple[str, ...]) -> None:
    found = described(DENSE, splits=(2, 4))
    expected = {path for path in found if path.startswith(starts) and path.endswith(ends)}
    assert set(named([pattern], found, "Tune.freeze")) == expected
    assert expected


def test_the_last_pattern_counts() -> None:
    found = named(["*", "*.mlp", "layers.4-"], described(DENSE, splits=(4,)), "Tune.rates")
    assert found["norm.scale"] == "*"
    assert found["stacks.0.blocks.0.mlp.up_proj.kernel"] == "*.mlp"
    assert found["stacks.1.blocks.0.mlp.up_proj.kernel"] == "layers.4-"


def test_layers_of_a_pattern_are_numbered_one_by_one() -> None:
    """Layers 0, 2 and 4 are dense, 1, 3 and 5 have experts: one stack, in which each kind is an array of its own."""
    found = described(EVERY_SECOND)
    assert set(named(["*.experts"], found, "")) == {path for path in found if ".blocks.1.mlp.experts." in path}
    cut = described(EVERY_SECOND, splits=(2,))
    assert {path.split(".mlp")[0] for path in named(["layers.2-5.mlp"], cut, "")} == {
        "stacks.1.blocks.0",
        "stacks.1.blocks.1",
    }


def test_parts_and_towers() -> None:
    found = described(TINY["qwen3_vl"])
    assert set(map(part_of, found)) == {"encoders.image", "backbone"}
    assert set(map(part_of, described(DENSE))) == {"model"}
    for pattern, part in (("encoders", "encoders.image"), ("encoders.*", "encoders.image"), ("backbone", "backbone")):
        assert set(named([pattern], found, "")) == {path for path in found if part_of(path) == part}
    # The tower's own stacks are layer 0, then 1 and 2; the backbone's first two layers are a stack of their own.
    assert {path.split(".blocks")[0] for path in named(["encoders.image.layers.1-2"], found, "")} == {
        "encoders.image.stacks.1"
    }
    assert {path.split(".blocks")[0] for path in named(["backbone.layers.2"], found, "")} == {"backbone.stacks.1"}


@pytest.mark.parametrize(
    ("config", "pattern", "message"),
    [
        (DENSE, "layers.2-3", r"'layers.2-3' names some of layers.0-5, .* not all; add 2, 4 to Compute.splits"),
        (DENSE, "layers.4-.mlp", "add 4 to Compute.splits"),
        (EVERY_SECOND, "layers.-3", "add 4 to Compute.splits"),
        (EVERY_SECOND, "layers.-2", "a pattern of 2 layers .* layer 2 or 4 in place of 3"),
        (DENSE, "*.qproj", r"names no parameter of this model; did you mean '\*.q_proj'"),
        (DENSE, "layers.8-9", "did you mean 'layers.0-5'"),
        (DENSE, "vision", "its parts are embed_tokens, lm_head, norm, layers"),
        (TINY["qwen3_vl"], "encoder.image", "did you mean 'encoders.image'"),
        (TINY["qwen3_vl"], "encoders.image.layers.2", "names some of encoders.image.layers.1-2, .* name the whole"),
    ],
)
def test_mistakes_are_one_line(config: Any, pattern: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        named([pattern], described(config), "Tune.freeze")
    assert str(raised.value).startswith("Tune.freeze: ")
    assert "\n" not in str(raised.value)
