"""``doctor``: what it tells of inputs is what ``prepare`` then does with them."""

import gzip
import json
import subprocess
import sys
from random import Random

import numpy as np
import pytest

import batchloom
from batchloom import Recipe, SettingsError, TokenizerError
from batchloom.analysis.doctor import SampleSizes, estimate_packing, examine_inputs
from batchloom.core.errors import InputMissingError
from preparation.stores import jsonl
from sources.test_tables import pa, write
from sources.web import serving

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
ASKED = [{"question": f"Is {n} odd?", "answer": "Yes." if n % 2 else "No."} for n in range(60)]


def diagnose(inputs, **settings):
    return batchloom.doctor(inputs, **{"tokenizer": "bytes", **settings})


def masks_of(store):
    """Ids and trained flags of every document, in order."""
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
        (ASKED, {}),
        (ASKED, {"tokenizer": "gpt2"}),
        (PAIRS, {}),
        ([{"chosen": f"Q {n} a", "rejected": f"Q {n}\r\nZ\u0301"} for n in range(9)], {}),
        ([{"text": f"Text {n}.\r\nZ\u0301"} for n in range(30)], {}),
        ([{"input_ids": [n, 5, 6], "labels": [-100, 5, -100]} for n in range(9)], {}),
    ],
)
def test_the_preview_is_the_store(rows, settings, tmp_path):
    settings = {"tokenizer": "bytes", **settings}
    path = jsonl(tmp_path / "in.jsonl", rows)
    found = diagnose(path, preview=2 * len(rows), **settings)
    done = batchloom.prepare(path, out=tmp_path / "out", val_fraction=0, **settings)
    store = batchloom.open_store(done.path)
    (source,) = found.sources
    assert (source.documents, source.total_tokens) == (len(store), store.tokens)
    assert source.trained_tokens == store.contents.trained_tokens
    assert len(source.preview) == len(store)
    for number, (shown, (ids, mask)) in enumerate(zip(source.preview, masks_of(store), strict=True)):
        flags = [flag for one in shown.pieces for flag in [one.trained] * one.tokens]
        assert flags == mask.tolist()
        assert "".join(one.text for one in shown.pieces) == store.tokenizer.decode(ids)
        assert shown.line == store.provenance.of(number).line
        stops = np.cumsum([one.tokens for one in shown.pieces])
        for one, stop in zip(shown.pieces, stops, strict=True):
            assert one.text == store.tokenizer.decode(ids[stop - one.tokens : stop])


def test_a_long_document_is_shown_without_its_middle(tmp_path):
    text = "ä" * 5000
    path = jsonl(tmp_path / "in.jsonl", [{"text": text}])
    (shown,) = diagnose(path).sources[0].preview
    head, middle, tail = shown.pieces
    assert middle.trained is None
    assert head.tokens + middle.tokens + tail.tokens == shown.tokens == 10_001
    assert set(head.text) == {"ä"}
    assert tail.text.strip("ä") == "<|endoftext|>"


def test_a_store_is_shown_as_what_it_is(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", CHATS)
    store = batchloom.prepare(path, out=tmp_path / "s", tokenizer="bytes", val_fraction=0).path
    found = diagnose(store, full=True)
    (one,) = found.prepared
    assert (one.kind, one.checked, found.sound) == ("store", True, True)
    assert one.preview[0].pieces == diagnose(path).sources[0].preview[0].pieces
    assert found.commands == (f"batchloom train --data {store} --out run",)
    prefix = str(store / "train/shard_00000")
    found = diagnose([prefix, path])
    assert [one.kind for one in found.prepared] == ["prefix"]
    assert found.sources[0].documents == 40
    assert found.commands[1] == f"batchloom train --data {prefix} --out run"
    (store / "train/shard_00000.bin").write_bytes(b"\0")
    assert not diagnose(store).sound


def test_a_store_of_preferences_names_its_readers_and_no_training(tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(9)]
    path = jsonl(tmp_path / "in.jsonl", rows)
    store = batchloom.prepare(path, out=tmp_path / "s", tokenizer="bytes", val_fraction=0).path
    found = diagnose(store)
    assert (found.sound, found.commands) == (True, ())
    assert "batchloom.store.PreferencePairs" in found.notes[0]


def test_nothing_is_proposed_that_would_fail(tmp_path):
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(9)]
    mixed = [jsonl(tmp_path / "a.jsonl", pairs), jsonl(tmp_path / "b.jsonl", ASKED)]
    unread = jsonl(tmp_path / "c.jsonl", [{"messages": [], "images": ["a.jpg"]}] * 3)
    for inputs in (mixed, [unread]):
        found = diagnose(inputs)
        assert (found.sound, found.commands) == (False, ())


