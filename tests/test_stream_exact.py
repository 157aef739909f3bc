"""The exact stream: the same row ids whatever stops, moves or shares its making."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnijax.config import load_config
from omnijax.data.items import TextItems
from omnijax.data.mixture import Deal
from omnijax.data.packing import ConcatenateAndSplit, Rows
from omnijax.data.shards import Pipeline
from omnijax.data.sources import PythonDocuments
from omnijax.data.stream import ExactStream, merge_states, with_last
from omnijax.data.tokenizer import Bytes, TokenizerFile
from omnijax.errors import BadRow, UserError
from tests import runs
from tests.numbered_items import BAD, DEADLY, PACKERS, SIZES, Awkward, Numbers, Samples, pipeline

Log = list[tuple[tuple[str, ...], ...]]


def take(stream: ExactStream, steps: int) -> list[Rows]:
    found = [next(stream) for _ in range(steps)]
    stream.close()
    return found


def log(rows: list[Rows]) -> Log:
    return [step.row_ids for step in rows]


def resumed(state: Mapping[str, Any], steps: int, made: Pipeline, **options: Any) -> list[Rows]:
    """A new stream, from a state that was a file in between."""
    stream = ExactStream(made, **options)
    stream.restore(json.loads(json.dumps(state)))
    assert stream.state() == state
    return take(stream, steps)


@pytest.fixture(scope="module")
def straight() -> dict[str, list[Rows]]:
    """20 steps without a stop, in this process, by each packer."""
    return {name: take(ExactStream(pipeline(name)), 20) for name in PACKERS}


def assert_same(left: list[Rows], right: list[Rows]) -> None:
    """To the last bit: ids, arrays, states, counts."""
    assert log(left) == log(right)
    for one, other in zip(left, right, strict=True):
        assert one.state == other.state
        assert one.metrics == other.metrics
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(array, other.arrays[name], strict=True)


# The same rows


@pytest.mark.parametrize("packer", PACKERS)
def test_the_log_has_what_can_go_wrong(straight: dict[str, list[Rows]], packer: str) -> None:
    """Several epochs, every member, bad rows, items that wait, and rows that are not full."""
    ids = Counter(row_id.partition("[")[0] for step in log(straight[packer]) for row in step for row_id in row)
    assert {row_id[0] for row_id in ids} == set("abc")
    assert max(ids.values()) > 3
    possible = {f"{name}:{row}" for name, size in zip("abc", SIZES, strict=True) for row in range(size)}
    assert set(ids) <= possible - {f"a:{row}" for row in BAD}
    assert len(ids) > 60
    last = straight[packer][-1]
    assert last.metrics["bad_rows"] > 3
    assert any(shard["draws"]["waiting"] for shard in last.state["shards"].values())
    if packer == "first fit":
        assert (last.arrays["segment_ids"] == 0).any()
        assert any(step.arrays["media.image.features"].any() for step in straight[packer])


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_make_the_same_rows(straight: dict[str, list[Rows]], packer: str, workers: int) -> None:
    assert_same(take(ExactStream(pipeline(packer), workers=workers, prefetch=workers), 20), straight[packer])


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 2), (2, 0), (2, 2)])
def test_7_and_13(straight: dict[str, list[Rows]], packer: str, before: int, after: int) -> None:
    """The state is that of the rows consumed, although workers with prefetch 4 had made more."""
    rows = take(ExactStream(pipeline(packer), workers=before, prefetch=4), 7)
    assert_same(rows + resumed(rows[-1].state, 13, pipeline(packer), workers=after, prefetch=4), straight[packer])


@pytest.mark.parametrize("packer", PACKERS)
def test_resumed_at_every_step(straight: dict[str, list[Rows]], packer: str) -> None:
    """Before the first step, twice and more in a row, and right after a resume."""
    state = ExactStream(pipeline(packer)).state()
    for step in straight[packer]:
        (rows,) = resumed(state, 1, pipeline(packer))
        assert_same([rows], [step])
        state = rows.state


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("processes", [1, 2, 8])
def test_saved_by_4_processes_and_resumed_by_others(
    straight: dict[str, list[Rows]], packer: str, processes: int
) -> None:
    four = [take(ExactStream(pipeline(packer), held=range(first, 8, 4)), 7) for first in range(4)]
    for step in range(7):
        assert straight[packer][step].row_ids == tuple(four[row % 4][step].row_ids[row // 4] for row in range(8))
    state = merge_states([rows[-1].state for rows in four])
    assert state == straight[packer][6].state
    held = [range(first, 8, processes) for first in range(processes)]
    parts = [resumed_part(state, shards, pipeline(packer)) for shards in held]
    for step in range(13):
        joined = tuple(parts[row % processes][step].row_ids[row // processes] for row in range(8))
        assert joined == straight[packer][7 + step].row_ids
    assert merge_states([rows[-1].state for rows in parts]) == straight[packer][-1].state


def resumed_part(state: Mapping[str, Any], held: range, made: Pipeline) -> list[Rows]:
    stream = ExactStream(made, held=held, workers=len(held) // 4)
    stream.restore(json.loads(json.dumps(state)))
    return take(stream, 13)


def test_more_rows_a_step_are_the_same_rows(straight: dict[str, list[Rows]]) -> None:
    """Twice as many rows a step, also by workers, where the schedule of weights does not go by."""
    constant = {"weights": (3.0, 1.0, 1.0)}
    small = take(ExactStream(pipeline(**constant)), 8)
    large = take(ExactStream(pipeline(rows=16, **constant), workers=3), 4)
    pairs = [first.row_ids + second.row_ids for first, second in zip(small[::2], small[1::2], strict=True)]
    assert log(large) == pairs


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_at_the_edge_of_an_epoch(workers: int) -> None:
    """Documents of just a row: after 2 steps every shard has read each of its own once."""
    texts = PythonDocuments("t", tuple(map(str, range(16))), ("x" * 7,) * 16)
    made = Pipeline((TextItems(texts, Bytes()),), Deal((16,), 8, 1), ConcatenateAndSplit(8), 8)
    whole = take(ExactStream(made, workers=workers), 12)
    for epoch in range(6):
        ids = [row_id for step in whole[2 * epoch : 2 * epoch + 2] for (row_id,) in step.row_ids]
        assert sorted(ids) == sorted(f"python:t:{n}[0:8]" for n in range(16))
    assert len({log(whole)[step] for step in range(0, 12, 2)}) == 6  # a new order each time
    for edge in (2, 4):
        assert_same(whole[:edge] + resumed(whole[edge - 1].state, 12 - edge, made, workers=workers), whole)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_end_is_the_same_end(workers: int) -> None:
    finite = {"epochs": (2, 2, 1), "stop": "all"}
    whole = list(ExactStream(pipeline(**finite)))
    read = Counter(row_id.partition("[")[0] for step in log(whole) for row in step for row_id in row)
    wanted = Counter(
        {f"{n}:{row}": times for n, size, times in zip("abc", SIZES, (2, 2, 1), strict=True) for row in range(size)}
    )
    assert read == wanted - Counter({f"a:{row}": 2 for row in BAD})
    rows = take(ExactStream(pipeline(**finite), workers=workers), 3)
    stream = ExactStream(pipeline(**finite), workers=workers)
    stream.restore(rows[-1].state)
    marked = list(with_last(stream))
    assert [last for _, last in marked] == [False] * (len(whole) - 4) + [True]
    assert_same(rows + [each for each, _ in marked], whole)
    stream.close()


# Bad rows


def test_skipped_rows_are_reported_once_and_every_step_is_full(tmp_path: Path, straight: dict[str, list[Rows]]) -> None:
    reports = [tmp_path / "straight.jsonl", tmp_path / "killed.jsonl"]
    take(ExactStream(pipeline(), report=reports[0]), 20)
    before = take(ExactStream(pipeline(), workers=2, report=reports[1]), 11)
    assert_same(
        before[:7] + resumed(before[6].state, 13, pipeline(), workers=2, report=reports[1]), straight["first fit"]
    )
    assert reports[0].read_text() == reports[1].read_text()
    lines = [json.loads(line) for line in reports[0].read_text().splitlines()]
    assert len(lines) == straight["first fit"][-1].metrics["bad_rows"]
    assert {line["row"] for line in lines} == {f"a:{row}" for row in BAD}
    assert {line["reason"] for line in lines} == {"its image is cut off"}
    for number, step in enumerate(straight["first fit"], 1):
        assert step.metrics["bad_rows"] == sum(line["step"] <= number for line in lines)
        assert step.arrays["tokens"].shape == (8, 64)


@pytest.mark.parametrize("workers", [0, 2])
def test_more_bad_rows_than_the_limit_stop_the_stream(tmp_path: Path, workers: int) -> None:
    made = pipeline("split")
    limited = Pipeline(made.items, made.deal, made.packer, made.rows, 4)
    stream = ExactStream(limited, workers=workers, report=tmp_path / "bad.jsonl")
    good: list[Rows] = []
    with pytest.raises(UserError) as caught:
        good.extend(stream)
    message = str(caught.value)
    assert message.startswith("6 rows of data could not be used, and at most 4 may be: mend them or raise the limit")
    assert message.endswith(": its image is cut off")
    assert "\n" not in message
    assert good[-1].metrics["bad_rows"] <= 4
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 6
    assert stream.state() == good[-1].state


@pytest.mark.parametrize("workers", [0, 1])
def test_a_source_of_bad_rows_ends_in_one_line(workers: int) -> None:
    rows = Numbers("a", 50)
    all_but_the_first = {number: BadRow(f"a:{number}", "no") for number in range(1, 50)}
    made = Pipeline((Samples(rows, 0, all_but_the_first),), Deal((50,), 2, 0), PACKERS["split"], 2, 30)
    with pytest.raises(UserError, match="rows of data could not be used, and at most 30 may be"):
        take(ExactStream(made, workers=workers), 100)
    everything = Pipeline(
        (Samples(rows, 0, {0: BadRow("a:0", "no")} | all_but_the_first),), made.deal, made.packer, 2, 30
    )
    with pytest.raises(BadRow, match="a:30: no"):
        ExactStream(everything, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (BadRow("a:9", "its image\nis cut off"), "a:9: its image is cut off"),
        (UserError("the tokenizer is of another model"), "the tokenizer is of another model"),
        (KeyError("pixels"), "'pixels'"),
    ],
)
def test_an_error_is_itself_when_its_step_is_due(workers: int, error: Exception, shown: str) -> None:
    made = pipeline("split", bad={9: error})
    strict = Pipeline(made.items, made.deal, made.packer, made.rows, None)
    stream = ExactStream(strict, workers=workers, prefetch=4)
    good: list[Rows] = []
    with pytest.raises(type(error)) as caught:
        good.extend(stream)
    assert str(caught.value) == shown
    assert log(good) == log(take(ExactStream(pipeline("split", bad={})), len(good)))
    assert len(good) > 1
    assert stream.state() == good[-1].state
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("In a data worker:" in notes and "numbered_items.py" in notes) == (workers > 0 and type(error) is KeyError)


def test_an_error_that_cannot_travel_is_told() -> None:
    with pytest.raises(UserError, match="cannot be sent to a worker"):
        take(ExactStream(pipeline(bad={9: Awkward(reason="odd")}), workers=1), 1)
    with pytest.raises(RuntimeError, match="Awkward: 9 is odd"):
        take(ExactStream(pipeline(bad={9: None}), workers=1), 1)


def test_what_workers_cannot_have_is_refused() -> None:
    made = pipeline()
    for workers in (-1, 9):
        with pytest.raises(UserError, match=f"{workers} workers with prefetch 2 for 8 shards: give at most 8 workers"):
            ExactStream(made, workers=workers)
    odd = Pipeline((Samples(Numbers("a", 50), 0, {99: lambda: 0}),), Deal((50,), 2, 0), made.packer, 2)  # type: ignore[dict-item]
    stream = ExactStream(odd, workers=2)
    with pytest.raises(UserError, match=r"cannot be sent to a worker \(.*lambda.*\): define its classes in a module"):
        next(stream)
    assert next(ExactStream(odd)).row_ids


# Processes


def test_a_pipeline_is_small_and_workers_are_without_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WATCH_JAX", "1")
    assert "jax" in sys.modules
    assert "with jax" in str(log(take(ExactStream(pipeline()), 1)))
    assert "with jax" not in str(log(take(ExactStream(pipeline(), workers=1), 1)))
    assert len(pickle.dumps(pipeline())) < 3000
    path = Path(__file__).parent / "golden" / "chat"
    tokenizer = next(iter(sorted(path.rglob("tokenizer.json"))), None)
    if tokenizer is not None:
        loaded = TokenizerFile(str(tokenizer), "unknown")
        assert loaded.vocab_size
        items = TextItems(PythonDocuments("t", ("0",), ("x",)), loaded)
        assert len(pickle.dumps(items)) < 1000
        assert pickle.loads(pickle.dumps(items)).tokenizer == loaded


def test_a_worker_that_dies_is_told() -> None:
    made = Pipeline((Samples(Numbers("a", DEADLY + 1)),), Deal((DEADLY + 1,), 2, 3), PACKERS["split"], 2)
    with pytest.raises(UserError, match="a data worker ended with code -9: it may have been out of memory"):
        list(ExactStream(made, workers=2))


PROGRAM = """
import json, sys
from omnijax.data.stream import ExactStream
from tests.numbered_items import pipeline

