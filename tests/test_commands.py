"""What a person at a terminal sees: one line for a mistake, little for a run, and their own packages beside ours."""

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from omnijax import commands, config, generate, train
from omnijax.metrics import read_metrics
from tests import runs

ONE_DEVICE = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("commands")).parent


@pytest.fixture(scope="module")
def normal(folder: Path):
    """An ordinary run in a process of its own, on one device, with the compile cache where it is by default."""
    arguments = ("tiny.gin", "Run.steps=3", "Evaluation.every=3", "Sample.prompt='ab '", "Sample.tokens=5")
    environment = ONE_DEVICE | {"JAX_COMPILATION_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": str(folder / "home")}
    return runs.finish(runs.start(folder, "-m", "omnijax.train", *arguments, **environment))


def run_here(
    main: Callable[[], None], arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> int | str | None:
    """What `python -m` does with a command, in this process; returns the exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    try:
        commands.run(main)
    except SystemExit as stop:
        return stop.code
    return 0


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: no config file is given; write python -m omnijax.train CONFIG.gin [Name.field=value ...]"),
        (["tiny.gin", "Run.stepz=3"], "error: command line: Run has no field stepz; did you mean Run.steps?"),
    ],
)
def test_a_mistake_is_one_line_of_a_process(folder: Path, arguments: list[str], message: str) -> None:
    done = runs.finish(runs.start(folder, "-m", "omnijax.train", *arguments))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == message
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.gin"], "missing.gin"),
        (["tiny.gin", "Run.steps=0"], "Run.steps = 0 must be"),
        (["tiny.gin", "Mesh.data=3"], "mesh replica 1 x data 3 x expert 1 x sequence 1 x tensor 1: the sizes take 3"),
        (["tiny.gin", "Mesh.data=1", "Mesh.tensor=8", "Qwen3Config.num_attention_heads=4"], "heads"),
        (["tiny.gin", "Data.rows=4"], "batch"),
        (["tiny.gin", "Run.profile=(0, 0)"], "Run.profile = (0, 0) must be at least 1"),
        (["tiny.gin", "Run.peak_tflops=-1.0"], "Run.peak_tflops = -1.0 must be above 0"),
        (["tiny.gin", "Sample.prompt='a\\ud800'"], "a text is not valid Unicode ('utf-8' codec can't encode character"),
        (
            ["tiny.gin", "JsonLines.path=short.jsonl", "Data.rows=8", "Data.holdout=0.1", "Evaluation.every=1"],
            "none of the 1 evaluation documents has a second token: hold out more text (Data.holdout)",
        ),
        (["tiny.gin", "JsonLines.path=nothing.jsonl"], "no file matches path 'nothing.jsonl'"),
        (["tiny.gin", "JsonLines.path=broken.jsonl"], "broken.jsonl"),
        (["tiny.gin", "Data.holdout=0.99"], "holding out 0.99 of 40 documents"),
    ],
)
def test_a_mistake_is_one_line(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "short.jsonl").write_text('{"text": "abc"}\n' * 9 + '{"text": "d"}\n')
    (folder / "broken.jsonl").write_text('{"text": \n' + '{"text": "good"}\n' * 11)
    assert run_here(train.main, [*arguments, "Run.dir=mistakes"], folder, monkeypatch) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert len(said.out.splitlines()) < 10  # no list of settings stands between the command and its mistake


def test_a_fault_of_ours_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        run_here(lambda: print(1 / 0), [], folder, monkeypatch)


def test_help_is_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(train.main, ["--help"], folder, monkeypatch) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: python -m omnijax.train CONFIG.gin [Name.field=value ...]\n")
    assert str(config.__file__) in said.out
    assert said.err == ""


def test_control_c_is_one_line(folder: Path) -> None:
    process = runs.start(folder, "-m", "omnijax.train", "tiny.gin", "Run.dir=long", "Run.steps=100000")
    while process.poll() is None and not read_metrics(folder / "long"):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    done = runs.finish(process)
    assert done.returncode == 130
    *progress, line = done.stderr.splitlines()
    assert line == "interrupted"
    assert all(text.startswith("step ") for text in progress)


# An ordinary run


def test_a_run_says_little(normal, folder: Path) -> None:
    """Where there is no terminal, progress is a line now and then, and no library adds any."""
    assert normal.returncode == 0
    *first, last = normal.stderr.splitlines()
    assert len(first) == 1
    assert re.fullmatch(r"step 1/3, loss \d\.\d{3}, \? to go", first[0])
    assert re.fullmatch(r"step 3/3, loss \d\.\d{3}, [\d,]+ tokens/s, 00:00 to go", last)
    said = normal.stdout
    before, resolved, after = said.partition((folder / "run" / "config.gin").read_text())
    assert resolved  # between what was checked and what was done
    told = [line for line in (before + after).splitlines() if line]
    assert max(map(len, told)) < 160
    assert [line.partition(":")[0] for line in told] == [
        "run folder",
        "compile cache",
        "mesh",
        "data",
        "parameters",
        "compute",
        "speed",
        "step 3",
        "picture of the loss",
        "sample",
        "to go on",
        "to sample",
    ]
    assert told[2].startswith("mesh: 1 x cpu in 1 process, no axis is split")
    assert told[9].startswith("sample: 'ab ")


def test_the_compile_cache_is_on(normal, folder: Path) -> None:
    place = folder / "home" / ".cache" / "omnijax" / "xla"
    assert f"compile cache: {place}\n" in normal.stdout
    assert any(path.name.startswith("jit_step") for path in place.iterdir())


def test_generate_goes_on_with_a_prompt(
    normal, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {}
    for seed in ("0", "0 again", "1"):
        arguments = ["run", "the prompt", "--tokens", "12", "--seed", seed[0]]
        assert run_here(generate.main, arguments, folder, monkeypatch) == 0
        said[seed] = capsys.readouterr().out
    assert all(text.startswith("the prompt") and len(text) > len("the prompt\n") for text in said.values())
    assert said["0"] == said["0 again"] != said["1"]
    done = runs.finish(
        runs.start(folder, "-m", "omnijax.generate", "run", "the prompt", "--tokens", "12", **ONE_DEVICE)
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said["0"], "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "a"], "error: nowhere: no checkpoints here; give the folder of a run, e.g. runs/quickstart"),
        (["empty", "a"], "no checkpoint here; give the folder of a run that saved one"),
        (["run", ""], "error: sample: the prompt is empty; give at least one token"),
        (["run", "a", "--tokens", "0"], "error: --tokens 0 must be positive"),
        (["run", "a", "--temperature", "nan"], "--temperature nan a number from 0"),
        (["run", "a\udcff"], "error: a text is not valid Unicode"),
    ],
)
def test_generate_names_a_mistake(
    normal,
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "empty" / "checkpoints").mkdir(parents=True, exist_ok=True)
    assert run_here(generate.main, arguments, folder, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_run_is_read_from_any_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokenizer's path is relative to where it was started, even if a file of that name is here as well."""
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir(), other.mkdir()
    runs.write_config(home)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "end": 2}, unk_token="?"))
    words.save(str(home / "words.json"))
    (other / "words.json").write_text("{}")
    arguments = ["tiny.gin", "Run.steps=1", "Data.tokenizer=@tokenizer.TokenizerFile()"]
    arguments += ["TokenizerFile.path=words.json", "TokenizerFile.eos=end"]
    assert run_here(train.main, arguments, home, monkeypatch) == 0
    capsys.readouterr()
    assert run_here(generate.main, ["../home/run", "a", "--tokens", "2"], other, monkeypatch) == 0
    assert capsys.readouterr().out.startswith("a")
    home.rename(tmp_path / "moved")
    (other / "words.json").unlink()
    assert run_here(generate.main, ["../moved/run", "a"], other, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "TokenizerFile.path 'words.json' cannot be read (No such file or directory)" in line
    assert line.endswith(
        f"; relative paths were looked up in {other}; the run was started in {home}, which is not here"
    )


# Packages of the user's


@pytest.mark.parametrize("initialised", [True, False], ids=["with __init__.py", "without __init__.py"])
def test_a_model_and_a_table_of_the_users_stand_beside_ours(tmp_path: Path, initialised: bool) -> None:
    """A subclass of our config and a copy of our table, in folders of the same names; ours are found as well."""
    path = runs.write_config(tmp_path)
    for name, module, text in (
        ("models", "mine", "from models.qwen3 import Qwen3Config\n\nclass Mine(Qwen3Config):\n    pass\n"),
        ("sharding_rules", "mine", "from sharding_rules import qwen3\n\ndef table():\n    return qwen3.table()\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{module}.py").write_text(text)
        if initialised:
            (tmp_path / name / "__init__.py").write_text("")
    mine = (
        path.read_text().replace("from models import qwen3", "from models import mine").replace("qwen3.Qwen3", "mine.")
    )
    mine = mine.replace("mine.Config", "mine.Mine").replace("import qwen3 as rules", "import mine as rules")
    (tmp_path / "mine.gin").write_text(mine)
    done = runs.finish(runs.start(tmp_path, "-m", "omnijax.train", "mine.gin", "Run.steps=1", **ONE_DEVICE))
    assert done.returncode == 0, done.stderr
    for name in ("models", "sharding_rules"):
        places = {str(tmp_path / name), str(runs.HOME / name)}
        (line,) = (line for line in done.stderr.splitlines() if line.startswith(f"package {name} is looked up in "))
        assert set(line.removeprefix(f"package {name} is looked up in ").split(", then ")) == places


def test_a_module_that_hides_a_package_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("")
    done = runs.finish(runs.start(runs.write_config(tmp_path).parent, "-m", "omnijax.train", "tiny.gin"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"error: {tmp_path / 'models.py'} hides the package 'models' of OmniJAX; rename it, or run elsewhere"
