"""Mixtures: shares, epochs, ends and schedules, by hand and by counting."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnijax.data.items import TextItems
from omnijax.data.mixture import Deal, Member, Mixture, deal_members, open_members, settle, weight_at
from omnijax.data.order import Order
from omnijax.data.packing import ConcatenateAndSplit
from omnijax.data.shards import Pipeline
from omnijax.data.sources import JsonLines, PythonDocuments, PythonText
from omnijax.data.stream import ExactStream
from omnijax.data.tokenizer import Bytes
from omnijax.errors import UserError

TEXTS = PythonText()


def refusal(function, *arguments, **keywords) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def draws(deal: Deal, shard: int, count: int, step: int = 0, sizes=lambda member, n: 1) -> list[int]:
    """The members of the first draws of a shard, all at one step; `sizes` gives what the n-th draw takes."""
    places, owed, members = [0] * len(deal.sizes), deal.first_owed(shard), []
    for n in range(count):
        drawn = deal.draw(shard, places, owed, deal.shares(step))
        if drawn is None:
            break
        member, shares = drawn
        places[member] += 1
        owed = settle(owed, shares, member, sizes(member, n))
        members.append(member)
    return members


def texts(name: str, count: int, size: int = 2) -> PythonDocuments:
    """Texts of `size` letters: `size` + 1 tokens each."""
    return PythonDocuments(name, tuple(map(str, range(count))), ("x" * size,) * count)


def stream_of(tables, *, length=3, rows=4, seed=0, **options) -> ExactStream:
    """The stream of tables in memory; the options are of `Deal`."""
    items = tuple(TextItems(table, Bytes(), number) for number, table in enumerate(tables))
    names = tuple(table.name for table in tables)
    deal = Deal(tuple(map(len, tables)), rows, seed, **({"names": names} | options))
    return ExactStream(Pipeline(items, deal, ConcatenateAndSplit(length), rows))


def ids_of(stream, steps: int | None = None) -> list[str]:
    found = [next(stream) for _ in range(steps)] if steps else list(stream)
    return [row_id.partition("[")[0] for rows in found for row in rows.row_ids for row_id in row]


# Shares


def test_the_member_furthest_behind_is_next_by_hand():
    deal = Deal((9, 9, 9), 1, 0, ("a", "b", "c"), (5.0, 3.0, 2.0), (None,) * 3)
    owed, members = [0.0, 0.0, 0.0], ""
    for _ in range(10):
        member, shares = deal.draw(0, [0, 0, 0], owed, deal.shares(0))
        owed = settle(owed, shares, member, 1)
        members += "abc"[member]
    assert members == "abcabacaba"  # behind by (0, 0, 0), (-.5, .3, .2), (0, -.4, .4), (.5, -.1, -.4), ...
    np.testing.assert_allclose(owed, 0, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.integers(0, 30), st.integers(1, 31))
def test_shares_of_rows_hold_for_any_number_of_rows(weights, shard, shards):
    deal = Deal(
        (99,) * len(weights), shards, 5, tuple(map(str, weights)), tuple(map(float, weights)), (None,) * len(weights)
    )
    members = np.array(draws(deal, shard % shards, 300))
    counts = np.cumsum(members[:, None] == np.arange(len(weights)), 0)
    wanted = np.arange(1, 301)[:, None] * np.array(weights) / sum(weights)
    assert (counts - wanted).min() > -2.5 - len(weights) / 2
    assert (counts - wanted).max() < 2.5


def test_700_of_1000_in_every_shard():
    deal = Deal((9, 9), 8, 0, ("a", "b"), (0.7, 0.3), (None, None))
    for shard in range(8):
        assert Counter(draws(deal, shard, 1000)) == {0: 700, 1: 300}


def test_shares_of_tokens():
    deal = Deal((9, 9), 4, 0, ("a", "b"), (3.0, 1.0), (None, None), by="tokens")
    random = np.random.default_rng(0)
    lengths = [random.integers(1, 50, 4000), random.integers(500, 3000, 4000)]
    for shard in range(4):
        members = draws(deal, shard, 4000, sizes=lambda member, n: int(lengths[member][n]))
        tokens = np.zeros(2)
        for n, member in enumerate(members):
            tokens[member] += lengths[member][n]
        assert abs(tokens[1] - tokens.sum() / 4) < 3000


def test_a_rare_member_is_spread_over_the_rows_of_batches():
    """One item a row: a batch of a hundred has one row of a member with one in a hundred, also of one that is new."""
    deal = Deal((99, 99), 100, 0, ("a", "rare"), (0.99, 0.01), (None, None))
    assert np.array([draws(deal, shard, 300) for shard in range(100)]).sum(0).tolist() == [1] * 300
    late = Deal((99, 99), 100, 0, ("a", "rare"), (1.0, ((0, 0.0), (1, 0.01))), (None, None))
    assert np.array([draws(late, shard, 300, step=0) for shard in range(100)]).sum() == 0
    assert np.array([draws(late, shard, 300, step=1) for shard in range(100)]).sum(0).max() == 1


# Schedules


def test_weights_between_the_points_of_a_schedule():
    points = ((0, 1.0), (10, 3.0), (20, 0.0))
    assert [weight_at(points, step, "constant") for step in (0, 9, 10, 19, 20, 99)] == [1, 1, 3, 3, 0, 0]
    assert [weight_at(points, step, "linear") for step in (0, 5, 10, 15, 20, 99)] == [1, 2, 3, 1.5, 0, 0]
    assert weight_at(0.25, 7, "linear") == 0.25


def test_a_schedule_applies_from_its_step_on_and_is_kept_over_a_restart():
    tables = [texts("a", 40), texts("b", 40)]
    schedule = {"weights": (((0, 1.0), (3, 0.0), (6, 1.0)), ((0, 0.0), (3, 1.0), (6, 3.0))), "epochs": (None, None)}
    stream = stream_of(tables, **schedule)
    seen = []
    for _ in range(26):
        rows = next(stream)
        seen.append(Counter(rows.arrays["sources"].ravel().tolist()))
        stream = stream_of(tables, **schedule)
        stream.restore(json.loads(json.dumps(rows.state)))
    assert seen[:6] == [{0: 12}] * 3 + [{1: 12}] * 3
    after = sum(seen[6:], Counter())
    assert after[0] / 3 == pytest.approx(20, abs=4)  # a quarter of the rows of 20 steps, to one in each shard
    assert after.total() == 20 * 12


def test_a_linear_schedule_applies_step_by_step():
    stream = stream_of(
        [texts("a", 40), texts("b", 40)],
        rows=40,
        weights=(((0, 1.0), (50, 0.0)), ((0, 0.0), (50, 1.0))),
        epochs=(None, None),
        interpolation="linear",
    )
    counts = [int((next(stream).arrays["sources"][:, 0] == 1).sum()) for _ in range(60)]
    np.testing.assert_allclose(np.cumsum(counts), np.cumsum([40 * min(step / 50, 1) for step in range(60)]), atol=40)
    assert counts[0] == 0
    assert counts[50:] == [40] * 10


# Epochs and ends


def test_never_repeats_every_member_in_a_new_order_each_epoch():
    stream = stream_of([texts("a", 12), texts("b", 4)], weights=(3.0, 1.0), epochs=(None, None))
    seen = ids_of(stream, 4 * 3)  # 16 documents in 4 steps: an epoch of both
    orders = []
    for epoch in range(3):
        orders.append([row_id for row_id in seen if row_id.startswith("python:a")][12 * epoch : 12 * epoch + 12])
    counts = Counter(seen)
    assert all(
        abs(counts[f"python:{name}:{row}"] - 3) <= 1 for name, size in (("a", 12), ("b", 4)) for row in range(size)
    )
    assert len(set(map(tuple, orders))) == 3


def test_all_ends_when_each_row_was_read_as_often_as_its_epochs():
    sizes, epochs = (9, 5, 14), (1, 3, 2)
    tables = [texts(name, size) for name, size in zip("abc", sizes, strict=True)]
    stream = stream_of(tables, weights=(1.0, 1.0, 5.0), epochs=epochs, stop="all")
    rows = list(stream)
    seen = Counter(row_id.partition("[")[0] for step in rows for row in step.row_ids for row_id in row)
    assert seen == {
        f"python:{name}:{row}": n for name, size, n in zip("abc", sizes, epochs, strict=True) for row in range(size)
    }
    assert next(stream, None) is None
    last = rows[-1].arrays  # shards that ended sooner give padding, so a batch has its shape to the end
    assert last["tokens"].shape == (4, 3)
    padding = [not ids for ids in rows[-1].row_ids]
    assert any(padding)
    assert not last["weights"][padding].any()
    again = stream_of(tables, weights=(1.0, 1.0, 5.0), epochs=epochs, stop="all")
    again.restore(rows[-1].state)
    assert next(again, None) is None


def test_first_ends_when_a_member_that_has_ended_is_due():
    stream = stream_of([texts("a", 8), texts("b", 40)], weights=(1.0, 1.0), epochs=(2, None), stop="first")
    seen = Counter(row_id.split(":")[1] for row_id in ids_of(stream))
    assert seen["a"] == 16
    assert abs(seen["b"] - 16) <= 2 * 4  # of each of the four shards, two at most


def test_a_mixture_of_which_only_weight_0_is_left_is_refused():
    stream = stream_of([texts("a", 4), texts("b", 4)], weights=(1.0, ((0, 0.0), (50, 1.0))), epochs=(1, 1), stop="all")
    next(stream)
    assert "of the mixture, only 'b' are left, which now have weight 0" in refusal(next, stream)


def test_orders_of_members_and_epochs_differ():
    orders = {
        tuple(Order(50, seed, member)[epoch * 50 + n] for n in range(50))
        for seed in (0, 1)
        for member in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 8
    assert all(sorted(order) == list(range(50)) for order in orders)


# What is refused


@pytest.mark.parametrize(
    ("members", "options", "expected"),
    [
        ((), {}, "Mixture.members have the names []: give at least one"),
        ((Member("a", TEXTS), Member("a", TEXTS)), {}, "have the names ['a', 'a']"),
        ((Member("a", TEXTS, -1.0),), {}, "member 'a' has weight -1.0: it must be a number of at least 0"),
        ((Member("a", TEXTS, float("nan")),), {}, "it must be a number of at least 0"),
        ((Member("a", TEXTS, 0.0),), {}, "it is never drawn; leave it out"),
        ((Member("a", TEXTS, ((5, 1.0),)),), {}, "the steps of its schedule must rise from 0"),
        ((Member("a", TEXTS, ((0, 1.0), (9, 1.0), (9, 2.0))),), {}, "the steps of its schedule must rise from 0"),
        (
            (Member("a", TEXTS, ((0, 1.0), (9, 0.0))), Member("b", TEXTS, ((0, 0.0), (10, 1.0)))),
            {},
            "all weights of the mixture are 0 at step 9",
        ),
        ((Member("a", TEXTS, epochs=2),), {}, "member 'a' has epochs 2, but Mixture.stop is 'never'"),
        ((Member("a", TEXTS, epochs=2), Member("b", TEXTS)), {"stop": "all"}, "stop is 'all', but 'b' never ends"),
        ((Member("a", TEXTS),), {"stop": "first"}, "stop is 'first', but 'a' never ends"),
    ],
)
def test_mixtures_are_refused(members, options, expected):
    assert expected in refusal(Mixture, members, **options)


def test_a_missing_or_empty_member_is_refused_by_its_name(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "one.jsonl").write_text('{"text": "x"}\n')
    good = Member("good", TEXTS)
    for name, expected in [
        ("none", "Mixture member 'bad': no file matches"),
        ("empty", "Mixture member 'bad': it has no row"),
        ("one", "Mixture member 'bad': holding out 0.5 of 1 documents leaves 0"),
    ]:
        mixture = Mixture((good, Member("bad", JsonLines(f"{tmp_path}/{name}.jsonl"))))
        assert expected in refusal(open_members, mixture, 0.5)


def test_a_member_needs_a_row_for_each_shard_only_if_it_ends():
    endless = Mixture((Member("few", TEXTS), Member("many", TEXTS)))
    deal_members(endless, (2, 9), 8, 0)
    ending = Mixture((Member("few", TEXTS, epochs=3), Member("many", TEXTS)), stop="first")
    assert "6 documents of 'few' for 8 shards" in refusal(deal_members, ending, (2, 9), 8, 0)


def test_a_member_without_a_token_is_refused_by_its_name():
    tables = [texts("a", 9), texts("b", 9, size=0)]
    assert "none of the 9 documents of 'b' has a token" in refusal(
        stream_of, tables, weights=(1.0, 1.0), epochs=(None, None)
    )


def test_weights_may_change_on_resume_and_members_may_not():
    tables = [texts("a", 9), texts("b", 9)]
    endless = {"epochs": (None, None)}
    state = next(stream_of(tables, weights=(1.0, 1.0), **endless)).state
    stream_of(tables, weights=(1.0, 9.0), **endless).restore(state)
    renamed = stream_of(tables, weights=(1.0, 1.0), names=("a", "c"), **endless)
    assert "has members ['a', 'b'], this run has ['a', 'c']" in refusal(renamed.restore, state)
    by_tokens = stream_of(tables, weights=(1.0, 1.0), by="tokens", **endless)
    assert "has by 'rows', this run has 'tokens'" in refusal(by_tokens.restore, state)
