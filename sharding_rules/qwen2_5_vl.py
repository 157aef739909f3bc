"""Qwen2.5-VL: the tower's axes have the backbone's names, and lie where they do; patches over sequence."""

from sharding_rules.qwen2 import table

__all__ = ["table"]
