"""gpt-oss: the same axes as Qwen3 with experts, in the same places."""

from sharding_rules.qwen3_moe import table

__all__ = ["table"]
