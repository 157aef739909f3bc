"""From samples with media to items: what a model's family does with a medium, and how media and text become one item.

A family's host side is a `Processor`: it turns one medium into its tokens, their positions and its units, all from one
record, so that they cannot disagree. Everything else is here and the same for all families. No jax: workers run this.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from omnijax.data.chat import MediaTokens, Rendered, render
from omnijax.data.omni_packing import OF_UNITS, Item, MediaItem
from omnijax.data.sample import Part, RowId, Sample
from omnijax.data.spelling import spelling
from omnijax.data.templates import Template
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow, UserError
from omnijax.units import UnitShape


@dataclass(frozen=True, eq=False)
class Medium:
    """One medium made ready.

    modality:  whose units it has
    tokens:    what stands for it in the text, n of them
    positions: of these tokens, counted from the first
    advance:   the position of a token that follows, counted alike
    media:     its units, with slots of these tokens
    notes:     what was done to it beside decoding
    """

    modality: str
    tokens: MediaTokens
    positions: Int32[np.ndarray, "n *axes"]
    advance: int
    media: MediaItem
    notes: tuple[str, ...] = ()


@runtime_checkable
class Processor(Protocol):
    """A family's host side: a frozen dataclass that pickles small, written in NumPy."""

    @property
    def units(self) -> Mapping[str, UnitShape]:
        """The modalities it makes units of, each with a budget of its own."""
        ...

    @property
    def position(self) -> tuple[int, ...]:
        """Shape of a token's position: () or (3,)."""
        ...

    @property
    def frame_rate(self) -> float:
        """Pictures a second of clips that rows give as lists of pictures."""
        ...

    def settings(self) -> dict[str, Any]:
        """All that decides what becomes of a medium, as JSON."""
        ...

    def check(self, tokenizer: Tokenizer, model: Any) -> None:
        """Raises `UserError` where it does not fit the tokenizer or the config of the model."""
        ...

    def load(self, part: Part, row: RowId, tokenizer: Tokenizer) -> Medium:
        """Decode a media part and make it ready; raises `BadRow` where that is not possible."""
        ...


def render_media(
    sample: Sample, template: Template, tokenizer: Tokenizer, processor: Processor | None
) -> tuple[Rendered, list[Medium]]:
    """The tokens of a sample and its media in their order, each decoded once; raises what `render` and `load` do."""
    media: list[Medium] = []
    if processor is None:
        return render(sample, template, tokenizer), media

    def slots(part: Part) -> MediaTokens:
        media.append(processor.load(part, sample.row, tokenizer))
        return media[-1].tokens

    return render(sample, template, tokenizer, slots), media


def check_tokens(processor: Any, fields: Mapping[str, str], tokenizer: Tokenizer, model: Any) -> None:
    """Raises `UserError` for a token that the tokenizer has not, or that the model's config gives another number.

    `fields` of the processor name a token; their values are the names of the config's fields, which it may lack.
    """
    name, tokens = type(processor).__name__, spelling(tokenizer).tokens
    for field, theirs in fields.items():
        token = getattr(processor, field)
        if token not in tokens:
            raise UserError(
                f"{name}.{field} = {token!r} is no token of Data.tokenizer: give the model's own tokenizer, or name "
                f"the token that it has for this"
            )
        if (wanted := getattr(model, theirs, tokens[token])) != tokens[token]:
            raise UserError(
                f"{name}.{field} = {token!r} is number {tokens[token]} of Data.tokenizer, and the model's {theirs} is "
                f"{wanted}: give the model's own tokenizer, or set {theirs}"
            )


def unread(part: Part, row: RowId) -> BadRow:
    """What is raised for a part that a processor does not read."""
    return BadRow(row, f"message {part.message} has the part {part.kind!r}, which the model does not read: drop it")


def unwritten(part: Part, row: RowId) -> BadRow:
    """What is raised for a part that the model would have to write."""
    return BadRow(row, f"message {part.message} answers with the part {part.kind!r}, and the model writes only text")


def make_item(rendered: Rendered, media: Sequence[Medium], row: RowId, source: int, *, document: bool) -> Item:
    """A rendered sample and its media, in the order of `rendered.media`, as one item.

    A `document` is plain text, which the packer may split; it has no messages to be cut between.
    """
    starts = [first for first, _ in rendered.media]
    return Item(
        rendered.tokens,
        rendered.trained,
        str(row),
        source,
        _positions(rendered.tokens.size, starts, media) if media else None,
        _media(rendered.tokens.size, starts, media),
        ends=() if document else rendered.ends,
        notes=tuple(note for medium in media for note in medium.notes),
        document=document,
    )


def _positions(length: int, starts: Sequence[int], media: Sequence[Medium]) -> Int32[np.ndarray, "n *axes"]:
    """Text counts on one by one, over all axes alike, from where the medium before it ends.

    A medium whose tokens have one position each is like text where others have three.
    """
    axes = max((medium.positions.shape[1:] for medium in media), key=len)
    positions = np.empty((length, *axes), np.int32)
    place, position = 0, 0  # of the next token, and its position
    for first, medium in (*zip(starts, media, strict=True), (length, None)):
        text = np.arange(position, position + first - place)
        positions[place:first] = text.reshape(-1, *[1] * len(axes))
        place, position = first, position + text.size
        if medium is not None:
            place += len(medium.positions)
            own = medium.positions
            positions[first:place] = position + own.reshape(len(own), *(own.shape[1:] or [1] * len(axes)))
            position += medium.advance
    return positions


def _media(length: int, starts: Sequence[int], media: Sequence[Medium]) -> dict[str, MediaItem]:
    """Units of each modality laid end to end, and where their features stand."""
    parts: dict[str, list[MediaItem]] = defaultdict(list)
    slots: dict[str, np.ndarray] = {}
    encoded: dict[str, int] = defaultdict(int)
    for first, medium in zip(starts, media, strict=True):
        name, own = medium.modality, medium.media
        row = slots.setdefault(name, np.full(length, -1, np.int32))
        row[first : first + own.slots.size] = np.where(own.slots < 0, -1, own.slots + encoded[name])
        encoded[name] += own.encoded
        parts[name].append(own)
    arrays = {
        name: {field: np.concatenate([getattr(each, field) for each in own]) for field in OF_UNITS}
        for name, own in parts.items()
    }
    return {name: MediaItem(**arrays[name], slots=slots[name], encoded=encoded[name]) for name in parts}
