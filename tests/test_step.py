"""The train step: one global division, on any mesh and any accumulation; float32 masters; nothing to train on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.qwen3 import Qwen3Config
from omnijax import parameters
from omnijax.config import Optimizer
from omnijax.errors import UserError
from omnijax.objectives import TextLoss
from omnijax.optim import make_optimizer
from omnijax.step import init_state, put_batch, train_step
from sharding_rules import qwen3 as rules
from tests import laws
from tests.meshes import MESHES, on, packed_arrays

SMALL = Qwen3Config(
    vocab_size=56,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=6,
    initializer_range=0.1,
)


def uneven_rows() -> dict[str, np.ndarray]:
    """Eight rows with 1, 3, 0, 48, ... trained tokens: a mean of means would be far off."""
    arrays = packed_arrays(vocab=SMALL.vocab_size)
    weights = np.zeros_like(arrays["weights"])
    for row, count in enumerate((1, 3, 0, 48, 7, 20, 2, 11)):
        weights[row, :count] = 1
    return arrays | {"weights": weights, "segment_ids": np.ones_like(arrays["segment_ids"])}


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_the_loss_is_divided_once_whatever_the_accumulation(accumulation: int) -> None:
    expected = laws.run(SMALL, rules.table(), None, arrays=uneven_rows(), steps=1)
    found = laws.run(SMALL, rules.table(), None, arrays=uneven_rows(), steps=1, accumulation=accumulation)
    laws.assert_same_run(found, expected, tolerance=2e-6)


@pytest.mark.parametrize("mesh", ["data 8", "data 2 x sequence 2 x tensor 2"])
def test_the_loss_is_divided_once_whatever_the_mesh(mesh: str) -> None:
    laws.equivalence(
        SMALL, rules.table(), mesh, laws.run(SMALL, rules.table(), None, arrays=uneven_rows()), arrays=uneven_rows()
    )


def test_the_loss_is_the_mean_over_all_trained_tokens() -> None:
    """The loss of all rows is the token-weighted mean of each row's own loss."""
    arrays = uneven_rows()
    alone = [
        laws.run(SMALL, rules.table(), None, arrays={name: x[row : row + 1] for name, x in arrays.items()}, steps=1)
        for row in (0, 3)
    ]
    both = {name: x[[0, 3]] for name, x in arrays.items()}
    found = laws.run(SMALL, rules.table(), None, arrays=both, steps=1)["losses"][0]
    assert found == pytest.approx((alone[0]["losses"][0] + 48 * alone[1]["losses"][0]) / 49, rel=1e-6)


