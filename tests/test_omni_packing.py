"""Omni packing: every token and unit of every item arrives once, in its own document, whatever was chosen."""

import copy
import dataclasses
import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnijax.batch import Batch, Media
from omnijax.data.budgets import Budgets, choose, propose_budgets
from omnijax.data.omni_packing import FirstFit, Item, MediaItem, batch_fields, first_messages, measure
from omnijax.data.packing import stack_rows
from omnijax.errors import BadRow, UserError
from omnijax.units import UnitShape

# An image's unit is a patch of 5 numbers, two of which become one feature; a sound's is one number, three features.
UNITS_A_FEATURE = {"image": 2, "sound": 1}
FEATURES_A_UNIT = {"image": 1, "sound": 3}
SHAPES = {"image": UnitShape((5,), (2,)), "sound": UnitShape((), dtype="int32")}
BUDGETS = Budgets(24, {"image": 16, "sound": 7})


@dataclasses.dataclass(frozen=True)
class Turn:
    """A message of an item under test: tokens of text, then one medium (or none), then one label."""

    text: int
    modality: str = ""
    units: int = 0


def features_of(turn: Turn) -> int:
    return turn.units * FEATURES_A_UNIT[turn.modality] // UNITS_A_FEATURE[turn.modality] if turn.units else 0


def make_item(number: int, turns: list[Turn]) -> Item:
    """Its token p is 1000 * number + p, and so is its unit p of a modality: all that is in a row tells its origin."""
    slots = {turn.modality: [] for turn in turns if turn.units}
    encoded, trained, ends, grids = Counter(), [], [], {name: [] for name in slots}
    for turn in turns:
        features = features_of(turn)
        for name in slots:
            own = range(encoded[name], encoded[name] + features) if name == turn.modality else [-1] * features
            slots[name] += [*[-1] * turn.text, *reversed(own), -1]  # reversed: an order of the tower's own
        encoded[turn.modality] += features
        if turn.units:
            grids[turn.modality] += [(1, 1, turn.units)] * turn.units
        trained += [False] * (turn.text + features) + [True]
        ends.append(len(trained))
    media = {}
    for name in slots:
        units = len(grids[name])
        values = np.arange(units) + 1000 * number
        features = np.broadcast_to(
            values.reshape(-1, *[1] * len(SHAPES[name].features)), (units, *SHAPES[name].features)
        )
        media[name] = MediaItem(
            features.astype(SHAPES[name].dtype),
            np.broadcast_to(
                values.reshape(-1, *[1] * len(SHAPES[name].position)), (units, *SHAPES[name].position)
            ).astype(np.int32),
            np.array(grids[name], np.int32),
            np.full(units, 5, np.int32),
            np.array(slots[name], np.int32),
            encoded[name],
        )
    tokens = np.arange(len(trained), dtype=np.int32) + 1000 * number
    return Item(tokens, np.array(trained, bool), f"row{number}", number % 3, None, media, tuple(ends))


def make_document(number: int, size: int) -> Item:
    tokens = np.arange(size, dtype=np.int32) + 1000 * number
    return Item(tokens, np.ones(size, bool), f"row{number}", number % 3, ends=(size,), document=True)


def reader(items):
    return lambda number: items[number] if number < len(items) else None


def pack(packer: FirstFit, items, state=None):
    """All rows until nothing waits, and the state after each."""
    rows, states = [], [state or {}]
    while not rows or states[-1]["waiting"] or states[-1]["next"] < len(items):
        row, after = packer.next_row(reader(items), states[-1])
        rows.append(row)
        states.append(json.loads(json.dumps(after)))
    return rows, states


images = st.integers(1, 9).map(lambda pairs: Turn(2, "image", 2 * pairs))
sounds = st.integers(1, 8).map(lambda units: Turn(3, "sound", units))
messages = st.lists(st.one_of(st.integers(1, 20).map(Turn), images, sounds), min_size=1, max_size=3)
anything = st.one_of(messages, st.integers(0, 90))
streams = st.lists(anything, min_size=1, max_size=14).map(
    lambda specs: [
        make_document(number, spec) if isinstance(spec, int) else make_item(number, spec)
        for number, spec in enumerate(specs, 1)
    ]
)
policies = st.sampled_from(["drop", "cut"])


# Rows


