"""Show what a config trains on: `python -m omnijax.inspect --data CONFIG.gin [Name.field=value ...]`.

Samples of each source, the rows of the first step as text and as a picture, and budgets for rows like these.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Shaped

from omnijax import config, flops, parameters
from omnijax.data.budgets import Budgets, propose_budgets
from omnijax.data.chat_source import has_chat
from omnijax.data.items import Items
from omnijax.data.mixture import open_members
from omnijax.data.omni_packing import FirstFit, Item, batch_fields, measure
from omnijax.data.packing import Rows
from omnijax.data.pipeline import make_pipeline, missing_units, unit_shapes
from omnijax.data.shards import Pipeline
from omnijax.data.spelling import spelling
from omnijax.data.stream import ExactStream
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow

SAMPLES = 3  # of each source
ROWS = 4  # that are printed
PICTURED = 32  # rows of the picture
MOST, MOST_MEDIA = 10_000, 1_000  # rows that budgets are proposed from; where media must be decoded for it
BEGIN, END = "⟦", "⟧"  # around what is trained


def show(settings: config.Train) -> Iterator[str]:
    """The lines of the report; the picture goes into the run folder. Raises what reading the rows raises."""
    data = settings.data
    tables, _ = open_members(data.source, data.holdout)
    missing = missing_units(data)  # this is what the command is asked for then
    pipeline = make_pipeline(data, tables, settings.run.seed, FirstFit(Budgets(data.length)) if missing else None)
    yield f"{BEGIN}trained{END} tokens are what the model learns to write\n"
    for member, name in enumerate(pipeline.deal.names):
        yield from _samples(pipeline, member, name, data.tokenizer)
    if missing:
        yield f"no rows yet, as Data.units has no budget for {', '.join(missing)}: take one from below\n"
    else:
        stream = ExactStream(pipeline)
        rows = next(stream)
        stream.close()
        yield from _rows_text(rows, data.tokenizer)
        folder = Path(settings.run.dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        yield f"picture of the rows: {plot_rows(rows.arrays, folder / 'packed_rows.png')}\n"
    model = parameters.abstract_model(settings.model, **settings.model_options())
    cost = flops.forward_cost(model, settings.model.attention_costs())
    yield from _budgets(pipeline, data, {"tokens": 3 * cost.per_token} | {n: 3 * c for n, c in cost.per_unit.items()})


def marked(ids: Int32[np.ndarray, "n"], trained: Bool[np.ndarray, "n"], tokenizer: Tokenizer) -> str:
    """The text of tokens, with what is trained in brackets and special tokens spelled out, many of one as "x 196"."""
    names = {token: name for name, token in spelling(tokenizer).tokens.items()}
    names.setdefault(tokenizer.eos_id, "<end of document>")
    text = ""
    for label, run in groupby(zip(ids.tolist(), trained.tolist(), strict=True), key=lambda pair: pair[1]):
        inner = ""
        for named, same in groupby((token for token, _ in run), key=lambda token: token in names):
            tokens = list(same)
            inner += _spelled([names[token] for token in tokens]) if named else tokenizer.decode(tokens)
        text += f"{BEGIN}{inner}{END}" if label else inner
    return text


def _spelled(names: Sequence[str]) -> str:
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return "".join(name * count if count < 4 else f"{name}x {count} " for name, count in runs)


def plot_rows(arrays: dict[str, Shaped[np.ndarray, "rows S"]], path: Path) -> Path:
    """Draw rows: a colour for each document, darker where tokens are trained, white where there is padding."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    segments = arrays["segment_ids"][:PICTURED]
    trained = _trained(arrays)[:PICTURED]
    colours = matplotlib.colormaps["tab10"](np.maximum(segments - 1, 0) % 10)[..., :3]
    light = np.where(trained, 0.0, 0.65)[..., None]
    picture = np.where(segments[..., None] > 0, colours + (1 - colours) * light, 1.0)
    figure, axes = pyplot.subplots(figsize=(12, 1.5 + 0.25 * len(segments)), layout="constrained")
    axes.imshow(picture, aspect="auto", interpolation="nearest")
    title = "a colour for each document, darker where tokens are trained, white where there is padding"
    axes.set(xlabel="token", ylabel="row", title=title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _samples(pipeline: Pipeline, member: int, name: str, tokenizer: Tokenizer) -> Iterator[str]:
    items = pipeline.items[member]
    yield f"== {name}: {len(items):,} rows; the first {min(SAMPLES, len(items))} in the order of training"
    for _, item in zip(range(SAMPLES), _items(items, pipeline, member), strict=False):
        if isinstance(item, BadRow):
            yield f"-- bad row {item}\n"
            continue
        places = np.arange(item.tokens.size)
        trained = getattr(item, "trained", places >= 0) & (places > 0)  # nothing predicts the first
        media = ", ".join(f"{each.encoded} of {kind}" for kind, each in getattr(item, "media", {}).items())
        yield f"-- {item.row_id}: {item.tokens.size} tokens, {trained.sum()} trained; media slots: {media or 'none'}"
        yield f"{marked(item.tokens, trained, tokenizer)}\n"


def _items(items: Items, pipeline: Pipeline, member: int) -> Iterator[Any]:
    """The items of one pass over a member, in its order; a `BadRow` in place of one that cannot be used."""
    order = pipeline.deal.orders()[member]
    for place in range(len(items)):
        try:
            yield items[order[place]]
        except BadRow as error:
            yield error


def _rows_text(rows: Rows, tokenizer: Tokenizer) -> Iterator[str]:
    arrays, trained = rows.arrays, _trained(rows.arrays)
    found = measure(arrays)
    yield (
        f"== the first step: {len(rows.row_ids)} rows of {arrays['tokens'].shape[1]} tokens; "
        f"{found['fill/tokens']:.1%} filled, {trained.mean():.1%} trained; "
        f"{found['pairs/tokens']:,.0f} pairs of attention a row, {found['pairs_max/tokens']:,.0f} at most"
    )
    for kind, media in batch_fields(arrays)["media"].items():
        units = media["unit_segments"]
        yield (
            f"   {kind}: {units.shape[1]} units a row; {found[f'fill/{kind}']:.1%} filled, "
            f"{found[f'pairs/{kind}']:,.0f} pairs of attention a row, {found[f'pairs_max/{kind}']:,.0f} at most"
        )
    slots = batch_fields(arrays)["slots"]
    for number, row_ids in enumerate(rows.row_ids[:ROWS]):
        segments = arrays["segment_ids"][number]
        counts = ", ".join(f"{(each[number] >= 0).sum()} of {kind}" for kind, each in slots.items())
        yield f"-- row {number}: {(segments > 0).sum()} of {segments.size} tokens; media slots: {counts or 'none'}"
        for segment, row_id in enumerate(row_ids, 1):
            here = segments == segment
            first, last = np.flatnonzero(here)[[0, -1]]
            yield f"   segment {segment}, tokens {first}..{last}, {row_id}:"
            yield f"   {marked(arrays['tokens'][number][here], trained[number][here], tokenizer)}"
        yield f"   padding: {(segments == 0).sum()} tokens\n"


def _trained(arrays: dict[str, Shaped[np.ndarray, "rows S"]]) -> Bool[np.ndarray, "rows S"]:
    """Which tokens are a target: those after a place with a weight, in the same document."""
    trained = np.zeros(arrays["tokens"].shape, np.bool_)
    same = arrays["segment_ids"][:, 1:] == arrays["segment_ids"][:, :-1]
    trained[:, 1:] = (arrays["weights"][:, :-1] > 0) & same
    return trained


def _budgets(pipeline: Pipeline, data: config.Data, costs_of: Mapping[str, float]) -> Iterator[str]:
    """A table of the lengths half, as and twice that of the config, tried on rows by the shares of their sources.

    `costs_of` are the operations of a token and of a unit of each modality. Of the budgets of units, the two best of
    each length are shown.
    """
    costs, bad, shapes = list[dict[str, int]](), Counter[str](), unit_shapes(data)
    most = MOST_MEDIA if shapes else MOST
    for member, share in enumerate(pipeline.deal.shares(0)):
        items = pipeline.items[member]
        for _, item in zip(range(round(most * share)), _items(items, pipeline, member), strict=False):
            if isinstance(item, BadRow):
                bad[item.reason] += 1
            elif item.tokens.size:
                costs.append(item.costs() if isinstance(item, Item) else {"tokens": item.tokens.size})
    yield f"== budgets for {len(costs):,} rows, {sum(bad.values())} bad ones left out"
    for reason, count in bad.most_common(3):
        yield f"   {count} x {reason}"
    lengths = [max(data.length // 2, 2), data.length, 2 * data.length]
    look_ahead, text = data.look_ahead, not has_chat(data.source)
    table = propose_budgets(
        costs,
        lengths,
        {name: costs_of.get(name, 0.0) for name in ("tokens", *shapes)},
        look_ahead=look_ahead,
        split_text=text,
        multiple=math.lcm(8, *(shape.multiple for shape in shapes.values())),
    )
    shown = Counter[int]()
    for each in table:
        length, units = each.budgets.tokens, dict(each.budgets.units)
        shown[length] += 1
        if shown[length] > 2:
            continue
        fill = ", ".join(f"{name} {share:.2%}" if units else f"{share:.2%}" for name, share in each.fill.items())
        yield (
            f"   Data.length = {length}{f', Data.units = {units}' if units else ''}: {fill} filled, {each.waste:.2%} "
            f"of the operations wasted ({sum(each.wasted.values()):.3g} a row, attention aside); {each.lost} rows too "
            f"long"
        )