def test_flat_ids_are_told_from_text(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(500, dtype="<u2").tobytes())
    (tmp_path / "b.bin").write_text("plain text in spite of its name\n")
    assert diagnose(tmp_path / "a.bin").prepared[0].kind == "ids"
    assert diagnose(tmp_path / "b.bin").sources[0].format == "text"


def test_faults_are_told_by_their_places(tmp_path):
    lines = [json.dumps(row) for row in ASKED]
    lines[4] = '{"question": "cut'
    lines[9] = '{"question": "no answer"}'
    lines[20] = ""
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    found = diagnose(tmp_path / "in.jsonl", max_bad=1)
    assert [(bad.file, bad.line) for bad in found.bad] == [("in.jsonl", 5), ("in.jsonl", 10)]
    assert found.bad[0].sentence.startswith("Invalid JSON on line 5 in in.jsonl")
    (source,) = found.sources
    assert (source.records, source.documents, source.empty, source.bad) == (60, 57, 1, 2)
    assert not found.sound
    assert "2 of 60 records are bad, more than --max-bad 1 allows" in found.faults[0]
    assert diagnose(tmp_path / "in.jsonl").sound


def test_only_ten_bad_records_are_told(tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ASKED[0]) + "\n" + "x\n" * 30)
    found = diagnose(tmp_path / "in.jsonl")
    assert (len(found.bad), found.bad_seen, found.sound) == (10, 30, False)


def test_what_is_dropped_and_what_is_long_is_told_beforehand(tmp_path):
    silent = {"role": "assistant", "content": "not trained", "train": False}
    rows = [*CHATS, {"messages": [{"role": "user", "content": "Well?"}, silent]}]
    path = jsonl(tmp_path / "in.jsonl", rows)
    most = diagnose(path).sources[0].tokens.median - 1
    found = diagnose(path, max_tokens=most, seq_len=64)
    done = batchloom.prepare(path, out=tmp_path / "o", tokenizer="bytes", max_tokens=most)
    (source,) = found.sources
    assert set(source.dropped) == {"overlong", "nothing to train"}
    assert source.dropped == done.counts.dropped
    assert source.documents == done.counts.documents
    assert any("nothing to train" in warning for warning in found.warnings)
    assert any("longer than seq_len 64" in warning for warning in found.warnings)
    found = diagnose(path, max_tokens=most, overlong="error")
    assert not found.sound
    assert "left out: overlong" in found.faults[0]


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([CHATS], "leaves conversations out (overlong='drop')"),
        ([[{"text": "long " * 40}]], "cuts them (overlong='split')"),
        ([CHATS, [{"text": "long " * 40}]], "cuts them, and also conversations"),
    ],
)
def test_what_becomes_of_long_documents_is_told_as_a_loader_has_it(tmp_path, inputs, said):
    paths = [jsonl(tmp_path / f"{number}.jsonl", rows) for number, rows in enumerate(inputs)]
    found = diagnose(paths, seq_len=64)
    assert any(said in warning for warning in found.warnings)
    store = batchloom.open_store(batchloom.prepare(paths, out=tmp_path / "o", tokenizer="bytes").path)
    rule = batchloom.Loader(store, seq_len=64, global_batch_size=1).plan.spec.overlong
    assert f"overlong='{rule}'" in said or store.contents.mixed


