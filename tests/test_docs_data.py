"""`docs/data.md`: its rows become what stands below them, its configs run, and its tables say what there is."""

import dataclasses
import io
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image
from pyarrow import ipc

from models.qwen2_vl import Qwen2VLConfig, Qwen2VLTextConfig
from models.vision.qwen2_vl import Qwen2VLVisionConfig
from omnijax import config, ginfile, inspect
from omnijax.data.chat_source import WITH_DATE
from omnijax.data.formats import Format, FormatOptions, to_sample
from omnijax.data.media.audio import AudioLimits
from omnijax.data.media.image import ImageLimits
from omnijax.data.media.video import VideoLimits
from omnijax.data.mixture import open_members
from omnijax.data.omni_packing import imbalance
from omnijax.data.packing import Rows
from omnijax.data.pipeline import make_pipeline
from omnijax.data.rows import KINDS, open_rows
from omnijax.data.sample import MediaReference, Part, RowId
from omnijax.data.stream import ExactStream
from omnijax.data.templates import TEMPLATES
from omnijax.errors import BadRow
from omnijax.inspect_data import marked
from tests.runs import HOME
from tests.test_chat import add_names, byte_pairs, save
from tests.test_chat_training import CHATML, exchange, refusal, write

DOCUMENT = (HOME / "docs" / "data.md").read_text("utf-8")
BLOCKS = [tuple(block) for block in re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", DOCUMENT, re.M | re.S)]
NAMES = get_args(Format)


def split_example(text: str) -> tuple[str, str]:
    """(what stands above the comments, the comments)."""
    lines = text.splitlines()
    above = [line for line in lines if not line.startswith("// ")]
    return "\n".join(above), "\n".join(line[3:] for line in lines if line.startswith("// "))


ROWS = {(name, text): split_example(text) for kind, name, text in BLOCKS if kind == "jsonc"}
CONFIGS = {name: text for kind, name, text in BLOCKS if kind == "gin"}


def table(heading: str) -> list[list[str]]:
    """The cells below the header of the table whose first column is named so."""
    lines = DOCUMENT.partition(f"| {heading} |")[2].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


# Rows


def described(parts: tuple[Part, ...], root: Path) -> str:
    """A sample as the document writes it."""

    def where(medium: MediaReference) -> str:
        if medium.frames is not None:
            text = f"[{', '.join(map(where, medium.frames))}]"
        elif medium.data is not None:
            text = f"of {len(medium.data)} bytes"
        else:
            text = str(Path(medium.path or "").relative_to(root))
        return f"{text} with sound {where(medium.audio)}" if medium.audio else text

    messages: dict[int, list[Part]] = {}
    for part in parts:
        messages.setdefault(part.message, []).append(part)
    lines = []
    for said in messages.values():
        texts = [json.dumps(each.text) if each.media is None else f"{each.kind} {where(each.media)}" for each in said]
        assert len({part.trained for part in said}) == 1
        lines.append(f"{said[0].role}{'*' if said[0].trained else ''}: {', '.join(texts)}")
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "text"), [key for key in ROWS if key[0] in NAMES])
def test_a_row_becomes_what_stands_below_it(name: Any, text: str, tmp_path: Path) -> None:
    row, expected = ROWS[name, text]
    named = FormatOptions(root=str(tmp_path), format=name)
    recognised = named if name == "sharegpt" else FormatOptions(root=str(tmp_path))
    for options in (named, recognised):
        sample = to_sample(json.loads(row), RowId("a", "b", 0), options)
        assert described(sample.parts, tmp_path) == expected


def test_every_format_has_an_example() -> None:
    assert {name for name, _ in ROWS if name in NAMES} == set(NAMES)
    assert set(re.findall(r"^\*\*(\w+)\*\*", DOCUMENT, re.M)) == set(NAMES)


