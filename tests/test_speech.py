"""The example that fetches weights and speech: its readers of other people's files, on small ones made here."""

import dataclasses
import importlib
import io
import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import load_file

from omnijax.data.formats import FormatOptions, to_sample
from omnijax.data.sample import RowId
from omnijax.errors import UserError

FOLDER = Path(__file__).parents[1] / "examples" / "speech"


@pytest.fixture
def speech(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of the example as its command does."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_a_container_of_ctranslate2_is_read_and_split_into_the_weights_of_whisper(speech):
    whisper = speech("ctranslate2_whisper")
    random = np.random.default_rng(0)
    fused, bias = random.standard_normal((12, 4)).astype(np.float16), np.zeros(12, np.float16)
    bias[8:] = 1
    variables = {
        "encoder/conv1/weight": random.standard_normal((4, 2, 3)).astype(np.float16),
        "encoder/layer_10/self_attention/linear_0/weight": fused,
        "encoder/layer_10/self_attention/linear_0/bias": bias,
        "encoder/num_heads": np.int16(2),
        "decoder/layer_norm/gamma": np.ones(4, np.float16),
    }
    file = container(variables)
    found = whisper.tensors(whisper.read(io.BytesIO(file)))
    layer = "model.encoder.layers.10.self_attn"
    assert sorted(found) == sorted(
        [
            "model.encoder.conv1.weight",
            "model.decoder.layer_norm.weight",
            *(f"{layer}.{name}_proj.weight" for name in "qkv"),
            f"{layer}.q_proj.bias",
            f"{layer}.v_proj.bias",
        ]
    )
    np.testing.assert_array_equal(found[f"{layer}.k_proj.weight"], fused[4:8])
    np.testing.assert_array_equal(found[f"{layer}.v_proj.bias"], np.ones(4))
    bias[5] = 1
    with pytest.raises(UserError, match="keys have a bias"):
        whisper.tensors(whisper.read(io.BytesIO(container(variables))))
    for broken in (file[:-3], b"", b"\x07" + file[1:]):
        with pytest.raises(UserError, match=r"model\.bin"):
            whisper.read(io.BytesIO(broken))


def container(variables: dict[str, np.ndarray]) -> bytes:
    """As CTranslate2 writes one, of version 6."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", 6), text("WhisperSpec"), struct.pack("<II", 3, len(variables))]
    for name, value in variables.items():
        number = {"float16": 4, "int16": 2}[value.dtype.name]
        shape = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        parts += [text(name), shape, struct.pack("<BI", number, value.nbytes), value.tobytes()]
    return b"".join(parts)


def test_the_files_of_a_debian_package(speech, tmp_path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in {"./usr/share/a.txt": b"one", "./usr/share/b.wav": b"two!"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    package = tmp_path / "some.deb"
    content = b"!<arch>\n"
    for name, part in {"debian-binary": b"2.0\n", "odd": b"x", "data.tar.xz": data.getvalue()}.items():
        content += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(part):<10}`\n".encode() + part + b"\n" * (len(part) % 2)
        )
    package.write_bytes(content)
    files_of = speech("debian_archive").files_of
    assert dict(files_of(package)) == {"usr/share/a.txt": b"one", "usr/share/b.wav": b"two!"}
    package.write_bytes(b"something else")
    with pytest.raises(UserError, match="no Debian package"):
        list(files_of(package))


def test_a_quantised_llama_becomes_a_folder_that_is_loaded(speech, tmp_path):
    """Rows of queries and keys go from side by side to interleaved and back; tokens and merges make the tokenizer."""
    gguf = pytest.importorskip("gguf", reason="the extra 'test' has gguf")
    import models
    from omnijax import hf
    from omnijax.data.tokenizer import TokenizerFile

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<e>", "<s>", "</s>", "a", "b", "1", "2", "ab", "Ġ", "Ġab"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "attn_norm": (32,), "ffn_norm": (32,)}
    theirs = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    theirs |= {"token_embd.weight": (10, 32), "output_norm.weight": (32,)}
    exact = {}
    for name, shape in theirs.items():
        values = random.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q4_1 if name.endswith("attn_q.weight") else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        exact[name] = gguf.dequantize(packed, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = tmp_path / "out"
    folder.mkdir()
    speech("gguf_llama").convert(tmp_path / "tiny.gguf", folder)

    weights = load_file(folder / "model.safetensors")
    q, kept = weights["model.layers.0.self_attn.q_proj.weight"], exact["blk.0.attn_q.weight"]
    for head in range(4):  # rows 0, 2, 4, 6 of a head are its first half
        np.testing.assert_array_equal(q[8 * head : 8 * head + 4], kept[8 * head : 8 * head + 8 : 2])
        np.testing.assert_array_equal(q[8 * head + 4 : 8 * head + 8], kept[8 * head + 1 : 8 * head + 8 : 2])
    np.testing.assert_array_equal(weights["model.layers.0.mlp.down_proj.weight"], exact["blk.0.ffn_down.weight"])
    model = hf.load(models.family_of(folder), folder)
    assert (model.config.rms_norm_eps, model.config.rope_theta, model.config.tie_word_embeddings) == (1e-5, 1e5, True)
    tokenizer = TokenizerFile(str(folder / "tokenizer.json"), "</s>")
    assert tokenizer.encode("ab12 ab</s>").tolist() == [7, 5, 6, 9, 2]
    assert tokenizer.decode([7, 5, 9]) == "ab1 ab"
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages[0].content }}"


def test_transcripts_become_rows_and_none_is_on_both_sides(speech):
    clips = speech("clips")
    listed = clips.transcripts(
        "; a comment\n\nhello: Hello  there.\nbeep: [a beep]\nat: at [@]\nkeys: ...press * or # to\n"
    )
    texts = {name: clips.spoken(text) for name, text in listed.items()}
    assert texts == {"hello": "Hello there.", "beep": "", "at": "at", "keys": "press star or pound to"}
    made = [clips.Clip(name, text, 1.0) for name, text in texts.items()]
    made += [clips.Clip("letters-a", "a", 1.0), clips.Clip("long", "Hi.", 31.0)]
    kept, left = clips.choose(made)
    assert [clip.name for clip in kept] == ["at", "hello", "keys"]
    assert sorted(name for names in left.values() for name in names) == ["beep", "letters-a", "long"]
    assert clips.is_held_out("Hello there.") == clips.is_held_out("hello  THERE")
    held_out = sum(clips.is_held_out(f"text {number}") for number in range(2000))
    assert 240 <= held_out <= 360  # of 2000, 15 % and 4 deviations
    sample = to_sample(clips.row(kept[1]), RowId("speech", "train.jsonl", 0), FormatOptions(root="/somewhere"))
    sound, question, answer = sample.parts
    assert (sound.kind, sound.role, sound.media.path) == ("audio", "user", "/somewhere/hello.wav")
    assert (question.role, answer.role, answer.text, answer.trained) == ("user", "assistant", "Hello there.", True)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["one", "two"], [str(FOLDER / "fetch.py")]])
def test_a_mistake_is_one_line(arguments):
    command = [sys.executable, str(FOLDER / "fetch.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_was_changed_is_refused_and_kept(speech, tmp_path):
    fetch = speech("fetch")

    def make(downloads: Path, made: Path) -> str:
        (made / "rows.jsonl").write_text("{}\n")
        return "one row"

    fetch.build(make, tmp_path / "downloads", tmp_path / "rows")
    fetch.check(tmp_path / "rows")
    (tmp_path / "rows" / "rows.jsonl").write_text("mine")
    with pytest.raises(UserError, match=r"not as this command makes it \(rows.jsonl\)"):
        fetch.check(tmp_path / "rows")
    assert (tmp_path / "rows" / "rows.jsonl").read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["rows"]


def test_a_damaged_download_is_fetched_again_and_another_file_refused(speech, tmp_path, monkeypatch, capfd):
    packages = speech("packages")
    right = packages.Package("words", "1", "pip", "words.whl", "", 1)
    (tmp_path / "right").write_bytes(b"right")
    right = dataclasses.replace(right, sha256=packages.sha256(tmp_path / "right"))
    brought = [b"wrong", b"right"]
    monkeypatch.setattr(
        packages, "_run", lambda package, where, mend: (Path(where) / "words.whl").write_bytes(brought.pop(0))
    )
    (tmp_path / "words.whl").write_bytes(b"rig")
    with pytest.raises(UserError, match=r"pip brought words.whl for words 1, and not the words.whl of sha256"):
        packages.download(right, tmp_path)
    assert packages.download(right, tmp_path).read_bytes() == b"right"
    assert packages.download(right, tmp_path).read_bytes() == b"right"
    assert "already downloaded" in capfd.readouterr().out
    assert not brought


def test_word_errors(speech):
    pytest.importorskip("jiwer", reason="the extra 'test' has jiwer")
    metric = speech("word_errors")
    assert metric.normalise("Press 1, please! 'Don\u2019t' re-record.") == "press one please don't re record"
    found = metric.word_errors(["Press 12 now.", "Goodbye!"], ["press one three", "good bye"])
    # "two now" -> "three": one substituted, one left out; "goodbye" -> "good bye": one substituted, one added
    assert (found.substituted, found.left_out, found.added, found.words) == (2, 1, 1, 5)
    assert found.rate == 0.8
