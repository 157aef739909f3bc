"""Published weights give transformers' numbers. Needs the extra `peer`, and what `examples/speech/fetch.py` fetched.

OMNIJAX_SPEECH=FOLDER python -m pytest -m peer -s tests/test_peer_real_weights.py
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.audio import mel
from models.audio.whisper import WhisperEncoder
from omnijax import hf
from omnijax.batch import Media
from omnijax.data.media.audio import AudioLimits, load_audio
from omnijax.data.sample import MediaReference, RowId
from omnijax.sampling import sample

FOLDER = os.environ.get("OMNIJAX_SPEECH", "")

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not FOLDER, reason="OMNIJAX_SPEECH does not name a folder of examples/speech/fetch.py"),
]

# Article 1 of the Universal Declaration of Human Rights, and the sentence after it.
TEXT = (
    "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience and "
    "should act towards one another in a spirit of brotherhood. Everyone is entitled to all the rights and freedoms "
    "set forth in this Declaration, without distinction of any kind, such as race, colour, sex, language, religion, "
    "political or other opinion, national or social origin, property, birth or other status."
)


@pytest.fixture(scope="module")
def smollm2():
    """Our model, transformers' model, and its tokenizer."""
    import transformers

    folder = Path(FOLDER) / "smollm2"
    peer, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return hf.load(models.family_of(folder), folder), peer, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("prompt", ["The capital of France is", "def fibonacci(n):\n", "Once upon a time"])
def test_greedy_text_is_that_of_transformers(prompt: str, smollm2):
    ours, peer, tokenizer = smollm2
    ids = tokenizer(prompt, return_tensors="pt")
    expected = peer.generate(**ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    found = sample(ours, ids["input_ids"][0].numpy(), tokens=24, context=48, temperature=0.0)
    print(repr(prompt + tokenizer.decode(found)))
    assert found.tolist() == expected.tolist()


def test_logits_and_cross_entropy_of_a_text(smollm2):
    import torch

    ours, peer, tokenizer = smollm2
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        theirs = peer(ids, labels=ids)
    batch = hf.to_batch(ours, {"input_ids": ids.numpy(), "labels": ids.numpy()})
    outputs = ours(batch)
    logits = np.asarray(ours.logits(outputs.hidden))
    (total, weight), expected = outputs.objectives["text"], theirs.logits.numpy()
    difference = np.abs(logits - expected).max()
    print(f"cross entropy {float(total / weight):.6f} of {ids.shape[1]} tokens, transformers {theirs.loss:.6f}; "
          f"largest difference of a logit {difference:.1e} of {np.abs(expected).max():.1f}")  # fmt: skip
    assert difference <= 1e-4 * np.abs(expected).max()
    assert abs(float(total / weight) - float(theirs.loss)) < 5e-5
    assert float(theirs.loss) < 2.0  # chance is ln 49152 = 10.8


def test_the_tokenizer_splits_as_llama_cpp_says(smollm2):
    """Digits one by one, words with the space before them, and every text comes back."""
    tokenizer = smollm2[2]
    assert tokenizer.tokenize("in 2024, I'm here") == ["in", "Ġ", "2", "0", "2", "4", ",", "ĠI", "'m", "Ġhere"]
    for text in (TEXT, "naïve 東京\n\t x  y", "<|im_start|>user\nHi<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_whisper_hears_a_held_out_clip_as_in_transformers():
    import torch
    import transformers

    folder = Path(FOLDER) / "whisper_tiny_en"
    rows = [
        json.loads(line)["messages"] for line in (Path(FOLDER) / "speech" / "heldout.jsonl").read_text().splitlines()
    ]
    name, said = next(
        (row[0]["content"][0]["audio"], row[1]["content"]) for row in rows if "not available" in row[1]["content"]
    )
    clip = MediaReference(path=str(Path(FOLDER) / "speech" / name))
    sound = load_audio(clip, AudioLimits(), RowId("speech", name, 0)).samples
    peer, report = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    processor = transformers.AutoProcessor.from_pretrained(folder)
    theirs = processor.feature_extractor(sound, sampling_rate=mel.RATE, return_tensors="pt").input_features
    with torch.no_grad():
        expected = peer.get_encoder()(theirs).last_hidden_state[0].numpy()
        heard = processor.tokenizer.decode(peer.generate(theirs)[0], skip_special_tokens=True).strip()

    ours = mel.whisper(sound)
    units = {name: jnp.asarray(getattr(ours, name))[None] for name in ("features", "unit_positions", "unit_grid")}
    valid = jnp.asarray(ours.unit_valid)[None]
    media = Media(**units, unit_segments=jnp.ones((1, 1), jnp.int32), unit_valid=valid)
    found = np.asarray(jax.jit(hf.load(WhisperEncoder, folder))(media))[0]
    mel_difference = np.abs(ours.features[0] - theirs[0].numpy()).max()
    difference, scale = np.abs(found - expected).max(), np.abs(expected).max()
    print(f"{name}: said {said!r}, heard {heard!r}; spectrograms differ by {mel_difference:.1e}, "
          f"features by {difference:.1e} of {scale:.1f}")  # fmt: skip
    assert heard == said
    assert mel_difference <= 1e-4
    assert difference <= 1e-4 * scale
