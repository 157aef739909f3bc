"""Experts in grouped products: the chunks everywhere, tokamax's kernels lowered, and (marked gpu) run."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas

from models.layers import GatedExperts
from omnijax import report
from omnijax.config import Compute
from omnijax.errors import UserError
from omnijax.nn import gpu_grouped
from omnijax.nn.chunked import MARGIN, TO_KERNEL, chunked, ragged
from omnijax.nn.experts import apply_experts, use_grouped
from omnijax.nn.grouped import Rows
from omnijax.nn.moe import MixtureOfExperts
from omnijax.nn.router import Router, softmax_then_top
from sharding_rules import qwen3_moe
from tests.meshes import on

EXPERTS, CHOICES = 5, 2
HAS_TOKAMAX = importlib.util.find_spec("tokamax") is not None
needs_tokamax = pytest.mark.skipif(not HAS_TOKAMAX, reason="tokamax is not installed: pip install 'omnijax[tokamax]'")
needs_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU here")
# Not ours to mend: tokamax 0.0.12 uses names that jax 0.10 gives up.
pytestmark = [
    pytest.mark.filterwarnings("ignore:jax.experimental.pallas.dot:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The out_shape and scratch_shapes arguments:DeprecationWarning"),
]


def expert(kernels: dict[str, jax.Array], x: jax.Array, weight: jax.Array, rows: Rows) -> jax.Array:
    """SwiGLU with a bias, as `GatedExperts` and gpt-oss have it."""
    gate, up = jnp.unstack(rows.dot(x, kernels["gate_up"]) + rows.pick(kernels["bias"]), axis=1)
    return rows.dot(jax.nn.silu(gate) * up * weight[:, None].astype(x.dtype), kernels["down"])


def by_hand(kernels, x, choice, weight, d_out) -> tuple:
    """The output and every gradient, choice by choice in float64."""
    out, dx, d_weight = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weight)
    d_kernels = {name: np.zeros_like(kernel) for name, kernel in kernels.items()}
    for (token, slot), number in np.ndenumerate(choice):
        if number >= EXPERTS:
            continue
        gate_up, down, w, d = kernels["gate_up"][number], kernels["down"][number], weight[token, slot], d_out[token]
        gate, up = np.einsum("d,dgf->gf", x[token], gate_up) + kernels["bias"][number]
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        out[token] += w * (hidden @ down)
        d_weight[token, slot] = hidden @ down @ d
        d_hidden = w * (down @ d)
        both = np.stack([d_hidden * up * sigmoid * (1 + gate * (1 - sigmoid)), d_hidden * gate * sigmoid])
        dx[token] += np.einsum("gf,dgf->d", both, gate_up)
        d_kernels["gate_up"][number] += np.einsum("d,gf->dgf", x[token], both)
        d_kernels["bias"][number] += both
        d_kernels["down"][number] += w * np.outer(hidden, d)
    return out, d_kernels, dx, d_weight


def arrays(choice: np.ndarray, width: int = 12, hidden: int = 10) -> tuple:
    random = np.random.default_rng(1)
    kernels = {
        "gate_up": random.normal(size=(EXPERTS, width, 2, hidden)) / width**0.5,
        "bias": random.normal(size=(EXPERTS, 2, hidden)),
        "down": random.normal(size=(EXPERTS, hidden, width)) / hidden**0.5,
    }
    x, d_out = random.normal(size=(2, len(choice), width))
    return kernels, x, choice, random.random(choice.shape), d_out


def loads(sizes: list[int], nobody: int = 0) -> np.ndarray:
    """Choices [T, 2] of so many for each expert, in a random order."""
    choice = np.repeat(np.arange(EXPERTS + 1, dtype=np.int32), [*sizes, nobody])
    return np.random.default_rng(2).permutation(choice).reshape(-1, CHOICES)


def outputs(function, kernels, x, choice, weight, d_out, dtype=jnp.float32) -> tuple:
    """The output of `function(expert, kernels, x, choice, weight)`, and the gradients of kernels, x and weight."""
    kernels, x = jax.tree.map(lambda a: jnp.asarray(a, dtype), (kernels, x))
    weight, d_out = jnp.asarray(weight, jnp.float32), jnp.asarray(d_out, jnp.float32)

    @jax.jit
    def run(kernels, x, weight):
        out, pull = jax.vjp(lambda k, x, w: function(expert, k, x, jnp.asarray(choice), w), kernels, x, weight)
        return out, *pull(d_out)

    return run(kernels, x, weight)


def assert_near(found, expected, tolerance: float) -> None:
    """Within `tolerance` of the largest element of each array."""
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


LOADS = {
    "one chunk": (loads([3, 40, 0, 17, 60]), 128),
    "an even load": (loads([52] * 5), 128),
    "empty experts first and last": (loads([0, 0, 301, 33, 0]), 128),
    "all to one expert": (loads([0, 0, 0, 420, 0]), 128),
    "most of them nobody's": (loads([0, 9, 130, 1, 20], nobody=200), 128),
    "nobody's": (loads([0] * 5, nobody=260), 128),
}


@pytest.mark.parametrize("name", LOADS)
def test_chunks_give_the_output_and_all_gradients_whatever_the_load(name: str) -> None:
    choice, rows = LOADS[name]
    case = arrays(choice)
    assert_near(outputs(functools.partial(chunked, ragged, rows), *case), by_hand(*case), 2e-6)


def test_a_chunk_takes_the_memory_of_its_rows_alone() -> None:
    """Eight times the choices, computed as many at a time: what is not as large as x or choice does not grow."""

    def temporaries(tokens: int) -> int:
        choice = np.zeros((tokens, 8), np.int32)
        kernels, x, choice, weight, _ = arrays(choice, width=96, hidden=64)
        single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (kernels, x, weight))
        run = jax.jit(lambda k, x, w: chunked(ragged, 256, expert, k, x, jnp.asarray(choice), w))
        return run.lower(*single).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(64), temporaries(512)
    assert many - few < 4 * 8 * (512 - 64) * 96  # float32 rows of all choices would be this much


@pytest.mark.parametrize("mesh", ["expert 4 x data 2", "expert 2 x tensor 2 x sequence 2"])
def test_a_mesh_gives_what_one_device_gives(mesh: str) -> None:
    expected, found = mixture(None, "blocks"), mixture(mesh, "ragged")
    assert_near(found, expected, 1e-5)


def mixture(mesh: str | None, kernel: str) -> tuple:
    """Output and gradients of a mixture whose three favourites, of 16, have nearly all the load."""
    sizes = {"width": 24, "experts": 16, "std": 0.5, "rngs": nnx.Rngs(3)}
    select = functools.partial(softmax_then_top, top_k=3, renormalise=True)
    moe = MixtureOfExperts(router=Router(select=select, **sizes), experts=GatedExperts(hidden=20, **sizes))
    graphdef, params = nnx.split(moe)
    random = np.random.default_rng(4)
    x, d_out = random.normal(size=(2, 8, 48, 24)).astype(np.float32)
    x += np.asarray(moe.router.kernel[...])[:, :3].sum(1) * 2
    real = jnp.asarray(np.arange(48) < random.integers(20, 49, (8, 1)))
    with on(mesh, qwen3_moe.table()), use_grouped(kernel):

        @jax.jit
        def run(params, x):
            (y, routing), pull = jax.vjp(lambda p, x: nnx.merge(graphdef, p)(x, real), params, x)
            zeros = jax.tree.map(jnp.zeros_like, routing)
            return y, routing.load, pull((jnp.asarray(d_out), zeros))

        y, load, gradients = jax.device_get(run(params, x))
    assert load[:3].sum() > 0.8 * load.sum()
    return y, load, gradients


def test_the_kernel_is_chosen_by_context_and_is_part_of_a_programs_key() -> None:
    kernels, x, choice, weight, _ = arrays(loads([3, 40, 0, 17, 60]))
    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (kernels, x, weight))
    run = jax.jit(lambda k, x, w: apply_experts(expert, k, x, jnp.asarray(choice), w))
    with use_grouped("ragged"):
        assert "ragged_dot" in str(run.trace(*single).jaxpr)
    assert "ragged_dot" not in str(run.trace(*single).jaxpr)
    with pytest.raises(UserError, match="experts' kernel 'triton' does not exist; choose one of auto, blocks"):
        use_grouped("triton").__enter__()


def test_tokamax_says_what_it_cannot_do() -> None:
    case = arrays(loads([3, 40, 0, 17, 60]))
    with use_grouped("tokamax"):
        with pytest.raises(UserError, match=r"takes rows and kernels all in bfloat16 .* not float32; use the experts'"):
            outputs(apply_experts, *case)
        if not HAS_TOKAMAX:
            with pytest.raises(UserError, match=re.escape("pip install 'omnijax[tokamax]'")):
                outputs(apply_experts, *case, dtype=jnp.bfloat16)
        elif jax.default_backend() != "gpu":
            with pytest.raises(UserError, match=r"no kernel of tokamax takes these arrays here .*Not supported on cpu"):
                outputs(apply_experts, *case, dtype=jnp.bfloat16)


def test_a_run_with_experts_says_which_kernel_computes_them() -> None:
    said = report.compute_text(Compute(), "blockwise", None, experts="ragged")
    assert "attention kernel blockwise; experts' kernel ragged; remat full;" in said
    assert "experts" not in report.compute_text(Compute(), "blockwise", None)


@needs_tokamax
def test_tokamaxs_kernel_for_gradients_of_kernels_is_read_right(monkeypatch) -> None:
    """Interpreted. To an empty expert it gives the product of the rows before, which exist, and are not taken."""
    from tokamax._src import config

    def interpreted(*arguments, compiler_params, call=pallas.pallas_call, **options):
        return call(*arguments, interpret=True, **options)

    monkeypatch.setattr(pallas, "pallas_call", interpreted)
    triton = gpu_grouped._configured("triton", gpu_grouped._tokamax_parts()[0]["triton"])
    raw = []

    def product(left, right, sizes, numbers):
        if numbers != TO_KERNEL:
            return ragged(left, right, sizes, numbers)
        return triton(
            left, right, group_sizes=sizes, ragged_dot_dimension_numbers=numbers, preferred_element_type=left.dtype
        )

    case = arrays(loads([0, 0, 101, 33, 0]))
    with config.cross_compile(True):
        assert_near(outputs(functools.partial(chunked, product, 256), *case), by_hand(*case), 2e-6)
        x = jnp.ones((2 * MARGIN, 16))
        raw = product(x, x, jnp.array([MARGIN, 0, 5], jnp.int32), TO_KERNEL)
    assert raw[1].max() > 0  # a newer tokamax that mends this needs neither the margin nor our zeros


def lowered(width: int, hidden: int) -> str:
    """The program for GPUs of an output and its gradients."""
    from tokamax._src import config

    kernels, x, choice, weight, d_out = arrays(loads([3, 400, 0, 17, 60]), width, hidden)

    def run(kernels, x, weight):
        out, pull = jax.vjp(lambda k, x, w: apply_experts(expert, k, x, jnp.asarray(choice), w), kernels, x, weight)
        return out, *pull(jnp.asarray(d_out, jnp.float32))

    half = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (kernels, x))
    with use_grouped("tokamax"), config.cross_compile(True):
        traced = jax.jit(run).trace(*half, jnp.asarray(weight, jnp.float32))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_tokamax
@pytest.mark.parametrize(("width", "mosaic"), [(256, True), (192, False)])
def test_tokamax_lowers_to_its_kernels(width: int, mosaic: bool, monkeypatch) -> None:
    """On Hopper, Mosaic where its blocks divide the widths, Triton elsewhere; gradients of kernels are Triton's."""
    from tokamax._src import gpu_utils

    monkeypatch.setattr(gpu_utils, "is_sm90", lambda device=None: True)
    text = lowered(width, hidden=width // 2)
    products = len(re.findall(r"@mosaic_gpu", text)), len(re.findall(r"@__gpu\$xla\.gpu\.triton", text))
    # By kernels: forward 2, backward the first of them again and 2 more. Of kernels: backward 2.
    assert products == ((5, 2) if mosaic else (0, 7))
    assert f"{EXPERTS}x{480 + 2 * MARGIN}" not in text.replace("tensor<", "")  # no row meets every expert


@needs_tokamax
def test_tokamax_lowers_on_a_mesh() -> None:
    from tokamax._src import config

    sizes = {"width": 64, "experts": 16, "std": 0.5, "rngs": nnx.Rngs(3)}
    select = functools.partial(softmax_then_top, top_k=3, renormalise=True)
    moe = MixtureOfExperts(router=Router(select=select, **sizes), experts=GatedExperts(hidden=32, **sizes))
    graphdef, params = nnx.split(moe)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)

    def total(params, x):
        return nnx.merge(graphdef, params)(x, jnp.ones((8, 48), bool))[0].astype(jnp.float32).sum()

    x = jnp.ones((8, 48, 64), jnp.bfloat16)
    with on("expert 4 x data 2", qwen3_moe.table()), use_grouped("tokamax"), config.cross_compile(True):
        text = jax.jit(jax.grad(total)).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kernel", ["ragged", pytest.param("tokamax", marks=needs_tokamax)])
@pytest.mark.parametrize("width", [256, 192, 168])
@pytest.mark.parametrize("name", ["one chunk", "empty experts first and last", "all to one expert"])
def test_kernels_agree_with_float64_on_a_gpu(name: str, width: int, kernel: str) -> None:
    case = arrays(LOADS[name][0], width, hidden=width // 2)
    for share in (1, 3):
        with use_grouped(kernel):
            found = outputs(functools.partial(apply_experts, share=share), *case, dtype=jnp.bfloat16)
        assert_near(found, by_hand(*case), 0.03)
