"""Sources, tokenizers, packing and the exact stream, against brute force."""

import json
import math
import pickle
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from omnijax.data.documents import concatenate, split
from omnijax.data.evaluation import evaluation_rows
from omnijax.data.ngram import ngram_bits
from omnijax.data.packing import Place, Rows, make_document, pack_row
from omnijax.data.sources import JsonLines, Parquet, PlainText, PythonDocuments, PythonText
from omnijax.data.stream import Stream, document_order, merge_states
from omnijax.data.tokenizer import Bytes, TokenizerFile
from omnijax.errors import UserError


def documents_of(texts) -> PythonDocuments:
    return PythonDocuments("test", tuple(map(str, range(len(texts)))), tuple(texts))


TEXTS = ["", "a", "bc", "def" * 9, "ghij", "", "klmnop" * 5, "q", "rs", "tuv", "wxyz" * 3]
STREAM = {"length": 8, "rows": 6, "shards": 3, "seed": 7}


def make_stream(texts=TEXTS, **changes) -> Stream:
    return Stream(documents_of(texts), Bytes(), **(STREAM | changes))


def assert_same(left: Rows, right: Rows) -> None:
    assert left.row_ids == right.row_ids
    assert left.state == right.state
    assert left.arrays.keys() == right.arrays.keys()
    for name, array in left.arrays.items():
        np.testing.assert_array_equal(array, right.arrays[name], strict=True)


