"""Conversations and token rows through ``prepare``: schemas, masks and batches."""

import json

import numpy as np
import pytest

import batchloom
from batchloom import InputError, SettingsError
from batchloom.batches import IGNORE_INDEX
from batchloom.cli import run_command_line
from batchloom.core.errors import SchemaError, TooManyBadRecordsError
from batchloom.preparation import convert
from preparation.stores import INLINE, write_jsonl
from sources.test_tables import pa, write_table

QUESTIONS = [{"question": f"How much is {n} and {n}?", "answer": f"It is {2 * n}.", "id": n} for n in range(30)]


def make(tmp_path, rows, **settings):
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"tokenizer": "bytes", "val_fraction": 0, **settings}
    return batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", **settings)


def trained_text(store, number):
    """Return the decoded text of the trained tokens of a document."""
    document = store[number]
    mask = store.mask(np.array([number]), np.array([0]), np.array([len(document.ids)]))[0]
    return store.tokenizer.decode(document.ids[mask])


def test_questions_become_conversations_of_which_the_answers_are_trained(tmp_path):
    result = make(tmp_path, QUESTIONS)
    assert "Detected question/answer -> 2 turns in in.jsonl." in result.notes
    store = batchloom.open_store(result.path)
    assert len(store) == len(QUESTIONS)
    for number, row in enumerate(QUESTIONS):
        assert store[number].text.startswith(f"User:\n{row['question']}")
        assert trained_text(store, number) == row["answer"] + "<|endoftext|>"
        assert store.provenance.of(number).line == number + 1
    assert batchloom.check(result.path).sound
    (source,) = store.manifest.sources
    assert (source.detected, source.end) == ("question/answer -> 2 turns", "present")


def test_batches_train_the_answers_and_nothing_else(tmp_path):
    store = batchloom.open_store(make(tmp_path, QUESTIONS).path)
    loader = batchloom.Loader(store, seq_len=128, global_batch_size=4, output="numpy")
    trained = sorted(
        answer
        for batch in loader
        for row in batch["labels"]
        for answer in bytes((row[row != IGNORE_INDEX] % 256).tolist()).decode().split("\x00")
        if answer
    )
    assert trained == sorted(row["answer"] for row in QUESTIONS)


def test_the_same_whatever_the_units_and_after_a_stop(tmp_path):
    from batchloom import Recipe
    from batchloom.preparation import RunSettings, run_recipe

    write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    recipe = Recipe(inputs=(str(tmp_path / "in.jsonl"),), tokenizer="bytes", val_fraction=0.2)
    whole_store = batchloom.open_store(run_recipe(recipe, tmp_path / "a", lambda _: None).path)
    cut_store = batchloom.open_store(
        run_recipe(recipe, tmp_path / "b", lambda _: None, settings=RunSettings(unit_bytes=500, execution=INLINE)).path
    )
    assert len(cut_store.shards) > len(whole_store.shards)
    for number in range(len(whole_store)):
        assert whole_store[number].text == cut_store[number].text
        assert trained_text(whole_store, number) == trained_text(cut_store, number)


def test_a_loader_leaves_out_conversations_it_would_have_to_cut_and_says_so(tmp_path, caplog):
    rows = [*QUESTIONS, {"question": "long", "answer": "z" * 500}]
    store = batchloom.open_store(make(tmp_path, rows).path)
    caplog.clear()
    settings = {"seq_len": 128, "global_batch_size": 2, "output": "numpy"}
    loader = batchloom.Loader(store, **settings)
    assert loader.plan.spec.overlong == "drop"
    assert not any((batch["input_ids"] == ord("z")).any() for batch in loader)
    assert "leaves 1 of 31 documents" in caplog.text
    split = batchloom.Loader(store, overlong="split", **settings)
    assert sum(int((batch["input_ids"] == ord("z")).sum()) for batch in split) == 500


