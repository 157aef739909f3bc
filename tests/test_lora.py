"""LoRA: adapters of linear maps and of experts, by hand, against the merged form, on meshes, and in runs."""

import dataclasses
import functools
import itertools
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from omnijax import convert, lora, parameters, tune
from omnijax.config import Lora, Tune
from omnijax.errors import UserError
from omnijax.nn.dropout import dropout, row_keys, use_keys
from omnijax.nn.experts import use_grouped
from omnijax.step import init_state, put_batch, train_step
from sharding_rules import qwen3, qwen3_moe, qwen3_vl
from tests import laws, runs
from tests.meshes import on, packed_arrays
from tests.test_freeze import program, text_batch
from tests.test_program import COLLECTIVE, collectives, dot_operations
from tests.test_vision_language import TINY, mixed_arrays

SIZES: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "initializer_range": 0.1,
}
DENSE = Qwen3Config(**SIZES)
EXPERTS = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3)
ALL = Lora(("*",), rank=3, alpha=6.0)
DROPPING = Lora(("*_proj",), rank=3, alpha=6.0, dropout=0.4)
MODELS = {"dense": (DENSE, qwen3.table()), "experts": (EXPERTS, qwen3_moe.table())}


def adapted(config: Any, table: Any, mesh: Any, settings: Lora, *, b: float = 0.0, **tuned: Any) -> Any:
    """A model with fresh adapters, whose B has numbers of the size `b`."""
    base = parameters.build_model(config, mesh, table, seed=3)
    model = tune.begin(base, Tune(lora=settings, **tuned), mesh, table, seed=5)
    graphdef, params = parameters.split(model)
    if b:
        key = jax.random.key(1)
        params |= {
            path: jax.device_put(b * jax.random.normal(jax.random.fold_in(key, number), x.shape), x.sharding)
            for number, (path, x) in enumerate(params.items())
            if path.endswith("lora_b")
        }
    return parameters.merge(graphdef, params)


def loss_of(graphdef: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        outputs = parameters.merge(graphdef, params)(batch)
        return sum(total / weight for total, weight in outputs.objectives.values())

    return loss


@pytest.mark.parametrize("rslora", [False, True])
def test_a_linear_map_by_hand(rslora: bool) -> None:
    """Output and gradients of one adapter in float64, with what is not trained left without a gradient."""
    settings = Lora(("*.o_proj",), rank=3, alpha=6.0, rslora=rslora)
    scale = 6 / math.sqrt(3) if rslora else 2.0
    with on(None, qwen3.table()) as mesh:
        model = adapted(DENSE, qwen3.table(), mesh, settings, b=0.5)
    (block,) = model.stacks[0].blocks
    graphdef, stacked = parameters.split(block.self_attn.o_proj)
    assert {path: x.shape for path, x in stacked.items()} == {
        "kernel": (2, 8, 6, 24),
        "lora_a": (2, 8, 6, 3),
        "lora_b": (2, 3, 24),
    }
    random = np.random.default_rng(0)
    x, dy = random.normal(size=(2, 5, 8, 6)), random.normal(size=(2, 5, 24))
    params = {path: np.asarray(x[1], np.float64) for path, x in stacked.items()}

    def apply(params: Any, x: Any) -> jax.Array:
        return parameters.merge(graphdef, params)(x)

    single = {path: jnp.asarray(value, jnp.float32) for path, value in params.items()}
    y, pull = jax.vjp(apply, single, jnp.asarray(x, jnp.float32))
    found, dx = pull(jnp.asarray(dy, jnp.float32))
    flat, dy = x.reshape(10, 48), dy.reshape(10, 24)
    w, a, b = (params[name].reshape(-1, params[name].shape[-1]) for name in ("kernel", "lora_a", "lora_b"))
    expected = {
        "y": flat @ w + scale * flat @ a @ b,
        "x": dy @ w.T + scale * dy @ b.T @ a.T,
        "lora_a": scale * flat.T @ dy @ b.T,
        "lora_b": scale * (flat @ a).T @ dy,
    }
    results = {"y": y, "x": dx, "lora_a": found["lora_a"], "lora_b": found["lora_b"]}
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.ravel(results[name]), value.ravel(), atol=2e-6 * np.abs(value).max(), err_msg=name
        )


