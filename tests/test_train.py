"""A run from its config to its files: cut, killed and moved to another mesh it is the same run, and it fails aloud."""

import errno
import json
import math
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tensorboardX.proto import event_pb2

from models.qwen3 import Qwen3Config
from omnijax import checkpoint, parameters, train
from omnijax.config import load_config
from omnijax.data.evaluation import evaluation_rows
from omnijax.data.sources import PythonDocuments
from omnijax.data.tokenizer import Bytes
from omnijax.errors import UserError
from omnijax.lock import only_run
from omnijax.metrics import read_metrics
from omnijax.step import TrainState, evaluation_step
from sharding_rules import qwen3 as rules
from tests import runs
from tests.meshes import on

EIGHT_PARTS = ("Mesh.data=2", "Mesh.sequence=2", "Mesh.tensor=2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def straight(tiny: Path) -> runs.Seen:
    """Fourteen steps without a stop, on data 8."""
    return runs.run(tiny, "Evaluation.every=7", "Evaluation.ngrams=(2,)", folder="straight")


@pytest.fixture(scope="module")
def five(tiny: Path) -> runs.Seen:
    """The first five steps, on data 8; tests go on from copies of its folder."""
    return runs.run(tiny, "Run.steps=5", folder="five")


def copy(tiny: Path, name: str) -> Path:
    return shutil.copytree(tiny.parent / "five", tiny.parent / name)


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_a_mixture_reports_the_loss_of_each_member(tmp_path: Path) -> None:
    """Members' losses, weighed by their trained tokens, are the loss; a member with no token in a step has none."""
    path = runs.write_config(tmp_path)
    (tmp_path / "others.jsonl").write_text('{"text": "zzzzzzzzzzzzzzzzzzzzzzzz"}\n' * 20)
    text = path.read_text().replace(
        """config.Data.source = @sources.JsonLines()
sources.JsonLines.path = "texts.jsonl"
""",
        """from omnijax.data import mixture
config.Data.source = @mixture.Mixture()
mixture.Mixture.members = (@prose/mixture.Member(), @zeds/mixture.Member())
prose/mixture.Member.name = "prose"
prose/mixture.Member.source = @prose/sources.JsonLines()
prose/sources.JsonLines.path = "texts.jsonl"
zeds/mixture.Member.name = "zeds"
zeds/mixture.Member.source = @zeds/sources.JsonLines()
zeds/sources.JsonLines.path = "others.jsonl"
""",
    )
    path.write_text(text)
    seen = runs.run(path, "Run.steps=14")
    first, last = seen.metrics[0], seen.metrics[-1]
    low, high = sorted((first["loss/prose"], first["loss/zeds"]))
    assert low <= first["loss"] <= high
    assert last["loss/zeds"] < last["loss/prose"]  # one letter over and over is soon learnt


# Going on


def test_a_run_in_pieces_is_the_run_in_one_piece(tiny: Path, straight: runs.Seen, five: runs.Seen) -> None:
    """Losses, gradient norms, learning rates and held-out losses to the bit, and the very rows."""
    folder = copy(tiny, "pieces")
    # What a kill leaves behind: a line cut off after lines of steps that were not saved, and a checkpoint cut off,
    # which is none, and not in the way of one.
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    shutil.copytree(folder / "checkpoints" / "step_5", folder / "checkpoints" / "step_9.orbax-checkpoint-tmp")
    second = runs.run(tiny, "Run.steps=9", folder="pieces")
    third = runs.run(tiny, "Evaluation.every=7", folder="pieces")
    assert five.row_ids | second.row_ids | third.row_ids == straight.row_ids
    assert (min(second.row_ids), min(third.row_ids)) == (6, 10)
    assert [line["step"] for line in third.metrics] == list(range(1, 15))
    for name in ("loss", "grad_norm", "weight", "learning_rate"):
        assert [line[name] for line in third.metrics] == [line[name] for line in straight.metrics], name
    assert third.metrics[-1]["heldout/loss"] == straight.metrics[-1]["heldout/loss"]
    assert straight.losses[-1] < straight.losses[0] - 0.1
    assert checkpoints(folder) == {"step_9", "step_14"}


def test_a_run_goes_on_on_another_mesh(tiny: Path, straight: runs.Seen, five: runs.Seen) -> None:
    copy(tiny, "moved")
    moved = runs.run(tiny, *EIGHT_PARTS, folder="moved")
    after = jax.device_get(five.after)
    jax.tree.map(np.testing.assert_array_equal, moved.before, after)
    np.testing.assert_allclose(moved.losses, straight.losses, rtol=1e-5)
    assert moved.row_ids == {step: ids for step, ids in straight.row_ids.items() if step > 5}
    mesh = moved.declared.step.mesh
    for path, spec in {
        "stacks.0.blocks.0.self_attn.q_proj.kernel": (None, ("data", "sequence"), "tensor"),
        "stacks.0.blocks.0.mlp.down_proj.kernel": (None, "tensor", ("data", "sequence")),
        "embed_tokens.embedding": (None, ("data", "sequence")),  # 257 rows are not split by tensor
        "stacks.0.blocks.0.self_attn.q_norm.scale": (),
    }.items():
        x = moved.after.params[path]
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), x.ndim), path


