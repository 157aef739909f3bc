"""Rows of every format against samples written by hand; any other value is one bad row."""

import base64
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from omnijax.data.formats import FormatOptions, to_sample
from omnijax.data.sample import MediaReference, Part, RowId
from omnijax.errors import BadRow, UserError

ROW = RowId("source", "a.jsonl", 7)
ROOT = Path("/data/set")
OPTIONS = FormatOptions(root=str(ROOT))


def parts_of(row: Any, **options: Any) -> list[Part]:
    return list(to_sample(row, ROW, FormatOptions(root=str(ROOT), **options)).parts)


def refusal(row: Any, **options: Any) -> str:
    with pytest.raises(BadRow) as caught:
        parts_of(row, **options)
    message = str(caught.value)
    assert message.startswith(f"{ROW}: ")
    assert "\n" not in message
    return message.removeprefix(f"{ROW}: ")


def said(role: str, message: int, *pieces: Any, trained: bool | None = None) -> list[Part]:
    """Parts as a person writes them: text, or (kind, name below the root or bytes or a reference)."""
    trained = role == "assistant" if trained is None else trained
    parts = []
    for piece in pieces:
        if isinstance(piece, str):
            parts.append(Part("text", role, message, trained, text=piece))
        else:
            kind, where = piece
            if isinstance(where, str):
                where = MediaReference(path=str(ROOT / where))
            elif isinstance(where, bytes):
                where = MediaReference(data=where)
            parts.append(Part(kind, role, message, trained, media=where))
    return parts


# The formats


def test_plain_text_is_a_trained_document():
    assert parts_of({"text": "héllo", "id": 3, "images": None}) == [Part("text", "document", 0, True, text="héllo")]
    assert parts_of({"content": ""}, text="content") == [Part("text", "document", 0, True, text="")]


OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What <image> is"},
                {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}},
                {"type": "text", "text": "?"},
                {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": "A <video>."},
    ]
}


def test_openai_messages():
    assert parts_of(OPENAI) == [
        *said("system", 0, "Be brief."),
        *said("user", 1, "What <image> is", ("image", "a.png"), "?", ("audio", b"RIFF")),
        *said("assistant", 2, "A <video>."),
    ]


def test_hugging_face_messages_with_nulls_that_a_table_fills_in():
    parts = [
        {"type": "image", "image": "a.png", "text": None, "video": None},
        {"type": "video", "video": ["1.png", "2.png"], "text": None, "image": None},
        {"type": "audio", "path": "a.wav"},
        {"type": "image", "bytes": b"png", "path": "lost.png"},
        {"type": "text", "text": "Hi", "image": None},
        {"image": "b.png"},
        "there",
    ]
    row = {"messages": [{"role": "user", "content": parts, "tool_calls": None}], "text": None, "conversations": None}
    frames = MediaReference(frames=(MediaReference(path="/data/set/1.png"), MediaReference(path="/data/set/2.png")))
    expected = [("image", "a.png"), ("video", frames), ("audio", "a.wav"), ("image", b"png"), "Hi", ("image", "b.png")]
    assert parts_of(row) == said("user", 0, *expected, "there")


def test_parts_with_type_and_value_take_what_they_lack_from_the_columns():
    """VeOmni's SeedOmni rows: what the user gives is looked at, what the assistant gives is generated."""
    turns = [
        {
            "role": "user",
            "content": [{"type": "text", "value": "Draw"}, {"type": "image"}, {"type": "text", "value": ""}],
        },
        {"role": "assistant", "content": [{"type": "image"}, {"type": "text", "value": "Done <image>"}]},
    ]
    expected = [
        *said("user", 0, "Draw", ("image", b"1"), ""),
        *said("assistant", 1, ("image", b"2"), "Done <image>"),
    ]
    for row in (
        {"messages": turns},
        {"conversations": turns, "source_name": "veomni_omni_demo"},
        {"conversations": json.dumps(turns)},
        {"conversations": json.dumps(turns).encode()},
    ):
        assert parts_of({**row, "images": [b"1", b"2"]}) == expected
    assert "ask for images: 2, but it gives 1" in refusal({"messages": turns, "images": [b"1"]})
    assert "ask for images: 2, but it gives 0" in refusal({"messages": turns, "images": None})


