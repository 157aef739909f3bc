"""Frames of sounds, and the units they are cut into, without transformers; `test_peer_audio` compares more of them."""

import subprocess
import sys

import numpy as np
import pytest

from models.audio import mel
from omnijax.errors import UserError
from tests.laws import GOLDEN

MAKERS = {"whisper": mel.whisper, "qwen2_5_omni": mel.qwen2_5_omni, "qwen3_omni": mel.qwen3_omni}


def noise(length: int) -> np.ndarray:
    return np.random.default_rng(length).standard_normal(length, dtype=np.float32) / 10


def test_workers_need_no_jax():
    check = "import sys, models.audio.mel; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize("bins", [80, 128])
def test_frames_are_those_of_transformers(bins):
    reference = np.load(GOLDEN / "whisper" / "audio" / "mel.npz")
    found = mel.log_mel(reference["in/sound"], bins)
    np.testing.assert_allclose(found, reference[f"out/bins_{bins}"], atol=1e-6)


def test_a_long_sound_has_the_frames_of_its_parts():
    """Frames are made block by block: far from the ends of a part, where nothing is mirrored, nothing tells."""
    sound = noise((mel.BLOCK + 300) * mel.HOP)
    whole, start = mel.log_mel(sound, 8), mel.BLOCK - 100
    part = mel.log_mel(sound[start * mel.HOP :], 8)
    np.testing.assert_allclose(whole[:, start + 2 :], part[:, 2:], atol=1e-6)


# Samples; then by hand: full units, valid frames of the last unit, tokens.
@pytest.mark.parametrize(
    ("family", "seconds", "expected"),
    [
        ("whisper", 0.05, (0, 5, 3)),
        ("whisper", 30, (0, 3000, 1500)),
        ("whisper", 35, (1, 500, 1750)),
        ("qwen2_5_omni", 0.05, (0, 5, 1)),
        ("qwen2_5_omni", 0.99, (0, 99, 25)),
        ("qwen2_5_omni", 1.01, (0, 101, 25)),
        ("qwen2_5_omni", 31, (15, 100, 775)),
        ("qwen2_5_omni", 301, (150, 100, 7525)),
        ("qwen3_omni", 0.05, (0, 5, 1)),
        ("qwen3_omni", 0.99, (0, 99, 13)),
        ("qwen3_omni", 1.00, (0, 100, 13)),
        ("qwen3_omni", 1.01, (1, 1, 14)),
        ("qwen3_omni", 31, (30, 100, 403)),
        ("qwen3_omni", 301, (300, 100, 3913)),
    ],
)
def test_a_sound_is_cut_into_units(family, seconds, expected):
    full, last, tokens = expected
    clip = MAKERS[family](noise(round(seconds * mel.RATE)))
    size, encoded = {"whisper": (3000, 1500), "qwen2_5_omni": (200, 50), "qwen3_omni": (100, 13)}[family]
    assert clip.features.shape == (full + 1, 80 if family == "whisper" else 128, size)
    assert clip.unit_valid.tolist() == [size] * full + [last]
    assert clip.unit_positions.tolist() == list(range(full + 1))
    assert clip.unit_grid.tolist() == [[full + 1, 1, 1]] * (full + 1)
    assert (clip.encoded, clip.tokens) == (encoded * (full + 1), tokens)
    if family != "whisper":
        assert (clip.features[-1, :, last:] == 0).all()


def test_silence_behind_a_sound_is_heard_by_whisper():
    """Every frame of the window has a level, which stands 8 orders of magnitude below the loudest: (8 / 4) less."""
    clip = mel.whisper(noise(8000))
    np.testing.assert_allclose(clip.features[0, :, 60:], clip.features.max() - 2, atol=1e-6)


def test_a_click_at_the_end_sets_the_floor():
    """Qwen2.5-Omni's frames are those of a sound in a long silence, also where the loudest frame is not counted."""
    sound = noise(1600) * 1e-4
    sound[-1] = 1
    clip = mel.qwen2_5_omni(sound)
    expected = mel.log_mel(np.pad(sound, (0, 16000)), 128)
    assert expected.argmax() % expected.shape[1] == 10
    np.testing.assert_array_equal(clip.features[0, :, :10], expected[:, :10])


@pytest.mark.parametrize(
    ("family", "sound", "message"),
    [
        ("whisper", noise(0), "has 0 samples"),
        ("qwen2_5_omni", noise(320), "has 320 samples at 16000 Hz; the shortest with a token has 321"),
        ("qwen3_omni", noise(159), "the shortest with a token has 160"),
        ("qwen3_omni", np.zeros((2, 1600), np.float32), "float32 of shape [2, 1600]; give one channel"),
        ("qwen3_omni", np.zeros(1600, np.int16), "int16 of shape [1600]"),
        ("whisper", np.full(1600, np.nan, np.float32), "not finite"),
    ],
)
def test_what_is_no_sound_is_one_line(family, sound, message):
    with pytest.raises(UserError) as caught:
        MAKERS[family](sound)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("family", "shortest"), [("whisper", 1), ("qwen2_5_omni", 321), ("qwen3_omni", 160)])
def test_the_shortest_sound_has_a_token(family, shortest):
    assert MAKERS[family](noise(shortest)).tokens == 1
