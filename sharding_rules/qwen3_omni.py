"""Qwen3-Omni: the axes of the towers have the names of the backbone's, and lie where they do."""

from sharding_rules.qwen3_moe import table

__all__ = ["table"]
