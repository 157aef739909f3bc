"""Train steps on the CPU: OmniJAX against transformers + torch, in alternation on the same threads.

Both start from the same weights and see the same rows, so their losses are printed side by side. Each runs in its own
process and takes its turn for `STEPS` steps; the other waits. Printed: median tokens/s and peak memory of each, their
ratios, and what our train step costs over the same computation as a bare jitted function.
"""

import functools
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS, LENGTH, ROUNDS, STEPS, LEARNING_RATE = 4, 512, 6, 4, 1e-4
THREADS = 2


@dataclass(frozen=True)
class Setup:
    """What is compared: a family by its `model_type`, its sizes, and how each side is asked to build it."""

    family: str
    sizes: dict[str, Any]
    remat: str = "dots"
    options: dict[str, Any] = field(default_factory=dict)
    torch_options: dict[str, Any] = field(default_factory=dict)


def main(setup: Setup) -> None:
    """The comparison, or one worker's part of it, as the command line says."""
    role, *rest = sys.argv[1:] or [""]
    if not role:
        compare(setup)
    elif role == "prepare":
        prepare(setup, rest[0])
    elif role == "torch":
        torch_worker(setup, rest[0])
    else:
        omnijax_worker(setup, rest[0], bare=role == "bare jit")


@dataclass
class Measured:
    """Of one worker: the times of the steps of each turn, the losses of all steps, and the most memory it had.

    busy: as `seconds`, but those that all cores together worked for it, whatever else ran beside it
    """

    seconds: list[list[float]] = field(default_factory=list)
    busy: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def alternate(names: Sequence[str], folder: str) -> dict[str, Measured]:
    """Let a worker of each name take its turn, `ROUNDS` times, after one that compiles and warms up."""
    workers = {name: start(name, folder) for name in names}
    found = {name: Measured() for name in names}
    for turn in range(ROUNDS + 1):
        for name, worker in workers.items():
            answer = ask(worker, "run")
            found[name].losses += answer["losses"]
            if turn:
                found[name].seconds.append(answer["seconds"])
                found[name].busy.append(answer["busy"])
    for name, worker in workers.items():
        found[name].peak_bytes = ask(worker, "quit")["peak_bytes"]
    return found


def compare(setup: Setup) -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, sys.argv[0], "prepare", folder], check=True, env=environment())
        found = alternate(("torch", "omnijax", "bare jit"), folder)
    tokens = ROWS * LENGTH
    print(
        f"{setup.family} {setup.sizes}, {ROWS} x {LENGTH} tokens, float32, AdamW, {THREADS} threads, "
        f"{ROUNDS} x {STEPS} steps each"
    )
    print(f"{'':10}{'tokens/s':>10}{'ms/step':>10}{'min ms':>10}{'peak MiB':>10}{'last loss':>12}")
    median = {}
    for name, each in found.items():
        times = [seconds for turn in each.seconds for seconds in turn]
        median[name] = statistics.median(times)
        cells = f"{tokens / median[name]:>10.0f}{median[name] * 1e3:>10.0f}{min(times) * 1e3:>10.0f}"
        print(f"{name:10}{cells}{each.peak_bytes / 2**20:>10.0f}{each.losses[-1]:>12.5f}")
    print(f"tokens/s, omnijax / torch: {median['torch'] / median['omnijax']:.3f}")
    print(f"peak memory, omnijax / torch: {found['omnijax'].peak_bytes / found['torch'].peak_bytes:.3f}")
    print(f"omnijax step over bare jit: {median['omnijax'] / median['bare jit'] - 1:+.1%}")


def environment() -> dict[str, str]:
    """A process that waits for its turn must not spin; the rest is as the caller set it, the same for all."""
    return os.environ | {"OMP_NUM_THREADS": str(THREADS), "OMP_WAIT_POLICY": "passive", "JAX_PLATFORMS": "cpu"}