def refusal(function, *arguments, **keywords) -> str:
    """The one line of the `UserError` that the call raises."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Importing


def test_importing_the_data_package_leaves_jax_alone():
    modules = ", ".join(
        f"omnijax.data.{path.stem}" for path in (Path(__file__).parents[1] / "omnijax" / "data").glob("[!_]*.py")
    )
    check = f"import sys, {modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# Sources


def test_json_lines_over_a_glob(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "three"}')
    (tmp_path / "a.jsonl").write_text('\n{"text": "ōne ✓"}\r\n  \n{"n": 1, "text": "two\\n"}\n\n', encoding="utf-8")
    documents = JsonLines(f"{tmp_path}/*.jsonl").open()
    assert list(documents) == ["ōne ✓", "two\n", "three"]
    assert [documents.row_id(i) for i in (0, 1, 2, -1)] == [
        f"jsonl:{tmp_path}/a.jsonl:2",
        f"jsonl:{tmp_path}/a.jsonl:4",
        f"jsonl:{tmp_path}/b.jsonl:1",
        f"jsonl:{tmp_path}/b.jsonl:1",
    ]
    assert JsonLines(f"{tmp_path}/a.jsonl").open().blank_lines == 3
    assert list(pickle.loads(pickle.dumps(documents))) == list(documents)
    with pytest.raises(IndexError):
        documents[3]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "broken', "line 2 is not JSON"),
        ('["text"]', "line 2 is a JSON list: it must be an object"),
        ('{"Text": "x"}', "line 2 has no field 'text': did you mean 'Text'?"),
        ("{}", "line 2 has no field 'text': it has none"),
        ('{"text": 3}', "line 2 field 'text' is a int: it must be a string"),
        ('{"text": "\\ud800"}', "line 2 field 'text' is not valid Unicode"),
        ("[" * 100_000, "line 2 is not JSON (maximum recursion depth exceeded"),
    ],
)
def test_json_lines_refuse_a_bad_row_when_it_is_read(tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    documents = JsonLines(str(path)).open()
    assert documents[0] == "good"
    message = refusal(documents.__getitem__, 1)
    assert message.startswith(repr(str(path)))
    assert expected in message


def test_parquet_reads_row_groups_of_several_files(tmp_path):
    texts = [f"row {i} é" for i in range(10)]
    for name, rows in [("a", texts[:7]), ("b", []), ("c", texts[7:])]:
        table = pyarrow.table({"text": pyarrow.array(rows, pyarrow.string()), "n": list(range(len(rows)))})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    documents = Parquet(f"{tmp_path}/*.parquet").open()
    assert list(documents) == texts
    assert [documents[i] for i in (9, 0, 6, -1, 3)] == [texts[i] for i in (9, 0, 6, 9, 3)]
    assert documents.row_id(6) == f"parquet:{tmp_path}/a.parquet:6"
    assert documents.row_id(7) == f"parquet:{tmp_path}/c.parquet:0"
    assert pickle.loads(pickle.dumps(documents))[4] == texts[4]


def test_parquet_refusals(tmp_path):
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None], "n": [1, 2]}), path)
    assert "row 1 column 'text' is null" in refusal(Parquet(path).open().__getitem__, 1)
    assert "has no column 'txt': did you mean 'text'?" in refusal(Parquet(path, "txt").open)
    assert "column 'n' is int64: it must be string" in refusal(Parquet(path, "n").open)
    pyarrow.parquet.write_table(pyarrow.table([["x"], ["y"]], names=["text", "text"]), path)
    assert "has 2 columns 'text': rename all but one" in refusal(Parquet(path).open)
    lengths, letters = np.array([0, 2], np.int32), b"\xff\xfe"
    buffers = [None, pyarrow.py_buffer(lengths), pyarrow.py_buffer(letters)]
    text = pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    assert "row 0 column 'text' is not UTF-8" in refusal(Parquet(path).open().__getitem__, 0)
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {i} " * 20 for i in range(100)]}), path)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[:40] + bytes(200) + content[240:])
    assert "row group 0 cannot be read (" in refusal(Parquet(path).open().__getitem__, 3)
    Path(path).write_text("text")
    assert "is not a Parquet file" in refusal(Parquet(path).open)


def test_a_parquet_column_is_told_from_the_field_of_a_struct(tmp_path):
    path = str(tmp_path / "a.parquet")
    struct = pyarrow.array([{"b": "in the struct"}])
    pyarrow.parquet.write_table(pyarrow.table({"a": struct, "a.b": ["in the column"]}), path)
    assert list(Parquet(path, "a.b").open()) == ["in the column"]
    assert "column 'a' is struct<b: string>: it must be string" in refusal(Parquet(path, "a").open)
    pyarrow.parquet.write_table(pyarrow.table({"a": struct}), path)
    assert "has no column 'a.b'" in refusal(Parquet(path, "a.b").open)


def test_plain_text_by_file_and_by_piece(tmp_path):
    contents = {"a.txt": "one\r\n--\ntwo ✓--\n", "b.txt": "", "c.txt": "three"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content.encode())
    assert list(PlainText(f"{tmp_path}/*.txt").open()) == list(contents.values())
    pieces = PlainText(f"{tmp_path}/*.txt", separator="--\n").open()
    assert list(pieces) == [piece for content in contents.values() for piece in content.split("--\n")]
    assert pieces.row_id(1) == f"text:{tmp_path}/a.txt:1"
    (tmp_path / "c.txt").write_bytes(b"\xff")
    assert "piece 0 is not UTF-8" in refusal(PlainText(f"{tmp_path}/c.txt").open().__getitem__, 0)
    assert "separator is ''" in refusal(PlainText(f"{tmp_path}/c.txt", "").open)


def test_no_file_is_refused_by_every_file_source(tmp_path):
    for source in (JsonLines, Parquet, PlainText):
        message = refusal(source(f"{tmp_path}/*.none").open)
        assert message.startswith(f"no file matches path '{tmp_path}/*.none'")


def test_a_path_with_glob_characters_may_be_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert list(PlainText(f"{tmp_path}/a[1].txt").open()) == ["x"]


def test_python_text(monkeypatch):
    module = types.ModuleType("some_texts")
    vars(module).update(by_key={"k": "one", "l": "two"}, listed=["three"], single="text", mixed=["x", 1])
    monkeypatch.setitem(sys.modules, "some_texts", module)
    documents = PythonText("some_texts:by_key").open()
    assert list(documents) == ["one", "two"]
    assert documents.row_id(1) == "python:some_texts:by_key:l"
    assert list(PythonText("some_texts:listed").open()) == ["three"]
    assert "is a str: it must be a dict or a list of str" in refusal(PythonText("some_texts:single").open)
    assert "item 1 is a int: it must be a str" in refusal(PythonText("some_texts:mixed").open)
    for name in ("some_texts", "some_texts:absent", "no_such_module:x", ""):
        assert "give 'module:attribute'" in refusal(PythonText(name).open)


def test_split_holds_out_the_tail():
    documents = documents_of([str(i) for i in range(100)])
    for fraction, held in [(0.07, 7), (0.071, 8), (0.001, 1), (0.99, 99)]:
        train, heldout = split(documents, fraction)
        assert list(train) + list(heldout) == list(documents)
        assert len(heldout) == held
    assert (heldout.row_id(0), heldout.row_id(-1)) == ("python:test:1", "python:test:99")
    assert "it must lie between 0 and 1" in refusal(split, documents, 0)
    assert "holding out 0.5 of 1 documents leaves 0" in refusal(split, documents_of(["x"]), 0.5)
    assert "holding out 0.995 of 100 documents leaves 0" in refusal(split, documents, 0.995)


# Tokenizers


def test_bytes():
    tokenizer = Bytes()
    ids = tokenizer.encode("aé")
    assert ids.tolist() == [97, 0xC3, 0xA9]
    assert ids.dtype == np.int32
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "aé"
    assert tokenizer.decode(ids[:2]) == "a\ufffd"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (256, 257)
    assert [tokenizer.predicted_bytes(text) for text in ("", "a", "aé")] == [0, 0, 2]


@pytest.fixture
def tokenizer_path(tmp_path) -> str:
    """A byte-level tokenizer with one merge and two special tokens; its file asks to add, cut and pad."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)} | {"ab": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<|begin|> $A", special_tokens=[("<|begin|>", 258)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    return path


def test_tokenizer_file(tokenizer_path):
    tokenizer = TokenizerFile(tokenizer_path, "<|end|>")
    ids = tokenizer.encode("abcé abab")
    assert len(ids) == 7  # ab c é(2 bytes) space ab ab: nothing added, cut or filled up
    assert ids.dtype == np.int32
    assert ids[0] == ids[-1] == 256
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "abcé abab"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (257, 259)
    assert [tokenizer.predicted_bytes(text) for text in ("", "ab", "abcé")] == [0, 0, 3]
    restored = pickle.loads(pickle.dumps(tokenizer))
    assert restored == tokenizer
    assert restored.encode("ab").tolist() == [256]
    other = TokenizerFile(tokenizer_path, "<|begin|>")
    assert tokenizer.fingerprint == restored.fingerprint != other.fingerprint


def test_tokenizer_file_refusals(tokenizer_path, tmp_path):
    message = refusal(lambda: TokenizerFile(tokenizer_path, "<|endoftext|>").eos_id)
    assert "'<|endoftext|>' is not a token" in message
    assert "did you mean '<|end|>'" in message
    assert "No such file" in refusal(lambda: TokenizerFile(str(tmp_path / "none.json"), "x").eos_id)
    (tmp_path / "bad.json").write_text("{}")
    assert "is no tokenizer.json" in refusal(TokenizerFile(str(tmp_path / "bad.json"), "x").encode, "a")
    path = str(tmp_path / "words.json")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0})).save(path)
    words = TokenizerFile(path, "known")
    assert words.encode("known").tolist() == [0]
    for call in (words.encode, words.predicted_bytes):
        message = refusal(call, "unknown")
        assert "cannot encode 'unknown' (WordLevel error: Missing [UNK] token from the vocabulary)" in message
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(path)
    assert "has no tokens: give another tokenizer.json" in refusal(lambda: TokenizerFile(path, "x").vocab_size)