SHAREGPT = [
    {"from": "human", "value": "<image>\nWhat is it? <video><audio>"},
    {"from": "gpt", "value": "It is <image>."},
]


def test_sharegpt_markers_count_in_every_turn():
    row = {"conversations": SHAREGPT, "images": ["a.png", "b.png"], "videos": "v.mp4", "audios": ["s.wav"]}
    expected = [
        *said("user", 0, ("image", "a.png"), "\nWhat is it? ", ("video", "v.mp4"), ("audio", "s.wav")),
        *said("assistant", 1, "It is ", ("image", "b.png"), "."),
    ]
    assert parts_of(row) == expected
    assert parts_of(row, format="sharegpt") == expected
    assert "ask for images: 2, but it gives 0" in refusal({"conversations": SHAREGPT})


@pytest.mark.parametrize("image", ["a.png", ["a.png"]])
def test_qwen_vl_columns_are_one_or_a_list_and_answers_are_text(image):
    turns = [{"from": "human", "value": "<image> and <video>"}, {"from": "gpt", "value": "Write <image> in it"}]
    row = {"image": image, "video": ["v.mp4"], "conversations": turns}
    assert parts_of(row) == [
        *said("user", 0, ("image", "a.png"), " and ", ("video", "v.mp4")),
        *said("assistant", 1, "Write <image> in it"),
    ]


@pytest.mark.parametrize("column", [{}, {"image": None}, {"image": []}, {"images": []}, {"images": None, "videos": []}])
def test_no_media_is_written_in_many_ways(column):
    for turns in (
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ):
        assert parts_of({**turns, **column}) == said("user", 0, "Hi")


def test_llama_factory_columns():
    row = {
        "messages": [
            {"role": "user", "content": "<image><audio>Compare"},
            {"role": "observation", "content": "<image>"},
            {"role": "assistant", "content": "Done"},
        ],
        "system": "Be kind.",
        "tools": "[]",
        "images": ["a.png", {"bytes": b"b", "path": "b.png"}],
        "audios": ["s.wav"],
    }
    sample = to_sample(row, ROW, OPTIONS)
    assert list(sample.parts) == [
        *said("system", 0, "Be kind."),
        *said("user", 1, ("image", "a.png"), ("audio", "s.wav"), "Compare"),
        *said("tool", 2, ("image", b"b")),
        *said("assistant", 3, "Done"),
    ]
    assert sample.extra == {"tools": "[]"}


def test_llama_factory_asks_for_both_tracks_of_one_clip():
    clip = MediaReference(path="/data/set/v.mp4", audio=MediaReference(path="/data/set/v.mp4"))
    row = {"messages": [{"role": "user", "content": "<video><audio>Hm"}], "videos": ["v.mp4"], "audios": ["v.mp4"]}
    assert parts_of(row) == said("user", 0, ("video", clip), "Hm")
    row["audios"] = ["other.wav"]
    assert parts_of(row) == said("user", 0, ("video", "v.mp4"), ("audio", "other.wav"), "Hm")


def test_veomni_frames_with_their_sound():
    clip = {"frames": [b"1", b"2"], "audio": b"RIFF", "video_fps": 2.0, "audio_fps": 16000}
    row = {"conversations": [{"from": "human", "value": "<video>\nWhat?"}], "videos": [clip]}
    frames = (MediaReference(data=b"1"), MediaReference(data=b"2"))
    expected = MediaReference(frames=frames, audio=MediaReference(data=b"RIFF"))
    assert parts_of(row) == said("user", 0, ("video", expected), "\nWhat?")
    assert "video_fps is not the frame_rate 4.0" in refusal(row, frame_rate=4.0)


