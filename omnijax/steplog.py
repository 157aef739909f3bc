"""The running record of a training run: progress, metrics files, speed, and the stop on a loss that is not finite."""

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import optax
import tqdm
from jaxtyping import Array

from omnijax import flops
from omnijax.data.omni_packing import batch_fields
from omnijax.data.packing import Rows
from omnijax.metrics import MetricsWriter

# One line says all: on a terminal behind a bar that is drawn anew, in a log file now and then.
LINE = "step {n_fmt}/{total_fmt}{postfix}, {remaining} to go"
BAR = "{percentage:3.0f}% |{bar}| " + LINE
SECONDS_BETWEEN_LINES = 10.0


class StepLog:
    """Takes each step's results and writes them one step late, so that the host never waits for the step it started.

    A step's speed is the time from the step before being taken to its own; the first step, which compiles, and the
    first after a pause have none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        done: int,
        last: int,
        learning_rate: optax.Schedule,
        cost: flops.Cost,
        peak: float | None,
        sources: Sequence[str] = (),
    ):
        self._sources = sources  # names of the members of a mixture
        self.folder, self._learning_rate, self._cost, self._peak = folder, learning_rate, cost, peak
        self._leads = jax.process_index() == 0
        self._writer = MetricsWriter(folder, done=done) if self._leads else None
        self._done, self._total, self._shown = done, last, -math.inf
        self._first_done = math.nan  # when the first step, which compiles, was done
        self._lines = self._leads and not sys.stderr.isatty()
        self._bar = tqdm.tqdm(
            total=last,
            initial=done,
            bar_format=BAR,
            postfix="compiling",
            dynamic_ncols=True,
            disable=self._lines or not self._leads or done >= last,
        )
        self._pending: tuple[int, Rows, Mapping[str, Array], float | None] | None = None
        self._since: float | None = None
        self.last: dict[str, float] = {}
        self.expert_load: np.ndarray | None = None  # [layers, experts], the share of choices each had in the last step

    def record(self, number: int, rows: Rows, results: Mapping[str, Array]) -> None:
        """Take the results of step `number`, still being computed, and write those of the step before."""
        self.flush()
        now, since = time.perf_counter(), self._since
        self._pending, self._since = (number, rows, results, since and now - since), now

    def flush(self, more: Mapping[str, float] | None = None) -> None:
        """Wait for the step taken last and write it and `more` values of it. Exits with code 1 if one is not finite."""
        if self._pending is None:
            return
        number, rows, results, seconds = self._pending
        self._pending = None
        found = jax.device_get(dict(results)) | (more or {})
        if (load := found.pop("router_load", None)) is not None:
            self.expert_load = load
            # 0 where every expert has the same load, 1 where some layer's busiest has twice its share.
            found["router_max_violation"] = load.max() * load.shape[1] - 1
        losses = found.pop("cross_entropy_by_source", None)
        values = {name: float(value) for name, value in found.items()}
        if losses is not None:
            arrays = rows.arrays
            tokens = np.bincount(arrays["sources"].ravel(), arrays["weights"].ravel(), minlength=len(self._sources))
            named = zip(self._sources, losses, tokens, strict=True)
            values |= {f"loss/{name}": float(loss) for name, loss, count in named if count}
        self._check_finite(number, rows, values)
        values |= {"learning_rate": float(self._learning_rate(number - 1))} | self._speed(rows, seconds)
        self.last |= values
        if self._writer is not None:
            self._writer.write(number, values)
        self._show(number)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self._leads:
            self._bar.write(text)

    def pause(self) -> None:
        """Leave the time until the next step out of the speed: evaluation, a checkpoint."""
        self._since = None

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()

    def _show(self, number: int) -> None:
        speed = self.last.get("tokens_per_second")  # of an earlier step where this one has none
        text = f"loss {self.last['loss']:.3f}" + (f", {speed:,.0f} tokens/s" if speed else "")
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update()
        now = time.perf_counter()
        if number == self._done + 1:
            self._first_done = now
        if self._lines and (number == self._total or now - self._shown >= SECONDS_BETWEEN_LINES):
            self._shown = now
            timed = number - self._done - 1
            seconds = (now - self._first_done) / timed * (self._total - number) if timed else None
            remaining = "?" if seconds is None else tqdm.tqdm.format_interval(seconds)
            line = LINE.format(n_fmt=number, total_fmt=self._total, postfix=f", {text}", remaining=remaining)
            print(line, file=sys.stderr)

    def _speed(self, rows: Rows, seconds: float | None) -> dict[str, float]:
        if seconds is None:
            return {}
        segments = rows.arrays["segment_ids"]
        media = {name: each["unit_segments"] for name, each in batch_fields(rows.arrays)["media"].items()}
        per_device = flops.training_flops(self._cost, segments, media) / seconds / jax.device_count()
        speed = {
            "step_seconds": seconds,
            "tokens_per_second": float((segments > 0).sum()) / seconds,
            "tflops_per_device": per_device / 1e12,
        }
        return speed if self._peak is None else speed | {"mfu": per_device / self._peak}

    def _check_finite(self, number: int, rows: Rows, values: Mapping[str, float]) -> None:
        bad = {name: value for name, value in values.items() if not math.isfinite(value)}
        if not bad:
            return
        path = self.folder / "nonfinite.json"
        if self._leads:
            found = {"step": number, "values": {name: str(value) for name, value in bad.items()}, "rows": rows.row_ids}
            path.write_text(json.dumps(found, indent=1))
        self.close()
        names = ", ".join(f"{name} is {value}" for name, value in bad.items())
        raise SystemExit(f"stopped: {names} at step {number}; the rows of its batch are in {path}")
