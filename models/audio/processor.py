"""The host side of audio towers: sounds to tokens and units of log-mel frames; numpy only.

A sound of any length is heard whole: it becomes as many units as it takes. Its tokens count on like text.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float32

from models.audio import mel
from omnijax.data.chat import MediaTokens
from omnijax.data.media.audio import AudioLimits, load_audio
from omnijax.data.media.opening import name_of
from omnijax.data.omni_packing import MediaItem, UnitShape
from omnijax.data.processing import Medium, check_tokens, unread, unwritten
from omnijax.data.sample import Part, RowId
from omnijax.data.spelling import spelling
from omnijax.data.tokenizer import Tokenizer
from omnijax.errors import BadRow, UserError
from omnijax.fields import ranged

TOKENS = {"audio_token": "audio_token_id", "start": "audio_start_token_id", "end": "audio_end_token_id"}
"""Fields that name a token, and where a model's config has its number."""


@dataclass(frozen=True)
class AudioProcessor(ABC):
    """What processors of sounds share; subclasses say how a sound is cut into units.

    num_mel_bins: as the tower has it
    audio:        what sounds may be
    audio_token:  what stands where a token of a sound does, between `start` and `end`, which "" leaves out
    merged:       how many of the tower's features a projector behind it makes one token of; the last token of a sound
                  may be of fewer, and of silence
    """

    num_mel_bins: int = ranged(128, at_least=1)
    audio: AudioLimits = field(default_factory=AudioLimits)
    audio_token: str = "<|AUDIO|>"
    start: str = "<|audio_bos|>"
    end: str = "<|audio_eos|>"
    merged: int = ranged(1, at_least=1)

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.audio.sample_rate != mel.RATE:
            raise UserError(
                f"AudioLimits.sample_rate = {self.audio.sample_rate} must be {mel.RATE}, the rate that {name} hears"
            )
        if self.unit_tokens % self.merged:
            raise UserError(f"{name}.merged = {self.merged} must divide the {self.unit_tokens} features of a unit")

    @property
    @abstractmethod
    def unit_frames(self) -> int:
        """Frames of a unit."""

    @property
    @abstractmethod
    def unit_tokens(self) -> int:
        """Features that the tower makes of a unit."""

    @abstractmethod
    def hear(self, sound: Float32[np.ndarray, " samples"]) -> mel.Clip:
        """The units of a sound; raises `UserError` for one too short to have a token."""

    @property
    def units(self) -> Mapping[str, UnitShape]:
        return {"audio": UnitShape((self.num_mel_bins, self.unit_frames))}

    @property
    def position(self) -> tuple[int, ...]:
        return ()

    @property
    def frame_rate(self) -> float:
        return 2.0  # of clips, which it does not read

    def settings(self) -> dict[str, Any]:
        return {"family": type(self).__name__, **asdict(self)}

    def check(self, tokenizer: Tokenizer, model: Any) -> None:
        """Raises `UserError` for a token that the tokenizer has not or the model's config numbers otherwise.

        A projector of a composed model must join as many features.
        """
        given = {name: theirs for name, theirs in TOKENS.items() if name == "audio_token" or getattr(self, name)}
        check_tokens(self, given, tokenizer, model)
        encoder = getattr(model, "encoders", {}).get("audio")
        joined = getattr(getattr(encoder, "projector", None), "merged", 1)
        if joined != self.merged:
            raise UserError(
                f"{type(self).__name__}.merged = {self.merged}, and the model joins {joined} features: set it to that"
            )

    def load(self, part: Part, row: RowId, tokenizer: Tokenizer) -> Medium:
        if part.media is None or part.kind != "audio":
            raise unread(part, row)
        if part.trained:
            raise unwritten(part, row)
        sound = load_audio(part.media, self.audio, row)
        try:
            clip = self.hear(sound.samples)
        except UserError as error:
            raise BadRow(row, f"{name_of(part.media, 'audio')}: {error}") from error
        spell, count = spelling(tokenizer), -(-clip.tokens // self.merged)
        before, after = ([spell.token_id(name)] if name else [] for name in (self.start, self.end))
        tokens = np.array([*before, *[spell.token_id(self.audio_token)] * count, *after], np.int32)
        slots = np.full(tokens.size, -1, np.int32)
        slots[len(before) : len(before) + count] = np.arange(count)  # every unit but the last is full
        media = MediaItem(
            features=clip.features,
            unit_positions=clip.unit_positions,
            unit_grid=clip.unit_grid,
            unit_valid=clip.unit_valid,
            slots=slots,
            encoded=clip.encoded // self.merged,
        )
        positions = np.arange(tokens.size, dtype=np.int32)
        return Medium("audio", MediaTokens(tokens, slots >= 0), positions, tokens.size, media, sound.notes)


@dataclass(frozen=True)
class WhisperProcessor(AudioProcessor):
    """Of Whisper: windows of 30 s, each with a spectrogram of its own; what is heard of silence has no token.

    window: frames of a window, twice the `max_source_positions` of the tower
    """

    num_mel_bins: int = ranged(80, at_least=1)
    window: int = ranged(3000, at_least=2)

    @property
    def unit_frames(self) -> int:
        return self.window

    @property
    def unit_tokens(self) -> int:
        return mel.halved(self.window)

    def hear(self, sound: Float32[np.ndarray, " samples"]) -> mel.Clip:
        return mel.whisper(sound, self.num_mel_bins, self.window)


@dataclass(frozen=True)
class Qwen2_5OmniAudioProcessor(AudioProcessor):
    """Of Qwen2.5-Omni: chunks of 2 s.

    n_window: as the tower has it, half of a chunk's frames
    """

    n_window: int = ranged(100, at_least=2)

    @property
    def unit_frames(self) -> int:
        return 2 * self.n_window

    @property
    def unit_tokens(self) -> int:
        return self.n_window // 2

    def hear(self, sound: Float32[np.ndarray, " samples"]) -> mel.Clip:
        return mel.qwen2_5_omni(sound, self.num_mel_bins, self.n_window)


@dataclass(frozen=True)
class Qwen3OmniAudioProcessor(AudioProcessor):
    """Of Qwen3-Omni: chunks of 1 s, of 13 tokens."""

    audio_token: str = "<|audio_pad|>"
    start: str = "<|audio_start|>"
    end: str = "<|audio_end|>"

    @property
    def unit_frames(self) -> int:
        return mel.QWEN3_CHUNK

    @property
    def unit_tokens(self) -> int:
        return mel.QWEN3_TOKENS

    def hear(self, sound: Float32[np.ndarray, " samples"]) -> mel.Clip:
        return mel.qwen3_omni(sound, self.num_mel_bins)
