"""``doctor``: its diagnosis of inputs agrees with the result of ``prepare``."""

import gzip
import json
import re
import shlex
from random import Random

import numpy as np
import pytest

import batchloom
from batchloom import Recipe, SettingsError, TokenizerError
from batchloom.analysis.doctor import SampleSizes, estimate_packing, examine_inputs
from batchloom.cli import run_command_line
from batchloom.core.errors import InputMissingError
from batchloom.preparation import read_report
from chat.conftest import tokenizer_folders  # noqa: F401
from preparation.stores import write_jsonl
from sources.test_tables import pa, write_table
from sources.web_server import serve

CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"How much is {n} and {n}?\nSay it, naïvely. 日本"},
            {"role": "assistant", "content": f"It is {2 * n} 😀."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes.", "train": n % 3 > 0},
        ]
    }
    for n in range(40)
]
PAIRS = [{"prompt": f"Is {n} odd?", "chosen": "Yes.", "rejected": "No!"} for n in range(20)]
QUESTIONS = [{"question": f"Is {n} odd?", "answer": "Yes." if n % 2 else "No."} for n in range(60)]


def diagnose(inputs, **settings):
    return batchloom.doctor(inputs, **{"tokenizer": "bytes", **settings})


def iter_masks(store):
    """Yield the ids and trained flags of every document, in order."""
    for number in range(len(store)):
        ids = store[number].ids
        span = (np.array([number]), np.array([0]), np.array([len(ids)]))
        yield ids, store.mask(*span)[0] if store.masked else np.ones(len(ids), bool)


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (CHATS, {"train_on": "assistant"}),
        (CHATS, {"train_on": "last"}),
        (CHATS, {"template": "alpaca", "train_on": "all"}),
        (QUESTIONS, {}),
        (QUESTIONS, {"tokenizer": "bpe"}),
        (PAIRS, {}),
        ([{"chosen": f"Q {n} a", "rejected": f"Q {n}\r\nZ\u0301"} for n in range(9)], {}),
        ([{"text": f"Text {n}.\r\nZ\u0301"} for n in range(30)], {}),
        ([{"input_ids": [n, 5, 6], "labels": [-100, 5, -100]} for n in range(9)], {}),
    ],
)
def test_the_preview_is_the_store(rows, settings, tmp_path, tokenizer_folders):  # noqa: F811
    settings = {"tokenizer": "bytes", **settings}
    if settings["tokenizer"] == "bpe":
        settings["tokenizer"] = str(tokenizer_folders["bytes"])
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    diagnosis = diagnose(path, preview=2 * len(rows), **settings)
    prepared = batchloom.prepare(path, out=tmp_path / "out", val_fraction=0, **settings)
    store = batchloom.open_store(prepared.path)
    (source,) = diagnosis.sources
    assert (source.documents, source.total_tokens) == (len(store), store.tokens)
    assert source.trained_tokens == store.contents.trained_tokens
    assert len(source.preview) == len(store)
    for number, (document, (ids, mask)) in enumerate(zip(source.preview, iter_masks(store), strict=True)):
        flags = [flag for segment in document.pieces for flag in [segment.trained] * segment.tokens]
        assert flags == mask.tolist()
        assert "".join(segment.text for segment in document.pieces) == store.tokenizer.decode(ids)
        assert document.line == store.provenance.of(number).line
        stops = np.cumsum([segment.tokens for segment in document.pieces])
        for segment, stop in zip(document.pieces, stops, strict=True):
            assert segment.text == store.tokenizer.decode(ids[stop - segment.tokens : stop])