@pytest.mark.parametrize("labels", ["tench, Tinca tinca", " tench "])
def test_a_class_asks_for_its_image(labels):
    row = {"conversations": labels, "images": [b"png"], "source": "imagenet1k"}
    assert parts_of(row) == [*said("user", 0, "tench"), *said("assistant", 1, ("image", b"png"))]
    assert "ask for images: 1, but it gives 0" in refusal({"conversations": labels})


def test_members_of_a_tar_are_the_fields_and_media_of_their_row():
    chat = [{"role": "user", "content": "<image> or <image>?"}, {"role": "assistant", "content": "The first."}]
    row = {"__key__": "0001", "json": {"messages": chat, "id": None}, "left.jpg": b"L", "right.png": b"R"}
    *asked, answer = parts_of(row)
    assert [part.media.data if part.media else part.text for part in asked] == [b"L", " or ", b"R", "?"]
    assert (answer.text, answer.trained) == ("The first.", True)
    assert [part.text for part in parts_of({"__key__": "2", "txt": "prose"})] == ["prose"]
    assert [part.text for part in parts_of({"__key__": "2", "txt": "prose"}, text="caption")] == ["prose"]
    assert "its member json is" in refusal({"__key__": "3", "json": [1]})
    assert "two of its members have text" in refusal({"__key__": "4", "txt": "a", "json": {"text": "b"}})
    assert "two of its members have images" in refusal({"__key__": "5", "jpg": b"", "json": {"images": ["a.jpg"]}})
    assert "media beside text" in refusal({"__key__": "6", "txt": "a cat", "jpg": b"L"})


def test_media_of_other_kinds_stand_where_pictures_may():
    listed = {"messages": [{"role": "user", "content": [{"type": "motion", "path": "a.npy"}, {"type": "motion"}]}]}
    listed["motions"] = ["b.npy"]
    marked = {"conversations": [{"from": "human", "value": "Is <motion> as <motion>?"}], "motion": ["a.npy", "b.npy"]}
    first, second = ("motion", "a.npy"), ("motion", "b.npy")
    assert parts_of(listed, kinds=("motion",)) == said("user", 0, first, second)
    for name in ("sharegpt", "llama_factory", "veomni"):
        found = parts_of(marked, kinds=("motion",), format=name)
        assert found == said("user", 0, "Is ", first, " as ", second, "?")
    assert "has the type 'motion': it must be one of text, " in refusal(listed)
    assert parts_of(marked, format="sharegpt") == said("user", 0, "Is <motion> as <motion>?")


def test_what_is_trained():
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2", "weight": 0},
        {"role": "assistant", "content": "3", "weight": 1},
        {"role": "assistant", "content": "4", "loss": False},
        {"role": "assistant", "content": [{"type": "text", "text": "5"}, {"type": "image", "image": "a.png"}]},
    ]
    assert [part.trained for part in parts_of({"messages": turns})] == [False, False, True, False, True, True]
    assert "turn 0: its weight or loss is neither 0 nor 1" in refusal(
        {"messages": [{"role": "assistant", "content": "", "weight": 0.5}]}
    )


def test_what_messages_say_beside_their_content_is_kept_for_the_template():
    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    turns = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "x", "name": "add"},
    ]
    sample = to_sample({"messages": turns, "tools": [{"name": "add"}]}, ROW, OPTIONS)
    assert [part.text for part in sample.parts] == ["1 + 1?", "", "2"]
    assert [part.role for part in sample.parts] == ["user", "assistant", "tool"]
    assert sample.extra == {
        "tools": [{"name": "add"}],
        "fields": {1: {"tool_calls": calls}, 2: {"tool_call_id": "x", "name": "add"}},
    }


def test_text_and_pictures_may_come_in_any_order_of_rows():
    """No row fixes a schema for the next: five of text, one with an image, one with a list of them."""
    rows = [
        *[{"text": "a", "image": None}] * 5,
        {"image": "a.png", "conversations": [{"from": "human", "value": "<image>"}]},
    ]
    assert [part.kind for row in rows for part in parts_of(row)] == ["text"] * 5 + ["image"]


# Bad rows

