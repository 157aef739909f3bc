"""One process of a small cluster: `python -m tests.cluster RANK PROCESSES PORT` prints what each step gave, as JSON.

Two rows of an omni model, of which each process holds one, in five steps: a picture on one and text on the other, a
clip on the other, a sound on one, everything on one, and no media at all.
"""

import json
import sys

import jax


def main(rank: int, processes: int, port: int) -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    import jax.numpy as jnp
    import optax

    from omnijax import hf, parameters, sharding
    from omnijax.mesh import make_mesh
    from omnijax.step import init_state, put_batch, train_step
    from sharding_rules import qwen2_5_omni
    from tests.meshes import arrays_of
    from tests.test_thinkers import ROWS, TINY, inputs_of, padded

    config, rules, text = TINY["qwen2_5_omni"], qwen2_5_omni.table(), ((), ())
    steps = ((((1, 4, 4),),), text), (text, (((2, 4, 4),),)), (((37,),), text), (text, ROWS[0]), (text, text)
    assert jax.process_count() == processes
    with sharding.use(mesh := make_mesh(data=2), rules):
        model = parameters.build_model(config, mesh, rules, seed=1)
        abstract = parameters.abstract_model(config)
        optimizer = optax.sgd(0.3)
        state = init_state(model, optimizer, mesh, rules)
        step = train_step(abstract, optimizer, mesh, rules, dtype=jnp.float32)
        found = []
        for number, rows in enumerate(steps):
            batch = hf.to_batch(abstract, inputs_of(rows, "qwen2_5_omni", seed=number))
            state, results = step(state, put_batch(arrays_of(padded(batch)), mesh, rules))
            found.append({name: float(results[name]) for name in ("loss", "grad_norm")})
        assert step._cache_size() == 1
    if jax.process_index() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
