"""The decoder every language family is made of: an embedding, stacks of layers, a head, and the config they share."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32

from models import hf_config
from models.stacks import Deepstack, Stack, StackPlan, in_layer_order, is_routed, split_plans
from omnijax.batch import Batch
from omnijax.errors import UserError
from omnijax.hf_layout import Names
from omnijax.nn import rope, spans
from omnijax.nn.norms import RMSNorm
from omnijax.nn.projections import Embedding
from omnijax.nn.remat import Remat
from omnijax.nn.router import RouterLoss, corrected
from omnijax.objectives import Mean, Outputs, TextLoss
from omnijax.parameters import Parameters
from omnijax.sharding import constrain


@dataclass(frozen=True)
class DecoderConfig:
    """What every family has, named as in Hugging Face's `config.json`; a `head_dim` of None is hidden / heads."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    HF_TYPE: ClassVar[str]
    HF_CLASS: ClassVar[str]
    HF_FIXED: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_dropout": 0.0}
    HF_ALIASES: ClassVar[dict[str, str]] = {}
    ROPE_TYPES: ClassVar[dict[str, type]] = {}

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> Any:
        """Read a `config.json`; raises `UserError` for another family's, and for what this one does not have."""
        if values.get("model_type", cls.HF_TYPE) != cls.HF_TYPE:
            raise UserError(f"{name}: model_type {values['model_type']!r} is not this family's, {cls.HF_TYPE!r}")
        values = {cls.HF_ALIASES.get(key, key): value for key, value in values.items()}
        return hf_config.read(cls, values, fixed=cls.HF_FIXED, rope_types=cls.ROPE_TYPES, name=name)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this config."""
        header = {"architectures": [self.HF_CLASS], "model_type": self.HF_TYPE}
        return hf_config.write(self, fixed=self.HF_FIXED, rope_types=self.ROPE_TYPES, **header)

    def __post_init__(self) -> None:
        kind, heads, kv_heads = type(self).__name__, self.num_attention_heads, self.num_key_value_heads
        for field in dataclasses.fields(DecoderConfig):
            value = getattr(self, field.name)
            least = 0 if field.name == "initializer_range" else 1 if isinstance(value, int) else 1e-30
            if value is not None and not isinstance(value, bool) and value < least:
                raise UserError(f"{kind}.{field.name} = {value} must be {'at least 0' if not least else 'positive'}")
        if heads % kv_heads:
            raise UserError(f"{kind}: {heads} attention heads are not a multiple of {kv_heads} key/value heads")
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise UserError(
                    f"{kind}: hidden_size {self.hidden_size} is not a multiple of {heads} heads; set head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.head_dim % 2:
            raise UserError(f"{kind}.head_dim = {self.head_dim} is odd; rotary positions turn pairs of channels")

    def leaves_out(self, tensor: str) -> bool:
        """Whether a tensor of a checkpoint is of a part that the family here does without."""
        return False

    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of every layer, None where it has none."""
        return (None,) * self.num_hidden_layers

    def attention_costs(self) -> tuple[tuple[int | None, int], ...]:
        """Per layer: its window, and the multiply-adds of one query seeing one key (scores and values)."""
        return tuple((window, self.num_attention_heads * 2 * self.head_dim) for window in self.windows())


@dataclass(frozen=True)
class SlidingWindowConfig(DecoderConfig):
    """Adds Qwen's sliding windows: in the layers that `layer_types` says, else in those from `max_window_layers` on."""

    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kind, kinds = type(self).__name__, self.layer_types
        window = self.sliding_window
        if self.use_sliding_window and (window is None or not 0 < window < 2**31):
            raise UserError(f"{kind}.use_sliding_window needs a positive sliding_window, not {window}")
        if kinds is not None and len(kinds) != self.num_hidden_layers:
            raise UserError(f"{kind}: {len(kinds)} layer_types for {self.num_hidden_layers} layers")
        if unknown := sorted(set(kinds or ()) - {"full_attention", "sliding_attention"}):
            raise UserError(f"{kind}.layer_types: {', '.join(unknown)} is none of full_attention, sliding_attention")

    def windows(self) -> tuple[int | None, ...]:
        if not self.use_sliding_window:
            return super().windows()
        slides = [layer >= self.max_window_layers for layer in range(self.num_hidden_layers)]
        if self.layer_types is not None:
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        return tuple(self.sliding_window if sliding else None for sliding in slides)