def test_every_leaf_stays_where_it_was_declared_and_the_step_is_compiled_once(
    tiny: Path, straight: runs.Seen, five: runs.Seen
) -> None:
    """After initialisation, every step, and a restore."""
    copy(tiny, "placed")
    for seen in (straight, runs.run(tiny, "Run.steps=7", *EIGHT_PARTS, folder="placed")):
        assert seen.misplaced == []
        assert seen.compilations == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("Qwen3Config.hidden_size=32", r"step 5 was saved from another model: embed_tokens.embedding is \(257, 16\)"),
        ("Qwen3Config.num_hidden_layers=3", "step 5 was saved from another model"),
        ("Run.seed=1", "the data state has seed 0, this run has 1"),
        ("Data.length=32", "the data state has length 16, this run has 32"),
        ("Run.resume=False", "holds a run, at step 5; choose another Run.dir, or set Run.resume=True"),
    ],
)
def test_another_run_is_refused(tiny: Path, five: runs.Seen, override: str, message: str) -> None:
    metrics = (tiny.parent / "five" / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match=message):
        runs.run(tiny, override, folder="five")
    assert (tiny.parent / "five" / "metrics.jsonl").read_text() == metrics
    assert checkpoints(tiny.parent / "five") == {"step_5"}


def test_clipping_may_end_and_begin(tiny: Path, five: runs.Seen) -> None:
    folder = copy(tiny, "clipping")
    for steps, norm in ((6, "None"), (7, "0.5")):
        seen = runs.run(tiny, f"Run.steps={steps}", f"Optimizer.clip_norm={norm}", folder="clipping")
        assert list(seen.row_ids) == [steps]
    assert checkpoints(folder) == {"step_6", "step_7"}


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: cut_off(step / "meta" / "metadata"), "Unterminated string"),
        (lambda step: cut_off(step / "params" / "manifest.ocdbt"), "DATA_LOSS"),
        (lambda step: [cut_off(path) for path in (step / "params/ocdbt.process_0/d").iterdir()], "while reading array"),
        (lambda step: shutil.rmtree(step / "optimizer"), 'Item "optimizer" was not found'),
        (lambda step: shutil.rmtree(step / "data"), 'Item "data" was not found'),
    ],
    ids=["meta", "index", "arrays", "no optimizer", "no data"],
)
def test_a_damaged_checkpoint_is_named_with_the_way_out(
    tiny: Path, five: runs.Seen, damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tiny.parent / "five", folder)
    shutil.copytree(folder / "checkpoints" / "step_5", folder / "checkpoints" / "step_12")
    damage(folder / "checkpoints" / "step_12")
    with pytest.raises(UserError) as caught:
        runs.run(tiny, folder=str(folder))
    message = str(caught.value)
    assert message.startswith(f"{folder}/checkpoints: step 12 is damaged, or of another version (")
    assert reason in message
    assert "\n" not in message
    assert "; older steps here: 5; move its folder away to go on from step 5, or start anew" in message
    shutil.rmtree(folder / "checkpoints" / "step_12")
    assert list(runs.run(tiny, "Run.steps=6", folder=str(folder)).row_ids) == [6]


