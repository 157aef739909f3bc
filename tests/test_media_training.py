"""Training on pictures and clips from a config: rows, runs that go on exactly, and what cannot be trained on."""

import dataclasses
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from models.vision.processor import Qwen2VLProcessor
from omnijax import config, ginfile, inspect
from omnijax.data.mixture import Member, Mixture, open_members
from omnijax.data.omni_packing import imbalance
from omnijax.data.packing import Rows
from omnijax.data.pipeline import check_units, heldout_rows, make_packer, make_pipeline
from omnijax.data.sources import JsonLines
from omnijax.data.stream import ExactStream
from omnijax.errors import BadRow
from tests import runs
from tests.test_chat import add_names, byte_pairs, save
from tests.test_chat_training import exchange, refusal, write
from tests.test_media import make_clip, noise

CONFIG = """
from __gin__ import dynamic_registration
from models import qwen2_vl
from models.vision import processor
from models.vision import qwen2_vl as vision
from omnijax import config
from omnijax.data import chat_source
from omnijax.data.media import image
from omnijax.data.media import video
from omnijax.data import tokenizer
from omnijax.nn import rope
from sharding_rules import qwen2_vl as rules

config.Run.dir = "run"
config.Run.steps = 3
config.Train.model = @qwen2_vl.Qwen2VLConfig()
qwen2_vl.Qwen2VLConfig.text_config = @qwen2_vl.Qwen2VLTextConfig()
qwen2_vl.Qwen2VLConfig.vision_config = @vision.Qwen2VLVisionConfig()
qwen2_vl.Qwen2VLTextConfig.hidden_size = 32
qwen2_vl.Qwen2VLTextConfig.intermediate_size = 48
qwen2_vl.Qwen2VLTextConfig.num_hidden_layers = 2
qwen2_vl.Qwen2VLTextConfig.num_attention_heads = 4
qwen2_vl.Qwen2VLTextConfig.num_key_value_heads = 2
qwen2_vl.Qwen2VLTextConfig.rope_scaling = @rope.MultimodalRope()
rope.MultimodalRope.mrope_section = (2, 1, 1)
vision.Qwen2VLVisionConfig.depth = 2
vision.Qwen2VLVisionConfig.num_heads = 4
vision.Qwen2VLVisionConfig.patch_size = 2
vision.Qwen2VLVisionConfig.embed_dim = 16
vision.Qwen2VLVisionConfig.hidden_size = 32
config.Train.rules = @rules.table()
config.Data.source = @chat_source.Chat()
chat_source.Chat.path = "chats.jsonl"
chat_source.Chat.index_cache = None
chat_source.Chat.media_root = "media"
chat_source.Chat.processor = @processor.Qwen2VLProcessor()
processor.Qwen2VLProcessor.patch_size = 2
image.ImageLimits.min_pixels = 16
image.ImageLimits.max_pixels = 256
video.VideoLimits.min_pixels = 16
video.VideoLimits.max_pixels = 64
config.Data.tokenizer = @tokenizer.TokenizerFile()
tokenizer.TokenizerFile.path = "tokenizer.json"
tokenizer.TokenizerFile.eos = "<|endoftext|>"
config.Data.length = 96
config.Data.units = {"image": 128}
config.Data.rows = 8
config.Data.look_ahead = 4
config.Optimizer.learning_rate = 3e-3
config.Optimizer.schedule = "constant"
config.Compute.dtype = "float32"
"""
NAMES = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
SIZES = [(8, 8), (13, 21), (4, 40), (16, 16), (1, 1)]


def asked(*names: str, answer: str = "It is so.") -> dict[str, Any]:
    """A row of one question about these files, named by their ending, and one answer."""
    parts = [{"type": "image" if name.endswith("png") else "video", "path": name} for name in names]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


