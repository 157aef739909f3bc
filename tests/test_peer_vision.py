"""Pictures and clips become what transformers' processors make of them. Needs the extra `peer`; run with `-m peer`.

Its processors of clips need torchvision too, and are left out where that is not installed.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image

from models.audio.processor import Qwen2_5OmniAudioProcessor
from models.vision.omni_processor import Qwen2_5OmniVisionProcessor
from models.vision.patches import window_order
from models.vision.processor import Qwen2_5VLProcessor, Qwen2VLProcessor, Qwen3VLProcessor
from omnijax.data.media.image import ImageLimits
from omnijax.data.media.video import VideoLimits, load_video
from omnijax.data.omni_packing import Item
from omnijax.data.processing import make_item, render_media
from omnijax.data.processors import Processors
from omnijax.data.sample import MediaReference, Part, RowId, Sample
from omnijax.data.templates import TEMPLATES
from omnijax.data.tokenizer import TokenizerFile
from tests.test_chat import add_names, byte_pairs, save
from tests.test_media import encoded, make_clip, noise, wav

pytestmark = pytest.mark.peer

ROW = RowId("source", "a.jsonl", 7)
IMAGE, VIDEO = ImageLimits(3136, 200704), VideoLimits(3136, 50176)
CLIP = VideoLimits(4096, 262144)  # of all pictures together
FAMILIES: dict[str, Any] = {
    "qwen2_vl": Qwen2VLProcessor(image=IMAGE, video=VIDEO),
    "qwen2_5_vl": Qwen2_5VLProcessor(image=IMAGE, video=VIDEO),
    "qwen3_vl": Qwen3VLProcessor(image=IMAGE, video=CLIP),
}


def photo() -> np.ndarray:
    """A portrait that comes with matplotlib, 600 x 512."""
    with Image.open(matplotlib.get_data_path() + "/sample_data/grace_hopper.jpg") as image:
        return np.asarray(image.convert("RGB"))


PICTURES = {
    "photo": photo(),
    "detail": photo()[100:211, 200:437],
    "noise": noise(300, 500),
    "one pixel": noise(1, 1),
    "200 to 1": noise(10, 2000),
    "already of the size": noise(56, 84),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerFile:
    pairs = add_names(byte_pairs())
    pairs.add_special_tokens(["<|video_pad|>"])
    return save(pairs, tmp_path_factory.mktemp("tokenizer"))


def media(kind: Any, data: bytes) -> Part:
    return Part(kind, "user", 0, False, media=MediaReference(data=data))


def text(content: str) -> Part:
    return Part("text", "user", 0, False, content)


def made(family: str, parts: list[Part], tokenizer: TokenizerFile) -> Item:
    """A chat of the user's parts and an answer."""
    said = (*parts, Part("text", "assistant", 1, True, "Yes. No."))
    rendered, found = render_media(Sample(ROW, said), TEMPLATES["chatml"], tokenizer, FAMILIES[family])
    return make_item(rendered, found, ROW, 0, document=False)


def written(content: str) -> str:
    """That chat as ChatML; `content` is what the user says."""
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\nYes. No.<|im_end|>\n"


