"""The optimizer: AdamW with a decay mask, global-norm clipping and the usual learning-rate schedules."""

from collections.abc import Iterable, Mapping
from typing import Any

import optax

from omnijax.config import Optimizer


def learning_rate(config: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate by optimizer step, from warm-up over `steps` steps to `learning_rate * final_fraction`.

    `wsd` (warmup-stable-decay, Hu et al. 2024, arXiv 2404.06395) stays at the peak and decays linearly over the last
    `decay_fraction` of the steps. After `steps` every schedule stays at its end.
    """
    peak, end = config.learning_rate, config.learning_rate * config.final_fraction
    after = max(1, steps - config.warmup_steps)
    if config.schedule == "constant":
        main = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        main = optax.linear_schedule(peak, end, after)
    elif config.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, after, alpha=config.final_fraction)
    else:
        decay = min(after, max(1, round(steps * config.decay_fraction)))
        main = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [after - decay]
        )
    if not config.warmup_steps:
        return main
    # Step 0 already learns: the ramp reaches peak / warmup_steps there, not 0.
    ramp = optax.linear_schedule(peak / config.warmup_steps, peak, max(1, config.warmup_steps - 1))
    return optax.join_schedules([ramp, main], [config.warmup_steps])


def decayed(paths: Iterable[str], config: Optimizer) -> dict[str, bool]:
    """Which parameters weight decay acts on: kernels and adapters; embeddings if asked; never a norm or a bias."""
    decays = ("kernel", "lora_a", "lora_b", *(["embedding"] if config.decay_embeddings else []))
    return {path: path.endswith(decays) for path in paths}


def make_optimizer(
    config: Optimizer, steps: int, paths: Iterable[str], rates: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW (Loshchilov & Hutter 2019) with decay times the learning rate.

    `paths` are those of all that is trained; `rates` has factors of the learning rate of some, decay included.
    """
    paths = list(paths)
    adamw = optax.adamw(
        learning_rate(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed(paths, config),
    )
    # Without clipping the state has the same tree, so that a run can go on with another clip_norm.
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return scaled(optax.chain(clip, adamw), rates or {})


def scaled(transformation: optax.GradientTransformation, factors: Mapping[str, float]) -> optax.GradientTransformation:
    """The same transformation, and state, with the updates of some paths times a factor."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = transformation.update(updates, state, params)
        return {path: x * factors[path] if path in factors else x for path, x in updates.items()}, state

    return optax.GradientTransformation(transformation.init, update)