def clip(count: int) -> bytes:
    return make_clip(count, draw=lambda number: noise(16, 16) // 2 + np.uint8(9 * number), rate=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The config `tiny.gin`, forty chats, of which most have pictures and some clips, and these."""
    (tmp_path / "media").mkdir()
    for number, (height, width) in enumerate(SIZES):
        Image.fromarray(noise(height, width)).save(tmp_path / "media" / f"{number}.png")
    frames = [Image.fromarray(noise(16, 16) // 2 + np.uint8(20 * number)) for number in range(5)]
    frames[0].save(tmp_path / "media" / "moving.gif", save_all=True, append_images=frames[1:], duration=500)
    (tmp_path / "media" / "clip.mp4").write_bytes(clip(6))
    rows = [asked(f"{number}.png") for number in range(5)] + [asked("0.png", "3.png"), asked("moving.gif")]
    rows += [asked("clip.mp4", "2.png"), exchange(1), exchange(2)]
    write(tmp_path / "chats.jsonl", *rows * 4)
    pairs = add_names(byte_pairs())
    pairs.add_special_tokens(["<|video_pad|>"])
    save(pairs, tmp_path)
    text = CONFIG + f"qwen2_vl.Qwen2VLTextConfig.vocab_size = {pairs.get_vocab_size()}\n"
    text += "".join(f"qwen2_vl.Qwen2VLConfig.{name} = {pairs.token_to_id(token)}\n" for name, token in NAMES.items())
    (tmp_path / "tiny.gin").write_text(text)
    return tmp_path


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def load(*overrides: str) -> config.Train:
    return ginfile.load("tiny.gin", overrides, root=config.Train).value


def steps(*overrides: str, count: int = 1) -> list[Rows]:
    data = load(*overrides).data
    stream = ExactStream(make_pipeline(data, open_members(data.source, data.holdout)[0], 0))
    return [next(stream) for _ in range(count)]


def test_rows_have_media_and_text_alone_has_padding_of_the_same_shapes(folder: Path) -> None:
    (rows,) = steps()
    write(folder / "texts.jsonl", *[exchange(number) for number in range(40)])
    (texts,) = steps("Chat.path='texts.jsonl'")
    shapes = {name: (array.shape, array.dtype) for name, array in rows.arrays.items()}
    assert shapes == {name: (array.shape, array.dtype) for name, array in texts.arrays.items()}
    assert shapes["positions"][0] == (8, 96, 3)
    assert shapes["media.image.features"][0] == (8, 128, 24)
    for row in range(8):
        slots = rows.arrays["slots.image"][row]
        units = int((rows.arrays["media.image.unit_segments"][row] > 0).sum())
        assert sorted(slots[slots >= 0]) == list(range(units // 4))
        own = rows.arrays["segment_ids"][row][slots >= 0][np.argsort(slots[slots >= 0])]
        assert np.array_equal(own, rows.arrays["media.image.unit_segments"][row][:units:4])
    assert (texts.arrays["slots.image"] == -1).all()
    assert not texts.arrays["media.image.features"].any()
    assert np.array_equal(texts.arrays["positions"][..., 0], texts.arrays["positions"][..., 2])
    assert 0 < rows.metrics["fill/image"] <= 1
    assert texts.metrics["fill/image"] == 0
    assert rows.metrics["pairs_max/image"] >= rows.metrics["pairs/image"] > 0


def test_a_run_learns_and_one_in_two_pieces_is_the_same(folder: Path) -> None:
    """The second piece with a process that makes its rows."""
    common = ("Evaluation.every=3", "Data.holdout=0.2")
    straight = runs.run(folder / "tiny.gin", "Run.steps=6", *common, folder="straight")
    assert straight.losses[-1] < straight.losses[0]
    assert straight.compilations == 1
    assert straight.metrics[5]["heldout/loss"] < straight.metrics[2]["heldout/loss"]
    names = ("fill/image", "pairs/image", "imbalance/tokens", "imbalance/image", "tflops_per_device")
    assert all(straight.metrics[-1][name] > 0 for name in names)
    first = runs.run(folder / "tiny.gin", "Run.steps=3", *common, folder="pieces")
    rest = runs.run(folder / "tiny.gin", "Run.steps=6", "Data.workers=1", *common, folder="pieces")
    assert first.row_ids | rest.row_ids == straight.row_ids
    assert rest.losses == straight.losses


def test_odd_media_and_words_that_name_media_train(folder: Path) -> None:
    """Forty pictures in a row, a clip of one picture, a picture 200 to 1, and answers that spell placeholders."""
    Image.fromarray(noise(2, 400)).save(folder / "media" / "flat.png")
    (folder / "media" / "still.mp4").write_bytes(clip(1))
    rows = [asked(*["0.png"] * 40), asked("flat.png"), asked("still.mp4")]
    rows += [asked("0.png", answer="<image><|image_pad|><|vision_start|> <video>")]
    write(folder / "chats.jsonl", *rows * 8)
    bigger = ("Data.length=384", "Data.units={'image': 768}", "chat_source.Chat.format='messages'")
    (packed,) = steps(*bigger)
    numbers = {int(re.search(r":(\d+)\[", name)[1]) % 4 for names in packed.row_ids for name in names}  # type: ignore[index]
    assert numbers == {0, 1, 2, 3}
    slots, trained = packed.arrays["slots.image"] >= 0, packed.arrays["weights"] > 0
    pads = [load().model.image_token_id, load().model.video_token_id]
    assert np.array_equal(np.isin(packed.arrays["tokens"], pads), slots)
    assert not np.isin(packed.arrays["targets"][trained], pads).any()
    assert len(runs.run(folder / "tiny.gin", *bigger).losses) == 3


@pytest.mark.full
def test_any_mesh_has_the_losses_of_another(folder: Path) -> None:
    mesh = ("Mesh.data=2", "Mesh.sequence=2", "Mesh.tensor=2")
    one, other = (runs.run(folder / "tiny.gin", *each, folder=f"mesh{len(each)}") for each in ((), mesh))
    np.testing.assert_allclose(other.losses, one.losses, rtol=2e-5)
    assert other.row_ids == one.row_ids
    assert other.metrics[0]["imbalance/image"] < one.metrics[0]["imbalance/image"]


def test_damaged_media_are_bad_rows(folder: Path) -> None:
    good = (folder / "media" / "1.png").read_bytes()
    (folder / "media" / "spoilt.png").write_bytes(good[: len(good) // 2])
    write(folder / "chats.jsonl", *[asked("0.png")] * 20, asked("spoilt.png"), *[asked("0.png")] * 20)
    assert re.search(r"chats.jsonl:20: image '.*spoilt.png' cannot be decoded", refusal(lambda: steps(count=9)))
    found = runs.run(folder / "tiny.gin", "Data.bad_rows='skip'", "Run.steps=5", folder="skips")
    assert found.metrics[-1]["bad_rows"] >= 1
    lines = [json.loads(line) for line in (folder / "skips" / "bad_rows.jsonl").read_text().splitlines()]
    assert {line["row"] for line in lines} == {"chat:chats.jsonl:20"}
    assert len(lines) == found.metrics[-1]["bad_rows"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (asked("gone.png"), "cannot be opened"),
        (asked("../chats.png"), "leads out of the root"),
        (asked("https://nowhere.invalid/a.png"), "is a URL: set allow_urls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio", "path": "a.wav"}]}, *exchange(1)["messages"]]},
            "has the part 'audio', which the model does not read",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Draw."},
                    {"role": "assistant", "content": [{"type": "image", "path": "0.png"}]},
                ]
            },
            "answers with the part 'image', and the model writes only text",
        ),
    ],
)
def test_media_that_cannot_be_had_are_one_line(folder: Path, row: Any, reason: str) -> None:
    write(folder / "chats.jsonl", *[row] * 8)
    assert reason in refusal(steps)


