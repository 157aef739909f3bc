"""The tables and the mesh: every refusal by its message, every placement by hand, and a tree that keeps its floors."""

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen3 import Qwen3Config
from omnijax import config, inspect, parameters, sharding
from omnijax.errors import UserError
from omnijax.mesh import make_mesh
from omnijax.sharding import MESH_AXES, Layout, Rules, constrain, lines, place, place_parameters, split_count
from sharding_rules import qwen3 as rules
from tests import runs
from tests.meshes import MESHES, on

CONFIG = Qwen3Config(
    vocab_size=56,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=6,
    initializer_range=0.1,
)


def abstract_mesh(**sizes: int) -> AbstractMesh:
    """A mesh of any size without its devices."""
    return AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def activations(**table: str) -> Rules:
    return Rules(parameters=(), activations=lines(**table))


# What a table may say


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lines(mlp="tensr"), "table line mlp=\"tensr\": unknown mesh axis 'tensr'; did you mean 'tensor'?"),
        (lambda: lines(mlp="x"), "unknown mesh axis 'x'; one of replica, data, expert, sequence, tensor"),
        (lambda: lines(mlp="data none"), "unknown mesh axis 'none'"),
        (lambda: lines(mlp="data | | none"), "an alternative is empty; write none for an unsplit axis"),
        (lambda: lines(mlp=""), "an alternative is empty"),
        (lambda: lines(mlp="optional"), "an alternative is empty"),
        (lambda: lines(mlp="data data"), "a mesh axis stands twice in one alternative"),
        (lambda: Rules(lines(embd="none"), ()), "parameters table: unknown axis 'embd'; did you mean 'embed'?"),
        (lambda: Rules((), lines(lenght="none")), "activations table: unknown axis 'lenght'; did you mean 'length'?"),
        (lambda: Rules((), lines(embed="none")), "activations table: unknown axis 'embed'; did you mean 'act_embed'?"),
        (
            lambda: Rules((*lines(mlp="tensor"), *lines(mlp="none")), ()),
            "parameters table: axis 'mlp' has two lines; keep one",
        ),
        (
            lambda: Rules((), (*lines(batch="data"), *lines(batch="data"))),
            "activations table: axis 'batch' has two lines; keep one",
        ),
        (
            lambda: Rules((), lines(batch="optional data")),
            "activations table: 'batch' is optional, as every line here; drop the word",
        ),
        (lambda: Layout(attention="rings"), "layout: unknown attention 'rings'; did you mean 'ring'?"),  # type: ignore[arg-type]
    ],
)
def test_a_table_refuses(make: Callable, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make()


TABLE = lines(embed="data sequence | data | none", mlp="tensor data | tensor", heads="tensor", layers="none")


@pytest.mark.parametrize(
    ("names", "shape", "sizes", "message"),
    [
        (("vocab",), (8,), {}, "weight: the table has no line for axis 'vocab'; add one, e.g. vocab=\"none\""),
        (
            ("heads",),
            (6,),
            {"tensor": 4},
            "weight: axis 'heads' of size 6 is not divided by tensor = 4; change the size or the mesh, or end the line "
            'with an alternative: heads="tensor | none"',
        ),
        (("mlp",), (6,), {"tensor": 4, "data": 3}, "size 6 is not divided by tensor x data = 12, tensor = 4;"),
        (
            ("mlp", "heads"),
            (8, 8),
            {"tensor": 2},
            "weight: mesh axis 'tensor' splits both 'mlp' and 'heads' of ('mlp', 'heads'); take it out of one",
        ),
        (("heads", "heads"), (8, 8), {}, "mesh axis 'tensor' splits both 'heads' and 'heads'"),
        (("embed", "mlp"), (8, 8), {}, "mesh axis 'data' splits both 'embed' and 'mlp'"),
    ],
    ids=[
        "missing line",
        "indivisible",
        "no alternative divides",
        "used twice",
        "used twice, size 1",
        "used twice, fsdp",
    ],
)
def test_a_placement_is_refused(names: tuple, shape: tuple, sizes: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        place(TABLE, names, shape, sizes, "weight")


def test_a_wrong_number_of_names_is_a_fault() -> None:
    with pytest.raises(ValueError, match="2 axis names") as error:
        place(TABLE, ("embed", None), (8,), {}, "weight")
    assert not isinstance(error.value, UserError)


@pytest.mark.parametrize(
    ("size", "spec", "fallbacks"),
    [
        (12, P(("data", "sequence")), ()),
        (10, P("data"), ("embed: data, as data sequence does not divide 10",)),
        (9, P(None), ("embed: none, as data sequence does not divide 9",)),
    ],
)
def test_alternatives_are_taken_in_order_and_reported(size: int, spec: P, fallbacks: tuple[str, ...]) -> None:
    found = place(TABLE, ("embed",), (size,), {"data": 2, "sequence": 3}, "weight")
    assert (found.spec, found.fallbacks) == (spec, fallbacks)


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ({}, P(None, None, None)),
        ({"data": 2, "sequence": 1, "tensor": 1}, P(None, "data", None)),
        ({"data": 1, "sequence": 2, "tensor": 4}, P(None, "sequence", "tensor")),
        ({"data": 2, "sequence": 2, "tensor": 2, "replica": 8}, P(None, ("data", "sequence"), "tensor")),
    ],
)
def test_mesh_axes_of_size_1_vanish(sizes: dict[str, int], spec: P) -> None:
    assert place(TABLE, (None, "embed", "heads"), (5, 8, 8), sizes, "weight").spec == spec


