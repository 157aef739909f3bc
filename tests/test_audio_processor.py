"""Sounds made ready for audio towers, alone and with pictures, by hand; `test_peer_audio` has transformers' numbers."""

import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from PIL import Image

from models.audio import mel
from models.audio.processor import Qwen2_5OmniAudioProcessor, Qwen3OmniAudioProcessor, WhisperProcessor
from models.vision.omni_processor import Qwen2_5OmniVisionProcessor, Qwen3OmniVisionProcessor
from models.vision.processor import Qwen2VLProcessor
from omnijax import config, ginfile
from omnijax.data.budgets import Budgets
from omnijax.data.media.audio import AudioLimits
from omnijax.data.media.image import ImageLimits
from omnijax.data.media.video import VideoLimits
from omnijax.data.omni_packing import FirstFit
from omnijax.data.processing import Processor, make_item, render_media
from omnijax.data.processors import Processors
from omnijax.data.sample import MediaReference, Part, RowId, Sample
from omnijax.data.templates import TEMPLATES
from omnijax.data.tokenizer import Bytes, TokenizerFile
from omnijax.errors import BadRow, UserError
from tests.test_chat import add_names, byte_pairs, save
from tests.test_media import encoded, make_clip, noise, wav

ROW = RowId("source", "a.jsonl", 7)
PROCESSORS = {
    "whisper": WhisperProcessor(),
    "qwen2_5_omni": Qwen2_5OmniAudioProcessor(),
    "qwen3_omni": Qwen3OmniAudioProcessor(),
}
NAMES = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerFile:
    pairs = add_names(byte_pairs())
    pairs.add_special_tokens(["<|video_pad|>", *NAMES])
    return save(pairs, tmp_path_factory.mktemp("tokenizer"))


def sound(seconds: float, seed: int = 0) -> Part:
    samples = np.random.default_rng(seed).standard_normal(round(seconds * 16000), dtype=np.float32) / 10
    return Part("audio", "user", 0, False, media=MediaReference(data=wav(samples, subtype="FLOAT")))


def said(text: str) -> Part:
    return Part("text", "user", 0, False, text)


def refusal(error: type[UserError], function, *arguments) -> str:
    with pytest.raises(error) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "seconds", "units", "tokens"),
    [
        ("whisper", 0.05, 1, 3),
        ("whisper", 29, 1, 1450),
        ("whisper", 31, 2, 1550),
        ("whisper", 301, 11, 15050),
        ("qwen2_5_omni", 0.05, 1, 1),
        ("qwen2_5_omni", 0.99, 1, 25),
        ("qwen2_5_omni", 1.01, 1, 25),
        ("qwen2_5_omni", 31, 16, 775),
        ("qwen2_5_omni", 301, 151, 7525),
        ("qwen3_omni", 0.05, 1, 1),
        ("qwen3_omni", 1.00, 1, 13),
        ("qwen3_omni", 1.01, 2, 14),
        ("qwen3_omni", 31, 31, 403),
        ("qwen3_omni", 301, 301, 3913),
    ],
)
def test_a_sound_of_any_length_is_heard_whole(family, seconds, units, tokens, tokenizer):
    processor = PROCESSORS[family]
    found = processor.load(sound(seconds), ROW, tokenizer)
    library = tokenizers.Tokenizer.from_file(tokenizer.path)
    own = [library.token_to_id(name) for name in (processor.start, processor.audio_token, processor.end)]
    assert found.tokens.tokens.tolist() == [own[0], *[own[1]] * tokens, own[2]]
    assert found.tokens.placeholder.tolist() == [False, *[True] * tokens, False]
    assert found.media.slots.tolist() == [-1, *range(tokens), -1]
    assert (found.modality, found.advance, found.notes) == ("audio", tokens + 2, ())
    assert found.positions.tolist() == list(range(tokens + 2))
    assert found.media.features.shape == (units, *processor.units["audio"].features)
    assert found.media.encoded == units * {"whisper": 1500, "qwen2_5_omni": 50, "qwen3_omni": 13}[family]
    assert found.media.unit_valid.sum() == round(seconds * 100)


