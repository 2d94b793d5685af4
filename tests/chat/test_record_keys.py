"""Tables of record and message keys: read, metadata, refused or unused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import batchloom
from batchloom.chat import (
    COLUMN_TABLES,
    FORM_RULES,
    MESSAGE_KEYS,
    PART_KEYS,
    detect_schema,
    make_record_reader,
    parse_mapping,
    unused_columns,
)
from batchloom.cli import run_command_line
from batchloom.core.document import Conversation, LabelledConversation, PreferencePair
from batchloom.core.errors import SchemaError, UnusableRecordError


def user(text, **fields):
    return {"role": "user", "content": text, **fields}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


TALK = [user("q"), assistant("a")]
# Records of each kind, in every form that gives the kind.
RECORDS = {
    "text": [{"text": "t"}],
    "interleaved": [{"text": "t <image>", "images": ["i.png"]}],
    "conversation": [
        {"messages": TALK},
        {"prompt": "p", "completion": "c"},
        {"instruction": "i", "output": "o"},
    ],
    "preference": [
        {"prompt": "p", "chosen": "c", "rejected": "r"},
        {"messages": TALK, "label": True},
    ],
    "prompt": [{"prompt": "p"}],
    "tokens": [{"input_ids": [5, 6, 7]}],
}
# For each unsupported key, a value that changes training in the library that defines it.
EFFECTIVE = {
    "label": "good",
    "mask": "Assistant",
    "weight": 0.5,
    "loss_scale": 2,
    "position_ids": [0, 1, 0],
    "seq_lengths": [2, 1],
    "function_call": {"name": "f", "arguments": "{}"},
    "history": [["h", "r"]],
}
NEUTRAL = {
    "mask": "User",
    "weight": 1.0,
    "loss_scale": 1,
    "position_ids": [0, 1, 2],
    "seq_lengths": [3],
}


def read_record(record, mapping=None, ignore=(), carry=None):
    schema = detect_schema([record], mapping, ignore=ignore, carry=carry)
    return make_record_reader(schema)(record)


def has_role(record, name):
    """Return whether the form of a record has a role for the column."""
    if name == "tools":
        return "instruction" not in record
    if name == "history" and record == {"prompt": "p"}:
        return True
    if name == "rejected_images":
        return "chosen" in record
    return name == "history" and bool({"instruction", "chosen"} & record.keys())


def list_unsupported_cases():
    for kind, table in COLUMN_TABLES.items():
        for name in table.unsupported:
            for record in RECORDS[kind]:
                if name not in record and not has_role(record, name):
                    yield pytest.param(kind, record, name, id=f"{kind}-{'-'.join(record)}-{name}")


@pytest.mark.parametrize(("kind", "record", "name"), list(list_unsupported_cases()))
def test_an_unsupported_column_is_an_error_that_names_its_library(kind, record, name):
    # 5 is no label: a kto_tag that is a label is used.
    changed_record = {**record, name: 5 if name == "kto_tag" else EFFECTIVE.get(name, "x")}
    carry = {} if kind == "prompt" else None
    schema = detect_schema([record], media=kind == "interleaved", carry=carry)
    assert schema.kind == kind
    library = COLUMN_TABLES[kind].unsupported[name].library
    if name in ("rejected_response", "rejected_messages") and "chosen" not in record:
        # In the first records, the column turns each record into a pair.
        assert isinstance(read_record(changed_record), PreferencePair)
        with pytest.raises(UnusableRecordError, match=f"'{name}' is not supported"):
            make_record_reader(schema)(changed_record)
        return
    with pytest.raises(SchemaError) as caught:
        detect_schema([changed_record], carry=carry)
    assert f"{name!r} is not supported ({library}: " in str(caught.value)
    assert f"--ignore {name}" in str(caught.value)
    # A late column makes a bad record.
    with pytest.raises(UnusableRecordError, match=f"'{name}' is not supported"):
        make_record_reader(schema)(changed_record)
    # With --ignore, the record is read as if it lacked the column.
    ignored = make_record_reader(detect_schema([changed_record], ignore=[name], carry=carry))(changed_record)
    assert repr(ignored) == repr(make_record_reader(schema)(record))
    for empty in (None, "", []):
        assert repr(make_record_reader(schema)({**record, name: empty})) == repr(ignored)
    if name in NEUTRAL:
        assert repr(read_record({**record, name: NEUTRAL[name]}, carry=carry)) == repr(ignored)


@pytest.mark.parametrize("name", MESSAGE_KEYS.unsupported)
def test_an_unsupported_key_of_a_message_is_an_error(name):
    entry = MESSAGE_KEYS.unsupported[name]
    record = {"messages": [user("q"), assistant("a", **{name: EFFECTIVE[name]})]}
    with pytest.raises(UnusableRecordError) as caught:
        read_record(record)
    assert f"messages[1].{name} is not supported ({entry.library}: " in str(caught.value)
    assert read_record(record, ignore=[name]) == Conversation(TALK)
    assert read_record(record, ignore=[f"messages[].{name}"]) == Conversation(TALK)
    as_text = {"messages": json.dumps(record["messages"])}
    assert read_record(as_text, ignore=[name]) == Conversation(TALK)
    with pytest.raises(UnusableRecordError, match=f"answer.{name} is not supported|{name}"):
        read_record({"prompt": "q", "completion": record["messages"][1:]})


@pytest.mark.parametrize("name", sorted(PART_KEYS.keys() - MESSAGE_KEYS.used))
def test_an_unsupported_key_of_a_part_is_an_error(name):
    part = {"type": "text", "text": "a", name: 0}
    record = {"messages": [user("q"), assistant([part])]}
    with pytest.raises(UnusableRecordError, match=rf"messages\[1\].content\[0\].{name} is not"):
        read_record(record)
    plain = [user("q"), assistant([{"type": "text", "text": "a"}])]
    assert read_record(record, ignore=[name]) == Conversation(plain)


@pytest.mark.parametrize("value", [3, 0.5, True, "x", {"a": 1}, [1], [[1]], None, np.arange(3)])
def test_each_entry_judges_any_value(value):
    tables = [*(table.unsupported for table in (*COLUMN_TABLES.values(), MESSAGE_KEYS)), PART_KEYS]
    for entry in (entry for table in tables for entry in table.values()):
        assert entry.is_neutral(value) in (True, False)


def test_neutral_values_may_be_text():
    record = {"messages": TALK, "loss_scale": "1", "mask": "user"}
    assert read_record(record) == Conversation(TALK)


def test_the_reason_of_a_record_is_the_same_in_every_process():
    """Sets of strings have a different order in each process; reasons must not."""
    script = (
        "from batchloom.chat import detect_schema, make_record_reader\n"
        "talk = [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}]\n"
        "read = make_record_reader(detect_schema([{'messages': talk}]))\n"
        "row = {'messages': talk, 'mask': 'x', 'loss_scale': 3, 'functions': [1]}\n"
        "try: read(row)\n"
        "except Exception as error: print(error)\n"
    )
    reasons = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(3)
    }
    assert len(reasons) == 1
    assert "loss_scale" in reasons.pop()


def test_turns_that_are_no_messages_are_refused_with_an_ignored_key():
    for turns in ([user("q", lang="en"), None, assistant("a")], [user("q", lang="en"), "x"]):
        for value in (turns, json.dumps(turns)):
            with pytest.raises(UnusableRecordError, match=r"messages\[1\] holds"):
                make_record_reader(detect_schema([{"messages": TALK}], ignore=["lang"]))({"messages": value})


def test_history_is_read_into_pairs():
    record = {"instruction": "q2", "chosen": "a", "rejected": "b", "history": [["q1", "a1"]]}
    pair = read_record({**record, "input": "x", "system": "s"})
    prompt = [{"role": "system", "content": "s"}, user("q1"), assistant("a1"), user("q2\nx")]
    assert pair.chosen.messages == [*prompt, assistant("a")]
    assert pair.rejected.messages == [*prompt, assistant("b")]


def test_parts_of_llama_factory_hold_their_text_as_value():
    def make_parts(text):
        return [{"type": "text", "value": text}]

    messages = [user(make_parts("q"), loss_weight=0.0), assistant(make_parts("a"), loss_weight=1.0)]
    conversation = read_record({"messages": messages})
    assert [m["content"] for m in conversation.messages] == [
        [{"type": "text", "text": "q"}],
        [{"type": "text", "text": "a"}],
    ]
    assert conversation.trained == [False, True]


def test_a_tool_call_of_ms_swift_is_a_call_of_the_turn_before_it():
    calls = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    messages = [
        user("q"),
        assistant("Let me see."),
        {"role": "tool_call", "content": json.dumps(calls[0])},
        {"role": "tool_call", "content": calls[1]},
        {"role": "tool_response", "content": "2"},
        assistant("a"),
    ]
    _, called, result, _ = read_record({"messages": messages}).messages
    assert [call["function"] for call in called["tool_calls"]] == calls
    assert (called["role"], called["content"]) == ("assistant", "Let me see.")
    assert result == {"role": "tool", "content": "2"}
    with pytest.raises(UnusableRecordError, match=r"tool_calls\[0\] has no name"):
        read_record({"messages": [user("q"), {"role": "tool_call", "content": "{}"}, assistant("a")]})
    marked = [user("q"), assistant("a", loss=False), {"role": "tool_call", "content": calls[1], "loss": True}]
    with pytest.raises(UnusableRecordError, match="contradict each other"):
        read_record({"messages": marked})


def test_all_unsupported_columns_are_named_at_once():
    record = {"messages": TALK, "loss_scale": 2, "functions": [3]}
    with pytest.raises(SchemaError) as caught:
        detect_schema([record])
    assert [repr(name) in str(caught.value) for name in record] == [False, True, True]


@pytest.mark.parametrize("value", [True, False, 1, 0, "true"])
def test_a_kto_tag_is_a_label(value):
    is_good = value in (True, "true")
    expected = LabelledConversation(Conversation(TALK, completion=1), label=is_good)
    assert read_record({"instruction": "q", "output": "a", "kto_tag": value}) == expected
    assert read_record({"messages": TALK, "kto_tag": value}) == expected
    # A column of classes next to it is no label.
    assert read_record({"messages": TALK, "label": "math", "kto_tag": value}) == expected
    with pytest.raises(SchemaError, match="'kto_tag' is not supported .LLaMA-Factory"):
        read_record({"messages": TALK, "label": True, "kto_tag": value})


def test_labels_in_words_are_not_trained_as_answers():
    rows = [{"prompt": f"q{n}", "completion": "a", "label": ("good", "Bad")[n % 2]} for n in range(9)]
    with pytest.raises(SchemaError, match="'label' is not supported .TRL: labels the answer .*write true or false"):
        detect_schema(rows)
    assert detect_schema([{**row, "label": "math"} for row in rows]).kind == "conversation"
    assert detect_schema(rows, ignore=["label"]).kind == "conversation"


@pytest.mark.parametrize("value", ["maybe", True])
@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_a_mapping_leaves_out_labels_of_either_name(tmp_path, name, value):
    rows = [{"prompt": f"q{n}", "completion": "a", name: value} for n in range(9)]
    assert read_record(rows[0], {"label": ""}) == read_record({"prompt": "q0", "completion": "a"})
    write_rows(tmp_path / "in.jsonl", rows)
    path = str(tmp_path / "in.jsonl")
    arguments = ["prepare", path, "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert run_command_line([*arguments, "--map", "label="]) == 0
    assert not batchloom.open_store(tmp_path / "out").contents.objective


def test_a_rejected_response_makes_a_pair():
    """ms-swift: ``rejected_response`` replaces the last answer of the conversation."""
    messages = [user("p"), assistant("x"), *TALK]
    expected = PreferencePair(
        Conversation(messages, completion=3),
        Conversation([*messages[:-1], assistant("bad")], completion=3),
    )
    assert read_record({"messages": messages, "rejected_response": "bad"}) == expected
    assert read_record({"messages": json.dumps(messages), "rejected_response": "bad"}) == expected
    rejected = [*messages[:-1], assistant("bad")]
    assert read_record({"messages": messages, "rejected_messages": rejected}) == expected
    schema = detect_schema([{"messages": messages, "rejected_response": "bad"}])
    assert schema.description == "messages/rejected_response -> preference pairs, the prompt in both"
    single = PreferencePair(Conversation(TALK, completion=1), Conversation([user("q"), assistant("bad")], completion=1))
    for prompt, response in (("prompt", "response"), ("instruction", "output")):
        assert read_record({prompt: "q", response: "a", "rejected_response": "bad"}) == single
    tools = [{"type": "function", "function": {"name": "f"}}]
    pair = read_record({"system": "s", "messages": TALK, "rejected_response": "bad", "tools": tools})
    assert pair.rejected.messages[0] == {"role": "system", "content": "s"}
    assert pair.chosen.tools == pair.rejected.tools == tools


def test_json_text_of_messages_is_read_in_every_column_of_turns():
    chosen, rejected = TALK, [user("q"), assistant("bad")]
    pair = {"chosen": chosen, "rejected": rejected}
    as_text = {name: json.dumps(value) for name, value in pair.items()}
    assert read_record(as_text) == read_record(pair)
    halves = {"prompt": [user("q")], "completion": [assistant("a")]}
    assert read_record({name: json.dumps(value) for name, value in halves.items()}) == read_record(halves)
    # A prompt of messages joins them; a text that happens to be JSON stays text.
    prompted = {**as_text, "prompt": json.dumps([user("q")])}
    assert read_record(prompted) == read_record({**pair, "prompt": [user("q")]})
    code = json.dumps([assistant("hi")])
    assert read_record({"prompt": "q", "completion": code}).messages[1]["content"] == code
    for text in ('[{"name": "f"}]', '[{"role": 1, "content": "a"}]', "[{", "[]"):
        record_pair = read_record({"prompt": "q", "chosen": text, "rejected": "bad"})
        assert record_pair.chosen.messages[1]["content"] == text


def test_a_conversation_with_a_pair_in_it_is_decided_by_the_user():
    good, bad = TALK, [user("q"), assistant("bad")]
    record = {"prompt": "q", "messages": good, "chosen": good, "rejected": bad, "score_chosen": 4.0}
    with pytest.raises(SchemaError, match="'chosen', 'rejected' are not supported") as caught:
        read_record(record)
    assert caught.value.suggestion == "chosen=chosen,rejected=rejected"
    assert isinstance(read_record(record, parse_mapping(caught.value.suggestion)), PreferencePair)
    for mapping, ignore in (({"messages": "messages"}, ()), (None, ("chosen", "rejected"))):
        assert read_record(record, mapping, ignore) == Conversation(good)
    texts = {"prompt": "q", "chosen": "a", "rejected": "bad"}
    chosen_alone = read_record(texts, parse_mapping("prompt=prompt,completion=chosen"))
    assert chosen_alone == Conversation(good, completion=1)


NAMES = st.text(st.characters(categories=("Ll", "Nd")), min_size=1, max_size=8)
NAMES = NAMES.filter(lambda name: not any(name in table.unsupported for table in COLUMN_TABLES.values()))
KNOWN = st.sampled_from(["id", "url", "lang", "text", "system", "tools", "images"])


@given(record=st.dictionaries(NAMES | KNOWN, st.text(max_size=3) | st.none(), max_size=6))
def test_a_column_is_read_or_metadata_or_announced(record):
    record = {**record, "messages": TALK}
    schema = detect_schema([record])
    used = {name for names in schema.columns.values() for name in names}
    silent = used | COLUMN_TABLES[schema.kind].metadata
    expected = [name for name, value in record.items() if value and name not in silent]
    assert list(unused_columns([record], schema)) == expected


def test_keys_next_to_the_prompt_of_openai_are_announced():
    prompt = {"messages": [user("q")], "tools": [], "parallel_tool_calls": True, "functions": [], "system": "Be brief."}
    record = {"input": prompt, "preferred_output": [assistant("a")], "non_preferred_output": [assistant("b")]}
    assert unused_columns([record], detect_schema([record])) == ("input.system",)
    assert unused_columns([record], detect_schema([record], ignore=["input.system"])) == ()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(path, **options):
    return batchloom.prepare(path, out=path.with_suffix(""), tokenizer="bytes", **options)


def test_unused_columns_are_announced_once(tmp_path):
    rows = [
        {"id": n, "messages": [user(f"q{n}", mood="x"), assistant("a")], "lang": "en", "score": 1} for n in range(20)
    ]
    for name in ("one", "three"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    notes = prepare(tmp_path / "one.jsonl").notes
    assert [note for note in notes if "nused" in note] == ["Unused columns: lang, score, messages[].mood"]
    for number, ignore in enumerate(("lang,score,mood", "lang,score,messages[].mood")):
        path = tmp_path / f"ignored{number}.jsonl"
        write_rows(path, rows)
        notes = prepare(path, ignore=ignore).notes
        assert not [note for note in notes if "nused" in note]
    diagnosis = batchloom.doctor(tmp_path / "one.jsonl", tokenizer="bytes")
    assert diagnosis.sources[0].unused == ("lang", "score", "messages[].mood")
    diagnosis = batchloom.doctor(tmp_path / "one.jsonl", tokenizer="bytes", ignore=["score"])
    assert diagnosis.sources[0].unused == ("lang", "messages[].mood")
    assert "--ignore score" in diagnosis.commands[0]
    # A key that the template reads counts as used.
    template = tmp_path / "moods.jinja"
    template.write_text("{% for m in messages %}{{ m.role }} {{ m.mood }}: {{ m.content }}\n{% endfor %}")
    notes = prepare(tmp_path / "three.jsonl", template=str(template)).notes
    assert "Unused columns: lang, score" in notes


def test_an_ignored_key_is_part_of_the_recipe(tmp_path):
    rows = [{"messages": [user(f"q{n}"), assistant("a", function_call={"name": "f"})]} for n in range(20)]
    write_rows(tmp_path / "in.jsonl", rows)
    with pytest.raises(batchloom.BatchloomError, match="function_call is not supported .OpenAI"):
        prepare(tmp_path / "in.jsonl")
    report = prepare(tmp_path / "in.jsonl", ignore=["function_call"], restart=True)
    assert report.counts.documents == 20
    repeated = batchloom.prepare(recipe=report.path, out=tmp_path / "again")
    assert f"{tmp_path / 'again'} is identical to {report.path}, byte for byte." in repeated.notes
    manifest = tmp_path / "sets.yaml"
    manifest.write_text("datasets:\n- path: in.jsonl\n  ignore: [function_call]\n")
    assert batchloom.prepare(manifest, out=tmp_path / "sets", tokenizer="bytes").counts.documents == 20


def test_pairs_and_labels_of_other_libraries_become_stores(tmp_path):
    conversations = [[user(f"q{n}"), assistant("good")] for n in range(20)]
    swift = [{"messages": talk, "rejected_response": "bad"} for talk in conversations]
    factory = [{"instruction": f"q{n}", "output": "o", "kto_tag": n % 2 == 0} for n in range(20)]
    write_rows(tmp_path / "swift.jsonl", swift)
    write_rows(tmp_path / "factory.jsonl", factory)
    pairs = batchloom.store.PreferencePairs(batchloom.open_store(prepare(tmp_path / "swift.jsonl").path))
    assert bytes(pairs[0]["rejected_ids"][:3]) == b"bad"
    labels = batchloom.store.LabelledAnswers(batchloom.open_store(prepare(tmp_path / "factory.jsonl").path))
    assert sorted({bool(good) for good in labels.good}) == [False, True]


def test_the_page_lists_every_unsupported_key():
    page = (Path(__file__).parents[2] / "docs/reference/schemas.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \| (?:column|message|part)", page, re.MULTILINE))
    tables = [*(table.unsupported for table in (*COLUMN_TABLES.values(), MESSAGE_KEYS)), PART_KEYS]
    assert rows == {name for table in tables for name in table}
    parts = re.findall(r"<!-- begin metadata-\w+ -->\n(.*)", page)
    assert set(re.findall(r"`(\w+)`", " ".join(parts))) == MESSAGE_KEYS.metadata


def test_used_names_are_those_of_the_forms():
    names = {
        name
        for rule in FORM_RULES
        for columns in (*rule.required.values(), *rule.optional.values())
        for name in columns
    }
    assert names == frozenset().union(
        *(table.used for kind, table in COLUMN_TABLES.items() if kind not in ("interleaved", "prompt"))
    )
    for table in (*COLUMN_TABLES.values(), MESSAGE_KEYS):
        assert not table.metadata & table.unsupported.keys()