HUMAN = {"from": "human", "value": "Hi"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (None, "the row is null"),
        ([HUMAN], "the row is a list"),
        ({}, "it has none of text, messages and conversations"),
        ({"text": "a", "messages": []}, "it has text and messages: name the format"),
        ({"messages": [], "conversations": []}, "it has messages and conversations: name the format"),
        ({"text": "a", "image": "a.png"}, "it has media beside text: name the format"),
        ({"messages": [{"role": "user", "content": "<image>"}]}, "it has a marker but no media: name the format"),
        ({"text": 3}, "its text is an int"),
        ({"text": "\ud800"}, "its text is not valid Unicode"),
        ({"messages": []}, "its turns are a list: they must be a list of at least one message"),
        ({"messages": {"role": "user"}}, "its turns are a dict"),
        ({"messages": [3]}, "turn 0: it is an int"),
        ({"messages": [{"content": "Hi"}]}, "turn 0: its role is null: it must be one of system, "),
        ({"messages": [{"role": "narrator", "content": "Hi"}]}, "turn 0: its role is 'narrator'"),
        ({"messages": [{"role": ["user"], "content": "Hi"}]}, "turn 0: its role is a list"),
        ({"messages": [{"role": "user"}]}, "turn 0: its text is null"),
        ({"messages": [{"role": "user", "content": []}]}, "turn 0: its content is an empty list"),
        ({"messages": [{"role": "user", "content": [None]}]}, "turn 0: a part is null"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "turn 0: a part has the type null"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "turn 0: a part has the type 'sound'"),
        ({"messages": [{"role": "user", "content": [{"type": {}}]}]}, "turn 0: a part has the type null"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "turn 0: its text is null"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", "max_pixels": 9}]}]},
            "turn 0: a part of type image has 'max_pixels', which nothing reads",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", "value": "b.png"}]}]},
            "turn 0: a part of type image has 'value', which nothing reads",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "the image is an int"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": []}]}]}, "the video is an empty list"),
        ({"messages": [{"role": "system", "content": "a"}], "system": "b"}, "it has two system messages"),
        ({"conversations": [HUMAN], "images": ["a.png"]}, "ask for images: 0, but it gives 1"),
        ({"conversations": [HUMAN], "image": "a.png", "images": ["a.png"]}, "it has both image and images"),
        ({"conversations": [HUMAN], "images": [None]}, "one of its images is null"),
        ({"conversations": "[1"}, "conversations is not JSON"),
        ({"conversations": "[" * 10**5}, "conversations is not JSON"),
        ({"conversations": " , ", "images": [b"1"]}, "conversations is an empty class name"),
        ({"conversations": b"tench", "images": [b"1"]}, "its text is a bytes"),
    ],
)
def test_a_bad_row_says_what_is_wrong(row, expected):
    assert expected in refusal(row)


def test_a_format_that_is_named_is_not_guessed():
    both = {"text": "a", "messages": [{"role": "user", "content": "<image>"}]}
    assert parts_of(both, format="text") == [Part("text", "document", 0, True, text="a")]
    assert parts_of(both, format="messages") == said("user", 0, "<image>")
    assert "ask for images: 1, but it gives 0" in refusal(both, format="llama_factory")
    assert parts_of(both | {"images": ["a.png"]}, format="llama_factory") == said("user", 0, ("image", "a.png"))


def test_fields_that_nothing_reads_may_be_allowed():
    part = {"type": "image", "image": "a.png", "max_pixels": 9}
    row = {"messages": [{"role": "user", "content": [part]}]}
    assert parts_of(row, ignore=("max_pixels",)) == said("user", 0, ("image", "a.png"))


def test_a_bad_row_is_a_user_error_that_can_be_pickled():
    with pytest.raises(UserError) as caught:
        to_sample({}, ROW, OPTIONS)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.row) == (str(caught.value), ROW)


# Media references


def reference_of(value: Any, kind: str = "image", **options: Any) -> MediaReference | None:
    row = {"messages": [{"role": "user", "content": [{"type": kind, kind: value}]}]}
    return to_sample(row, ROW, FormatOptions(**options)).parts[0].media