@pytest.mark.parametrize("family", PROCESSORS)
def test_two_sounds_in_a_row_are_as_alone(family, tokenizer):
    processor = PROCESSORS[family]
    parts = [sound(1.01), sound(3.3, seed=1)]
    sample = Sample(ROW, (said("Hi."), parts[0], said("Then?"), parts[1]))
    rendered, media = render_media(sample, TEMPLATES["plain"], tokenizer, processor)
    item = make_item(rendered, media, ROW, 0, document=False)
    assert np.array_equal(item.positions, np.arange(item.tokens.size))
    whole, (first, second) = item.media["audio"], (processor.load(part, ROW, tokenizer).media for part in parts)
    for name in ("features", "unit_positions", "unit_grid", "unit_valid"):
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(first, name), getattr(second, name)]))
    slots = whole.slots[whole.slots >= 0]
    own = [each.slots[each.slots >= 0] for each in (first, second)]
    assert slots.tolist() == [*own[0], *(own[1] + first.encoded)]


def test_a_projector_makes_fewer_tokens(tokenizer):
    found = replace(PROCESSORS["whisper"], merged=4, start="", end="").load(sound(1.01), ROW, tokenizer)
    assert found.media.encoded == 375
    assert found.media.slots.tolist() == list(range(13))  # 51 features
    message = refusal(UserError, lambda: Qwen3OmniAudioProcessor(merged=2))
    assert "merged = 2 must divide the 13 features of a unit" in message
    joins = SimpleNamespace(encoders={"audio": SimpleNamespace(projector=SimpleNamespace(merged=2))})
    message = refusal(UserError, PROCESSORS["whisper"].check, tokenizer, joins)
    assert "merged = 1, and the model joins 2 features" in message


def test_what_is_no_sound_of_the_model_is_a_bad_row(tokenizer):
    load, part = PROCESSORS["qwen2_5_omni"].load, sound(1)
    assert "bytes: a sound has 160 samples at 16000 Hz; the shortest with a token has 321" in refusal(
        BadRow, load, sound(0.01), ROW, tokenizer
    )
    assert "has the part 'image', which the model does not read" in refusal(
        BadRow, load, replace(part, kind="image"), ROW, tokenizer
    )
    assert "answers with the part 'audio'" in refusal(BadRow, load, replace(part, trained=True), ROW, tokenizer)
    short = replace(PROCESSORS["whisper"], audio=AudioLimits(max_seconds=2.0))
    assert "is longer than max_seconds 2.0" in refusal(BadRow, short.load, sound(3), ROW, tokenizer)
    cut = replace(PROCESSORS["whisper"], audio=AudioLimits(max_seconds=2.0, longer="cut"))
    assert cut.load(sound(3), ROW, tokenizer).notes == ("cut",)


def test_a_processor_that_does_not_fit_is_one_line(tokenizer, tmp_path):
    good = PROCESSORS["qwen3_omni"]
    number = tokenizers.Tokenizer.from_file(tokenizer.path).token_to_id(good.audio_token)
    good.check(tokenizer, SimpleNamespace(audio_token_id=number))
    assert "is no token of Data.tokenizer" in refusal(UserError, good.check, Bytes(), None)
    assert "audio_token_id is 3" in refusal(UserError, good.check, tokenizer, SimpleNamespace(audio_token_id=3))
    assert "sample_rate = 8000 must be 16000" in refusal(
        UserError, lambda: WhisperProcessor(audio=AudioLimits(sample_rate=8000))
    )
    (tmp_path / "a.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom omnijax import config\nfrom omnijax.data import chat_source\n"
        "from models.audio import processor\nconfig.Data.source = @chat_source.Chat()\nchat_source.Chat.path = 'a'\n"
        "chat_source.Chat.processor = @processor.AudioProcessor()\n"
    )
    message = refusal(UserError, lambda: ginfile.load(tmp_path / "a.gin", [], root=config.Data))
    assert "processor.AudioProcessor is what several classes share" in message


