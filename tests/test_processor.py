"""Pictures and clips made ready for Qwen's towers, by hand; `test_peer_vision` has what transformers makes of them."""

import pickle
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from PIL import Image

from models.vision.processor import Qwen2_5VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
from models.vision.resizing import fit
from omnijax.data.media.image import ImageLimits
from omnijax.data.media.video import VideoLimits
from omnijax.data.processing import Medium, make_item, render_media
from omnijax.data.sample import MediaReference, Part, RowId, Sample
from omnijax.data.templates import TEMPLATES
from omnijax.data.tokenizer import Bytes, TokenizerFile
from omnijax.errors import BadRow, UserError
from tests.test_chat import add_names, byte_pairs, save
from tests.test_media import encoded, make_clip, noise

ROW = RowId("source", "a.jsonl", 7)
TINY = {"patch_size": 2, "image": ImageLimits(16, 4096), "video": VideoLimits(16, 4096)}
PROCESSORS = {
    "qwen2_vl": Qwen2VLProcessor(**TINY),  # type: ignore[arg-type]
    "qwen2_5_vl": Qwen2_5VLProcessor(**TINY, window=4),  # type: ignore[arg-type]
    "qwen3_vl": Qwen3VLProcessor(**TINY),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerFile:
    pairs = add_names(byte_pairs())
    pairs.add_special_tokens(["<|video_pad|>"])
    return save(pairs, tmp_path_factory.mktemp("tokenizer"))


def picture(pixels: np.ndarray) -> Part:
    return Part("image", "user", 0, False, media=MediaReference(data=encoded(Image.fromarray(pixels))))


def clip(count: int, height: int, width: int) -> Part:
    data = make_clip(count, draw=lambda number: noise(height, width) // 2 + np.uint8(10 * number), rate=2)
    return Part("video", "user", 0, False, media=MediaReference(data=data))


def refusal(error: type[UserError], function, *arguments) -> str:
    with pytest.raises(error) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("height", "width", "most", "expected"),
    [
        (224, 224, 1003520, (224, 224)),
        (42, 70, 1003520, (56, 56)),  # 1.5 and 2.5 blocks: halves go to the even number
        (1, 1, 1003520, (56, 56)),
        (4000, 3000, 1003520, (1148, 840)),  # shrunk by 3.458, to 41.3 and 30.98 blocks
        (10, 2000, 1003520, (28, 812)),  # no whole block, so it is "grown" to the least pixels, by 0.396
        (30, 6000, 20000, (28, 1988)),  # shrunk by 3, but no side is less than a block
    ],
)
def test_sizes_of_pictures(height, width, most, expected):
    assert fit(height, width, 28, 3136, most) == expected


def test_a_clip_of_qwen3_vl_has_its_pixels_over_all_pictures():
    sizes = Qwen3VLProcessor(video=VideoLimits(4096, 32 * 32 * 64))
    assert sizes.clip_size(4, 256, 256) == (128, 128)
    assert sizes.clip_size(16, 256, 256) == (64, 64)
    assert sizes.clip_size(1, 256, 256) == sizes.clip_size(2, 256, 256) == (160, 160)
    assert sizes.clip_size(4, 8, 80) == (32, 320)  # no side is less than a block


def test_a_picture_by_hand(tokenizer):
    pixels = noise(4, 8)
    found = PROCESSORS["qwen2_vl"].load(picture(pixels), ROW, tokenizer)
    library = tokenizers.Tokenizer.from_file(tokenizer.path)
    names = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    assert found.tokens.tokens.tolist() == library.encode(names, add_special_tokens=False).ids
    assert found.tokens.placeholder.tolist() == [False, True, True, False]
    assert found.media.slots.tolist() == [-1, 0, 1, -1]
    assert (found.modality, found.media.encoded, found.advance) == ("image", 2, 4)
    assert found.positions.tolist() == [[0] * 3, [1, 1, 1], [1, 1, 2], [3] * 3]
    assert found.media.unit_grid.tolist() == [[1, 2, 4]] * 8
    assert found.media.unit_positions[:5].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 0, 2]]
    assert found.media.unit_valid.tolist() == [24] * 8
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    shares = (pixels / 255 - mean) / std
    unit = np.stack([shares[0:2, 4:6]] * 2)  # the picture is shown twice, of time, height, width and colour
    np.testing.assert_allclose(found.media.features[4], unit.transpose(3, 0, 1, 2).ravel(), atol=1e-6)
    assert found.media.features.dtype == np.float32


