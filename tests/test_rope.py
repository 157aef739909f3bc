"""YaRN by hand and against transformers' numbers, and interleaved channels."""

import jax.numpy as jnp
import numpy as np
import pytest

from omnijax.errors import UserError
from omnijax.nn.rope import (
    YarnScaling,
    attention_factor,
    deinterleave,
    inverse_frequencies,
    magnitude,
    rotate,
    rotation,
)

GPT_OSS = YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)
DEEPSEEK = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)


def test_yarn_by_hand() -> None:
    """At theta 10,000 and width 8 the pairs turn 159, 15.9, 1.59 and 0.159 times in 1,000 positions."""
    plain = np.array([1, 0.1, 0.01, 0.001])
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=1000, truncate=False)
    first, last = np.log10(1000 / (2 * np.pi * np.array([32, 1])))  # indices of the pairs that turn so often
    kept = np.array([1, (last - 1) / (last - first), (last - 2) / (last - first), 0])
    np.testing.assert_allclose(inverse_frequencies(8, 10000.0, yarn), plain * (kept + (1 - kept) / 4), rtol=1e-6)
    whole = YarnScaling(factor=4.0, original_max_position_embeddings=1000)  # from 0.697 down to 0, 2.2 up to 3
    expected = plain * [1, 2 / 3 + 1 / 12, 1 / 3 + 1 / 6, 1 / 4]
    np.testing.assert_allclose(inverse_frequencies(8, 10000.0, whole), expected, rtol=1e-6)


# From `transformers.modeling_rope_utils` 5.24: frequencies by index of their pair, and the attention factor.
PEER = {
    "gpt-oss": (
        (64, 150000.0, GPT_OSS),
        {
            0: 1.0,
            8: 0.050813273,
            9: 0.031705696,
            15: 0.0010526022,
            17: 1.2931869e-4,
            18: 3.8308812e-5,
            31: 3.0235114e-7,
        },
        1.3465735902799727,
    ),
    "deepseek": (
        (64, 10000.0, DEEPSEEK),
        {0: 1.0, 10: 0.056234129, 11: 0.039006926, 17: 0.0035619973, 22: 1.7782794e-4, 23: 3.3338034e-5},
        1.0,
    ),
    "mscale": (
        (12, 10000.0, YarnScaling(4.0, 64, mscale=0.707, mscale_all_dim=0.5)),
        {0: 1.0, 1: 0.13465215, 2: 0.011603971, 3: 0.0024999999, 5: 1.1603974e-4},
        1.0268361529030026,
    ),
}


@pytest.mark.parametrize("name", PEER)
def test_yarn_gives_the_numbers_of_transformers(name: str) -> None:
    arguments, frequencies, factor = PEER[name]
    found = inverse_frequencies(*arguments)
    np.testing.assert_allclose(found[list(frequencies)], list(frequencies.values()), rtol=1e-6)
    assert attention_factor(arguments[2]) == pytest.approx(factor, rel=1e-12)


def test_the_factor_of_attention() -> None:
    assert attention_factor(None) == 1
    assert magnitude(1.0) == 1
    assert magnitude(np.exp(3), 0.5) == pytest.approx(1.15)
    assert attention_factor(YarnScaling(np.exp(2), 8)) == pytest.approx(1.2)
    assert attention_factor(YarnScaling(np.exp(2), 8, mscale=3.0)) == pytest.approx(1.2)
    assert attention_factor(YarnScaling(np.exp(2), 8, mscale=3.0, mscale_all_dim=1.0)) == pytest.approx(1.6 / 1.2)
    assert attention_factor(YarnScaling(np.exp(2), 8, mscale=3.0, mscale_all_dim=1.0, attention_factor=0.7)) == 0.7


def test_rotations_carry_the_factor_in_float32() -> None:
    positions = np.array([[0, 4095, 131071]])
    frequencies = inverse_frequencies(64, 150000.0, GPT_OSS)
    phase = positions[..., None] * frequencies.astype(np.float64)
    for found, expected in zip(
        rotation(jnp.asarray(positions), frequencies, 1.3), (np.cos(phase), np.sin(phase)), strict=True
    ):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, 1.3 * expected, atol=1e-2)


def test_interleaved_channels_are_pairs() -> None:
    """Channels 2 i and 2 i + 1 are the two parts of one complex number; products tell the distance of two."""
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, 1, 4, 3, 6))
    positions = np.array([[3, 4, 9, 17]], np.int32)
    turns = np.exp(1j * positions[:, :, None, None] * 100.0 ** (-np.arange(3) / 3))
    by_number = [(x[..., ::2] + 1j * x[..., 1::2]) * turns for x in (q, k)]
    expected = np.einsum("bshi,bthi->bhst", by_number[0], by_number[1].conj()).real
    by = rotation(jnp.asarray(positions), inverse_frequencies(6, 100.0))
    turned = [rotate(deinterleave(jnp.asarray(x, jnp.float32)), by) for x in (q, k)]
    np.testing.assert_allclose(jnp.einsum("bshd,bthd->bhst", *turned), expected, atol=1e-4)


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"beta_fast": 1.0}, {"beta_slow": 0.0}])
def test_numbers_that_make_no_ramp_are_refused(wrong: dict) -> None:
    with pytest.raises(
        UserError, match="needs factor >= 1, a positive original context, and 0 < beta_slow < beta_fast"
    ):
        YarnScaling(**{"factor": 2.0, "original_max_position_embeddings": 8} | wrong)