def test_pictures_and_sounds_in_one_chat(tokenizer):
    vision = Qwen2VLProcessor(patch_size=2, image=ImageLimits(16, 256))
    both = Processors(vision, PROCESSORS["qwen2_5_omni"])
    assert isinstance(both, Processor)
    assert (list(both.units), both.position) == (["image", "audio"], (3,))
    picture = Part("image", "user", 0, False, media=MediaReference(data=encoded(Image.fromarray(noise(8, 16)))))
    sample = Sample(ROW, (picture, said("Hi."), sound(0.5), said("Then?"), picture))
    rendered, media = render_media(sample, TEMPLATES["plain"], tokenizer, both)
    item = make_item(rendered, media, ROW, 0, document=False)
    assert {name: (len(each.features), each.encoded) for name, each in item.media.items()} == {
        "image": (64, 16),
        "audio": (1, 50),
    }
    heard = item.media["audio"].slots >= 0
    assert heard.sum() == 12
    assert (item.positions[heard] == item.positions[heard][:, :1]).all()
    assert np.array_equal(np.diff(item.positions[heard][:, 0]), np.ones(11))
    # The picture's tokens, 2 x 4, take positions 1 to 4, as its longer side does.
    first = rendered.media[1][0]
    assert item.positions[first].tolist() == [6 + first - 10] * 3
    packer = FirstFit(Budgets(64, {"image": 64, "audio": 2}), both.units, both.position, look_ahead=1)
    row, _ = packer.next_row(lambda number: item if number == 0 else None, {})
    assert (row.arrays["slots.image"] >= 0).sum() == 16
    assert (row.arrays["slots.audio"] >= 0).sum() == 12
    assert row.arrays["media.audio.features"].shape == (2, 128, 200)
    assert "both vision and audio make units of 'image'" in refusal(UserError, Processors, vision, vision)


def test_positions_of_a_thinker_by_hand(tokenizer):
    """Four frames a second apart are 25 positions from each other; what follows goes on after the last of them."""
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "start": "<|vision_start|>"}
    limits = VideoLimits(16, 4096)
    vision = Qwen2_5OmniVisionProcessor(patch_size=2, window=4, video=limits, **names, end="<|vision_end|>")
    both = Processors(vision, PROCESSORS["qwen2_5_omni"])
    clip = make_clip(8, draw=lambda number: noise(16, 16) // 2 + np.uint8(9 * number), rate=2)
    part = Part("video", "user", 0, False, media=MediaReference(data=clip))
    rendered, media = render_media(Sample(ROW, (part, said("Hi."), sound(0.5))), TEMPLATES["plain"], tokenizer, both)
    item = make_item(rendered, media, ROW, 0, document=False)
    seen = item.media["image"].slots >= 0
    assert item.positions[seen, 0].tolist() == list(np.repeat([1, 26, 51, 76], 16))
    assert item.positions[seen, 1].tolist() == list(np.repeat([1, 2, 3, 4], 4)) * 4
    after = item.positions[seen.nonzero()[0][-1] + 1 :, 0]
    assert after.tolist() == list(range(77, 77 + after.size))
    thinker = SimpleNamespace(position_id_per_seconds=25, HF_TYPE="qwen2_5_omni_thinker")
    vision.check(tokenizer, thinker)
    assert "is for qwen2_vl, and the model is a qwen2_5_omni_thinker" in refusal(
        UserError, Qwen2VLProcessor().check, tokenizer, thinker
    )
    thinker.position_id_per_seconds = 13
    assert "tokens_per_second = 25 and the model's position_id_per_seconds = 13" in refusal(
        UserError, vision.check, tokenizer, thinker
    )
    pictures_only = Qwen3OmniVisionProcessor(patch_size=2, video=limits)
    assert "rows have no fractions of positions" in refusal(BadRow, pictures_only.load, part, ROW, tokenizer)


def test_workers_get_little_and_need_no_jax():
    assert len(pickle.dumps(Processors(Qwen2VLProcessor(), PROCESSORS["whisper"]))) < 3000
    modules = "models.audio.processor, models.vision.omni_processor, omnijax.data.processors"
    check = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
    assert AudioLimits().sample_rate == mel.RATE