def test_half_a_surrogate_pair_is_no_text(tokenizer_path):
    for tokenizer in (Bytes(), TokenizerFile(tokenizer_path, "<|end|>")):
        message = refusal(tokenizer.encode, "ab\ud800")
        assert message.startswith("a text is not valid Unicode")
        assert message.endswith("mend its character 2")


# Packing


def brute_force_rows(texts, length) -> list[dict[str, list]]:
    """Rows of all documents, token by token."""
    cells = []
    for text in texts:
        ids = [*text.encode(), 256] if text else []
        for index, token in enumerate(ids):
            last = index + 1 == len(ids)
            cells.append((token, 0 if last else ids[index + 1], 0.0 if last else 1.0, index == 0))
    rows = []
    for first in range(0, len(cells), length):
        row = {name: [] for name in ("tokens", "segment_ids", "positions", "targets", "weights")}
        segment, position = 0, 0
        for column, (token, target, weight, begins) in enumerate(cells[first : first + length]):
            if begins or column == 0:
                segment, position = segment + 1, 0
            for name, value in zip(row, (token, segment, position, target, weight), strict=True):
                row[name].append(value)
            position += 1
        rows.append({name: values + [0] * (length - len(values)) for name, values in row.items()})
    return rows


def texts_of(lengths) -> list[str]:
    return ["".join(chr(97 + (i + j) % 26) for j in range(length)) for i, length in enumerate(lengths)]


