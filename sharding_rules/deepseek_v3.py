"""DeepSeek-V3: where each named axis lives."""

from omnijax.sharding import AttentionLayout, ExpertLayout, Layout, Rules, lines


def table(
    attention: AttentionLayout = "ulysses",
    chunks: int = 1,
    moe: ExpertLayout = "all_gather",
    capacity: float = 1.25,
) -> Rules:
    """Experts over expert, all else ZeRO-3 over data, expert and sequence; heads, hidden and vocabulary over tensor."""
    return Rules(
        parameters=lines(
            layers="none",
            embed="data expert sequence | data expert | data | none",
            vocab="tensor | none",
            heads="tensor",
            head_dim="none",
            latent="data expert sequence | data expert | data | none",
            latent_out="none",
            mlp="optional tensor",
            router_experts="none",
            experts="expert",
            expert_embed="data sequence | data | none",
            expert_mlp="tensor",
        ),
        activations=lines(
            batch="replica data expert",
            length="sequence",
            act_embed="none",
            act_heads="tensor",
            act_mlp="tensor",
            act_vocab="tensor | none",
            attention_length="none",
            attention_heads="tensor sequence",
        ),
        layout=Layout(attention=attention, chunks=chunks, moe=moe, capacity=capacity),
    )
