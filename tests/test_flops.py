"""Operations of a step, by hand and by counting."""

import dataclasses

import numpy as np
import pytest

from models.qwen2_vl import Qwen2VLConfig, Qwen2VLTextConfig
from models.qwen3 import Qwen3Config
from models.vision.qwen2_vl import Qwen2VLVisionConfig
from omnijax import parameters
from omnijax.config import Lora, Tune
from omnijax.flops import attended_pairs, document_lengths, forward_cost, peak_flops, training_flops
from omnijax.nn.rope import MultimodalRope
from omnijax.tune import tuned

CONFIG = Qwen3Config(
    vocab_size=11,
    hidden_size=6,
    intermediate_size=10,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
WINDOW = dataclasses.replace(CONFIG, use_sliding_window=True, sliding_window=2, max_window_layers=1)
# Queries and output 6 x 4 x 8, keys and values 6 x 2 x 8, three feed-forward maps 6 x 10; the head 11 x 6.
WEIGHTS = 3 * (2 * 192 + 2 * 96 + 3 * 60) + 66
# Scores and values: 4 heads x 8 channels, twice, in multiply-adds, which are two operations.
PAIR = 2 * (2 * 4 * 8)
# Documents of 3, 2 and 6 tokens, and one token of padding: 11 tokens, 6 + 3 + 21 pairs, 5 + 3 + 11 in a window of 2.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 7, 100])
def test_attended_pairs(window: int | None) -> None:
    lengths = np.array([1, 2, 7, 12], np.int32)
    counted = sum(
        key <= query and (window is None or query - key < window)
        for length in lengths
        for query in range(length)
        for key in range(length)
    )
    assert attended_pairs(lengths, window) == counted


def test_a_long_document_does_not_overflow() -> None:
    assert attended_pairs(np.array([1_000_000], np.int32), None) == 500_000_500_000


def test_document_lengths() -> None:
    assert sorted(document_lengths(SEGMENTS)) == [2, 3, 6]
    assert document_lengths(np.zeros((2, 4), np.int32)).size == 0
    assert sorted(document_lengths(np.array([[1, 2, 3, 4], [4, 4, 4, 4]]))) == [1, 1, 1, 1, 4]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("multiple", [1, 8])
def test_forward_cost(tied: bool, multiple: int) -> None:
    """The head counts once, tied or not; rows that fill up a vocabulary are no work of the model's."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    cost = forward_cost(parameters.abstract_model(config, vocab_multiple=multiple), config.attention_costs())
    assert cost.per_token == 2 * WEIGHTS
    assert cost.attention == ((None, PAIR),) * 3


@pytest.mark.parametrize(
    ("config", "pairs"), [(CONFIG, 3 * 30), (WINDOW, 30 + 2 * 19)], ids=["causal", "two layers slide"]
)
def test_training_flops(config: Qwen3Config, pairs: int) -> None:
    cost = forward_cost(parameters.abstract_model(config), config.attention_costs())
    assert training_flops(cost, SEGMENTS) == 3 * (2 * WEIGHTS * 11 + PAIR * pairs)
    assert training_flops(cost, np.zeros_like(SEGMENTS)) == 0


def test_the_units_of_an_encoder_count_for_themselves() -> None:
    """Patches of 3 x 2 x 2 x 2 values into a width of 8, two layers, and a merger of four patches at a time."""
    vision = Qwen2VLVisionConfig(depth=2, num_heads=2, patch_size=2, embed_dim=8, hidden_size=6, mlp_ratio=2)
    text = Qwen2VLTextConfig(
        vocab_size=11,
        hidden_size=6,
        intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_scaling=MultimodalRope((2, 1, 1)),
    )
    config = Qwen2VLConfig(text, vision, 7, 8, 9, 10)
    cost = forward_cost(parameters.abstract_model(config), config.attention_costs())
    of_a_patch = 24 * 8 + 2 * (4 * 8 * 8 + 2 * 8 * 16)
    merger = 32 * 32 + 32 * 6
    assert cost.per_unit == {"image": 2 * (of_a_patch + merger / 4)}
    assert cost.per_token == 2 * WEIGHTS
    media = np.array([[1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0]], np.int32)
    more = training_flops(cost, SEGMENTS, {"image": media}) - training_flops(cost, SEGMENTS)
    assert more == 3 * 8 * cost.per_unit["image"]
    frozen = tuned(parameters.abstract_model(config), Tune(freeze=("encoders", "backbone.embed_tokens")))
    cost = forward_cost(frozen, config.attention_costs())
    assert training_flops(cost, SEGMENTS, {"image": media}) - training_flops(cost, SEGMENTS) == more / 3


LAYER = WEIGHTS // 3 - 22  # of one layer; the head is 66
ADAPTERS = 3 * 2 * (6 * 2 + 2 * 32)  # of 3 layers, for queries and the output, of rank 2


@pytest.mark.parametrize(
    ("tune", "per_token", "attention"),
    [
        (Tune(), 3 * WEIGHTS, 9),
        # No gradient of their own: two passes.
        (Tune(freeze=("layers",)), 2 * 3 * LAYER + 3 * 66, 9),
        (Tune(freeze=("lm_head",)), 3 * 3 * LAYER + 2 * 66, 9),
        (Tune(lora=Lora(("*.q_proj", "*.o_proj"), rank=2)), 2 * WEIGHTS + 3 * ADAPTERS, 9),
        # Layers before anything that is trained have no backward pass.
        (Tune(freeze=("layers.-1", "embed_tokens")), 2 * LAYER + 3 * LAYER + 3 * 66, 5),
        (Tune(freeze=("layers.-1",)), 2 * 2 * LAYER + 3 * LAYER + 3 * 66, 9),
        (Tune(freeze=("layers", "embed_tokens")), 3 * LAYER + 3 * 66, 3),
    ],
)
def test_what_is_frozen_costs_less(tune: Tune, per_token: int, attention: int) -> None:
    model = tuned(parameters.abstract_model(CONFIG, splits=(2,)), tune)
    cost = forward_cost(model, CONFIG.attention_costs())
    assert training_flops(cost, SEGMENTS) == 2 * per_token * 11 + attention * PAIR * 30


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", None, 989e12),
        ("NVIDIA H100 PCIe", None, 756e12),
        ("NVIDIA H200", None, 989e12),
        ("NVIDIA A100-SXM4-80GB", None, 312e12),
        ("NVIDIA B200", None, 2250e12),
        ("NVIDIA GB200", None, 2500e12),
        ("cpu", None, None),
        ("cpu", 0.5, 0.5e12),
        ("NVIDIA H100 80GB HBM3", 100.0, 100e12),
    ],
)
def test_peaks(kind: str, given: float | None, expected: float | None) -> None:
    assert peak_flops(kind, given) == expected
