"""Rows of every kind of file: what they hold, their ids, their cached indexes, and what is refused."""

import io
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from omnijax.data import arrow_rows, json_rows, row_index
from omnijax.data.documents import concatenate, split
from omnijax.data.rows import open_rows
from omnijax.data.sample import RowId
from omnijax.errors import BadRow, UserError

ROWS = [
    {"id": 0, "text": "ōne ✓", "chat": [{"role": "user", "n": 1}], "picture": b"\x00\xff"},
    {"id": 1, "text": None, "chat": [], "picture": b""},
    {"id": 2, "text": "thrée", "chat": [{"role": "user", "n": 2}, {"role": "tool", "n": None}], "picture": None},
    {"id": 3, "text": "", "chat": None, "picture": b"x" * 300},
    {"id": 4, "text": "five\n", "chat": [{"role": None, "n": -1}], "picture": b"y"},
]
PLAIN = [{name: value for name, value in row.items() if name != "picture"} for row in ROWS]  # what JSON can hold


@pytest.fixture
def opened(tmp_path):
    """`open_rows` with a cache of the test's own."""

    def call(*paths, name="web", index_cache=str(tmp_path / "cache")):
        return open_rows([str(path) for path in paths], name=name, index_cache=index_cache)

    return call


@pytest.fixture
def memory():
    """fsspec's file system in memory, empty."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def refusal(function, *arguments, **keywords) -> str:
    """The one line of the `UserError` that the call raises."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def json_lines(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet(rows, group=2) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream, row_group_size=group)
    return stream.getvalue()


def arrow(rows, new=ipc.new_stream, group=2, compression=None) -> bytes:
    table, stream = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with new(stream, table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=group)
    return stream.getvalue()


def array_record(folder, records) -> bytes:
    path = folder / "written.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    content = path.read_bytes()
    path.unlink()
    return content