def test_a_row_by_hand():
    packer = FirstFit(Budgets(12, {"image": 6, "sound": 2}), SHAPES, look_ahead=4)
    items = [make_item(1, [Turn(1, "image", 4)]), make_document(2, 3), make_item(3, [Turn(0, "image", 2), Turn(0)])]
    row, state = packer.next_row(reader(items), {})
    expected = {
        "tokens": [1000, 1001, 1002, 1003, 2000, 2001, 2002, 3000, 3001, 3002, 0, 0],
        "segment_ids": [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 0, 0],
        "positions": [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 0],
        "targets": [1001, 1002, 1003, 0, 2001, 2002, 0, 3001, 3002, 0, 0, 0],
        "weights": [0, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0],
        "sources": [1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0],
        "slots.image": [-1, 1, 0, -1, -1, -1, -1, 2, -1, -1, -1, -1],
        "slots.sound": [-1] * 12,
        "media.image.unit_segments": [1, 1, 1, 1, 3, 3],
        "media.image.unit_valid": [5] * 6,
        "media.sound.features": [0, 0],
        "media.sound.unit_segments": [0, 0],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(row.arrays[name], values, err_msg=name)
    assert row.arrays["media.image.features"][:, 4].tolist() == [1000, 1001, 1002, 1003, 3000, 3001]
    assert row.arrays["media.image.unit_grid"].tolist() == [[1, 1, 4]] * 4 + [[1, 1, 2]] * 2
    assert row.row_ids == ("row1[0:4]", "row2[0:3]", "row3[0:3]")
    assert state["waiting"] == []
    assert {name: count for name, count in state["counts"].items() if count} == {"read": 3, "packed": 3}
    padding, after = packer.next_row(reader(items), state)
    assert after == state
    assert padding.row_ids == ()
    assert all((array == (-1 if "slots" in name else 0)).all() for name, array in padding.arrays.items())


def assert_document(arrays, segment: int, item: Item) -> tuple[int, int]:
    """Segment `segment` of a row is a run of the item's tokens, and sees the item's units and no others."""
    at = np.flatnonzero(arrays["segment_ids"] == segment)
    first = int(arrays["tokens"][at[0]] - item.tokens[0])
    end = first + at.size
    is_split = item.document and (first or end < item.tokens.size)
    follows = np.arange(first + 1, end + 1 if is_split and end < item.tokens.size else end)
    np.testing.assert_array_equal(np.diff(at), 1)
    np.testing.assert_array_equal(arrays["tokens"][at], item.tokens[first:end])
    np.testing.assert_array_equal(arrays["positions"][at], np.arange(at.size))
    np.testing.assert_array_equal(arrays["targets"][at], np.append(item.tokens[follows], [0])[: at.size])
    np.testing.assert_array_equal(arrays["weights"][at], np.append(item.trained[follows], [0])[: at.size])
    np.testing.assert_array_equal(arrays["sources"][at], item.source)
    for name, shape in SHAPES.items():
        own = item.media[name].slots[first:end] if name in item.media else np.full(at.size, -1)
        seen, features = arrays[f"slots.{name}"][at], arrays[f"media.{name}.features"]
        np.testing.assert_array_equal(seen >= 0, own >= 0)
        units = np.flatnonzero(arrays[f"media.{name}.unit_segments"] == segment)
        assert units.tolist() == sorted({unit for feature in seen for unit in units_of(name, feature)})
        for feature, origin in zip(seen, own, strict=True):
            values = [int(features[unit].max(initial=0)) for unit in units_of(name, feature)]
            assert values == [int(item.tokens[0]) + unit for unit in units_of(name, origin)]
            assert features.shape[1:] == shape.features
    return first, end


def units_of(name: str, feature: int) -> list[int]:
    if feature < 0:
        return []
    first = int(feature) * UNITS_A_FEATURE[name] // FEATURES_A_UNIT[name]
    return list(range(first, first + UNITS_A_FEATURE[name]))


@settings(max_examples=60, deadline=None)
@given(streams, policies, st.booleans(), st.integers(1, 6))
def test_every_token_and_unit_arrives_once_in_its_own_document(items, over, split_text, look_ahead):
    packer = FirstFit(BUDGETS, SHAPES, look_ahead=look_ahead, over=over, split_text=split_text)
    rows, states = pack(packer, items)
    shapes = {name: (array.shape, array.dtype) for name, array in packer.empty_row().items()}
    by_name = {item.row_id: item for item in items}
    arrived = {name: [] for name in by_name}
    for row in rows:
        assert {name: (array.shape, array.dtype) for name, array in row.arrays.items()} == shapes
        segments = row.arrays["segment_ids"]
        real = np.count_nonzero(segments)
        assert segments[:real].all()
        assert segments.max() == len(row.row_ids)
        for segment, row_id in enumerate(row.row_ids, 1):
            name = row_id.partition("[")[0]
            first, end = assert_document(row.arrays, segment, by_name[name])
            assert row_id == f"{name}[{first}:{end}]"
            arrived[name].append((first, end))
        numbers = row.arrays["tokens"][:real] // 1000
        assert (np.diff(numbers) >= 0).all()
    outcomes = Counter()
    for name, item in by_name.items():
        pieces = arrived[name]
        assert [first for first, _ in pieces] == [0, *(end for _, end in pieces)][: len(pieces)]
        end = pieces[-1][1] if pieces else 0
        outcomes["lost_tokens"] += item.tokens.size - end
        outcomes["packed"] += end > 0
        outcomes["empty"] += item.tokens.size == 0
        outcomes["dropped"] += 0 == end < item.tokens.size
        outcomes["cut"] += 0 < end < item.tokens.size
        fits = all(cost <= BUDGETS.limits().get(budget, cost) for budget, cost in item.costs().items())
        assert (end == item.tokens.size) == (fits or (item.document and split_text))
        assert len(pieces) <= 1 or not fits
        assert end in (0, item.tokens.size) or (over == "cut" and end in item.ends)
    assert Counter(states[-1]["counts"]) == outcomes + Counter(read=len(items))


@settings(max_examples=30, deadline=None)
@given(streams, st.integers(1, 6), st.data())
def test_packing_goes_on_from_the_state_of_any_row(items, look_ahead, data):
    packer = FirstFit(BUDGETS, SHAPES, look_ahead=look_ahead, over="cut")
    rows, states = pack(packer, items)
    start = data.draw(st.integers(0, len(rows) - 1))
    state = copy.deepcopy(states[start])
    for row, after in zip(rows[start:], states[start + 1 :], strict=True):
        before = copy.deepcopy(state)
        again, new = packer.next_row(reader(items), state)
        assert state == before
        assert again.row_ids == row.row_ids
        for name, array in row.arrays.items():
            np.testing.assert_array_equal(array, again.arrays[name], strict=True)
        assert new == after
        state = new


@settings(max_examples=40, deadline=None)
@given(streams, st.integers(1, 6))
def test_an_item_waits_for_as_many_rows_as_look_ahead_and_the_long_documents_before_it(items, look_ahead):
    _, states = pack(FirstFit(BUDGETS, SHAPES, look_ahead=look_ahead, over="drop"), items)
    waited = Counter(number for state in states[1:] for number, *_ in state["waiting"])
    for number, rows in waited.items():
        long = [item.tokens.size for item in items[: number + 1] if item.document and item.tokens.size > BUDGETS.tokens]
        assert rows <= look_ahead + sum(size // (BUDGETS.tokens // 2) for size in long)


def test_a_long_document_fills_what_other_items_leave():
    items = [make_item(1, [Turn(13)]), make_document(2, 300), *(make_item(n, [Turn(15)]) for n in range(3, 6))]
    rows, _ = pack(FirstFit(Budgets(24), look_ahead=5), items)
    # After the first row the document waits longest: 12 tokens are its own, which leaves too few for an item of 16.
    assert [row.row_ids for row in rows[:2]] == [("row1[0:14]", "row2[0:10]"), ("row2[10:34]",)]
    assert all((row.arrays["segment_ids"] > 0).all() for row in rows[:-3])
    items[1] = make_document(2, 30)
    rows, _ = pack(FirstFit(Budgets(24), look_ahead=5), items)
    assert [row.row_ids for row in rows[:2]] == [("row1[0:14]", "row2[0:10]"), ("row2[10:30]",)]  # never split again


def test_a_long_document_leaves_a_gap_of_a_64th_of_the_row():
    for gap, names in ((2, ("row1[0:126]",)), (3, ("row1[0:125]", "row2[0:3]"))):
        items = [make_item(1, [Turn(127 - gap)]), make_document(2, 300)]
        row, _ = FirstFit(Budgets(128)).next_row(reader(items), {})
        assert row.row_ids == names


def test_positions_of_three_axes():
    mrope = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]], np.int32)
    items = [make_document(1, 2), dataclasses.replace(make_item(2, [Turn(3)]), positions=mrope)]
    row, _ = FirstFit(Budgets(7), position=(3,)).next_row(reader(items), {})
    assert row.arrays["positions"].tolist() == [[0] * 3, [1] * 3, *mrope.tolist(), [0] * 3]