def test_packing_by_hand():
    documents = [make_document(text, name, Bytes()) for name, text in [("p", "ab"), ("none", ""), ("q", "cde")]]
    read = lambda number: documents[number] if number < 3 else None  # noqa: E731
    row, place = pack_row(read, Place(), 5, source=4)
    assert row.row_ids == ("p[0:3]", "q[0:2]")
    assert {name: array.tolist() for name, array in row.arrays.items()} == {
        "tokens": [97, 98, 256, 99, 100],
        "segment_ids": [1, 1, 1, 2, 2],
        "positions": [0, 1, 2, 0, 1],
        "targets": [98, 256, 0, 100, 101],
        "weights": [1, 1, 0, 1, 1],
        "sources": [4, 4, 4, 4, 4],
    }
    assert place == Place(document=2, token=2, empty=1)
    row, place = pack_row(read, place, 5, source=4)
    assert row.row_ids == ("q[2:4]",)
    assert {name: array.tolist() for name, array in row.arrays.items()} == {
        "tokens": [101, 256, 0, 0, 0],
        "segment_ids": [1, 1, 0, 0, 0],
        "positions": [0, 1, 0, 0, 0],
        "targets": [256, 0, 0, 0, 0],
        "weights": [1, 0, 0, 0, 0],
        "sources": [4, 4, 0, 0, 0],
    }
    assert {name: str(array.dtype) for name, array in row.arrays.items()} == {
        name: "float32" if name == "weights" else "int32" for name in row.arrays
    }


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(2, 9), st.integers(1, 4))
def test_evaluation_rows_are_the_brute_force_rows(lengths, length, rows):
    texts = texts_of(lengths)
    if not any(texts):
        assert "has a token" in refusal(evaluation_rows, documents_of(texts), Bytes(), length)
        return
    if max(lengths) == 1:
        assert "has a second token" in refusal(evaluation_rows, documents_of(texts), Bytes(), length)
        return
    evaluation = evaluation_rows(documents_of(texts), Bytes(), length, rows=rows)
    expected = brute_force_rows(texts, length)
    padding = -len(expected) % rows
    for name in expected[0]:
        packed = np.concatenate([step.arrays[name] for step in evaluation.steps])
        assert packed.tolist() == [row[name] for row in expected] + [[0] * length] * padding
    assert all(step.arrays["tokens"].shape == (rows, length) for step in evaluation.steps)
    assert evaluation.empty == lengths.count(0)
    # Every token but the first of each document is predicted once, and stands for one byte unless it is the end.
    trained = sum(int(step.arrays["weights"].sum()) for step in evaluation.steps)
    assert trained == sum(lengths)
    assert evaluation.bytes == sum(max(length - 1, 0) for length in lengths)


def test_evaluation_refuses_short_rows():
    assert "at least 1 row of at least 2 tokens" in refusal(evaluation_rows, documents_of(["x"]), Bytes(), 1)


# The exact stream


def test_every_epoch_is_another_permutation():
    for count in (1, 2, 5, 64, 257):
        order = document_order(count, seed=3)
        epochs = [tuple(order[epoch * count + i] for i in range(count)) for epoch in range(5)]
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
        assert count < 5 or len(set(epochs)) == 5
    other = document_order(257, seed=4)
    assert tuple(other[i] for i in range(257)) not in epochs


def brute_force_shard(texts, shard, count, *, length, shards, seed) -> list[dict[str, list]]:
    """The first `count` rows of one shard, cut from all its documents at once."""
    order = document_order(len(texts), seed)
    dealt, tokens, n = [], 0, shard
    while tokens <= count * length:
        text = texts[order[n]]
        dealt.append(text)
        tokens += len(text) + 1 if text else 0
        n += shards
    return brute_force_rows(dealt, length)[:count]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, 30), min_size=4, max_size=12).filter(any),
    st.integers(2, 9),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(0, 2**32 - 1),
)
def test_stream_is_the_brute_force_stream_and_restores_at_every_step(lengths, length, shards, per_shard, seed):
    texts = texts_of(lengths)
    sizes = {"length": length, "shards": shards, "seed": seed}
    make = lambda: Stream(documents_of(texts), Bytes(), rows=per_shard * shards, **sizes)  # noqa: E731
    stream = make()
    states, steps = [stream.state()], []
    for _ in range(5):
        steps.append(next(stream))
        states.append(stream.state())
        assert steps[-1].state == states[-1]
    for shard in range(shards):
        expected = brute_force_shard(texts, shard, 5 * per_shard, **sizes)
        for name in expected[0]:
            rows = np.concatenate([step.arrays[name][shard::shards] for step in steps])
            assert rows.tolist() == [row[name] for row in expected]
    restored = make()
    for step, state in reversed(list(enumerate(states[:-1]))):
        restored.restore(json.loads(json.dumps(state)))
        assert restored.state() == state
        assert_same(next(restored), steps[step])