def test_units_of_qwen2_5_vl_stand_by_windows_and_slots_find_them(tokenizer):
    found = PROCESSORS["qwen2_5_vl"].load(picture(noise(12, 12)), ROW, tokenizer)
    # Nine tokens, 0 1 2 / 3 4 5 / 6 7 8, in windows of two by two: 0 1 3 4, 2 5, 6 7, 8.
    assert found.media.slots.tolist() == [-1, 0, 1, 4, 2, 3, 5, 6, 7, 8, -1]
    first = found.media.unit_positions[::4, 1:] // 2
    assert (first @ [3, 1]).tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]


def test_time_of_qwen2_5_vl_goes_by_the_second(tokenizer):
    found = PROCESSORS["qwen2_5_vl"].load(clip(8, 4, 4), ROW, tokenizer)  # 4 s, 2 pictures a second, 2 a frame
    assert found.positions[:, 0].tolist() == [0, 1, 3, 5, 7, 2]
    still = PROCESSORS["qwen2_vl"].load(clip(8, 4, 4), ROW, tokenizer)
    assert still.positions[:, 0].tolist() == [0, 1, 2, 3, 4, 2]


def test_before_a_frame_of_qwen3_vl_stands_its_moment(tokenizer):
    part = clip(3, 8, 4)
    said = (Part("text", "user", 0, False, "So what??"), part, Part("text", "user", 0, False, "!! Then"))
    rendered, (medium,) = render_media(Sample(ROW, said), TEMPLATES["plain"], tokenizer, PROCESSORS["qwen3_vl"])
    frame = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    # The moments of the frames are 0 and 0.5 s, and 1 s twice. The first one is of one text with what stands before.
    expected = f"So what??<0.2 seconds>{frame}<1.0 seconds>{frame}!! Then"
    library = tokenizers.Tokenizer.from_file(tokenizer.path)
    assert rendered.tokens.tolist() == library.encode(expected, add_special_tokens=False).ids
    item = make_item(rendered, [medium], ROW, 0, document=False)
    slots = item.media["image"].slots
    assert slots[slots >= 0].tolist() == [0, 1, 2, 3]
    pads = item.positions[slots >= 0]
    assert (pads - pads[0]).tolist()[:2] == [[0, 0, 0], [0, 1, 0]]
    text = item.positions[slots < 0]
    assert (text == text[:, :1]).all()
    assert (np.diff(text[:, 0]) >= 1).all()


SHAPES = {
    "picture": lambda: picture(noise(22, 33)),
    "one pixel": lambda: picture(noise(1, 1)),
    "200 to 1": lambda: picture(noise(2, 400)),
    "1 to 200": lambda: picture(noise(400, 2)),
    "one picture a clip": lambda: clip(1, 16, 16),
    "five pictures": lambda: clip(5, 10, 14),
    "a list of pictures": lambda: Part(
        "video", "user", 0, False, media=MediaReference(frames=tuple(picture(noise(9, 9)).media for _ in range(3)))
    ),
}


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("shape", SHAPES)
def test_placeholders_features_and_slots_are_as_many(family, shape, tokenizer):
    processor = PROCESSORS[family]
    found = processor.load(SHAPES[shape](), ROW, tokenizer)
    media, placeholder = found.media, found.tokens.placeholder
    assert len(media.features) == 4 * media.encoded == media.unit_grid[0].prod()
    assert sorted(media.slots[placeholder]) == list(range(media.encoded))
    assert (media.slots[~placeholder] == -1).all()
    names = {processor.image_token, processor.video_token}
    ids = [tokenizers.Tokenizer.from_file(tokenizer.path).token_to_id(name) for name in names]
    assert np.array_equal(np.isin(found.tokens.tokens, ids), placeholder)
    assert len(found.positions) == placeholder.size
    assert found.advance > found.positions[-1].max()
    assert found.media.features.shape[1:] == processor.units["image"].features
    assert np.isfinite(media.features).all()


@pytest.mark.parametrize("family", PROCESSORS)
def test_positions_of_one_axis_count_on(family, tokenizer):
    processor = replace(PROCESSORS[family], mrope=False)
    parts = (picture(noise(13, 21)), Part("text", "user", 0, False, "Why. "), clip(5, 10, 14))
    rendered, media = render_media(Sample(ROW, parts), TEMPLATES["plain"], tokenizer, processor)
    item = make_item(rendered, media, ROW, 0, document=False)
    assert np.array_equal(item.positions, np.arange(item.tokens.size))
    assert processor.position == ()


