"""Config files: what they may say, what they mean, and one clear line for every mistake."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnijax import config
from omnijax.errors import UserError
from omnijax.ginfile import Loaded, load

TOY = """
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from omnijax.errors import UserError
from omnijax.fields import ranged
from toy.parts import Part


class Source(Protocol):
    path: str


@dataclass(frozen=True)
class Run:
    dir: str = "runs"
    steps: int = ranged(10, at_least=1)
    learning_rate: float = ranged(1e-3, above=0, below=1)
    resume: bool = False
    mode: Literal["fast", "slow"] = "fast"
    profile: tuple[int, int] | None = None
    tags: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ranged((), at_least=1)
    limits: dict[str, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    clip: float | None = ranged(None, above=0)
    extra: Any = None


@dataclass(frozen=True)
class Mesh:
    data: int = ranged(1, at_least=1)
    tensor: int = 1

    def __post_init__(self):
        if self.tensor > 8:
            raise UserError(f"tensor = {self.tensor} is more than 8")
        if self.data == 13:
            raise ValueError("our fault")


@dataclass(frozen=True)
class Lora:
    rank: int = 8


@dataclass(frozen=True)
class Data:
    source: Source
    others: tuple[Any, ...] = ()
    part: Part = field(default_factory=Part)


@dataclass(frozen=True)
class Loop:
    inside: Any = None


@dataclass(frozen=True)
class Train:
    data: Data
    run: Run
    mesh: Mesh = field(default_factory=Mesh)
    lora: Lora | None = None
    evaluation: Any = None
    schedule: Callable[[int], float] | None = None
    kind: Any = None
    rate: float = 1.0


@dataclass
class Thawed:
    a: int = 1


CONSTANT = 3
"""

PARTS = """
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    size: int = 4
"""

SOURCES = """
from dataclasses import dataclass


@dataclass(frozen=True)
class JsonLines:
    path: str
    field: str = "text"


@dataclass(frozen=True)
class Parquet:
    path: str = "x.parquet"


@dataclass(frozen=True)
class Mesh:
    tensor: int = 1


def double(x: int, *, offset: float = 0.0) -> float:
    return 2.0 * x + offset


def decay(step):
    return 1.0 / (step + 1)
"""

GOOD = """\
from __gin__ import dynamic_registration

from toy import config
from toy import sources

config.Data.source = @sources.JsonLines()
sources.JsonLines.path = 'a.jsonl'
"""


@pytest.fixture(scope="module", autouse=True)
def _toy(tmp_path_factory):
    home = tmp_path_factory.mktemp("modules")
    (home / "toy").mkdir()
    for name, text in {"__init__": "", "config": TOY, "sources": SOURCES, "parts": PARTS}.items():
        (home / "toy" / f"{name}.py").write_text(text)
    (home / "toy" / "broken.py").write_text("import no_such_dependency\n")
    sys.path.insert(0, str(home))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(home))
    for name in [name for name in sys.modules if name.split(".")[0] == "toy"]:
        del sys.modules[name]


@pytest.fixture
def build(tmp_path):
    """Load `text` as a config of the toy package; files beside it are written first."""

    def build(text: str, *overrides: str, **files: str) -> Loaded:
        for name, content in {"run": text, **files}.items():
            (tmp_path / f"{name}.gin").write_text(content, encoding="utf-8")
        root = importlib.import_module("toy.config").Train
        loaded = load(tmp_path / "run.gin", overrides, root=root)
        resolved = tmp_path / "resolved.gin"
        resolved.write_text(loaded.text, encoding="utf-8")
        again = load(resolved, root=root)
        assert again.value == loaded.value
        assert again.text == loaded.text
        return loaded

    return build


def mistake(build, text: str, *overrides: str, **files: str) -> str:
    with pytest.raises(UserError) as caught:
        build(text, *overrides, **files)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What files may say


def test_sections_without_bindings_have_their_defaults(build):
    train = build(GOOD).value
    assert (train.run.steps, train.mesh.tensor, train.data.part.size, train.lora) == (10, 1, 4, None)
    assert train.data.source.path == "a.jsonl"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("Run.steps = 5", "steps", 5),
        ("Run.learning_rate = 1e-4", "learning_rate", 1e-4),
        ("Run.clip = 1", "clip", 1.0),
        ("Run.resume = True", "resume", True),
        ("Run.mode = 'slow'", "mode", "slow"),
        ("Run.profile = [3, 4]", "profile", (3, 4)),
        ("Run.tags = ('a',)", "tags", ("a",)),
        ("Run.limits = {'a': 1, 'b': 2.5}", "limits", {"a": 1.0, "b": 2.5}),
        ("Run.names = ['a', 'b']", "names", ["a", "b"]),
        ("Run.dir = 'it\\'s \"ü\"\\n'", "dir", 'it\'s "ü"\n'),
        ("Run.extra = {'a': [(1, -2.5, None), ()], 3: {}}", "extra", {"a": [(1, -2.5, None), ()], 3: {}}),
        ("Run.extra = 1e999", "extra", float("inf")),
        ("Run:\n  steps = 7\n", "steps", 7),
    ],
)
def test_values(build, line, name, value):
    found = getattr(build(f"{GOOD}config.{line}\n").value.run, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("Run.steps=5", "steps", 5),
        ("config.Run.steps=5", "steps", 5),
        ("toy.config.Run.steps=5", "steps", 5),
        ("Run.dir=runs/a b", "dir", "runs/a b"),
        ("Run.dir=it's", "dir", "it's"),
        ("Run.dir=7", "dir", "7"),
        ("Run.dir='7'", "dir", "7"),
        ("Run.mode=slow", "mode", "slow"),
        ("Run.clip=None", "clip", None),
        ("Run.clip=2", "clip", 2.0),
        ("Run.extra=key=value", "extra", "key=value"),
        ("Run.tags=('a', 'b')", "tags", ("a", "b")),
        ("Run.dir=%HOME", "dir", "here"),
        ("HOME=there", "dir", "there"),
    ],
)
def test_overrides_replace_bindings(build, override, name, value):
    text = f"{GOOD}HOME = 'here'\nconfig.Run.dir = %HOME\nconfig.Run.names = [%HOME]\nconfig.Run.steps = 3\n"
    found = getattr(build(text, override).value.run, name)
    assert found == value
    assert type(found) is type(value)


def test_references(build):
    sources = importlib.import_module("toy.sources")
    text = f"""{GOOD}
config.Train.schedule = @sources.decay
config.Train.rate = @sources.double()
sources.double.x = 3
config.Train.kind = @sources.Parquet
config.Data.others = (@sources.Parquet(), {{'a': @sources.Parquet()}})
"""
    train = build(text).value
    assert train.schedule is sources.decay
    assert train.rate == 6.0
    assert train.kind is sources.Parquet
    assert train.data.others == (sources.Parquet(), {"a": sources.Parquet()})


def test_scopes_reach_the_sections_below_and_fall_back(build):
    text = f"""{GOOD}
config.Train.evaluation = @eval/config.Data()
eval/sources.JsonLines.path = 'b.jsonl'
sources.JsonLines.field = 'body'
eval/config.Data.source = @sources.JsonLines()
config.Part.size = 5
"""
    train = build(text, "eval/Part.size=6").value
    assert (train.data.source.path, train.evaluation.source.path) == ("a.jsonl", "b.jsonl")
    assert (train.data.source.field, train.evaluation.source.field) == ("body", "body")
    assert (train.data.part.size, train.evaluation.part.size) == (5, 6)


@pytest.mark.parametrize(
    "imports",
    ["import toy.sources\n", "import toy.sources as s\n", "from toy import sources as s\nimport toy.config\n"],
)
def test_imports(build, imports):
    name = "s" if " as s" in imports else "toy.sources"
    text = f"{imports}config.Data.source = @{name}.JsonLines()\n{name}.JsonLines.path = 'a'\n"
    assert build(text).value.data.source.path == "a"


def test_the_including_file_replaces_bindings_of_its_includes(build):
    text = "include 'base.gin'\ninclude 'other.gin'\nconfig.Run.steps = 7\n"
    train = build(
        text, base=f"{GOOD}config.Run.steps = 5\n", other="include 'base.gin'\nconfig.Mesh.tensor = 2\n"
    ).value
    assert (train.run.steps, train.mesh.tensor) == (7, 2)


def test_classes_of_the_same_name_are_told_apart(build):
    text = f"{GOOD}config.Train.kind = @sources.Mesh()\n"
    loaded = build(text, "sources.Mesh.tensor=3", "config.Mesh.tensor=2")
    assert (loaded.value.kind.tensor, loaded.value.mesh.tensor) == (3, 2)


def test_resolved_text_names_every_field(build):
    text = build(f"{GOOD}STEPS = 20\nconfig.Run.steps = %STEPS\n").text
    assert text.startswith(
        "from __gin__ import dynamic_registration\n\nfrom toy import config\nfrom toy import parts\n"
    )
    sections = [block.splitlines()[0].split("=")[0].strip() for block in text.split("\n\n")[2:]]
    assert sections == [
        "config.Train.data",
        "config.Data.source",
        "sources.JsonLines.path",
        "parts.Part.size",
        "config.Run.dir",
        "config.Mesh.data",
    ]
    assert "config.Run.steps = 20\n" in text
    assert "config.Train.mesh = @config.Mesh()\n" in text


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(plain, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=nested, text=st.text())
def test_values_round_trip(build, value, text):
    loaded = build(f"{GOOD}config.Run.extra = {value!r}\nconfig.Run.dir = {text!r}\n")
    assert loaded.value.run.extra == value
    assert loaded.value.run.dir == text


# Mistakes: (lines after GOOD, overrides, parts of the message)

TYPOS = [
    # a name that nothing has, at every level
    ("config.Run.stps = 5", (), ["run.gin:8", "config.Run has no field stps", "config.Run.steps?"]),
    ("config.Rnu.steps = 5", (), ["run.gin:8", "no config.Rnu", "config.Run?"]),
    ("confg.Run.steps = 5", (), ["run.gin:8", "no confg.Run", "config.Run?"]),
    ("config.Part.sise = 5", (), ["config.Part has no field sise", "config.Part.size?"]),
    ("sources.JsonLines.pth = 'a'", (), ["sources.JsonLines has no field pth", "sources.JsonLines.path?"]),
    ("sources.JsonLine.path = 'a'", (), ["no sources.JsonLine", "sources.JsonLines?"]),
    ("config.Data.others = (@sources.Parket(),)", (), ["run.gin:8", "no sources.Parket", "sources.Parquet?"]),
    ("config.Train.schedule = @sources.dekay", (), ["no sources.dekay", "sources.decay?"]),
    ("config.Train.rate = @sources.double()\nsources.double.y = 3", (), ["sources.double has no field y", "x, offset"]),
    ("quantizaton = 4", (), ["run.gin:8: quantizaton is never used"]),
    ("learning_rate = 1e-3", (), ["learning_rate is never used", "config.Run.learning_rate?"]),
    ("mesh.tensor = 2", (), ["there is no mesh", "Mesh?"]),
    ("config.Train.mesh.tensor = 2", (), ["there is no config.Train.mesh", "config.Mesh?"]),
    ("config.Run.nonsense = 1", (), ["config.Run has no field nonsense", "dir, steps, learning_rate"]),
    ("abc.Xyzzy.a = 1", (), ["there is no abc.Xyzzy", "import"]),
    # hyphens
    ("config.Run.learning-rate = 1e-3", (), ["run.gin:8", "write config.Run.learning_rate"]),
    ("config.Run:\n  learning-rate = 1e-3", (), ["run.gin:9", "write learning_rate"]),
    # another section's field
    ("config.Run.tensor = 2", (), ["config.Run has no field tensor", "config.Mesh.tensor"]),
    ("config.Mesh.steps = 2", (), ["config.Mesh has no field steps", "config.Run.steps?"]),
    # types
    ("config.Run.steps = 'abc'", (), ["run.gin:8: config.Run.steps = 'abc' is not an int"]),
    ("config.Run.steps = '5'", (), ["is not an int: write 5 without quotes"]),
    ("config.Run.steps = 5.0", (), ["config.Run.steps = 5.0 is not an int: write 5"]),
    ("config.Run.steps = 1e999", (), ["config.Run.steps = 1e999 is not an int"]),
    ("config.Run.steps = True", (), ["config.Run.steps = True is not an int"]),
    ("config.Run.steps = None", (), ["config.Run.steps = None is not an int"]),
    ("config.Run.learning_rate = '1e-5'", (), ["'1e-5' is not a float: write 1e-5 without quotes"]),
    ("config.Run.learning_rate = True", (), ["= True is not a float"]),
    ("config.Run.resume = 1", (), ["= 1 is not a bool: write True"]),
    ("config.Run.resume = 'false'", (), ["= 'false' is not a bool: write False"]),
    ("config.Run.resume = true", (), ["run.gin:8: true is not a value: write True"]),
    ("config.Run.dir = runs", (), ["run.gin:8: runs is not a value: write 'runs'"]),
    ("config.Run.dir = 5", (), ["= 5 is not a str: write '5'"]),
    ("config.Run.mode = 'fats'", (), ["'fats' is not one of 'fast', 'slow': write 'fast'"]),
    ("config.Run.profile = (1, 2, 3)", (), ["(1, 2, 3) is not a tuple[int, int] or None"]),
    ("config.Run.profile = (1, 'a')", (), ["(1, 'a') is not a tuple[int, int] or None"]),
    ("config.Run.tags = 'a'", (), ["'a' is not a tuple[str, ...]: write ('a',)"]),
    ("config.Run.limits = {'a': 'b'}", (), ["{'a': 'b'} is not a dict[str, float]"]),
    ("config.Run.limits = {1: 2.0}", (), ["{1: 2.0} is not a dict[str, float]"]),
    ("config.Run.limits = {[1]: 2.0}", (), ["run.gin:8", "unhashable"]),
    ("config.Run.extra = 1j", (), ["1j cannot be written"]),
    ("config.Run.clip = 'x'", (), ["'x' is not a float or None"]),
    ("config.Train.mesh = 4", (), ["= 4 is not a Mesh"]),
    ("config.Train.mesh = @sources.Mesh()", (), ["config.Train.mesh = @sources.Mesh() is not a Mesh"]),
    ("config.Train.mesh = @config.Mesh", (), ["is not a Mesh: write @config.Mesh()"]),
    ("config.Train.schedule = 4", (), ["4 is not a Callable[[int], float] or None"]),
    ("config.Train.rate = @sources.Parquet()", (), ["@sources.Parquet() is not a float"]),
    # ranges
    ("config.Run.steps = 0", (), ["run.gin:8: config.Run.steps = 0 must be at least 1"]),
    ("config.Run.learning_rate = 1", (), ["= 1 must be above 0 and below 1"]),
    ("config.Run.sizes = (3, 0)", (), ["= (3, 0) must be at least 1"]),
    ("config.Run.clip = -1", (), ["= -1 must be above 0"]),
    # cross-checks
    ("config.Mesh.tensor = 16", (), ["config.Mesh: tensor = 16 is more than 8"]),
    # duplicates
    ("config.Run.steps = 5\nRun.steps = 6", (), ["run.gin:9", "Run.steps is bound twice", "run.gin:8"]),
    ("A = 5\nA = 6", (), ["run.gin:9: A is bound twice", "run.gin:8"]),
    # never reached
    (
        "sources.Parquet.path = 'a'",
        (),
        ["run.gin:8: sources.Parquet.path is never used: nothing is @sources.Parquet()"],
    ),
    ("config.Lora.rank = 4", (), ["config.Lora.rank is never used", "config.Train.lora = @config.Lora() too?"]),
    ("eval/sources.JsonLines.path = 'a'", (), ["eval/sources.JsonLines.path is never used", "sources.JsonLines.path"]),
    (
        "config.Data.source = @x/sources.JsonLines()\nx/sources.JsonLines.path = 'b'",
        (),
        ["config.Data.source is bound twice"],
    ),
    ("config.Train.schedule = @sources.decay\nsources.decay.step = 3", (), ["sources.decay.step is never used"]),
    # macros
    ("config.Run.steps = %STEPS", (), ["run.gin:8: %STEPS has no value", "STEPS = ..."]),
    ("STEPZ = 4\nconfig.Run.steps = %STEPS", (), ["%STEPS has no value; did you mean STEPZ?"]),
    ("A = %B\nB = %A\nconfig.Run.steps = %A", (), ["%A -> %B -> %A is endless"]),
    # imports
    ("from toy import sourcez", (), ["run.gin:8: there is no module toy.sourcez; did you mean toy.sources?"]),
    ("from toi import sources", (), ["run.gin:8: there is no module toi"]),
    ("from toy.config import Run", (), ["there is no module toy.config.Run; did you mean toy.config?"]),
    ("from toy import broken", (), ["run.gin:8: cannot import toy.broken: No module named 'no_such_dependency'"]),
    ("import json as s\nimport toy.parts as s", (), ["run.gin:9: s is json already"]),
    # what cannot be bound
    ("config.Thawed.a = 1", (), ["config.Thawed cannot be bound: it is neither a frozen dataclass nor"]),
    ("config.Source.path = 1", (), ["config.Source cannot be bound"]),
    # references
    ("config.Train.kind = @config.Loop()\nconfig.Loop.inside = @config.Loop()", (), ["Loop -> config.Loop is endless"]),
    ("config.Train.schedule = @x/sources.decay", (), ["only a call has a scope: write @x/sources.decay()"]),
    ("config.Train.rate = @sources.double()", (), ["run.gin:8: sources.double.x is required: bind it to an int"]),
    ("config.Train.rate = @sources.double(3)", (), ["run.gin:8: a reference takes no arguments"]),
    ("config.Train.kind = @Mesh()", (), ["Mesh is ambiguous: write toy.config.Mesh or toy.sources.Mesh"]),
    # syntax
    ("config.Run.steps 5", (), ["run.gin:8"]),
    ("config.Run.steps = (5", (), ["run.gin:"]),
    ("config.Run.steps =", (), ["run.gin:8"]),
    ("config.Run.dir = 'abc", (), ["run.gin:"]),
    ("config.Run.dir = $", (), ["run.gin:8"]),
    ("   config.Run:\n steps = 1", (), ["run.gin:"]),
    ("include 5", (), ["run.gin:8"]),
    # includes
    ("include 'bsae.gin'", (), ["run.gin:8: there is no file", "bsae.gin; did you mean", "base.gin?"]),
    ("include 'run.gin'", (), ["run.gin:8:", "includes itself"]),
    ("include 'loop.gin'", (), ["loop.gin:1:", "includes itself"]),
    ("include 'base.gin'\ninclude 'base2.gin'", (), ["base2.gin:1: config.Mesh.data is bound twice", "base.gin:1"]),
    ("include '.'", (), ["run.gin:8: cannot read"]),
    # overrides
    ("", ("Run.stps=5",), ["command line: Run has no field stps", "Run.steps?"]),
    ("", ("Rnu.steps=5",), ["command line: there is no Rnu", "Run?"]),
    ("", ("eval/JsonLines.path=x",), ["eval/JsonLines.path is never used"]),
    ("", ("Run.steps=abc",), ["command line: Run.steps = 'abc' is not an int"]),
    ("", ("Run.steps=1e6",), ["Run.steps = 1000000.0 is not an int: write 1000000"]),
    ("", ("Run.steps=0",), ["Run.steps = 0 must be at least 1"]),
    ("", ("Run.learning-rate=1",), ["write Run.learning_rate=1"]),
    ("", ("--Run.steps=5",), ["'--Run.steps=5' is not Section.field=value: write Run.steps=5"]),
    ("", ("--steps", "5"), ["'--steps' is not Section.field=value: write config.Run.steps=value"]),
    ("", ("--learning-rate=1",), ["write config.Run.learning_rate=1"]),
    ("", ("steps",), ["write config.Run.steps=value"]),
    ("", ("steps=5",), ["steps is never used", "config.Run.steps?"]),
    ("", ("Run.resume=true",), ["Run.resume = true is not a value: write Run.resume=True"]),
    ("", ("Run.dir=none",), ["write Run.dir=None"]),
    ("", ("Run.dir=",), ["Run.dir = nothing is not a value"]),
    ("", ("Run.tags=[a, b]",), ["check its brackets"]),
    ("", ("Run.steps=5\nx.y = 6",), ["is not an int"]),
    ("", ("Run.steps=5", "config.Run.steps=5"), ["config.Run.steps is bound twice, first at command line"]),
    ("", ("Mesh.tensor=5",), ["Mesh is ambiguous: write toy.config.Mesh or toy.sources.Mesh"]),
    ("", ("config.Mesh.tensor=16",), ["config.Mesh: tensor = 16 is more than 8"]),
    ("", ("Parquet.path=a",), ["command line: Parquet.path is never used: nothing is @sources.Parquet()"]),
]


@pytest.mark.parametrize(("lines", "overrides", "parts"), TYPOS, ids=[f"{line} {' '.join(a)}" for line, a, _ in TYPOS])
def test_mistakes(build, lines, overrides, parts):
    files = {"base": "config.Mesh.data = 2\n", "base2": "config.Mesh.data = 3\n", "loop": "include 'run.gin'\n"}
    message = mistake(build, f"{GOOD}{lines}\n", *overrides, **files)
    for part in parts:
        assert part in message, message


def test_a_binding_that_every_scope_replaces_is_refused(build):
    text = GOOD.replace("@sources", "@a/sources") + "a/sources.JsonLines.path = 'b'\n"
    assert "what is read is a/sources.JsonLines.path" in mistake(build, text)


def test_required_fields_are_named(build):
    assert "config.Data.source is required: bind it to a Source, or bind config.Train.data" in mistake(build, "")
    text = GOOD.replace("sources.JsonLines.path = 'a.jsonl'\n", "")
    assert "run.gin:6: sources.JsonLines.path is required: bind it to a str" in mistake(build, text)


def test_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "quickstart.gin").write_text("")
    with pytest.raises(UserError, match=r"there is no file .*quikstart.gin; did you mean .*quickstart.gin\?"):
        load(tmp_path / "quikstart.gin", root=config.Train)
    (tmp_path / "marked.gin").write_bytes(b"\xef\xbb\xbfnothing.Here.x = 1\n")
    with pytest.raises(UserError, match=r"marked.gin:1: there is no nothing.Here"):  # and no letter before it
        load(tmp_path / "marked.gin", root=config.Train)
    (tmp_path / "latin.gin").write_bytes(b"\xe9")
    with pytest.raises(UserError, match=r"cannot read .*latin.gin"):
        load(tmp_path / "latin.gin", root=config.Train)


def test_faults_of_ours_are_no_user_errors(build):
    with pytest.raises(ValueError, match="our fault") as caught:
        build(f"{GOOD}config.Mesh.data = 13\n")
    assert not isinstance(caught.value, UserError)


def test_quickstart_round_trips(tmp_path):
    path = Path(__file__).parent.parent / "configs" / "quickstart.gin"
    loaded = load(path, ["Mesh.tensor=2", "Run.dir=elsewhere"], root=config.Train)
    assert (loaded.value.mesh.tensor, loaded.value.run.dir) == (2, "elsewhere")
    (tmp_path / "config.gin").write_text(loaded.text)
    assert load(tmp_path / "config.gin", root=config.Train) == loaded
