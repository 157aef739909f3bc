"""Audio towers: where each named axis lives; units over sequence."""

from omnijax.sharding import AttentionLayout, Layout, Rules, lines


def table(attention: AttentionLayout = "ulysses", chunks: int = 1) -> Rules:
    """ZeRO-3 over data, expert and sequence; heads and feed-forward over tensor; Ulysses or a ring."""
    return Rules(
        parameters=lines(
            layers="none",
            embed="data expert sequence | data expert | data | none",
            heads="tensor",
            head_dim="none",
            mlp="tensor",
        ),
        activations=lines(
            batch="replica data expert",
            length="sequence",
            act_embed="none",
            act_heads="tensor",
            act_mlp="tensor",
            attention_length="none",
            attention_heads="tensor sequence",
        ),
        layout=Layout(attention=attention, chunks=chunks),
    )
