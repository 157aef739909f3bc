"""What the tests of attention share: arrays, packed rows, the truth in float64, and what a program communicates."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np

from omnijax.sharding import Layout, Rules, lines

SCALE = 0.3
QUICK = {"xla_backend_optimization_level": 0}  # these tests spend their time compiling


def rules(attention="ulysses"):
    """A table for attention alone."""
    table = {
        "batch": "replica data expert",
        "length": "sequence",
        "act_heads": "tensor",
        "attention_length": "none",
        "attention_heads": "tensor sequence",
    }
    return Rules(parameters=(), activations=lines(**table), layout=Layout(attention))


def golden(q, k, v, span, sinks, d_out, soft_cap):
    """Output and gradients (q, k, v, sinks) by the chain rule, one row and head at a time, in float64."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    start, end = (np.asarray(bound)[:, :, None] for bound in span)
    out, dq, dk, dv, d_sinks = np.zeros_like(d_out), *(np.zeros_like(x) for x in (q, k, v)), np.zeros(q.shape[2])
    index = np.arange(k.shape[1])
    for b in range(q.shape[0]):
        seen = (start[b] <= index) & (index < end[b])
        for h in range(q.shape[2]):
            j = h // (q.shape[2] // k.shape[2])
            logits = SCALE * q[b, :, h] @ k[b, :, j].T
            slope = np.ones_like(logits)
            if soft_cap is not None:
                slope = 1 - np.tanh(logits / soft_cap) ** 2
                logits = soft_cap * np.tanh(logits / soft_cap)
            exponentials = np.where(seen, np.exp(logits), 0)
            sink = 0 if sinks is None else math.exp(sinks[h])
            total = exponentials.sum(-1, keepdims=True) + sink
            weights = np.divide(exponentials, total, out=np.zeros_like(exponentials), where=total > 0)
            out[b, :, h] = weights @ v[b, :, j]
            d_weights = d_out[b, :, h] @ v[b, :, j].T
            delta = (weights * d_weights).sum(-1, keepdims=True)
            d_logits = SCALE * weights * (d_weights - delta) * slope
            dq[b, :, h] = d_logits @ k[b, :, j]
            dk[b, :, j] += d_logits.T @ q[b, :, h]
            dv[b, :, j] += weights.T @ d_out[b, :, h]
            if sinks is not None:
                d_sinks[h] -= (sink / total * delta).sum()
    return out, dq, dk, dv, d_sinks


def arrays(B=2, S=33, T=None, H=6, K=2, Dk=8, Dv=5, dtype=jnp.float32):
    """q, k, v, the output's cotangent and sinks."""
    T, random = T or S, np.random.default_rng(0)
    shapes = (B, S, H, Dk), (B, T, K, Dk), (B, T, K, Dv), (B, S, H, Dv)
    q, k, v, d_out = (jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)
    return q, k, v, d_out, jnp.asarray(random.standard_normal(H), jnp.float32)


def segments(B, S):
    """Packed rows: documents of growing lengths, whose ids need not rise, then padding (none in the first row)."""
    rows = np.zeros((B, S), np.int32)
    for b in range(B):
        edges = np.cumsum([0, *range(1 + b, S, 3)])
        edges = [*edges[edges < S], S]
        for document, (first, last) in enumerate(itertools.pairwise(edges)):
            rows[b, first:last] = 1 + (5 * document) % 7
        if b:
            rows[b, S - S // 4 :] = 0
    return jnp.asarray(rows)


def value_and_gradients(kernel, q, k, v, span, sinks, d_out, soft_cap=None, **blocks):
    """As `golden`."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, k, v, sinks):
        def function(*x):
            return kernel(*x[:3], span, scale=SCALE, sinks=x[3], soft_cap=soft_cap, **blocks)

        out, pull = jax.vjp(function, q, k, v, sinks)
        return out, *pull(d_out)

    return run(q, k, v, sinks)


def assert_close(got, want, tolerance):
    """Within `tolerance` of each array's largest entry."""
    for name, a, b in zip(("out", "dq", "dk", "dv", "d_sinks"), got, want, strict=True):
        if a is not None:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert a.shape == b.shape, name
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()), err_msg=name)


def collectives(compiled):
    """Every collective of a program, as (kind, type)."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    return re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", compiled.as_text())


def count(found, kind):
    return sum(name == kind for _, name in found)