def peer(family: str, kind: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.{kind}_{family}"), name)


def image_processor(family: str) -> Any:
    """All three families have Qwen2-VL's, with their own numbers."""
    processor = FAMILIES[family]
    return peer("qwen2_vl", "image_processing_pil", "Qwen2VLImageProcessorPil")(
        patch_size=processor.patch_size,
        size={"shortest_edge": IMAGE.min_pixels, "longest_edge": IMAGE.max_pixels},
        image_mean=list(processor.mean),
        image_std=list(processor.std),
    )


PROCESSORS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
MODELS = {"qwen2_vl": "Qwen2VLModel", "qwen2_5_vl": "Qwen2_5_VLModel", "qwen3_vl": "Qwen3VLModel"}
NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def ids_of(content: str, tokenizer: TokenizerFile) -> np.ndarray:
    from transformers import PreTrainedTokenizerFast

    library = PreTrainedTokenizerFast(tokenizer_file=tokenizer.path)
    return np.array(library(content, add_special_tokens=False)["input_ids"])


def positions_of(family: str, ids: np.ndarray, tokenizer: TokenizerFile, **grids: Any) -> np.ndarray:
    """[n, 3], by the model's own count."""
    import torch

    model = peer(family, "modeling", MODELS[family])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    self = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    self.get_vision_position_ids = lambda *args, **kwargs: model.get_vision_position_ids(self, *args, **kwargs)
    image, video = (ids_of(NAMES[name], tokenizer)[0] for name in ("image_token", "video_token"))
    kinds = torch.tensor(np.where(ids == image, 1, np.where(ids == video, 2, 0)))[None]
    given = {name: torch.tensor(np.array(value)) for name, value in grids.items()}
    return model.get_rope_index(self, torch.tensor(ids)[None], kinds, **given)[0][:, 0].T.numpy()


def in_merge_order(family: str, item: Item) -> np.ndarray:
    """The patches of an item's media in the order that transformers has."""
    units = item.media["image"]
    if family != "qwen2_5_vl":
        return units.features
    grids = units.unit_grid
    found, place = np.empty_like(units.features), 0
    while place < len(grids):
        count = int(grids[place].prod())
        own = slice(place, place + count)
        time, row, column = units.unit_positions[own].T
        merge_order = np.lexsort((column % 2, row % 2, column // 2, row // 2, time))
        assert np.array_equal(np.argsort(merge_order), window_order(units.unit_positions[own][merge_order], 8))
        found[own] = units.features[own][merge_order]
        place += count
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_in_a_chat_are_those_of_transformers(family: str, tokenizer: TokenizerFile) -> None:
    """Patches, grids, ids and positions; equal but for the last bit of a float32."""
    peer_processor = image_processor(family)
    inputs = peer_processor([Image.fromarray(each) for each in PICTURES.values()], return_tensors="np")
    replace = peer(family, "processing", PROCESSORS[family]).replace_image_token
    self = SimpleNamespace(image_processor=peer_processor, **NAMES)
    words = [f"So what? {number}: " for number in range(len(PICTURES))]
    runs = [replace(self, inputs, number) for number in range(len(PICTURES))]
    content = "".join(f"{word}<|vision_start|>{run}<|vision_end|>" for word, run in zip(words, runs, strict=True))
    ids = ids_of(written(content), tokenizer)
    parts = [
        part
        for word, pixels in zip(words, PICTURES.values(), strict=True)
        for part in (text(word), media("image", encoded(Image.fromarray(pixels))))
    ]
    item = made(family, parts, tokenizer)
    assert np.array_equal(item.tokens, ids)
    units = item.media["image"]
    grids = inputs["image_grid_thw"]
    assert np.array_equal(units.unit_grid, np.repeat(grids, grids.prod(1), axis=0))
    np.testing.assert_allclose(in_merge_order(family, item), inputs["pixel_values"], rtol=0, atol=5e-7)
    expected = positions_of(family, ids, tokenizer, image_grid_thw=grids)
    assert np.array_equal(item.positions, expected)


def moving(number: int, height: int = 72, width: int = 96) -> np.ndarray:
    """The photo seen through a window that moves."""
    return np.ascontiguousarray(photo()[100 + 9 * number : 100 + 9 * number + height, 150 : 150 + width])


CLIPS = {
    "five pictures": make_clip(10, draw=moving, rate=4),  # of which every other one is taken
    "one picture": make_clip(1, draw=moving, rate=4),
    "long and small": make_clip(42, draw=lambda number: moving(number % 9, 32, 40), rate=3),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CLIPS)
def test_the_tokens_positions_and_pixels_of_a_clip(family: str, name: str, tokenizer: TokenizerFile) -> None:
    """Pixels are those of transformers' processor of pictures on each picture; ids and positions the families' own."""
    processor = FAMILIES[family]
    reference = MediaReference(data=CLIPS[name])
    video = load_video(reference, processor.video, ROW)
    item = made(family, [text("What is it??"), Part("video", "user", 0, False, media=reference)], tokenizer)
    grid = item.media["image"].unit_grid[0]
    frames, count = video.frames, len(video.frames)
    limits = processor.video
    size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    if family == "qwen3_vl":
        smart_resize = peer(family, "video_processing", "smart_resize")
        height, width = smart_resize(max(count, 2), *frames.shape[1:3], 2, 32, limits.min_pixels, limits.max_pixels)
        frames = np.stack(
            [np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC)) for each in frames]
        )
    inputs = image_processor(family)(
        [Image.fromarray(each) for each in frames], size=size, do_resize=family != "qwen3_vl", return_tensors="np"
    )
    single = inputs["pixel_values"].reshape(count, -1, 3, 2, processor.patch_size, processor.patch_size)[:, :, :, 0]
    single = np.concatenate([single, np.repeat(single[-1:], -count % 2, axis=0)])
    pairs = single.reshape(len(single) // 2, 2, *single.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    assert grid.tolist() == [len(pairs), *inputs["image_grid_thw"][0, 1:]]
    np.testing.assert_allclose(in_merge_order(family, item), pairs.reshape(-1, pairs[0, 0].size), rtol=0, atol=5e-7)

    own = peer(family, "processing", PROCESSORS[family])
    metadata = SimpleNamespace(fps=video.fps, frames_indices=(video.timestamps * video.fps).tolist())
    self = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2), **NAMES)
    self._calculate_timestamps = lambda *args: own._calculate_timestamps(self, *args)
    run = own.replace_video_token(self, {"video_grid_thw": grid[None], "video_metadata": [metadata]}, 0)
    run = run if family == "qwen3_vl" else f"<|vision_start|>{run}<|vision_end|>"
    ids = ids_of(written(f"What is it??{run}"), tokenizer)
    assert np.array_equal(item.tokens, ids)
    grids: dict[str, Any] = {"video_grid_thw": [[1, *grid[1:]]] * grid[0] if family == "qwen3_vl" else [grid]}
    if family == "qwen2_5_vl":
        grids["second_per_grid_ts"] = np.array([2 / video.fps], np.float32)
    assert np.array_equal(item.positions, positions_of(family, ids, tokenizer, **grids))