@pytest.mark.parametrize(
    ("table", "names", "message"),
    [
        (
            {"mlp": "tensor", "embed": "data"},
            ("embed",),
            "parameters table: no parameter of this model has an axis 'mlp'; delete the line or write "
            '"optional tensor"',
        ),
        ({"mlp": "optional tensor | none", "embed": "data"}, ("embed",), None),
        ({"embed": "data"}, ("embd",), "parameter a.kernel: unknown axis 'embd'; did you mean 'embed'?"),
        ({"embed": "data"}, ("batch",), "parameter a.kernel: unknown axis 'batch'"),
    ],
    ids=["unused line", "optional line", "unknown axis", "axis of activations"],
)
def test_parameters_and_table_must_fit(table: dict[str, str], names: tuple[str, ...], message: str | None) -> None:
    arrays = {"a.kernel": (names, (8,))}
    table_of_parameters = Rules(lines(**table), ())
    if message is None:
        assert place_parameters(arrays, table_of_parameters, abstract_mesh(data=2))["a.kernel"].spec == P("data")
    else:
        with pytest.raises(UserError, match=re.escape(message)):
            place_parameters(arrays, table_of_parameters, abstract_mesh(data=2))


# The mesh


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 3},
            "mesh replica 1 x data 3 x expert 1 x sequence 1 x tensor 1: the sizes take 3 devices, there are 8;",
        ),
        (
            {"data": 4, "tensor": 4},
            "the sizes take 16 devices, there are 8; change a size, or write -1 for one of them",
        ),
        ({"tensor": 3}, "data takes the devices that are left, but the 8 here are no multiple of 3; give its size"),
        ({"tensor": 16}, "data takes the devices that are left, but the 8 here are no multiple of 16;"),
        ({"tensor": -1}, "data -1 x expert 1 x sequence 1 x tensor -1: only one size may be -1, not data and tensor"),
        ({"tensor": 0}, "tensor 0: a size is a positive integer, or -1 for all devices that are left"),
        ({"replica": -2}, "mesh replica -2 x data -1"),
        ({"data": 4.0, "tensor": 2}, "data 4.0 x expert 1 x sequence 1 x tensor 2: a size is a positive integer"),
        ({"devices": []}, "mesh: 0 devices, 0 of them different; name each once"),
        ({"devices": jax.devices()[:2] * 2}, "mesh: 4 devices, 2 of them different; name each once"),
    ],
)
def test_a_mesh_is_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (1, 8, 1, 1, 1)),
        ({"tensor": 2}, (1, 4, 1, 1, 2)),
        ({"data": 1, "sequence": -1, "replica": 2}, (2, 1, 1, 4, 1)),
        ({"data": 2, "expert": 2, "tensor": 2}, (1, 2, 2, 1, 2)),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    mesh = make_mesh(**sizes)
    assert tuple(mesh.shape.items()) == tuple(zip(MESH_AXES, shape, strict=True))
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))


