"""Compile the step of a config for as many virtual devices as its mesh has, and print what came of it as JSON.

A program, as jax fixes the number of devices when it starts: `python -m tests.compile_config FILE [override ...]`.
"""

import json
import math
import os
import re
import resource
import sys
import time


def main(path: str, *overrides: str) -> None:
    flags = "--xla_force_host_platform_device_count=128 --xla_backend_optimization_level=0"
    os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from omnijax import config, parameters, sharding
    from omnijax.batch import Batch
    from omnijax.mesh import make_mesh
    from omnijax.optim import make_optimizer
    from omnijax.step import abstract_state, state_shardings, train_step

    settings = config.load_config(path, overrides)
    rules, shape = settings.rules, (settings.data.rows, settings.data.length)
    mesh = make_mesh(**vars(settings.mesh))
    started = time.perf_counter()
    with sharding.use(mesh, rules):
        model = parameters.abstract_model(settings.model, **settings.model_options())
        optimizer = make_optimizer(settings.optimizer, settings.run.steps, parameters.split(model)[1])
        placed = sharding.place(rules.activations, ("batch", "length"), shape, dict(mesh.shape), "batch")
        where = NamedSharding(mesh, placed.spec)
        integers, weights = (jax.ShapeDtypeStruct(shape, kind, sharding=where) for kind in (jnp.int32, jnp.float32))
        batch = Batch(integers, integers, integers, integers, weights, integers)
        state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            abstract_state(model, optimizer),
            state_shardings(model, optimizer, mesh, rules),
        )
        lowered = train_step(model, optimizer, mesh, rules).lower(state, batch)
        compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    sizes = [
        [int(size) for size in found.split(",")] for found in re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)
    ]
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - started,
                "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "argument_bytes": memory.argument_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "largest_array": max(math.prod(shape) for shape in sizes),
                "offloads": "pinned_host" in lowered.as_text(),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
