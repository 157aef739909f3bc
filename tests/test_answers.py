"""Held-out chats answered: greedily, many at once, as one alone; and what counts as right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.qwen3 import Qwen3Config
from omnijax import parameters
from omnijax.answers import answer, answering, first_answers
from omnijax.batch import Batch
from omnijax.data.chat_source import ChatItems
from omnijax.data.digits import WORDS, Digits
from omnijax.data.packing import Rows
from omnijax.data.tokenizer import Bytes
from omnijax.sampling import sample
from sharding_rules import qwen3
from tests.meshes import on

CONFIG = Qwen3Config(
    vocab_size=257,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    initializer_range=0.3,
)
PROMPTS = ("ask", "what is", "a", "tell me")


@functools.cache
def model():
    return CONFIG.build(rngs=nnx.Rngs(3))


def rows_of(answers: list[bytes]) -> Rows:
    """Two rows of 24 tokens with two documents each: a prompt, and what should follow."""
    names = ("tokens", "segment_ids", "positions", "targets", "sources")
    arrays = {name: np.zeros((2, 24), np.int32) for name in names} | {"weights": np.zeros((2, 24), np.float32)}
    for number, (prompt, said) in enumerate(zip(PROMPTS, answers, strict=True)):
        row, place = number // 2, 12 * (number % 2)
        whole = np.frombuffer(prompt.encode() + said, np.uint8).astype(np.int32)
        end = place + len(whole)
        arrays["tokens"][row, place:end] = whole
        arrays["segment_ids"][row, place:end] = number % 2 + 1
        arrays["positions"][row, place:end] = np.arange(len(whole))
        arrays["targets"][row, place : end - 1] = whole[1:]
        arrays["weights"][row, place + len(prompt) - 1 : end - 1] = 1
    return Rows(arrays, (("r:0", "r:1"), ("r:2", "r:3")), None, {})


@pytest.mark.parametrize("mesh", [None, "data 2 x sequence 2 x tensor 2"])
def test_answers_are_those_of_sampling_one_at_a_time(mesh):
    greedy = []
    for prompt in PROMPTS:
        ids = sample(model(), np.frombuffer(prompt.encode(), np.uint8), tokens=4, context=24, temperature=0.0)
        greedy.append(bytes(int(i) for i in ids if i < 256) if (np.asarray(ids) < 256).all() else b"zzzz")
    wrong = bytes([greedy[2][0] ^ 1]) + greedy[2][1:]
    rows = rows_of([greedy[0], greedy[1], wrong, greedy[3][:2]])
    rules = qwen3.table()
    with on(mesh, rules) as on_mesh:
        follow = answering(model(), on_mesh, dtype=jnp.float32)
        params = parameters.split(model())[1]
        params = jax.device_put(params, parameters.shardings(model(), on_mesh, rules))
        found = answer(follow, params, [rows, rows], Bytes(), on_mesh, rules)
        assert follow._cache_size() == 1
    assert len(found) == 8
    for each, said in zip(found, [greedy[0], greedy[1], greedy[2], greedy[3][:2]] * 2, strict=True):
        assert each.said == said.decode(errors="replace")
    assert [each.right for each in found[:4]] == [True, True, False, True]
    assert [each.row_id for each in found[:4]] == ["r:0", "r:1", "r:2", "r:3"]
    assert found[2].wanted == wrong.decode(errors="replace")


def test_only_the_first_answer_of_a_chat_is_asked_for():
    arrays = rows_of([b"yes!", b"no", b"12345", b""]).arrays
    arrays["weights"][0, 4] = 0  # a gap: what follows is another answer
    found = [(each.row, each.document, each.first, each.end) for each in first_answers(arrays)]
    assert found == [(0, 0, 3, 5), (0, 1, 19, 21), (1, 0, 1, 6)]


def test_digits_are_chats_with_a_picture():
    chat = Digits()
    rows = chat.open()
    assert len(rows) == 1797
    assert sum(rows[index]["messages"][1]["content"] == "three" for index in range(len(rows))) == 183
    with pytest.raises(IndexError):
        rows.row_id(1797)
    question, reply = ChatItems(rows, chat, Bytes()).sample(5).parts[1:]
    assert question.text == "Which digit?"
    assert reply.text in WORDS
    assert reply.trained


def test_a_batch_needs_no_places():
    """The prompt decides the answer: what stands where it will be written does not."""
    one, other = (rows_of([text] * 4).arrays for text in (b"aaaa", b"zzzz"))
    batches = [Batch(**{name: jnp.asarray(x) for name, x in arrays.items()}) for arrays in (one, other)]
    with on(None, qwen3.table()) as mesh:
        follow = answering(model(), mesh, dtype=jnp.float32)
        params = parameters.split(model())[1]
        places = jnp.asarray([[2, 18], [0, 18]], jnp.int32)
        first, second = (np.asarray(follow(params, batch, places)) for batch in batches)
    np.testing.assert_array_equal(first, second)
