"""Spoken prompts and their transcripts as rows: an audio part, and what is said as the assistant's answer."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

QUESTION = "What is said?"
LONGEST = 30.0  # seconds, the window of Whisper
HELD_OUT = 0.15


@dataclass(frozen=True)
class Clip:
    """A recording, and the words in it."""

    name: str
    text: str
    seconds: float


def transcripts(listing: str) -> dict[str, str]:
    """The lines `name: text` of a list of prompts; lines that begin with `;` are comments."""
    lines = [line.partition(":") for line in listing.splitlines() if line.strip() and not line.startswith(";")]
    return {name.strip(): text for name, _, text in lines}


def spoken(text: str) -> str:
    """The words of a transcript: no notes in brackets, no dots of an unfinished sentence, and names of keys."""
    text = re.sub(r"\[[^]]*\]|\([^)]*\)|<[^>]*>|\.{2,}", " ", text)
    return " ".join(text.replace("*", " star ").replace("#", " pound ").split())


def comparable(text: str) -> str:
    """What makes two transcripts the same: their letters and digits."""
    return "".join(character for character in text.lower() if character.isalnum())


def choose(clips: Iterable[Clip]) -> tuple[list[Clip], dict[str, list[str]]]:
    """The clips to train and test on, in the order of their names, and the names of the others by the reason."""
    kept: list[Clip] = []
    left: dict[str, list[str]] = {}
    for clip in sorted(clips, key=lambda clip: clip.name):
        if not comparable(clip.text):
            left.setdefault("without speech", []).append(clip.name)
        elif len(comparable(clip.text)) == 1 and clip.name.startswith("letters"):
            left.setdefault("a single letter, which its sound alone does not spell", []).append(clip.name)
        elif clip.seconds > LONGEST:
            left.setdefault(f"longer than {LONGEST:g} s", []).append(clip.name)
        else:
            kept.append(clip)
    return kept, left


def is_held_out(text: str) -> bool:
    """Whether clips of this text are kept for evaluation: by a hash of it, so all of one text are on one side."""
    return int(hashlib.sha256(comparable(text).encode()).hexdigest()[:8], 16) < HELD_OUT * 16**8


def row(clip: Clip) -> Mapping[str, Any]:
    """A row of the format `messages` (docs/data.md)."""
    question = [{"type": "audio", "audio": f"{clip.name}.wav"}, {"type": "text", "text": QUESTION}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": clip.text}]}