def test_text_and_conversations_in_one_store(tmp_path, caplog):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("plain prose")
    write_jsonl(tmp_path / "in/b.jsonl", QUESTIONS[:3])
    write_jsonl(tmp_path / "in/c.jsonl", [{"text": "more prose"}])
    store = batchloom.open_store(
        batchloom.prepare(tmp_path / "in", out=tmp_path / "out", tokenizer="bytes", val_fraction=0).path
    )
    assert store[0].text == trained_text(store, 0) == "plain prose<|endoftext|>"
    assert trained_text(store, 1) == "It is 0.<|endoftext|>"
    assert store[4].text == trained_text(store, 4) == "more prose<|endoftext|>"
    # Text may be cut, and a loader cannot distinguish text from conversations.
    loader = batchloom.Loader(store, seq_len=8, global_batch_size=1, output="numpy")
    assert loader.plan.spec.overlong == "split"
    caplog.clear()
    for settings in ({"seq_len": 512}, {"seq_len": 8, "overlong": "split"}, {"seq_len": 8}):
        assert "conversations too" not in caplog.text
        next(iter(batchloom.Loader(store, global_batch_size=1, output="numpy", **settings)))
    assert "longer than seq_len 8 are cut, conversations too: overlong='drop'" in caplog.text
    assert batchloom.check(store.path).sound


def test_a_mapping_names_the_columns(tmp_path):
    rows = [{"prompt": f"add({n})", "canonical_solution": f"return {n}"} for n in range(12)]
    with pytest.raises(SchemaError, match="--map prompt=prompt,response=canonical_solution"):
        make(tmp_path, rows)
    mapping = {"prompt": "prompt", "response": "canonical_solution"}
    store = batchloom.open_store(make(tmp_path, rows, mapping=mapping).path)
    assert trained_text(store, 3) == "return 3<|endoftext|>"


def test_what_is_trained_can_be_chosen(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "second"},
        ]
    }
    for train_on, expected in (("assistant", "first"), ("last", "second"), ("all", "User:\na")):
        folder = tmp_path / train_on
        folder.mkdir()
        store = batchloom.open_store(make(folder, [row], train_on=train_on).path)
        assert trained_text(store, 0).startswith(expected)


def test_bad_records_and_those_left_out_are_counted_with_their_reasons(tmp_path):
    rows = [
        *QUESTIONS[:20],
        {"question": "", "answer": "x"},
        {"question": "y", "answer": 5},
        {"question": "long", "answer": "z" * 500},
    ]
    result = make(tmp_path, rows, max_tokens=200)
    assert result.counts.documents == 20
    assert result.counts.quarantined == 2
    assert result.counts.dropped == {"overlong": 1}
    bad = [json.loads(line) for line in (result.path / "quarantine.jsonl").read_text().splitlines()]
    assert [record["line"] for record in bad] == [21, 22]
    assert "'answer'" in bad[1]["reason"]
    assert batchloom.check(result.path).sound
    with pytest.raises(
        InputError,
        match=r"^in.jsonl, line 23: has \d+ tokens where 200 are allowed: .*truncate-turns, split\)$",
    ):
        batchloom.prepare(
            tmp_path / "in.jsonl",
            out=tmp_path / "e",
            tokenizer="bytes",
            max_tokens=200,
            overlong="error",
        )


@pytest.mark.parametrize("overlong", ["truncate", "truncate-left"])
def test_truncated_conversations_are_counted(tmp_path, overlong, capsys):
    long_rows = [{"question": "long", "answer": f"{n}" * 500} for n in range(3)]
    rows = [*QUESTIONS[:20], *long_rows, long_rows[0], {"question": "q" * 300, "answer": "a" * 300}]
    result = make(tmp_path, rows, max_tokens=200, overlong=overlong)
    # The question alone is longer than 200 tokens.
    nothing = {"nothing to train": 1} if overlong == "truncate" else {}
    assert result.counts.dropped == {"exact duplicate": 1, **nothing}
    assert result.counts.truncated == 5 - len(nothing)
    manifest = json.loads((result.path / "dataset_metadata.json").read_text())
    assert manifest["counts"]["truncated"] == result.counts.truncated
    store = batchloom.open_store(result.path, "train")
    texts = [trained_text(store, number) for number in range(len(store))]
    kept = "0" * 150 if overlong == "truncate" else "0" * 150 + "<|endoftext|>"
    assert any(kept in text for text in texts)
    assert max(map(len, (store[n].ids for n in range(len(store))))) == 200
    assert batchloom.check(result.path).sound
    write_jsonl(tmp_path / "more.jsonl", [{"question": "more", "answer": "m" * 500}])
    arguments = [str(tmp_path / "more.jsonl"), "--out", str(result.path), "--append", "--recipe", str(result.path)]
    assert run_command_line(["prepare", *arguments]) == 0
    assert "truncated to --max-tokens" in capsys.readouterr().out
    grown = json.loads((result.path / "dataset_metadata.json").read_text())
    assert grown["counts"]["truncated"] == result.counts.truncated + 1
    arguments = [str(tmp_path / "in.jsonl"), "--tokenizer", "bytes", "--max-tokens", "200", "--overlong", overlong]
    run_command_line(["doctor", *arguments])
    assert "conversations are cut to 200 tokens" in " ".join(capsys.readouterr().out.split())


