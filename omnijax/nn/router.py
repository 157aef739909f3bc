"""The router of a mixture of experts: scores, choices, and what keeps the load even.

Letters: T tokens (B rows of S), E experts, k choices of a token, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from omnijax.errors import UserError
from omnijax.nn.projections import param
from omnijax.objectives import Mean
from omnijax.sharding import constrain

Choices = tuple[Int[Array, "T k"], Float32[Array, "T k"]]
"""The experts of each token, and the weight of what each of them makes of it."""

Select = Callable[[Float32[Array, "T E"], Float32[Array, " E"] | None], Choices]
"""Makes choices of logits, and of the correction where a router has one."""


class Router(nnx.Module):
    """Logits of the experts, and how they are read.

    select:        makes choices of logits
    probabilities: logits -> how much a token would like each expert, adding up to 1; for the balance loss
    correction:    whether a bias that no gradient trains is added to the scores when experts are chosen, but not when
                   their outputs are weighted (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing")

    All of it is computed in float32 from float32 parameters, as a choice cannot be nearly right.
    """

    def __init__(
        self,
        *,
        width: int,
        experts: int,
        std: float,
        select: Select,
        rngs: nnx.Rngs,
        probabilities: Callable[[Array], Array] = jax.nn.softmax,
        bias: bool = False,
        correction: bool = False,
    ):
        embed, scores, zeros = ("embed", width), ("router_experts", experts), nnx.initializers.zeros
        self.kernel = param(rngs, nnx.initializers.normal(std), (embed, scores), inputs=1, precise=True)
        self.bias = param(rngs, zeros, (scores,), inputs=0, precise=True) if bias else None
        self.correction = param(rngs, zeros, (scores,), precise=True) if correction else None
        self.select, self.probabilities = select, probabilities

    def __call__(self, x: Float[Array, "B S D"]) -> Float32[Array, "B S E"]:
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        logits = constrain(logits, "batch", "length", None)
        return logits if self.bias is None else logits + self.bias[...]


def softmax_then_top(
    logits: Float32[Array, "T E"], correction: None = None, *, top_k: int, renormalise: bool
) -> Choices:
    """The k most probable experts, weighted by their probability, or by its share among the k."""
    probabilities = jax.nn.softmax(logits)
    choice = _top(probabilities, top_k)
    weight = _take(probabilities, choice)
    return choice, weight / weight.sum(-1, keepdims=True) if renormalise else weight


def top_then_softmax(logits: Float32[Array, "T E"], correction: None = None, *, top_k: int) -> Choices:
    """The k experts with the greatest logits, weighted by the softmax over these k (GPT-OSS)."""
    choice = _top(logits, top_k)
    return choice, jax.nn.softmax(_take(logits, choice))


def sigmoid_of_groups(
    logits: Float32[Array, "T E"],
    correction: Float32[Array, " E"],
    *,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> Choices:
    """DeepSeek-V3 (arXiv 2412.19437, sec. 2.1.2): the k best of the experts in the best groups.

    Experts are compared by the sigmoid of their logit plus the correction, groups by the sum of their best two. The
    weight is the sigmoid alone, or its share among the k, times `scale`.
    """
    scores = jax.nn.sigmoid(logits)
    corrected = (scores + correction).reshape(len(logits), groups, -1)
    best_two = jax.lax.top_k(jax.lax.stop_gradient(corrected), 2)[0].sum(-1)
    allowed = (_top(best_two, top_groups)[..., None] == jnp.arange(groups)).any(1)
    choice = _top(jnp.where(allowed[..., None], corrected, -jnp.inf).reshape(scores.shape), top_k)
    weight = _take(scores, choice)
    if renormalise:
        weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)
    return choice, weight * scale


def sigmoid_shares(logits: Float32[Array, "*T E"]) -> Float32[Array, "*T E"]:
    """The sigmoid of each logit as a share of their sum: the probabilities of a router that scores by sigmoids."""
    scores = jax.nn.sigmoid(logits)
    return scores / scores.sum(-1, keepdims=True)


def corrected(correction: Float32[Array, "*L E"], load: Float32[Array, "*L E"], rate: float) -> Float32[Array, "*L E"]:
    """The correction after a step: up by `rate` for experts with less than the mean load, down for those with more."""
    return correction + rate * jnp.sign(load.mean(-1, keepdims=True) - load)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """What a layer's router did, as sums over real tokens; stacked layers lead with an axis L.

    load:        choices of each expert
    probability: probability of each expert
    balance:     the sum over rows of `E sum_e chosen_e / n probability_e / n` times the row's n real tokens
    z:           squared logarithm of the softmax's denominator
    entropy:     of the probabilities, in nats
    dropped:     choices that no expert served
    """

    load: Float32[Array, "*L E"]
    probability: Float32[Array, "*L E"]
    balance: Float32[Array, "*L"]
    z: Float32[Array, "*L"]
    entropy: Float32[Array, "*L"]
    dropped: Float32[Array, "*L"]


def measure(
    logits: Float32[Array, "B S E"],
    probabilities: Float32[Array, "B S E"],
    choice: Int[Array, "B S k"],
    dropped: Int[Array, "B S"],
    real: Bool[Array, "B S"],
) -> Routing:
    """The `Routing` of one layer; gradients flow to `logits` and `probabilities`."""
    experts, mask = logits.shape[-1], real.astype(jnp.float32)
    chosen = ((choice[..., None] == jnp.arange(experts)) & real[..., None, None]).sum((1, 2)).astype(jnp.float32)
    probability = (probabilities * mask[..., None]).sum(1)
    tokens = jnp.maximum(mask.sum(1), 1)
    logs = jnp.log(jnp.where(probabilities > 0, probabilities, 1))
    return Routing(
        load=chosen.sum(0),
        probability=probability.sum(0),
        balance=experts * ((chosen * probability).sum(-1) / tokens).sum(),
        z=(jax.nn.logsumexp(logits, axis=-1) ** 2 * mask).sum(),
        entropy=-((probabilities * logs).sum(-1) * mask).sum(),
        dropped=(dropped * mask).sum(),
    )


Balance = Literal["per_row", "per_batch", "per_micro_batch"]


@dataclass(frozen=True)
class RouterLoss:
    """What keeps the load of experts even. A coefficient that is negative is a `UserError`.

    balance: over which tokens an expert's load and probability are multiplied (Switch Transformer, Fedus et al. 2022,
             sec. 2.2; an even load costs k). The loss is the mean over tokens.
        per_row:         over each row and layer. Rows are added, so it depends neither on mesh nor on accumulation.
        per_batch:       over all rows and layers, as transformers has it; not with accumulation
        per_micro_batch: the same for each micro-batch, which depends on how the batch is cut
    coefficient:     weight of the balance loss; None takes the model's own
    z_coefficient:   weight of the squared logarithm of the softmax's denominator (ST-MoE, Zoph et al. 2022, sec. 3.2)
    correction_rate: step of the correction of routers that have one; 0 leaves it as it is
    """

    balance: Balance = "per_row"
    coefficient: float | None = None
    z_coefficient: float = 0.0
    correction_rate: float = 0.001

    def __post_init__(self) -> None:
        for name in ("coefficient", "z_coefficient", "correction_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"RouterLoss.{name} = {value} must be at least 0, and finite")

    def __call__(self, routing: Routing, tokens: Float32[Array, ""], coefficient: float) -> tuple[Mean, dict[str, Any]]:
        """The objective of stacked layers that routed so many real `tokens`, and means to report.

        `coefficient` is the model's own. `router_load` is an array [L, E], the share of choices each expert had.
        """
        layers, experts = routing.load.shape
        if self.balance == "per_row":
            balance = routing.balance.mean()
        else:
            load, probability = routing.load.sum(0), routing.probability.sum(0)
            balance = experts * (load * probability).sum() / (layers**2 * jnp.maximum(tokens, 1))
        z = routing.z.mean()
        coefficient = coefficient if self.coefficient is None else self.coefficient
        choices = routing.load[0].sum()
        return (coefficient * balance + self.z_coefficient * z, tokens), {
            "router_balance": (balance, tokens),
            "router_z": (z, tokens),
            "router_entropy": (routing.entropy.mean(), tokens),
            "router_dropped": (routing.dropped.mean(), choices),
            "router_load": (routing.load, choices),
        }


def _top(scores: Float[Array, "T n"], count: int) -> Int[Array, "T count"]:
    return jax.lax.top_k(jax.lax.stop_gradient(scores), count)[1]


def _take(values: Float[Array, "T E"], choice: Int[Array, "T k"]) -> Float[Array, "T k"]:
    # A comparison, not a gather: its gradient needs no scatter.
    hit = choice[..., None] == jnp.arange(values.shape[-1])
    return jnp.where(hit, values[:, None], 0).sum(-1)
