"""Model families: plain maths that names its axes. Nothing here knows a mesh."""

from models.families import FAMILIES, family_of

__all__ = ["FAMILIES", "family_of"]