def test_a_split_conversation_stays_together(tmp_path):
    # Questions are long, so that the first parts contain no answer.
    rows = [{"question": f"{n:02}" * 45, "answer": f"{n:02}" * 75} for n in range(20)]
    result = make(tmp_path, rows, max_tokens=64, overlong="split", val_fraction=0.3)
    (tmp_path / "whole").mkdir()
    whole_store = batchloom.open_store(make(tmp_path / "whole", rows).path)
    parts_by_line = {}
    for name in result.subsets:
        store = batchloom.open_store(result.path, name)
        for number in range(len(store)):
            document = store[number]
            assert len(document.ids) <= 64
            subset, parts = parts_by_line.setdefault(document.provenance.line, (name, []))
            assert subset == name
            parts.append(document.ids.tolist())
            assert trained_text(store, number)
    assert sorted(parts_by_line) == list(range(1, 21))
    assert len({name for name, _ in parts_by_line.values()}) == 2
    counts = result.counts
    assert counts.dropped == {"nothing to train": 20}
    assert counts.documents == sum(len(parts) for _, parts in parts_by_line.values())
    assert counts.further == counts.documents
    for line, (_, parts) in parts_by_line.items():
        ids = whole_store[line - 1].ids.tolist()
        assert [ids[start : start + 64] for start in range(64, len(ids), 64)] == parts
    assert batchloom.check(result.path).sound


def test_a_large_source_of_which_nothing_can_be_read_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("batchloom.preparation.documents.record_parsers._MAX_SAMPLE_BYTES", 1 << 16)
    (tmp_path / "in.jsonl").write_text(("not json " * 40 + "\n") * 6_000)
    events = []
    with pytest.raises(TooManyBadRecordsError, match="line 1"):
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer="bytes", progress=events.append)
    assert not any(getattr(event, "bytes_done", 0) > 1 << 20 for event in events)


def test_rows_of_ids_are_taken_as_they_are(tmp_path):
    rows = [{"input_ids": [1, 2, n, 4], "labels": [-100, -100, n, 4]} for n in range(5, 30)]
    rows.append({"input_ids": [300], "labels": [300]})
    result = make(tmp_path, rows)
    store = batchloom.open_store(result.path)
    assert [store[n].ids.tolist() for n in (0, 1)] == [[1, 2, 5, 4], [1, 2, 6, 4]]
    assert store.contents.trained_tokens == 50
    assert result.counts.quarantined == 1
    bad = json.loads((result.path / "quarantine.jsonl").read_text())
    reason = bad["reason"]
    assert bad["snippet"] == "[300]"
    assert "token id 300; the vocabulary has ids 0 to 256" in reason


def test_the_content_of_a_template_file_is_part_of_the_recipe(tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}")
    result = make(tmp_path, QUESTIONS, template=str(template))
    store = batchloom.open_store(result.path)
    assert store[0].text.startswith("[user]How much")
    assert trained_text(store, 0) == "It is 0.<|endoftext|>"
    assert store.manifest.recipe["chat"]["template"] == "mine.jinja"
    assert make(tmp_path, QUESTIONS, template=str(template)).already_done
    template.write_text(template.read_text().replace("[", "("))
    with pytest.raises(FileExistsError, match="template_hash"):
        make(tmp_path, QUESTIONS, template=str(template))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train_on": "users"}, "train_on: 'users' is none of"),
        ({"overlong": "split"}, "overlong: 'split' is for .* --max-tokens"),
        ({"mapping": {"promt": "q"}}, "did you mean 'prompt'"),
        ({"mapping": {"text": "a"}, "text_field": "b"}, "cannot be combined with a mapping"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        (
            {"overlong": "splt", "template": 1},
            "template: 1 is not a text.*did you mean 'split'",
        ),
    ],
)
def test_settings_that_are_none(tmp_path, settings, sentence):
    with pytest.raises(SettingsError, match=sentence):
        make(tmp_path, QUESTIONS, **settings)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [("chatml2", "did you mean 'chatml'"), ("no/a.jinja", "no template file")],
)
def test_an_unknown_template_is_refused_without_conversations(tmp_path, template, sentence):
    with pytest.raises(InputError, match=sentence):
        make(tmp_path, [{"text": "a"}], template=template)
    assert not (tmp_path / "out").exists()


