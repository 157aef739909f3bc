"""The mixture of experts against float64 numpy, on one device and on meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers import GatedExperts
from omnijax import sharding
from omnijax.errors import UserError
from omnijax.nn.grouped import BLOCKS, Rows, blocks, grouped
from omnijax.nn.moe import dispatch
from omnijax.nn.router import (
    RouterLoss,
    Routing,
    corrected,
    measure,
    sigmoid_of_groups,
    sigmoid_shares,
    softmax_then_top,
    top_then_softmax,
)
from omnijax.sharding import Layout, Rules
from sharding_rules import qwen3_moe
from tests.meshes import on

WIDTH, HIDDEN, EXPERTS, CHOICES = 12, 10, 5, 2


def arrays(tokens: int, choice: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    kernels = {
        "gate_up_kernel": random.normal(size=(EXPERTS, WIDTH, 2, HIDDEN)),
        "down_kernel": random.normal(size=(EXPERTS, HIDDEN, WIDTH)),
    }
    return kernels, random.normal(size=(tokens, WIDTH)), choice, random.random((tokens, choice.shape[1]))


def by_hand(kernels, x, choice, weight) -> np.ndarray:
    """Every choice on its own, in float64."""
    out = np.zeros_like(x)
    for token, experts in enumerate(choice):
        for slot, expert in enumerate(experts):
            if expert < EXPERTS:
                gate, up = np.einsum("d,dgf->gf", x[token], kernels["gate_up_kernel"][expert])
                hidden = gate / (1 + np.exp(-gate)) * up
                out[token] += weight[token, slot] * (hidden @ kernels["down_kernel"][expert])
    return out


def uneven(sizes: list[int], nobody: int = 0) -> np.ndarray:
    """Choices [T, 1] of so many tokens for each expert, in a random order."""
    choice = np.repeat(np.arange(len(sizes) + 1), [*sizes, nobody])
    choice[choice == len(sizes)] = EXPERTS
    return np.random.default_rng(2).permutation(choice)[:, None].astype(np.int32)


RANDOM_CHOICES = np.random.default_rng(0).permuted(np.tile(np.arange(EXPERTS), (90, 1)), axis=1)[:, :CHOICES]


@pytest.mark.parametrize(
    "choice",
    [RANDOM_CHOICES.astype(np.int32), uneven([0, 1, 15, 16, 17]), uneven([63, 64, 65, 0, 300], nobody=7)],
    ids=["even", "small blocks", "large blocks"],
)
def test_experts_and_all_their_gradients(choice: np.ndarray) -> None:
    kernels, x, choice, weight = arrays(len(choice), choice)
    d_out = np.random.default_rng(3).normal(size=x.shape)

    def total(kernels, x, weight):
        return (grouped(GatedExperts.expert, kernels, x, jnp.asarray(choice), weight) * d_out.astype(np.float32)).sum()

    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (kernels, x, weight))
    found = grouped(GatedExperts.expert, single[0], single[1], jnp.asarray(choice), single[2])
    np.testing.assert_allclose(found, by_hand(kernels, x, choice, weight), atol=2e-4)
    gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(*single)
    # A directional derivative in float64 of every array, by central differences, which are exact to 1e-8 here.
    for number, array in enumerate((kernels, x, weight)):
        direction = jax.tree.map(lambda a: np.random.default_rng(4).normal(size=a.shape), array)
        moved = [[kernels, x, weight] for _ in range(2)]
        for sign, arguments in zip((1e-5, -1e-5), moved, strict=True):
            arguments[number] = jax.tree.map(lambda a, d, sign=sign: a + sign * d, array, direction)
        ends = [(by_hand(k, a, choice, w) * d_out).sum() for k, a, w in moved]
        expected = (ends[0] - ends[1]) / 2e-5
        products = jax.tree.map(lambda g, d: (np.asarray(g, np.float64) * d).sum(), gradients[number], direction)
        np.testing.assert_allclose(sum(jax.tree.leaves(products)), expected, rtol=2e-5, err_msg=str(number))


def test_no_expert_computes_a_block_for_nothing() -> None:
    for size in (0, 1, 16, 17, 255, 256, 1000):
        assert 0 <= sum(blocks(size)) - size < BLOCKS[-1]
    assert blocks(600) == [256, 256, 64, 16, 16]


def scores(tokens: int, experts: int) -> np.ndarray:
    return np.random.default_rng(6).normal(size=(tokens, experts)).astype(np.float32)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-values, axis=-1, kind="stable")[..., :count]


def softmax(values: np.ndarray) -> np.ndarray:
    shifted = np.exp(np.asarray(values, np.float64) - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@pytest.mark.parametrize("renormalise", [True, False])
def test_softmax_then_top(renormalise: bool) -> None:
    logits = scores(40, 9)
    choice, weight = softmax_then_top(jnp.asarray(logits), None, top_k=4, renormalise=renormalise)
    expected = largest(softmax(logits), 4)
    np.testing.assert_array_equal(choice, expected)
    share = np.take_along_axis(softmax(logits), expected, -1)
    np.testing.assert_allclose(weight, share / share.sum(-1, keepdims=True) if renormalise else share, rtol=2e-6)


def test_top_then_softmax() -> None:
    logits = scores(40, 9)
    choice, weight = top_then_softmax(jnp.asarray(logits), None, top_k=4)
    np.testing.assert_array_equal(choice, largest(logits, 4))
    np.testing.assert_allclose(weight, softmax(np.take_along_axis(logits, largest(logits, 4), -1)), rtol=2e-6)


@pytest.mark.parametrize("renormalise", [True, False])
def test_sigmoid_of_groups(renormalise: bool) -> None:
    """3 groups of 4: two groups are kept; the correction moves choices and no weight."""
    logits, correction = scores(40, 12), np.random.default_rng(7).normal(size=12).astype(np.float32)
    options: dict[str, Any] = {"top_k": 3, "groups": 3, "top_groups": 2, "renormalise": renormalise, "scale": 2.5}
    choice, weight = sigmoid_of_groups(jnp.asarray(logits), jnp.asarray(correction), **options)
    score = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    moved = score + correction
    for token in range(40):
        groups = np.sort(moved[token].reshape(3, 4), -1)[:, -2:].sum(-1)
        allowed = np.where(np.isin(np.arange(12) // 4, largest(groups, 2)), moved[token], 0)
        expected = largest(allowed, 3)
        np.testing.assert_array_equal(choice[token], expected)
        share = score[token][expected]
        np.testing.assert_allclose(weight[token], 2.5 * (share / share.sum() if renormalise else share), rtol=2e-6)
    np.testing.assert_allclose(sigmoid_shares(jnp.asarray(logits)), score / score.sum(-1, keepdims=True), rtol=2e-6)


def test_what_a_router_did_is_counted_over_real_tokens() -> None:
    rows, length, experts, k = 3, 14, 6, 2
    random = np.random.default_rng(8)
    logits = random.normal(size=(rows, length, experts))
    real = np.arange(length) < np.array([[14], [9], [0]])
    probabilities, choice = softmax(logits), largest(logits, k)
    dropped = random.integers(0, 2, (rows, length)).astype(np.int32)
    found = measure(*(jnp.asarray(a) for a in (logits.astype("f4"), probabilities.astype("f4"), choice, dropped, real)))
    chosen = np.zeros((rows, experts))
    for row, token in np.argwhere(real):
        chosen[row, choice[row, token]] += 1
    probability = (probabilities * real[..., None]).sum(1)
    lengths = real.sum(1)[:2, None]
    expected = {
        "load": chosen.sum(0),
        "probability": probability.sum(0),
        "balance": (experts * (chosen[:2] / lengths * probability[:2] / lengths).sum(-1) * lengths[:, 0]).sum(),
        "z": (np.log(np.exp(logits).sum(-1)) ** 2)[real].sum(),
        "entropy": -(probabilities * np.log(probabilities)).sum(-1)[real].sum(),
        "dropped": dropped[real].sum(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=5e-6, err_msg=name)


@pytest.mark.parametrize("balance", ["per_row", "per_batch"])
def test_an_even_load_costs_k(balance: Any) -> None:
    """2 layers, 8 tokens in 2 rows, 4 experts, k = 2: each expert is chosen 4 times with probability 1/4 a token."""
    even = jnp.full((2, 4), 4.0)
    per_row = 2 * (4 * 4 * (2 / 4) * (1 / 4)) * 4  # rows x (E sum_e chosen/n probability/n) x n
    routing = Routing(even, even / 2, jnp.full(2, per_row), jnp.full(2, 8.0), jnp.zeros(2), jnp.zeros(2))
    (total, weight), metrics = RouterLoss(balance, z_coefficient=0.5)(routing, jnp.float32(8), 10.0)
    assert total / weight == 10 * 2 + 0.5
    assert metrics["router_balance"][0] / metrics["router_balance"][1] == 2
    np.testing.assert_array_equal(metrics["router_load"][0] / metrics["router_load"][1], np.full((2, 4), 0.25))


def test_the_correction_goes_towards_an_even_load() -> None:
    load = jnp.array([[5.0, 1, 3, 3], [0, 0, 0, 8]])
    found = corrected(jnp.zeros((2, 4)), load, 0.25)
    np.testing.assert_array_equal(found, [[-0.25, 0.25, 0, 0], [0.25, 0.25, 0.25, -0.25]])


def test_a_loss_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match=r"RouterLoss.z_coefficient = -1.0 must be at least 0, and finite"):
        RouterLoss(z_coefficient=-1.0)


# Experts that write down which of them was asked, and with what weight: expert e puts the weight into channel e.
def write_down(kernels: dict[str, jax.Array], x: jax.Array, weight: jax.Array, rows: Rows) -> jax.Array:
    return weight[:, None] * rows.pick(kernels["name"])


def served(mesh_name: str | None, table: Rules, *, rows: int = 8, length: int = 24) -> dict[str, np.ndarray]:
    """What 16 such experts of 16 channels wrote for every token, what they should have, and what was dropped."""
    random = np.random.default_rng(9)
    logits = random.normal(size=(rows, length, 16)).astype(np.float32)
    logits[..., :3] += 1  # some experts are liked more
    real = np.arange(length) < random.integers(length // 2, length + 1, (rows, 1))
    select = functools.partial(softmax_then_top, top_k=3, renormalise=False)

    def run(x, logits, real, name):
        axes = {"name": ("experts", "expert_embed")}
        return dispatch(write_down, {"name": name}, axes, x, logits, None, real, select)

    with on(mesh_name, table):
        x = jnp.zeros((rows, length, 16))
        y, choice, dropped = jax.device_get(jax.jit(run)(x, logits, real, jnp.eye(16)))
    expected = np.where(real[..., None], softmax(logits), 0)
    wanted = (largest(logits, 3)[..., None] == np.arange(16)).any(-2)
    np.testing.assert_array_equal(np.sort(choice, -1), np.sort(largest(logits, 3), -1))
    return {"found": y, "expected": np.where(wanted, expected, 0), "dropped": dropped, "real": real}


ON_MESHES = [
    None,
    "expert 4 x data 2",
    "expert 8",
    "expert 2 x sequence 2 x data 2",
    "expert 2 x tensor 2 x sequence 2",
]


@pytest.mark.parametrize("mesh", ON_MESHES)
def test_all_gather_serves_every_choice_of_every_real_token(mesh: str | None) -> None:
    seen = served(mesh, qwen3_moe.table())
    np.testing.assert_allclose(seen["found"], seen["expected"], rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal((seen["found"] > 0).sum(-1), 3 * seen["real"])
    assert not seen["dropped"].any()


@pytest.mark.parametrize("mesh", ON_MESHES[1:])
@pytest.mark.parametrize("capacity", [0.5, 1.25, 8.0])
def test_all_to_all_counts_what_it_drops(mesh: str, capacity: float) -> None:
    seen = served(mesh, qwen3_moe.table(moe="all_to_all", capacity=capacity))
    kept = seen["found"] > 0
    np.testing.assert_allclose(seen["found"][kept], seen["expected"][kept], rtol=1e-5)
    np.testing.assert_array_equal(kept.sum(-1) + seen["dropped"], 3 * seen["real"])
    assert (seen["dropped"].sum() == 0) == (capacity == 8.0)


def test_experts_on_an_axis_that_splits_no_tokens_are_refused() -> None:
    table = qwen3_moe.table()
    moved = tuple(line for line in table.activations if line.name != "batch")
    table = Rules(table.parameters, (*moved, *sharding.lines(batch="replica data")), Layout())
    with pytest.raises(UserError, match="experts are split over the mesh axis 'expert', which splits no tokens"):
        served("expert 4 x data 2", table)
