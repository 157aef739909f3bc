"""The optimizer against float64 numpy, schedules against hand arithmetic, and one clip norm in every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from omnijax.config import Optimizer
from omnijax.mesh import make_mesh
from omnijax.optim import decayed, learning_rate, make_optimizer

PATHS = ("stacks.0.blocks.0.mlp.up_proj.kernel", "norm.scale", "lm_head.embedding", "stacks.0.blocks.0.q_proj.bias")


def adamw_in_float64(params: dict, gradients: list[dict], config: Optimizer, rates: list[float]) -> dict:
    """Loshchilov & Hutter 2019, algorithm 2, after clipping by the global norm."""
    params = {path: x.astype(np.float64) for path, x in params.items()}
    first, second = ({path: np.zeros_like(x) for path, x in params.items()} for _ in range(2))
    for count, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        norm = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in gradient.values()))
        for path, x in gradient.items():
            clipped = x.astype(np.float64) * min(1.0, (config.clip_norm or np.inf) / norm)
            first[path] = config.b1 * first[path] + (1 - config.b1) * clipped
            second[path] = config.b2 * second[path] + (1 - config.b2) * clipped**2
            mean, square = first[path] / (1 - config.b1**count), second[path] / (1 - config.b2**count)
            decay = config.weight_decay if path.endswith("kernel") else 0.0
            params[path] -= rate * (mean / (np.sqrt(square) + config.eps) + decay * params[path])
    return params


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_adamw_is_the_float64_one(clip_norm: float | None) -> None:
    random = np.random.default_rng(0)
    config = Optimizer(learning_rate=1e-2, schedule="constant", weight_decay=0.3, clip_norm=clip_norm)
    params = {path: random.normal(size=(5, 3)).astype(np.float32) for path in PATHS}
    gradients = [{path: random.normal(size=(5, 3)).astype(np.float32) for path in PATHS} for _ in range(5)]
    optimizer = make_optimizer(config, 5, PATHS)
    state, found = optimizer.init(params), params
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, found)
        found = optax.apply_updates(found, updates)
    expected = adamw_in_float64(params, gradients, config, [1e-2] * 5)
    for path in PATHS:
        np.testing.assert_allclose(found[path], expected[path], rtol=2e-6, atol=1e-7, err_msg=path)


@pytest.mark.parametrize("asked", [False, True])
def test_norms_and_biases_never_decay_and_embeddings_if_asked(asked: bool) -> None:
    mask = decayed(PATHS, Optimizer(learning_rate=1.0, decay_embeddings=asked))
    assert list(mask.values()) == [True, False, asked, False]


# Peak 1, end 0.1, 110 steps. Steps are counted from 0.
@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 10, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 109: 1.0, 500: 1.0}),
        ("linear", 10, {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
        ("cosine", 10, {0: 0.1, 9: 1.0, 10: 1.0, 60: 0.55, 35: 0.1 + 0.9 * (1 + np.sqrt(0.5)) / 2, 110: 0.1, 500: 0.1}),
        ("wsd", 10, {0: 0.1, 9: 1.0, 50: 1.0, 88: 1.0, 99: 0.55, 110: 0.1, 500: 0.1}),
        ("constant", 0, {0: 1.0, 109: 1.0}),
        ("linear", 0, {0: 1.0, 55: 0.55, 110: 0.1}),
        ("cosine", 1, {0: 1.0, 1: 1.0, 110: 0.1}),
    ],
)
def test_schedules(schedule: str, warmup: int, expected: dict[int, float]) -> None:
    config = Optimizer(learning_rate=1.0, schedule=schedule, warmup_steps=warmup, final_fraction=0.1)
    rate = learning_rate(config, 110)
    for step, value in expected.items():
        assert float(rate(step)) == pytest.approx(value, rel=1e-5), step


def test_warm_up_longer_than_the_run_only_warms_up() -> None:
    rate = learning_rate(Optimizer(learning_rate=1.0, warmup_steps=100), 10)
    assert float(rate(9)) == pytest.approx(0.1, rel=1e-5)


# sqrt(1^2 + ... + 7^2 - ...) by hand: 2 x 4 gradients of 1..8 have norm sqrt(204).
@pytest.mark.parametrize(
    "spec", [(), ("data",), (None, "data"), ("data", "tensor"), (("data", "tensor"),), ("expert",)]
)
def test_clipping_sees_one_norm_in_every_layout(spec: tuple) -> None:
    mesh = make_mesh(data=2, tensor=2, expert=2)
    if spec == (("data", "tensor"),):
        gradient = jnp.arange(1.0, 9.0).reshape(4, 2)
    else:
        gradient = jnp.arange(1.0, 9.0).reshape(2, 4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0))
    with jax.set_mesh(mesh):
        placed = jax.device_put(gradient, NamedSharding(mesh, PartitionSpec(*spec)))
        norm = jax.jit(optax.tree.norm)({"x": placed})
        clipped = jax.jit(lambda x: optimizer.update(x, optimizer.init(x))[0])({"x": placed})["x"]
    assert float(norm) == pytest.approx(np.sqrt(204.0), rel=1e-6)
    np.testing.assert_allclose(clipped, np.asarray(gradient) / np.sqrt(204.0), rtol=1e-6)