def test_an_input_without_the_mapped_columns_is_named_with_its_own(tmp_path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", [{"q": "what", "a": "this"}] * 3)
    write_jsonl(tmp_path / "in/b.jsonl", [{"question": "what", "answer": "this"}] * 3)
    (tmp_path / "in/c.txt").write_text("no columns")
    mapping = {"prompt": "q", "response": "a"}
    message = r"^in/b.jsonl: .*have 'question', 'answer'"
    with pytest.raises(SchemaError, match=message):
        batchloom.prepare(tmp_path / "in", out=tmp_path / "out", tokenizer="bytes", mapping=mapping)
    with pytest.raises(SchemaError, match=message):
        convert(tmp_path / "in", out=tmp_path / "out.jsonl", mapping=mapping)
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "in/b.jsonl").unlink()
    assert convert(tmp_path / "in", out=tmp_path / "out.jsonl", mapping=mapping).rows == 4


TABLE = pa.table({"messages": pa.array([], pa.list_(pa.struct([("role", pa.string())])))})


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.arrow"])
def test_a_table_without_rows_needs_no_column_of_text(tmp_path, name):
    (tmp_path / "in").mkdir()
    if name == "a.csv":
        (tmp_path / "in" / name).write_text("question,answer\n")
    else:
        write_table(tmp_path / "in" / name, TABLE, 30)
    settings = {"out": tmp_path / "out", "tokenizer": "bytes", "val_fraction": 0}
    with pytest.raises(InputError, match="No documents were made from 0 records"):
        batchloom.prepare(tmp_path / "in", **settings)
    write_jsonl(tmp_path / "in/b.jsonl", QUESTIONS)
    assert len(batchloom.open_store(batchloom.prepare(tmp_path / "in", **settings).path)) == len(QUESTIONS)


def test_a_tokenizer_is_learned_from_typed_parts_too(tmp_path):
    turns = [
        {"role": role, "content": [{"type": "text", "text": "the same words " * 9}]} for role in ("user", "assistant")
    ]
    result = make(tmp_path, [{"messages": turns}] * 9, tokenizer="train:300")
    assert len(batchloom.open_store(result.path)[0].ids) < 200


def test_a_learned_tokenizer_does_not_fit_given_token_ids(tmp_path):
    with pytest.raises(InputError, match=r"in.jsonl holds token ids.*--tokenizer"):
        make(tmp_path, [{"input_ids": [1, 2]}], tokenizer="train:300")


def test_a_job_that_leaves_all_out_says_by_which_rule(tmp_path):
    with pytest.raises(InputError, match=r"from 30 records: 30 overlong\. .*--max-tokens"):
        make(tmp_path, QUESTIONS, max_tokens=5)


