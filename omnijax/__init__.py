"""OmniJAX: train omni-modal language models with JAX.

The names below are the stable surface. They load when first used, so that host-side workers never import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnijax import hf as hf
    from omnijax.batch import Batch as Batch
    from omnijax.config import load_config as load_config
    from omnijax.mesh import make_mesh as make_mesh
    from omnijax.parameters import build_model as build_model
    from omnijax.sampling import sample as sample
    from omnijax.sharding import Rules as Rules
    from omnijax.step import init_state as init_state
    from omnijax.step import train_step as train_step

_HOME = {
    "Batch": "batch",
    "Rules": "sharding",
    "build_model": "parameters",
    "init_state": "step",
    "load_config": "config",
    "make_mesh": "mesh",
    "sample": "sampling",
    "train_step": "step",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"omnijax.{_HOME[name]}"), name)
    if name == "hf":
        return importlib.import_module("omnijax.hf")
    raise AttributeError(f"module 'omnijax' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, "hf"])
