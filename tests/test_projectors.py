"""Projectors: float64 numpy's numbers, and any mesh."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.projectors import LinearProjector, MLPProjector, PatchMergeProjector, PixelShuffleProjector
from omnijax import parameters
from omnijax.errors import UserError
from omnijax.sharding import Rules
from sharding_rules import vision_tower
from tests.meshes import on

WIDTH, OUT, MERGED = 12, 20, 4
PROJECTORS = {
    "linear": functools.partial(LinearProjector, WIDTH, OUT),
    "mlp": functools.partial(MLPProjector, WIDTH, OUT),
    "mlp of three": functools.partial(MLPProjector, WIDTH, OUT, depth=3),
    "patch merge": functools.partial(PatchMergeProjector, WIDTH, OUT, merged=MERGED),
    "pixel shuffle": functools.partial(PixelShuffleProjector, WIDTH, OUT, merged=MERGED),
}


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def normalised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def by_hand(name: str, p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """float64, with the projector's parameters by path."""
    joined = [x[:, i::MERGED] for i in range(MERGED)]
    if name == "linear":
        return x @ p["linear.kernel"] + p["linear.bias"]
    if name == "pixel shuffle":
        return sum(part @ kernel for part, kernel in zip(joined, p["linear.kernel"], strict=True))
    if name == "patch merge":
        normal = [normalised(part) * p["merger.ln_q.scale"] + p["merger.ln_q.bias"] for part in joined]
        hidden = sum(part @ kernel for part, kernel in zip(normal, p["merger.linear_1.kernel"], strict=True))
        hidden = gelu(hidden + p["merger.linear_1.bias"])
        return hidden @ p["merger.linear_2.kernel"] + p["merger.linear_2.bias"]
    for number in range(len(p) // 2):
        x = (gelu(x) if number else x) @ p[f"linears.{number}.kernel"] + p[f"linears.{number}.bias"]
    return x


@pytest.mark.parametrize("name", PROJECTORS)
def test_a_projector_gives_numpys_numbers(name):
    random = np.random.default_rng(1)
    graphdef, params = parameters.split(PROJECTORS[name](rngs=nnx.Rngs(0)))
    params = {path: random.standard_normal(x.shape) for path, x in params.items()}
    x = random.standard_normal((2, 8, WIDTH))
    single = jax.tree.map(jnp.float32, params)
    found = parameters.merge(graphdef, single)(jnp.float32(x))
    expected = by_hand(name, params, x)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", PROJECTORS)
def test_any_mesh_gives_the_tokens_and_gradients_of_one_device(name):
    table = vision_tower.table()
    used = [line for line in table.parameters if line.name in ("embed", "mlp")]
    rules = Rules(parameters=tuple(used), activations=table.activations, layout=table.layout)
    random = np.random.default_rng(2)
    x = jnp.asarray(random.standard_normal((2, 16, WIDTH), dtype=np.float32))
    cotangent = jnp.asarray(random.standard_normal((2, 16, OUT), dtype=np.float32))
    found = []
    for mesh_name in (None, "data 2 x sequence 2 x tensor 2"):
        with on(mesh_name, rules) as mesh:
            config = SimpleNamespace(build=PROJECTORS[name])
            graphdef, params = parameters.split(parameters.build_model(config, mesh, rules, seed=4))

            @functools.partial(jax.jit, static_argnums=0)
            @functools.partial(jax.value_and_grad, argnums=(1, 2), has_aux=True)
            def loss(graphdef, params, x):
                tokens = parameters.merge(graphdef, params)(x)
                return (tokens * cotangent[:, : tokens.shape[1]]).sum(), tokens

            (_, tokens), (gradients, x_gradient) = jax.device_get(loss(graphdef, params, x))
            found.append({"tokens": tokens, "x": x_gradient} | gradients)
    for path, expected in found[0].items():
        error = np.abs(found[1][path] - expected).max() / np.abs(expected).max()
        assert error <= 1e-5, f"{path}: {error:.2e}"


def test_what_cannot_be_projected_is_one_line():
    with pytest.raises(UserError, match="depth = 0 must be at least 1"):
        MLPProjector(WIDTH, OUT, depth=0, rngs=nnx.Rngs(0))
    for name in ("patch merge", "pixel shuffle"):
        with pytest.raises(UserError, match="row of 6 units is not whole runs of merged = 4: make it 2 longer"):
            PROJECTORS[name](rngs=nnx.Rngs(0))(jnp.zeros((1, 6, WIDTH)))