@pytest.mark.parametrize("key", ["tool_calls", "extra", "tools", "beside"])
@pytest.mark.parametrize("depth", [150, pytest.param(450, marks=pytest.mark.slow), 900])
def test_a_deeply_nested_record_is_a_bad_record(tmp_path, key, depth):
    deep = {}
    for _ in range(depth):
        deep = {"a": deep}
    call = {"function": {"name": "f", "arguments": deep}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    fields = {"tool_calls": [call]} if key == "tool_calls" else {key: deep}
    columns = {"tools": [deep]} if key == "tools" else {"beside": deep, "messages": []}
    rows = [{"messages": [turns[0], {**turns[1], **fields}]}, {"messages": turns}]
    if key in ("tools", "beside"):
        rows[0] = {"messages": turns, **columns}
    assert make(tmp_path, rows).counts.quarantined == 1


def test_a_template_nobody_needs_leaves_no_path_in_the_store(tmp_path):
    (tmp_path / "none.jinja").write_text("{{ messages }}")
    result = make(tmp_path, [{"text": "x"}], template=str(tmp_path / "none.jinja"))
    assert str(tmp_path) not in (result.path / "dataset_metadata.json").read_text()


@pytest.mark.parametrize(
    ("messages", "content", "message"),
    [
        (
            "messages",
            "(m.content | upper if m.role != 'user' else m.content)",
            "changes contents or leaves out parts of them",
        ),
        ("messages", "m.content | trim", "strips white space around contents"),
        ("messages[-2:] + messages[:-2]", "m.content", "writes messages in another order"),
        ("messages if m.role != 'system'", "m.content", "leaves out messages of the role system"),
    ],
)
@pytest.mark.parametrize("preferred", [False, True], ids=["chat", "pairs"])
def test_template_changes_to_turns_are_reported_once(tmp_path, caplog, messages, content, message, preferred):
    (tmp_path / "odd.jinja").write_text(
        f"{{% for m in {messages} %}}{{{{ m.role ~ ':' ~ {content} ~ ';' }}}}{{% endfor %}}"
    )
    prompt = {"system": "Short!", "prompt": " How much is 1 + 1?"}
    answers = {"chosen": "two", "rejected": "three"} if preferred else {"response": "two"}
    template = str(tmp_path / "odd.jinja")
    make(tmp_path, [prompt | answers] * 2, template=template, max_bad=2)
    (note,) = [note for note in caplog.messages if message in note]
    assert note.startswith(f"Template odd.jinja {message}: 2 records, first in.jsonl, line 1. batchloom doctor ")


def test_cleaning_that_skips_conversations_is_reported(tmp_path, caplog):
    make(tmp_path, [{"prompt": "Who?", "response": "jane@doe.net"}], clean=["pii"])
    assert "Cleaning applies only to texts and does not change in.jsonl." in caplog.messages
    write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "Who?", "response": "Jane."}] * 2)
    batchloom.prepare(tmp_path / "chat.jsonl", out=tmp_path / "lines", tokenizer="bytes", dedup="lines")
    assert any("From chat.jsonl only equal documents" in message for message in caplog.messages)
    # If no document remains, the error suggests to relax the cleaning.
    write_jsonl(tmp_path / "text.jsonl", [{"text": "too short"}])
    with pytest.raises(InputError, match=r"1 length: too few words\. Relax the rules \(--clean, "):
        batchloom.prepare(str(tmp_path / "text.jsonl"), out=tmp_path / "o", tokenizer="bytes", clean=["length"])


def sharegpt_calls(number):
    call = {"name": "add", "arguments": {"a": number, "b": number}}
    return [
        {"from": "human", "value": f"{number} + {number}?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": f"[{2 * number}]"},
        {"from": "gpt", "value": f"It is {2 * number}."},
    ]


def openai_calls(number):
    function = {"name": "add", "arguments": json.dumps({"a": number, "b": number})}
    call = {"id": "1", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"{number} + {number}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": f"[{2 * number}]", "tool_call_id": "1"},
        {"role": "assistant", "content": f"It is {2 * number}."},
    ]


@pytest.mark.parametrize("tools", [None, [{"name": "add"}], '[{"name": "add"}]'])
@pytest.mark.parametrize(("column", "turns"), [("conversations", sharegpt_calls), ("messages", openai_calls)])
def test_tool_calls_need_no_template(tmp_path, column, turns, tools):
    """Template ``plain`` keeps all records with tool calls, and quarantines none."""
    rows = [{column: turns(number), "tools": tools} for number in range(10)]
    rows += [{column: turns(number)[::3], "tools": tools} for number in range(10)]
    result = make(tmp_path, rows, max_bad=0, prove=True)
    assert result.counts.quarantined == 0
    assert not any("leaves out" in note for note in result.notes)
    store = batchloom.open_store(result.path)
    assert len(store) == 20
    for number in range(10):
        call = f'{{"name": "add", "arguments": {{"a": {number}, "b": {number}}}}}'
        answer = f"It is {2 * number}.<|endoftext|>"
        assert trained_text(store, number) == (f"<tool_call>\n{call}\n</tool_call><|endoftext|>{answer}")
        assert trained_text(store, 10 + number) == answer
        assert f"Tool:\n[{2 * number}]\n\n" in store[number].text
        # A tool without a type is a function.
        tool_line = 'Tools:\n{"type": "function", "function": {"name": "add"}}\n\n'
        assert store[number].text.startswith(tool_line) is bool(tools)