def test_packing_is_the_plans_and_has_a_bound(tmp_path):
    rows = [{"text": "x" * (1100 + n % 400)} for n in range(500)]
    path = jsonl(tmp_path / "in.jsonl", rows)
    packing = diagnose(path, global_batch_size=8).packing
    assert packing.sequences == 500
    assert packing.fill == packing.bound < 0.7
    assert packing.steps == 63
    said = {"tokenizer": "bytes", "val_fraction": 0, "dedup": "none"}
    out = batchloom.prepare(path, out=tmp_path / "o", **said).path
    best = next(e for e in batchloom.inspect(out).efficiencies if e.packing == "best_fit")
    assert (packing.sequences, packing.fill) == (best.sequences, best.fill)


def test_both_ways_of_feeding_a_run_are_told(tmp_path):
    rows = [{"text": "x" * (100 + n % 400)} for n in range(2000)]
    path = jsonl(tmp_path / "in.jsonl", rows)
    found = diagnose(path, global_batch_size=8, seq_len=512)
    prepared, streamed = found.ways
    assert (prepared.way, streamed.way) == ("prepare", "stream")
    assert prepared.steps == found.packing.steps
    assert streamed.steps is None
    assert prepared.disk_bytes == found.store_bytes
    made = batchloom.stream(path, tokenizer="bytes", seq_len=512, global_batch_size=8, steps=1)
    assert streamed.lanes == made.lanes == 8
    assert 0 < streamed.start_seconds < 60
    # All documents are in memory twice, 2 bytes a token of a small vocabulary.
    documents = 2 * 2 * found.tokens
    batches = 6 * 8 * 512 * 24
    assert streamed.memory_bytes == pytest.approx(documents + batches + (160 << 20), abs=4)
    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert diagnose(packed, global_batch_size=8).ways[1].lanes == 1
    pairs = jsonl(tmp_path / "p.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 9)
    assert diagnose(pairs).ways == ()


def test_store_size_is_near(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", CHATS * 50)
    said = {"tokenizer": "bytes", "val_fraction": 0, "dedup": "none"}
    out = batchloom.prepare(path, out=tmp_path / "o", **said).path
    size = sum(one.stat().st_size for one in (out / "train").iterdir())
    assert diagnose(path).store_bytes == pytest.approx(size, rel=0.02)


def test_duplicates_are_exact(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", CHATS + CHATS[:10] + CHATS[:5])
    copies = diagnose(path).duplicates
    assert (copies.documents, copies.repeated, copies.exact) == (55, 15, True)


def test_sources_of_other_schemas_are_told(tmp_path):
    jsonl(tmp_path / "a.jsonl", CHATS)
    jsonl(tmp_path / "b.jsonl", ASKED)
    found = diagnose(tmp_path)
    assert [one.mapping for one in found.sources] == [
        {"messages": ("messages",)},
        {"prompt": ("question",), "response": ("answer",)},
    ]
    assert any("2 different schemas" in warning for warning in found.warnings)


def test_files_of_text_and_texts_in_a_column_are_of_one_schema(tmp_path):
    (tmp_path / "a.txt").write_text("Some text.")
    jsonl(tmp_path / "b.jsonl", [{"text": "More text."}])
    assert not any("different schemas" in warning for warning in diagnose(tmp_path).warnings)
    # Columns of other names may be a mistake, and conversations are something else.
    jsonl(tmp_path / "c.jsonl", [{"content": "Other text."}])
    assert any("2 different schemas" in warning for warning in diagnose(tmp_path).warnings)
    (tmp_path / "b.jsonl").unlink()
    jsonl(tmp_path / "c.jsonl", CHATS)
    warnings = diagnose(tmp_path).warnings
    assert any("2 different schemas: plain text (" in warning for warning in warnings)


def test_a_template_that_changes_turns_is_told(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}<|endoftext|>{% endfor %}")
    found = diagnose(jsonl(tmp_path / "in.jsonl", ASKED), template=str(template))
    assert any("the template changes" in warning for warning in found.warnings)
    template.write_text("{% for m in messages %")
    found = diagnose(jsonl(tmp_path / "in.jsonl", ASKED), template=str(template))
    assert (found.sound, found.tokens, found.documents) == (False, None, 60)


def test_what_cannot_be_read_is_a_fault_and_the_rest_is_told(tmp_path):
    jsonl(tmp_path / "a.jsonl", ASKED)
    data = gzip.compress(json.dumps(ASKED[0]).encode() * 10_000, 1)
    (tmp_path / "b.txt.gz").write_bytes(data[: len(data) // 2])
    found = diagnose(tmp_path)
    assert (found.sources[0].documents, found.sources[0].tokens.documents) == (60, 60)
    assert "is cut short" in found.sources[1].fault
    assert len(found.faults) == 1


def test_without_a_tokenizer_all_else_is_told(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "in.jsonl", ASKED)
    assert batchloom.doctor(path).tokenizer.name == "gpt2"
    monkeypatch.setattr("batchloom.tokens.tokenizer_lookup.load_gpt2_from_package", lambda: None)
    monkeypatch.setattr("batchloom.tokens.tokenizer_lookup.find_cached_file", lambda repo: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = batchloom.doctor(path)
    assert (found.sound, found.tokens, found.documents) == (True, None, 60)
    assert found.commands[0].endswith("--tokenizer train:8192")
    with pytest.raises(TokenizerError, match="gpt2 is neither"):
        batchloom.doctor(path, tokenizer="gpt2")


def test_wrong_options_and_missing_inputs(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", ASKED)
    with pytest.raises(SettingsError, match="overlong"):
        diagnose(path, overlong="drip")
    with pytest.raises(SettingsError, match="seq_len"):
        diagnose(path, seq_len=0)
    with pytest.raises(SettingsError, match="preview"):
        diagnose(path, preview=-1)
    with pytest.raises(InputMissingError, match="nothing.jsonl"):
        diagnose(tmp_path / "nothing.jsonl")


def big(folder, kind, count=60_000):
    """An input that is sampled (with the size above which it is made small), and its records."""
    random = Random(0)
    rows = [
        {"question": f"Is {random.randbytes(n % 60).hex()} odd?", "answer": f"Number {n} is."} for n in range(count)
    ]
    if kind == "parquet":
        return write(folder / "in.parquet", pa.Table.from_pylist(rows), rows=count // 7), rows
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


def look(path, *, full=False, **settings):
    """An examination in which little is small enough to be read whole."""
    sizes = SampleSizes(1 << 16, 256, 512 << 10, 16 << 10)
    recipe = Recipe(inputs=(str(path),), tokenizer="bytes", **settings)
    return examine_inputs(recipe, lambda event: None, full=full, sizes=sizes)


@pytest.mark.parametrize("count", [15_000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        "jsonl",
        "many",
        pytest.param("gz", marks=pytest.mark.slow),
        pytest.param("parquet", marks=pytest.mark.slow),
    ],
)
def test_a_sample_agrees_with_all_of_it(kind, count, tmp_path):
    path, rows = big(tmp_path, kind, count)
    some, full = look(path), look(path, full=True)
    assert (some.exact, full.exact) == (False, True)
    assert some.read_bytes <= some.bytes == full.read_bytes
    one, everything = some.sources[0], full.sources[0]
    assert full.weights.sum() == len(rows)
    assert some.weights.sum() == pytest.approx(len(rows), rel=0.15)
    assert one.tokens.mean == pytest.approx(everything.tokens.mean, rel=0.06)
    assert one.tokens.p95 == pytest.approx(everything.tokens.p95, rel=0.06)
    fills = [estimate_packing(found.lengths, found.weights, 512).fill for found in (some, full)]
    assert fills[0] == pytest.approx(fills[1], abs=0.01)
    assert one.preview == everything.preview


def test_each_of_a_few_sources_is_looked_at(tmp_path):
    big(tmp_path, "jsonl")
    for name in ("middle", "tiny"):
        rows = [{"c1": f"{name} {n}", "c2": 1} for n in range(2000 if name == "middle" else 3)]
        jsonl(tmp_path / f"{name}.jsonl", rows)
    found = look(tmp_path)
    assert not found.exact
    assert [bool(source.fault) for source in found.sources] == [False, True, True]


def test_bad_records_of_a_sample_have_their_lines(tmp_path):
    path, _ = big(tmp_path, "jsonl")
    lines = path.read_text().splitlines()
    for number in range(0, len(lines), 100):
        lines[number] = f'{{"line": {number + 1}}}'
    path.write_text("\n".join(lines) + "\n")
    found = look(path)
    assert len(found.bad) == 10
    for bad in found.bad:
        assert json.loads(bad.snippet) == {"line": bad.line}
    assert "in the sample are bad" in found.faults[0]
    assert not look(path, max_bad="2%").faults


def test_records_larger_than_a_probe_are_found(tmp_path):
    path = jsonl(tmp_path / "in.jsonl", [{"text": "x" * 300_000} for _ in range(6)])
    found = look(path)
    assert found.weights.sum() == pytest.approx(6, abs=1)
    assert found.sources[0].preview[0].tokens == 300_001


def test_a_sample_without_any_whole_record_says_so(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (30 << 20) + b'"}\n{"text": "b"}\n')
    assert look(path).faults == (
        "The sample holds no complete record, because the first ones are too long: --full reads everything.",
    )
    assert not look(path, full=True).faults


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_sample_of_a_json_file_that_is_cut_short_is_faulty(tmp_path, wrapped):
    rows = [{"text": f"row {n} " + "x" * 99} for n in range(9000)]
    whole = json.dumps({"data": rows} if wrapped else rows) + " \n"
    path = tmp_path / "in.json"
    path.write_text(whole)
    assert look(path).faults == ()
    for stop in (len(whole) // 2, len(whole) // 3, len(whole.rstrip()) - 1):
        path.write_text(whole[:stop])
        (fault,) = look(path).faults
        assert "cut short" in fault or "ends inside" in fault


def test_a_url_is_sampled_where_it_lies_and_its_secrets_are_kept(tmp_path):
    path, rows = big(tmp_path, "jsonl")
    with serving() as web:
        web.files["/in.jsonl"] = path.read_bytes()
        found = look(f"{web.url}/in.jsonl?signature=SECRET")
        asked = [part for way, _, part in web.asked if way == "GET" and part]
    assert found.weights.sum() == pytest.approx(len(rows), rel=0.15)
    shown, here = found.sources[0].preview, look(path).sources[0].preview
    assert [one.pieces for one in shown] == [one.pieces for one in here]
    assert len(asked) < 80
    assert "SECRET" not in repr(found)


SOURCE_KEYS = {
    *("name", "path", "files", "format", "compression", "bytes", "way", "detected", "mapping"),
    *("fault", "suggestion", "records", "documents", "empty", "bad", "dropped", "total_tokens"),
    *("trained_tokens", "characters", "tokens", "preview", "media", "unused"),
}
KEYS = {
    *("sound", "inputs", "exact", "files", "bytes", "read_bytes", "sources", "prepared"),
    *("tokenizer", "documents", "tokens", "trained_tokens", "duplicates", "bad", "bad_seen"),
    *("packing", "seconds", "store_bytes", "ways", "faults", "warnings", "notes", "commands"),
}


def test_the_plain_form_is_json_and_keeps_its_names(tmp_path):
    lines = [json.dumps(row) for row in CHATS]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "x"]) + "\n")
    plain = diagnose(tmp_path / "in.jsonl").plain()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == KEYS
    assert set(plain["sources"][0]) == SOURCE_KEYS
    assert set(plain["sources"][0]["tokens"]) == {
        *("documents", "mean", "median", "p95", "longest"),
    }
    assert set(plain["sources"][0]["preview"][0]["pieces"][0]) == {"text", "trained", "tokens"}
    assert set(plain["bad"][0]) == {
        *("file", "line", "row", "column", "offset", "reason", "snippet", "sentence"),
    }
    assert set(plain["packing"]) == {
        *("seq_len", "packing", "fill", "bound", "sequences", "steps", "global_batch_size"),
        "longer",
    }


@pytest.mark.parametrize(
    ("name", "detected", "documents"),
    [
        ("c4_demo.jsonl", "text -> plain text", 300),
        ("gsm8k_train.jsonl", "question/answer -> 2 turns", 7473),
        ("alpaca_en_demo.json", "instruction/output -> 2 turns, with input", 999),
        ("tinyshakespeare.txt", "", 17),
    ],
)
def test_real_files_are_as_they_are_prepared(real_data, name, detected, documents, tmp_path):
    found = diagnose(real_data / name)
    (source,) = found.sources
    assert (found.sound, source.detected, source.documents) == (True, detected, documents)
    subprocess.run(
        ["bash", "-c", f"{sys.executable} -m {found.commands[0]} --val-fraction 0 --no-dedup"],
        check=True,
        cwd=tmp_path,
        capture_output=True,
    )
    store = batchloom.open_store(tmp_path / "store")
    assert (len(store), store.tokens) == (documents, found.tokens)
    assert store.contents.trained_tokens == found.trained_tokens


def test_a_refused_file_comes_with_the_command_that_takes_it(real_data, tmp_path):
    found = diagnose(real_data / "HumanEval.jsonl.gz")
    assert not found.sound
    (command,) = found.commands
    assert "--map prompt=prompt,response=canonical_solution" in command
    subprocess.run(
        ["bash", "-c", f"{sys.executable} -m {command}"],
        check=True,
        cwd=tmp_path,
        capture_output=True,
    )
    both = diagnose([real_data / "HumanEval.jsonl.gz", real_data / "gsm8k_train.jsonl"])
    assert len(both.commands) == 2
    assert both.sources[1].documents == 7473


def test_a_manifest_is_read_as_prepare_reads_it(tmp_path):
    jsonl(tmp_path / "t.jsonl", [{"text": f"some text {n}"} for n in range(3)])
    (tmp_path / "q.csv").write_text("q,a\nwhat,that\n")
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "datasets:\n- {path: t.jsonl, weight: 0.7}\n- {path: q.csv, mapping: {prompt: q, response: a}}\n"
    )
    found = diagnose(manifest)
    assert found.sound
    assert found.documents == 4
    assert found.sources[1].mapping == {"prompt": ("q",), "response": ("a",)}
    assert any("recorded and not applied" in note for note in found.notes)
    assert found.commands == (f"batchloom prepare {manifest} --out store --tokenizer bytes",)
    made = batchloom.prepare(manifest, out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    assert (made.counts.documents, made.counts.tokens) == (found.documents, found.tokens)


def test_preferences_among_others_are_a_fault_as_they_are_for_prepare(tmp_path):
    jsonl(tmp_path / "a.jsonl", PAIRS)
    jsonl(tmp_path / "b.jsonl", ASKED)
    found = diagnose(tmp_path)
    assert [fault for fault in found.faults if "preference pairs (" in fault]
    assert found.sources[0].mapping["chosen"] == ("chosen",)
    with pytest.raises(batchloom.InputError, match="preference pairs"):
        batchloom.prepare(tmp_path, out=tmp_path.with_name("out"), tokenizer="bytes")


def test_a_store_of_preferences_is_not_sent_to_the_trainer(tmp_path):
    jsonl(tmp_path / "in.jsonl", [{"prompt": "q", "chosen": "yes", "rejected": "no"}] * 3)
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    found = batchloom.doctor(str(tmp_path / "s"))
    assert found.commands == ()
    assert "batchloom.store.PreferencePairs" in found.notes[0]
    assert "preference trainers read it" in batchloom.check(tmp_path / "s").used