@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_before_the_first_step(name: str) -> None:
    """B is 0, so the model computes what it did, to the bit; A has the spread of a linear map in PyTorch."""
    config, table = MODELS[name]
    with on(None, table) as mesh:
        base = parameters.build_model(config, mesh, table, seed=3)
        model = adapted(config, table, mesh, ALL)
        batch = put_batch(packed_arrays(vocab=72), mesh, table)
        np.testing.assert_array_equal(base(batch).hidden, model(batch).hidden)
    described, params = parameters.describe(model), parameters.split(model)[1]
    assert {path for path in described if path.endswith("lora_b")} == {
        path for path in described if path.endswith("lora_b") and not np.asarray(params[path]).any()
    }
    inputs = {"down_proj": 40, "o_proj": 48, "down_lora_a": 16}
    for path, x in params.items():
        if path.endswith("lora_a"):
            bound = next((size for part, size in inputs.items() if part in path), 24) ** -0.5
            assert 0.95 * bound < np.abs(x).max() <= bound, path
            assert np.std(x) == pytest.approx(bound / math.sqrt(3), rel=0.2)
            for one, other in itertools.pairwise(x):
                assert (one != other).all()


@pytest.mark.parametrize(("name", "kernel"), [("dense", "auto"), ("experts", "blocks"), ("experts", "ragged")])
def test_gradients_are_those_of_the_merged_form(name: str, kernel: str) -> None:
    """By the chain rule through W + s A B; the merged model computes the same."""
    config, table = MODELS[name]
    with on(None, table) as mesh, use_grouped(kernel):
        model = adapted(config, table, mesh, ALL, b=0.3)
        graphdef, params = parameters.split(model)
        plain = nnx_graphdef(config)
        batch = put_batch(packed_arrays(vocab=72), mesh, table)
        trained = parameters.trained(model, params)
        frozen = {path: x for path, x in params.items() if path not in trained}
        ours, theirs = loss_of(graphdef, batch), loss_of(plain, batch)
        value, found = jax.value_and_grad(lambda trained: ours({**frozen, **trained}))(trained)
        other, expected = jax.value_and_grad(lambda trained: theirs(lora.merged(model, {**frozen, **trained}, ALL)))(
            trained
        )
    assert all(lora.is_adapter(path) for path in trained)
    assert float(value) == pytest.approx(float(other), rel=1e-6)
    for path, x in expected.items():
        np.testing.assert_allclose(found[path], x, atol=1e-5 * np.abs(x).max(), err_msg=path)


def nnx_graphdef(config: Any) -> Any:
    return parameters.split(parameters.abstract_model(config))[0]


def test_neither_kernels_nor_their_change_have_a_product_of_their_size() -> None:
    """Of the gradients only A's and B's contract tokens: one side of them is the rank 3."""
    tuned = Tune(lora=ALL)
    found = {key for key in dot_operations(program(EXPERTS, qwen3_moe.table(), tuned, text_batch())) if 640 in key[-1:]}
    assert found
    assert all(3 in key for key in found), found
    blocks = {key for key in dot_operations(program(EXPERTS, qwen3_moe.table(), tuned, text_batch())) if key[-1] == 256}
    assert blocks
    assert all(3 in key for key in blocks), blocks


