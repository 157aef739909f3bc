"""A picture of held-out pictures, with what the model says of each."""

import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from omnijax.answers import Answer
from omnijax.data.chat_source import ChatItems
from omnijax.data.items import Items
from omnijax.data.media.image import ImageLimits, load_image

MOST = 40  # that are drawn


def plot_answers(folder: Path, items: Sequence[Items], answers: Sequence[Answer]) -> Path | None:
    """Draw `answers.png`: the first picture of chats that have one, wrong answers first; None where none has any."""
    by_row = {each.row_id.rpartition("[")[0]: each for each in answers}
    found = [(each, pixels) for row_id, pixels in _first_pictures(items, set(by_row)) for each in [by_row[row_id]]]
    if not found:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = sorted(found, key=lambda pair: pair[0].right)[:MOST]
    columns = min(10, len(shown))
    size = columns, math.ceil(len(shown) / columns)
    figure, grid = pyplot.subplots(
        size[1], columns, figsize=(1.2 * size[0], 1.6 * size[1]), layout="constrained", squeeze=False
    )
    for axes in grid.flat:
        axes.axis("off")
    for axes, (each, pixels) in zip(grid.flat, shown, strict=False):
        axes.imshow(pixels)
        title = each.said if each.right else f"{each.said}\n({each.wanted})"
        colour = "black" if each.right else "crimson"
        axes.set_title(title[:60], fontsize=8, color=colour, parse_math=False)
    path = folder / "answers.png"
    with warnings.catch_warnings():  # a model says what it likes, also what no font here has
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _first_pictures(items: Sequence[Items], wanted: set[str]) -> Iterator[tuple[str, UInt8[np.ndarray, "H W 3"]]]:
    for chats in items:
        if isinstance(chats, ChatItems):
            for index in range(len(chats)):
                if str(row_id := chats.rows.row_id(index)) in wanted:
                    pictures = [part.media for part in chats.sample(index).parts if part.kind == "image"]
                    if pictures and pictures[0] is not None:
                        yield str(row_id), load_image(pictures[0], ImageLimits(), row_id).pixels