def test_more_media_than_a_row_has_units_are_dropped_cut_or_refused_and_counted(folder: Path) -> None:
    many = asked(*["0.png"] * 9)  # of 16 units each
    two = asked("0.png")
    two["messages"] += many["messages"]
    write(folder / "chats.jsonl", many, two, *[asked("0.png")] * 30)
    assert "takes 144 of the budget of image, which is 128 a row" in refusal(lambda: steps(count=9), error=BadRow)
    last = steps("Data.over_length='drop'", "Data.rows=1", count=30)[-1].metrics
    assert last["packing/dropped"] >= 2
    assert last["packing/lost_tokens"] > 9 * 4
    last = steps("Data.over_length='cut'", "Data.rows=1", count=30)[-1].metrics
    assert last["packing/cut"] >= 1
    data = load("Data.over_length='cut'").data
    evaluation = heldout_rows(data, open_members(data.source)[0])
    assert evaluation.long == 2


def test_what_was_done_to_media_is_counted(folder: Path) -> None:
    write(folder / "chats.jsonl", *[{"messages": asked("a.png")["messages"], "n": n} for n in range(40)])
    frames = [Image.fromarray(noise(8, 8) // 2 + np.uint8(number)) for number in range(3)]
    frames[0].save(folder / "media" / "a.png", format="GIF", save_all=True, append_images=frames[1:])
    metrics = steps()[0].metrics
    assert metrics["media/first of several"] == metrics["packing/read"]


def test_processes_that_make_rows_need_no_jax(folder: Path) -> None:
    data = load().data
    pipeline = make_pipeline(data, open_members(data.source)[0], 0)
    (folder / "pipeline").write_bytes(content := pickle.dumps(pipeline))
    assert len(content) < 5000
    check = "import pickle, sys; p = pickle.load(open('pipeline', 'rb')); p.items[0][0]; sys.exit('jax' in sys.modules)"
    assert runs.finish(runs.start(folder, "-c", check)).returncode == 0


def test_mistakes_are_one_line(folder: Path) -> None:
    def packer(*overrides: str) -> str:
        return refusal(lambda: steps(*overrides))

    assert "has none for 'image'" in (message := packer("Data.units={}"))
    assert "python -m omnijax.inspect --data CONFIG` proposes some" in message
    assert "4 at a time make a feature: give a multiple of 4, such as 128" in packer("Data.units={'image': 126}")
    assert "Data.units has 'sound', and no Chat.processor makes such units (image)" in packer(
        "Data.units={'image': 128, 'sound': 4}"
    )
    split = refusal(check_units, load("Data.units={'image': 108}").data, 2)
    assert "splits into 2 parts, and 4 at a time make a feature: give a multiple of 8, such as 112" in split
    assert "must be at least 1" in packer("Data.units={'image': 0}")
    assert "Chat.processor = " in packer("Chat.processor=@processor.Qwen2VLProcessor", "Qwen2VLProcessor.patch_size=2")
    assert "makes image units" in packer("Qwen2VLProcessor.patch_size=4")
    assert "image_token_id is 5" in packer("Qwen2VLConfig.image_token_id=5")
    assert "give a Chat.processor, or leave them out" in packer("Chat.processor=None")
    assert "media path '0.png' is relative to nothing: set root, or Chat.media_root" in packer("Chat.media_root=None")


def test_another_processor_is_another_stream(folder: Path) -> None:
    (rows,) = steps()
    data = load("ImageLimits.max_pixels=400").data
    message = refusal(ExactStream(make_pipeline(data, open_members(data.source)[0], 0)).restore, rows.state)
    assert "the data state has chat.processor.image.max_pixels 256, this run has 400" in message


def test_chats_with_pictures_mix_with_text(folder: Path) -> None:
    write(folder / "texts.jsonl", *[{"text": "Because so. " * 30, "n": n} for n in range(20)])
    data = load().data
    chats, texts = Member("chats", data.source), Member("texts", JsonLines("texts.jsonl"))  # type: ignore[arg-type]
    mixed = dataclasses.replace(data, source=Mixture((chats, texts)))
    stream = ExactStream(make_pipeline(mixed, open_members(mixed.source)[0], 0))
    arrays = next(stream).arrays
    stands = arrays["slots.image"] >= 0
    assert stands.any()
    assert set(np.unique(arrays["sources"][stands])) == {0}
    assert (arrays["sources"] == 1).any()
    other = dataclasses.replace(
        chats,
        name="other",
        source=dataclasses.replace(data.source, processor=Qwen2VLProcessor()),  # type: ignore[type-var]
    )
    unlike = dataclasses.replace(data, source=Mixture((chats, other)))
    assert "two of them make image units" in refusal(make_packer, unlike)


def test_a_model_of_text_refuses_a_processor(folder: Path) -> None:
    text = (folder / "tiny.gin").read_text()
    text = re.sub("^(qwen2_vl|vision|rope)[.].*\n|^from omnijax.nn import rope\n", "", text, flags=re.M)
    text = text.replace("@qwen2_vl.Qwen2VLConfig()", "@qwen2.Qwen2Config()").replace(
        "from models import qwen2_vl", "from models import qwen2"
    )
    (folder / "tiny.gin").write_text(text)
    assert "makes units of 'image', and the model, Qwen2Config, reads only text" in refusal(load)


def test_inspect_proposes_units_and_shows_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["inspect", "--data", "tiny.gin", *arguments])
        inspect.main()
        return capsys.readouterr().out

    before = shown("Data.units={}")
    assert "no rows yet, as Data.units has no budget for image" in before
    proposed = re.findall(r"Data.length = (\d+), Data.units = {'image': (\d+)}", before)
    assert {length for length, _ in proposed} == {"48", "96", "192"}
    assert all(int(units) % 4 == 0 for _, units in proposed)
    assert re.search(r"<\|vision_start\|><\|image_pad\|>x \d+ <\|vision_end\|>", before)
    units = next(units for length, units in proposed if length == "96")
    after = shown(f"Data.units={{'image': {units}}}")
    assert f"image: {units} units a row; " in after
    assert re.search(r"media slots: \d+ of image", after)


def test_a_section_is_known_by_its_field() -> None:
    """Modules of the config import other classes of this name."""
    assert load("Sample.prompt='What'").sample.prompt == "What"


def test_imbalance_by_hand() -> None:
    segments = np.array([[1, 1, 2, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.int32)
    arrays = {"segment_ids": segments, "media.image.unit_segments": np.zeros((4, 2), np.int32)}
    assert imbalance(arrays, 2) == {"imbalance/tokens": 1.0, "imbalance/image": 1.0}
    assert imbalance(arrays, 4) == {"imbalance/tokens": 2.0, "imbalance/image": 1.0}
