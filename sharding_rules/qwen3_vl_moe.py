"""Qwen3-VL with experts: the tower's axes have the backbone's names, and lie where they do; patches over sequence."""

from sharding_rules.qwen3_moe import table

__all__ = ["table"]
