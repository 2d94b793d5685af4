"""Mappings (``--map``) suggested for unknown columns: complete, or none."""

import json

import pytest

import batchloom
from batchloom.chat import parse_mapping
from batchloom.core.errors import SchemaError
from batchloom.store import LabelledAnswers, PreferencePairs
from preparation.stores import write_jsonl

QUESTION = {"role": "user", "content": "<asked>"}


def answer(text):
    return {"role": "assistant", "content": text}


def make_sharegpt(text):
    return [{"from": "human", "value": "<asked>"}, {"from": "gpt", "value": text}]


# Records with unknown columns and the mapping that reads them. Text that a model must see is in <>.
PAIRS = [
    (
        {"chosen_messages": [QUESTION, answer("<good>")], "rejected_messages": [QUESTION, answer("<bad>")]},
        "chosen=chosen_messages,rejected=rejected_messages",
    ),
    (
        {
            "prompt": "<asked>",
            "chosen_messages": [QUESTION, answer("<good>")],
            "rejected_messages": [QUESTION, answer("<bad>")],
            "prompt_id": "1",
        },
        "chosen=chosen_messages,rejected=rejected_messages",
    ),
    (
        {"chosen_conversations": make_sharegpt("<good>"), "rejected_conversations": make_sharegpt("<bad>")},
        "chosen=chosen_conversations,rejected=rejected_conversations",
    ),
    (
        {"prompt": [QUESTION], "chosen_turn": answer("<good>"), "rejected_turn": answer("<bad>")},
        "chosen=chosen_turn,rejected=rejected_turn,prompt=prompt",
    ),
    (
        {"prompt": "<asked>", "chosen_reply": "<good>", "rejected_reply": "<bad>"},
        "chosen=chosen_reply,rejected=rejected_reply,prompt=prompt",
    ),
    (
        {
            "question": "<asked>",
            "response_chosen": "<good>",
            "response_rejected": "<bad>",
            "score_chosen": 1.5,
            "score_rejected": 0.5,
        },
        "chosen=response_chosen,rejected=response_rejected,prompt=question",
    ),
    ({"query": "<asked>", "accepted": "<good>", "rejected": "<bad>"}, "chosen=accepted,rejected=rejected,prompt=query"),
    ({"Prompt": "<asked>", "positive": "<good>", "negative": "<bad>"}, "chosen=positive,rejected=negative,prompt=Prompt"),
    ({"instruction": "<asked>", "win": "<good>", "lose": "<bad>"}, "chosen=win,rejected=lose,prompt=instruction"),
    ({"ask": "<asked>", "chosenReply": "<good>", "rejectedReply": "<bad>"}, "chosen=chosenReply,rejected=rejectedReply,prompt=ask"),
    (
        {"post": "<asked>", "System": "<system>", "better_summary": "<good>", "worse_summary": "<bad>"},
        "chosen=better_summary,rejected=worse_summary,prompt=post,system=System",
    ),
]  # fmt: skip
CONVERSATIONS = [
    (
        {"dialog": [QUESTION, answer("<good>")], "System": "<system>"},
        "messages=dialog,system=System",
    ),
    (
        {"User query": "<asked>", "reply": "<good>", "history": [["<q>", "<a>"]]},
        "prompt=User query,response=reply",
    ),
    (
        {"Query": "<asked>", "reply": "<good>", "Context": "<context>", "System": "<system>"},
        "prompt=Query,response=reply,context=Context,system=System",
    ),
    ({"body": "<good>", "id": "7", "lang": "en"}, "text=body"),
    ({"year": 2020, "venue": "v", "doc": {"text": "<good>"}}, "text=doc.text"),
    ({"barcode_src": "7", "text_by_page_src": ["<good>", "<good>"]}, "text=text_by_page_src[]"),
    (
        {"id": 1, "pages": [{"number": 1, "content": "<good>"}, {"number": 2, "content": "<good>"}]},
        "text=pages[].content",
    ),
    (
        {
            "instructions": "<system>",
            "input": "<asked>",
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "<good>"}]}
            ],
            "tools": [{"type": "function", "name": "<tool>", "parameters": {}}],
        },
        "prompt=input,response=output,system=instructions,tools=tools",
    ),
]


def collect_visible(value):
    """Return the strings of a record that a model must see."""
    if isinstance(value, str):
        return {value} if value.startswith("<") else set()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set().union(*map(collect_visible, values))


def number_texts(value, number):
    """Return a copy of a record with the number in every visible string."""
    if isinstance(value, str):
        return f"{value}{number}." if value.startswith("<") else value
    if isinstance(value, dict):
        return {key: number_texts(item, number) for key, item in value.items()}
    return [number_texts(item, number) for item in value] if isinstance(value, list) else value