def test_adapters_travel_as_kernels_do_and_dropout_not_at_all() -> None:
    """What is drawn for a row is drawn where the row is; no activation is gathered, and no kernel's gradient summed."""
    programs = [
        program(DENSE, qwen3.table(), Tune(lora=settings), text_batch(), "data 2 x sequence 2 x tensor 2")
        for settings in (DROPPING, dataclasses.replace(DROPPING, dropout=0.0))
    ]
    assert collectives(programs[0]) == collectives(programs[1])
    for shape, kind in COLLECTIVE.findall(programs[0]):
        sizes = [tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", shape)]
        if kind == "all-gather":
            assert not any(80 in each or 160 in each for each in sizes), shape
        if kind in ("all-reduce", "reduce-scatter"):
            assert all(3 in each for each in sizes if not {80, 160} & set(each) and len(each) > 1), shape


def train(
    name: str, settings: Lora, mesh_name: str | None = None, *, accumulation: int = 1, steps: int = 2, **tuned: Any
) -> dict[str, Any]:
    """What `laws.run` gives, of SGD on adapters that do something from the start."""
    config, table = MODELS[name]
    with on(mesh_name, table) as mesh:
        model = adapted(config, table, mesh, settings, b=0.3, **tuned)
        optimizer = laws.recording_sgd(0.5)
        before = jax.device_get(parameters.split(model)[1])
        state = init_state(model, optimizer, mesh, table)
        step = train_step(model, optimizer, mesh, table, accumulation=accumulation, dtype=jnp.float32, seed=7)
        batch = put_batch(packed_arrays(vocab=72), mesh, table)
        reports, gradients = [], {}
        for number in range(steps):
            state, report = step(state, batch)
            reports.append(jax.device_get(report))
            gradients = gradients if number else jax.device_get(state.opt_state)
        laws.assert_replicas_agree(state.params)
        after = jax.device_get(state.params)
    assert all((before[path] == x).all() for path, x in after.items() if path not in gradients)
    return {
        "losses": [float(report["loss"]) for report in reports],
        "grad_norms": [float(report["grad_norm"]) for report in reports],
        "gradients": gradients,
        "parameters": after,
    }


@functools.cache
def one_device(name: str, settings: Lora) -> dict[str, Any]:
    return train(name, settings)


@pytest.mark.parametrize(
    ("name", "settings", "mesh", "accumulation"),
    [
        ("dense", DROPPING, "data 2 x sequence 2 x tensor 2", 2),
        ("dense", DROPPING, None, 4),
        ("experts", ALL, "expert 2 x tensor 2 x sequence 2", 1),
    ],
)
def test_any_mesh_and_accumulation_trains_the_same(
    name: str, settings: Lora, mesh: str | None, accumulation: int
) -> None:
    laws.assert_same_run(train(name, settings, mesh, accumulation=accumulation), one_device(name, settings))


def test_adapters_begin_alike_on_any_mesh() -> None:
    found = []
    for mesh_name in (None, "data 2 x sequence 2 x tensor 2"):
        with on(mesh_name, qwen3.table()) as mesh:
            model = tune.tuned(parameters.abstract_model(DENSE), Tune(lora=DROPPING))
            made = lora.fresh(model, mesh, qwen3.table(), seed=4)
            where = parameters.shardings(model, mesh, qwen3.table())
            assert all(x.sharding.is_equivalent_to(where[path], x.ndim) for path, x in made.items())
            found.append(jax.device_get(made))
    for path, x in found[0].items():
        np.testing.assert_array_equal(found[1][path], x)


def test_what_dropout_leaves_out() -> None:
    """Another choice for every step, row, layer and adapter, of the right share; none outside of training."""
    with on(None, qwen3.table()) as mesh:
        model = adapted(DENSE, qwen3.table(), mesh, DROPPING, b=0.3)
    numbers = [
        int(number) for path, x in parameters.split(model)[1].items() if path.endswith("lora_number") for number in x
    ]
    assert sorted(numbers) == list(range(7 * 2))
    x, masks = jnp.ones((4, 100, 30)), []
    for step, number in ((0, 0), (0, 1), (1, 0)):
        with use_keys(row_keys(7, jnp.asarray(step), 4)):
            y = dropout(x, 0.4, jnp.float32(number))
        assert set(np.unique(np.asarray(y)).round(5)) == {0.0, np.float32(1 / 0.6).round(5)}
        masks += list(np.asarray(y) > 0)
    for mask in masks:
        assert mask.mean() == pytest.approx(0.6, abs=0.03)
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert (mask == other).mean() == pytest.approx(0.6**2 + 0.4**2, abs=0.03)
    assert dropout(x, 0.4, jnp.float32(0)) is x


def test_dropout_differs_from_step_to_step_and_not_between_runs() -> None:
    runs_of = [train("dense", DROPPING, steps=3) for _ in range(2)]
    assert runs_of[0]["losses"] == runs_of[1]["losses"]
    still = train("dense", Lora(("*_proj",), rank=3, alpha=6.0), steps=1)
    assert abs(still["losses"][0] - runs_of[0]["losses"][0]) > 1e-3


def test_towers_have_adapters_too() -> None:
    """Adapters in a tower and what is trained besides; all else keeps its bits."""
    tuned = Tune(
        lora=Lora(("encoders.image.*.qkv", "*.deepstack.*.linear_1"), rank=2), train=("encoders.image.merger",)
    )
    table = qwen3_vl.table()
    with on(None, table) as mesh:
        base = parameters.build_model(TINY["qwen3_vl"], mesh, table, seed=3)
        model = tune.begin(base, tuned, mesh, table)
        params = parameters.split(model)[1]
        shapes = {path: x.shape for path, x in params.items() if "deepstack" in path and "lora" in path}
        assert sorted(shapes.values()) == [(2, 2, 128), (2, 4, 32, 2)]
        before = jax.device_get(params)
        optimizer = laws.recording_sgd(0.5)
        state = init_state(model, optimizer, mesh, table)
        step = train_step(model, optimizer, mesh, table, dtype=jnp.float32)
        state, _ = step(state, put_batch(mixed_arrays("qwen3_vl"), mesh, table))
    moved = {path for path, x in before.items() if (np.asarray(state.params[path]) != x).any()}
    assert moved == {p for p in before if p.startswith("encoders.image.merger.") or p.endswith("lora_b")}


@pytest.mark.parametrize(
    ("config", "tuned", "message"),
    [
        (DENSE, Tune(lora=Lora(("*.q_pro",))), "Lora.patterns: '.*q_pro' names no parameter .* '.*q_proj'"),
        (DENSE, Tune(lora=Lora(("norm",))), "Lora.patterns: 'norm' names no kernel of a linear map or of experts"),
        (EXPERTS, Tune(lora=Lora(("*.router",))), "names no kernel of a linear map"),
        (DENSE, Tune(lora=Lora(())), "Lora.patterns is empty"),
        (DENSE, Tune(lora=ALL, train=("*.mlp",)), r"Tune.train names .*mlp.* has an adapter"),
        (DENSE, Tune(lora=Lora(("layers.1.mlp",))), "add 1 to Compute.splits"),
        (EXPERTS, Tune(lora=Lora(("*",), dropout=0.1)), "Lora.dropout = 0.1: adapters of experts have none"),
    ],
)
def test_mistakes(config: Any, tuned: Tune, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tune.tuned(parameters.abstract_model(config), tuned)


def test_lora_freezes_already() -> None:
    with pytest.raises(UserError, match=r"Tune.freeze = \('norm',\) adds nothing to Tune.lora"):
        Tune(freeze=("norm",), lora=ALL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("lora"))


LORA = ("Tune.lora=@config.Lora()", "Lora.patterns=('*.q_proj', '*.mlp')", "Lora.rank=2", "Lora.dropout=0.2")


def test_a_run_goes_on_to_the_bit_and_another_begins_with_what_it_learned(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*LORA, "Tune.rates={'*.lora_b': 16}")
    straight = runs.run(tiny, *options, "Run.steps=4", folder="straight")
    runs.run(tiny, *options, "Run.steps=2", folder="pieces")
    seen = runs.run(tiny, *options, "Run.steps=4", folder="pieces")
    assert seen.losses == straight.losses
    assert straight.losses[-1] < straight.losses[0]
    assert seen.compilations == 1
    assert not seen.misplaced
    # Another run, of the whole model, begins with W + s A B.
    after = {path: np.asarray(x) for path, x in straight.after.params.items()}
    whole = runs.run(tiny, "Run.start='straight'", "Run.steps=1", folder="whole")
    for path, x in whole.before.params.items():
        a, b = lora.paths_of(path)
        if a in after and path.endswith("kernel"):
            change = 16 * np.einsum("lir,lro->lio", after[a], after[b].reshape(2, 2, -1)).reshape(x.shape)
            np.testing.assert_allclose(x, after[path] + change, atol=1e-6)
        else:
            np.testing.assert_array_equal(x, after[path])
    export(monkeypatch, tiny, "straight", "merged")
    merged = load_file(tiny.parent / "merged" / "model.safetensors")
    for layer, x in enumerate(np.asarray(whole.before.params["stacks.0.blocks.0.self_attn.q_proj.kernel"])):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        np.testing.assert_allclose(merged[name], x.reshape(16, 32).T, atol=1e-6)
    export(monkeypatch, tiny, "straight", "adapter", "--adapter")
    adapter = load_file(tiny.parent / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 2 * 4
    for letter, name in (("A", "lora_a"), ("B", "lora_b")):
        x = after[f"stacks.0.blocks.0.mlp.down_proj.{name}"][1]
        np.testing.assert_array_equal(
            adapter[f"base_model.model.model.layers.1.mlp.down_proj.lora_{letter}.weight"], x.T
        )
    for source, target, message in (
        ("whole", "other", "--adapter: whole was trained without Tune.lora"),
        ("straight", "adapter", "adapter already holds an adapter"),
        ("nowhere", "other", "nowhere: no checkpoints here"),
    ):
        with pytest.raises(UserError, match=message):
            export(monkeypatch, tiny, source, target, "--adapter")


def export(monkeypatch: pytest.MonkeyPatch, tiny: Path, *arguments: str) -> None:
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setattr(sys, "argv", ["convert", "export", *arguments])
    convert.main()


def test_an_adapter_is_all_that_a_run_trained_or_none(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.run(tiny, *LORA, "Tune.train=('norm',)", "Run.steps=1", folder="more")
    with pytest.raises(UserError, match="--adapter: more trained norm too"):
        export(monkeypatch, tiny, "more", "other", "--adapter")
