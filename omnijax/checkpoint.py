"""Checkpoints: orbax, written in the background, restored onto any mesh.

One step is five items: `params` and `optimizer` (arrays), `data` (state of the stream after the last row consumed),
`config` (the resolved gin file, and the folder its relative paths start from) and `meta`.
"""

import contextlib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from omnijax import restack
from omnijax.errors import UserError
from omnijax.parameters import Parameters
from omnijax.step import TrainState

MEBIBYTE = 2**20


def open_checkpoints(directory: str | os.PathLike[str], *, keep: int = 2, read_only: bool = False) -> Any:
    """The checkpoint manager of a run; give it to `close` in the end, which waits for what is being written."""
    # Orbax's own read_only warns of itself twice; a manager that is never asked to save writes nothing either.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=not read_only, cleanup_tmp_directories=not read_only, step_prefix="step"
    )
    return ocp.CheckpointManager(os.path.abspath(directory), options=options)


def save(manager: Any, state: TrainState, data: Mapping[str, Any], config: str) -> None:
    """Start saving `state`, once the last save is done; the arrays are copied before this returns, written after.

    Exits with code 1 if the last save failed.
    """
    with _failure_is_one_line():
        manager.wait_until_finished()
    step = int(state.step)
    items = {
        "params": ocp.args.StandardSave(state.params, save_args=_layer_chunks(state.params)),
        "optimizer": ocp.args.StandardSave(state.opt_state, save_args=_layer_chunks(state.opt_state)),
        "data": ocp.args.JsonSave(dict(data)),
        "config": ocp.args.JsonSave({"gin": config, "folder": os.getcwd()}),
        "meta": ocp.args.JsonSave(_describe(step, state.params) | {"trained": _with_moments(state)}),
    }
    if not manager.save(step, args=ocp.args.Composite(**items), force=True):
        raise RuntimeError(f"orbax did not save step {step}")


def save_weights(directory: str | os.PathLike[str], params: Parameters, model: Mapping[str, Any]) -> None:
    """Write imported weights as step 0, with the Hugging Face config of their model; waits until they are written."""
    manager = open_checkpoints(directory)
    items = {
        "params": ocp.args.StandardSave(params, save_args=_layer_chunks(params)),
        "config": ocp.args.JsonSave({"model": dict(model)}),
        "meta": ocp.args.JsonSave(_describe(0, params)),
    }
    manager.save(0, args=ocp.args.Composite(**items), force=True)
    close(manager)


def check(manager: Any) -> None:
    """Exits with code 1 if a save failed in the background; waits for none."""
    # Not orbax's check_for_errors: its own thread, which ends a save, takes the error first.
    with _failure_is_one_line():
        if not manager.is_saving_in_progress():
            manager.wait_until_finished()


def close(manager: Any) -> None:
    """Wait for what is being written. Exits with code 1 if it failed."""
    with _failure_is_one_line():
        manager.close()


def latest_step(manager: Any) -> int | None:
    """The newest step whose save was committed; None where there is none."""
    return manager.latest_step()


def restore(manager: Any, step: int, like: TrainState, shardings: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """State and data state of `step`, each array read straight to where `shardings` puts it.

    `like` gives the tree and the shapes; layers may be cut into other stacks than they were. Raises `UserError` where
    the checkpoint holds another model, or one of which other parameters are trained, or is damaged.
    """
    shapes = {path: tuple(x.shape) for path, x in like.params.items()}
    saved = check_same_model(manager, step, shapes)
    _check_same_trained(manager, step, like)
    target = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, shardings
    )
    params, optimizer = restack.as_saved((target.params, target.opt_state), shapes, saved)
    args = ocp.args.Composite(
        params=ocp.args.StandardRestore(params),
        optimizer=ocp.args.StandardRestore(optimizer),
        data=ocp.args.JsonRestore(),
    )
    items = _read(manager, step, args)
    number = jax.device_put(np.asarray(step, np.int32), shardings.step)
    found, wanted = (items["params"], items["optimizer"]), (shardings.params, shardings.opt_state)
    return TrainState(number, *restack.as_wanted(found, wanted, shapes, saved)), items["data"]


def restore_params(manager: Any, shapes: Mapping[str, tuple[int, ...]], shardings: Mapping[str, Any]) -> Parameters:
    """The parameters of the newest step alone, float32; layers may be cut into other stacks than they were.

    Raises `UserError` where it holds others than `shapes` or is damaged.
    """
    step = _newest(manager)
    saved = check_same_model(manager, step, shapes)
    target = {
        path: jax.ShapeDtypeStruct(shapes[path], np.float32, sharding=sharding) for path, sharding in shardings.items()
    }
    args = ocp.args.Composite(params=ocp.args.StandardRestore(restack.as_saved(target, shapes, saved)))
    return restack.as_wanted(_read(manager, step, args)["params"], dict(shardings), shapes, saved)