@pytest.mark.parametrize("family", PROCESSORS)
def test_a_medium_in_an_item_is_as_alone(family, tokenizer):
    processor = PROCESSORS[family]
    parts = [picture(noise(13, 21)), clip(5, 10, 14), picture(noise(8, 8))]
    said = [part for each in parts for part in (Part("text", "user", 0, False, "Why. "), each)]
    rendered, media = render_media(Sample(ROW, tuple(said)), TEMPLATES["plain"], tokenizer, processor)
    item = make_item(rendered, media, ROW, 3, document=False)
    whole, place, units, encoded, after = item.media["image"], 0, 0, 0, 0
    for (first, _), part in zip(rendered.media, parts, strict=True):
        alone: Medium = processor.load(part, ROW, tokenizer)
        end = first + alone.tokens.tokens.size
        text = np.arange(after, after + first - place)
        assert np.array_equal(item.positions[place:first], np.stack([text] * 3, 1))
        start = after + text.size
        assert np.array_equal(item.positions[first:end], start + alone.positions)
        assert np.array_equal(item.tokens[first:end], alone.tokens.tokens)
        own = whole.slots[first:end]
        assert np.array_equal(own, np.where(alone.media.slots < 0, -1, alone.media.slots + encoded))
        here = slice(units, units + len(alone.media.features))
        for name in ("features", "unit_positions", "unit_grid", "unit_valid"):
            assert np.array_equal(getattr(whole, name)[here], getattr(alone.media, name))
        place, units, encoded, after = end, here.stop, encoded + alone.media.encoded, start + alone.advance
    assert (len(whole.features), whole.encoded, place) == (units, encoded, item.tokens.size)
    assert item.source == 3


def test_what_is_no_medium_of_the_model_is_a_bad_row(tokenizer):
    load, part = PROCESSORS["qwen2_vl"].load, picture(noise(8, 8))
    sound = replace(part, kind="audio")
    assert "message 0 has the part 'audio', which the model does not read" in refusal(
        BadRow, load, sound, ROW, tokenizer
    )
    answer = replace(part, role="assistant", trained=True)
    assert "answers with the part 'image', and the model writes only text" in refusal(
        BadRow, load, answer, ROW, tokenizer
    )
    loud = clip(3, 8, 8)
    loud = replace(loud, media=replace(loud.media, audio=MediaReference(data=b"RIFF")))
    assert "has a clip with its sound, and the model hears none" in refusal(BadRow, load, loud, ROW, tokenizer)
    assert "beyond max_ratio 200.0" in refusal(BadRow, load, picture(noise(2, 402)), ROW, tokenizer)
    spoilt = replace(part, media=MediaReference(data=part.media.data[:60]))
    assert "cannot be decoded" in refusal(BadRow, load, spoilt, ROW, tokenizer)


def test_a_processor_that_does_not_fit_is_one_line(tokenizer):
    number = tokenizers.Tokenizer.from_file(tokenizer.path).token_to_id("<|image_pad|>")
    tower = {"patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2}
    model = SimpleNamespace(image_token_id=number, vision_config=SimpleNamespace(**tower))
    good = PROCESSORS["qwen2_vl"]
    good.check(tokenizer, model)
    assert "image_token = '<|image_pad|>' is no token of Data.tokenizer" in refusal(
        UserError, good.check, Bytes(), model
    )
    assert "image_token = '<pad>' is no token of Data.tokenizer" in refusal(
        UserError, replace(good, image_token="<pad>").check, tokenizer, model
    )
    model.image_token_id = 0
    assert "and the model's image_token_id is 0" in refusal(UserError, good.check, tokenizer, model)
    model.image_token_id = number
    model.vision_config.spatial_merge_size = 1
    assert "merge = 2 and the tower's spatial_merge_size = 1" in refusal(UserError, good.check, tokenizer, model)
    model.vision_config.spatial_merge_size, model.vision_config.window = 2, 8
    assert "has patches in windows of None, and the tower in windows of 8" in refusal(
        UserError, good.check, tokenizer, model
    )
    parts = SimpleNamespace(encoders={"image": SimpleNamespace(tower=model.vision_config)})
    assert "in windows of 4, and the tower in windows of 8" in refusal(
        UserError, PROCESSORS["qwen2_5_vl"].check, tokenizer, parts
    )
    parts = SimpleNamespace(encoders={}, backbone=SimpleNamespace(rope_scaling=None))
    message = refusal(UserError, good.check, tokenizer, parts)
    assert "mrope = True, and positions of the language model have 1 axes: set it to False" in message
    replace(good, mrope=False).check(tokenizer, parts)
    model.HF_TYPE = "qwen2_5_vl"
    assert "is for qwen3_vl and qwen3_vl_moe, and the model is a qwen2_5_vl" in refusal(
        UserError, PROCESSORS["qwen3_vl"].check, tokenizer, model
    )
    assert "window = 7 must be a multiple of merge = 2" in refusal(UserError, lambda: Qwen2_5VLProcessor(window=7))
    assert "min_pixels = 20 is above max_pixels = 10" in refusal(UserError, lambda: ImageLimits(20, 10))


def test_workers_get_little_and_need_no_jax():
    assert len(pickle.dumps(PROCESSORS["qwen3_vl"])) < 2000
    check = "import sys, models.vision.processor; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