def test_changed_settings_are_named(tiny: Path, five: runs.Seen, capsys: pytest.CaptureFixture[str]) -> None:
    copy(tiny, "changed")
    runs.run(tiny, "Run.steps=6", "Optimizer.b1=0.5", folder="changed")
    said = capsys.readouterr().out
    assert said[said.index("resumed at step 5") :].split("\n")[:7] == [
        "resumed at step 5",
        "  setting - config.Run.dir = 'five'",
        "  setting + config.Run.dir = 'changed'",
        "  setting - config.Run.steps = 5",
        "  setting + config.Run.steps = 6",
        "  setting - config.Optimizer.b1 = 0.9",
        "  setting + config.Optimizer.b1 = 0.5",
    ]


def test_a_finished_run_has_nothing_to_train(tiny: Path, five: runs.Seen, capsys: pytest.CaptureFixture[str]) -> None:
    before = (tiny.parent / "five" / "config.gin").read_text()
    seen = runs.run(tiny, "Run.steps=4", folder="five")
    assert "nothing to train: step 5 is done and Run.steps = 4" in capsys.readouterr().out
    assert seen.row_ids == {}
    assert seen.metrics == five.metrics
    assert (tiny.parent / "five" / "config.gin").read_text() == before


KILL = """
import os, signal, sys
from omnijax import steplog, train
record = steplog.StepLog.record
def killed(self, number, *rest):
    record(self, number, *rest)
    if number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
train.StepLog.record = killed
train.main()
"""


def test_a_killed_run_goes_on_as_if_nothing_had_been(tiny: Path, straight: runs.Seen) -> None:
    """Two processes of the same command: the first is killed after step 8, with a save of step 6 done or under way."""
    arguments = ("tiny.gin", "Run.dir=killed", "Checkpoint.every=3")
    folder = tiny.parent
    assert runs.finish(runs.start(folder, "-c", KILL, *arguments)).returncode == -signal.SIGKILL
    assert read_metrics(folder / "killed")[-1]["step"] == 7
    done = runs.finish(runs.start(folder, "-m", "omnijax.train", *arguments))
    assert done.returncode == 0, done.stderr
    assert "resumed at step 6" in done.stdout or "resumed at step 3" in done.stdout
    lines = read_metrics(folder / "killed")
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert [line["loss"] for line in lines] == straight.losses
    assert checkpoints(folder / "killed") == {"step_12", "step_14"}


@pytest.mark.full
def test_a_kill_at_any_moment_leaves_a_good_checkpoint(tiny: Path, straight: runs.Seen) -> None:
    """Kills at random moments of a run that saves at every step; each time it goes on from where it was, or nearly."""
    random = np.random.default_rng(1)
    arguments = ("-m", "omnijax.train", "tiny.gin", "Run.dir=often", "Run.steps=150", "Checkpoint.every=1")
    expected = runs.run(tiny, "Run.steps=150", folder="longer").losses
    folder, reached = tiny.parent / "often", 0
    for _ in range(10):
        process = runs.start(tiny.parent, *arguments)
        goal = reached + int(random.integers(2, 12))
        while process.poll() is None and (read_metrics(folder) or [{"step": 0}])[-1]["step"] < goal:
            pass
        process.kill()
        runs.finish(process)
        manager = checkpoint.open_checkpoints(folder / "checkpoints", read_only=True)
        saved = checkpoint.latest_step(manager)
        manager.close()
        last = read_metrics(folder)[-1]["step"]
        assert saved is not None
        assert last - 3 <= saved <= last + 1
        reached = last
    assert runs.finish(runs.start(tiny.parent, *arguments)).returncode == 0
    assert [line["loss"] for line in read_metrics(folder)] == expected


# Failing


