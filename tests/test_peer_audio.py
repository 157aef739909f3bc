"""Sounds become the frames and token counts that transformers makes. Needs the extra `peer`; run with `-m peer`."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from models.audio import mel
from models.audio.processor import TOKENS, Qwen2_5OmniAudioProcessor, Qwen3OmniAudioProcessor, WhisperProcessor
from omnijax.data.sample import MediaReference, Part, RowId
from omnijax.data.tokenizer import TokenizerFile
from tests.test_chat import byte_pairs, save
from tests.test_media import wav

pytestmark = pytest.mark.peer

LENGTHS = [800, 15840, 16000, 16161, 48123, 480000, 35 * 16000 + 77]  # samples, from 0.05 s to 35 s


ROW = RowId("source", "a.jsonl", 7)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    pairs = byte_pairs()
    processors = (WhisperProcessor(), Qwen3OmniAudioProcessor())
    names = dict.fromkeys(getattr(processor, name) for processor in processors for name in TOKENS)
    pairs.add_special_tokens(["<|endoftext|>", *names])
    return save(pairs, tmp_path_factory.mktemp("tokenizer"))


def chirp(length: int) -> np.ndarray:
    """From 80 Hz to 7 kHz, whatever the length."""
    time = np.arange(length) / mel.RATE
    return (0.6 * np.sin(2 * np.pi * (80 + 3460 * time / time[-1]) * time)).astype(np.float32)


def speech(length: int) -> np.ndarray:
    """Syllables of a voice with harmonics, breath noise, and silence between them."""
    time = np.arange(length) / mel.RATE
    voice = sum(np.sin(2 * np.pi * 140 * k * time + k) / k for k in range(1, 25))
    noise = np.random.default_rng(0).standard_normal(length)
    loudness = np.abs(np.sin(2 * np.pi * 3 * time)) * (np.sin(2 * np.pi * 0.7 * time) >= 0)
    return (0.2 * loudness * (voice + 0.1 * noise)).astype(np.float32)


def extractor(bins: int, **options: Any) -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=bins, **options)


def check(found: np.ndarray, sound: np.ndarray, peer: Any) -> None:
    """Frames of a whole sound. transformers computes in float64 without torch, and in float32 with it.

    The noise of float32 shows where a pure tone leaves most bins empty, at the floor of 1e-8 of the loudest.
    """
    np.testing.assert_allclose(found, peer._np_extract_fbank_features(sound[None], "cpu")[0], atol=1e-6)
    np.testing.assert_allclose(found, peer._torch_extract_fbank_features(sound[None])[0], atol=1e-4)
    assert found.dtype == np.float32


def joined(clip: Any) -> np.ndarray:
    return np.concatenate([unit[:, :valid] for unit, valid in zip(clip.features, clip.unit_valid, strict=True)], axis=1)


@pytest.mark.parametrize("make", [chirp, speech])
@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("length", LENGTHS)
def test_log_mel_frames(length: int, bins: int, make: Any) -> None:
    sound = make(length)
    check(mel.log_mel(sound, bins), sound, extractor(bins))


@pytest.mark.parametrize("length", LENGTHS)
def test_whisper_hears_windows(length: int) -> None:
    sound, peer = speech(length), extractor(80)
    clip = mel.whisper(sound)
    assert len(clip.features) == -(-length // 480000)
    for number, window in enumerate(clip.features):
        part = sound[480000 * number : 480000 * (number + 1)]
        inputs = peer(part, sampling_rate=mel.RATE, return_attention_mask=True, return_tensors="np")
        np.testing.assert_allclose(window, inputs["input_features"][0], atol=1e-4)
        assert clip.unit_valid[number] == inputs["attention_mask"].sum()


@pytest.mark.parametrize("length", LENGTHS)
def test_qwen2_5_omni_hears_chunks_of_a_sound_and_silence(length: int) -> None:
    sound, peer = speech(length), extractor(128, chunk_length=40)
    inputs = peer(sound, sampling_rate=mel.RATE, return_attention_mask=True, return_tensors="np")
    expected = inputs["input_features"][0][:, inputs["attention_mask"][0] == 1]
    clip = mel.qwen2_5_omni(sound)
    np.testing.assert_allclose(joined(clip), expected, atol=1e-4)
    assert clip.tokens == processing("qwen2_5_omni")._get_feat_extract_output_lengths(expected.shape[1])


@pytest.mark.parametrize("length", LENGTHS)
def test_qwen3_omni_hears_chunks_of_a_sound(length: int) -> None:
    sound, peer = speech(length), extractor(128)
    options = {"padding": True, "truncation": False, "return_attention_mask": True, "return_tensors": "np"}
    inputs = peer(sound, sampling_rate=mel.RATE, **options)
    assert inputs["attention_mask"].all()
    clip = mel.qwen3_omni(sound)
    np.testing.assert_allclose(joined(clip), inputs["input_features"][0], atol=1e-4)
    assert clip.tokens == processing("qwen3_omni_moe")._get_feat_extract_output_lengths(int(clip.unit_valid.sum()))


@pytest.mark.parametrize("seconds", [0.05, 0.99, 1.00, 1.01, 29, 31, 301])
@pytest.mark.parametrize("family", ["whisper", "qwen2_5_omni", "qwen3_omni_moe"])
def test_files_of_sound_have_the_frames_and_token_counts_of_processors(
    family: str, seconds: float, tokenizer: TokenizerFile
) -> None:
    """Whisper's, window by window, and those of the omni models, which are told to leave nothing out."""
    sound = speech(round(seconds * mel.RATE))
    part = Part("audio", "user", 0, False, media=MediaReference(data=wav(sound, subtype="FLOAT")))
    options: dict[str, Any] = {"sampling_rate": mel.RATE, "return_attention_mask": True, "return_tensors": "np"}
    if family == "whisper":
        found = WhisperProcessor().load(part, ROW, tokenizer)
        windows = [sound[start : start + 480000] for start in range(0, len(sound), 480000)]
        inputs = [extractor(80)(window, **options) for window in windows]
        np.testing.assert_allclose(
            found.media.features, np.concatenate([each["input_features"] for each in inputs]), atol=1e-4
        )
        frames = [int(each["attention_mask"].sum()) for each in inputs]
        assert found.media.unit_valid.tolist() == frames
        # A window's second convolution has stride 2, so its last feature is of one frame or two.
        assert found.tokens.placeholder.sum() == sum(-(-count // 2) for count in frames)
        return
    if family == "qwen2_5_omni":
        found = Qwen2_5OmniAudioProcessor().load(part, ROW, tokenizer)
        inputs = extractor(128, chunk_length=302)(sound, **options)
    else:
        found = Qwen3OmniAudioProcessor().load(part, ROW, tokenizer)
        inputs = extractor(128)(sound, padding=True, truncation=False, **options)
    expected = inputs["input_features"][0][:, inputs["attention_mask"][0] == 1]
    np.testing.assert_allclose(joined(found.media), expected, atol=1e-4)
    count = processing(family)._get_feat_extract_output_lengths(expected.shape[1])
    assert found.tokens.placeholder.sum() == count


def test_token_counts_of_every_length_up_to_six_minutes() -> None:
    frames = np.arange(1, 36000)
    for family, tokens in (("qwen2_5_omni", mel.qwen2_5_omni_tokens), ("qwen3_omni_moe", mel.qwen3_omni_tokens)):
        expected = processing(family)._get_feat_extract_output_lengths(frames)
        np.testing.assert_array_equal([tokens(int(count)) for count in frames], expected)


@pytest.mark.parametrize("family", ["whisper", "qwen2_5_omni", "qwen3_omni_moe"])
def test_sounds_in_one_row_have_the_tokens_of_transformers_towers(family: str, tmp_path: Path) -> None:
    """Units and windows of their real sizes, in a narrow tower; every token, and as many as the clip counts."""
    import jax
    import jax.numpy as jnp
    import torch
    from safetensors.torch import save_file

    from models.audio.qwen2_5_omni import Qwen2_5OmniAudio
    from models.audio.qwen3_omni import Qwen3OmniAudio
    from models.audio.whisper import WhisperEncoder
    from omnijax import hf
    from omnijax.batch import Media

    part, tower, prefix, make = {
        "whisper": ("Whisper", WhisperEncoder, "model.encoder.", mel.whisper),
        "qwen2_5_omni": ("Qwen2_5OmniAudio", Qwen2_5OmniAudio, "thinker.audio_tower.", mel.qwen2_5_omni),
        "qwen3_omni_moe": ("Qwen3OmniMoeAudio", Qwen3OmniAudio, "thinker.audio_tower.", mel.qwen3_omni),
    }[family]
    name = "WhisperConfig" if family == "whisper" else f"{part}EncoderConfig"
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32}
    sizes |= {"output_dim": 24, "downsample_hidden_size": 8} if family != "whisper" else {}
    torch.manual_seed(0)
    config = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), name)(**sizes)
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    peer = getattr(modeling, f"{part}Encoder")(config).eval()
    state = {f"{prefix}{key}": 3 * value for key, value in peer.state_dict().items()}
    peer.load_state_dict({key.removeprefix(prefix): value for key, value in state.items()})
    save_file(state, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)

    lengths = [800, 15840, 16161] if family == "whisper" else [800, 15840, 16000, 16161, 31 * 16000, 9 * 16000 + 99]
    clips = [make(speech(length)) for length in lengths]
    with torch.no_grad():
        if family == "whisper":
            windows = torch.tensor(np.concatenate([clip.features for clip in clips]))
            expected = [x[: clip.tokens] for x, clip in zip(peer(windows).last_hidden_state, clips, strict=True)]
        else:
            frames = torch.tensor(np.concatenate([joined(clip) for clip in clips], axis=1))
            counts = torch.tensor([int(clip.unit_valid.sum()) for clip in clips])
            expected = [peer(frames, feature_lens=counts).last_hidden_state]
    segments = np.repeat(np.arange(1, len(clips) + 1, dtype=np.int32), [len(clip.features) for clip in clips])
    names = ("features", "unit_positions", "unit_grid", "unit_valid")
    units = {name: np.concatenate([getattr(clip, name) for clip in clips])[None] for name in names}
    media = jax.tree.map(jnp.asarray, Media(**units, unit_segments=segments[None]))
    found = np.asarray(jax.jit(hf.load(tower, tmp_path))(media))[0]
    starts = np.cumsum([0, *(clip.encoded for clip in clips)])
    assert len(found) == starts[-1]
    tokens = np.concatenate(
        [found[start : start + clip.tokens] for start, clip in zip(starts[:-1], clips, strict=True)]
    )
    wanted = torch.cat(expected).numpy()
    assert tokens.shape == wanted.shape
    assert np.abs(tokens - wanted).max() <= 5e-5 * np.abs(wanted).max()


def processing(family: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{family}.processing_{family}")