def test_given_devices_keep_their_order() -> None:
    devices = jax.devices()[4:][::-1]
    assert list(make_mesh(data=2, tensor=2, devices=devices).devices.flat) == devices


# Activations


def test_constrain_refuses_unknown_names_also_without_a_mesh() -> None:
    message = re.escape("activation: unknown axis 'lenght'; did you mean 'length'?")
    x = jnp.ones((8, 8))
    with pytest.raises(UserError, match=message):
        constrain(x, "batch", "lenght")
    with on("data 8", rules.table()), pytest.raises(UserError, match=message):
        constrain(x, "batch", "lenght")
    with pytest.raises(UserError, match="activation: unknown axis 'act_hads'"):
        split_count("act_hads")


def test_constrain_is_the_identity_without_a_table() -> None:
    x = jnp.ones((8, 6))
    assert constrain(x, "batch", "length") is x
    with jax.set_mesh(make_mesh()):
        assert constrain(x, "batch", "length") is x
        assert split_count("batch") == 1


def test_constrain_lays_out_and_reports_what_it_had_to_take() -> None:
    table = activations(batch="replica data | data", length="sequence | none")
    with sharding.use(make_mesh(data=4, sequence=2), table):
        even = jax.jit(lambda x: constrain(x, "batch", "length", None))
        assert even(jnp.ones((8, 6, 3))).sharding.spec == P("data", "sequence")
        with sharding.record() as outer, sharding.record() as placements:
            odd = jax.jit(lambda x: constrain(x, "batch", "length", None))(jnp.ones((8, 5, 3)))
            assert odd.sharding.spec == P("data")
            jax.eval_shape(even, jnp.ones((12, 6, 3)))
        assert outer == []
    assert [(each.shape, each.spec, each.fallbacks) for each in placements] == [
        ((8, 5, 3), P("data", None, None), ("length: none, as sequence does not divide 5",)),
        ((12, 6, 3), P("data", "sequence", None), ()),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("batch", None), "activation [batch 6, - 5]: axis 'batch' of size 6 is not divided by data = 4"),
        (("length", None), "activation [length 6, - 5]: the table has no line for axis 'length'; add one"),
        (("batch", "act_mlp"), "activation [batch 6, act_mlp 5]"),
    ],
)
def test_constrain_refuses_what_the_table_cannot_place(names: tuple[str | None, ...], message: str) -> None:
    with (
        sharding.use(make_mesh(data=4, sequence=2), activations(batch="data", act_mlp="data")),
        pytest.raises(UserError, match=re.escape(message)),
    ):
        constrain(jnp.ones((6, 5)), *names)


def test_the_tokens_of_a_row_are_split_as_often_as_the_alternative_taken_says() -> None:
    with sharding.use(make_mesh(data=4, sequence=2), activations(batch="data sequence | data | none")):
        assert [split_count("batch", size) for size in (16, 12, 6)] == [8, 4, 1]
        assert split_count("batch") == 8
        with pytest.raises(UserError, match="activation: the table has no line for axis 'length'"):
            split_count("length")
    with (
        sharding.use(make_mesh(data=4, sequence=2), activations(batch="data")),
        pytest.raises(UserError, match="activation: axis 'batch' of size 6 is not divided by data = 4"),
    ):
        split_count("batch", 6)