def test_what_is_lost_makes_a_row_bad(tmp_path: Path) -> None:
    [(row, reason)] = [example for (name, _), example in ROWS.items() if name == "refused"]
    with pytest.raises(BadRow) as caught:
        to_sample(json.loads(row), RowId("a", "b", 0), FormatOptions(root=str(tmp_path)))
    assert caught.value.reason == reason


# Files


def test_every_kind_of_file_gives_its_rows(tmp_path: Path) -> None:
    endings = [ending for cells in table("ending") for ending in quoted(cells[0])]
    assert endings == list(KINDS)
    row = {"text": "Hi."}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n\n{json.dumps(row)}\n")
    (tmp_path / "a.json").write_text(json.dumps([row, row]))
    columns = pyarrow.Table.from_pylist([row, row])
    pyarrow.parquet.write_table(columns, tmp_path / "a.parquet")
    for ending in ("arrow", "feather"):
        with ipc.new_file(tmp_path / f"a.{ending}", columns.schema) as arrow:
            arrow.write_table(columns)
    records = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for record in (json.dumps(row).encode(), b"\x00"):
        records.write(record)
    records.close()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in {"0.txt": b"Hi.", "0.json": b"[1]", "0.cls": b"3", "0.jpg": b"JFIF"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    rows = {ending: open_rows(str(tmp_path / f"a{ending}"), name="mine", index_cache=None) for ending in endings}
    assert all(rows[ending][0] == row for ending in endings if ending != ".tar")
    assert rows[".array_record"][1] == {"record": b"\x00"}
    assert rows[".tar"][0] == {"__key__": "0", "txt": "Hi.", "json": [1], "cls": 3, "jpg": b"JFIF"}
    assert str(rows[".jsonl"].row_id(1)) == "mine:a.jsonl:1"
    assert dict(rows[".jsonl"].skipped) == {"blank lines": 1}
    (tmp_path / "_hidden.jsonl").write_text("{}\n")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert len(folder := open_rows(str(tmp_path), name="mine", index_cache=None)) == 13
    assert folder.skipped["hidden files"] == folder.skipped["metadata files"] == 1
    (tmp_path / "b.jsonl.gz").write_text("")
    assert "unpack it" in refusal(lambda: open_rows(str(tmp_path / "b.jsonl.gz"), name="mine", index_cache=None))


# Configs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document's configs, and all that they name."""
    path = tmp_path_factory.mktemp("docs")
    (path / "configs").mkdir()
    shutil.copy(HOME / "configs" / "text.gin", path / "configs")
    (path / "data" / "more").mkdir(parents=True)
    write(path / "data" / "chats.jsonl", *(exchange(number) for number in range(60)))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"text": "Only text."}] * 9), path / "data/more/texts.parquet"
    )
    write(path / "data" / "web.jsonl", *[{"text": "Long ago, in a web far away. "}] * 400)
    pictures = [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}, *exchange(1)["messages"]]  # type: ignore[misc]
    write(path / "data" / "pictures.jsonl", *[{"messages": pictures}] * 40)
    moving = [Image.new("RGB", (16, 12), colour) for colour in ("black", "white")]
    moving[0].save(path / "data" / "a.png", save_all=True, append_images=moving[1:])
    pairs = add_names(byte_pairs())
    tokenizer = save(pairs, path / "model")
    pairs.add_special_tokens(["<|video_pad|>"])
    save(pairs, path / "qwen2_vl")
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids: dict[str, Any] = {f"{name}_token_id": pairs.token_to_id(f"<|{token}|>") for name, token in tokens.items()}
    text, vision = Qwen2VLTextConfig(vocab_size=512), Qwen2VLVisionConfig(hidden_size=Qwen2VLTextConfig().hidden_size)
    (path / "qwen2_vl" / "config.json").write_text(json.dumps(Qwen2VLConfig(text, vision, **ids).to_hf()))
    Path(tokenizer.path).with_name("tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    for name, text in CONFIGS.items():
        (path / name).write_text(text)
    return path


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))  # where the indexes are kept