def test_stacked_rows_are_the_fields_of_a_batch():
    packer = FirstFit(BUDGETS, SHAPES, look_ahead=4)
    rows, _ = pack(
        packer, [make_item(1, [Turn(9, "image", 8)]), make_item(2, [Turn(9, "sound", 3)]), make_document(3, 20)]
    )
    fields = batch_fields(stack_rows(rows).arrays)
    media = {name: Media(**each) for name, each in fields.pop("media").items()}
    batch = Batch(**fields, media=media)
    assert batch.slots["image"].shape == batch.tokens.shape == (len(rows), 24)
    assert batch.media["image"].features.shape == (len(rows), 16, 5)
    assert batch.media["sound"].unit_positions.shape == (len(rows), 7)


def test_encoded_features_may_have_a_budget_of_their_own():
    items = [make_item(number, [Turn(1, "sound", 2)]) for number in (1, 2)]
    rows, _ = pack(FirstFit(BUDGETS, SHAPES), items)
    assert [row.row_ids for row in rows] == [("row1[0:8]", "row2[0:8]")]
    rows, _ = pack(FirstFit(Budgets(24, BUDGETS.units, {"sound": 11}), SHAPES), items)
    assert [row.row_ids for row in rows] == [("row1[0:8]",), ("row2[0:8]",)]


