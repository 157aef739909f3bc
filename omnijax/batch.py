"""What a model eats: packed rows with static shapes."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int, Num


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Media:
    """Packed units of one modality. A unit has one fixed shape: a patch, an audio chunk, a whole image.

    features:       [B, N, *unit]
    unit_segments:  [B, N] int32, the document a unit belongs to, 0 for padding
    unit_positions: [B, N, ...] int32, place of the unit in its item
    unit_grid:      [B, N, 3] int32, (time, height, width) of the item
    unit_valid:     [B, N] int32, elements of the unit that are not padding
    """

    features: Float[Array, "B N *unit"]
    unit_segments: Int[Array, "B N"]
    unit_positions: Int[Array, "B N ..."]
    unit_grid: Int[Array, "B N 3"]
    unit_valid: Int[Array, "B N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """B packed rows of S tokens; every array leads with the row axis.

    tokens:      [B, S] ids; media positions hold the family's placeholder id
    segment_ids: [B, S] 0 is padding, 1.. the documents of the row, each a contiguous run
    positions:   [B, S] or [B, S, 3], restarting in every document; float32 where time is not counted in whole numbers
    targets:     [B, S] the id that follows
    weights:     [B, S] loss weight of predicting `targets`; 0 is not trained
    sources:     [B, S] which data source a token came from
    media:       packed units by modality
    slots:       by modality, [B, S] which encoded feature stands at this token, -1 for none
    """

    tokens: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    positions: Num[Array, "B S *axes"]
    targets: Int[Array, "B S"]
    weights: Float[Array, "B S"]
    sources: Int[Array, "B S"]
    media: dict[str, Media] = field(default_factory=dict)
    slots: dict[str, Int[Array, "B S"]] = field(default_factory=dict)
