"""Operations counted one by one."""

import dataclasses
import itertools

import numpy as np
import pytest

from models.qwen3 import Qwen3Config
from omnijax import flops
from omnijax.parameters import abstract_model

SMALL = Qwen3Config(
    vocab_size=11,
    hidden_size=6,
    intermediate_size=10,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
WINDOWED = dataclasses.replace(SMALL, use_sliding_window=True, sliding_window=3, max_window_layers=1)
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2, 2, 2]], np.int32)


def pairs(window: int | None) -> int:
    """Query-key pairs of one head, by looking at each."""
    count = 0
    for row in SEGMENTS:
        for query, key in itertools.product(range(len(row)), repeat=2):
            same = row[query] == row[key] and row[query] > 0
            count += int(same and key <= query and (window is None or query - key < window))
    return count


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_attended_pairs(window: int | None) -> None:
    lengths = flops.document_lengths(SEGMENTS)
    assert sorted(lengths.tolist()) == [1, 2, 5, 7]
    assert flops.attended_pairs(lengths, window) == pairs(window)


@pytest.mark.parametrize("config", [SMALL, WINDOWED, dataclasses.replace(SMALL, tie_word_embeddings=True)])
def test_a_step_by_hand(config: Qwen3Config) -> None:
    # q, k, v, o: 6 x 32, 6 x 16, 6 x 16, 32 x 6; gate, up, down: 6 x 10 each; the head: 6 x 11
    weights = 3 * (192 + 96 + 96 + 192 + 3 * 60) + 66
    windows = [None, 3, 3] if config is WINDOWED else [None] * 3
    attention = sum(2 * 2 * 4 * 8 * pairs(window) for window in windows)  # scores and values, 4 heads of 8
    expected = 3 * (2 * weights * 15 + attention)  # 15 tokens are no padding
    cost = flops.forward_cost(abstract_model(config), config.attention_costs())
    assert flops.training_flops(cost, SEGMENTS) == expected


def test_padding_costs_nothing() -> None:
    cost = flops.forward_cost(abstract_model(SMALL), SMALL.attention_costs())
    assert flops.training_flops(cost, np.zeros((3, 5), np.int32)) == 0


def test_peaks() -> None:
    assert flops.peak_flops("NVIDIA H100 80GB HBM3", None) == 989e12
    assert flops.peak_flops("NVIDIA H200", None) == 989e12
    assert flops.peak_flops("cpu", None) is None
    assert flops.peak_flops("cpu", 1.5) == 1.5e12
