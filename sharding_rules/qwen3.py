"""Qwen3, dense: where each named axis lives."""

from omnijax.sharding import AttentionLayout, Layout, Rules, lines


def table(attention: AttentionLayout = "ulysses", chunks: int = 1) -> Rules:
    """ZeRO-3 over data, expert and sequence; heads, feed-forward and vocabulary over tensor; Ulysses or a ring."""
    return Rules(
        parameters=lines(
            layers="none",
            embed="data expert sequence | data expert | data | none",
            vocab="tensor | none",
            heads="tensor",
            kv_heads="tensor | none",
            head_dim="none",
            mlp="tensor",
        ),
        activations=lines(
            batch="replica data expert",
            length="sequence",
            act_embed="none",
            act_heads="tensor",
            act_kv_heads="tensor | none",
            act_mlp="tensor",
            act_vocab="tensor | none",
            attention_length="none",
            attention_heads="tensor sequence",
        ),
        layout=Layout(attention=attention, chunks=chunks),
    )
