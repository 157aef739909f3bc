"""One optimizer step, compiled once: gradients of every objective, divided once by its global weight."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int32

from omnijax import parameters
from omnijax.batch import Batch, Media
from omnijax.data.omni_packing import batch_fields
from omnijax.errors import UserError
from omnijax.nn.dropout import row_keys, use_keys
from omnijax.objectives import Mean, Outputs
from omnijax.parameters import Parameters
from omnijax.sharding import Rules, constrain, first_axes, place, split_count


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes. Parameters are float32, as are the optimizer's moments, which the trained ones have."""

    step: Int32[Array, ""]
    params: Parameters
    opt_state: Any


def init_state(model: nnx.Module, optimizer: optax.GradientTransformation, mesh: Mesh, rules: Rules) -> TrainState:
    """A fresh state around the parameters of `model`, which the first `train_step` consumes."""
    _, params = parameters.split(model)
    shardings = state_shardings(model, optimizer, mesh, rules)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(parameters.trained(model, params))
    return TrainState(jax.device_put(jnp.zeros((), jnp.int32), shardings.step), params, opt_state)


def abstract_state(model: nnx.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes and dtypes of the state of a model, which may be abstract."""

    def make(params: Parameters) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(parameters.trained(model, params)))

    return jax.eval_shape(make, parameters.split(model)[1])


def state_shardings(model: nnx.Module, optimizer: optax.GradientTransformation, mesh: Mesh, rules: Rules) -> TrainState:
    """The sharding of every leaf of a `TrainState`: moments live with their parameter, counters everywhere."""
    by_path = parameters.shardings(model, mesh, rules)
    everywhere = NamedSharding(mesh, PartitionSpec())
    abstract = abstract_state(model, optimizer)
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract.opt_state,
        parameters.trained(model, by_path),
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(step=everywhere, params=by_path, opt_state=opt_state)  # type: ignore[arg-type]


def train_step(
    model: nnx.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rules: Rules,
    *,
    accumulation: int = 1,
    dtype: jnp.dtype = jnp.bfloat16,
    seed: int = 0,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Float32[Array, ""]]]]:
    """The compiled step `(state, batch) -> (state, metrics)`; `state` is donated.

    `metrics` holds `loss` (every objective's sum over its global weight, added), each reported mean, `grad_norm`
    before clipping, and `weight`, the weight of objective `text`. `accumulation` cuts the batch into so many
    micro-batches; the result does not depend on it. Of `model`, which may be abstract, only the structure is used.
    Its frozen parameters have no gradient and stay as they are, to the bit. Dropout, where it has any, is drawn from
    `seed`, the number of the step and that of the row. Call the step inside `sharding.use`.
    """
    graphdef, shardings = nnx.graphdef(model), state_shardings(model, optimizer, mesh, rules)
    of_gradients = parameters.trained(model, shardings.params)
    after_step = getattr(model, "after_step", lambda params, metrics: params)

    def forward(params: Parameters, batch: Batch) -> Outputs:
        return parameters.merge(graphdef, parameters.cast(params, dtype, model))(batch)

    def scaled_loss(
        trained: Parameters, frozen: Parameters, batch: Batch, keys: Array, weights: Mapping[str, Array] | None
    ) -> tuple[Array, tuple]:
        with use_keys(keys):
            outputs = forward(trained | frozen, batch)
        weights = _weights(outputs) if weights is None else weights
        terms = [total / _at_least_one(weights[name]) for name, (total, _) in outputs.objectives.items()]
        return sum(terms, jnp.zeros((), jnp.float32)), (outputs.metrics, weights["text"])

    differentiate = jax.value_and_grad(scaled_loss, has_aux=True)

    def gradients(
        trained: Parameters, frozen: Parameters, batch: Batch, keys: Array
    ) -> tuple[tuple[Array, tuple], Parameters]:
        if accumulation == 1:
            return differentiate(trained, frozen, batch, keys, None)
        # The global weights come first, as sums of different objectives cannot be told apart once they are added.
        # They depend on the batch alone: of this forward pass XLA keeps nothing but their sums.
        weights = _weights(forward(trained | frozen, batch))
        micro_batches = _micro_batches((batch, keys), accumulation)

        def add(carry, micro):
            (total, (means, _)), grads = carry
            (loss, (metrics, _)), more = differentiate(trained, frozen, *micro, weights)
            means, grads = jax.tree.map(jnp.add, (means, grads), (metrics, more))
            return ((total + loss, (means, weights["text"])), grads), None

        first = jax.tree.map(lambda x: x[0], micro_batches)
        shapes = jax.eval_shape(lambda: differentiate(trained, frozen, *first, weights))
        value, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        grads = jax.lax.with_sharding_constraint(grads, of_gradients)
        return jax.lax.scan(add, (value, grads), micro_batches)[0]

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Array]]:
        trained = parameters.trained(model, state.params)
        frozen = {path: x for path, x in state.params.items() if path not in trained}
        keys = row_keys(seed, state.step, len(batch.tokens))
        (loss, (metrics, weight)), grads = gradients(trained, frozen, batch, keys)
        grads = jax.lax.with_sharding_constraint(grads, of_gradients)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        params = after_step(optax.apply_updates(trained, updates) | frozen, metrics) | frozen
        report = {name: total / _at_least_one(count) for name, (total, count) in metrics.items()}
        report |= {"loss": loss, "grad_norm": optax.tree.norm(grads), "weight": weight}
        return TrainState(state.step + 1, params, opt_state), report

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, shardings.step))


def evaluation_step(
    model: nnx.Module, *, dtype: jnp.dtype = jnp.bfloat16
) -> Callable[[Parameters, Batch], dict[str, Mean]]:
    """The compiled `(params, batch) -> means`, as sums and weights that the caller adds over batches."""
    graphdef = nnx.graphdef(model)

    def evaluate(params: Parameters, batch: Batch) -> dict[str, Mean]:
        return parameters.merge(graphdef, parameters.cast(params, dtype, model))(batch).metrics

    return jax.jit(evaluate)


def put_batch(arrays: Mapping[str, np.ndarray], mesh: Mesh, rules: Rules) -> Batch:
    """Host rows as a `Batch` on the mesh; every process passes the same rows and keeps what it holds.

    Arrays are `[B, S, ...]`, named as the fields of a `Batch`; those of media are `media.NAME.FIELD` `[B, N, ...]` and
    `slots.NAME` `[B, S]`. Rows are padded to the next length that the table can split, and so are their units. Raises
    `UserError` where it cannot split their number.
    """
    fields = batch_fields({name: put_rows(name, x, mesh, rules) for name, x in arrays.items()})
    return Batch(**fields | {"media": {name: Media(**units) for name, units in fields["media"].items()}})


def put_rows(name: str, x: np.ndarray, mesh: Mesh, rules: Rules) -> Array:
    """One of the arrays of `put_batch`."""
    sizes = dict(mesh.shape)
    of_encoder = name.startswith("media.")
    table = (rules.of(f"encoders.{name.split('.')[1]}") if of_encoder else rules).activations
    parts = math.prod(sizes[axis] for axis in first_axes(table, "length"))
    nothing = -1 if name.startswith("slots.") else 0
    padding = [(0, 0), (0, -x.shape[1] % parts), *((0, 0) for _ in x.shape[2:])]
    x = np.pad(x, padding, constant_values=nothing)
    names = ("batch", "length", *(None,) * (x.ndim - 2))
    spec = place(table, names, x.shape, sizes, f"batch.{name}").spec
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def _weights(outputs: Outputs) -> dict[str, Array]:
    return {name: weight for name, (_, weight) in outputs.objectives.items()}


def _at_least_one(weight: Array) -> Array:
    """Nothing to train on is a loss of 0, not of 0 / 0."""
    return jnp.where(weight > 0, weight, 1)


def _micro_batches(rows: Any, count: int) -> Any:
    """Split rows `[B, ...]` into `count` micro-batches `[count, B / count, ...]`, each device keeping its own."""
    size = len(jax.tree.leaves(rows)[0])
    groups = split_count("batch", size)
    if size % (groups * count):
        raise UserError(
            f"accumulation: {size} rows cannot be cut into {count} micro-batches of whole rows for each of {groups} "
            f"parts of batch; make the rows a multiple of {groups * count}, or change accumulation or the mesh"
        )

    def cut(x: Array) -> Array:
        rows, *rest = x.shape
        x = x.reshape(groups, count, rows // (groups * count), *rest).swapaxes(0, 1)
        x = x.reshape(count, rows // count, *rest)
        return constrain(x, *(None, "batch", "length", *(None,) * x.ndim)[: x.ndim])

    return jax.tree.map(cut, rows)
