"""Word error rate: substituted, left-out and added words, for each word that was said.

Texts are compared as they sound: in lower case, digits as words, without punctuation but the apostrophe inside a word,
and a hyphen is a space. So "Press 1!" is "press one", and "re-record" two words.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jiwer

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class WordErrors:
    """Counts over all texts; `rate` may be above 1, as words that nobody said are errors too."""

    substituted: int
    left_out: int
    added: int
    words: int

    @property
    def rate(self) -> float:
        return (self.substituted + self.left_out + self.added) / self.words


def normalise(text: str) -> str:
    """The words of a text as they are compared, with single spaces."""
    text = re.sub(
        r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text.lower().replace("\u2019", "'"), flags=re.ASCII
    )
    return " ".join(word.strip("'") for word in re.sub(r"[^\w']|_", " ", text).split() if word.strip("'"))


def word_errors(said: Sequence[str], heard: Sequence[str]) -> WordErrors:
    """What is wrong in `heard`, a text for each of `said`, by the fewest changes that make one of the other.

    Raises `ValueError` where they are not equally many, or a text of `said` has no word.
    """
    counts = jiwer.process_words([normalise(text) for text in said], [normalise(text) for text in heard])
    words = counts.hits + counts.substitutions + counts.deletions
    return WordErrors(counts.substitutions, counts.deletions, counts.insertions, words)