@pytest.mark.parametrize(
    ("manual", "spec", "parts"),
    [((), P("data", "sequence"), 2), (("sequence",), P("data", None), 1), (("data", "sequence"), P(None, None), 1)],
)
def test_manual_mesh_axes_are_dropped(manual: tuple[str, ...], spec: P, parts: int) -> None:
    """A row of 6 tokens is 3 on each device inside the manual region, which `sequence` would not divide again."""
    table, mesh = activations(batch="data", length="sequence"), make_mesh(data=4, sequence=2)
    counts = []

    def double(x: jax.Array) -> jax.Array:
        counts.append(split_count("length"))
        return 2 * constrain(x, "batch", "length")

    inside, outside = P(*(axis if axis in manual else None for axis in ("data", "sequence"))), jnp.ones((8, 6))
    with sharding.use(mesh, table), sharding.record() as placements:
        mapped = jax.shard_map(double, in_specs=inside, out_specs=inside, axis_names=set(manual)) if manual else double
        np.testing.assert_array_equal(jax.jit(mapped)(outside), 2 * outside)
    assert {each.spec for each in placements} == {spec}
    assert set(counts) == {parts}


def test_two_tables_never_share_a_compiled_program() -> None:
    """Nothing but the table differs: same function, same mesh, same argument. jit must trace it again."""
    traces = []

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        traces.append(sharding.current_rules())
        return constrain(2 * x, "batch", "length")

    x, mesh = jnp.ones((8, 8)), make_mesh(data=2, sequence=4)
    tables = {
        "data": activations(batch="data", length="none"),
        "sequence": activations(batch="sequence", length="none"),
    }
    for name in ("data", "sequence", "data", "sequence"):
        with sharding.use(mesh, tables[name]):
            assert double(x).sharding.spec == P(name)
    assert traces == [tables["data"], tables["sequence"]]
    with jax.set_mesh(mesh):
        assert double(x).sharding.is_fully_replicated
    assert traces[2:] == [None]


# Parameters of a model


def test_parameters_live_where_the_table_says() -> None:
    """Written by hand: 2 key/value heads are too few for 4 parts, and 24 is not divided by 2 x 8."""
    stack = "stacks.0.blocks.0"
    expected = {
        "tensor 4 x data 2": {
            "embed_tokens.embedding": P("tensor", "data"),
            f"{stack}.self_attn.q_proj.kernel": P(None, "data", "tensor", None),
            f"{stack}.self_attn.k_proj.kernel": P(None, "data", None, None),
            f"{stack}.self_attn.o_proj.kernel": P(None, "tensor", None, "data"),
            f"{stack}.self_attn.q_norm.scale": P(None, None),
            f"{stack}.mlp.down_proj.kernel": P(None, "tensor", "data"),
            "norm.scale": P("data"),
        },
        "sequence 8": {
            "embed_tokens.embedding": P(None, "sequence"),
            f"{stack}.mlp.up_proj.kernel": P(None, "sequence", None),
        },
        "replica 2 x data 4": {f"{stack}.mlp.up_proj.kernel": P(None, "data", None)},
        "data 2 x sequence 2 x tensor 2": {
            f"{stack}.self_attn.k_proj.kernel": P(None, ("data", "sequence"), "tensor", None),
            f"{stack}.mlp.up_proj.kernel": P(None, ("data", "sequence"), "tensor"),
        },
    }
    for mesh_name, specs in expected.items():
        with on(mesh_name, rules.table()) as mesh:
            placed = parameters.placements(parameters.abstract_model(CONFIG), mesh, rules.table())
        assert {path: placed[path].spec for path in specs} == specs


@functools.cache
def initial_values(mesh_name: str | None) -> dict[str, jax.Array]:
    with on(mesh_name, rules.table()) as mesh:
        return parameters.split(parameters.build_model(CONFIG, mesh, rules.table(), seed=11))[1]


