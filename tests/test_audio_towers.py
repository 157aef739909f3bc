"""Audio towers on packed chunks: transformers' numbers and gradients, one clip never in another, any mesh."""

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from models.audio import mel
from models.audio.layers import Convolution
from models.audio.qwen2_5_omni import Qwen2_5OmniAudio, Qwen2_5OmniAudioConfig
from models.audio.qwen3_omni import Qwen3OmniAudio, Qwen3OmniAudioConfig
from models.audio.whisper import WhisperConfig, WhisperEncoder
from omnijax import hf, parameters
from omnijax.batch import Media
from omnijax.errors import UserError
from sharding_rules import audio_tower
from tests.laws import GOLDEN
from tests.meshes import on


@dataclass(frozen=True)
class Family:
    """A tower, a tiny config of it, and by hand: frames and features of a unit, and tokens of a clip's frames.

    unread: the parameter that nothing trains, behind the `prefix` of Hugging Face names
    """

    tower: Any
    tiny: Any
    frames: int
    encoded: int
    tokens: Callable[[int], int]
    prefix: str
    unread: str


SIZES = {"num_mel_bins": 10, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "d_model": 32}
FAMILIES = {
    "whisper": Family(
        WhisperEncoder,
        WhisperConfig(**SIZES, max_source_positions=25),
        50,
        25,
        lambda frames: -(-frames // 2),
        "model.encoder.",
        "embed_positions.weight",
    ),
    "qwen2_5_omni": Family(
        Qwen2_5OmniAudio,
        Qwen2_5OmniAudioConfig(**SIZES, n_window=8, output_dim=24),
        16,
        4,
        lambda frames: -(-frames // 2) // 2,
        "audio_tower.",
        "audio_bos_eos_token.weight",
    ),
    "qwen3_omni_moe": Family(
        Qwen3OmniAudio,
        Qwen3OmniAudioConfig(**SIZES, n_window_infer=200, output_dim=24, downsample_hidden_size=6),
        100,
        13,
        lambda frames: frames // 100 * 13 + -(-(frames % 100) // 8),
        "audio_tower.",
        "",
    ),
}


def packed(family: str, clips: list[np.ndarray], *, padding: int = 0) -> tuple[Media, list[np.ndarray]]:
    """Clips `[bins, frames]` as one row with `padding` units behind them, and the features that stand for each."""
    each = FAMILIES[family]
    parts, slots, used = [], [], 0
    for clip in clips:
        count = clip.shape[1]
        parts.append(mel.units(clip, count, each.frames, encoded=each.encoded, tokens=each.tokens(count)))
        slots.append(used + np.arange(parts[-1].tokens))
        used += parts[-1].encoded

    def row(xs: list[np.ndarray]) -> jax.Array:
        x = np.concatenate(xs)
        return jnp.asarray(np.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1))))[None]

    segments = [np.full(len(part.features), number, np.int32) for number, part in enumerate(parts, 1)]
    names = ("features", "unit_positions", "unit_grid", "unit_valid")
    media = Media(**{name: row([getattr(part, name) for part in parts]) for name in names}, unit_segments=row(segments))
    return media, slots


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def scaled_by(name: str) -> str:
    """What says how large an error is. A bias of all keys changes no softmax, so its gradient is all rounding."""
    return name.replace("k_proj.bias", "q_proj.bias")


