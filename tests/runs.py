"""Whole training runs on little texts: their config; in this process, with what each step saw, or in their own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from omnijax import config, ginfile, step, steplog, train
from omnijax.metrics import read_metrics

HOME = Path(__file__).resolve().parent.parent

# A schedule that does not depend on Run.steps, so that a run cut into pieces is the run in one piece.
CONFIG = """
from __gin__ import dynamic_registration
from models import qwen3
from omnijax import config
from omnijax.data import sources
from omnijax.data import tokenizer
from sharding_rules import qwen3 as rules

config.Run.dir = "run"
config.Run.steps = 14
config.Train.model = @qwen3.Qwen3Config()
qwen3.Qwen3Config.vocab_size = 257
qwen3.Qwen3Config.hidden_size = 16
qwen3.Qwen3Config.intermediate_size = 32
qwen3.Qwen3Config.num_hidden_layers = 2
qwen3.Qwen3Config.num_attention_heads = 8
qwen3.Qwen3Config.num_key_value_heads = 4
qwen3.Qwen3Config.head_dim = 4
config.Train.rules = @rules.table()
config.Data.source = @sources.JsonLines()
sources.JsonLines.path = "texts.jsonl"
config.Data.tokenizer = @tokenizer.Bytes()
config.Data.length = 16
config.Data.rows = 8
config.Data.holdout = 0.2
config.Optimizer.learning_rate = 3e-3
config.Optimizer.schedule = "constant"
config.Compute.dtype = "float32"
"""


def write_config(folder: Path) -> Path:
    """`tiny.gin` and its forty texts, some empty, some of many rows; the paths in it are relative to `folder`."""
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcde "), size)) for size in (0, 3, 7, 15, 16, 17, 40, 90) * 5]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = folder / "tiny.gin"
    path.write_text(CONFIG)
    return path


@dataclass
class Seen:
    """What a run in this process did: metrics by step, row ids by step, the state before its first step and after."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    row_ids: dict[int, Any] = field(default_factory=dict)
    before: Any = None
    after: Any = None
    compilations: int = 0
    declared: Any = None
    misplaced: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]


def run(path: Path, *overrides: str, folder: str = "run") -> Seen:
    """Train in this process, in the folder of the config, on all eight devices; returns what was seen."""
    seen = Seen()

    class Log(steplog.StepLog):
        def record(self, number, rows, results):
            seen.row_ids[number] = rows.row_ids
            super().record(number, rows, results)

    class Step:
        def __init__(self, *arguments, **options):
            self.step: Any = step.train_step(*arguments, **options)
            seen.declared = step.state_shardings(*arguments)

        def __call__(self, state, batch):
            if seen.before is None:
                seen.before = jax.device_get(state)
                self.check(state)
            state, results = self.step(state, batch)
            self.check(state)
            seen.after, seen.compilations = state, self._cache_size()
            return state, results

        def _cache_size(self):
            return self.step._cache_size()

        def check(self, state):
            for (key, x), sharding in zip(
                jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(seen.declared), strict=True
            ):
                if not x.sharding.is_equivalent_to(sharding, x.ndim):
                    seen.misplaced.append(f"{jax.tree_util.keystr(key)}: {x.sharding} is not {sharding}")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        patch.setattr(train, "StepLog", Log)
        patch.setattr(train, "train_step", Step)
        loaded = ginfile.load(path, [f"Run.dir={folder}", *overrides], root=config.Train)
        train.train(loaded.value, loaded.text)
    seen.metrics = read_metrics(path.parent / folder.strip("'"))
    return seen


def start(folder: Path, *arguments: str, **environment: str | None) -> subprocess.Popen[str]:
    """`python ARGUMENTS` in `folder`, its output kept; a variable of the environment that is None is unset."""
    variables = {name: value for name, value in (os.environ | environment).items() if value is not None}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=variables, stdout=pipe, stderr=pipe, text=True
    )


def finish(process: subprocess.Popen[str], seconds: float = 120) -> subprocess.CompletedProcess[str]:
    """Wait for a process and return its output."""
    output, errors = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
