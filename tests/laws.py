"""The laws every family obeys, as functions of a config and a table. A family's test calls them."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import models
from omnijax import hf, parameters
from omnijax.batch import Batch
from omnijax.nn.router import RouterLoss
from omnijax.sharding import Rules
from omnijax.step import init_state, put_batch, state_shardings, train_step
from tests.meshes import on, packed_arrays

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-5


def parity(case: Path, batch_name: str) -> None:
    """Logits, loss, gradient norm and every stored gradient equal the reference, each within its own tolerance."""
    info = json.loads((case / "case.json").read_text())["batches"][batch_name]
    reference = dict(np.load(case / info["npz"]))
    family = models.family_of(case)
    options = {"router_loss": RouterLoss("per_batch")} if "out/aux_loss" in reference else {}
    model = hf.load(family, case, **options)
    valid = reference.pop("in/valid_mask")
    counted = reference.pop("in/mrope_position_ids", None)  # positions are ours to count, where documents say them not
    batch = hf.to_batch(model, {name[3:]: x for name, x in reference.items() if name.startswith("in/")})
    if counted is not None:
        np.testing.assert_array_equal(np.asarray(batch.positions)[valid], counted.transpose(1, 2, 0)[valid])
    graphdef, params = parameters.split(model)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params, batch):
        model = parameters.merge(graphdef, params)
        outputs = model(batch)
        value = sum(total / weight for total, weight in outputs.objectives.values())
        return value, (model.logits(outputs.hidden), outputs.metrics)

    (value, (logits, metrics)), gradients = jax.jit(loss)(params, batch)
    found = {"out/logits": logits, "out/loss": value, "out/grad_norm": optax.tree.norm(gradients)}
    if options:
        balance, tokens = metrics["router_balance"]
        found["out/aux_loss"] = balance / tokens
    names = hf.names_in(family, info["grad_norm_per_parameter"])  # as transformers has them in memory
    by_name = dict(hf.tensors(model, gradients, names))
    found |= {name: by_name[name.removeprefix("grad/")] for name in reference if name.startswith("grad/")}
    assert len(found) > 3
    for name, x in found.items():
        x, expected = np.asarray(x, np.float64), np.asarray(reference[name], np.float64)
        assert x.shape == expected.shape, name
        if x.shape[:2] == valid.shape:
            x, expected = x[valid], expected[valid]
        error = np.abs(x - expected).max() / np.abs(expected).max()
        assert error <= info["tolerance_max_abs_err_over_max_abs_ref"][name], f"{name}: {error:.2e}"
    for name, norm in info["grad_norm_per_parameter"].items():
        # A bias of all keys changes no softmax: its gradient is 0 but for rounding.
        noise = 1e-8 * float(reference["out/grad_norm"])
        np.testing.assert_allclose(np.linalg.norm(by_name[name]), norm, rtol=2e-4, atol=noise, err_msg=name)


def run(config: Any, rules: Rules, mesh_name: str | None, *, arrays=None, accumulation=1, steps=3, **options) -> dict:
    """Losses, gradient norms, first gradients and last parameters of `steps` steps of SGD in float32."""
    arrays = packed_arrays(vocab=config.vocab_size) if arrays is None else arrays
    with on(mesh_name, rules) as mesh:
        model = parameters.build_model(config, mesh, rules, seed=3, **options)
        optimizer = recording_sgd(0.5)
        shardings = state_shardings(model, optimizer, mesh, rules)
        state = init_state(model, optimizer, mesh, rules)
        step = train_step(model, optimizer, mesh, rules, accumulation=accumulation, dtype=jnp.float32)
        batch = put_batch(arrays, mesh, rules)
        reports = []
        for number in range(steps):
            state, report = step(state, batch)
            reports.append(jax.device_get(report))
            if not number:
                gradients = jax.device_get(state.opt_state)
        assert step._cache_size() == 1
        placed = jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, shardings))
        assert all(placed)
        assert_replicas_agree(state.params)
    return {
        "losses": [float(report["loss"]) for report in reports],
        "grad_norms": [float(report["grad_norm"]) for report in reports],
        "gradients": gradients,
        "parameters": jax.device_get(state.params),
    }


def recording_sgd(learning_rate: float) -> optax.GradientTransformation:
    """SGD whose state is the last gradient."""

    def update(gradients, state, params=None):
        return jax.tree.map(lambda x: -learning_rate * x, gradients), gradients

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def assert_replicas_agree(params: dict[str, jax.Array]) -> None:
    """Devices that hold the same part of a parameter hold the same bits."""
    for path, x in params.items():
        parts: dict[str, np.ndarray] = {}
        for shard in x.addressable_shards:
            value = np.asarray(shard.data)
            np.testing.assert_array_equal(parts.setdefault(str(shard.index), value), value, err_msg=path)


def equivalence(config: Any, rules: Rules, mesh_name: str, one_device: dict, **options: Any) -> None:
    """Any mesh gives the losses, gradient norms, gradients and trained parameters of one device."""
    found = run(config, rules, mesh_name, **options)
    assert_same_run(found, one_device)


def assert_same_run(found: dict, expected: dict, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=tolerance)
    np.testing.assert_allclose(found["grad_norms"], expected["grad_norms"], rtol=tolerance)
    for kind in ("gradients", "parameters"):
        for path, x in expected[kind].items():
            # Where nothing turns, a bias of all keys changes no softmax: its gradient is 0 but for rounding.
            scale = path.replace("k_proj", "q_proj") if path.startswith("encoders.audio") else path
            largest = np.abs(expected[kind][scale]).max() or 1  # no gradient reaches a correction
            error = np.abs(found[kind][path] - x).max() / largest
            assert error <= tolerance, f"{kind} {path}: {error:.2e}"


def isolation(config: Any, **options: Any) -> None:
    """A packed row equals its documents alone, and no document's gradient reaches another's tokens."""
    vocab, lengths = config.vocab_size, (1, 13, 21, 6)
    random = np.random.default_rng(5)
    documents = [random.integers(0, vocab, length, dtype=np.int32) for length in lengths]
    parts = parameters.split(config.build(rngs=nnx.Rngs(7), **options))
    tokens = np.concatenate(documents)[None]
    segments = np.repeat(np.arange(1, 5, dtype=np.int32), lengths)[None]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])[None]
    hidden = _hidden(parts, tokens, segments, positions)
    start = 0
    for document in documents:
        end = start + len(document)
        alone = _hidden(parts, document[None], np.ones((1, len(document)), np.int32), positions[:, start:end])
        np.testing.assert_allclose(hidden[:, start:end], alone, atol=2e-6 * np.abs(hidden).max())
        start = end

    def reach(embedded_change: jax.Array) -> jax.Array:
        return _hidden(parts, tokens, segments, positions, change=embedded_change)[0, 14:35].sum()

    gradient = np.asarray(jax.grad(reach)(jnp.zeros((1, tokens.size, config.hidden_size))))[0]
    assert (gradient[14:35] != 0).any()
    assert (gradient[:14] == 0).all()
    assert (gradient[35:] == 0).all()


def _hidden(parts: tuple, tokens, segments, positions, change=None) -> jax.Array:
    """Hidden states; `change` is added to the token embeddings, so that gradients of tokens can be taken."""
    model = parameters.merge(*parts)
    if change is not None:
        embed = model.embed_tokens
        model.embed_tokens = lambda tokens: embed(tokens) + change
    zeros = np.zeros_like(tokens)
    batch = Batch(tokens, segments, positions, zeros, np.zeros(tokens.shape, np.float32), zeros)
    return model(jax.tree.map(jnp.asarray, batch)).hidden
