"""From the settings of the data to the rows that are trained on, and to those that are held out."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from omnijax.data.budgets import Budgets
from omnijax.data.chat_source import has_chat, processors_of
from omnijax.data.documents import Documents, Table, concatenate
from omnijax.data.evaluation import Evaluation, evaluation_rows
from omnijax.data.items import DocumentItems, Items, TextItems
from omnijax.data.mixture import deal_members, members_of
from omnijax.data.omni_packing import FirstFit, Item
from omnijax.data.packing import ConcatenateAndSplit, Packer, stack_rows
from omnijax.data.shards import Pipeline
from omnijax.errors import BadRow, UserError
from omnijax.units import UnitShape

if TYPE_CHECKING:
    from omnijax import config


def make_pipeline(
    data: "config.Data", tables: Sequence[Table[Any, Any]], seed: int, packer: Packer | None = None
) -> Pipeline:
    """How the rows of each source become rows of tokens: text alone is laid end to end, chats are packed whole.

    `packer` is that of the settings by default, and raises as `make_packer` does.
    """
    deal = deal_members(data.source, [len(table) for table in tables], data.shards or data.rows, seed)
    return Pipeline(make_items(data, tables), deal, packer or make_packer(data), data.rows, bad_row_limit(data))


def make_items(data: "config.Data", tables: Sequence[Table[Any, Any]]) -> tuple[Items, ...]:
    """What becomes of the rows of each source. Text among chats is split where it is longer than a row."""
    members = zip(members_of(data.source), tables, strict=True)
    items = [member.source.items(table, data.tokenizer, number) for number, (member, table) in enumerate(members)]
    mixed = has_chat(data.source)
    return tuple(DocumentItems(each) if mixed and isinstance(each, TextItems) else each for each in items)


def make_packer(data: "config.Data") -> Packer:
    """`FirstFit` where there are chats, `ConcatenateAndSplit` for text alone.

    Raises `UserError` where `Data.units` are not those of the modalities that the chats have.
    """
    shapes = unit_shapes(data)
    if unknown := sorted(set(data.units) - set(shapes)):
        raise UserError(
            f"Data.units has {unknown[0]!r}, and no Chat.processor makes such units "
            f"({', '.join(shapes) or 'there is none'}): leave it out, or give the processor"
        )
    for name, shape in shapes.items():
        units, whole = data.units.get(name, 0), shape.multiple
        if units % whole:
            raise UserError(
                f"Data.units has {units} for {name!r}, and {whole} at a time make a feature: give a multiple of "
                f"{whole}, such as {-(-units // whole) * whole}"
            )
    if missing := missing_units(data):
        raise UserError(
            f"Data.units = {dict(data.units)} has none for {missing[0]!r}, of which Chat.processor makes units: say "
            f"how many a row has; `python -m omnijax.inspect --data CONFIG` proposes some"
        )
    if has_chat(data.source):
        budgets = Budgets(data.length, {name: data.units[name] for name in shapes})
        position = max((each.position for each in processors_of(data.source)), key=len, default=())
        return FirstFit(budgets, shapes, position, look_ahead=data.look_ahead, over=data.over_length)
    return ConcatenateAndSplit(data.length)


def unit_shapes(data: "config.Data") -> dict[str, UnitShape]:
    """The units of each modality that the chats have; raises `UserError` where two processors disagree on them."""
    shapes: dict[str, UnitShape] = {}
    for processor in processors_of(data.source):
        for name, shape in processor.units.items():
            if shapes.setdefault(name, shape) != shape:
                raise UserError(
                    f"Chat.processor: two of them make {name} units, {shapes[name]} and {shape}: make them the same"
                )
    return dict(sorted(shapes.items()))


def check_units(data: "config.Data", parts: int) -> None:
    """Raises `UserError` where the units of a row, split into so many parts, would not be whole features in each."""
    for name, shape in unit_shapes(data).items():
        whole, units = shape.multiple * parts, data.units[name]
        if shape.multiple > 1 and units % whole:
            raise UserError(
                f"Data.units has {units} for {name!r}, which the mesh splits into {parts} parts, and {shape.multiple} "
                f"at a time make a feature: give a multiple of {whole}, such as {-(-units // whole) * whole}"
            )


def missing_units(data: "config.Data") -> list[str]:
    """The modalities that `Data.units` has no budget for."""
    return [name for name in unit_shapes(data) if name not in data.units]


def bad_row_limit(data: "config.Data") -> int | None:
    """How many bad rows may be passed by; None: the first one is raised."""
    return data.bad_row_limit if data.bad_rows == "skip" else None


def heldout_rows(data: "config.Data", tables: Sequence[Table[Any, Any]]) -> Evaluation:
    """The held-out rows of all sources, each once; with chats among them they have no bytes, and so no bits per byte.

    Raises `UserError` where nothing in them is predicted, and where too many are bad.
    """
    limit = bad_row_limit(data)
    if has_chat(data.source):
        return _packed_once(make_items(data, tables), make_packer(data), data.rows, limit)
    return evaluation_rows(concatenate(tables), data.tokenizer, data.length, rows=data.rows, bad_row_limit=limit)


def heldout_parts(data: "config.Data", tables: Sequence[Table[Any, Any]]) -> dict[str, Evaluation]:
    """The held-out rows, each once: those of "text" and of "chats" apart where there are both, else all as "".

    Raises as `heldout_rows` does.
    """
    texts = of_text(data, tables)
    if not texts or not has_chat(data.source):
        return {"": heldout_rows(data, tables)}
    limit, items = bad_row_limit(data), make_items(data, tables)
    text = evaluation_rows(concatenate(texts), data.tokenizer, data.length, rows=data.rows, bad_row_limit=limit)
    chats = [each for each in items if not isinstance(each, DocumentItems)]
    return {"text": text, "chats": _packed_once(chats, make_packer(data), data.rows, limit)}


def of_text(data: "config.Data", tables: Sequence[Table[Any, Any]]) -> list[Documents]:
    """Those of the tables that are texts, and not chats."""
    return [table for member, table in zip(members_of(data.source), tables, strict=True) if not has_chat(member.source)]


def _packed_once(sources: Sequence[Items], packer: Packer, rows: int, limit: int | None) -> Evaluation:
    places = [(items, index) for items in sources for index in range(len(items))]
    bad: dict[int, BadRow] = {}

    @cache  # held in memory, as the rows made of them are
    def read(number: int) -> Item | None:
        if number == len(places):
            return None
        items, index = places[number]
        try:
            return items[index]
        except BadRow as error:
            bad[number] = error
            if limit is None or len(bad) > limit:
                raise
            return Item(np.zeros(0, np.int32), np.zeros(0, np.bool_), str(error.row))

    packed, state = [], dict[str, Any]()
    while True:
        row, state = packer.next_row(read, state)
        if not row.row_ids:
            break
        packed.append(row)
    if not any(row.arrays["weights"].any() for row in packed):
        raise UserError(f"none of the {len(places)} held-out rows has a label that fits: hold out more (Data.holdout)")
    packed += [row] * (-len(packed) % rows)  # the last one, which is all padding
    steps = tuple(stack_rows(packed[first : first + rows]) for first in range(0, len(packed), rows))
    counts = state["counts"]
    long = counts["dropped"] + counts["cut"]
    return Evaluation(steps, 0, counts["empty"] - len(bad), tuple(bad.values()), long)