NO_EVALUATION = ("Data.holdout=0.0", "Evaluation.every=0")


def load(name: str, *overrides: str) -> config.Data:
    return ginfile.load(name, overrides, root=config.Train).value.data


def steps(data: config.Data, count: int, **options: Any) -> list[Rows]:
    stream = ExactStream(make_pipeline(data, open_members(data.source, data.holdout)[0], 0), **options)
    return [next(stream) for _ in range(count)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_rows(name: str) -> None:
    data = load(name)
    (rows,) = steps(data, 1)
    assert rows.arrays["tokens"].shape == (8, data.length) == (8, 1024 if data.units else 128)
    assert {name: rows.arrays[f"media.{name}.features"].shape[1] for name in data.units} == data.units
    assert (Path("~/.cache/omnijax/rows").expanduser()).is_dir()


def test_what_is_trained_of_a_chat() -> None:
    [(row, expected)] = [example for (name, _), example in ROWS.items() if name == "trained"]
    Path("shown.jsonl").write_text(json.dumps(json.loads(row)))
    texts = set()
    for template in ("chatml", "model"):
        data = load("chat.gin", "Chat.path='shown.jsonl'", f"Chat.template={template!r}", *NO_EVALUATION)
        (rows,) = open_members(data.source)[0]
        _, rendered, _ = data.source.items(rows, data.tokenizer, 0).rendered(0)  # type: ignore[attr-defined]
        texts.add(marked(rendered.tokens, rendered.trained, data.tokenizer))
    assert texts == {f"{expected}\n"}


def test_the_built_in_templates() -> None:
    cells = table("`template`")
    assert [name for first, _ in cells for name in quoted(first)] == list(TEMPLATES)
    assert [name for first, last in cells for name in quoted(first)[-1:] if "`date`" in last] == list(WITH_DATE)


def test_a_chat_with_media_is_a_bad_row_in_a_config() -> None:
    assert "the model reads only text" in refusal(
        lambda: steps(load("chat.gin", "Chat.path='data/pictures.jsonl'", *NO_EVALUATION, "Data.rows=1"), 1)
    )


def test_the_metrics() -> None:
    """Of a run in which samples are cut, dropped and empty and rows are bad; the loss of members is the trainer's."""
    rows = [exchange(number) for number in range(40)]
    rows[::8] = [{"messages": [*exchange(1)["messages"], *exchange(2, words=40)["messages"]]}] * 5  # type: ignore[misc]
    rows[1::8] = [exchange(3, words=40)] * 5
    rows[2] = {"messages": 3}
    write(Path("awkward.jsonl"), *rows)
    write(Path("with_empty.jsonl"), *[{"text": ""}, {"text": "Some text."}] * 40)
    overrides = [
        "Chat.path='awkward.jsonl'",
        "web/sources.JsonLines.path='with_empty.jsonl'",
        "Data.over_length='cut'",
        "Data.bad_rows='skip'",
        "Data.look_ahead=4",
    ]
    metrics = steps(load("mixture.gin", *overrides), 6)[-1].metrics
    (pictures,) = steps(load("pictures.gin"), 1)
    names = {*metrics, *pictures.metrics, *imbalance(pictures.arrays, 8)}
    names = {re.sub("(?<=media/).*", "NOTE", re.sub("(?<=share/).*", "NAME", name)) for name in names}
    assert names == {name for cells in table("metric") for name in quoted(cells[0])} - {"loss/NAME"}
    packed = [metrics[f"packing/{name}"] for name in ("packed", "dropped", "empty")]
    assert metrics["packing/read"] - sum(packed) == 4 * 8  # those that wait, of each shard
    fresh = steps(load("chat.gin"), 1)[0].metrics
    assert "packing/dropped" not in fresh


def test_the_shares_of_a_mixture() -> None:
    data = load("mixture.gin", "mixture.Mixture.stop='never'", "chats/mixture.Member.epochs=None", "Data.rows=2")
    shares = [rows.metrics["share/web"] for rows in steps(data, 120)]
    assert 0.74 < np.mean(shares[20:]) < 0.76


def test_bad_rows_are_named_in_a_file() -> None:
    [(_, line)] = [example for (name, _), example in ROWS.items() if name == "bad_row"]
    bad = [{"messages": [{"role": "user", "content": 3}]}] * 11
    rows = [exchange(number) for number in range(4)] + bad[:1] + [exchange(number) for number in range(4, 80)]
    Path("data/spoilt").mkdir()
    write(Path("data/spoilt/chats.jsonl"), *rows)
    report = Path("bad_rows.jsonl")
    data = load("skip.gin", "Chat.path='data/spoilt'", "Data.rows=1", *NO_EVALUATION)
    assert steps(data, 1, report=report)[-1].metrics["bad_rows"] == 1
    assert report.read_text() == f"{line}\n"
    write(Path("data/spoilt/chats.jsonl"), *rows, *bad)
    report.unlink()
    assert "at most 10 may be" in refusal(lambda: steps(load("skip.gin", "Chat.path='data/spoilt'"), 9, report=report))
    assert "turn 0: its text is an int" in refusal(lambda: steps(load("chat.gin", "Chat.path='data/spoilt'"), 9))


def test_a_chat_longer_than_a_row_stops_the_run_also_where_bad_rows_are_skipped() -> None:
    data = load("skip.gin", "Data.length=16", "Data.over_length='raise'")
    assert "of the budget of tokens, which is 16 a row" in refusal(lambda: steps(data, 1))


def test_what_ends_is_counted_out_and_what_is_missing_is_refused() -> None:
    with pytest.raises(StopIteration):
        steps(load("mixture.gin"), 100)
    assert "nothing is at 'gone'" in refusal(lambda: steps(load("mixture.gin", "Chat.path='gone'"), 1))
    assert "workers" in refusal(lambda: steps(load("chat.gin"), 1, workers=9))


def test_inspect_prints_samples_rows_and_budgets(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert "python -m omnijax.inspect --data mine.gin" in DOCUMENT
    monkeypatch.setattr(sys, "argv", ["inspect", "--data", "chat.gin", "Run.dir=shown"])
    inspect.main()
    output = capsys.readouterr().out
    assert re.search(r"<\|im_start\|>assistant\n⟦It is \d+\.<\|im_end\|>⟧", output)
    assert all(f"Data.length = {length}: " in output for length in (64, 128, 256))
    assert Path("shown/packed_rows.png").is_file()


# Media


def test_the_python_of_the_document() -> None:
    [text] = [text for kind, _, text in BLOCKS if kind == "python"]
    namespace: dict[str, Any] = {}
    exec(compile(text, "docs/data.md", "exec"), namespace)
    assert namespace["pixels"].shape == (12, 16, 3)


def test_the_limits() -> None:
    image, video = (vars(limits) for limits in (ImageLimits(), VideoLimits()))
    for name, of_image, of_video, *_ in table("limit"):
        assert of_image == (
            "" if (limit := image.get(quoted(name)[0])) is None else f"{limit:g}" if limit < 1e3 else str(limit)
        )
        limit = video[quoted(name)[0]]
        assert of_video == (f"{limit:g}" if limit < 1e3 else str(limit))
    limits = {**vars(AudioLimits()), **video, "frame_rate": video["frame_rate"]}
    section = DOCUMENT.partition("## Media")[2].partition("\n## ")[0]
    stated = re.findall(r"`(\w+)`\s+(\d+)\b", section)
    assert {name for name, _ in stated} == {
        "fps",
        "min_frames",
        "max_frames",
        "frame_rate",
        "sample_rate",
        "max_seconds",
    }
    assert all(limits[name] == float(value) for name, value in stated)
    fields = {field.name for limits in (VideoLimits, AudioLimits) for field in dataclasses.fields(limits)}
    assert fields - set(re.findall(r"`(\w+)", section)) == set()