def check_same_model(manager: Any, step: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters of `step`; `UserError` unless they are these, but for where stacks are cut."""
    saved = {path: tuple(shape) for path, shape in _item(manager, step, "meta")["shapes"].items()}
    if differing := restack.difference(saved, shapes):
        raise UserError(
            f"{manager.directory}: step {step} was saved from another model: {differing}; "
            f"change the model back or choose another Run.dir"
        )
    return saved


def _check_same_trained(manager: Any, step: int, like: TrainState) -> None:
    meta = _item(manager, step, "meta")
    if "trained" not in meta:  # of an older version, which trained everything
        return
    wanted = restack.layers({path: x.shape for path, x in like.params.items()}, _with_moments(like))
    saved = restack.layers(meta["shapes"], meta["trained"])
    if differing := sorted(set(saved) ^ set(wanted)):
        was, now = ("trained", "frozen") if differing[0] in saved else ("frozen", "trained")
        raise UserError(
            f"{manager.directory}: at step {step} {differing[0]} was {was}, and in this config it is {now}, as are "
            f"{len(differing) - 1} more; change Tune back, or begin another Run.dir with Run.start at this run"
        )


def _with_moments(state: TrainState) -> list[str]:
    """The paths of the parameters that the optimizer keeps anything for."""
    nodes = jax.tree.leaves(state.opt_state, is_leaf=restack.is_by_path)
    return sorted({path for node in nodes if restack.is_by_path(node) for path in node})


def saved_config(manager: Any) -> str:
    """The resolved gin file of the newest checkpoint; `UserError` where there is none, or only imported weights."""
    config = _item(manager, _newest(manager), "config")
    if "gin" not in config:
        raise UserError(f"{manager.directory}: imported weights, and no run; give the folder of a run")
    return config["gin"]


def started_in(manager: Any) -> str | None:
    """The working directory of the run that saved the newest checkpoint; None where it was not noted."""
    return _item(manager, _newest(manager), "config").get("folder")


def saved_model(manager: Any) -> dict[str, Any] | None:
    """The Hugging Face config of imported weights; None where the checkpoint is of a run."""
    return _item(manager, _newest(manager), "config").get("model")


@contextlib.contextmanager
def _failure_is_one_line() -> Iterator[None]:
    """A full disk is no fault of ours, and orbax has logged where it met it."""
    try:
        yield
    except Exception as error:
        raise SystemExit(
            f"stopped: a checkpoint was not written: {_reason(error)}; mend that: "
            f"the same command goes on from the one before"
        ) from error


def _newest(manager: Any) -> int:
    step = latest_step(manager)
    if step is None:
        raise UserError(f"{manager.directory}: no checkpoint here; give the folder of a run that saved one")
    return step


def _item(manager: Any, step: int, name: str) -> dict[str, Any]:
    return _read(manager, step, ocp.args.Composite(**{name: ocp.args.JsonRestore()}))[name]


def _read(manager: Any, step: int, args: Any) -> Any:
    """Items of a step. Raises `UserError`, with the way out, where files of it are cut off or missing."""
    hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_hush_unfinished_reads, hook)
    try:
        items = manager.restore(step, args=args)
        sys.unraisablehook = hook
        return items
    except Exception as error:
        # Of damage orbax makes these, or a bare Exception; memory that ran out, for one, is something else.
        if not isinstance(error, OSError | ValueError | LookupError) and type(error) is not Exception:
            raise
        older = [str(other) for other in sorted(manager.all_steps()) if other < step]
        mend = f"move its folder away to go on from step {older[-1]}" if older else "bring back a copy of it"
        raise UserError(
            f"{manager.directory}: step {step} is damaged, or of another version ({_reason(error)}); "
            f"older steps here: {', '.join(older) or 'none'}; {mend}, or start anew in another Run.dir"
        ) from error


def _hush_unfinished_reads(otherwise: Callable[[Any], None], unraisable: Any) -> None:
    """Orbax leaves reads half done when one fails; each would print a traceback when it ends or is collected."""
    code = getattr(unraisable.object, "cr_code", None)
    ends_late = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
    if not ends_late and (code is None or "orbax" not in code.co_filename):
        otherwise(unraisable)


def _reason(error: Exception) -> str:
    """What orbax says, without the error numbers, places in the source and specs that tensorstore's messages end in."""
    said = error.args[0] if isinstance(error, KeyError) else str(error)
    return re.split(r" \[|\. (?:See|Available)|\n", said)[0]


def _describe(step: int, params: Parameters) -> dict[str, Any]:
    return {"step": step, "jax": jax.__version__, "shapes": {path: x.shape for path, x in params.items()}}


def _layer_chunks(tree: Any) -> Any:
    """One layer a chunk for arrays that stack layers, if a layer is large: else reading one reads the whole stack."""

    def args(path: Any, x: Any) -> ocp.SaveArgs:
        stacked = "stacks." in jax.tree_util.keystr(path) and x.ndim > 1
        layer = math.prod(x.sharding.shard_shape(x.shape)[1:]) * x.dtype.itemsize
        return ocp.SaveArgs(chunk_byte_size=layer, shard_axes=(0,)) if stacked and layer >= MEBIBYTE else ocp.SaveArgs()

    return jax.tree_util.tree_map_with_path(args, tree)