def reference_clips(reference: dict[str, np.ndarray]) -> list[np.ndarray]:
    features = reference["in/input_features"]
    if "in/feature_lens" not in reference:
        return list(features)
    return np.split(features, np.cumsum(reference["in/feature_lens"])[:-1], axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_gives_transformers_tokens_and_gradients(family):
    """Clips of odd lengths in one row, padded; the tolerances are those of the reference cases."""
    each, folder = FAMILIES[family], GOLDEN / family / "audio"
    reference = dict(np.load(folder / "packed.npz"))
    model = hf.load(each.tower, folder)
    media, slots = packed(family, reference_clips(reference), padding=2)
    width = reference["out/embeds"].shape[-1]
    expected, cotangent = (reference[name].reshape(-1, width) for name in ("out/embeds", "in/cotangent"))
    places = np.concatenate(slots)
    graphdef, params = parameters.split(model)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        embeds = parameters.merge(graphdef, params)(media)[0, places]
        return (embeds * cotangent).sum(), embeds

    (_, embeds), gradients = jax.jit(loss)(params)
    assert np.abs(embeds - expected).max() <= 5e-5 * np.abs(expected).max()
    found = dict(hf.tensors(model, gradients))
    unread = found.pop(each.prefix + each.unread, None)
    assert unread is None or not unread.any()
    names = {name.removeprefix("grad/") for name in reference if name.startswith("grad/")}
    assert found.keys() == names
    for name in names:
        expected = reference[f"grad/{name}"]
        largest = np.abs(reference[f"grad/{scaled_by(name)}"]).max()
        assert np.abs(found[name] - expected).max() <= 2e-4 * largest, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_reads_what_it_writes(family, tmp_path):
    tower = FAMILIES[family].tower
    model = hf.load(tower, GOLDEN / family / "audio")
    hf.save(model, tmp_path)
    again = hf.load(tower, tmp_path)
    assert again.config == model.config
    for path, x in parameters.split(model)[1].items():
        np.testing.assert_array_equal(parameters.split(again)[1][path], x, err_msg=path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clip_in_a_row_is_as_alone(family):
    """Also where all are of one document, which has one number for all its clips; padding is between and behind."""
    each = FAMILIES[family]
    graphdef, params = parameters.split(each.tiny.build(rngs=nnx.Rngs(1)))

    @jax.jit
    def model(media):
        return parameters.merge(graphdef, params)(media)

    lengths = [2 * each.frames + 5, each.frames // 3, each.frames, 3]
    clips = [noise((10, length), seed) for seed, length in enumerate(lengths)]
    media, slots = packed(family, clips, padding=1)
    one_document = dataclasses.replace(media, unit_segments=jnp.minimum(media.unit_segments, 1))
    together = model(one_document)
    np.testing.assert_array_equal(together, model(media))
    for clip, places in zip(clips, slots, strict=True):
        assert len(places) == each.tokens(clip.shape[1])
        alone = model(packed(family, [clip])[0])[0, : len(places)]
        np.testing.assert_allclose(together[0, places], alone, atol=2e-6 * np.abs(alone).max())

    def reach(features):
        return (model(dataclasses.replace(one_document, features=features))[0, slots[1]] ** 2).sum()

    gradient = np.asarray(jax.jit(jax.grad(reach))(media.features))[0]
    assert (gradient[3] != 0).any(0)[: lengths[1]].all()
    assert (gradient[[0, 1, 2, 4, 5, 6]] == 0).all()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "whisper"])
def test_what_stands_behind_a_clip_in_its_unit_is_not_heard(family):
    each = FAMILIES[family]
    model = each.tiny.build(rngs=nnx.Rngs(1))
    media, (slots,) = packed(family, [noise((10, each.frames + each.frames // 3), 1)])
    behind = jnp.arange(each.frames) >= media.unit_valid[..., None]
    other = jnp.where(behind[:, :, None], jnp.nan, media.features)
    expected = model(media)[0, slots]
    np.testing.assert_array_equal(model(dataclasses.replace(media, features=other))[0, slots], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_without_clips_gives_finite_features_and_no_gradient(family):
    each = FAMILIES[family]
    graphdef, params = parameters.split(each.tiny.build(rngs=nnx.Rngs(1)))
    media = jax.tree.map(jnp.zeros_like, packed(family, [noise((10, each.frames), 1)])[0])

    def nothing(params):
        return (parameters.merge(graphdef, params)(media) * 0).sum()

    value, gradients = jax.jit(jax.value_and_grad(nothing))(params)
    assert value == 0
    assert not any(x.any() for x in gradients.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_computes_in_the_dtype_of_its_parameters(family):
    each = FAMILIES[family]
    model = each.tiny.build(rngs=nnx.Rngs(1))
    graphdef, params = parameters.split(model)
    media, (slots,) = packed(family, [noise((10, each.frames), 1)])
    exact = model(media)[0, slots]
    rounded = parameters.merge(graphdef, parameters.cast(params, jnp.bfloat16, model))(media)[0, slots]
    assert rounded.dtype == jnp.bfloat16
    assert np.abs(rounded - exact).max() <= 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_any_mesh_gives_the_tokens_and_gradients_of_one_device(family, attention):
    each, rules = FAMILIES[family], audio_tower.table(attention)
    rows = []
    for row, lengths in enumerate([(each.frames + 3, 5), (each.frames - 1, each.frames, each.frames, 7)]):
        clips = [noise((10, length), 10 * row + seed) for seed, length in enumerate(lengths)]
        rows.append(packed(family, clips, padding=1 - row)[0])
    media = jax.tree.map(lambda *xs: jnp.concatenate(xs), *rows)
    width = getattr(each.tiny, "output_dim", each.tiny.d_model)
    cotangent = jnp.asarray(noise((2, 4 * each.encoded, width), 3))
    found = []
    for mesh_name in (None, "data 2 x sequence 2 x tensor 2"):
        with on(mesh_name, rules) as mesh:
            graphdef, params = parameters.split(parameters.build_model(each.tiny, mesh, rules, seed=4))

            @functools.partial(jax.jit, static_argnums=0)
            @functools.partial(jax.value_and_grad, argnums=1, has_aux=True)
            def loss(graphdef, params, media):
                tokens = parameters.merge(graphdef, params)(media)
                return (tokens * cotangent).sum(), tokens

            (_, tokens), gradients = jax.device_get(loss(graphdef, params, media))
            found.append({"tokens": tokens} | gradients)
    for name, expected in found[0].items():
        largest = np.abs(found[0][scaled_by(name)]).max() or 1  # nothing trains some
        error = np.abs(found[1][name] - expected).max() / largest
        assert error <= 1e-5, f"{name}: {error:.2e}"


def test_convolutions_leave_units_where_they_are():
    """What devices exchange is weights and their gradients: of arrays with units, nothing moves."""
    graphdef, params = parameters.split(Convolution(8, 16, 2, stride=2, std=0.1, rngs=nnx.Rngs(0)))
    x = np.zeros((4, 4, 10, 12, 8), np.float32)
    with on("data 2 x sequence 2 x tensor 2", audio_tower.table()) as mesh:
        split = NamedSharding(mesh, PartitionSpec("data", "sequence"))
        where = {
            "kernel": NamedSharding(mesh, PartitionSpec(("data", "sequence"))),
            "bias": NamedSharding(mesh, PartitionSpec()),
        }

        def loss(params, x):
            return (parameters.merge(graphdef, params)(x) ** 2).sum()

        step = jax.jit(jax.grad(loss, (0, 1)), in_shardings=(where, split), out_shardings=(where, split))
        program = step.lower(params, x).compile().as_text()
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all|collective|reduce)[a-z-]+\(", program)
    assert moved
    assert max(shape.count(",") for shape in moved) <= 1, moved


def test_a_config_reads_alone_and_in_a_whole_model():
    alone = {"model_type": "qwen2_5_omni_audio_encoder", "dropout": 0.0, "scale_embedding": False, "n_window": 50}
    expected = Qwen2_5OmniAudioConfig(n_window=50)
    for values in (alone, {"audio_config": alone}, {"thinker_config": {"audio_config": alone, "x": 1}, "y": 2}):
        assert Qwen2_5OmniAudioConfig.from_hf(values) == expected
    assert Qwen2_5OmniAudioConfig.from_hf(expected.to_hf()) == expected


def test_dropout_of_a_checkpoint_is_told(caplog):
    Qwen2_5OmniAudioConfig.from_hf({"attention_dropout": 0.1, "dropout": 0.0})
    assert "attention_dropout" in caplog.text
    assert caplog.text.count("dropout") == 1


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (WhisperConfig, {"activation_function": "relu"}, "activation_function = 'relu'"),
        (WhisperConfig, {"model_type": "wav2vec2"}, "'wav2vec2' is not 'whisper'"),
        (WhisperConfig, {"encoder_attention_heads": 7}, "d_model = 384 must be"),
        (WhisperConfig, {"d_model": "384"}, "d_model = '384' is not an int"),
        (Qwen2_5OmniAudioConfig, {"n_window": 25}, "n_window = 25 must be even"),
        (Qwen2_5OmniAudioConfig, {"n_window": 2000}, "max_source_positions = 1500"),
        (Qwen3OmniAudioConfig, {"n_window": 40}, "n_window = 40 is not supported"),
        (Qwen3OmniAudioConfig, {"n_window_infer": 50}, "n_window_infer = 50 must be at least 100"),
        (Qwen3OmniAudioConfig, {"max_source_positions": 8}, "at least the 13 tokens"),
    ],
)
def test_a_config_that_is_not_this_family_is_one_line(config, values, message):
    with pytest.raises(UserError) as caught:
        config.from_hf(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_window_of_another_length_is_one_line():
    each = FAMILIES["whisper"]
    media, _ = packed("whisper", [noise((10, 50), 1)])
    media = dataclasses.replace(media, features=media.features[..., :40])
    with pytest.raises(UserError, match="units of 40 frames must have 50"):
        each.tiny.build(rngs=nnx.Rngs(0))(media)