def start(name: str, folder: str) -> subprocess.Popen:
    command = [sys.executable, sys.argv[0], name, folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


def ask(worker: subprocess.Popen, what: str) -> dict:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(what + "\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"a worker ended: {worker.args}")


def prepare(setup: Setup, folder: str) -> None:
    """Random weights as a Hugging Face folder."""
    import jax

    from models.families import family_named
    from omnijax import hf
    from omnijax.mesh import make_mesh
    from omnijax.parameters import build_model

    mesh = make_mesh(data=1, devices=jax.devices()[:1])
    config = family_named(setup.family, "benchmark").Config(**setup.sizes)
    hf.save(build_model(config, mesh, table_of(setup), seed=0), Path(folder) / "model")


def table_of(setup: Setup) -> Any:
    return importlib.import_module(f"sharding_rules.{setup.family}").table()


def batches() -> Callable[[int], "np.ndarray"]:
    """Rows of step n; some structure, so that the loss falls."""
    import numpy as np

    def rows(step: int) -> np.ndarray:
        random = np.random.default_rng(step)
        return (random.integers(0, 97, (ROWS, 1)) * np.arange(LENGTH) + random.integers(0, 9, (ROWS, LENGTH))) % 8192

    return rows


def serve(step: Callable[[int], float]) -> None:
    """Run `STEPS` steps whenever asked; report their times and losses."""
    number = 0
    for line in sys.stdin:
        if line.strip() == "quit":
            print(json.dumps({"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)
            return
        seconds, busy, losses = [], [], []
        for _ in range(STEPS):
            since, worked = time.perf_counter(), time.process_time()
            losses.append(step(number))
            seconds.append(time.perf_counter() - since)
            busy.append(time.process_time() - worked)
            number += 1
        print(json.dumps({"seconds": seconds, "busy": busy, "losses": losses}), flush=True)


def torch_worker(setup: Setup, folder: str) -> None:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(folder) / "model", dtype=torch.float32, **setup.torch_options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rows = batches()

    def step(number: int) -> float:
        tokens = torch.tensor(rows(number))
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    serve(step)


def omnijax_worker(setup: Setup, folder: str, *, bare: bool) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import models
    from omnijax import hf, parameters, sharding
    from omnijax.mesh import make_mesh
    from omnijax.step import init_state, put_batch, train_step

    mesh, table, rows = make_mesh(data=1, devices=jax.devices()[:1]), table_of(setup), batches()
    folder = Path(folder) / "model"
    model = hf.load(models.family_of(folder), folder, mesh=mesh, rules=table, remat=setup.remat, **setup.options)
    optimizer = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, weight_decay=0.1)
    graphdef, params = parameters.split(model)
    ones = np.ones((ROWS, LENGTH), np.int32)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    weights = (positions < LENGTH - 1).astype(np.float32)

    def arrays(number: int) -> dict[str, np.ndarray]:
        tokens = rows(number).astype(np.int32)
        constant = {"segment_ids": ones, "positions": positions, "weights": weights, "sources": 0 * ones}
        return {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1), **constant}

    with sharding.use(mesh, table):
        if bare:
            # What anyone would write: no table, no shardings, no report.
            @functools.partial(jax.jit, donate_argnums=(0, 1))
            def function(params, opt_state, batch):
                def loss(params):
                    objectives = parameters.merge(graphdef, params)(batch).objectives
                    return sum(total / weight for total, weight in objectives.values())

                value, gradients = jax.value_and_grad(loss)(params)
                updates, opt_state = optimizer.update(gradients, opt_state, params)
                return optax.apply_updates(params, updates), opt_state, value

            carry = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

            def step(number: int) -> float:
                *carry[:], value = function(*carry, put_batch(arrays(number), mesh, table))
                return float(value)
        else:
            state = [init_state(model, optimizer, mesh, table)]
            compiled = train_step(model, optimizer, mesh, table, dtype=jnp.dtype("float32"))

            def step(number: int) -> float:
                state[0], report = compiled(state[0], put_batch(arrays(number), mesh, table))
                return float(report["loss"])

        serve(step)