def tar(members, kind=tarfile.REGTYPE, format=tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.type = len(content), tarfile.DIRTYPE if name.endswith("/") else kind
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def contents(folder) -> dict[str, tuple[bytes, list]]:
    """{file name: its bytes and rows}, one of each kind."""
    records = [json.dumps(row).encode() for row in PLAIN[:3]] + [b"\x89PNG", b"{no JSON", b"[1]"]
    listed = json.dumps(PLAIN, indent=1, ensure_ascii=False).encode()
    return {
        "lines.jsonl": (b"\n" + json_lines(PLAIN[:2]) + b" \t\r\n\n" + json_lines(PLAIN[2:]).strip(), PLAIN),
        "list.json": (b"\xef\xbb\xbf \n" + listed + b"\n", PLAIN),
        "object.json": (json.dumps(PLAIN[1]).encode(), PLAIN[1:2]),
        "table.parquet": (parquet(ROWS), ROWS),
        "stream.arrow": (arrow(ROWS), ROWS),
        "packed.arrow": (arrow(ROWS, compression="zstd", group=3), ROWS),
        "file.arrow": (arrow(ROWS, ipc.new_file), ROWS),
        "file.feather": (arrow(ROWS, ipc.new_file, compression="lz4"), ROWS),
        "r.array_record": (
            array_record(folder, records),
            PLAIN[:3] + [{"record": record} for record in records[3:]],
        ),
        "shard.tar": (
            tar(
                [
                    ("README", b"no row"),
                    ("a.b/", b""),
                    ("a.b/0.jpg", b"\xff\xd8"),
                    ("a.b/0.json", b'{"\xc3\xa9": [1]}'),
                    ("a.b/0.seg.TXT", "thrée".encode()),
                    ("a.b/1.cls", b"7\n"),
                    ("a.b/1.pkl", b"cos\nsystem\n(S'false'\ntR."),
                    ("a.b/1.empty", b""),
                    (f"{'long' * 60}.txt", b"one"),
                ]
            ),
            [
                {"__key__": "a.b/0", "jpg": b"\xff\xd8", "json": {"é": [1]}, "seg.txt": "thrée"},
                {"__key__": "a.b/1", "cls": 7, "pkl": b"cos\nsystem\n(S'false'\ntR.", "empty": b""},
                {"__key__": "long" * 60, "txt": "one"},
            ],
        ),
    }


LINEWISE = ["lines.jsonl", "list.json", "object.json"]
TABLES = ["table.parquet", "stream.arrow", "packed.arrow", "file.arrow", "file.feather"]
KINDS = [*LINEWISE, *TABLES, "r.array_record", "shard.tar"]


# Contents


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("cached", [True, False])
def test_rows_are_what_was_written(opened, memory, tmp_path, name, place, cached):
    content, expected = contents(tmp_path)[name]
    if place == "disk":
        (tmp_path / name).write_bytes(content)
        path = tmp_path / name
    else:
        memory.pipe(f"/bucket/{name}", content)
        path = f"memory://bucket/{name}"
    for _ in range(2):  # the index is made, then found
        rows = opened(path) if cached else opened(path, index_cache=None)
        assert len(rows) == len(expected)
        for index in [*range(len(expected)), -1, *reversed(range(len(expected)))]:
            assert rows[index] == expected[index]
            assert rows.row_id(index) == RowId("web", name, range(len(expected))[index])
        with pytest.raises(IndexError):
            rows[len(rows)]


def test_every_kind_in_one_folder_with_what_is_not_read_counted(opened, tmp_path, caplog):
    folder = tmp_path / "data"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    expected = []
    for name, (content, rows) in sorted(contents(tmp_path).items()):
        (folder / name).write_bytes(content)
        expected += rows
    (folder / "zero.jsonl").write_bytes(b"")
    for name in ("README.md", "deep/notes.md", "deep/x.jsonl.gz", "LICENSE", "_SUCCESS", "dataset_info.json"):
        (folder / name).write_text("{}")
    (folder / "deep" / ".hidden" / "x.jsonl").write_text("{}")
    (folder / "link").symlink_to(folder / "deep")
    with caplog.at_level(logging.INFO):
        rows = opened(folder)
    assert list(rows) == expected
    assert rows.skipped == {
        ".md files": 2,
        ".gz files": 1,
        "suffixless files": 1,
        "hidden files": 2,
        "metadata files": 1,
        "links to folders": 1,
        "files without rows": 1,
        "blank lines": 3,
        "members without a key": 1,
    }
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"source web: {len(expected)} rows; files: 1 .array_record, 3 .arrow, 1 .feather" in record.getMessage()
    assert "not read: 1 .gz files, 2 .md files, 3 blank lines" in record.getMessage()


def test_a_file_is_named_by_its_place_below_the_common_root(opened, memory, tmp_path):
    for folder in ("one/a", "one/b", "two"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.jsonl").write_bytes(json_lines([{"from": folder}]))

    def names(rows) -> list[tuple[str, str]]:
        return [(row["from"], rows.row_id(index).file) for index, row in enumerate(rows)]

    assert names(opened(tmp_path / "one")) == [("one/a", "a/x.jsonl"), ("one/b", "b/x.jsonl")]
    assert names(opened(tmp_path / "one" / "*" / "x.jsonl")) == [("one/a", "a/x.jsonl"), ("one/b", "b/x.jsonl")]
    assert names(opened(tmp_path / "one" / "*")) == [("one/a", "a/x.jsonl"), ("one/b", "b/x.jsonl")]  # of folders
    assert names(opened(tmp_path / "two" / "x.jsonl", tmp_path / "one/a")) == [
        ("two", "two/x.jsonl"),
        ("one/a", "one/a/x.jsonl"),
    ]
    memory.pipe({"/c/a/x.jsonl": json_lines([{"from": "a"}]), "/c/b/x.jsonl": json_lines([{"from": "b"}])})
    for path in ("memory://c", "memory://c/**/*.jsonl", "memory://c/*/x.jsonl"):
        assert names(opened(path)) == [("a", "a/x.jsonl"), ("b", "b/x.jsonl")]
    assert str(opened("memory://c").row_id(1)) == "web:b/x.jsonl:0"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.just(" \n"), st.dictionaries(st.text(), st.none() | st.text() | st.integers()))))