def where(value: Any, root: Path, kind: str = "image", **options: Any) -> str:
    """The path below the root, or why there is none."""
    try:
        return os.path.relpath(reference_of(value, kind, root=str(root), **options).path, root)
    except BadRow as error:
        return error.reason


def test_paths_stay_inside_the_root(tmp_path):
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    (tmp_path / "secret.png").write_bytes(b"")
    (tmp_path / "root2").mkdir()
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "inside.png").symlink_to(root / "inner")
    (root / "up").symlink_to("..")
    for path, expected in {
        "inner/a.png": "inner/a.png",
        "inner/../b.png": "b.png",
        "ünï ✓.png": "ünï ✓.png",
        str(root / "a.png"): "a.png",
        f"file://{root}/a%20b.png": "a b.png",
        f"file://localhost{root}/a.png": "a.png",
        "inside.png/x.png": "inner/x.png",
    }.items():
        assert where(path, root) == expected
    for path in ("../secret.png", "link.png", "up/secret.png", str(tmp_path / "secret.png"), "../root2/a.png", "", "."):
        assert "leads out of the root" in where(path, root), path
        assert where(path, root, outside_root=True) in ("../secret.png", "../root2/a.png", ".")
    assert "leads out of the root" in where(f"file://{tmp_path}/secret.png", root)
    assert "is relative to nothing: set root" in refusal_of("a.png")


def refusal_of(value: Any, kind: str = "image", **options: Any) -> str:
    with pytest.raises(BadRow) as caught:
        reference_of(value, kind, **options)
    return caught.value.reason


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a\0b", "cannot be a path"),
        ("\ud800.png", "cannot be a path"),
        ("file://host/a.png", "names no file of this machine"),
        ("file:///a.png?x", "names no file of this machine"),
        ("file://[", "is not a URI"),
        ("s3://bucket/a.png", "is neither a path nor a URI"),
        ("http://host/a.png", "is a URL: set allow_urls"),
        ("HTTPS://host/a.png", "is a URL: set allow_urls"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,!!!", "is not base64"),
        ("data:,é", "is not ASCII"),
        ({}, "the image struct has neither bytes nor a path"),
        ({"path": 3}, "the image struct has neither bytes nor a path"),
        ({"bytes": [1]}, "the bytes of the image are a list"),
        ({"bytes": "é"}, "is not base64"),
        ({"array": [0.0], "sampling_rate": 8000}, "the image struct has 'array', 'sampling_rate': it may have"),
        ({"frames": ["a.png"]}, "the image struct has 'frames'"),
        (["a.png"], "the image is a list"),
    ],
)
def test_references_that_lead_nowhere(value, expected):
    assert expected in refusal_of(value, root="/data/set")


def test_references_of_every_kind():
    encoded = base64.b64encode(b"png").decode()
    for value in (
        b"png",
        bytearray(b"png"),
        {"bytes": b"png", "path": None},
        {"bytes": encoded},
        {"data": encoded, "format": "png"},
        f"data:image/png;base64,{encoded}",
        f"DATA:image/png;base64,{encoded}",
        f"data:image/png;base64,{encoded.replace('=', '%3D')}",
        "data:,png",
        {"url": "data:,png"},
    ):
        assert reference_of(value) == MediaReference(data=b"png")
    assert reference_of("https://host/a.png", allow_urls=True) == MediaReference(path="https://host/a.png")
    assert "neither a path nor a URI" in refusal_of("ftp://host/a.png", root="/", allow_urls=True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"frames": "a.mp4"}, "must have a list of pictures as 'frames'"),
        ({"video": ["a.png"]}, "must have a list of pictures as 'frames'"),
        ({"video": {"video": "a.mp4"}}, "must have a list of pictures as 'frames'"),
        ({"frames": [["a.png"]]}, "the image is a list"),
        ({"frames": ["a.png"], "video": "a.mp4"}, "the video struct has"),
        ({"frames": ["a.png"], "video_fps": "2"}, "video_fps is not the frame_rate"),
        ({"frames": []}, "the video is an empty list of pictures"),
        ({"video": "a.mp4", "audio": 3}, "the audio is an int"),
    ],
)
def test_clips_that_are_none(value, expected):
    assert expected in refusal_of(value, "video", root="/data/set")