def test_a_loss_that_is_not_finite_stops_the_run(tiny: Path, straight: runs.Seen, five: runs.Seen) -> None:
    """The step with the absurd learning rate has a good loss still; the one after it has none."""
    folder = copy(tiny, "absurd")
    with pytest.raises(SystemExit, match=r"stopped: .*loss is nan.* at step 7; the rows of its batch are in") as stop:
        runs.run(tiny, "Optimizer.learning_rate=1e30", "Checkpoint.every=7", folder="absurd")
    assert isinstance(stop.value.code, str)  # which is printed, and the exit code is 1
    found = json.loads((folder / "nonfinite.json").read_text())
    assert found["step"] == 7
    assert found["values"]["loss"] == "nan"
    assert found["rows"] == [list(ids) for ids in straight.row_ids[7]]
    assert checkpoints(folder) == {"step_5"}
    assert read_metrics(folder)[-1]["step"] == 6
    assert runs.run(tiny, "Run.steps=7", folder="absurd").losses == straight.losses[:7]


def test_a_held_out_loss_that_is_not_finite_stops_the_run_too(tiny: Path, five: runs.Seen) -> None:
    """At the last step no later loss would tell that its update was bad."""
    folder = copy(tiny, "absurd-end")
    with pytest.raises(SystemExit, match="stopped: heldout/loss is nan"):
        runs.run(tiny, "Optimizer.learning_rate=1e30", "Run.steps=6", "Evaluation.every=6", folder="absurd-end")
    assert checkpoints(folder) == {"step_5"}


def test_a_run_folder_that_cannot_be_made_is_refused(tiny: Path) -> None:
    (tiny.parent / "file").write_text("")
    for folder, reason in (("file", "File exists"), ("file/run", "Not a directory")):
        with pytest.raises(UserError, match=f"Run.dir = '{folder}' cannot be made \\({reason}\\); choose another"):
            runs.run(tiny, folder=folder)


HOLD = """
import sys, time
from pathlib import Path
from omnijax.lock import only_run
with only_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_gone(tiny: Path) -> None:
    folder = tiny.parent / "shared"
    folder.mkdir()
    first = runs.start(tiny.parent, "-c", HOLD, "shared")
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"shared: process {first.pid} on .* is running here; wait for it, or choose"):
        runs.run(tiny, folder="shared")
    assert not (folder / "checkpoints").exists()
    first.kill()
    runs.finish(first)
    assert len(runs.run(tiny, "Run.steps=1", folder="shared").losses) == 1


def test_a_folder_that_cannot_be_locked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some file systems of clusters have no locks."""

    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lockf)
    with only_run(tmp_path):
        pass
    expected = f"warning: {tmp_path} cannot be locked (No locks available): start no second run in it\n"
    assert capsys.readouterr().err == expected


