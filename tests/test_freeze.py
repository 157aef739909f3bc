"""What is trained and what is not: stacks cut at layers, frozen parameters, learning rates by path."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.qwen3 import Qwen3Config
from models.qwen3_moe import Qwen3MoeConfig
from omnijax import config, ginfile, parameters, restack, tune
from omnijax.batch import Batch
from omnijax.config import Optimizer, Tune
from omnijax.errors import UserError
from omnijax.optim import learning_rate, make_optimizer
from omnijax.patterns import part_of
from omnijax.step import abstract_state, init_state, put_batch, state_shardings, train_step
from sharding_rules import deepseek_v3, qwen3, qwen3_moe, qwen3_vl
from tests import laws, runs
from tests.meshes import on, packed_arrays
from tests.test_deepseek_v3 import CONFIGS as DEEPSEEK
from tests.test_program import dot_operations, split_rows
from tests.test_vision_language import TINY, mixed_arrays

SIZES: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "initializer_range": 0.1,
}
DENSE = Qwen3Config(**SIZES)
EXPERTS = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3)


def train(
    model_config: Any,
    tuned: Tune,
    mesh_name: str | None = None,
    *,
    table: Any = None,
    arrays: Any = None,
    accumulation: int = 1,
    steps: int = 5,
    splits: tuple[int, ...] = (),
) -> tuple[dict[str, np.ndarray], Any, list[dict]]:
    """Parameters before, and the state and reports after some steps of AdamW with decay, in float32."""
    table = table or qwen3.table()
    arrays = packed_arrays(vocab=model_config.vocab_size) if arrays is None else arrays
    with on(mesh_name, table) as mesh:
        options = {"splits": splits} if splits else {}
        model = tune.begin(parameters.build_model(model_config, mesh, table, seed=3, **options), tuned, mesh, table)
        params = parameters.split(model)[1]
        before = jax.device_get(params)
        optimizer = Optimizer(learning_rate=1e-2, schedule="constant", weight_decay=0.3, decay_embeddings=True)
        paths = parameters.trained(model, params)
        chain = make_optimizer(optimizer, steps, paths, tune.rates(model, tuned))
        state = init_state(model, chain, mesh, table)
        step = train_step(model, chain, mesh, table, accumulation=accumulation, dtype=jnp.float32)
        batch = put_batch(arrays, mesh, table)
        reports = []
        for _ in range(steps):
            state, report = step(state, batch)
            reports.append(jax.device_get(report))
        assert step._cache_size() == 1
        laws.assert_replicas_agree(state.params)
    return before, jax.device_get(state), reports


@pytest.mark.parametrize(
    ("model_config", "freeze", "keep", "frozen"),
    [
        (DENSE, ("layers.0-2",), (), ("stacks.0.",)),
        (DENSE, ("*",), ("*.self_attn", "norm"), ("embed", "lm_head", ".mlp.", "layernorm")),
        (EXPERTS, ("*.experts", "*.router"), ("layers.3",), ("stacks.0.blocks.0.mlp.",)),
    ],
    ids=["layers", "all but", "experts"],
)
def test_what_is_frozen_keeps_its_bits(model_config: Any, freeze: tuple, keep: tuple, frozen: tuple) -> None:
    table = qwen3_moe.table() if model_config is EXPERTS else qwen3.table()
    before, state, reports = train(model_config, Tune(freeze, train=keep), splits=(3,), table=table)
    still = {path for path, x in before.items() if state.params[path].tobytes() == x.tobytes()}
    assert still == {path for path in before if any(part in path for part in frozen)}
    assert still
    (adam,) = (
        each for each in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(each, "mu")
    )
    assert set(adam.mu) == set(adam.nu) == set(before) - still
    assert reports[-1]["loss"] < reports[0]["loss"]


def test_a_correction_of_the_router_is_frozen_too() -> None:
    """It is no gradient that moves it, and where nothing is frozen it does move."""
    table, tuned = deepseek_v3.table(), Tune(freeze=("*.router",))
    before, state, _ = train(DEEPSEEK["whole queries"], tuned, table=table, steps=1)
    routers = [path for path in before if ".router." in path]
    assert any(path.endswith("correction") for path in routers)
    assert all((before[path] == state.params[path]).all() for path in routers)


def test_gradients_are_those_of_the_whole_and_the_norm_is_of_what_is_trained() -> None:
    """With a part frozen, the other gradients are what they are without; the reported norm is theirs alone."""
    whole = laws.run(DENSE, qwen3.table(), None, steps=1)
    tuned = Tune(freeze=("*.mlp", "embed_tokens"))
    with on(None, qwen3.table()) as mesh:
        model = tune.begin(parameters.build_model(DENSE, mesh, qwen3.table(), seed=3), tuned, mesh, qwen3.table())
        optimizer = laws.recording_sgd(0.5)
        state = init_state(model, optimizer, mesh, qwen3.table())
        step = train_step(model, optimizer, mesh, qwen3.table(), dtype=jnp.float32)
        state, report = step(state, put_batch(packed_arrays(vocab=72), mesh, qwen3.table()))
    assert set(state.opt_state) == {
        path for path in whole["gradients"] if ".mlp." not in path and "embed_t" not in path
    }
    for path, x in state.opt_state.items():
        np.testing.assert_allclose(x, whole["gradients"][path], atol=1e-6 * np.abs(whole["gradients"][path]).max())
    squares = sum((np.asarray(x, np.float64) ** 2).sum() for x in state.opt_state.values())
    assert float(report["grad_norm"]) == pytest.approx(squares**0.5, rel=1e-6)


CASES: dict[str, tuple] = {
    "layers": (DENSE, Tune(freeze=("layers.-1", "embed_tokens"), rates={"*.mlp": 0.25, "lm_head": 3}), (2,)),
    "experts": (EXPERTS, Tune(freeze=("*.experts",), rates={"*.self_attn": 0.25}), ()),
}


@pytest.mark.parametrize(
    ("case", "mesh", "accumulation"),
    [
        ("layers", None, 4),
        ("layers", "data 2 x sequence 2 x tensor 2", 2),
        ("experts", "expert 2 x sequence 2 x data 2", 1),
    ],
)
def test_any_mesh_and_accumulation_trains_the_same(case: str, mesh: str | None, accumulation: int) -> None:
    model_config, tuned, splits = CASES[case]
    table = qwen3_moe.table() if case == "experts" else qwen3.table()
    run = functools.partial(train, model_config, tuned, splits=splits, table=table, steps=2)
    _, expected, reports = run()
    _, found, others = run(mesh_name=mesh, accumulation=accumulation)
    for one, other in zip(reports, others, strict=True):
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=laws.TOLERANCE)
    for path, x in expected.params.items():
        # AdamW's first steps follow signs: a gradient that is almost 0 may go either way, by a whole step.
        np.testing.assert_allclose(found.params[path], x, atol=1e-3 * np.abs(x).max(), err_msg=path)


def test_a_part_is_frozen_in_a_vision_language_model() -> None:
    """A tower that stays as it is before a merger that is trained, and a backbone trained slowly."""
    tuned = Tune(freeze=("encoders",), train=("encoders.image.merger",), rates={"backbone": 0.1})
    arrays = mixed_arrays("qwen3_vl")
    before, state, _ = train(TINY["qwen3_vl"], tuned, table=qwen3_vl.table(), arrays=arrays, steps=1)
    moved = {path for path, x in before.items() if (state.params[path] != x).any()}
    assert {part_of(path) for path in moved} == {"encoders.image", "backbone"}
    assert {path for path in moved if path.startswith("encoders")} == {
        path for path in before if path.startswith("encoders.image.merger")
    }


def program(model_config: Any, table: Any, tuned: Tune, batch: Batch, mesh_name: str | None = None) -> str:
    """The optimised program of a step of SGD in float32; nothing is run."""
    with on(mesh_name, table) as mesh:
        model = tune.tuned(parameters.abstract_model(model_config, remat="full"), tuned)
        optimizer = optax.sgd(0.1)
        state, shardings = abstract_state(model, optimizer), state_shardings(model, optimizer, mesh, table)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)
        step = train_step(model, optimizer, mesh, table, dtype=jnp.float32)
        return step.lower(state, split_rows(batch, mesh)).compile().as_text()


def text_batch(rows: int = 4, length: int = 160) -> Batch:
    integers = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    weights: Any = jax.ShapeDtypeStruct((rows, length), jnp.float32)
    return Batch(integers, integers, integers, integers, weights, integers)


def test_frozen_weights_have_no_gradient_in_the_program() -> None:
    """The product of a gradient contracts all 4 x 160 tokens, or the 256 of a block of experts' rows."""
    batch, table = text_batch(), qwen3_moe.table()

    def contracting(tokens: set[int], tuned: Tune) -> set[tuple]:
        return {key[:-1] for key in dot_operations(program(EXPERTS, table, tuned, batch)) if key[-1] in tokens}

    everything = contracting({640, 256, 64}, Tune())
    # head and table, k and v, q and o, router; of experts down, and gate and up
    assert {(72, 24), (24, 24), (24, 48), (24, 8), (16, 24), (32, 24)} <= everything | {key[::-1] for key in everything}
    assert contracting({640, 256, 64}, Tune(freeze=("*",), train=("norm",))) == set()
    router = contracting({640, 256, 64}, Tune(freeze=("*",), train=("*.router",)))
    assert router == {(24, 8)}