def test_restored_twice_across_many_epochs():
    steps = [next(stream) for stream in [make_stream()] for _ in range(40)]
    documents_read = sum(place["document"] for place in steps[-1].state["shards"].values())
    assert documents_read > 3 * len(TEXTS)
    state = make_stream().state()
    for first in range(0, 40, 4):  # a new stream for every four steps
        stream = make_stream()
        stream.restore(state)
        for step in steps[first : first + 4]:
            assert_same(next(stream), step)
        state = json.loads(json.dumps(stream.state()))


def test_each_epoch_holds_every_document_once():
    texts = [f"{i:02}" for i in range(10)]  # three tokens each: every shard reads at the same pace
    stream = make_stream(texts, length=3, rows=5, shards=5)
    seen = [text for _ in range(6) for row in next(stream).row_ids for text in row]
    for epoch in range(3):
        assert sorted(seen[epoch * 10 : epoch * 10 + 10]) == [f"python:test:{i}[0:3]" for i in range(10)]


def test_row_names_say_which_tokens_stand_in_a_row():
    rows = next(make_stream())
    for row, names in enumerate(rows.row_ids):
        tokens = []
        for name in names:
            text, span = name.removeprefix("python:test:").removesuffix("]").split("[")
            first, end = map(int, span.split(":"))
            tokens += [*TEXTS[int(text)].encode(), 256][first:end]
        assert rows.arrays["tokens"][row].tolist() == tokens


def test_rows_do_not_depend_on_processes_or_the_batch_size():
    """Any dealing of shards to processes, another one after a restart, and more rows a step: the same rows."""
    whole = make_stream()
    steps = [next(whole) for _ in range(4)]
    pair = [make_stream(held=[0, 2]), make_stream(held=[1])]
    for step in steps[:2]:
        parts = [next(stream) for stream in pair]
        np.testing.assert_array_equal(parts[0].arrays["tokens"], step.arrays["tokens"][[0, 2, 3, 5]])
        np.testing.assert_array_equal(parts[1].arrays["tokens"], step.arrays["tokens"][[1, 4]])
        assert parts[1].row_ids == (step.row_ids[1], step.row_ids[4])
    state = merge_states([part.state for part in parts])
    assert state["shards"] == steps[1].state["shards"]
    trio = [make_stream(held=[shard]) for shard in range(3)]
    for shard, stream in enumerate(trio):
        stream.restore(state)
        np.testing.assert_array_equal(next(stream).arrays["targets"], steps[2].arrays["targets"][shard::3])
    large = make_stream(rows=12)
    large.restore(state)
    both = np.concatenate([step.arrays["tokens"] for step in steps[2:]])
    np.testing.assert_array_equal(next(large).arrays["tokens"], both)


def test_a_row_that_cannot_be_read_leaves_the_stream_where_it_was(tmp_path):
    path = tmp_path / "a.jsonl"
    good = '{"text": "good"}\n'
    path.write_text(good + "[]" + " " * (len(good) - 3) + "\n")
    stream = Stream(JsonLines(str(path)).open(), Bytes(), length=4, rows=2, shards=2, seed=0)
    before = stream.state()
    assert "line 2 is a JSON list" in refusal(next, stream)
    assert stream.state() == before
    path.write_text(good * 2)
    assert next(stream).arrays["tokens"].tolist() == [list(b"good")] * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 8}, "has seed 7, this run has 8"),
        ({"length": 9}, "has length 8, this run has 9"),
        ({"shards": 2}, "has shards 3, this run has 2"),
        ({"texts": TEXTS[:-1]}, "has documents 11, this run has 10"),
    ],
)
def test_a_state_of_another_stream_is_refused(changes, expected):
    other = make_stream(**changes)
    before = other.state()
    assert expected in refusal(other.restore, next(make_stream()).state)
    assert other.state() == before


