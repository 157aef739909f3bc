"""Processes of which only some have a modality: none waits for another, and all give what one process gives."""

import json
import socket

import numpy as np

from tests import runs


def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def cluster(processes: int) -> list[dict[str, float]]:
    """Five steps on two devices, all told."""
    flags = f"--xla_force_host_platform_device_count={2 // processes} --xla_backend_optimization_level=0"
    at = port()
    started = [
        runs.start(runs.HOME, "-m", "tests.cluster", str(rank), str(processes), str(at), XLA_FLAGS=flags)
        for rank in range(processes)
    ]
    done = [runs.finish(process, seconds=300) for process in started]
    assert [each.returncode for each in done] == [0] * processes, done[-1].stderr[-3000:]
    return json.loads(done[0].stdout.splitlines()[-1])


def test_a_modality_on_one_of_two_processes_only():
    one, two = cluster(1), cluster(2)
    assert len(two) == 5
    for alone, together in zip(one, two, strict=True):
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(together[name], alone[name], rtol=1e-5)
