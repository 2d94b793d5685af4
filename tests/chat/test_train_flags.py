"""Train flags and loss weights of records, in the forms of other libraries."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import batchloom
from batchloom.chat import detect_schema, make_record_reader, parse_mapping
from batchloom.core.document import ContentRange, Conversation, SegmentedText, TurnWeight, WeightedText
from batchloom.core.errors import BatchloomError, InputError, SchemaError, SettingsError, UnusableRecordError
from batchloom.core.loss_weights import LOSS_WEIGHTS, LossFlags
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations

NAN = math.nan
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def user(content, **keys):
    return {"role": "user", "content": content, **keys}


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def text(content, **keys):
    return {"type": "text", "text": content, **keys}


def detail(begin, end, *, train):
    return {"begin_offset": begin, "end_offset": end, "train": train}


def read(record, mapping=None, *, media=False):
    return make_record_reader(detect_schema([record], mapping, media=media), media=media)(record)


def read_flags(*messages):
    conversation = read({"messages": list(messages)})
    return conversation.trained or [None] * len(messages)


QUESTION, ANSWER = user("q"), assistant("answer")
CONVERSATIONS = [
    {"messages": [QUESTION, ANSWER]},
    {"prompt": "q", "completion": "a"},
    {"question": "q", "answer": "a"},
]
SEGMENTS = [{"label": False, "text": "<s>Q\n"}, {"label": True, "text": "A</s>"}]
# Flags of the question and of the answer, and what they say.
SWITCHES = [
    ({"train": True}, {"train": False}, [True, False]),
    ({"training": True}, {"training": False}, [True, False]),
    ({"loss": True}, {"loss": False}, [None, False]),
    ({"loss": False}, {"loss": True}, [False, True]),
    ({"masked": False}, {"masked": True}, [True, False]),
    ({"weight": 1}, {"weight": 0}, [None, False]),
    ({"weight": 0.5}, {"weight": 1.0}, [None, True]),
    ({"loss_weight": 0.0}, {"loss_weight": 1.0}, [False, True]),
    ({"loss_weight": 1}, {"loss_weight": 0}, [True, False]),
    ({"loss_weight": 2}, {"loss_weight": 0.25}, [TurnWeight(True, 2.0), TurnWeight(True, 0.25)]),
    ({}, {"weight": 0.5}, [None, TurnWeight(True, 0.5)]),
    ({"loss_scale": 2}, {"loss_scale": 2}, [None, TurnWeight(None, 2.0, stop_weight=1.0)]),
    ({}, {"loss": True, "loss_scale": 2}, [None, TurnWeight(True, 2.0, stop_weight=1.0)]),
    ({}, {"weight": 0.5, "loss_scale": 2}, [None, TurnWeight(True, 1.0, stop_weight=0.5)]),
    ({}, {"loss": False, "loss_scale": 2}, [None, False]),
    ({}, {"loss": True, "loss_scale": 0}, [None, False]),
    ({}, {"loss_scale": 1}, [None, None]),
    ({}, {"loss": False, "weight": 0, "train": False}, [None, False]),
    ({}, {"train": None, "weight": None, "loss_scale": None, "train_detail": None}, [None, None]),
]


@pytest.mark.parametrize(("question", "answer", "flags"), SWITCHES)
def test_flags_of_messages(question, answer, flags):
    messages = [{**QUESTION, **question}, {**ANSWER, **answer}]
    assert read_flags(*messages) == flags
    assert read({"messages": json.dumps(messages)}) == read({"messages": messages})


RANGES = [
    # The end is included, as in axolotl; ranges that are not trained only keep others apart.
    ([detail(0, 2, train=True)], TurnWeight(True, 1.0, (ContentRange(0, 3, 1.0),))),
    ([detail(0, 2, train=False), detail(3, 5, train=True)], TurnWeight(True, 1.0, (ContentRange(3, 6, 1.0),))),
    ([detail(3, 99, train=True)], TurnWeight(True, 1.0, (ContentRange(3, 6, 1.0),))),
    ([detail(0, 5, train=False)], False),
    ([], False),
]


@pytest.mark.parametrize(("ranges", "flag"), RANGES)
def test_train_detail_of_axolotl(ranges, flag):
    assert read_flags(user("q"), assistant("answer", train_detail=ranges))[-1] == flag
    # A user turn is selected, too; a flag of the message decides about a list that selects nothing.
    assert read_flags(user("quests", train_detail=ranges), ANSWER)[0] == flag


PARTS = [
    ([text("ab", train=True), text("cd", train=False)], TurnWeight(True, 1.0, (ContentRange(0, 2, 1.0),))),
    # As in axolotl, a part without a flag is trained if another part has one.
    ([text("ab"), text("cd", weight=0)], TurnWeight(True, 1.0, (ContentRange(0, 2, 1.0),))),
    ([text("ab", weight=0.5), text("cd", loss_weight=2)], TurnWeight(True, 1.0, ((0, 2, 0.5), (2, 4, 2.0)))),
    ([text("ab", loss=False), text("cd", training=True)], TurnWeight(True, 1.0, (ContentRange(2, 4, 1.0),))),
    ([text("ab", loss_scale=2), text("cd")], TurnWeight(None, 1.0, ((0, 2, 2.0), (2, 4, 1.0)))),
    ([text("ab", train=False), text("cd", train=False)], False),
    ([{"type": "text", "value": "ab", "train": True}, text("cd", train=False)], TurnWeight(True, 1.0, ((0, 2, 1.0),))),
]


@pytest.mark.parametrize(("parts", "flag"), PARTS)
def test_flags_of_parts_become_ranges_of_one_text(parts, flag):
    for role in (user, assistant):
        conversation = read({"messages": [user("q"), role(parts), ANSWER]})
        assert conversation.messages[1]["content"] == "abcd"
        assert conversation.trained[1] == flag
    # Without a flag the parts stay, for templates that read them.
    plain = [text("ab"), text("cd")]
    assert read({"messages": [user(plain), ANSWER]}).messages[0]["content"] == plain


def test_flags_of_a_message_and_its_parts_combine():
    parts = [text("ab", train=True), text("cd", train=False)]
    assert read_flags(QUESTION, assistant(parts, weight=0.5))[1] == TurnWeight(True, 0.5, (ContentRange(0, 2, 1.0),))
    ranges = [detail(0, 1, train=True)]
    scaled = read_flags(QUESTION, assistant("abcd", loss_scale=3, train_detail=ranges))[1]
    assert scaled == TurnWeight(True, 3.0, (ContentRange(0, 2, 1.0),), stop_weight=1.0)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (assistant("a", loss="yes"), r"loss is 'yes'; it can be true or false"),
        (assistant("a", training=1), r"training is 1; it can be true or false"),
        (assistant("a", masked="false"), r"masked is 'false'; it can be true or false"),
        *(
            (assistant("a", **{name: value}), rf"{name} is .*; a loss weight is a number from 0 .not trained. to 55")
            for name in ("weight", "loss_weight", "loss_scale")
            for value in (NAN, -0.5, -1, 56, math.inf, "1", [1], {}, True, False)
        ),
        (assistant("a", loss=True, weight=0), "has loss True and weight 0, which contradict each other"),
        (assistant("a", masked=True, train=True), "has train True and masked True, which contradict each other"),
        (assistant("a", weight=0.5, loss_weight=0.25), "has weight 0.5 and loss_weight 0.25, which contradict"),
        (assistant([text("a", train=True)], train=False), "is marked as not trained, but a part of its content"),
        (assistant("a", train=False, train_detail=[detail(0, 0, train=True)]), "is marked as not trained, but a part"),
        (assistant([text("a", train=True, weight=0)]), r"content\[0\] has train True and weight 0"),
        (assistant([text("a", weight=NAN)]), r"content\[0\].weight is nan"),
        (assistant([text("a", train=True)], train_detail=[detail(0, 0, train=True)]), "has train_detail and flags of"),
        (assistant([text("a")], train_detail=[detail(0, 0, train=True)]), "counts characters of a text"),
        (assistant("a", train_detail="x"), "train_detail holds a string, not a list of ranges"),
        (assistant("a", train_detail=[1]), r"train_detail\[0\] is not an object with begin_offset"),
        (assistant("a", train_detail=[{"begin_offset": 0, "end_offset": 0}]), r"train_detail\[0\] is not an object"),
        (assistant("a", train_detail=[detail(0, 0, train=1)]), r"train_detail\[0\].train is 1; it can be true"),
        (assistant("a", train_detail=[detail(1, 1, train=True)]), "is from 1 to 1; offsets count the 1 characters"),
        (assistant("abc", train_detail=[detail(2, 1, train=True)]), "is from 2 to 1; offsets"),
        (assistant("abc", train_detail=[detail(-1, 1, train=True)]), "is from -1 to 1; offsets"),
        (assistant("abc", train_detail=[detail("0", 1, train=True)]), "is from '0' to 1; offsets"),
    ],
)
def test_flags_that_cannot_be_honoured_are_errors(message, reason):
    with pytest.raises(UnusableRecordError, match=reason):
        read({"messages": [QUESTION, message]})


def test_flags_of_parts_next_to_media_are_errors():
    schema = detect_schema([{"messages": [QUESTION, ANSWER]}], media=True)
    image = {"type": "image", "image": "a.png"}
    for content in ([text("a", train=True), image], [{**image, "train": True}], [text("<image>", train=False)]):
        row = {"messages": [user(content), ANSWER], "images": ["a.png"]}
        with pytest.raises(UnusableRecordError, match="flags of parts are for|train is not supported"):
            make_record_reader(schema, media=True)(row)


@pytest.mark.parametrize(("value", "weight"), [(0.5, 0.5), (0, 0.0), (2, 2.0), (1, 1.0), (None, 1.0), ("", 1.0)])
def test_the_weight_of_a_record(value, weight):
    for record in CONVERSATIONS:
        assert read({**record, "weight": value}) == Conversation(
            read(record).messages, completion=read(record).completion, weight=weight
        )
        assert read({**record, "weight": value}, {"weight": ""}) == read(record)
    text = {"text": "a"}
    assert read({**text, "weight": value}) == ("a" if weight == 1 else WeightedText("a", weight))
    segments = {"segments": SEGMENTS}
    assert read({**segments, "weight": value}) == replace(read(segments), weight=weight)
    tokens = {"input_ids": [1, 2, 3], "loss_weights": [0, 1, 2]}
    assert read({**tokens, "weight": value}).flags.weights.tolist() == [0, weight, 2 * weight]
    interleaved = {"text": ["a", {"type": "image", "image": "a.png"}], "weight": value}
    assert read(interleaved, media=True).weight == weight
    for record in (*CONVERSATIONS, text, segments, tokens):
        assert detect_schema([{**record, "weight": 0.5}]).description.endswith("weight")


def test_weights_of_csv_may_be_text():
    schema = detect_schema([{"text": "a", "weight": "0.5"}])
    read_csv_row = make_record_reader(schema, has_text_numbers=True)
    assert read_csv_row({"text": "a", "weight": "0.5"}) == WeightedText("a", 0.5)
    assert read_csv_row({"text": "a", "weight": ""}) == "a"
    for value in ("heavy", "nan", "-1", "56"):
        with pytest.raises(UnusableRecordError, match="column 'weight' is .*leave any other column out"):
            read_csv_row({"text": "a", "weight": value})


@pytest.mark.parametrize("value", [NAN, -1, 56, 10**400, "heavy", "0.5", "1.0", [1], True, False])
def test_a_weight_of_a_record_that_is_none(value):
    for record in (*CONVERSATIONS, {"text": "a"}, {"segments": SEGMENTS}, {"input_ids": [1]}):
        with pytest.raises(UnusableRecordError, match="column 'weight' is .*leave any other column out with --map wei"):
            read({**record, "weight": value})


def test_preferences_have_no_weights():
    labelled = {"messages": [QUESTION, ANSWER], "label": True}
    for record in (labelled, {"prompt": "q", "chosen": "a", "rejected": "b"}):
        with pytest.raises(SchemaError, match="'weight' is not supported .Fireworks"):
            read({**record, "weight": 0.5})
    assert read({**labelled, "weight": 0.5}, parse_mapping("weight=")) == read(labelled)


def test_segments_of_axolotl():
    record = {"segments": SEGMENTS}
    assert read(record) == SegmentedText(["<s>Q\n", "A</s>"], [False, True])
    assert detect_schema([record]).description == "segments -> text segments"
    with pytest.raises(SchemaError, match="--map segments=segments"):
        read({"messages": [QUESTION, ANSWER], **record})
    assert read({"messages": [QUESTION, ANSWER], **record}, parse_mapping("segments=segments")) == read(record)


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        ({"weight": 0.5}, 0.5),
        ({"loss_weight": 2, "loss_scale": 2}, 4.0),
        ({"weight": 1, "train": True, "loss": True}, True),
        ({"loss_scale": 0}, False),
        ({"weight": None, "mood": "glad"}, True),
    ],
)
def test_flags_of_segments(keys, trained):
    assert read({"segments": [SEGMENTS[0], {**SEGMENTS[1], **keys}]}).trained == [False, trained]


def test_other_keys_of_segments_are_reported_once(tmp_path):
    rows = [{"segments": [{**SEGMENTS[0], "id": n, "mood": "glad"}, {**SEGMENTS[1], "weight": 0.5}]} for n in range(40)]
    path = write_rows(tmp_path / "in.jsonl", rows)
    prepare = partial(batchloom.prepare, tokenizer="bytes", val_fraction=0, dedup="none")
    result = prepare(path, out=tmp_path / "a")
    assert [note for note in result.notes if "mood" in note] == ["Unused columns: segments[].mood"]
    for name in ("segments[].mood", "mood"):
        assert not any("mood" in note for note in prepare(path, out=tmp_path / name, ignore=[name]).notes)
    weights = batchloom.open_store(result.path)[0].loss_weights.tolist()
    assert weights == [0.0] * 5 + [0.5] * 5
    assert batchloom.open_store(prepare(path, out=tmp_path / "b", ignore=["weight"]).path)[0].loss_weights.max() == 1
    everything = batchloom.open_store(prepare(path, out=tmp_path / "c", train_on="all").path)[0]
    assert everything.loss_weights.tolist() == [1.0] * 5 + [0.5] * 5


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        (None, "column 'segments' is null"),
        ("x", "column 'segments' holds a string, not a list of segments"),
        ([], "column 'segments' holds an array, not a list of segments"),
        ([1], r"segments\[0\] is no segment"),
        ([{"text": 1, "label": True}], r"segments\[0\] is no segment"),
        ([{"text": "a"}], r"segments\[0\] has no label; it can be true"),
        ([{"text": "a", "label": 1}], r"segments\[0\].label is 1; it can be true"),
        ([{"text": "a", "label": False, "weight": 0.5}], r"segments\[0\] has label False and weight 0.5, which contra"),
        ([{"text": "a", "label": True, "train": False}], r"segments\[0\] has label True and train False, which contra"),
        ([{"text": "a", "label": True, "weight": "0.5"}], r"segments\[0\].weight is '0.5'; a loss weight is a number"),
        ([{"text": "a", "label": True, "loss_weight": True}], r"segments\[0\].loss_weight is True; a loss weight is a"),
    ],
)
def test_segments_that_are_none(segments, reason):
    with pytest.raises(UnusableRecordError, match=reason):
        make_record_reader(detect_schema([{"segments": SEGMENTS}]))({"segments": segments})


TOKEN_ROW = {"input_ids": [5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("columns", "weights"),
    [
        ({"loss_weights": [0, 1, 0.5, 2]}, [0, 1, 0.5, 2]),
        ({"loss_scale": [0.0, 1.0, 0.5, 2.0]}, [0, 1, 0.5, 2]),
        ({"loss_scale": [0.0, 1.0, 0.5, 2.0], "labels": [-100, 6, -100, 8]}, [0, 1, 0, 2]),
        ({"loss_scale": [3, 1, 1, 1], "loss_mask": [0, 1, 1, 0]}, [0, 1, 1, 0]),
        ({"loss_scale": np.array([0, 1, 0.5, 2], np.float32)}, [0, 1, 0.5, 2]),
        ({"loss_scale": [0, 1, 0.5, 2], "attention_mask": [0, 1, 1, 1]}, [1, 0.5, 2]),
    ],
)
def test_weights_of_token_rows(columns, weights):
    row = read({**TOKEN_ROW, **columns})
    assert row.flags.weights.tolist() == weights
    assert row.flags.has_weights != set(weights).issubset({0, 1})


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1, 1, 1], "holds 3 numbers and 'input_ids' 4"),
        ([1, 1, NAN, 1], r"loss_scale\[2\] is nan; a loss weight is a number"),
        ([1, -1, 1, 1], r"loss_scale\[1\] is -1; a loss weight"),
        ([1, 1, 1, 56], r"loss_scale\[3\] is 56; a loss weight"),
        ([1, "0.5", 1, 1], r"loss_scale\[1\] is '0.5'; a loss weight"),
        ([1, 0.5, True, 1], r"loss_scale\[2\] is True; a loss weight"),
        ([[1], [1], [1], [1]], r"loss_scale\[0\] is \[1\]; a loss weight"),
        (2, "column 'loss_scale' holds a number, not a list of numbers"),
        (None, "column 'loss_scale' is null"),
    ],
)
def test_weights_of_token_rows_that_are_none(weights, reason):
    reader = make_record_reader(detect_schema([{**TOKEN_ROW, "loss_scale": [1, 1, 1, 2]}]))
    with pytest.raises(UnusableRecordError, match=reason):
        reader({**TOKEN_ROW, "loss_scale": weights})


def test_the_codes_of_weights():
    flags = LossFlags.from_weights(LOSS_WEIGHTS.astype(np.float64))
    assert (flags.codes.tolist(), flags.rounded) == (list(range(256)), False)
    assert not LossFlags.from_weights(np.arange(0, 101) / 100).rounded
    for weight in (0.1 + 0.2, 1.05, 1.25, 1.5, 2, 2.95, 3.3, 9.9, 10, 11, 55):
        flags = LossFlags.from_weights(np.array([weight]))
        assert flags.weights[0] == pytest.approx(weight, rel=1e-6)
        assert not flags.rounded
    for weight, stored in ((1e-9, 0.01), (0.123, 0.12), (1.02, 1), (1.03, 1.05), (3.04, 3), (54.6, 55)):
        flags = LossFlags.from_weights(np.array([weight]))
        assert flags.weights[0] == pytest.approx(stored)
        assert flags.rounded
    # A trained flag is the code of its weight.
    assert LossFlags.from_codes(np.array([False, True])).weights.tolist() == [0, 1]


@pytest.fixture(params=["bytes", "metaspace"])
def encode(request, tokenizers, tmp_path):
    """A function that returns each run of tokens of one weight, without untrained ones."""

    def encode_messages(messages, *, template=CHATML, weight=1.0, **rules):
        path = tmp_path / "template.jinja"
        path.write_text(template)
        encoder = ChatEncoder(tokenizers[request.param], str(path))
        conversation = replace(read({"messages": messages}), weight=weight)
        made = encode_conversations([conversation], encoder, ChatRecipe(prove=True, **rules))
        assert not made.faults, made.faults
        if not made.lengths.size:
            return made.dropped[0].reason
        weights = made.flags.weights
        edges = [0, *(np.flatnonzero(np.diff(weights)) + 1).tolist(), weights.size]
        runs = [(round(float(weights[a]), 2), encoder.tokenizer.decode(made.ids[a:b])) for a, b in pairwise(edges)]
        return [(weight, text.lstrip(" ")) for weight, text in runs if weight]

    return encode_messages


STOP = "<|im_end|>"
TALK = [user("The fox"), assistant("lazy dog"), user("brown"), assistant("quick fox")]
FIRST, SECOND = "lazy dog" + STOP, "quick fox" + STOP


def flag(number, **flags):
    return [{**message, **(flags if n == number else {})} for n, message in enumerate(TALK)]


@pytest.mark.parametrize(
    ("messages", "rules", "runs"),
    [
        (TALK, {}, [(1, FIRST), (1, SECOND)]),
        (flag(1, loss_weight=2), {}, [(2, FIRST), (1, SECOND)]),
        # A factor does not weight the stop token, as in ms-swift.
        (flag(1, loss_scale=2), {}, [(2, "lazy dog"), (1, STOP), (1, SECOND)]),
        (flag(1, loss_scale=2, weight=0.5), {}, [(1, "lazy dog"), (0.5, STOP), (1, SECOND)]),
        # A factor selects no turn, a weight does.
        (flag(1, loss_scale=2), {"train_on": "last"}, [(1, SECOND)]),
        (flag(1, weight=0.5), {"train_on": "last"}, [(0.5, FIRST), (1, SECOND)]),
        (flag(0, loss_weight=0.3), {}, [(0.3, "The fox" + STOP), (1, FIRST), (1, SECOND)]),
        (flag(3, loss_weight=0), {}, [(1, FIRST)]),
        # The weight of a record multiplies all others.
        (TALK, {"weight": 0.5}, [(0.5, FIRST), (0.5, SECOND)]),
        (flag(1, loss_weight=2), {"weight": 0.5}, [(1, FIRST), (0.5, SECOND)]),
        (flag(1, loss_scale=2), {"weight": 0.5}, [(1, "lazy dog"), (0.5, STOP), (0.5, SECOND)]),
        (TALK, {"weight": 0}, "nothing to train: the record has weight 0"),
        (flag(1, weight=0), {"train_on": "assistant,user"}, [(1, "The fox" + STOP), (1, "brown" + STOP), (1, SECOND)]),
        (TALK, {"train_on": "user"}, [(1, "The fox" + STOP), (1, "brown" + STOP)]),
        (TALK, {"train_on": "tool"}, "nothing to train: the turns that train_on selects are empty or flagged as"),
        (TALK, {"train_on_eos": "none"}, [(1, "lazy dog"), (1, "quick fox")]),
        (TALK, {"train_on_eos": "last"}, [(1, "lazy dog"), (1, SECOND)]),
        (flag(3, train=False), {"train_on_eos": "last"}, [(1, FIRST)]),
        (TALK, {"train_on_eos": "all"}, [(1, STOP), (1, FIRST), (1, STOP), (1, SECOND)]),
        (flag(1, loss_weight=2), {"train_on_eos": "all"}, [(1, STOP), (2, FIRST), (1, STOP), (1, SECOND)]),
    ],
)
def test_trained_turns_weights_and_stops(encode, messages, rules, runs):
    made = encode(messages, **rules)
    assert made[: len(runs)] == runs if isinstance(runs, str) else made == runs


def test_the_complete_text_has_the_weight_of_its_record(encode):
    ((weight, text),) = encode(TALK, weight=0.5, train_on="all")
    assert weight == 0.5
    assert text.startswith("<|im_start|>user")
    runs = encode(TALK, train_on="all", train_on_eos="none")
    assert [text.strip().endswith("<|im_start|>assistant\n" + STOP) for _, text in runs] == [False] * len(runs)
    assert STOP not in "".join(text for _, text in runs)


# Words, so that tokens of both tokenizers end where the ranges do.
@pytest.mark.parametrize(
    ("message", "trained"),
    [
        (assistant("lazy dog", train_detail=[detail(0, 3, train=True)]), [(1, "lazy"), (1, STOP)]),
        (assistant("lazy dog", train_detail=[detail(4, 7, train=True)]), [(1, "dog" + STOP)]),
        (assistant([text("lazy", weight=0.5), text(" dog", weight=2)]), [(0.5, "lazy"), (2, "dog"), (1, STOP)]),
        (
            assistant([text("lazy", weight=0), text(" dog", weight=2)], loss_scale=2),
            [(4, "dog"), (1, STOP)],
        ),
        # Reasoning comes before the content, so it is not trained with ranges, as in axolotl.
        (
            assistant("lazy dog", reasoning_content="brown", train_detail=[detail(0, 3, train=True)]),
            [(1, "lazy"), (1, STOP)],
        ),
        (assistant("  lazy dog", train_detail=[detail(0, 5, train=True)]), None),
    ],
)
def test_ranges_of_a_content(encode, message, trained):
    runs = encode([user("The fox"), message])
    if trained is None:
        assert "".join(text for _, text in runs).split() == ["lazy" + STOP]
    else:
        assert runs == trained
    # A template that strips contents moves them.
    stripped = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
    assert encode([user("The fox"), message], template=stripped)[-1] == runs[-1]


def test_a_token_across_the_end_of_a_range_needs_two_characters_of_it(tokenizers, tmp_path):
    """As in axolotl: a range grows to its tokens, but not for a single character."""
    tokenizer = tokenizers["bytes"]
    path = tmp_path / "template.jinja"
    path.write_text(CHATML)
    encoder = ChatEncoder(tokenizer, str(path))
    word = next(
        token
        for token in (tokenizer.decode([number]) for number in range(300, 500))
        if token.isalpha() and len(token) >= 4 and len(tokenizer.encode_batch([token])[0]) == 1
    )
    for size in range(1, len(word)):
        for begin, end in ((0, size - 1), (len(word) - size, len(word) - 1)):
            content = f"{word}\n{word}"
            shift = len(word) + 1
            message = assistant(content, train_detail=[detail(begin + shift, end + shift, train=True)])
            made = encode_conversations([read({"messages": [QUESTION, message]})], encoder, ChatRecipe())
            assert tokenizer.decode(made.ids[made.flags.trained]).removesuffix(STOP) == (word if size > 1 else "")


def test_contents_that_a_template_changes_have_no_ranges(tokenizers, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(CHATML.replace("m.content", "(m.content | upper if m.role == 'assistant' else m.content)"))
    encoder = ChatEncoder(tokenizers["bytes"], str(path))
    message = assistant("lazy dog", train_detail=[detail(0, 3, train=True)])
    made = encode_conversations([read({"messages": [QUESTION, message]})], encoder, ChatRecipe())
    assert "trained ranges cannot be located" in made.faults[0].reason


def test_weights_that_multiply_beyond_the_limit(tokenizers, tmp_path):
    encoder = ChatEncoder(tokenizers["bytes"], "plain")
    conversation = replace(read({"messages": [QUESTION, assistant("a", loss_scale=8)]}), weight=7)
    made = encode_conversations([conversation], encoder, ChatRecipe())
    assert "its loss weights multiply to 56; the largest is 55" in made.faults[0].reason


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"train_on": "asistant"}, "train_on: 'asistant' is none of .*did you mean 'assistant'"),
        ({"train_on": "assistant,tools"}, "train_on: 'assistant,tools' is none of .*did you mean 'tool'"),
        ({"train_on": "tool,tool"}, "names a role twice"),
        ({"train_on": ["tool"]}, "train_on: .* is not a text"),
        ({"train_on_eos": "first"}, "train_on_eos: 'first' is none of turn, all, last, none"),
    ],
)
def test_settings_of_trained_turns(settings, problem):
    with pytest.raises(SettingsError, match=problem):
        ChatRecipe(**settings)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_weights_are_stored_and_rounding_is_noted(tmp_path):
    rows = [
        {"messages": [user(f"q{n}"), assistant("one", loss_weight=0.5), user("x"), assistant(f"two {n}")]}
        for n in range(40)
    ]
    result = batchloom.prepare(write_rows(tmp_path / "in.jsonl", rows), out=tmp_path / "out", tokenizer="bytes")
    assert not any("rounded" in note for note in result.notes)
    store = batchloom.open_store(tmp_path / "out")
    assert store.reader.weighted
    for document in store:
        weights = document.loss_weights
        assert ((weights > 0) == document.mask).all()
        parts = {weight: store.tokenizer.decode(document.ids[weights == np.float32(weight)]) for weight in (0.5, 1)}
        assert parts[0.5] == "one<|endoftext|>"
        assert parts[1].startswith("two")
    rows[7]["messages"][1]["loss_weight"] = 0.123
    result = batchloom.prepare(write_rows(tmp_path / "in.jsonl", rows), out=tmp_path / "two", tokenizer="bytes")
    assert [note for note in result.notes if "rounded" in note] == [
        "Loss weights are rounded to the nearest of 256 values, first in in.jsonl: docs/reference/format.md lists them."
    ]


def test_a_late_weight_of_a_text_is_not_ignored_silently(tmp_path):
    """The reader of plain texts reads no other column."""
    rows = [{"text": f"text {number}"} for number in range(150)]
    late_rows = [{"text": "late", "weight": 0.5}, {"text": "neutral", "weight": 1}, {"text": 'a "weight": 3'}]
    path = write_rows(tmp_path / "in.jsonl", [*rows, *late_rows])
    with pytest.raises(InputError, match="line 151: field 'weight' has a value.*--ignore weight"):
        batchloom.prepare(path, out=tmp_path / "refused", tokenizer="bytes", max_bad=0)
    result = batchloom.prepare(path, out=tmp_path / "ignored", tokenizer="bytes", ignore="weight", max_bad=0)
    assert result.counts.documents == 153
    write_rows(path, [{**rows[0], "weight": 1}, *rows[1:], *late_rows])
    batchloom.prepare(path, out=tmp_path / "weighted", tokenizer="bytes", val_fraction=0)
    assert set(batchloom.open_store(tmp_path / "weighted")[150].loss_weights.tolist()) == {0.5}


def test_segments_are_stored_without_a_template(tmp_path, tokenizer_folders, hf_tokenizers):
    rows = [
        {"segments": [{"label": False, "text": f"<|im_start|>user\n{n}"}, {"label": True, "text": " fox<|im_end|>"}]}
        for n in range(40)
    ]
    rows.append({"segments": [{"label": False, "text": "nothing"}]})
    folder = str(tokenizer_folders["bytes"])
    path = write_rows(tmp_path / "in.jsonl", rows)
    result = batchloom.prepare(path, out=tmp_path / "out", tokenizer=folder, val_fraction=0)
    assert result.counts.dropped == {"nothing to train": 1}
    store, reference = batchloom.open_store(tmp_path / "out"), hf_tokenizers["bytes"]
    for number, document in enumerate(store):
        ids, labels = [], []
        for segment in rows[number]["segments"]:
            part = reference(segment["text"], add_special_tokens=False)["input_ids"]
            ids += part
            labels += part if segment["label"] else [-100] * len(part)
        assert document.ids.tolist() == ids
        assert np.where(document.mask, document.ids.astype(np.int64), -100).tolist() == labels
    batchloom.prepare(path, out=tmp_path / "all", tokenizer=folder, val_fraction=0, train_on="all")
    assert not batchloom.open_store(tmp_path / "all").masked


def test_a_preference_with_weights_is_a_bad_record(tmp_path):
    rows = [
        {"prompt": f"q{n}", "chosen": [assistant("a", loss_scale=2)], "rejected": [assistant("b")]} for n in range(9)
    ]
    with pytest.raises(BatchloomError, match="its flags .train, weight. select tokens outside the answer, or weight"):
        batchloom.prepare(write_rows(tmp_path / "in.jsonl", rows), out=tmp_path / "out", tokenizer="bytes", max_bad=0)


def test_the_stops_are_part_of_the_recipe(tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [{"messages": [user(f"q{n}"), assistant("a")]} for n in range(40)])
    made = {
        eos: batchloom.prepare(path, out=tmp_path / str(eos), tokenizer="bytes", train_on_eos=eos)
        for eos in (None, "turn", "none")
    }
    fingerprints = [batchloom.open_store(result.path).manifest.recipe_fingerprint for result in made.values()]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert "train_on_eos" not in batchloom.open_store(made[None].path).manifest.recipe["chat"]
    document = batchloom.open_store(made["none"].path)[0]
    assert document.trained_text == "a"
    again = batchloom.prepare(recipe=made["none"].path, out=tmp_path / "again")
    assert any("identical" in note for note in again.notes)