def test_other_refusals_of_a_state(tokenizer_path):
    state = next(make_stream()).state
    with_file = Stream(documents_of(TEXTS), TokenizerFile(tokenizer_path, "<|end|>"), **STREAM)
    assert "has tokenizer 'bytes', this run has 'sha256" in refusal(with_file.restore, state)
    part = next(make_stream(held=[0, 2])).state
    assert "lacks the shards [1]" in refusal(make_stream().restore, part)
    assert "must hold 'stream' and 'shards'" in refusal(make_stream().restore, {})
    assert "has seed 7, another process has 9" in refusal(merge_states, [next(make_stream(seed=9)).state, part])
    other_grain = {**state, "stream": {**state["stream"], "grain_order": [0] * 8}}
    assert "has grain_order [0, 0, 0" in refusal(make_stream().restore, other_grain)
    shorter = make_stream(["x"] * len(TEXTS))
    assert "has content" in refusal(shorter.restore, state)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rows": 8}, "8 rows a step over 3 shards: shards must divide rows; set shards to 2 or rows to 9"),
        ({"rows": 0}, "0 rows a step over 3 shards: give at least 1 of each"),
        (
            {"texts": ["x", "y"]},
            "2 documents for 3 shards: each shard needs its own; give more documents, or at most 2",
        ),
        ({"texts": [""] * 5}, "none of the 5 documents has a token"),
        ({"length": 1}, "row length is 1: it must be at least 2"),
        ({"seed": -1}, "data seed is -1: it must lie in 0..4294967295"),
        ({"held": [1, 3]}, "held shards are [1, 3]: name one or more of 0..2"),
        ({"held": []}, "held shards are []"),
    ],
)
def test_stream_arguments_are_refused(changes, expected):
    assert expected in refusal(make_stream, **changes)


def test_one_document_with_text_feeds_every_shard():
    rows = next(make_stream(["", "", "", "only", "", ""]))
    assert (rows.arrays["segment_ids"] > 0).all()
    assert sum(place["empty"] for place in rows.state["shards"].values()) > 0


def test_concatenate_keeps_names():
    documents = concatenate([documents_of(["a"]), documents_of([]), documents_of(["b", "c"])])
    assert list(documents) == ["a", "b", "c"]
    assert [documents.row_id(i) for i in range(3)] == ["python:test:0", "python:test:0", "python:test:1"]


# The n-gram baseline


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_ngram_bits_against_counting(order):
    generator = np.random.default_rng(0)
    vocab, train, heldout = 5, generator.integers(0, 5, 60), generator.integers(0, 5, 30)
    runs = [tuple(train[i : i + order]) for i in range(len(train) - order + 1)]
    bits = []
    for i in range(len(heldout) - order + 1):
        run = tuple(heldout[i : i + order])
        seen = sum(other == run for other in runs)
        contexts = sum(other[:-1] == run[:-1] for other in runs)
        bits.append(-math.log2((seen + 0.1) / (contexts + 0.1 * vocab)))
    assert ngram_bits(train, heldout, order, vocab) == pytest.approx(sum(bits) / len(bits), rel=1e-12)


def test_ngram_bits_by_hand():
    # After 0 came 1 twice and 2 once; smoothing 1 over 3 ids: p(1|0) = (2+1)/(3+3) = 1/2, an unseen context gives 1/3.
    train = np.array([0, 1, 0, 1, 0, 2])
    assert ngram_bits(train, np.array([0, 1]), 2, 3, smoothing=1) == pytest.approx(1)
    assert ngram_bits(train, np.array([2, 1]), 2, 3, smoothing=1) == pytest.approx(math.log2(3))


def test_ngram_refusals():
    tokens = np.array([0, 1, 2])
    assert "heldout_tokens has 1 tokens" in refusal(ngram_bits, tokens, tokens[:1], 2, 3)
    assert "train_tokens has ids 0..2: they must lie in 0..1" in refusal(ngram_bits, tokens, tokens, 2, 2)
    assert "smoothing is 0" in refusal(ngram_bits, tokens, tokens, 2, 3, smoothing=0)
    assert "order 9 over 257 ids" in refusal(ngram_bits, tokens, tokens, 9, 257)


def test_a_corpus_of_other_texts_is_refused_on_restore() -> None:
    def stream(texts: tuple[str, ...]) -> Stream:
        documents = PythonDocuments("texts", tuple(str(number) for number in range(len(texts))), texts)
        return Stream(documents, Bytes(), length=4, rows=2, shards=2, seed=0)

    first = stream(("one", "two", "three"))
    next(first)
    with pytest.raises(UserError, match="the data state has content"):
        stream(("one", "2", "three")).restore(first.state())
    stream(("one", "two", "three")).restore(first.state())
