"""Weights between Hugging Face folders and checkpoints.

python -m omnijax.convert import HF_FOLDER FOLDER            # a run starts from it with Run.start="FOLDER"
python -m omnijax.convert export FOLDER HF_FOLDER [--like ORIGINAL] [--dtype bfloat16]
python -m omnijax.convert export RUN PEFT_FOLDER --adapter [--like ORIGINAL]   # the adapters alone, for peft
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from omnijax import checkpoint, commands, hf, parameters, tune
from omnijax.config import config_of_run
from omnijax.data.tokenizer import Tokenizer, TokenizerFile
from omnijax.errors import UserError
from omnijax.generate import load_run
from omnijax.hf_adapter import save_adapter


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m omnijax.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands_of = parser.add_subparsers(dest="command", required=True)
    importing = commands_of.add_parser("import", help="Hugging Face folder to checkpoint")
    importing.add_argument("source")
    importing.add_argument("target")
    exporting = commands_of.add_parser("export", help="newest checkpoint of a run, or imported weights, to a folder")
    exporting.add_argument("source")
    exporting.add_argument("target")
    exporting.add_argument("--like", help="Hugging Face folder whose config.json and tokenizer files are carried over")
    exporting.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    exporting.add_argument("--adapter", action="store_true", help="the adapters of a run with LoRA, not merged")
    arguments = parser.parse_args()
    if arguments.command == "import":
        import_weights(arguments.source, arguments.target)
    elif arguments.adapter:
        export_adapter(Path(arguments.source), arguments.target, arguments.like)
    else:
        model, tokenizer = load_weights(Path(arguments.source))
        export_weights(model, arguments.target, arguments.like, arguments.dtype)
        if isinstance(tokenizer, TokenizerFile) and tokenizer.extra:  # what a folder it is like has lacks them
            (Path(arguments.target) / "tokenizer.json").write_text(json.dumps(tokenizer.file, ensure_ascii=False))
    print(f"written: {arguments.target}")


def import_weights(source: str, target: str) -> None:
    """A Hugging Face folder as step 0 under `target`/checkpoints; `UserError` if a checkpoint is there already."""
    from models.families import family_of

    folder = Path(target) / "checkpoints"
    if folder.exists():
        raise UserError(f"{target} already holds checkpoints; choose another folder")
    model = hf.load(family_of(source), source)
    checkpoint.save_weights(folder, parameters.split(model)[1], model.config.to_hf())


def export_weights(model: Any, target: str, like: str | None, dtype: str) -> None:
    """A Hugging Face folder; of a composed model one for each of its parts, and a file of its projectors."""
    if not hasattr(model, "parts"):
        hf.save(model, target, like=like, dtype=jnp.dtype(dtype))
        return
    if like is not None:
        raise UserError(f"--like {like}: the model is composed, and no folder is like it; leave it out")
    parts = model.parts()
    for path, part in parts.items():
        hf.save(part, Path(target) / path, dtype=jnp.dtype(dtype))
    rest = {
        path: np.asarray(x.astype(dtype))
        for path, x in parameters.split(model)[1].items()
        if not any(path.startswith((f"{part}.", f"{part}.tower.")) and ".projector." not in path for part in parts)
    }
    if rest:
        save_file(rest, Path(target) / "projectors.safetensors")


def export_adapter(run: Path, target: str, like: str | None) -> None:
    """The adapters of a run as a folder for peft; `like` is the folder of the model they belong to.

    Raises `UserError` for a run without adapters, one that trained more than these, and a composed model's.
    """
    if not (run / "checkpoints").is_dir():
        raise UserError(f"{run}: no checkpoints here; give the folder of a run")
    manager = checkpoint.open_checkpoints(run / "checkpoints", read_only=True)
    settings = config_of_run(checkpoint.saved_config(manager), checkpoint.started_in(manager))
    if settings.tune.lora is None:
        raise UserError(f"--adapter: {run} was trained without Tune.lora; leave it out")
    if settings.tune.train:
        raise UserError(
            f"--adapter: {run} trained {', '.join(settings.tune.train)} too, which no adapter holds; leave it out, to "
            f"have all in one model"
        )
    model = tune.abstract_model(settings)
    if hasattr(model, "parts"):
        raise UserError(f"--adapter: the model of {run} is composed, and no model of transformers; leave it out")
    shapes = parameters.shapes(model)
    params = checkpoint.restore_params(manager, shapes, dict.fromkeys(shapes, parameters.first_device()))
    checkpoint.close(manager)
    save_adapter(model, params, type(model), settings.tune.lora, target, base=like)


def load_weights(folder: Path) -> tuple[Any, Tokenizer | None]:
    """The model of a run's newest checkpoint, on one device, and its tokenizer; imported weights have none."""
    from models.families import family_named

    if not (folder / "checkpoints").is_dir():
        raise UserError(f"{folder}: no checkpoints here; give the folder of a run, or of imported weights")
    manager = checkpoint.open_checkpoints(folder / "checkpoints", read_only=True)
    stored = checkpoint.saved_model(manager)
    if stored is None:
        checkpoint.close(manager)
        return load_run(folder)[:2]
    abstract = parameters.abstract_model(family_named(stored["model_type"], str(folder)).Config.from_hf(stored))
    shapes = parameters.shapes(abstract)
    params = checkpoint.restore_params(manager, shapes, dict.fromkeys(shapes, parameters.first_device()))
    checkpoint.close(manager)
    return parameters.merge(nnx.graphdef(abstract), params), None


if __name__ == "__main__":
    commands.run(main)