@pytest.mark.parametrize("mesh_name", MESHES)
def test_initial_values_are_the_same_bits_in_their_places(mesh_name: str) -> None:
    found, expected = initial_values(mesh_name), initial_values(None)
    with on(mesh_name, rules.table()) as mesh:
        shardings = parameters.shardings(parameters.abstract_model(CONFIG), mesh, rules.table())
    assert set(found) == set(expected) == set(shardings)
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path, strict=True)
        assert x.sharding.is_equivalent_to(shardings[path], x.ndim), path
        assert x.dtype == np.float32, path


def test_a_split_parameter_is_held_in_parts() -> None:
    kernel = initial_values("data 2 x sequence 2 x tensor 2")["stacks.0.blocks.0.mlp.up_proj.kernel"]
    assert isinstance(kernel.sharding, NamedSharding)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(3, 24 // 4, 40 // 2)}


# The command


def inspected(text: str, path: str) -> list[str]:
    """The cells of the line of one array."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"{path} "))
    return re.split(r"\s{2,}", line)


def test_inspect_shows_every_array() -> None:
    settings = config.load_config(runs.HOME / "configs" / "text.gin", ["Mesh.data=2", "Mesh.tensor=2"])
    text = inspect.inspect(settings)
    assert text.splitlines()[0] == "mesh: 4 devices, data 2 x tensor 2"
    assert inspected(text, "stacks.0.blocks.0.mlp.up_proj.kernel")[1:] == [
        "[layers 4, embed 128, mlp 384]",
        str(P(None, "data", "tensor")),
        f"{4 * 128 * 384 * 4 // 4:,}",
    ]
    assert inspected(text, "embed_tokens.embedding")[1:] == [
        "[vocab 257, embed 128]",
        str(P(None, "data")),
        f"{257 * 64 * 4:,}",
        "vocab: none, as tensor does not divide 257",
    ]
    assert inspected(text, "[batch 8, length 128, act_mlp 384]")[1:] == [str(P("data", None, "tensor"))]
    paths = parameters.describe(parameters.abstract_model(settings.model))
    assert all(f"\n{path} " in text for path in paths)
    # Embedding and norms split over data; the rest of a layer over both; its two small norms are whole.
    layer = (3 * 128 * 384 + 2 * 128 * 4 * 32 + 2 * 128 * 2 * 32) // 4 + 2 * 128 // 2 + 2 * 32
    held = 4 * (4 * layer + 257 * 128 // 2 + 128 // 2)
    assert f"; {held / 2**20:,.2f} MiB of float32 a device" in text


def test_inspect_shows_meshes_of_more_devices_than_there_are() -> None:
    overrides = ("Mesh.data=64", "Mesh.tensor=2", "Data.rows=64")
    command = ("-m", "omnijax.inspect", "configs/text.gin", *overrides)
    done = runs.finish(runs.start(runs.HOME, *command, XLA_FLAGS=None))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("mesh: 128 devices, data 64 x tensor 2\n")
    assert inspected(done.stdout, "stacks.0.blocks.0.mlp.up_proj.kernel")[3] == f"{4 * 2 * 192 * 4:,}"
    assert inspected(done.stdout, "stacks.0.blocks.0.self_attn.o_proj.kernel")[3] == f"{4 * 2 * 32 * 2 * 4:,}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["Mesh.data=1", "Mesh.tensor=8"], "o_proj.kernel: axis 'heads' of size 4 is not divided by tensor = 8"),
        (["Mesh.data=1", "Mesh.sequence=3"], "axis 'length' of size 128 is not divided by sequence = 3"),
        (["Mesh.data=0"], "data 0 x expert 1 x sequence 1 x tensor 1: a size is a positive integer"),
        (["Mesh.data=-1", "Mesh.tensor=-1"], "only one size may be -1, not data and tensor"),
        (["Mesh.tensor=3"], "data takes the devices that are left, but the 8 here are no multiple of 3"),
    ],
)
def test_inspect_refuses(overrides: list[str], message: str) -> None:
    settings = config.load_config(runs.HOME / "configs" / "text.gin", overrides)
    with pytest.raises(UserError, match=re.escape(message)):
        inspect.inspect(settings)


def test_inspect_refuses_in_one_line() -> None:
    overrides = ("Mesh.data=64", "Mesh.tensor=2")
    done = runs.finish(runs.start(runs.HOME, "-m", "omnijax.inspect", "configs/text.gin", *overrides))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: activation [batch 8, ")
    assert "axis 'batch' of size 8 is not divided by replica x data x expert = 64" in line


# The tree

FLOOR_0 = ("sharding.py", "batch.py", "objectives.py", "errors.py", "units.py", "nn/*.py")
FLOOR_0_MODULES = tuple(f"omnijax.{name}" for name in ("sharding", "batch", "objectives", "errors", "units", "nn"))
PARAMETERS = ("omnijax.parameters", "omnijax.hf_layout")
OURS = ("omnijax", "models", "sharding_rules")
COMMANDS = {f"omnijax/{name}.py" for name in ("train", "inspect", "generate", "convert", "commands")}


def sources(*patterns: str) -> list[Path]:
    found = [path for pattern in patterns for path in sorted(runs.HOME.glob(pattern))]
    assert found
    return found


def imported(path: Path) -> set[str]:
    """Modules of ours that a file imports, anywhere in it; `from omnijax import step` imports `omnijax.step`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            package = (runs.HOME / str(node.module).replace(".", "/")).is_dir()
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if package else {str(node.module)}
    return {name for name in names if name.split(".")[0] in OURS}


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [
        ([f"omnijax/{pattern}" for pattern in FLOOR_0], FLOOR_0_MODULES),
        (["models/**/*.py"], (*FLOOR_0_MODULES, "omnijax.fields", "omnijax.hf_files", *PARAMETERS, "models")),
        (["sharding_rules/**/*.py"], ("omnijax.sharding", "sharding_rules")),
        (["omnijax/**/*.py"], ("omnijax",)),
    ],
    ids=["floor 0", "models", "sharding_rules", "omnijax"],
)
def test_no_module_imports_a_higher_floor(patterns: list[str], allowed: tuple[str, ...]) -> None:
    """Only the commands, which are on top of everything, know families and tables."""
    for path in sources(*patterns):
        if str(path.relative_to(runs.HOME)) in COMMANDS:
            continue
        host = ("omnijax.data",) if path.stem.endswith("processor") else ()  # of a family, it works on samples
        higher = {
            name for name in imported(path) if not f"{name}.".startswith(tuple(f"{a}." for a in (*allowed, *host)))
        }
        assert not higher, f"{path}: {higher}"