def test_flags_that_leave_nothing_to_train_are_named(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "loss": False}]
    write_jsonl(tmp_path / "in.jsonl", [{"messages": turns}] * 6)
    with pytest.raises(InputError, match=r"6 nothing to train.*--train-on, flags of messages, weights of 0"):
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "o", tokenizer="bytes")


def make_called(arguments):
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    return [
        {"role": "user", "content": "Find it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def test_nulls_that_arrow_adds_are_removed_and_those_of_json_stay(tmp_path):
    """Arrow gives all objects of a column the keys of each of them."""
    given = [{"city": "Oslo"}, {"name": "x", "size": 3}]
    tools = [[{"type": "function", "function": {"name": "find", "parameters": values}}] for values in given]
    rows = [{"messages": make_called(values), "tools": tool} for values, tool in zip(given, tools, strict=True)]
    table = pa.Table.from_pylist(rows)
    call = table.to_pylist()[0]["messages"][1]["tool_calls"][0]
    assert call["function"]["arguments"] == {"city": "Oslo", "name": None, "size": None}
    write_table(tmp_path / "in.parquet", table)
    settings = {"tokenizer": "bytes", "val_fraction": 0, "dedup": "none"}
    from_table = batchloom.open_store(batchloom.prepare(tmp_path / "in.parquet", out=tmp_path / "t", **settings).path)
    write_jsonl(tmp_path / "in.jsonl", rows)
    from_json = batchloom.open_store(batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "j", **settings).path)
    assert [document.text for document in from_table] == [document.text for document in from_json]
    write_jsonl(tmp_path / "null.jsonl", [{"messages": make_called({"city": None})}])
    store = batchloom.open_store(batchloom.prepare(tmp_path / "null.jsonl", out=tmp_path / "n", **settings).path)
    assert '"arguments": {"city": null}' in store[0].text


@pytest.mark.parametrize("template", ["none", "plain"])
def test_answers_alone_are_trained(tmp_path, template):
    write_jsonl(tmp_path / "in.jsonl", [{"response": f"Answer {n}."} for n in range(3)])
    settings = {"tokenizer": "bytes", "val_fraction": 0, "template": template, "mapping": {"response": "response"}}
    store = batchloom.open_store(batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", **settings).path)
    document = store[1]
    trained = document.ids if document.mask is None else document.ids[document.mask.astype(bool)]
    assert bytes(n for n in trained if n < 256).decode().strip() == "Answer 1."


@pytest.mark.parametrize(
    "content", ["<image> What?", "<img>http://host/a.jpg</img> What?", "<audio>a.wav</audio> What?"]
)
def test_markers_of_media_in_texts_are_noticed(tmp_path, caplog, content):
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]
    write_jsonl(tmp_path / "in.jsonl", [{"messages": turns}] * 3)
    settings = {"tokenizer": "bytes", "val_fraction": 0, "template": "plain", "dedup": "none"}
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", **settings)
    [note] = [message for message in caplog.messages if "markers of media" in message]
    assert "3 records" in note


@pytest.mark.parametrize("place", ["column", "message"])
def test_an_unknown_key_in_every_record_is_one_note(tmp_path, place):
    mood = {"mood": "calm"}
    question = {"role": "user", "content": "q", **(mood if place == "message" else {})}
    record = {"messages": [question, {"role": "assistant", "content": "a"}], **(mood if place == "column" else {})}
    result = make(tmp_path, [record] * 1500)
    assert sum("mood" in note for note in result.notes) == 1
    assert (result.path / "quarantine.jsonl").read_text() == ""


def test_an_unsupported_key_in_every_later_record_is_one_line(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    records = [{"messages": messages, **({"functions": ["x"]} if n > 200 else {})} for n in range(1500)]
    with pytest.raises(InputError) as caught:
        make(tmp_path, records)
    assert str(caught.value).count("column 'functions'") == 1
    assert len(str(caught.value)) < 1000
