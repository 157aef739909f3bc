"""Where a run's first parameters come from: fresh, from a Hugging Face folder, or from another run."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from omnijax import checkpoint, hf, hf_files, lora, parameters, restack, tune
from omnijax.config import Train, config_of_run
from omnijax.errors import UserError
from omnijax.parameters import Parameters
from omnijax.sharding import Rules


def first_model(settings: Train, mesh: Mesh) -> Any:
    """The float32 model a run begins with, every parameter where it lives, and marked where it is frozen."""
    run, options = settings.run, settings.model_options()
    model = starting_model(settings.model, mesh, settings.rules, start=run.start, seed=run.seed, **options)
    return tune.begin(model, settings.tune, mesh, settings.rules, seed=run.seed)


def starting_model(config: Any, mesh: Mesh, rules: Rules, *, start: str | None, seed: int, **options: Any) -> Any:
    """The float32 model of a config with the weights it begins with, every parameter where it lives.

    `start` is None (fresh parameters from `seed`), a Hugging Face folder, or the folder of a run or of imported
    weights, whose newest checkpoint is read. Raises `UserError` where it holds another model than `config`.
    """
    if start is None:
        given = parts_of_folders(config, mesh, rules, **options)
        return parameters.build_model(config, mesh, rules, seed=seed, given=given, **options)
    folder, abstract = Path(start).expanduser(), parameters.abstract_model(config, **options)
    if (folder / "config.json").is_file():
        if not hasattr(type(config), "from_hf"):
            raise UserError(
                f"Run.start = {start!r} is of one family, and the model is composed: give its parts a start"
            )
        stored = type(config).from_hf(hf_files.read_config(folder), str(folder / "config.json"))
        require_same(config, stored, folder)
        return hf.load(type(abstract), folder, mesh=mesh, rules=rules, **options)
    if (folder / "checkpoints").is_dir():
        manager = checkpoint.open_checkpoints(folder / "checkpoints", read_only=True)
        shapes, shardings = parameters.shapes(abstract), parameters.shardings(abstract, mesh, rules)
        imported = checkpoint.saved_model(manager)
        if imported is None:
            settings = config_of_run(checkpoint.saved_config(manager), checkpoint.started_in(manager))
            require_same(config, settings.model, folder)
            params = of_run(manager, settings, mesh, rules)
            saved = {path: x.shape for path, x in params.items()}
            if differing := restack.difference(saved, shapes):
                raise UserError(f"Run.start = {start!r} holds another model: {differing}")
            params = restack.as_wanted(params, shardings, shapes, saved)
        else:
            require_same(config, type(config).from_hf(imported, str(folder)), folder)
            params = checkpoint.restore_params(manager, shapes, shardings)
        checkpoint.close(manager)
        return parameters.merge(nnx.graphdef(abstract), params)
    raise UserError(f"Run.start = {start!r} is neither a Hugging Face folder (config.json) nor one with checkpoints")


def of_run(manager: Any, settings: Train, mesh: Mesh, rules: Rules) -> Parameters:
    """The parameters of a run's newest checkpoint, in the stacks of that run, with its adapters merged."""
    theirs = tune.abstract_model(settings)
    shardings = parameters.shardings(theirs, mesh, rules)
    params = checkpoint.restore_params(manager, parameters.shapes(theirs), shardings)
    if settings.tune.lora is None:
        return params
    merge = functools.partial(lora.merged, theirs, lora=settings.tune.lora)
    where = {path: x for path, x in shardings.items() if not lora.is_adapter(path)}
    return jax.jit(merge, out_shardings=where)(params)


def parts_of_folders(config: Any, mesh: Mesh, rules: Rules, **options: Any) -> Parameters:
    """The parameters of those parts of a composed model that begin with weights of a folder, by their whole path.

    Raises `UserError` where a folder holds another part than the config has. Only the vocabulary may be larger.
    """
    parts = config.starts() if hasattr(config, "starts") else []
    if not parts:
        return {}
    abstract = parameters.abstract_model(config, **options)
    described, where = parameters.describe(abstract), parameters.shardings(abstract, mesh, rules)
    found: Parameters = {}
    for part in parts:
        folder, prefix = Path(part.folder).expanduser(), f"{part.path}."
        stored = type(part.config).from_hf(hf_files.read_config(folder), str(folder / "config.json"))
        rows = getattr(stored, "vocab_size", 0)
        if getattr(part.config, "vocab_size", 0) > rows > 0:
            stored = dataclasses.replace(stored, vocab_size=part.config.vocab_size)
        require_same(part.config, stored, folder)
        own = {path.removeprefix(prefix): x for path, x in described.items() if path.startswith(prefix)}
        places = {path: where[prefix + path] for path in own}
        loaded = hf.load_parameters(part.family, part.config, folder, own, places, may_grow=True)
        found |= {prefix + path: x for path, x in loaded.items()}
    return found


def require_same(config: Any, stored: Any, folder: Path) -> None:
    """`UserError` naming the fields in which a model config differs from that of the weights in `folder`."""
    if type(stored) is not type(config):
        raise UserError(f"Run.start: {folder} holds a {type(stored).__name__}, this config a {type(config).__name__}")
    differing = []
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(stored, field.name)
        # How a model is initialised says nothing of weights that are there.
        if ours != theirs and field.name != "initializer_range":
            differing.append(f"{field.name} = {theirs!r} there and {ours!r} in this config")
    if differing:
        mend = "change it, or write config.Train.model = @families.hugging_face()"
        raise UserError(f"Run.start: {folder} holds another model: {', '.join(differing)}; {mend}")