def prepare_suggested(folder, record, suggestion):
    """Return the records and the store that the suggested mapping gives."""
    records = [number_texts(record, number) for number in range(5)]
    write_jsonl(folder / "in.jsonl", records)
    settings = {"tokenizer": "bytes", "val_fraction": 0, "template": "plain"}
    with pytest.raises(SchemaError) as caught:
        batchloom.prepare(folder / "in.jsonl", out=folder / "out", **settings)
    assert caught.value.suggestion == suggestion
    mapping = parse_mapping(suggestion)
    result = batchloom.prepare(folder / "in.jsonl", out=folder / "out", mapping=mapping, max_bad=0, **settings)
    return records, batchloom.open_store(result.path)


def decode(ids):
    return bytes(n for n in ids if n < 256).decode()


@pytest.mark.parametrize(("record", "suggestion"), PAIRS)
def test_two_answers_become_a_pair(tmp_path, record, suggestion):
    records, store = prepare_suggested(tmp_path, record, suggestion)
    stored = PreferencePairs(store)
    assert len(stored) == len(records)
    for number, numbered in enumerate(records):
        prompt, chosen, rejected = map(decode, stored[number].values())
        assert f"<good>{number}." in chosen
        assert f"<bad>{number}." in rejected
        assert all(text in prompt + chosen + rejected for text in collect_visible(numbered))
        assert f"<asked>{number}." in prompt


@pytest.mark.parametrize(("record", "suggestion"), CONVERSATIONS)
def test_nothing_of_a_conversation_is_left_out(tmp_path, record, suggestion):
    records, store = prepare_suggested(tmp_path, record, suggestion)
    assert len(store) == len(records)
    for number, numbered in enumerate(records):
        decoded = decode(store[number].ids)
        assert all(visible in decoded for visible in collect_visible(numbered))


def test_json_text_of_messages_is_a_conversation(tmp_path):
    """CSV files hold messages as JSON text."""
    talk = json.dumps([QUESTION, answer("<good>")])
    _, store = prepare_suggested(tmp_path, {"dialog": talk, "id": "7"}, "messages=dialog")
    assert decode(store[0].ids).startswith("User:\n<asked>\n\nAssistant:\n<good>")


def test_a_label_makes_a_labelled_answer(tmp_path):
    record = {"User query": "<asked>", "reply": "<good>", "label": True}
    _, store = prepare_suggested(tmp_path, record, "prompt=User query,response=reply")
    assert len(LabelledAnswers(store)) == 5


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        (
            {
                "conversation_a": [QUESTION, answer("a")],
                "conversation_b": [QUESTION, answer("b")],
                "winner": "a",
            },
            "'conversation_b', 'winner'",
        ),
        ({"prompt": "q", "response_a": "x", "response_b": "y"}, "'response_b'"),
        ({"prompt": "q", "answer_1": "x", "answer_2": "y"}, "'answer_2'"),
        ({"User query": "q", "reply": "r", "label": "nice"}, "'label'"),
        ({"User query": "q", "reply": "r", "previous_turns": "c"}, "'previous_turns'"),
        ({"Question": "q", "choices": ["a", "b"], "Answer": "B"}, "'choices'"),
        ({"dialog": [QUESTION, answer("a")], "functions": [{"name": "f"}]}, "'functions'"),
        (
            {
                "prompt": "q",
                "chosen_messages": json.dumps([answer("a")]),
                "rejected_messages": json.dumps([answer("b")]),
            },
            "'rejected_messages'",
        ),
        ({"post": "q", "good_reply": "a", "bad_reply": "b", "dialog_history": "c"}, "'dialog_history'"),
    ],
)  # fmt: skip
def test_no_mapping_is_suggested_that_would_leave_out_a_column(tmp_path, record, columns):
    write_jsonl(tmp_path / "in.jsonl", [record] * 3)
    with pytest.raises(SchemaError) as caught:
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer="bytes")
    assert caught.value.suggestion is None
    assert f"no --map is suggested because it would leave out {columns}; name the" in str(caught.value)


def test_an_identifier_column_is_not_suggested_as_text(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", [{"id": "a", "response": "b"}, {"uuid": "c", "response": "d"}])
    with pytest.raises(SchemaError) as caught:
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer="bytes")
    assert caught.value.suggestion is None


@pytest.mark.parametrize("record", [{"year": 2020, "venue": "Oslo"}, {"barcode_src": "7", "words": 5}])
def test_the_only_column_of_strings_is_no_text_by_that(tmp_path, record):
    write_jsonl(tmp_path / "in.jsonl", [record] * 5)
    with pytest.raises(SchemaError) as caught:
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer="bytes")
    assert caught.value.suggestion is None


@pytest.mark.parametrize("settings", [{"text_field": "doc.text"}, {"mapping": {"text": "doc.text"}}])
def test_a_text_field_is_a_path_unless_a_column_has_its_name(tmp_path, settings):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"doc": {"text": "nested"}}])
    write_jsonl(tmp_path / "in" / "b.jsonl", [{"doc.text": "named", "doc": {"text": "nested"}}])
    settings = {**settings, "tokenizer": "bytes", "val_fraction": 0, "dedup": "none"}
    store = batchloom.open_store(batchloom.prepare(tmp_path / "in", out=tmp_path / "out", **settings).path)
    assert [decode(store[n].ids) for n in range(len(store))] == ["nested", "named"]