def test_any_lines_are_found(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) + "\n" for line in lines]
    path.write_bytes("".join(texts).encode())
    objects = [line for line in lines if not isinstance(line, str)]
    if not objects:
        assert "no row" in refusal(open_rows, str(path), name="web", index_cache=None)
    else:
        assert list(open_rows(str(path), name="web", index_cache=None)) == objects


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), st.lists), min_size=1), st.integers(0, 2)
)
def test_any_json_list_is_found(tmp_path_factory, values, indent):
    path = tmp_path_factory.mktemp("list") / "x.json"
    objects = [{"value": value} for value in values]
    path.write_text(json.dumps(objects, indent=indent or None, ensure_ascii=False), "utf-8")
    assert list(open_rows(str(path), name="web", index_cache=None)) == objects


def test_a_held_out_part_and_a_joint_keep_the_ids(opened, tmp_path):
    for name, rows in (("a", PLAIN[:2]), ("b", PLAIN[2:])):
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines(rows))
    both = concatenate([opened(tmp_path / "a.jsonl", name="first"), opened(tmp_path / "b.jsonl", name="second")])
    train, held = split(both, 0.4)
    assert list(train) == PLAIN[:3]
    assert list(held) == PLAIN[3:]
    assert [str(held.row_id(index)) for index in range(2)] == ["second:b.jsonl:1", "second:b.jsonl:2"]


# Workers


def test_a_spawned_worker_reads_the_same_rows_without_jax(opened, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, (content, _) in contents(tmp_path).items():
        (folder / name).write_bytes(content)
    for rows in (opened(folder), opened(folder, index_cache=None)):
        expected = list(rows)  # what was read by now must not travel
        assert len(pickle.dumps(rows)) < 500 * len(KINDS)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(rows.__getitem__, range(len(rows)))) == expected
    script = (
        "import pickle, sys\n"
        "rows = list(pickle.load(sys.stdin.buffer))\n"
        "sys.exit('a worker imported jax') if 'jax' in sys.modules else sys.stdout.buffer.write(pickle.dumps(rows))"
    )
    done = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(rows), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert pickle.loads(done.stdout) == expected


# The cached index


