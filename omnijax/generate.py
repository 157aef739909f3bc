"""Continue a prompt with a trained run: `python -m omnijax.generate RUN_FOLDER "prompt"`."""

import argparse
import math
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from omnijax import checkpoint, commands, config, parameters
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import UserError
from omnijax.mesh import make_mesh
from omnijax.sampling import sample
from omnijax.start import of_run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m omnijax.generate", description=__doc__)
    parser.add_argument("run", help="folder of a run that saved a checkpoint")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.tokens < 1 or not 0 <= arguments.temperature < math.inf:
        raise UserError(
            f"--tokens {arguments.tokens} must be positive and --temperature {arguments.temperature} a number from 0"
        )
    folder = Path(arguments.run)
    if not (folder / "checkpoints").is_dir():
        raise UserError(f"{folder}: no checkpoints here; give the folder of a run, e.g. runs/quickstart")
    model, tokenizer, settings = load_run(folder)
    ids = sample(
        model,
        tokenizer.encode(arguments.prompt),
        tokens=arguments.tokens,
        context=settings.data.length,
        temperature=arguments.temperature,
        seed=arguments.seed,
    )
    print(arguments.prompt + tokenizer.decode(ids))


def load_run(folder: Path) -> tuple[Any, Tokenizer, config.Train]:
    """Model (on one device, adapters merged), tokenizer and settings of the newest checkpoint of a run."""
    manager = checkpoint.open_checkpoints(folder / "checkpoints", read_only=True)
    settings = config.config_of_run(checkpoint.saved_config(manager), checkpoint.started_in(manager))
    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    params = of_run(manager, settings, mesh, settings.rules)
    manager.close()
    model = parameters.abstract_model(settings.model, **settings.model_options())
    return parameters.merge(nnx.graphdef(model), params), settings.data.tokenizer, settings


if __name__ == "__main__":
    commands.run(main)