# Items beyond a budget

CHAT = [Turn(2, "image", 6), Turn(4), Turn(1, "image", 8), Turn(2, "sound", 1)]  # 6, 5, 6 and 6 tokens


@pytest.mark.parametrize(
    ("budgets", "kept", "units"),
    [
        (Budgets(23, {"image": 14, "sound": 1}), 23, {"image": 14, "sound": 1}),
        (Budgets(22, {"image": 14, "sound": 1}), 17, {"image": 14, "sound": 0}),
        (Budgets(23, {"image": 13, "sound": 1}), 11, {"image": 6, "sound": 0}),
        (Budgets(23, {"image": 14, "sound": 1}, {"image": 6}), 11, {"image": 6, "sound": 0}),
        (Budgets(10, {"image": 14, "sound": 1}), 6, {"image": 6, "sound": 0}),
    ],
)
def test_cutting_leaves_out_whole_messages_and_their_media(budgets, kept, units):
    rows, states = pack(FirstFit(budgets, SHAPES, over="cut"), [make_item(1, CHAT)])
    arrays, lost = rows[0].arrays, 23 - kept
    assert rows[0].row_ids == (f"row1[0:{kept}]",)
    assert {name: int((arrays[f"media.{name}.unit_segments"] > 0).sum()) for name in units} == units
    assert arrays["targets"][kept - 1] == arrays["weights"][kept - 1] == 0
    counts = states[-1]["counts"]
    assert (counts["packed"], counts["cut"], counts["lost_tokens"]) == (1, int(lost > 0), lost)


def test_an_item_whose_first_message_is_too_much_is_dropped(caplog):
    caplog.set_level("INFO")
    for over, budgets in (("cut", Budgets(5, BUDGETS.units)), ("drop", Budgets(22, BUDGETS.units))):
        rows, states = pack(FirstFit(budgets, SHAPES, over=over), [make_item(1, CHAT), make_document(2, 3)])
        assert [row.row_ids for row in rows] == [("row2[0:3]",)]
        counts = states[-1]["counts"]
        assert (counts["read"], counts["packed"], counts["dropped"], counts["lost_tokens"]) == (2, 1, 1, 23)
        assert "row1: over a budget: 23 of 23 tokens left out" in caplog.text
        caplog.clear()


def test_no_medium_is_ever_cut_in_two():
    item = make_item(1, CHAT)
    inside = [end for end in range(1, 23) if first_messages(item, end) is None]
    # The image of tokens 2 to 4 is whole in every order its features have, that of 12 to 15 and the sound of 19 to 21.
    assert inside == [3, 4, 13, 14, 15, 20, 21]
    sound = item.media["sound"]
    in_order = dataclasses.replace(sound, slots=np.where(sound.slots < 0, -1, 2 - sound.slots))
    assert [first_messages(dataclasses.replace(item, media={"sound": in_order}), end) for end in (20, 21)] == [None] * 2