def test_a_frozen_tower_has_no_backward_pass() -> None:
    """Before a merger that is trained, the tower's products are those of its forward pass."""
    arrays = mixed_arrays("qwen3_vl")
    with on(None, qwen3_vl.table()) as mesh:
        batch = jax.eval_shape(lambda: put_batch(arrays, mesh, qwen3_vl.table()))

    def products(tuned: Tune) -> int:
        """Multiply-adds of the tower's MLPs, between widths 32 and 40."""
        found = dot_operations(program(TINY["qwen3_vl"], qwen3_vl.table(), tuned, batch))
        return sum(count for key, count in found.items() if {32, 40} <= set(key))

    frozen = products(Tune(freeze=("encoders",), train=("encoders.image.merger",)))
    # Two stacks, each with fc1 and fc2, of 8 rows of 128 patches; trained, each has 2 more, and fc1 is recomputed.
    assert frozen == 2 * 2 * 8 * 128 * 32 * 40
    assert products(Tune()) == 3.5 * frozen


def test_rates_are_factors_of_every_update() -> None:
    """Against optax, a chain for each factor; clipping sees all gradients at once."""
    random = np.random.default_rng(0)
    shapes = {"a.kernel": (4, 3), "b.kernel": (3,), "c.bias": (5,)}
    params = {path: random.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    settings, factors = (
        Optimizer(learning_rate=0.1, weight_decay=0.3, warmup_steps=2),
        {"a.kernel": 0.25, "c.bias": 3.0},
    )
    ours = make_optimizer(settings, 4, params, factors)
    state, found = ours.init(params), params
    clip = optax.clip_by_global_norm(1.0)
    schedule = learning_rate(settings, 4)
    theirs = {
        path: optax.adamw(
            lambda step, path=path: factors.get(path, 1.0) * schedule(step),
            b2=0.95,
            weight_decay=0.3 if path.endswith("kernel") else 0.0,
        )
        for path in params
    }
    states, expected = {path: theirs[path].init(params[path]) for path in params}, dict(params)
    for _ in range(4):
        gradients = {path: random.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
        updates, state = ours.update(gradients, state, found)
        found = optax.apply_updates(found, updates)
        clipped, _ = clip.update(gradients, clip.init(gradients))
        for path in params:
            update, states[path] = theirs[path].update(clipped[path], states[path], expected[path])
            expected[path] = expected[path] + update
    for path in params:
        np.testing.assert_allclose(found[path], expected[path], atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("tuned", "message"),
    [
        (Tune(freeze=("*",)), "Tune.freeze = .* leaves nothing to train"),
        (Tune(freeze=("mlp",)), "Tune.freeze: 'mlp' names no parameter"),
        (Tune(freeze=("*",), train=("layers.0-1",)), "Tune.train: .* add 2 to Compute.splits"),
        (Tune(rates={"embed_token": 2.0}), "Tune.rates: 'embed_token' names no .* 'embed_tokens'"),
        (Tune(freeze=("*.mlp",), rates={"*.mlp": 2.0}), "all that '.*mlp' names is frozen"),
    ],
)
def test_mistakes_in_patterns(tuned: Tune, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tune.rates(tune.tuned(parameters.abstract_model(DENSE), tuned), tuned)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_config(tmp_path_factory.mktemp("freeze"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("Tune.train=('norm',)", "set Tune.freeze too"),
        ("Tune.rates={'norm': 0}", "Tune.rates: 'norm': 0.0 must be a positive number; for 0 use Tune.freeze"),
        ("Tune.rates={'norm': 'slow'}", "Tune.rates = .* is not a Mapping"),
        ("Tune.freeze='norm'", "Tune.freeze = 'norm' is not a tuple.*write \\('norm',\\)"),
    ],
)
def test_mistakes_in_settings(tiny: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ginfile.load(tiny, [override], root=config.Train)


def test_a_run_says_what_it_trains_and_goes_on_alike(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("Tune.freeze=('*.mlp', 'layers.0')", "Tune.rates={'norm': 0.5}", "Compute.splits=(1,)")
    straight = runs.run(tiny, *options, "Run.steps=4", folder="frozen")
    lines = capsys.readouterr().out.splitlines()
    row = next(number for number, line in enumerate(lines) if line.split() == ["part", "trained", "frozen"])
    # Frozen: 3 x 16 x 32 of each MLP; of layer 0 also 2 x 16 x 32 of q and o, 2 x 16 x 16 of k and v, and its norms.
    frozen = 2 * 3 * 16 * 32 + 2 * 16 * 32 + 2 * 16 * 16 + 2 * 16 + 2 * 4
    everything = sum(x.size for x in straight.after.params.values())
    assert lines[row + 1].split() == ["model", f"{everything - frozen:,}", f"{frozen:,}"]
    runs.run(tiny, *options, "Run.steps=2", folder="pieces")
    seen = runs.run(tiny, *options, "Run.steps=4", folder="pieces")
    assert seen.losses == straight.losses
    with pytest.raises(
        UserError, match=r"at step 4 layers.0.input_layernorm.scale was frozen, and in this config it is trained"
    ):
        runs.run(tiny, "Run.steps=5", "Compute.splits=(1,)", folder="pieces")


@pytest.mark.parametrize(("first", "then"), [((), (1,)), ((1, 2), (2,))])
def test_a_run_goes_on_with_stacks_cut_elsewhere(first: tuple, then: tuple, tiny: Path) -> None:
    folder = f"cut_{len(first)}"
    options = ("Qwen3Config.num_hidden_layers=3", "Checkpoint.every=2", "Checkpoint.keep=9", "Run.steps=4")
    straight = runs.run(tiny, *options, f"Compute.splits={first}", folder=folder)
    (tiny.parent / folder / "checkpoints" / "step_4").rename(tiny.parent / f"{folder}_end")
    seen = runs.run(tiny, *options, f"Compute.splits={then}", folder=folder)
    assert seen.losses == pytest.approx(straight.losses, rel=1e-6)
    assert not seen.misplaced
    shapes = {path: x.shape for path, x in straight.after.params.items()}
    assert restack.layers(shapes) == restack.layers({path: x.shape for path, x in seen.after.params.items()})