@pytest.mark.parametrize("path", sources("models/**/*.py"), ids=lambda path: path.stem)
def test_no_model_mentions_a_mesh_axis(path: Path) -> None:
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words = node.value.split()
            assert not words or not set(words) <= set(MESH_AXES), f"{path}, line {node.lineno}: {node.value}"


@pytest.mark.parametrize("path", sources("sharding_rules/**/*.py"), ids=lambda path: path.stem)
def test_a_table_is_data(path: Path) -> None:
    """Imports, documentation, `__all__`, and functions that return one `Rules(...)` of constants and arguments."""
    body = ast.parse(path.read_text()).body
    for node in body[ast.get_docstring(ast.Module(body, [])) is not None :]:
        if isinstance(node, ast.Import | ast.ImportFrom) or ast.unparse(node) == "__all__ = ['table']":
            continue
        assert isinstance(node, ast.FunctionDef), f"{path}, line {node.lineno}"
        _, statement = node.body
        assert ast.get_docstring(node)
        assert isinstance(statement, ast.Return)
        assert isinstance(statement.value, ast.Call)
        assert ast.unparse(statement.value.func) == "Rules"
        kinds = {type(part) for part in ast.walk(statement.value)}
        assert kinds <= {ast.Call, ast.keyword, ast.Constant, ast.Name, ast.Load}, f"{path}, line {statement.lineno}"
