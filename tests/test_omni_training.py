"""Pictures and sounds of one chat train a thinker: from files to packed rows to steps of one program."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from PIL import Image

from models.audio.processor import Qwen2_5OmniAudioProcessor
from models.vision.omni_processor import Qwen2_5OmniVisionProcessor
from omnijax import config, parameters, sharding
from omnijax.data.chat_source import Chat
from omnijax.data.media.image import ImageLimits
from omnijax.data.mixture import open_members
from omnijax.data.pipeline import make_pipeline
from omnijax.data.processors import Processors
from omnijax.data.stream import ExactStream
from omnijax.mesh import make_mesh
from omnijax.optim import make_optimizer
from omnijax.step import init_state, put_batch, train_step
from sharding_rules import qwen2_5_omni as rules
from tests.test_chat import add_names, byte_pairs, save
from tests.test_chat_training import exchange, write
from tests.test_media import noise, wav
from tests.test_thinkers import TINY

NAMES = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "audio_token_id": "<|AUDIO|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
EYE = Qwen2_5OmniVisionProcessor(
    patch_size=2,
    window=4,
    tokens_per_second=4,
    image=ImageLimits(16, 256),
    image_token="<|image_pad|>",
    video_token="<|video_pad|>",
    start="<|vision_start|>",
    end="<|vision_end|>",
)


@pytest.fixture
def data(tmp_path: Path) -> config.Data:
    """Chats about a picture, a sound of 50 ms to 1.5 s, both, or neither."""
    Image.fromarray(noise(12, 16)).save(tmp_path / "a.png")
    for number, seconds in enumerate((0.05, 0.3, 1.5)):
        samples = np.random.default_rng(number).standard_normal(round(16000 * seconds)) / 20
        (tmp_path / f"{number}.wav").write_bytes(wav(samples.astype(np.float32)))
    picture = {"type": "image", "path": "a.png"}
    sounds = [{"type": "audio", "path": f"{number}.wav"} for number in range(3)]
    parts = [[picture], [sounds[0]], [sounds[1], picture], [picture, sounds[2], sounds[0]]]
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": "It is so."}]}
        for each in parts
    ]
    pairs = add_names(byte_pairs())
    pairs.add_special_tokens([name for name in NAMES.values() if pairs.token_to_id(name) is None])
    path = write(tmp_path / "chats.jsonl", *[*rows, exchange(1)] * 8)
    both = Processors(EYE, Qwen2_5OmniAudioProcessor(num_mel_bins=10, n_window=8))
    source = Chat(path, processor=both, media_root=str(tmp_path), index_cache=None)
    tokenizer = save(pairs, tmp_path / "tokenizer")
    return config.Data(source, tokenizer, length=128, rows=8, units={"image": 96, "audio": 16}, look_ahead=4)


def test_a_thinker_learns_from_pictures_and_sounds(data: config.Data) -> None:
    library = tokenizers.Tokenizer.from_file(data.tokenizer.path)  # type: ignore[attr-defined]
    ids = {field: library.token_to_id(name) for field, name in NAMES.items()}
    tiny: Any = TINY["qwen2_5_omni"]
    text = dataclasses.replace(tiny.text_config, vocab_size=data.tokenizer.vocab_size)
    model_config = dataclasses.replace(tiny, text_config=text, **ids)
    data.source.processor.check(data.tokenizer, model_config)  # type: ignore[union-attr]
    stream = ExactStream(make_pipeline(data, open_members(data.source)[0], 0))
    mesh, table = make_mesh(data=8), rules.table()
    with sharding.use(mesh, table):
        model = parameters.build_model(model_config, mesh, table)
        settings = config.Optimizer(learning_rate=3e-3, schedule="constant")
        optimizer = make_optimizer(settings, 4, parameters.split(model)[1])
        step = train_step(model, optimizer, mesh, table, dtype=jnp.dtype("float32"))
        state, losses = init_state(model, optimizer, mesh, table), []
        for _ in range(4):
            rows = next(stream)
            state, results = step(state, put_batch(rows.arrays, mesh, table))
            losses.append(float(jax.device_get(results["loss"])))
    assert losses[-1] < losses[0]
    assert step._cache_size() == 1  # type: ignore[attr-defined]
    arrays = rows.arrays
    for name, tokens in (("image", ("image_token_id",)), ("audio", ("audio_token_id",))):
        stands = np.isin(arrays["tokens"], [ids[each] for each in tokens])
        assert np.array_equal(arrays[f"slots.{name}"] >= 0, stands)
        assert rows.metrics[f"fill/{name}"] > 0.1
    assert arrays["positions"].shape == (8, 128, 3)
    assert arrays["media.audio.features"].shape == (8, 16, 10, 16)