@pytest.mark.parametrize("mesh", MESHES)
def test_constant_logits_cost_log_of_the_vocabulary(mesh: str) -> None:
    constant = dataclasses.replace(SMALL, initializer_range=0.0)
    found = laws.run(constant, rules.table(), mesh, steps=1)["losses"][0]
    assert found == pytest.approx(np.log(SMALL.vocab_size), rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_nothing_to_train_on_changes_nothing(accumulation: int) -> None:
    arrays = packed_arrays(vocab=SMALL.vocab_size)
    arrays["weights"] = np.zeros_like(arrays["weights"])
    found = laws.run(SMALL, rules.table(), None, arrays=arrays, steps=1, accumulation=accumulation)
    assert found["losses"] == [0.0]
    assert all((x == 0).all() for x in found["gradients"].values())
    assert all(np.isfinite(x).all() for x in found["parameters"].values())


def test_a_row_without_weight_changes_no_other_row() -> None:
    arrays = packed_arrays(vocab=SMALL.vocab_size)
    without = {name: np.delete(x, 3, axis=0) for name, x in arrays.items()}
    expected = laws.run(SMALL, rules.table(), None, arrays=without)
    laws.assert_same_run(laws.run(SMALL, rules.table(), None, arrays=arrays), expected, tolerance=2e-6)


def test_padding_carries_no_loss_and_reaches_no_token() -> None:
    """Whatever id stands at padding, in whatever micro-batch, the step is the same to the bit."""
    arrays = packed_arrays(vocab=SMALL.vocab_size)
    padding = arrays["segment_ids"] == 0
    assert padding.any()
    runs = []
    for token in (0, 7):
        changed = {name: np.where(padding, token, arrays[name]).astype(np.int32) for name in ("tokens", "targets")}
        runs.append(laws.run(SMALL, rules.table(), None, arrays=arrays | changed, accumulation=4, steps=1))
    assert runs[0]["losses"] == runs[1]["losses"]
    assert runs[0]["grad_norms"] == runs[1]["grad_norms"]


def train(steps: int, dtype, *, learning_rate: float, loss: TextLoss | None = None, **optimizer) -> tuple:
    """State before and after `steps` steps of AdamW, and the reports."""
    table = rules.table()
    with on(None, table) as mesh:
        model = parameters.build_model(SMALL, mesh, table, seed=1, loss=loss)
        params = parameters.split(model)[1]
        config = Optimizer(learning_rate=learning_rate, schedule="constant", **optimizer)
        chain = make_optimizer(config, steps, params)
        before = jax.device_get(params)
        state = init_state(model, chain, mesh, table)
        step = train_step(model, chain, mesh, table, dtype=dtype)
        batch = put_batch(packed_arrays(vocab=SMALL.vocab_size), mesh, table)
        reports = []
        for _ in range(steps):
            state, report = step(state, batch)
            reports.append({name: float(value) for name, value in report.items()})
        return before, jax.device_get(state), reports


def test_small_updates_reach_the_master_weights_in_bf16() -> None:
    """A norm weight of 1.0 has no bf16 neighbour within 0.003: without a float32 master it would never move."""
    before, state, _ = train(50, jnp.bfloat16, learning_rate=1e-5)
    for path, x in state.params.items():
        assert x.dtype == np.float32
        moved = (x != before[path]).mean()
        assert moved > (0.99 if path.endswith("scale") else 0.9), f"{path}: {moved:.1%} of the weights moved"
    assert all(x.dtype in (np.float32, np.int32) for x in jax.tree.leaves(state.opt_state))


def test_bf16_trains_as_float32_does() -> None:
    *_, narrow = train(20, jnp.bfloat16, learning_rate=1e-3)
    *_, wide = train(20, jnp.float32, learning_rate=1e-3)
    assert wide[-1]["loss"] < wide[0]["loss"] - 0.1
    assert narrow[-1]["loss"] == pytest.approx(wide[-1]["loss"], rel=2e-2)


def test_the_z_loss_is_part_of_the_loss_and_reported_apart() -> None:
    *_, plain = train(1, jnp.float32, learning_rate=1e-3)
    *_, with_z = train(1, jnp.float32, learning_rate=1e-3, loss=TextLoss(z_loss=0.1))
    assert with_z[0]["cross_entropy"] == pytest.approx(plain[0]["loss"], rel=1e-6)
    assert with_z[0]["loss"] == pytest.approx(plain[0]["loss"] + 0.1 * plain[0]["z"], rel=1e-6)
    assert with_z[0]["grad_norm"] != pytest.approx(plain[0]["grad_norm"], rel=1e-3)


def test_grad_norm_is_reported_before_clipping() -> None:
    *_, free = train(1, jnp.float32, learning_rate=1e-3, clip_norm=None)
    *_, clipped = train(1, jnp.float32, learning_rate=1e-3, clip_norm=1e-3)
    assert clipped[0]["grad_norm"] == pytest.approx(free[0]["grad_norm"], rel=1e-6)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_accumulators_and_state_live_where_the_parameters_do(accumulation: int) -> None:
    """Accumulation adds no replicated copy: device memory of 4 micro-batches stays close to that of one batch."""
    table = rules.table()
    with on("data 8", table) as mesh:
        model = parameters.build_model(laws_scale(), mesh, table, remat="full")
        chain = optax.adamw(1e-3)
        state = init_state(model, chain, mesh, table)
        step = train_step(model, chain, mesh, table, accumulation=accumulation, dtype=jnp.float32)
        batch = put_batch(packed_arrays(rows=32, length=16, vocab=96), mesh, table)
        memory = step.lower(state, batch).compile().memory_analysis()
        parameter_bytes = 4 * sum(x.size for x in state.params.values())
        held = memory.argument_size_in_bytes
        assert held < 3.3 * parameter_bytes / 8 + 32 * 16 * 4 * 6
        # Twice the gradients of a layer are whole at a time on this backend, which has no reduce-scatter.
        assert memory.temp_size_in_bytes < 2.5 * parameter_bytes


def laws_scale() -> Qwen3Config:
    """Parameters that outweigh the activations."""
    return dataclasses.replace(SMALL, vocab_size=96, hidden_size=160, intermediate_size=480, num_hidden_layers=8)


def test_accumulation_that_cuts_no_whole_rows_is_refused() -> None:
    with pytest.raises(UserError, match="8 rows cannot be cut into 4 micro-batches of whole rows for each of 8 parts"):
        laws.run(SMALL, rules.table(), "data 8", accumulation=4, steps=1)
