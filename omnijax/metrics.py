"""Where a run's numbers go: JSON lines, TensorBoard, and a picture of the loss."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float
from tensorboardX import SummaryWriter

JSON_LINES = "metrics.jsonl"


class MetricsWriter:
    """Writes each step's numbers to `metrics.jsonl` and TensorBoard files in `directory`.

    `done` is the last step that is done: lines of later steps, from a run that died after its last checkpoint, are
    taken out of `metrics.jsonl`, so that a step has one line.
    """

    def __init__(self, directory: Path, done: int = 0):
        path = directory / JSON_LINES
        kept = [line for line in read_metrics(directory) if line["step"] <= done]
        rewritten = path.with_suffix(".rewritten")  # a crash or a full disk meanwhile costs no line
        rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(rewritten, path)
        self._lines = path.open("a", buffering=1)
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=done + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` of the finished optimizer step `step`, counted from 1."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._board.close()


def read_metrics(directory: Path) -> list[dict[str, float]]:
    """The lines of `metrics.jsonl`; a last line cut off by a crash is left out."""
    path = directory / JSON_LINES
    lines = path.read_text().splitlines() if path.is_file() else []
    complete = []
    for number, line in enumerate(lines, 1):
        try:
            complete.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines):
                raise
    return complete


def plot_loss(directory: Path, yardsticks: Mapping[str, float]) -> Path:
    """Draw `loss.png`: training and held-out loss by step, and horizontal `yardsticks`, in nats per token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_metrics(directory)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    kinds = ("loss", "heldout/loss", "heldout/text_loss", "heldout/chats_loss")
    for name, label in zip(kinds, ("training", "held out", "held-out text", "held-out chats"), strict=True):
        style = {"marker": "o"} if name.startswith("heldout") else {"linewidth": 0.8}
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    for name, value in yardsticks.items():
        axes.axhline(value, linestyle=":", color="gray")
        axes.annotate(name, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="gray")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    path = directory / "loss.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def plot_expert_load(directory: Path, load: Float[np.ndarray, "layers experts"]) -> Path:
    """Draw `expert_load.png`: how many times its even share each expert of each layer had."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers, experts = load.shape
    figure, axes = pyplot.subplots(figsize=(8, min(12, 2 + 0.25 * layers)), layout="constrained")
    image = axes.imshow(load * experts, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    figure.colorbar(image, label="load / even share (2 or more is darkest)")
    axes.set(xlabel="expert", ylabel="layer with experts")
    path = directory / "expert_load.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