SENTENCES = "This is a sentence of some words. Here is another one, which ends. "
TEXTS = [*(f"{SENTENCES * 3}Number {n} is last." for n in range(5)), "too short", "", "{brace}. " * 9, 7]
TOKEN_ROWS = [{"input_ids": ids, "labels": [-100, ids[1]]} for ids in ([1, 2], [1, 2], [3, 2], [3, 400])]
TOKEN_ROWS += [{"input_ids": [1, 2], "labels": [-100, -100]}]
OTHER_TURNS = [[{"role": "user", "content": "Why?"}], [], "no list"]


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([{"text": text} for text in (*TEXTS, TEXTS[0], TEXTS[1] + "\n\nshort")], {"clean": ["c4"]}),
        ([*CHATS, CHATS[3], CHATS[4], *({"messages": turns} for turns in OTHER_TURNS)], {"max_tokens": 132}),
        ([*PAIRS, PAIRS[0], {**PAIRS[1], "rejected": 1}], {}),
        (TOKEN_ROWS, {}),
    ],
    ids=["cleaned text", "chat", "preferences", "token ids"],
)
def test_counts_are_those_of_prepare(rows, settings, tmp_path):
    settings = {"tokenizer": "bytes", "max_bad": "90%", **settings}
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    diagnosis = diagnose(path, **settings)
    (source,) = diagnosis.sources
    prepared = batchloom.prepare(path, out=tmp_path / "out", val_fraction=0, **settings)
    counts, flows = prepared.counts, read_report(prepared.path).content.flows
    dropped = dict(counts.dropped)
    assert dropped.pop("exact duplicate") == diagnosis.duplicates.repeated > 0
    assert source.dropped | {"empty": source.empty} == {"empty": 0} | dropped
    assert (source.records, source.bad, source.documents) == (counts.records, counts.quarantined, diagnosis.documents)
    assert source.bad > 1
    tokenized = next(flow for flow in flows if flow.step == "tokenize")
    assert (diagnosis.documents, diagnosis.tokens) == (tokenized.documents_out, tokenized.tokens_out)
    assert diagnosis.documents - diagnosis.duplicates.repeated == counts.documents


def test_the_preview_of_a_long_document_leaves_out_its_middle(tmp_path):
    text = "ä" * 5000
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": text}])
    (document,) = diagnose(path).sources[0].preview
    head, middle, tail = document.pieces
    assert middle.trained is None
    assert head.tokens + middle.tokens + tail.tokens == document.tokens == 10_001
    assert set(head.text) == {"ä"}
    assert tail.text.strip("ä") == "<|endoftext|>"


