"""Training on chats from a config: what is a label, what a run does with them, and what `inspect --data` shows."""

import json
import pickle
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from omnijax import config, ginfile, inspect
from omnijax.data.chat_source import Chat
from omnijax.data.documents import concatenate
from omnijax.data.mixture import Member, Mixture, open_members
from omnijax.data.pipeline import heldout_rows, make_pipeline
from omnijax.data.sources import JsonLines
from omnijax.data.stream import ExactStream
from omnijax.data.tokenizer import Bytes, TokenizerFile
from omnijax.errors import BadRow, UserError
from tests import runs
from tests.test_chat import add_names, byte_pairs, save
from tests.test_train import KILL

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THREE_TURNS = [
    {"role": "user", "content": "Hi there. <|im_end|>"},
    {"role": "assistant", "content": "Hello! And then?"},
    {"role": "user", "content": "Because 42."},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Why"},
    {"role": "assistant", "content": "A greeting. Be kind."},
]
ANSWERS = ["Hello! And then?<|im_end|>", "So.<|im_end|>", "A greeting. Be kind.<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TokenizerFile:
    return save(add_names(byte_pairs()), tmp_path_factory.mktemp("tokenizer"))


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def exchange(number: int, words: int = 1) -> dict[str, object]:
    """A row of one question and one answer."""
    question = {"role": "user", "content": f"What is {number}?"}
    return {"messages": [question, {"role": "assistant", "content": f"It is {number}." * words}]}


def make_data(source, tokenizer, **options) -> config.Data:
    return config.Data(source, tokenizer, **({"length": 128, "rows": 2} | options))


def make_stream(data: config.Data, **options) -> ExactStream:
    return ExactStream(make_pipeline(data, open_members(data.source)[0], 0), **options)


def refusal(function, *arguments, error: type[UserError] = UserError) -> str:
    with pytest.raises(error) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def trained_targets(arrays: dict[str, np.ndarray], tokenizer: TokenizerFile) -> list[str]:
    """Every run of targets with weight in packed rows, decoded by the tokenizers library."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(tokenizer.path)
    found = []
    for targets, weights in zip(arrays["targets"], arrays["weights"], strict=True):
        edges = np.flatnonzero(np.diff(weights, prepend=0, append=0)).reshape(-1, 2)
        found += [library.decode(targets[first:last].tolist(), skip_special_tokens=False) for first, last in edges]
    return found


def test_what_is_trained_is_each_answer_and_its_end(tokenizer, tmp_path):
    source = Chat(write(tmp_path / "chats.jsonl", *[{"messages": THREE_TURNS}] * 2), index_cache=None)
    rows = next(make_stream(make_data(source, tokenizer)))
    assert trained_targets(rows.arrays, tokenizer) == ANSWERS * 2
    assert rows.row_ids[0][0].startswith("chat:chats.jsonl:")
    for name in ("tokens", "targets"):  # a target is the token that follows it
        assert rows.arrays[name].shape == (2, 128)
    followed = rows.arrays["weights"][:, :-1] > 0
    assert np.array_equal(rows.arrays["targets"][:, :-1][followed], rows.arrays["tokens"][:, 1:][followed])


def test_a_jinja_template_by_its_path_gives_the_rows_of_the_built_in_one(tokenizer, tmp_path):
    path = write(tmp_path / "chats.jsonl", {"messages": THREE_TURNS}, exchange(1))
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    names = ("chatml", str(tmp_path / "chat_template.jinja"))
    streams = [make_stream(make_data(Chat(path, name, index_cache=None), tokenizer)) for name in names]
    built_in, jinja = (next(stream) for stream in streams)
    assert built_in.row_ids == jinja.row_ids
    for name, array in built_in.arrays.items():
        assert np.array_equal(array, jinja.arrays[name]), name
    # Another text in the file is another stream, though its path is the same.
    (tmp_path / "chat_template.jinja").write_text("{{ '' }}" + CHATML)
    other = make_stream(make_data(Chat(path, names[1], index_cache=None), tokenizer))
    assert "the data state has chat" in refusal(other.restore, jinja.state)


def test_a_system_message_is_said_where_there_is_none(tokenizer, tmp_path):
    own = [{"role": "system", "content": "No."}, *THREE_TURNS[:2]]
    path = write(tmp_path / "chats.jsonl", {"messages": THREE_TURNS[:2]}, {"messages": own})
    items = (source := Chat(path, system="Be kind.", index_cache=None)).items(source.open(), tokenizer, 0)
    texts = [tokenizer.decode(items[number].tokens) for number in range(2)]
    question = "user\nHi there. <|im_end|>\nassistant\nHello! And then?\n"
    assert texts == [f"system\nBe kind.\n{question}", f"system\nNo.\n{question}"]


def test_long_chats_are_dropped_or_cut_and_counted(tokenizer, tmp_path):
    long = {"messages": [*THREE_TURNS, *exchange(1, words=40)["messages"]]}  # type: ignore[misc]
    path = write(tmp_path / "chats.jsonl", long, *(exchange(number) for number in range(7)))

    def pack(policy) -> tuple[list[str], dict[str, float]]:
        data = make_data(Chat(path, index_cache=None), tokenizer, rows=1, over_length=policy, look_ahead=4)
        steps = [next(stream) for stream in [make_stream(data)] for _ in range(8)]
        return [name for rows in steps for names in rows.row_ids for name in names], steps[-1].metrics

    dropped, metrics = pack("drop")
    assert not any(":0[" in name for name in dropped)
    assert metrics["packing/dropped"] > 0
    waiting = metrics["packing/read"] - metrics["packing/packed"] - metrics["packing/dropped"]
    assert waiting == 4
    assert 0.5 < metrics["fill/tokens"] <= 1
    cut, metrics = pack("cut")
    assert any(":0[" in name for name in cut)
    assert metrics["packing/cut"] > 0
    assert metrics["packing/lost_tokens"] > 0
    data = make_data(Chat(path, index_cache=None), tokenizer, over_length="cut")
    evaluation = heldout_rows(data, [open_members(data.source)[0][0]])
    assert (evaluation.long, evaluation.empty, evaluation.bad) == (1, 0, ())
    held = {name for rows in evaluation.steps for ids in rows.row_ids for name in ids}
    assert len(held) == 8
    assert "chats.jsonl:0: takes 409 of the budget of tokens" in refusal(pack, "raise", error=BadRow)


def test_rows_of_no_use_are_bad_rows(tokenizer, tmp_path):
    picture = {"messages": [{"role": "user", "content": "<image>Why"}, THREE_TURNS[1]], "images": ["a.png"]}
    thinking = {"messages": [THREE_TURNS[0], {**THREE_TURNS[1], "reasoning_content": "Hm, hm."}]}
    path = write(tmp_path / "chats.jsonl", picture, {"messages": THREE_TURNS[:1]}, thinking)

    def items(**options):
        return (source := Chat(path, index_cache=None, **options)).items(source.open(), tokenizer, 0)

    expected = ["the model reads only text", "it has no label", "writes 'Hm, hm.' nowhere"]
    for number, reason in enumerate(expected):
        message = refusal(items().__getitem__, number, error=BadRow)
        assert f"chat:chats.jsonl:{number}" in message
        assert reason in message
    assert items(left_out="allow")[2].trained.any()


def test_chats_and_texts_mix(tokenizer, tmp_path):
    chats = Chat(write(tmp_path / "chats.jsonl", *(exchange(number) for number in range(20))), index_cache=None)
    texts = JsonLines(write(tmp_path / "texts.jsonl", *[{"text": "Because so. " * 60, "n": n} for n in range(20)]))
    data = make_data(Mixture((Member("chats", chats), Member("texts", texts))), tokenizer, look_ahead=8, holdout=0.5)
    train, heldout = open_members(data.source, data.holdout)
    stream = ExactStream(make_pipeline(data, train, 0))
    steps = [next(stream) for _ in range(20)]
    arrays = {name: np.concatenate([rows.arrays[name] for rows in steps]) for name in steps[0].arrays}
    answers = [text for text in trained_targets(arrays, tokenizer) if "<|im_end|>" in text]
    assert answers
    assert all(re.fullmatch(r"It is \d+\.<\|im_end\|>", text) for text in answers)
    text = arrays["sources"] == 1
    # Each piece of a text trains all of its tokens, also the first of the next row, but for an end.
    assert arrays["weights"][text].mean() > 0.95
    assert steps[-1].metrics["share/texts"] > 0
    evaluation = heldout_rows(data, heldout)
    names = {name.partition("[")[0] for rows in evaluation.steps for ids in rows.row_ids for name in ids}
    held = concatenate(heldout)
    assert names == {str(held.row_id(number)) for number in range(len(held))}
    assert evaluation.bytes == 0


def test_what_workers_get_is_small(tokenizer, tmp_path):
    source = Chat(
        write(tmp_path / "chats.jsonl", *(exchange(number) for number in range(500))), index_cache=str(tmp_path)
    )
    items = source.items(source.open(), tokenizer, 0)
    before = items[3]
    assert len(content := pickle.dumps(items)) < 2000
    assert np.array_equal(pickle.loads(content)[3].tokens, before.tokens)


def test_mistakes_are_one_line(tokenizer, tmp_path):
    path = write(tmp_path / "chats.jsonl", exchange(1))
    assert "Chat.template = 'qwen9' is neither a file nor one of chatml" in refusal(Chat, path, "qwen9")
    assert "Chat.date = '2025-08-31'" in refusal(lambda: Chat(path, date="2025-08-31"))
    source = Chat(path, str(tmp_path), index_cache=None)
    assert "belongs to a tokenizer.json" in refusal(source.items, source.open(), Bytes(), 0)
    stream = make_data(Chat(path, index_cache=None), Bytes(), rows=1)
    assert "the tokenizer has no token '<|im_start|>'" in refusal(make_stream, stream)


@pytest.fixture
def chat_config(tokenizer, tmp_path) -> Path:
    """A config of a tiny model on sixty short chats, `tiny.gin` beside them."""
    write(tmp_path / "chats.jsonl", *(exchange(number % 5) for number in range(60)))
    text = runs.CONFIG.replace("import sources\n", "import chat_source\n")
    text = text.replace("@sources.JsonLines()", "@chat_source.Chat()")
    text = text.replace('sources.JsonLines.path = "texts.jsonl"', 'chat_source.Chat.path = "chats.jsonl"')
    text = text.replace("vocab_size = 257", f"vocab_size = {tokenizer.vocab_size}")
    text = text.replace("tokenizer.Bytes()", "tokenizer.TokenizerFile()").replace(
        "Data.length = 16", "Data.length = 64"
    )
    text += f'tokenizer.TokenizerFile.path = "{tokenizer.path}"\ntokenizer.TokenizerFile.eos = "<|endoftext|>"\n'
    text += "chat_source.Chat.index_cache = None\nconfig.Data.look_ahead = 4\n"
    (tmp_path / "tiny.gin").write_text(text)
    return tmp_path / "tiny.gin"


def test_a_run_on_chats_learns_and_a_killed_one_goes_on_with_the_same_rows(chat_config):
    straight = runs.run(chat_config, "Evaluation.every=7", "Optimizer.learning_rate=0.02", folder="straight")
    assert straight.losses[-1] < 0.8 * straight.losses[0]
    assert straight.compilations == 1
    last = straight.metrics[-1]
    assert last["heldout/loss"] < straight.metrics[6]["heldout/loss"]
    assert "heldout/bits_per_byte" not in last
    assert last["packing/packed"] > 0
    assert 0.5 < last["fill/tokens"] <= 1
    # Killed after step 8, with a save of step 6 done or under way; a killed run is finished with workers.
    arguments = ("tiny.gin", "Run.dir=killed", "Checkpoint.every=3", "Optimizer.learning_rate=0.02")
    killed = runs.finish(runs.start(chat_config.parent, "-c", KILL, *arguments))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    rest = runs.run(chat_config, "Data.workers=2", "Optimizer.learning_rate=0.02", folder="killed")
    first = min(rest.row_ids)
    assert first in (4, 7)
    assert rest.row_ids == {number: ids for number, ids in straight.row_ids.items() if number >= first}
    assert rest.losses == straight.losses


def test_ngrams_of_chats_are_refused(chat_config):
    overrides = ["Evaluation.every=7", "Evaluation.ngrams=(2,)"]
    message = refusal(lambda: ginfile.load(chat_config, overrides, root=config.Train))
    assert "Evaluation.ngrams = (2,) counts text" in message


def test_inspect_shows_what_is_trained(chat_config, monkeypatch, capsys):
    monkeypatch.chdir(chat_config.parent)
    monkeypatch.setattr(sys, "argv", ["inspect", "--data", "tiny.gin", "Run.dir=shown"])
    inspect.main()
    output = capsys.readouterr().out
    question, answer = r"<\|im_start\|>user\nWhat is (\d)\?<\|im_end\|>\n", r"⟦It is \1\.<\|im_end\|>⟧\n"
    assert re.search(rf"{question}<\|im_start\|>assistant\n{answer}", output)
    assert "segment 2, tokens " in output
    assert "media slots: none" in output
    picture = chat_config.parent / "shown" / "packed_rows.png"
    assert "picture of the rows: shown/packed_rows.png" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert re.search(r"== budgets for 48 rows, 0 bad ones left out", output)
    for length in (32, 64, 128):
        assert re.search(rf"Data.length = {length}: [\d.]+% filled, [\d.]+% of the operations wasted", output)