stream = ExactStream(pipeline(sys.argv[1]), workers=2, prefetch=4)
for rows in stream:
    print(json.dumps([rows.row_ids, rows.state]), flush=True)
    sys.stdin.readline()
"""


def begin(packer: str = "first fit") -> subprocess.Popen[str]:
    """A program that makes a step for every line it is sent."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, packer], cwd=runs.HOME, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def gone(process: int) -> bool:
    """Whether a process is no more, or is a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never was")


@pytest.mark.parametrize("packer", PACKERS)
def test_killed_and_gone_on_without_an_orphan(straight: dict[str, list[Rows]], packer: str) -> None:
    """7 steps, SIGKILL, and 13 more in another process."""
    found = []
    with begin(packer) as program:
        for _ in range(7):
            found.append(json.loads(program.stdout.readline()))
            program.stdin.write("\n")
            program.stdin.flush()
        workers = children(program.pid)
        program.kill()
    assert len(workers) == 2
    wait_until(lambda: all(map(gone, workers)))
    rows = resumed(found[-1][1], 13, pipeline(packer), workers=2)
    ids = [tuple(map(tuple, row_ids)) for row_ids, _ in found]
    assert ids + log(rows) == log(straight[packer])


def test_ctrl_c_ends_the_workers_without_a_word_of_theirs() -> None:
    with begin() as program:
        program.stdout.readline()
        workers = children(program.pid)
        os.kill(program.pid, signal.SIGINT)  # a terminal sends it to the whole group, in which workers are not
        assert all(os.getpgid(worker) == worker for worker in workers)
        _, errors = program.communicate(timeout=30)
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until(lambda: all(map(gone, workers)))


# Runs


MIXTURE = """
include 'tiny.gin'
from omnijax.data import mixture
from omnijax.data import sources