def test_a_home_is_found(tiny: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train.run_folder("~/runs/x") == tmp_path / "runs" / "x"
    assert (tmp_path / "runs" / "x").is_dir()


def test_a_run_folder_that_cannot_be_written_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write wherever the permissions forbid it
    with pytest.raises(UserError, match=r"Run\.dir = 'locked' cannot be written to; choose another folder"):
        runs.run(tiny, folder="locked")


LIMIT = """
import resource
from omnijax import commands, train
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
commands.run(train.main)
"""


def test_a_save_that_fails_ends_the_run_and_costs_no_older_one(
    tiny: Path, straight: runs.Seen, five: runs.Seen
) -> None:
    """A limit on the size of files stands for the full disk: metrics still fit, the arrays of a checkpoint do not."""
    folder = copy(tiny, "full")
    arguments = ("tiny.gin", "Run.dir=full", "Run.steps=10000", "Checkpoint.every=40")
    done = runs.finish(runs.start(tiny.parent, "-c", LIMIT, *arguments))
    assert done.returncode == 1
    assert "stopped: a checkpoint was not written: " in done.stderr  # among what orbax's threads print meanwhile
    assert "File too large; mend that: the same command goes on from the one before" in done.stderr
    assert read_metrics(folder)[-1]["step"] < 80  # it did not go on, as if step 40 had been saved, to the next save
    assert "step_5" in checkpoints(folder)
    assert runs.run(tiny, folder="full").losses == straight.losses


# Held-out loss

TEXTS = tuple("".join(np.random.default_rng(size).choice(list("abcde "), size)) for size in (40, 7, 90, 1, 16))


def held_out(rows: int, mesh_name: str | None, initializer_range: float = 0.1) -> dict[str, float]:
    """Held-out metrics of an untrained model on `TEXTS`, which fill ten rows and a part of the eleventh."""
    model_config = Qwen3Config(257, 16, 32, 2, 8, 4, 4, initializer_range=initializer_range)
    with on(mesh_name, rules.table()) as mesh:
        model = parameters.build_model(model_config, mesh, rules.table(), seed=0)
        rows_of_text = evaluation_rows(PythonDocuments("texts", tuple("abcde"), TEXTS), Bytes(), 16, rows=rows)
        evaluate = evaluation_step(model, dtype=jnp.dtype("float32"))
        params = parameters.split(model)[1]
        return train.heldout_metrics(evaluate, params, {"": rows_of_text}, mesh, rules.table())


@pytest.mark.parametrize(
    ("rows", "mesh"), [(2, None), (4, None), (8, None), (8, "data 8"), (4, "data 2 x sequence 2 x tensor 2")]
)
def test_the_held_out_loss_is_the_same_for_any_batch_and_mesh(rows: int, mesh: str | None) -> None:
    assert held_out(rows, mesh) == pytest.approx(held_out(1, None), rel=1e-6)


def test_bits_per_byte_of_a_model_that_knows_nothing() -> None:
    """Every byte but a text's first, and every end of a text, costs log 257; the ends stand for no byte."""
    found = held_out(8, None, initializer_range=0.0)
    assert found["heldout/loss"] == pytest.approx(math.log(257), rel=1e-6)
    predicted, covered = 40 + 7 + 90 + 1 + 16, 39 + 6 + 89 + 0 + 15
    assert found["heldout/bits_per_byte"] == pytest.approx(math.log2(257) * predicted / covered, rel=1e-6)


# What a run leaves


def test_the_metrics_hold_every_number_of_a_step_in_one_line(straight: runs.Seen) -> None:
    assert [line["step"] for line in straight.metrics] == list(range(1, 15))
    held = {"heldout/loss", "heldout/bits_per_byte"}
    for line in straight.metrics:
        assert {"loss", "grad_norm", "learning_rate", "weight"} < set(line)
        assert (held <= set(line)) == (line["step"] in (7, 14))
        # The first step compiles; the one after an evaluation would count it.
        assert ("tokens_per_second" in line) == (line["step"] not in (1, 8))


def test_alternatives_of_parameters_and_activations_are_said(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two parts of `tensor` do not divide 257 ids; of two steps the first is traced, which says it once."""
    runs.run(tiny, "Run.steps=2", *EIGHT_PARTS, folder="said")
    said = [line for line in capsys.readouterr().out.splitlines() if "alternative" in line]
    assert said == [
        "  alternative taken: vocab: none, as tensor does not divide 257 (embed_tokens.embedding and 1 more)",
        "  alternative taken: act_vocab: none, as tensor does not divide 257 ([act_vocab 257, - 16] and 2 more)",
    ]


def test_a_warm_up_that_never_ends_is_said(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.run(tiny, "Run.steps=2", "Optimizer.warmup_steps=8", folder="warming")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("warning"))
    assert line == (
        "warning: the learning rate warms up until the end: Optimizer.warmup_steps = 8, Run.steps = 2; "
        "it reaches 0.00075 of 0.003"
    )


def test_tensorboard_files_hold_the_same_numbers(tiny: Path, straight: runs.Seen) -> None:
    (path,) = (tiny.parent / "straight" / "tensorboard").iterdir()
    data, found = path.read_bytes(), {}
    while data:  # TFRecord: length, its checksum, an event, its checksum
        (length,) = struct.unpack("<Q", data[:8])
        event = event_pb2.Event.FromString(data[12 : 12 + length])
        found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    expected = {(line["step"], name): x for line in straight.metrics for name, x in line.items() if name != "step"}
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_picture_of_the_loss_shows_something(tiny: Path, straight: runs.Seen) -> None:
    pixels = matplotlib.image.imread(tiny.parent / "straight" / "loss.png")
    colours = np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)
    assert pixels.shape[0] > 200
    assert len(colours) > 10


def test_the_config_in_the_run_folder_is_the_run(tiny: Path, straight: runs.Seen) -> None:
    overrides = ["Run.dir=straight", "Evaluation.every=7", "Evaluation.ngrams=(2,)"]
    assert load_config(tiny.parent / "straight" / "config.gin") == load_config(tiny, overrides)


def test_a_checkpoint_has_five_items(tiny: Path, straight: runs.Seen) -> None:
    folder = tiny.parent / "straight" / "checkpoints" / "step_14"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {
        "params",
        "optimizer",
        "data",
        "config",
        "meta",
    }
    manager = checkpoint.open_checkpoints(folder.parent, read_only=True)
    assert checkpoint.saved_config(manager) == (tiny.parent / "straight" / "config.gin").read_text()
    manager.close()


def test_a_large_stack_is_written_one_layer_a_chunk(tmp_path: Path) -> None:
    shapes = {"stacks.0.large": (3, 512, 512), "stacks.0.small": (3, 512, 256), "embedding": (2048, 256)}
    arrays = {path: jnp.zeros(shape) for path, shape in shapes.items()}
    manager = checkpoint.open_checkpoints(tmp_path)
    checkpoint.save(manager, TrainState(jnp.int32(1), arrays, {"moment": arrays}), {}, "")
    manager.close()
    for item, prefix in (("params", ""), ("optimizer", "moment.")):
        text = (tmp_path / "step_1" / item / "array_metadatas" / "process_0").read_text()
        written = {each["array_metadata"]["param_name"]: each for each in json.loads(text)["array_metadatas"]}
        chunks = {name: tuple(each["array_metadata"]["chunk_shape"]) for name, each in written.items()}
        assert chunks == {prefix + path: (1, *s[1:]) if "large" in path else s for path, s in shapes.items()}


@pytest.mark.parametrize(
    ("window", "traced"),
    [("(7, 8)", [7, 8]), ("(3, 9)", [6, 8]), ("(7, 7)", [7, 7]), ("(1, 2)", []), ("(8, 7)", [])],
)
def test_a_profile_is_of_the_steps_that_are_left(
    tiny: Path,
    five: runs.Seen,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    window: str,
    traced: list[int],
) -> None:
    """Five of eight steps are done; what stands in the metrics tells when the trace begins and ends."""
    folder, found = copy(tiny, f"profile {window}"), []
    monkeypatch.setattr("jax.profiler.start_trace", lambda _: found.append(read_metrics(folder)[-1]["step"] + 1))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: found.append(read_metrics(folder)[-1]["step"]))
    runs.run(tiny, "Run.steps=8", f"Run.profile={window}", folder=f"'{folder.name}'")
    assert found == traced
    assert (f"no trace: Run.profile = {window} names no step that is left" in capsys.readouterr().out) == (not traced)


def test_the_profile_is_a_trace(tiny: Path) -> None:
    runs.run(tiny, "Run.steps=2", "Run.profile=(2, 2)", folder="profiled")
    (trace,) = (tiny.parent / "profiled" / "profile").rglob("*.xplane.pb")
    assert b"jit_step" in trace.read_bytes()


def test_a_step_that_is_compiled_anew_is_told_once(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One batch comes with another sharding."""
    put, calls = train.put_batch, []

    def put_elsewhere(arrays, mesh, table):
        calls.append(None)
        batch = put(arrays, mesh, table)
        return jax.device_put(batch, NamedSharding(mesh, PartitionSpec())) if len(calls) == 3 else batch

    monkeypatch.setattr(train, "put_batch", put_elsewhere)
    runs.run(tiny, "Run.steps=6", folder="anew")
    said = capsys.readouterr().out
    assert said.count("compiled anew") == 1
    assert "warning: step 3 was compiled anew; every batch should have one shape and one sharding" in said
