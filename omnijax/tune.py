"""The model of a run as `config.Tune` has it: adapters in place, and marked what stays as it is."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from omnijax import lora, parameters
from omnijax.config import Train, Tune
from omnijax.errors import UserError
from omnijax.patterns import named
from omnijax.sharding import Rules


def abstract_model(settings: Train) -> Any:
    """The model that `settings` train, with shapes in place of arrays."""
    return tuned(parameters.abstract_model(settings.model, **settings.model_options()), settings.tune)


def tuned(model: Any, tune: Tune) -> Any:
    """An abstract model like the one given, with adapters in place, and its frozen parameters marked.

    Raises `UserError` where a pattern names nothing, or where nothing is left to train.
    """
    graphdef, params = parameters.split(model)
    shapes: Any = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in params.items()}
    model = parameters.merge(graphdef, shapes)
    described = parameters.describe(model)
    kept = set(named(tune.train, described, "Tune.train"))
    if tune.lora is None:
        frozen = set(named(tune.freeze, described, "Tune.freeze"))
    else:
        frozen = set(described)
        if both := sorted(lora.insert(model, tune.lora) & kept):
            raise UserError(f"Tune.train names {both[0]}, which has an adapter of Tune.lora; take one of them")
    frozen -= kept
    if len(frozen) == len(parameters.describe(model)):
        raise UserError(f"Tune.freeze = {tune.freeze} leaves nothing to train; say in Tune.train what is")
    parameters.freeze(model, frozen)
    return model


def begin(model: Any, tune: Tune, mesh: Mesh, rules: Rules, *, seed: int = 0) -> Any:
    """The model of given weights as `tuned` has it, with fresh adapters: it computes the same at first."""
    abstract = tuned(model, tune)
    params = parameters.split(model)[1] | lora.fresh(abstract, mesh, rules, seed=seed)
    return parameters.merge(nnx.graphdef(abstract), params)


def rates(model: nnx.Module, tune: Tune) -> dict[str, float]:
    """The factors of the learning rate, by path; `UserError` for a pattern that names nothing that is trained."""
    described = parameters.describe(model)
    found = named(tune.rates, described, "Tune.rates")
    for pattern in tune.rates:
        if all(described[path].frozen for path in named([pattern], described, "Tune.rates")):
            raise UserError(f"Tune.rates: all that {pattern!r} names is frozen; leave it out, or train some of it")
    return {path: tune.rates[pattern] for path, pattern in found.items() if not described[path].frozen}