# Anything at all

NAMES = [
    *("text", "messages", "conversations", "images", "image", "videos", "video", "audios", "audio", "system", "tools"),
    *(
        "role",
        "content",
        "from",
        "value",
        "type",
        "bytes",
        "path",
        "url",
        "data",
        "frames",
        "video_fps",
        "weight",
        "loss",
    ),
    *("image_url", "input_audio", "tool_calls"),
]
WORDS = [
    *("", "<image> <video><audio>", "user", "human", "assistant", "gpt", "system", "tool", "[", "[{}]", "tench, x"),
    *(
        "text",
        "image",
        "video",
        "audio",
        "image_url",
        "input_audio",
        "a.png",
        "../a.png",
        "/etc/passwd",
        "\0",
        "\ud800",
    ),
    *("data:;base64,AA==", "data:", "http://h/a", "file:///a", "file://["),
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.none().map(lambda _: 10**5000),  # too long to print
    st.floats(),
    st.binary(max_size=8),
    st.text(max_size=8),
    st.sampled_from(WORDS),
    st.sampled_from(WORDS),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)
MEDIA = st.sampled_from(["a.png", b"png", "data:;base64,AA=="] * 9 + WORDS) | VALUES
TEXT = st.sampled_from(["Hi", "", "<image>"] * 9 + WORDS)
PART = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.fixed_dictionaries({"type": st.sampled_from(["image", "video", "audio"])}, optional={"value": MEDIA}),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
)
ROLE = st.sampled_from(["user", "assistant", "tool"] * 9 + WORDS)
CONTENT = TEXT | st.lists(PART, max_size=3) | SCALARS
TURN = st.one_of(
    st.fixed_dictionaries({"role": ROLE, "content": CONTENT}),
    st.fixed_dictionaries({"role": ROLE, "content": CONTENT, "weight": SCALARS, "x": VALUES}),
    st.fixed_dictionaries({"from": ROLE, "value": TEXT}),
)
TURNS = st.lists(TURN, min_size=1, max_size=3) | VALUES
MAIN = st.one_of(*(st.fixed_dictionaries({name: TURNS}) for name in ("messages", "conversations", "text")))
COLUMNS = ("image", "images", "video", "videos", "audios", "system", "tools", "text")
OTHERS = st.dictionaries(st.sampled_from(COLUMNS), st.lists(MEDIA, max_size=2) | MEDIA, max_size=2)
ROWS = st.one_of(VALUES, MAIN, st.builds(lambda others, main: others | main, OTHERS, MAIN))
FORMATS = ("text", "messages", "sharegpt", "qwen_vl", "llama_factory", "veomni", "class_to_image")


def cycle() -> list:
    value: list = []
    value.append(value)
    return value


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(ROWS, st.none() | st.sampled_from(FORMATS), st.booleans())
@example(
    {"conversations": [{"from": "human", "value": "<video><audio>"}], "videos": cycle(), "audios": cycle()}, None, True
)
@example({"messages": cycle()}, None, True)
@example({"__key__": "a", "json": cycle(), "jpg": 3}, None, True)
@example({"__key__": "a", "json": {"messages": 3, 4: 5}, "jpg": None, 7: 8}, None, True)
def test_any_row_is_a_sample_or_a_bad_row(row, name, anywhere):
    options = FormatOptions(root="/data/set", format=name, outside_root=anywhere, allow_urls=anywhere)
    message = ""
    try:
        parts = to_sample(row, ROW, options).parts
    except BadRow as error:
        parts, message = (), str(error)
    assert parts or message.startswith(f"{ROW}: ")
    assert len(message.splitlines()) <= 1
    assert len(message) < 1000
    for part in parts:
        part.text.encode()
        assert (part.media is None) == (part.kind == "text")
        path = part.media.path if part.media else None
        assert path is None or anywhere or path.startswith("/data/set/")
