"""AdamW, its schedules and its clipping against float64 numpy and arithmetic by hand."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.qwen3 import Qwen3Config
from omnijax import parameters
from omnijax.config import Optimizer
from omnijax.mesh import make_mesh
from omnijax.optim import decayed, learning_rate, make_optimizer

SHAPES = {"layer.kernel": (8, 4), "embed.embedding": (16, 2), "layer.bias": (8,), "norm.scale": (24,)}


def adamw(
    config: Optimizer, params: Mapping[str, np.ndarray], gradients: list[dict[str, np.ndarray]], decays: set[str]
) -> dict[str, np.ndarray]:
    """Algorithm 2 of Loshchilov & Hutter 2019, with the learning rate in front of the decay, in float64."""
    params = {path: x.astype(np.float64) for path, x in params.items()}
    first, second = ({path: np.zeros_like(x) for path, x in params.items()} for _ in range(2))
    for number, step in enumerate(gradients, 1):
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in step.values()))
        clip = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        for path, g in step.items():
            g = clip * g.astype(np.float64)
            first[path] = config.b1 * first[path] + (1 - config.b1) * g
            second[path] = config.b2 * second[path] + (1 - config.b2) * g**2
            update = first[path] / (1 - config.b1**number)
            update = update / (np.sqrt(second[path] / (1 - config.b2**number)) + config.eps)
            decay = config.weight_decay * params[path] if path in decays else 0
            params[path] = params[path] - config.learning_rate * (update + decay)
    return params


@pytest.mark.parametrize(
    ("options", "decays"),
    [
        ({"clip_norm": None}, {"layer.kernel"}),
        ({"clip_norm": 5.0}, {"layer.kernel"}),
        ({"clip_norm": 5.0, "decay_embeddings": True}, {"layer.kernel", "embed.embedding"}),
        ({"clip_norm": None, "weight_decay": 0.0, "b1": 0.5, "b2": 0.8, "eps": 0.1}, set()),
    ],
    ids=["free", "clipped", "embeddings decay", "no decay"],
)
def test_five_steps(options: dict, decays: set[str]) -> None:
    config = Optimizer(learning_rate=0.1, schedule="constant", **{"weight_decay": 0.3, **options})
    random = np.random.default_rng(0)
    params = {path: random.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
    # Norms of about 1, 30, 3, 10 and 0.1: some are clipped at 5, some are not.
    gradients = [
        {path: (scale * random.normal(size=shape)).astype(np.float32) for path, shape in SHAPES.items()}
        for scale in (0.1, 3, 0.3, 1, 0.01)
    ]
    optimizer = make_optimizer(config, 5, params)
    found, state = params, optimizer.init(params)
    for step in gradients:
        updates, state = optimizer.update(step, state, found)
        found = optax.apply_updates(found, updates)
    for path, expected in adamw(config, params, gradients, decays).items():
        np.testing.assert_allclose(found[path], expected, atol=2e-6, err_msg=path)


def test_a_run_may_go_on_with_other_settings() -> None:
    """The state is the same tree for every optimizer, so that one can take over that of another."""
    settings: tuple[dict, ...] = (
        {},
        {"clip_norm": None},
        {"weight_decay": 0.0},
        {"b1": 0.0},
        {"decay_embeddings": True},
        *({"schedule": schedule, "warmup_steps": 2} for schedule in ("constant", "linear", "cosine", "wsd")),
    )
    params = {path: np.zeros(shape, np.float32) for path, shape in SHAPES.items()}
    made = [make_optimizer(Optimizer(learning_rate=0.1, **options), 5, params).init(params) for options in settings]
    assert len({str(jax.tree.structure(state)) for state in made}) == 1


def test_what_decays() -> None:
    config = Qwen3Config(
        vocab_size=7,
        hidden_size=12,
        intermediate_size=5,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        attention_bias=True,
    )
    paths = parameters.describe(parameters.abstract_model(config))
    kernels = {
        f"stacks.0.blocks.0.{name}.kernel"
        for name in (
            *(f"self_attn.{projection}_proj" for projection in "qkvo"),
            *(f"mlp.{projection}_proj" for projection in ("gate", "up", "down")),
        )
    }
    tables = {"embed_tokens.embedding", "lm_head.embedding"}
    for options, expected in (({}, kernels), ({"decay_embeddings": True}, kernels | tables)):
        found = decayed(paths, Optimizer(learning_rate=1.0, **options))
        assert set(found) == set(paths)
        assert {path for path, decays in found.items() if decays} == expected


# A peak of 8, an end of 2, ten steps. After a warm-up of 4 steps, 6 are left: half of them are done at step 7.
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, {0: 8, 5: 8, 9: 8, 10: 8, 1000: 8}),
        ({"schedule": "linear"}, {0: 8, 5: 5, 9: 2.6, 10: 2, 1000: 2}),
        ({"schedule": "cosine"}, {0: 8, 5: 5, 9: 2 + 3 * (1 - 0.951056516), 10: 2, 1000: 2}),
        ({"schedule": "wsd", "decay_fraction": 0.3}, {0: 8, 5: 8, 7: 8, 8: 6, 9: 4, 10: 2, 1000: 2}),
        ({"schedule": "constant", "warmup_steps": 4}, {0: 2, 1: 4, 3: 8, 4: 8, 9: 8, 1000: 8}),
        ({"schedule": "linear", "warmup_steps": 4}, {0: 2, 2: 6, 3: 8, 4: 8, 7: 5, 9: 3, 10: 2, 1000: 2}),
        ({"schedule": "cosine", "warmup_steps": 4}, {0: 2, 3: 8, 4: 8, 6: 6.5, 7: 5, 8: 3.5, 10: 2, 1000: 2}),
        (
            {"schedule": "wsd", "warmup_steps": 4, "decay_fraction": 0.3},
            {0: 2, 3: 8, 4: 8, 7: 8, 8: 6, 9: 4, 10: 2, 1000: 2},
        ),
        ({"schedule": "linear", "warmup_steps": 1}, {0: 8, 1: 8, 10: 2}),
        # A decay longer than what the warm-up leaves, and a warm-up longer than the run.
        ({"schedule": "wsd", "warmup_steps": 8, "decay_fraction": 1.0}, {0: 1, 7: 8, 8: 8, 9: 5, 10: 2, 1000: 2}),
        ({"schedule": "linear", "warmup_steps": 16}, {0: 0.5, 9: 5, 15: 8}),
    ],
)
def test_schedules(options: dict, expected: dict[int, float]) -> None:
    schedule = learning_rate(Optimizer(learning_rate=8.0, final_fraction=0.25, **options), steps=10)
    found = {step: float(schedule(jnp.asarray(step))) for step in expected}
    assert found == pytest.approx(expected, rel=1e-6)


LAYOUTS = {
    "replicated": {path: P() for path in SHAPES},
    "fsdp": {
        "layer.kernel": P(("data", "sequence")),
        "embed.embedding": P("data"),
        "layer.bias": P(("data", "sequence", "tensor")),
        "norm.scale": P("sequence"),
    },
    "tensor": {
        "layer.kernel": P("data", "tensor"),
        "embed.embedding": P("tensor", "sequence"),
        "layer.bias": P("tensor"),
        "norm.scale": P(),
    },
}


@pytest.mark.parametrize("inside_shard_map", [False, True], ids=["jit", "shard_map"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_sees_one_norm_in_every_layout(layout: str, inside_shard_map: bool) -> None:
    """Of 32 + 32 + 8 + 24 = 96 ones and a half of each, the norm is sqrt(96 / 4); parts and copies count once."""
    mesh, specs = make_mesh(data=2, sequence=2, tensor=2), LAYOUTS[layout]
    clip = optax.clip_by_global_norm(1.0)
    shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    ones = {path: jax.device_put(np.ones(shape, np.float32), shardings[path]) for path, shape in SHAPES.items()}

    def halve(gradients: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: x / 2 for path, x in gradients.items()}

    if inside_shard_map:  # as gradients come out of a layer that runs on each device
        halve = jax.shard_map(halve, mesh=mesh, in_specs=(specs,), out_specs=specs)

    @jax.jit
    def clipped(ones: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        gradients = halve(ones)
        return clip.update(gradients, clip.init(gradients))[0], optax.tree.norm(gradients)

    found, norm = clipped(ones)
    assert float(norm) == pytest.approx(24**0.5, rel=1e-6)
    for path, x in found.items():
        np.testing.assert_allclose(x, np.full(SHAPES[path], 0.5 / 24**0.5), rtol=1e-6)
