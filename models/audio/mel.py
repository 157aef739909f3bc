"""Log-mel frames of a sound, as Whisper hears it, and the units its tower reads; numpy only.

A sound is one channel at 16 kHz, from -1 to 1. A frame is 10 ms.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped

from omnijax.errors import UserError

RATE = 16000
HOP = 160
WINDOW = 400
BLOCK = 4096  # frames transformed at once, so that an hour of sound takes little memory

# Frames of a chunk of Qwen3-Omni, and its tokens.
QWEN3_CHUNK, QWEN3_TOKENS = 100, 13


@dataclass(frozen=True, eq=False)
class Clip:
    """A sound as units, the fields as in `omnijax.batch.Media`; every unit but the last is full.

    unit_grid: (N, 1, 1)
    encoded:   how many features a tower makes of the N units, as many of each
    tokens:    how many of these, from the first on, stand for the sound
    """

    features: Float32[np.ndarray, "N bins frames"]
    unit_positions: Int32[np.ndarray, " N"]
    unit_grid: Int32[np.ndarray, "N 3"]
    unit_valid: Int32[np.ndarray, " N"]
    encoded: int
    tokens: int


def whisper(sound: Shaped[np.ndarray, "..."], bins: int = 80, frames: int = 3000) -> Clip:
    """Windows of `frames` (30 s), the last one filled up with silence; each has a spectrogram of its own.

    transformers leaves out what is beyond one window. Raises `UserError` for what is no sound.
    """
    sound, size = _checked(sound, least=1), frames * HOP
    count = -(-len(sound) // HOP)
    filled = np.pad(sound, (0, -len(sound) % size)).reshape(-1, size)
    features = np.concatenate([log_mel(window, bins) for window in filled], axis=1)
    return units(features, count, frames, encoded=halved(frames), tokens=whisper_tokens(count))


def qwen2_5_omni(sound: Shaped[np.ndarray, "..."], bins: int = 128, n_window: int = 100) -> Clip:
    """Chunks of `2 * n_window` frames, with silence behind the sound.

    transformers leaves out what is beyond the length its processor is set to. Raises `UserError` for what is no sound,
    and for one too short to have a token.
    """
    sound = _checked(sound, least=2 * HOP + 1)
    count = -(-len(sound) // HOP)
    # The frames behind the last one that counts may hold the loudest sound, which sets the floor for all.
    silence = np.zeros((count + 3) * HOP - len(sound), sound.dtype)
    features = log_mel(np.concatenate([sound, silence]), bins)[:, :count]
    return units(features, count, 2 * n_window, encoded=n_window // 2, tokens=qwen2_5_omni_tokens(count))


def qwen3_omni(sound: Shaped[np.ndarray, "..."], bins: int = 128) -> Clip:
    """Chunks of 100 frames; the sound is mirrored at its end, and samples that fill no frame make none.

    As in transformers for a sound that is processed alone; beside longer ones it has silence there. Raises `UserError`
    for what is no sound, and for one too short to have a token.
    """
    features = log_mel(_checked(sound, least=HOP), bins)
    count = features.shape[1]
    return units(features, count, QWEN3_CHUNK, encoded=QWEN3_TOKENS, tokens=qwen3_omni_tokens(count))


def halved(length: Any) -> Any:
    """How many frames a convolution of stride 2 makes of `length`, a number or an array of them."""
    return (length + 1) // 2


def whisper_tokens(frames: int) -> int:
    """Features of a clip of so many frames: one for each two (transformers gives 1500 a window, silence included)."""
    return halved(frames)


def qwen2_5_omni_tokens(frames: int) -> int:
    """Tokens of a clip of so many frames: one for each two that the convolutions leave."""
    return halved(frames) // 2


def qwen3_omni_tokens(frames: int) -> int:
    """Tokens of a clip of so many frames: 13 a chunk, and what three convolutions leave of the rest."""
    chunks, rest = divmod(frames, QWEN3_CHUNK)
    return QWEN3_TOKENS * chunks + halved(halved(halved(rest)))


def units(frames: Float32[np.ndarray, "bins T"], count: int, size: int, *, encoded: int, tokens: int) -> Clip:
    """The first `count` frames cut into units of `size`, the last one filled up with what follows, or zeros.

    `encoded` is the number of features a tower makes of one unit, `tokens` how many stand for the clip.
    """
    number = -(-count // size)
    filled = np.pad(frames[:, : number * size], ((0, 0), (0, max(0, number * size - frames.shape[1]))))
    features = np.ascontiguousarray(filled.reshape(len(frames), number, size).swapaxes(0, 1))
    positions = np.arange(number, dtype=np.int32)
    valid = np.minimum(count - size * positions, size).astype(np.int32)
    grid = np.tile(np.array([number, 1, 1], np.int32), (number, 1))
    return Clip(features, positions, grid, valid, number * encoded, tokens)


def log_mel(sound: Float[np.ndarray, " samples"], bins: int) -> Float32[np.ndarray, "bins frames"]:
    """Log-mel spectrogram of a whole sound, mirrored at both ends; `samples // 160` frames.

    Powers below 1e-8 of the loudest are raised to that, and the logarithm is scaled by `(log10 + 4) / 4` (Whisper,
    sec. 2.2 and its `audio.py`).
    """
    padded = np.pad(sound.astype(np.float64), WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: len(sound) // HOP * HOP : HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    powers = [
        np.abs(np.fft.rfft(windows[start : start + BLOCK] * hann)) ** 2 @ mel_filters(bins)
        for start in range(0, len(windows), BLOCK)
    ]
    logarithm = np.log10(np.maximum(np.concatenate(powers), 1e-10))
    return ((np.maximum(logarithm, logarithm.max() - 8) + 4) / 4).astype(np.float32).T


@functools.cache
def mel_filters(bins: int) -> Float[np.ndarray, "201 bins"]:
    """Triangles over the frequencies 0, 40, ... 8000 Hz, evenly spaced in mel and each of area 1 (Slaney 1998).

    The mel scale is linear up to 1000 Hz, 15 mel, and logarithmic above, 27 mel for a factor of 6.4.
    """
    mel = np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), bins + 2)
    edges = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
    above = edges - np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising, falling = -above[:, :-2] / np.diff(edges)[:-1], above[:, 2:] / np.diff(edges)[1:]
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2])


def _checked(sound: Shaped[np.ndarray, "..."], least: int) -> Float32[np.ndarray, " samples"]:
    """A sound of at least so many samples."""
    if sound.ndim != 1 or not np.issubdtype(sound.dtype, np.floating):
        raise UserError(
            f"a sound is {sound.dtype} of shape {list(sound.shape)}; give one channel of floating-point samples from "
            "-1 to 1"
        )
    if len(sound) < least:
        raise UserError(
            f"a sound has {len(sound)} samples at {RATE} Hz; the shortest with a token has {least}: leave it out, or "
            "give a longer one"
        )
    if not np.isfinite(sound).all():
        raise UserError("a sound has samples that are not finite; decode it again, or leave it out")
    return sound.astype(np.float32)
