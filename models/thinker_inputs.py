"""The arrays of a transformers processor of Qwen's omni families as media, slots and positions; numpy only."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, Num

from models.audio import mel
from models.thinker_positions import AUDIO, IMAGE, VIDEO, thinker_positions
from models.vision import hf_inputs
from models.vision.hf_inputs import Pictures, Units, stacked
from omnijax.errors import UserError

MEDIA_INPUTS = (
    *(name for names in hf_inputs.KINDS.values() for name in names),
    "video_second_per_grid",
    "input_features",
    "feature_attention_mask",
    "use_audio_in_video",
)


def read_media(
    config: Any, inputs: Mapping[str, Any], tokens: Int[np.ndarray, "B S"], segments: Int[np.ndarray, "B S"]
) -> tuple[Num[np.ndarray, "B S 3"], dict[str, Units], dict[str, Int[np.ndarray, "B S"]]]:
    """(positions, fields of each `Media`, slots); media stand in the order of their placeholder tokens.

    Whether a clip has its sound in it, its tokens say. Raises `UserError` where media and placeholder tokens do not fit
    each other.
    """
    merge = config.vision_config.spatial_merge_size
    pictures, sounds = Pictures(inputs, config.vision_config), _sounds(inputs, config)
    media = {
        IMAGE: iter(pictures.grids["image"]),
        VIDEO: iter(_with_seconds(pictures.grids["video"], inputs.get("video_second_per_grid"))),
        AUDIO: iter([clip.tokens for clip in sounds]),
    }
    left = iter(sounds)
    positions = np.zeros((*tokens.shape, 3), np.float32)
    slots = {name: np.full(tokens.shape, -1, np.int32) for name in ("image", "audio")}
    rows: dict[str, list[list[Units]]] = {"image": [], "audio": []}
    for row in range(len(tokens)):
        encoded = {"image": 0, "audio": 0}
        for each in rows.values():
            each.append([])
        for segment in range(1, segments[row].max() + 1):
            (places,) = np.nonzero(segments[row] == segment)
            document = tokens[row, places]
            kinds = np.zeros(len(document), int)
            for kind, token in config.placeholders().items():
                kinds[document == token] = kind
            begins = document == config.audio_start_token_id
            positions[row, places], found = thinker_positions(kinds, begins, media, config.timing, merge)
            for placed in found:
                name = "audio" if placed.kind == AUDIO else "image"
                if placed.kind == AUDIO:
                    clip = next(left)
                    units, order, count = _units(clip, segment), np.arange(clip.tokens), clip.encoded
                else:
                    units, order = pictures.take("image" if placed.kind == IMAGE else "video", placed.item, segment)
                    count = len(order)
                slots[name][row, places[placed.places]] = encoded[name] + order
                encoded[name] += count
                rows[name][row].append(units)
    pictures.check_all_taken()
    if unheard := len(list(left)):
        raise UserError(f"to_batch: input_features has {unheard} sounds more than input_ids has placeholders for")
    audio = config.audio_config
    silence = _units(
        mel.units(np.zeros((audio.num_mel_bins, 0), np.float32), 0, audio.unit_frames, encoded=0, tokens=0), 0
    )
    return (
        positions if config.timing.chunk is None else positions.astype(np.int32),
        {
            "image": stacked(rows["image"], pictures.empty, least=merge**2),
            "audio": stacked(rows["audio"], silence, least=1),
        },
        slots,
    )


def _with_seconds(grids: list[Any], seconds: Any) -> list[tuple[Any, float]]:
    if seconds is None and grids:
        raise UserError("to_batch: clips need video_second_per_grid, the seconds from one of their frames to the next")
    between = [] if seconds is None else [float(each) for each in np.asarray(seconds, np.float32).reshape(-1)]
    if len(between) != len(grids):
        raise UserError(f"to_batch: video_second_per_grid has {len(between)} numbers for {len(grids)} clips")
    return list(zip(grids, between, strict=True))


def _sounds(inputs: Mapping[str, Any], config: Any) -> list[mel.Clip]:
    """The frames of each sound that its mask calls real, as units of the tower."""
    given, audio = inputs.get("input_features"), config.audio_config
    if given is None:
        return []
    features = np.asarray(given, np.float32)
    mask = np.asarray(inputs.get("feature_attention_mask"))
    if features.ndim != 3 or features.shape[1] != audio.num_mel_bins or mask.shape != features[:, 0].shape:
        raise UserError(
            f"to_batch: input_features is {features.shape} and feature_attention_mask {mask.shape}; they must be "
            f"[sounds, {audio.num_mel_bins}, frames] and [sounds, frames]"
        )
    clips = []
    for frames, real in zip(features, mask.astype(bool), strict=True):
        count = int(real.sum())
        if not count or not audio.tokens(count):
            raise UserError(f"to_batch: a sound has {count} frames, too few for a token: leave it out")
        clips.append(
            mel.units(frames[:, real], count, audio.unit_frames, encoded=audio.unit_tokens, tokens=audio.tokens(count))
        )
    return clips


def _units(clip: mel.Clip, segment: int) -> Units:
    return {
        "features": clip.features,
        "unit_segments": np.full(len(clip.features), segment, np.int32),
        "unit_positions": clip.unit_positions,
        "unit_grid": clip.unit_grid,
        "unit_valid": clip.unit_valid,
    }