class Decoder(nnx.Module):
    """Token embedding, stacks of layers, final norm, output head."""

    HF_NAMES: ClassVar[Names] = {
        "model.embed_tokens.weight": "embed_tokens.embedding",
        "model.layers.{layer}.input_layernorm.weight": "layers.input_layernorm.scale",
        "model.layers.{layer}.post_attention_layernorm.weight": "layers.post_attention_layernorm.scale",
        "model.norm.weight": "norm.scale",
        "lm_head.weight": "lm_head.embedding",
    }

    def __init__(
        self,
        config: DecoderConfig,
        *,
        plans: Sequence[StackPlan],
        frequencies: Float32[np.ndarray, " half"],
        attention_factor: float = 1.0,
        rope_axes: Sequence[int] | None = None,
        splits: Sequence[int] = (),
        rngs: nnx.Rngs,
        remat: Remat = "none",
        loss: TextLoss | None = None,
        router_loss: RouterLoss | None = None,
        vocab_multiple: int = 1,
        sources: int = 1,
    ):
        table = functools.partial(
            Embedding, config.vocab_size, config.hidden_size, std=config.initializer_range, multiple=vocab_multiple
        )
        self.embed_tokens = table(rngs=rngs)
        self.stacks = nnx.List([Stack(plan, remat=remat, rngs=rngs) for plan in split_plans(plans, splits)])
        self.norm = RMSNorm("embed", config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.lm_head = None if config.tie_word_embeddings else table(rngs=rngs)
        self.frequencies, self.attention_factor = tuple(float(f) for f in frequencies), attention_factor
        self.rope_axes = None if rope_axes is None else tuple(rope_axes)
        self.config, self.loss, self.router_loss = config, loss or TextLoss(), router_loss or RouterLoss()
        self.sources = sources  # of the data, whose losses are reported one by one
        if router_loss is not None and not any(is_routed(block) for stack in self.stacks for block in stack.blocks):
            raise UserError(f"{type(config).__name__}: a loss for the router is given, but no layer has experts")

    def __call__(self, batch: Batch) -> Outputs:
        """Hidden states of every token, the objective `text`, and the objective `router` where layers have experts."""
        return self.forward(self.embed_tokens(batch.tokens), batch)

    def forward(self, x: Float[Array, "B S E"], batch: Batch, deepstack: Deepstack | None = None) -> Outputs:
        """The same from embeddings in which media stand already; the layers of the first stack take `deepstack`."""
        frequencies = np.asarray(self.frequencies, np.float32)
        rotation = rope.rotation(batch.positions, frequencies, self.attention_factor, self.rope_axes)
        span = spans.causal(batch.segment_ids)
        real = batch.segment_ids > 0
        routings = []
        for number, stack in enumerate(self.stacks):
            x, routing = stack(x, rotation, span, real, None if number else deepstack)
            routings.append(routing)
        hidden = self.norm(x)
        text, metrics = self.loss(
            hidden, self._head(), batch.targets, batch.weights, self.config.vocab_size, batch.sources, self.sources
        )
        objectives = {"text": text}
        routing = in_layer_order(routings)
        if routing is not None:
            tokens = real.sum().astype(jnp.float32)
            objectives["router"], more = self.router_loss(routing, tokens, self.config.router_aux_loss_coef)
            metrics = metrics | more
        return Outputs(hidden, objectives, metrics)

    def after_step(self, params: Parameters, metrics: Mapping[str, Mean]) -> Parameters:
        """The parameters that change by what a step counted, not by a gradient: corrections of the router.

        `metrics` are those of `Outputs`, added over the whole batch.
        """
        changed, first = dict(params), 0
        for index, stack in enumerate(self.stacks):
            positions = [position for position, block in enumerate(stack.blocks) if is_routed(block)]
            last = first + len(positions) * stack.repeats
            for offset, position in enumerate(positions):
                path = f"stacks.{index}.blocks.{position}.mlp.router.correction"
                if path in params:
                    load = metrics["router_load"][0][first + offset : last : len(positions)]
                    changed[path] = corrected(params[path], load, self.router_loss.correction_rate)
            first = last
        return changed

    def logits(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S V"]:
        """float32 logits of the next token; for sampling and tests, as training never holds them all at once."""
        logits = jnp.einsum("bse,ve->bsv", hidden, self._head(), preferred_element_type=jnp.float32)
        return constrain(logits, "batch", "length", "act_vocab")[..., : self.config.vocab_size]

    def _head(self) -> Float[Array, "V E"]:
        return (self.embed_tokens if self.lm_head is None else self.lm_head).embedding[...]