def test_a_cut_item_is_an_item():
    positions = np.arange(3 * 23, dtype=np.int32).reshape(23, 3)
    part = first_messages(dataclasses.replace(make_item(4, CHAT), positions=positions), 11)
    assert (part.row_id, part.source, part.ends) == ("row4", 1, (6, 11))
    assert (part.media["image"].encoded, part.media["sound"].encoded) == (3, 0)
    np.testing.assert_array_equal(part.positions, positions[:11])
    np.testing.assert_array_equal(part.trained, [False] * 5 + [True] + [False] * 4 + [True])


def test_documents_are_split_only_where_asked():
    rows, states = pack(FirstFit(BUDGETS, SHAPES, over="drop", split_text=False), [make_document(1, 25)])
    assert states[-1]["counts"]["dropped"] == 1
    assert (rows[0].arrays["segment_ids"] == 0).all()


def refusal(kind, packer, items, state=None) -> str:
    with pytest.raises(kind) as caught:
        packer.next_row(reader(items), state or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals():
    message = refusal(BadRow, FirstFit(BUDGETS, SHAPES), [make_item(1, [Turn(2, "image", 18)])])
    assert message.startswith("row1: takes 18 of the budget of image, which is 16 a row: raise the budget")
    message = refusal(BadRow, FirstFit(Budgets(9), over="drop"), [make_item(1, [Turn(2, "sound", 1)])])
    assert message == "row1: has sound, for which a row has no budget: give one, or drop such rows"
    for changes in ({"look_ahead": 0}, {"budgets": Budgets(1)}):
        with pytest.raises(UserError, match="give at least 2 tokens, or a row could have no target"):
            FirstFit(**({"budgets": Budgets(8)} | changes))
    with pytest.raises(ValueError, match=r"row1: image features float32\(4, 5\) in float32\(16, 6\)"):
        FirstFit(BUDGETS, SHAPES | {"image": UnitShape((6,), (2,))}).next_row(
            reader([make_item(1, [Turn(2, "image", 4)])]), {}
        )


def test_a_row_of_changed_data_is_refused():
    items = [make_item(number, [Turn(12)]) for number in (1, 2)]
    packer = FirstFit(BUDGETS, SHAPES)
    _, state = packer.next_row(reader(items), {})
    message = refusal(UserError, packer, [items[0], make_item(2, [Turn(11)])], state)
    assert message.startswith(
        "item 1 of the data state took [13, 0, 0] of ['tokens', 'image', 'sound'] and does not now"
    )
    assert "the data changed" in refusal(UserError, packer, items[:1], state)


def test_a_stream_of_which_nothing_fits_is_refused(monkeypatch):
    monkeypatch.setattr("omnijax.data.budgets.MOST_UNPACKED", 5)
    packer = FirstFit(Budgets(4), over="drop", split_text=False)
    items = [make_document(number, 9) for number in range(5)]
    assert "none of 5 items, up to number 4, fits a row of {'tokens': 4}" in refusal(UserError, packer, items)
    pack(packer, [*items[:4], make_document(4, 2), *items[:4]])


# Reading


def test_only_new_items_in_order_and_waiting_ones_are_read():
    items = [make_item(number, [Turn(number % 5, "image", 2 + 2 * (number % 3))]) for number in range(30)]
    items.insert(7, make_document(30, 200))
    packer, state, new = FirstFit(BUDGETS, SHAPES, look_ahead=8), {}, 0
    while not state or state["waiting"]:
        may_be_read = {number for number, *_ in state.get("waiting", ())}

        def read(number, may_be_read=may_be_read):
            nonlocal new
            assert number in may_be_read or number == new
            may_be_read.add(number)
            new = max(new, min(number + 1, len(items)))
            return reader(items)(number)

        _, state = packer.next_row(read, state)
    assert state["next"] == new == len(items)


# Choosing


def test_choosing_prefers_what_fills_the_room():
    def chosen(costs, room):
        return choose(np.array(costs), np.array(room))

    assert chosen([[6], [5], [5]], [10]) == [1, 2]
    assert chosen([[7], [9], [4], [3]], [14]) == [0, 2, 3]
    assert chosen([[3], [4]], [7]) == [0, 1]
    assert chosen([[8], [4]], [7]) == [1]
    assert chosen([[8]], [7]) == []
    # Two budgets: the images fill one, and only text is left to fill the other.
    assert chosen([[4, 4], [4, 4], [4, 0], [4, 0], [4, 4]], [12, 4]) == [0, 2, 3]
    # Tokens are in demand: a row full of them is better than one with a picture that is not.
    assert chosen([[6, 0], [4, 0], [3, 4], [6, 0], [6, 0]], [10, 10]) == [0, 1]
    # A budget with no room takes no item that needs it.
    assert chosen([[4, 1], [3, 0], [5, 0], [4, 0]], [7, 0]) == [1, 3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=12), st.tuples(*[st.integers(0, 20)] * 3))
