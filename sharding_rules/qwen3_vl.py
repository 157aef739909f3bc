"""Qwen3-VL: the tower's axes have the backbone's names, and lie where they do; patches over sequence."""

from sharding_rules.qwen3 import table

__all__ = ["table"]