def test_a_cached_index_spares_the_file(opened, tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n" + json_lines(PLAIN))
    opened(path)
    monkeypatch.setattr("omnijax.data.files.StoredFile.open", None)
    rows = opened(path)
    assert list(rows) == PLAIN
    assert rows.skipped == {"blank lines": 1}


def test_a_changed_file_has_another_index(opened, tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n')
    assert list(opened(path)) == [{"a": 1}, {"b": 2}]
    before = path.stat()
    path.write_bytes(b'{"a": 12345678}\n\n\n')  # as long, and as old
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert list(opened(path)) == [{"a": 12345678}]


def test_a_changed_remote_file_has_another_index(opened, memory):
    memory.pipe("/x.jsonl", b'{"a": 1}\n{"b": 2}\n')
    assert list(opened("memory://x.jsonl")) == [{"a": 1}, {"b": 2}]
    memory.pipe("/x.jsonl", b'{"a": 12345678}\n\n\n')
    assert list(opened("memory://x.jsonl")) == [{"a": 12345678}]


@pytest.mark.parametrize("kept", [b"", b"no index", "half"])
def test_a_damaged_index_is_made_again(opened, tmp_path, kept):
    path = tmp_path / "x.jsonl"
    path.write_bytes(json_lines(PLAIN))
    opened(path)
    (index,) = (tmp_path / "cache").iterdir()
    index.write_bytes(index.read_bytes()[:100] if kept == "half" else kept)
    row_index.open_index.cache_clear()
    assert list(opened(path)) == PLAIN


def test_an_index_that_was_deleted_is_named(opened, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(json_lines(PLAIN))
    rows = opened(tmp_path / "x.jsonl")
    (index,) = (tmp_path / "cache").iterdir()
    index.unlink()
    row_index.open_index.cache_clear()
    assert f"the index '{index}' of '{tmp_path}/x.jsonl' is missing" in refusal(rows.__getitem__, 0)


def index_and_count(arguments) -> int:
    path, cache = arguments
    return len(open_rows(path, name="web", index_cache=cache))


def test_processes_may_index_the_same_file_at_once(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(json_lines(PLAIN * 1000))
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map(index_and_count, [(str(path), str(tmp_path / "cache"))] * 6) == [5000] * 6
    assert len(list((tmp_path / "cache").iterdir())) == 1  # and nothing half written


def test_a_cache_that_cannot_be_written_is_refused(opened, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(json_lines(PLAIN))
    (tmp_path / "cache").write_text("a file")
    assert "give another index_cache" in refusal(opened, tmp_path / "x.jsonl")


# Memory


def test_decoded_groups_are_kept_up_to_their_bytes():
    kept = arrow_rows.Kept(limit=100)
    made = []

    def get(key, size):
        return kept.get(key, lambda: made.append(key) or (key, size))

    for key, size in [("a", 40), ("b", 40), ("a", 40), ("c", 40), ("a", 40), ("b", 40), ("huge", 1000), ("huge", 1000)]:
        assert get(key, size) == key
    assert made == ["a", "b", "c", "b", "huge"]  # b went for c, being the oldest; huge is kept alone
    get("d", 1)
    get("huge", 1000)
    assert made == ["a", "b", "c", "b", "huge", "d", "huge"]


def test_a_row_of_parquet_decodes_its_group_alone(opened, tmp_path, monkeypatch):
    rows = [{"id": number} for number in range(20)]
    (tmp_path / "x.parquet").write_bytes(parquet(rows, group=5))
    opened_rows = opened(tmp_path / "x.parquet")
    groups = []
    original = pyarrow.parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "read_row_group",
        lambda self, group, **keywords: groups.append(group) or original(self, group, **keywords),
    )
    assert [opened_rows[index]["id"] for index in (7, 9, 8, 0, 19, 5)] == [7, 9, 8, 0, 19, 5]
    assert groups == [1, 0, 3]


# Bad rows


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{oops", "is not JSON at byte 9 (Expecting property name"),
        (b"[1, 2]", "is a JSON list at byte 9"),
        (b'{"a": "\xff"}', "is not JSON at byte 9 ('utf-8' codec"),
        (b"[" * 100_000, "is not JSON at byte 9"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON at byte 9"),
    ],
)
def test_a_bad_line_is_refused_with_its_id_when_it_is_read(opened, tmp_path, line, expected):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n' + line + b'\n{"b": 2}\n')
    rows = opened(tmp_path / "x.jsonl")
    assert [rows[0], rows[2]] == [{"a": 1}, {"b": 2}]
    assert refusal(rows.__getitem__, 1).startswith(f"web:x.jsonl:1: {expected}")
    with pytest.raises(BadRow):
        rows[1]


def test_an_item_of_a_json_list_that_is_no_object_is_refused_when_it_is_read(opened, tmp_path):
    (tmp_path / "x.json").write_text('[{"a": 1}, 7]')
    rows = opened(tmp_path / "x.json")
    assert rows[0] == {"a": 1}
    assert "web:x.json:1: is a JSON int" in refusal(rows.__getitem__, 1)


@pytest.mark.parametrize(
    ("name", "content"), [("json", b"{"), ("txt", b"\xff"), ("cls", b"cat"), ("a.json", b"[" * 10**5)]
)
def test_a_bad_member_of_a_tar_is_refused_with_its_id(opened, tmp_path, name, content):
    (tmp_path / "x.tar").write_bytes(tar([("a.txt", b"fine"), (f"b.{name}", content)]))
    rows = opened(tmp_path / "x.tar")
    assert rows[0]["txt"] == "fine"
    assert f"web:x.tar:1: has a member b.{name} that is not" in refusal(rows.__getitem__, 1)


@pytest.mark.parametrize(
    ("name", "content"), [("x.parquet", parquet(ROWS)), ("x.arrow", arrow(ROWS, compression="zstd"))]
)
def test_a_damaged_group_spoils_its_rows_only(opened, tmp_path, name, content):
    middle = content.index(b"five") if name == "x.parquet" else content.rindex(b"\x28\xb5\x2f\xfd")  # zstd's magic
    damaged = content[: middle - 8] + b"\xee" * 16 + content[middle + 8 :]
    (tmp_path / name).write_bytes(damaged)
    rows = opened(tmp_path / name)
    assert [rows[index] for index in range(4)] == ROWS[:4]
    assert f"web:{name}:4: cannot be decoded with its group 2" in refusal(rows.__getitem__, 4)
    with pytest.raises(BadRow):
        rows[4]


def test_a_file_that_is_lost_while_it_is_read_is_no_bad_row(opened, tmp_path):
    for name, content in (
        ("x.jsonl", json_lines(PLAIN)),
        ("x.parquet", parquet(ROWS)),
        ("x.tar", tar([("a.b", b"c")])),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        rows = opened(path)
        path.write_bytes(b"")
        if name != "x.parquet":
            assert "lost bytes" in refusal(rows.__getitem__, 0)
        path.unlink()
        with pytest.raises(UserError, match="missing") as caught:
            rows[0]
        assert not isinstance(caught.value, BadRow)


# Files that are not whole


@pytest.mark.parametrize(
    "name", ["list.json", "table.parquet", "stream.arrow", "file.arrow", "r.array_record", "shard.tar"]
)
def test_a_file_that_was_cut_is_refused_by_name(opened, tmp_path, name):
    content, _ = contents(tmp_path)[name]
    end = content.index(b"one", content.index(b"longlong")) + 512 if name == "shard.tar" else len(content)
    for size in sorted({0, 1, 100, end // 2, end - 512, end - 8, end - 4, end - 1} - {end}):
        if name == "list.json" and content[:size].rstrip().endswith(b"]"):
            continue  # only the newline after it is missing
        (tmp_path / name).write_bytes(content[:size])
        message = refusal(opened, tmp_path / name)
        assert repr(str(tmp_path / name)) in message, message


@pytest.mark.parametrize(
    ("members", "kind", "expected"),
    [
        ([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"3")], tarfile.REGTYPE, "'a.txt' is double, or apart from"),
        ([("a.jpg", b"1"), ("a.JPG", b"2")], tarfile.REGTYPE, "'a.JPG' is double, or apart from its row 'a'"),
        ([("a.jpg", b"")], tarfile.SYMTYPE, "member 'a.jpg' is a link"),
        ([("a.jpg", b"")], tarfile.LNKTYPE, "member 'a.jpg' is a link"),
    ],
)
def test_a_tar_whose_rows_are_not_together_and_plain_is_refused(opened, tmp_path, members, kind, expected):
    (tmp_path / "x.tar").write_bytes(tar(members, kind))
    assert expected in refusal(opened, tmp_path / "x.tar")


def test_a_tar_that_is_damaged_in_its_middle_is_refused(opened, tmp_path):
    content = tar([("a.txt", b"1"), ("b.txt", b"2"), ("c.txt", b"3")])
    (tmp_path / "x.tar").write_bytes(content[:1024] + b"\xee" * 512 + content[1536:])
    assert "no end mark" in refusal(opened, tmp_path / "x.tar")


def test_arrow_streams_with_dictionaries_or_joined_end_to_end_are_refused(opened, tmp_path):
    table = pyarrow.table({"a": pyarrow.array(["x", "y", "x"]).dictionary_encode()})
    with ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert "write it as an Arrow file" in refusal(opened, tmp_path / "x.arrow")
    with ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert list(opened(tmp_path / "x.arrow")) == [{"a": "x"}, {"a": "y"}, {"a": "x"}]
    (tmp_path / "x.arrow").write_bytes(arrow(ROWS) * 2)
    assert "is several" in refusal(opened, tmp_path / "x.arrow")


def test_columns_of_one_name_are_refused(opened, tmp_path):
    table = pyarrow.table([np.arange(3), np.arange(3)], names=["a", "a"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert "several columns of one name" in refusal(opened, tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json_lines(PLAIN), "Extra data"),
        (b"[{}, {}", "Expecting ',' delimiter"),
        (b"[{},, {}]", "Expecting value"),
        (b"[{}] {}", "Extra data"),
        (b"{oops}", "Expecting property name"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_a_json_file_that_is_no_list_or_object_is_refused(opened, tmp_path, content, expected):
    (tmp_path / "x.json").write_bytes(content)
    message = refusal(opened, tmp_path / "x.json")
    assert expected in message
    assert "name it .jsonl" in message


def test_a_json_file_beyond_the_limit_is_refused(opened, tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text("[{}]")
    monkeypatch.setattr(json_rows, "JSON_BYTES", 3)
    assert "has 4 bytes, and a .json file is read whole, up to 3: write it as .jsonl" in refusal(
        opened, tmp_path / "x.json"
    )


# Paths


def test_paths_with_nothing_to_read_are_refused(opened, memory, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "x.jsonl.gz").write_text("text")
    (tmp_path / "x.jsonl").write_text("{}")
    (tmp_path / "broken.jsonl").symlink_to("nowhere")
    memory.pipe("/x.jsonl", b"{}")
    for paths, expected in [
        ((), "no path is given"),
        ((tmp_path / "missing",), "nothing is at"),
        ((tmp_path / "missing" / "*.jsonl",), "a glob like 'data/*.jsonl' that matches"),
        (("memory://missing",), "nothing is at 'memory://missing'"),
        ((tmp_path / "empty",), "holds no file of rows"),
        ((tmp_path / "*.txt",), "holds no file of rows"),
        ((tmp_path / "blank.jsonl",), "source 'web' has no row in its 1 files"),
        ((tmp_path / "notes.txt",), "(.txt files): a name must end in .jsonl, .json, .parquet"),
        ((tmp_path / "x.jsonl.gz",), "(.gz files): unpack it"),
        ((tmp_path / "broken.jsonl",), "is a link to 'nowhere', which is missing"),
        ((tmp_path,), f"'{tmp_path}/broken.jsonl' is missing, or links to what is"),
        ((tmp_path / "x.jsonl", tmp_path / "x.*"), "name it once"),
        ((tmp_path / "x.jsonl", "memory://x.jsonl"), "lie on several file systems"),
        (("nope://x.jsonl",), "Protocol not known: nope"),
    ]:
        assert expected in refusal(opened, *paths)


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_file_system_that_is_not_installed_is_named(opened, scheme, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    assert package in refusal(opened, f"{scheme}://bucket/x.jsonl")


@pytest.fixture
def anybody():
    """A folder that every user may enter, and the test is a user who may not do everything."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        if user == 0:
            os.seteuid(65534)
        yield Path(folder)
        os.seteuid(user)


@pytest.mark.parametrize("what", ["deep/x.jsonl", "deep"])
def test_what_may_not_be_read_is_refused(anybody, what):
    data = anybody / "data"
    (data / "deep").mkdir(parents=True)
    (data / "deep" / "x.jsonl").write_text("{}")
    (data / "y.jsonl").write_text("{}")
    (data / what).chmod(0)
    for path in (data, data / "deep" / "x.jsonl"):
        message = refusal(open_rows, str(path), name="web", index_cache=str(anybody / "cache"))
        assert "may not be read ([Errno 13] Permission denied" in message
        assert what in message
    (data / "deep").chmod(0o700)
