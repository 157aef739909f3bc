"""Eight virtual CPU devices, shapes checked at every call, and compiled programs kept between runs."""

import collections
import os
import tempfile
from pathlib import Path

# Level 0 halves the compile time of these small programs; it changes code generation, not the partitioned program.
# Eight devices on two busy cores may wait long for each other: an abort after 40 s would blame the wrong test.
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=300"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "omnijax-test-cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import pytest
from jaxtyping import install_import_hook

install_import_hook(["omnijax.nn", "omnijax.objectives", "models"], "beartype.beartype")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    import jax

    if jax.default_backend() != "gpu":
        terminalreporter.write_line("tests marked gpu did not run: there is no GPU here")
    reasons = collections.Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} tests did not run: {reason}")
