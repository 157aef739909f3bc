"""Qwen2 and Qwen2.5: the same axes as Qwen3, in the same places."""

from sharding_rules.qwen3 import table

__all__ = ["table"]