def test_positions_of_the_thinker_of_qwen2_5_omni(tokenizer: TokenizerFile) -> None:
    """A picture, a clip, a sound and text between them, counted by the model's own function."""
    import torch

    sees = Qwen2_5OmniVisionProcessor(
        image=IMAGE,
        video=VIDEO,
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        start="<|vision_start|>",
        end="<|vision_end|>",
    )
    both = Processors(sees, Qwen2_5OmniAudioProcessor(audio_token="[INST]", start="<s>", end="</s>"))
    samples = (0.1 * np.random.default_rng(0).standard_normal(20000)).astype(np.float32)
    parts = [text("What is it??"), media("image", encoded(Image.fromarray(PICTURES["detail"]))), text("So. ")]
    parts += [media("video", CLIPS["long and small"]), media("audio", wav(samples)), text("Then?")]
    said = (*parts, Part("text", "assistant", 1, True, "Yes. No."))
    rendered, found = render_media(Sample(ROW, said), TEMPLATES["chatml"], tokenizer, both)
    item = make_item(rendered, found, ROW, 0, document=False)
    name = "Qwen2_5OmniPreTrainedModelForConditionalGeneration"
    model = peer("qwen2_5_omni", "modeling", name)
    ids = {field: int(ids_of(token, tokenizer)[0]) for field, token in NAMES.items()}
    numbers = {f"{field}_id": ids[field] for field in ("image_token", "video_token", "vision_start_token")}
    sound = {"audio_token_id": "[INST]", "audio_start_token_id": "<s>"}
    numbers |= {field: int(ids_of(token, tokenizer)[0]) for field, token in sound.items()}
    config = SimpleNamespace(**numbers, position_id_per_seconds=25, seconds_per_chunk=2)
    self = SimpleNamespace(config=config, spatial_merge_size=2)
    self.get_llm_pos_ids_for_vision = lambda *args: model.get_llm_pos_ids_for_vision(self, *args)
    grids = [torch.tensor(np.array(each.media.unit_grid[:1], np.int64)) for each in found[:2]]
    video = load_video(parts[3].media, VIDEO, ROW)  # type: ignore[arg-type]
    expected, _ = model.get_rope_index(
        self,
        torch.tensor(item.tokens.astype(np.int64))[None],
        *grids,
        audio_seqlens=torch.tensor([int(found[2].media.unit_valid.sum())]),
        second_per_grids=torch.tensor([2 / video.fps], dtype=torch.float32),
    )
    assert item.positions is not None
    np.testing.assert_array_equal(item.positions, expected[:, 0].T.numpy())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_is_nearly_that_of_the_processor_of_clips(family: str, name: str, tokenizer: TokenizerFile) -> None:
    """Torchvision's bicubic filter rounds otherwise than Pillow's: here and there by one of 255 levels."""
    pytest.importorskip("torchvision", reason="transformers' processors of clips need torchvision")
    import torch

    processor, reference = FAMILIES[family], MediaReference(data=CLIPS[name])
    frames = load_video(reference, processor.video, ROW).frames
    item = made(family, [Part("video", "user", 0, False, media=reference)], tokenizer)
    kind = "qwen3_vl" if family == "qwen3_vl" else "qwen2_vl"
    make = peer(kind, "video_processing", f"{'Qwen3' if kind == 'qwen3_vl' else 'Qwen2'}VLVideoProcessor")
    limits = processor.video
    size = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
    if family == "qwen3_vl" and len(frames) == 1:
        frames = np.repeat(frames, 2, axis=0)  # it refuses a single picture
    videos = torch.tensor(frames.transpose(0, 3, 1, 2))
    inputs = make(size=size, cap_pixels_per_frame=False)(
        [videos], return_tensors="np", do_sample_frames=False, input_data_format="channels_first"
    )
    assert item.media["image"].unit_grid[0].tolist() == inputs["video_grid_thw"][0].tolist()
    scale = 255 * np.repeat(processor.std, inputs["pixel_values_videos"].shape[1] // 3)
    levels = np.abs(in_merge_order(family, item) - inputs["pixel_values_videos"]) * scale
    assert levels.max() < 1.001
    assert levels.mean() < 0.01
