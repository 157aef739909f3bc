"""The model of a run as `config.Tune` has it: what stays as it is, is marked."""

from typing import Any

from flax import nnx

from omnijax import parameters
from omnijax.config import Train, Tune
from omnijax.errors import UserError
from omnijax.patterns import named


def abstract_model(settings: Train) -> Any:
    """The model that `settings` train, with shapes in place of arrays."""
    return tuned(parameters.abstract_model(settings.model, **settings.model_options()), settings.tune)


def tuned(model: Any, tune: Tune) -> Any:
    """The model, which may be abstract, with its frozen parameters marked.

    Raises `UserError` where a pattern names nothing, or where nothing is left to train.
    """
    described = parameters.describe(model)
    frozen = set(named(tune.freeze, described, "Tune.freeze")) - set(named(tune.train, described, "Tune.train"))
    if len(frozen) == len(described):
        raise UserError(f"Tune.freeze = {tune.freeze} leaves nothing to train; say in Tune.train what is")
    parameters.freeze(model, frozen)
    return model


def rates(model: nnx.Module, tune: Tune) -> dict[str, float]:
    """The factors of the learning rate, by path; `UserError` for a pattern that names nothing that is trained."""
    described = parameters.describe(model)
    found = named(tune.rates, described, "Tune.rates")
    for pattern in tune.rates:
        if all(described[path].frozen for path in named([pattern], described, "Tune.rates")):
            raise UserError(f"Tune.rates: all that {pattern!r} names is frozen; leave it out, or train some of it")
    return {path: tune.rates[pattern] for path, pattern in found.items() if not described[path].frozen}
