"""The decoder every language family is made of: a tuple of stacks, each scanned over its layers.

A stack is `(pattern, repeats)`: its layers repeat a short pattern of blocks. One scan step runs one period, so the
program is as long as the pattern, not as the model. Layers are numbered through all stacks, from 0.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from models import hf_config
from omnijax.batch import Batch
from omnijax.errors import UserError
from omnijax.nn import rope, spans
from omnijax.nn.norms import RMSNorm
from omnijax.nn.projections import Embedding
from omnijax.nn.remat import Remat, rematerialise
from omnijax.objectives import Outputs, TextLoss
from omnijax.sharding import constrain

MakeBlock = Callable[[nnx.Rngs], nnx.Module]


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
    ROPE_TYPES: ClassVar[dict[str, type]] = {}

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], name: str = "config.json") -> Any:
        """Read a `config.json`; raises `UserError` for another family's, and for what this one does not have."""
        if values.get("model_type", cls.HF_TYPE) != cls.HF_TYPE:
            raise UserError(f"{name}: model_type {values['model_type']!r} is not this family's, {cls.HF_TYPE!r}")
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


@dataclass(frozen=True)
class StackPlan:
    """`repeats` periods of `pattern`; `windows` holds the sliding window of every layer, or None for no limit."""

    pattern: tuple[MakeBlock, ...]
    repeats: int
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if len(self.windows) != self.repeats * len(self.pattern):
            raise ValueError(f"{len(self.windows)} windows for {self.repeats} x {len(self.pattern)} layers")


class Block(nnx.Module):
    """A pre-norm residual layer: attention, then a feed-forward network."""

    def __init__(self, *, input_layernorm, self_attn, post_attention_layernorm, mlp):
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def __call__(self, x: Float[Array, "B S E"], rotation: rope.Rotation, span: spans.Span) -> Float[Array, "B S E"]:
        x = x + self.self_attn(self.input_layernorm(x), rotation, span)
        x = constrain(x, "batch", "length", "act_embed")
        x = x + self.mlp(self.post_attention_layernorm(x))
        return constrain(x, "batch", "length", "act_embed")


class Stack(nnx.Module):
    """Layers whose parameters are stacked along a leading `layers` axis, one stack of arrays per pattern position."""

    def __init__(self, plan: StackPlan, *, remat: Remat, rngs: nnx.Rngs):
        self.blocks = nnx.List([_stacked(make, plan.repeats, rngs) for make in plan.pattern])
        self.repeats, self.windows, self.remat = plan.repeats, plan.windows, remat

    def __call__(self, x: Float[Array, "B S E"], rotation: rope.Rotation, span: spans.Span) -> Float[Array, "B S E"]:
        graphdefs, states = zip(*(nnx.split(block) for block in self.blocks), strict=True)
        windows = self._windows(x.shape[1])

        def period(x, scanned):
            states, windows = scanned
            for index, (graphdef, state) in enumerate(zip(graphdefs, states, strict=True)):
                limited = span if windows is None else spans.window(span, windows[index])
                x = nnx.merge(graphdef, state)(x, rotation, limited)
            return x, None

        body = rematerialise(period, self.remat)
        return jax.lax.scan(body, x, (states, windows), length=self.repeats)[0]

    def _windows(self, length: int) -> Int32[Array, "repeats period"] | None:
        if all(window is None for window in self.windows):
            return None
        # What differs between layers only by a number is scanned, so that they share one program.
        numbers = [length if window is None else window for window in self.windows]
        return jnp.asarray(numbers, jnp.int32).reshape(self.repeats, -1)


def _stacked(make: MakeBlock, repeats: int, rngs: nnx.Rngs) -> nnx.Module:
    @nnx.split_rngs(splits=repeats)
    @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: None, "axes": "layers"})
    def make_all(rngs: nnx.Rngs) -> nnx.Module:
        return make(rngs)

    return make_all(rngs)


class Decoder(nnx.Module):
    """Token embedding, stacks of layers, final norm, output head."""

    HF_NAMES: ClassVar[dict[str, str]] = {
        "model.embed_tokens.weight": "embed_tokens.embedding",
        "model.layers.{layer}.input_layernorm.weight": "layers.input_layernorm.scale",
        "model.layers.{layer}.post_attention_layernorm.weight": "layers.post_attention_layernorm.scale",
        "model.norm.weight": "norm.scale",
        "lm_head.weight": "lm_head.embedding",
    }
    """Hugging Face name -> our path; `layers` stands for any stack and pattern position."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        plans: Sequence[StackPlan],
        frequencies: Float32[np.ndarray, " half"],
        rngs: nnx.Rngs,
        remat: Remat = "none",
        loss: TextLoss | None = None,
        vocab_multiple: int = 1,
    ):
        table = functools.partial(
            Embedding, config.vocab_size, config.hidden_size, std=config.initializer_range, multiple=vocab_multiple
        )
        self.embed_tokens = table(rngs=rngs)
        self.stacks = nnx.List([Stack(plan, remat=remat, rngs=rngs) for plan in plans])
        self.norm = RMSNorm("embed", config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.lm_head = None if config.tie_word_embeddings else table(rngs=rngs)
        self.frequencies = tuple(float(f) for f in frequencies)
        self.config, self.loss = config, loss or TextLoss()

    def __call__(self, batch: Batch) -> Outputs:
        """Hidden states of every token, and the objective `text`."""
        rotation = rope.rotation(batch.positions, np.asarray(self.frequencies, np.float32))
        span = spans.causal(batch.segment_ids)
        x = self.embed_tokens(batch.tokens)
        for stack in self.stacks:
            x = stack(x, rotation, span)
        hidden = self.norm(x)
        objective, metrics = self.loss(hidden, self._head(), batch.targets, batch.weights, self.config.vocab_size)
        return Outputs(hidden, {"text": objective}, metrics)

    def logits(self, hidden: Float[Array, "B S E"]) -> Float[Array, "B S V"]:
        """float32 logits of the next token; for sampling and tests, as training never holds them all at once."""
        logits = jnp.einsum("bse,ve->bsv", hidden, self._head(), preferred_element_type=jnp.float32)
        return constrain(logits, "batch", "length", "act_vocab")[..., : self.config.vocab_size]

    def _head(self) -> Float[Array, "V E"]:
        return (self.embed_tokens if self.lm_head is None else self.lm_head).embedding[...]