def test_prepared_inputs_are_recognized(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", CHATS)
    store = batchloom.prepare(path, out=tmp_path / "s", tokenizer="bytes", val_fraction=0).path
    diagnosis = diagnose(store, full=True)
    (prepared,) = diagnosis.prepared
    assert (prepared.kind, prepared.checked, diagnosis.sound) == ("store", True, True)
    assert prepared.preview[0].pieces == diagnose(path).sources[0].preview[0].pieces
    assert diagnosis.commands == (f"batchloom train --data {store} --out run",)
    prefix = str(store / "train/shard_00000")
    diagnosis = diagnose([prefix, path])
    assert [prepared.kind for prepared in diagnosis.prepared] == ["prefix"]
    assert diagnosis.sources[0].documents == 40
    assert diagnosis.commands[1] == f"batchloom train --data {prefix} --out run"
    (store / "train/shard_00000.bin").write_bytes(b"\0")
    assert not diagnose(store).sound


LABELLED = [{"prompt": f"{n}?", "completion": "Yes.", "label": n % 3 == 0} for n in range(20)]
PROMPTS = [{"question": f"{n}?", "answer": "4"} for n in range(20)]


@pytest.mark.parametrize(
    ("rows", "settings", "sides", "reader"),
    [
        (PAIRS, {}, {"chosen": (20, 120), "rejected": (20, 100)}, "PreferencePairs"),
        (LABELLED, {}, {"good": (7, 42), "bad": (13, 78)}, "LabelledAnswers"),
        (PROMPTS, {"prompts": True, "carry": ["answer"]}, {"prompt": (20, 0)}, "StoredPrompts"),
    ],
)
def test_other_objectives_have_sides_and_a_reader_and_no_packing(tmp_path, capsys, rows, settings, sides, reader):
    path = str(write_jsonl(tmp_path / "in.jsonl", rows))
    diagnosis = diagnose(path, **settings)
    assert (diagnosis.sound, diagnosis.packing, diagnosis.ways) == (True, None, ())
    assert diagnosis.sources[0].sides == sides
    words = ["--prompts", "--carry", "answer"] if settings else []
    command = f"batchloom prepare {path} --out store --tokenizer bytes"
    assert diagnosis.commands == (" ".join([command, *words]),)
    assert run_command_line(["doctor", path, "--tokenizer", "bytes", *words]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f", with batchloom.store.{reader}" in output
    assert ("20 answers, 120 trained tokens rejected: 20 answers, 100 trained" in output) is (rows is PAIRS)
    assert "packing" not in output
    store = batchloom.prepare(path, out=tmp_path / "s", tokenizer="bytes", val_fraction=0, **settings).path
    of_store = diagnose(store)
    assert (of_store.sound, of_store.commands) == (True, ())
    assert f"batchloom.store.{reader}" in of_store.notes[0]
    assert of_store.prepared[0].inspection.sides == {side: count for side, (count, _) in sides.items()}
    assert run_command_line(["doctor", str(store)]) == 0
    assert "packing" not in capsys.readouterr().out


def test_nothing_is_proposed_that_would_fail(tmp_path):
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(9)]
    mixed = [write_jsonl(tmp_path / "a.jsonl", pairs), write_jsonl(tmp_path / "b.jsonl", QUESTIONS)]
    unsupported = write_jsonl(tmp_path / "c.jsonl", [{"messages": [], "images": ["a.jpg"]}] * 3)
    for inputs in (mixed, [unsupported]):
        diagnosis = diagnose(inputs)
        assert (diagnosis.sound, diagnosis.commands) == (False, ())


def test_flat_ids_are_distinguished_from_text(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(500, dtype="<u2").tobytes())
    (tmp_path / "b.bin").write_text("plain text in spite of its name\n")
    assert diagnose(tmp_path / "a.bin").prepared[0].kind == "ids"
    assert diagnose(tmp_path / "b.bin").sources[0].format == "text"


def test_a_damaged_table_adds_nothing_to_the_counts(tmp_path):
    # It is sampled, so that what was not read is estimated from the bytes.
    table = pa.table({"text": [Random(n).randbytes(20_000).hex() for n in range(300)]})
    folder = tmp_path / "d"
    folder.mkdir()
    write_table(folder / "a.parquet", table)
    alone = diagnose(folder)
    assert not alone.exact
    data = (folder / "a.parquet").read_bytes()
    (folder / "b.parquet").write_bytes(data[: len(data) // 2])
    diagnosis = diagnose(folder)
    assert [fault.partition(" is not")[0] for fault in diagnosis.faults] == ["d/b.parquet"]
    assert (diagnosis.documents, diagnosis.tokens) == (alone.documents, alone.tokens)


def test_damaged_tables_among_many_are_named_if_they_are_sampled(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    write_table(tmp_path / "one.parquet", pa.table({"text": ["one text"] * 5}))
    data = (tmp_path / "one.parquet").read_bytes()
    for number in range(600):
        (folder / f"{number:03}.parquet").write_bytes(data if number else data[:-3])
    write_table(folder / "large.parquet", pa.table({"text": [Random(n).randbytes(99_000).hex() for n in range(9)]}))
    (folder / "large.parquet").write_bytes((folder / "large.parquet").read_bytes()[:-3])
    diagnosis = diagnose(folder)
    assert sorted(note.partition(" is not")[0].rpartition(" ")[2] for note in diagnosis.faults) == [
        "many/000.parquet",
        "many/large.parquet",
    ]
    assert diagnosis.documents


def test_files_of_a_group_are_counted_and_not_those_that_were_sampled(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(700):
        (folder / f"{number}.txt").write_text(f"text {number}")
    write_jsonl(folder / "a.jsonl", [{"text": "x"}])
    files = {source.format: source.files for source in diagnose(folder).sources}
    assert files == {"jsonl": 1, "text": 700}


def test_faults_have_files_and_lines(tmp_path):
    lines = [json.dumps(row) for row in QUESTIONS]
    lines[4] = '{"question": "cut'
    lines[9] = '{"question": "no answer"}'
    lines[20] = ""
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    diagnosis = diagnose(tmp_path / "in.jsonl", max_bad=1)
    assert [(bad.file, bad.line) for bad in diagnosis.bad] == [("in.jsonl", 5), ("in.jsonl", 10)]
    assert diagnosis.bad[0].sentence.startswith("Invalid JSON on line 5 in in.jsonl")
    (source,) = diagnosis.sources
    assert (source.records, source.documents, source.empty, source.bad) == (60, 57, 1, 2)
    assert not diagnosis.sound
    assert "2 of 60 records are bad, more than --max-bad 1 allows" in diagnosis.faults[0]
    assert diagnose(tmp_path / "in.jsonl").sound


def test_only_ten_bad_records_are_listed(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(QUESTIONS[0]) + "\n" + "x\n" * 30)
    diagnosis = diagnose(tmp_path / "in.jsonl")
    assert (len(diagnosis.bad), diagnosis.bad_seen, diagnosis.sound) == (10, 30, False)


def test_bad_records_of_all_files_are_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("{\n" * 50)
    (tmp_path / "in/b.txt").write_bytes("Größe".encode("cp1252"))
    (tmp_path / "in/c.jsonl").write_text('{"text": "right"}\n' * 50 + "{\n")
    diagnosis = batchloom.doctor(tmp_path / "in", tokenizer="bytes")
    assert [(bad.file, bad.line) for bad in diagnosis.bad][-3:] == [
        ("in/a.jsonl", 8),
        ("in/b.txt", 1),
        ("in/c.jsonl", 51),
    ]
    assert (len(diagnosis.bad), diagnosis.bad_seen) == (10, 52)


def test_dropped_and_long_documents_are_reported(tmp_path):
    untrained_turn = {"role": "assistant", "content": "not trained", "train": False}
    rows = [*CHATS, {"messages": [{"role": "user", "content": "Well?"}, untrained_turn]}]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    max_tokens = diagnose(path).sources[0].tokens.median - 1
    diagnosis = diagnose(path, max_tokens=max_tokens, seq_len=64)
    prepared = batchloom.prepare(path, out=tmp_path / "o", tokenizer="bytes", max_tokens=max_tokens)
    (source,) = diagnosis.sources
    assert set(source.dropped) == {"overlong", "nothing to train"}
    assert source.dropped == prepared.counts.dropped
    assert source.documents == prepared.counts.documents
    assert any("nothing to train" in warning for warning in diagnosis.warnings)
    assert any("longer than seq_len 64" in warning for warning in diagnosis.warnings)
    diagnosis = diagnose(path, max_tokens=max_tokens, overlong="error")
    assert not diagnosis.sound
    assert "left out: overlong" in diagnosis.faults[0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([CHATS], "leaves conversations out (overlong='drop')"),
        ([[{"text": "long " * 40}]], "cuts them (overlong='split')"),
        ([CHATS, [{"text": "long " * 40}]], "cuts them, and also conversations"),
    ],
)
def test_the_warning_names_the_overlong_policy_of_a_loader(tmp_path, inputs, message):
    paths = [write_jsonl(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(inputs)]
    diagnosis = diagnose(paths, seq_len=64)
    assert any(message in warning for warning in diagnosis.warnings)
    store = batchloom.open_store(batchloom.prepare(paths, out=tmp_path / "o", tokenizer="bytes").path)
    policy = batchloom.Loader(store, seq_len=64, global_batch_size=1).plan.spec.overlong
    assert f"overlong='{policy}'" in message or store.contents.mixed


def test_packing_is_the_plans_and_has_a_bound(tmp_path):
    rows = [{"text": "x" * (1100 + n % 400)} for n in range(500)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    packing = diagnose(path, global_batch_size=8).packing
    assert packing.sequences == 500
    assert packing.fill == packing.bound < 0.7
    assert packing.steps == 63
    settings = {"tokenizer": "bytes", "val_fraction": 0, "dedup": "none"}
    out = batchloom.prepare(path, out=tmp_path / "o", **settings).path
    best_fit = next(e for e in batchloom.inspect(out).efficiencies if e.packing == "best_fit")
    assert (packing.sequences, packing.fill) == (best_fit.sequences, best_fit.fill)


def test_prepare_and_stream_are_compared(tmp_path):
    rows = [{"text": "x" * (100 + n % 400)} for n in range(2000)]
    path = write_jsonl(tmp_path / "in.jsonl", rows)
    diagnosis = diagnose(path, global_batch_size=8, seq_len=512)
    prepared, streamed = diagnosis.ways
    assert (prepared.way, streamed.way) == ("prepare", "stream")
    assert prepared.steps == diagnosis.packing.steps
    assert streamed.steps is None
    assert prepared.disk_bytes == diagnosis.store_bytes
    stream = batchloom.stream(path, tokenizer="bytes", seq_len=512, global_batch_size=8, steps=1)
    assert streamed.lanes == stream.lanes == 8
    assert 0 < streamed.start_seconds < 60
    # Memory holds all documents twice, with 2 bytes per token of a small vocabulary.
    document_bytes = 2 * 2 * diagnosis.tokens
    batch_bytes = 6 * 8 * 512 * 24
    assert streamed.memory_bytes == pytest.approx(document_bytes + batch_bytes + (160 << 20), abs=4)
    compressed = tmp_path / "in.jsonl.gz"
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert diagnose(compressed, global_batch_size=8).ways[1].lanes == 1
    table = tmp_path / "in.csv"
    table.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    assert diagnose(table, global_batch_size=8).ways[1].lanes == 1
    pairs = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 9)
    assert diagnose(pairs).ways == ()


def test_the_store_size_is_estimated(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", CHATS * 50)
    settings = {"tokenizer": "bytes", "val_fraction": 0, "dedup": "none"}
    out = batchloom.prepare(path, out=tmp_path / "o", **settings).path
    size = sum(file.stat().st_size for file in (out / "train").iterdir())
    assert diagnose(path).store_bytes == pytest.approx(size, rel=0.02)


def test_duplicates_are_exact(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", CHATS + CHATS[:10] + CHATS[:5])
    duplicates = diagnose(path).duplicates
    assert (duplicates.documents, duplicates.repeated, duplicates.exact) == (55, 15, True)


def test_different_schemas_are_reported(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", CHATS)
    write_jsonl(tmp_path / "b.jsonl", QUESTIONS)
    diagnosis = diagnose(tmp_path)
    assert [source.mapping for source in diagnosis.sources] == [
        {"messages": ("messages",)},
        {"prompt": ("question",), "response": ("answer",)},
    ]
    assert any("2 different schemas" in warning for warning in diagnosis.warnings)


def test_files_of_text_and_texts_in_a_column_are_of_one_schema(tmp_path):
    (tmp_path / "a.txt").write_text("Some text.")
    write_jsonl(tmp_path / "b.jsonl", [{"text": "More text."}])
    assert not any("different schemas" in warning for warning in diagnose(tmp_path).warnings)
    # Other column names may be a mistake; conversations are a different schema.
    write_jsonl(tmp_path / "c.jsonl", [{"content": "Other text."}])
    assert any("2 different schemas" in warning for warning in diagnose(tmp_path).warnings)
    (tmp_path / "b.jsonl").unlink()
    write_jsonl(tmp_path / "c.jsonl", CHATS)
    warnings = diagnose(tmp_path).warnings
    assert any("2 different schemas: plain text (" in warning for warning in warnings)


@pytest.mark.parametrize("kind", ["texts", "conversations"])
def test_the_verdict_says_what_a_loader_loses(tmp_path, capsys, kind):
    words = [100] * 60 + [300] * 37 + [900] * 3
    rows = [{"text": "a" * count} for count in words]
    if kind == "conversations":
        rows = [{"question": "q" * count, "answer": "a"} for count in words]
    path = str(write_jsonl(tmp_path / "in.jsonl", rows))
    assert run_command_line(["doctor", path, "--tokenizer", "bytes", "--seq-len", "128", "--preview", "0"]) == 0
    verdict = re.search("verdict: *(.*)", capsys.readouterr().out)[1]
    # The template adds 27 tokens.
    verb, share, length = ("leaves out", 67, 384) if kind == "conversations" else ("cuts", 70, 320)
    assert verdict == (
        f"sound, but a loader {verb} 40 of 100 documents (40%), with {share}% of the tokens, at seq_len 128; "
        f"{length} keeps 95%, 960 keeps 99% whole"
    )
    assert run_command_line(["doctor", path, "--tokenizer", "bytes", "--seq-len", "1024"]) == 0
    assert re.search("verdict: *sound$", capsys.readouterr().out, re.MULTILINE)


def test_a_template_that_changes_turns_is_reported(tmp_path):
    template = tmp_path / "t.jinja"
    content = "{{ m.content | upper if m.role == 'assistant' else m.content }}"
    template.write_text(f"{{% for m in messages %}}<{{{{ m.role }}}}>{content}<|endoftext|>{{% endfor %}}")
    diagnosis = diagnose(write_jsonl(tmp_path / "in.jsonl", QUESTIONS), template=str(template))
    assert any(
        " changes " in warning and warning.endswith(": 60 records, first in.jsonl, line 1.")
        for warning in diagnosis.warnings
    )
    template.write_text("{% for m in messages %")
    diagnosis = diagnose(write_jsonl(tmp_path / "in.jsonl", QUESTIONS), template=str(template))
    assert (diagnosis.sound, diagnosis.tokens, diagnosis.documents) == (False, None, 60)


def test_an_unreadable_source_is_a_fault_and_the_others_are_examined(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", QUESTIONS)
    data = gzip.compress(json.dumps(QUESTIONS[0]).encode() * 10_000, 1)
    (tmp_path / "b.txt.gz").write_bytes(data[: len(data) // 2])
    diagnosis = diagnose(tmp_path)
    assert (diagnosis.sources[0].documents, diagnosis.sources[0].tokens.documents) == (60, 60)
    assert "is cut short" in diagnosis.sources[1].fault
    assert len(diagnosis.faults) == 1


def test_records_are_examined_without_a_tokenizer(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    assert batchloom.doctor(path).tokenizer.name == "gpt2"
    manifest = tmp_path / "all.yaml"
    manifest.write_text("datasets:\n- path: in.jsonl\nprocessor_config:\n  processor_name: org/none\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    diagnosis = batchloom.doctor(manifest)
    assert (diagnosis.sound, diagnosis.tokens, diagnosis.documents) == (True, None, 60)
    assert diagnosis.commands[0].endswith("--tokenizer train:8192")
    with pytest.raises(TokenizerError, match="org/none is not in the local Hub cache"):
        batchloom.doctor(path, tokenizer="org/none")


def test_wrong_options_and_missing_inputs(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", QUESTIONS)
    with pytest.raises(SettingsError, match="overlong"):
        diagnose(path, overlong="drip")
    with pytest.raises(SettingsError, match="seq_len"):
        diagnose(path, seq_len=0)
    with pytest.raises(SettingsError, match="preview"):
        diagnose(path, preview=-1)
    with pytest.raises(InputMissingError, match="nothing.jsonl"):
        diagnose(tmp_path / "nothing.jsonl")


def write_large_input(folder, kind, count=10_000):
    """Write an input that is too large to be read in full; return path and records."""
    random = Random(0)
    rows = [
        {"question": f"Is {random.randbytes(n % 60).hex()} odd?", "answer": f"Number {n} is."} for n in range(count)
    ]
    if kind == "parquet":
        return write_table(folder / "in.parquet", pa.Table.from_pylist(rows), rows=count // 7), rows
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "gz":
        (folder / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode(), 1))
        return folder / "in.jsonl.gz", rows
    if kind == "many":
        for n in range(count // 200):
            (folder / f"{n:03}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows[200 * n : 200 * n + 200])
            )
        return folder, rows
    (folder / "in.jsonl").write_text(lines)
    return folder / "in.jsonl", rows


def sample_inputs(path, *, full=False, **settings):
    """Examine an input with sizes so small that larger files are sampled."""
    sizes = SampleSizes(1 << 16, 256, 512 << 10, 16 << 10)
    recipe = Recipe(inputs=(str(path),), tokenizer="bytes", **settings)
    return examine_inputs(recipe, lambda event: None, full=full, sizes=sizes)


@pytest.mark.parametrize("count", [10_000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("many", "gz", "parquet")),
    ],
)
def test_a_sample_agrees_with_a_full_examination(kind, count, tmp_path):
    path, rows = write_large_input(tmp_path, kind, count)
    sample, full = sample_inputs(path), sample_inputs(path, full=True)
    assert (sample.diagnosis.exact, full.diagnosis.exact) == (False, True)
    assert sample.diagnosis.read_bytes <= sample.diagnosis.bytes == full.diagnosis.read_bytes
    sampled_source, full_source = sample.diagnosis.sources[0], full.diagnosis.sources[0]
    assert full.weights.sum() == len(rows)
    assert sample.weights.sum() == pytest.approx(len(rows), rel=0.15)
    assert sampled_source.tokens.mean == pytest.approx(full_source.tokens.mean, rel=0.06)
    assert sampled_source.tokens.p95 == pytest.approx(full_source.tokens.p95, rel=0.06)
    fills = [estimate_packing(examination.lengths, examination.weights, 512).fill for examination in (sample, full)]
    assert fills[0] == pytest.approx(fills[1], abs=0.01)
    assert sampled_source.preview == full_source.preview


def test_each_of_a_few_sources_is_sampled(tmp_path):
    write_large_input(tmp_path, "jsonl")
    for name in ("middle", "tiny"):
        rows = [{"c1": f"{name} {n}", "c2": 1} for n in range(2000 if name == "middle" else 3)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    sample = sample_inputs(tmp_path)
    assert not sample.diagnosis.exact
    assert [bool(source.fault) for source in sample.diagnosis.sources] == [False, True, True]


@pytest.mark.slow
def test_bad_records_of_a_sample_have_their_lines(tmp_path):
    path, _ = write_large_input(tmp_path, "jsonl")
    lines = path.read_text().splitlines()
    for number in range(0, len(lines), 100):
        lines[number] = f'{{"line": {number + 1}}}'
    path.write_text("\n".join(lines) + "\n")
    sample = sample_inputs(path)
    assert len(sample.diagnosis.bad) == 10
    for bad in sample.diagnosis.bad:
        assert json.loads(bad.snippet) == {"line": bad.line}
    assert "in the sample are bad" in sample.diagnosis.faults[0]
    assert not sample_inputs(path, max_bad="2%").diagnosis.faults


def test_records_larger_than_a_sampled_range_are_found(tmp_path):
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": "x" * 300_000} for _ in range(6)])
    sample = sample_inputs(path)
    assert sample.weights.sum() == pytest.approx(6, abs=1)
    assert sample.diagnosis.sources[0].preview[0].tokens == 300_001


def test_texts_of_a_sample_are_counted_by_files(tmp_path):
    for number in range(600):
        (tmp_path / f"{number}.svg").write_text("<path/>" * Random(number).randrange(1, 900))
    source = diagnose(tmp_path).sources[0]
    assert (source.files, source.documents) == (600, 600)


def test_a_damaged_file_is_not_counted_among_others(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    good = gzip.compress(b"text\n" + b"a row\n" * 500)
    (tmp_path / "broken.csv.gz").write_bytes(good[:20])
    (tmp_path / "good.csv.gz").write_bytes(good)
    diagnosis = diagnose(tmp_path, allow_skipped=True)
    assert {source.name.rpartition("/")[2]: source.files for source in diagnosis.sources}["good.csv.gz"] == 1
    assert not any("broken" in source.name for source in diagnosis.sources)
    assert any("broken.csv.gz is cut short" in warning for warning in diagnosis.warnings)


def test_a_sample_without_a_complete_record_is_faulty(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (10 << 20) + b'"}\n{"text": "b"}\n')
    assert sample_inputs(path).diagnosis.faults == (
        "The sample holds no complete record, because the first ones are too long: --full reads everything.",
    )
    assert not sample_inputs(path, full=True).diagnosis.faults


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sample_of_a_json_file_that_is_cut_short_is_faulty(tmp_path, wrapped):
    rows = [{"text": f"row {n} " + "x" * 99} for n in range(6000)]
    text = json.dumps({"data": rows} if wrapped else rows) + " \n"
    path = tmp_path / "in.json"
    path.write_text(text)
    assert sample_inputs(path).diagnosis.faults == ()
    for stop in (len(text) // 2, len(text) // 3, len(text.rstrip()) - 1):
        path.write_text(text[:stop])
        (fault,) = sample_inputs(path).diagnosis.faults
        assert "cut short" in fault or "ends inside" in fault


def test_a_url_is_sampled_by_range_requests_without_its_secrets(tmp_path):
    path, rows = write_large_input(tmp_path, "jsonl")
    with serve() as web:
        web.files["/in.jsonl"] = path.read_bytes()
        sample = sample_inputs(f"{web.url}/in.jsonl?signature=SECRET")
        ranges = [byte_range for method, _, byte_range in web.requests if method == "GET" and byte_range]
    assert sample.weights.sum() == pytest.approx(len(rows), rel=0.15)
    remote_preview, local_preview = (
        sample.diagnosis.sources[0].preview,
        sample_inputs(path).diagnosis.sources[0].preview,
    )
    assert [document.pieces for document in remote_preview] == [document.pieces for document in local_preview]
    assert len(ranges) < 80
    assert "SECRET" not in repr(sample)


SOURCE_KEYS = {
    *("name", "path", "files", "format", "compression", "bytes", "way", "detected", "mapping"),
    *("fault", "suggestion", "records", "documents", "empty", "bad", "dropped", "total_tokens"),
    *("trained_tokens", "characters", "tokens", "preview", "media", "sides", "unused"),
}
KEYS = {
    *("sound", "inputs", "exact", "files", "bytes", "read_bytes", "sources", "prepared"),
    *("tokenizer", "documents", "tokens", "trained_tokens", "duplicates", "bad", "bad_seen"),
    *("packing", "seconds", "store_bytes", "ways", "faults", "warnings", "notes", "commands"),
}


def test_the_json_report_has_stable_keys(tmp_path):
    lines = [json.dumps(row) for row in CHATS]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "x"]) + "\n")
    report = diagnose(tmp_path / "in.jsonl").plain()
    assert json.loads(json.dumps(report)) == report
    assert set(report) == KEYS
    assert set(report["sources"][0]) == SOURCE_KEYS
    assert set(report["sources"][0]["tokens"]) == {
        *("documents", "mean", "median", "p95", "longest"),
    }
    assert set(report["sources"][0]["preview"][0]["pieces"][0]) == {"text", "trained", "tokens"}
    assert set(report["bad"][0]) == {
        *("file", "line", "row", "column", "offset", "reason", "snippet", "sentence"),
    }
    assert set(report["packing"]) == {
        *("seq_len", "packing", "fill", "bound", "sequences", "steps", "global_batch_size"),
        *("longer", "longer_tokens", "is_dropped", "keeping"),
    }


@pytest.mark.parametrize(
    ("name", "detected", "documents"),
    [
        ("c4_demo.jsonl", "text -> plain text", 300),
        pytest.param("gsm8k_train.jsonl", "question/answer -> 2 turns", 7473, marks=pytest.mark.slow),
        ("alpaca_en_demo.json", "instruction/output -> 2 turns, with input", 999),
        ("tinyshakespeare.txt", "", 17),
    ],
)
def test_real_files_are_diagnosed_as_they_are_prepared(real_data, name, detected, documents, tmp_path, monkeypatch):
    diagnosis = diagnose(real_data / name)
    (source,) = diagnosis.sources
    assert (diagnosis.sound, source.detected, source.documents) == (True, detected, documents)
    monkeypatch.chdir(tmp_path)
    _, *words = shlex.split(diagnosis.commands[0])
    assert run_command_line([*words, "--val-fraction", "0", "--no-dedup"]) == 0
    store = batchloom.open_store(tmp_path / "store")
    assert (len(store), store.tokens) == (documents, diagnosis.tokens)
    assert store.contents.trained_tokens == diagnosis.trained_tokens


def test_a_refused_file_comes_with_the_command_that_takes_it(real_data, tmp_path, monkeypatch):
    diagnosis = diagnose(real_data / "HumanEval.jsonl.gz")
    assert not diagnosis.sound
    (command,) = diagnosis.commands
    assert "--map prompt=prompt,response=canonical_solution" in command
    monkeypatch.chdir(tmp_path)
    assert run_command_line(shlex.split(command)[1:]) == 0
    diagnosis_of_both = diagnose([real_data / "HumanEval.jsonl.gz", real_data / "alpaca_en_demo.json"])
    assert len(diagnosis_of_both.commands) == 2
    assert diagnosis_of_both.sources[1].documents == 999


def test_a_manifest_is_read_as_prepare_reads_it(tmp_path):
    write_jsonl(tmp_path / "t.jsonl", [{"text": f"some text {n}"} for n in range(3)])
    (tmp_path / "q.csv").write_text("q,a\nwhat,that\n")
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "datasets:\n- {path: t.jsonl, weight: 0.7}\n- {path: q.csv, mapping: {prompt: q, response: a}}\n"
    )
    diagnosis = diagnose(manifest)
    assert diagnosis.sound
    assert diagnosis.documents == 4
    assert diagnosis.sources[1].mapping == {"prompt": ("q",), "response": ("a",)}
    assert any("recorded and not applied" in note for note in diagnosis.notes)
    assert diagnosis.commands == (f"batchloom prepare {manifest} --out store --tokenizer bytes",)
    prepared = batchloom.prepare(manifest, out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    assert (prepared.counts.documents, prepared.counts.tokens) == (diagnosis.documents, diagnosis.tokens)


def test_preferences_among_others_are_a_fault_as_they_are_for_prepare(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", PAIRS)
    write_jsonl(tmp_path / "b.jsonl", QUESTIONS)
    diagnosis = diagnose(tmp_path)
    assert [fault for fault in diagnosis.faults if "preference pairs (" in fault]
    assert diagnosis.sources[0].mapping["chosen"] == ("chosen",)
    with pytest.raises(batchloom.InputError, match="preference pairs"):
        batchloom.prepare(tmp_path, out=tmp_path.with_name("out"), tokenizer="bytes")