def test_what_is_chosen_fits_and_leaves_no_room_for_more(costs, room):
    costs, room = np.array(costs), np.array(room)
    chosen = choose(costs, room)
    assert all(first < second for first, second in pairwise(chosen))
    left = room - costs[chosen].sum(0)
    assert (left >= 0).all()
    assert all((costs[item] > left).any() for item in set(range(len(costs))) - set(chosen))


# Measures and proposals


def test_measures_by_hand():
    packer = FirstFit(Budgets(20, {"image": 16, "sound": 7}), SHAPES)
    rows, _ = pack(packer, [make_item(1, [Turn(1, "image", 4), Turn(0, "image", 8)]), make_document(2, 6)])
    rows.append(packer.next_row(reader([make_document(3, 20)]), {})[0])
    assert measure(stack_rows(rows).arrays) == {
        "fill/tokens": (15 + 20) / 40,
        "fill/image": 12 / 32,
        "fill/sound": 0,
        "pairs/tokens": (45 + 21 + 210) / 2,
        "pairs/image": (16 + 64) / 2,
        "pairs/sound": 0,
        "pairs_max/tokens": 210,
        "pairs_max/image": 80,
        "pairs_max/sound": 0,
    }


def test_proposals_by_hand():
    costs = [{"tokens": 10, "image": 4}] * 300
    best, *others = propose_budgets(costs, [100], {"tokens": 2.0, "image": 5.0, "sound": 1.0}, multiple=8)
    assert best.budgets == Budgets(100, {"image": 40})
    assert (best.fill, best.wasted, best.waste, best.lost) == (
        {"tokens": 1, "image": 1},
        {"tokens": 0, "image": 0},
        0,
        0,
    )
    assert [other.budgets.units["image"] for other in others] == [48, 56, 64, 80]
    assert others[0].fill == {"tokens": 1, "image": pytest.approx(40 / 48)}
    assert others[0].wasted == {"tokens": 0, "image": pytest.approx(8 * 5)}
    assert others[0].waste == pytest.approx(40 / (200 + 240))


def test_proposals_hold_the_largest_item_or_say_what_is_lost():
    costs = [{"tokens": 10, "image": 4}] * 299 + [{"tokens": 60, "image": 500}]
    first, *_, last = propose_budgets(costs, [100], {"tokens": 2.0, "image": 5.0}, multiple=8)
    assert (first.budgets.units["image"], first.lost) == (504, 0)
    assert (last.budgets.units["image"] < 500, last.lost) == (True, 1)


def test_proposals_split_text():
    costs = [{"tokens": 250}, {"tokens": 30, "image": 6}] * 50 + [{"tokens": 250, "image": 6}]
    for split_text, lost in ((True, 1), (False, 51)):
        assert {
            each.lost for each in propose_budgets(costs, [100], {"tokens": 1.0, "image": 1.0}, split_text=split_text)
        } == {lost}


def test_a_mixed_stream_fills_the_budget_that_binds():
    """Lengths spread as those of captioned pictures, spoken sentences and short articles are."""
    random = np.random.default_rng(3)
    patches = 4 * np.clip(random.lognormal(3.5, 1.0, 1000), 4, 280).astype(int)
    seconds = np.clip(random.lognormal(0.8, 0.7, 600), 1, 30).astype(int)
    costs = [{"tokens": 40 + int(each) // 4, "image": int(each)} for each in patches]
    costs += [{"tokens": 30 + 13 * int(each), "sound": int(each)} for each in seconds]
    costs += [{"tokens": int(each)} for each in random.lognormal(4.7, 0.8, 1200)]
    random.shuffle(costs)
    best = propose_budgets(costs, [4096], {"tokens": 2.0, "image": 1.0, "sound": 50.0})[0]
    assert best.lost == 0
    assert max(best.fill.values()) >= 0.97
    assert best.waste < 0.15
