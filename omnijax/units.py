"""Units of media: what a processor makes, a row holds and an encoder reads. It imports no jax, so workers can."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitShape:
    """Of one unit: the shape of its features and of its position, and the type of the features.

    multiple: how many units at a time become whole encoded features; a budget is a multiple of it
    """

    features: tuple[int, ...]
    position: tuple[int, ...] = ()
    dtype: str = "float32"
    multiple: int = 1