config.Data.source = @mixture.Mixture()
mixture.Mixture.members = (@prose/mixture.Member(), @numbers/mixture.Member())
mixture.Mixture.by = "tokens"
mixture.Mixture.stop = "all"
prose/mixture.Member.name = "prose"
prose/mixture.Member.source = @sources.JsonLines()
prose/mixture.Member.weight = ((0, 3.0), (4, 1.0))
prose/mixture.Member.epochs = 1
numbers/mixture.Member.name = "numbers"
numbers/mixture.Member.source = @numbers/sources.JsonLines()
numbers/mixture.Member.epochs = 2
numbers/sources.JsonLines.path = "numbers.jsonl"
config.Data.bad_rows = "skip"
"""


def test_a_run_on_a_mixture_with_workers_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the end of the data, with bad rows, by workers and without: the same rows and losses."""
    runs.write_config(tmp_path)
    path = tmp_path / "mixture.gin"
    path.write_text(MIXTURE)
    lines = [json.dumps({"text": "7" * (n % 40)}) for n in range(60)]
    lines[5], lines[50], lines[59] = "{}", "no JSON", "[]"  # two of those to train on are bad, and one held out
    (tmp_path / "numbers.jsonl").write_text("\n".join(lines))
    whole = runs.run(path, "Run.steps=99", "Evaluation.every=99", folder="whole")
    steps = len(whole.losses)
    said = capsys.readouterr().out
    assert f"the data ended at step {steps}, before Run.steps = 99" in said
    assert "left out of the held-out text: jsonl:numbers.jsonl:60: " in said
    assert "heldout/loss" in whole.metrics[-1]
    ids = Counter(row_id.partition("[")[0] for step in whole.row_ids.values() for row in step for row_id in row)
    assert {ids[f"jsonl:texts.jsonl:{row}"] > 0 for row in range(2, 33) if row % 8 != 1} == {True}
    pieces = [
        runs.run(path, f"Run.steps={last}", f"Data.workers={workers}", folder="pieces")
        for last, workers in ((3, 2), (7, 0), (99, 3))
    ]
    assert [set(piece.row_ids) for piece in pieces] == [{1, 2, 3}, {4, 5, 6, 7}, set(range(8, steps + 1))]
    assert {step: ids for piece in pieces for step, ids in piece.row_ids.items()} == whole.row_ids
    assert pieces[-1].losses == whole.losses
    reports = [(tmp_path / folder / "bad_rows.jsonl").read_text() for folder in ("whole", "pieces")]
    assert reports[0] == reports[1]
    rows = Counter(json.loads(line)["row"] for line in reports[0].splitlines())
    assert rows == {"jsonl:numbers.jsonl:6": 2}
    assert [line["bad_rows"] for line in whole.metrics] == [line["bad_rows"] for line in pieces[-1].metrics]
    assert whole.metrics[-1]["bad_rows"] == 2
    assert all(line["share/prose"] + line["share/numbers"] == pytest.approx(1) for line in whole.metrics)
    again = runs.run(path, "Run.steps=99", folder="pieces")
    assert again.row_ids == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["Data.bad_rows='drop'"], "Data.bad_rows = 'drop' is not one of 'raise', 'skip'"),
        (["Data.workers=-1"], "Data.workers = -1 must be at least 0"),
        (["Data.prefetch=0"], "Data.prefetch = 0 must be at least 1"),
        (["Data.bad_rows='skip'", "Evaluation.ngrams=(2,)"], "Evaluation.ngrams = (2,) counts every row"),
    ],
)
def test_settings_are_refused(tmp_path: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(runs.write_config(tmp_path), overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
