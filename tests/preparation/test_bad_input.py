"""Bad input: one sentence with the remedy, and no output that looks complete."""

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import time
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchloom
from batchloom import InputError, Recipe, SettingsError, TokenizerError, open_store, prepare
from batchloom.core.errors import InputMissingError, RecordError, TooManyBadRecordsError
from batchloom.preparation import ReadRecipe
from batchloom.preparation.settings import SourceRecipe, count_allowed_bad
from batchloom.preparation.units import unit_keys
from batchloom.sources import ReadLimits
from preparation.stores import make_recipe, prepare_store, read_texts, write_jsonl


def check_single_sentence(error):
    text = str(error.value)
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def test_bad_records_are_quarantined_and_others_are_kept(tmp_path):
    lines = [json.dumps({"text": f"t{i}"}) for i in range(100)]
    lines[3], lines[50] = '{"txt":"x"}', '{"text":'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"caf\xe9 au lait")
    result = prepare_store([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "out")
    assert (result.counts.quarantined, result.counts.documents) == (3, 98)
    quarantined = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [(record["source"], record["line"], record["column"]) for record in quarantined] == [
        ("a.jsonl", 4, None),
        ("a.jsonl", 51, 9),
        ("b.txt", 1, 4),
    ]
    assert set(quarantined[0]) == {"source", "line", "row", "column", "offset", "reason", "snippet"}
    assert quarantined[0]["offset"] == sum(len(line) + 1 for line in lines[:3])
    assert "did you mean --text-field 'txt'?" in quarantined[0]["reason"]


LINE = '{"text": "' + "before " * 20 + "%s" + " behind" * 20 + '"}\n'


@pytest.mark.parametrize(
    ("name", "line"),
    [("a.jsonl", LINE), ("a.csv", LINE[10:-3] + ",1\n"), ("a.json", LINE), ("a.txt", LINE[11:])],
)
@pytest.mark.parametrize(
    ("bad_bytes", "escaped", "reason"),
    [
        (b"\xe9", r"\xe9", "is not valid UTF-8.*; name the file's encoding: --encoding "),
        (b"\0", r"\x00", "NUL|escapes"),
    ],
)
def test_invalid_text_bytes_are_shown_at_their_position(tmp_path, name, line, bad_bytes, escaped, reason):
    lines = [(line % n).encode() for n in range(30)]
    lines[7] = lines[7].replace(b"before 7", b"\xc3\xbcbefore " + bad_bytes)
    header = b"text,n\n" if name == "a.csv" else b""
    data = header + b"".join(lines)
    if name == "a.json":
        data = b"[" + b",".join(lines) + b"]"
    (tmp_path / name).write_bytes(data)
    (tmp_path / "good.txt").write_text("good")
    result = prepare_store([tmp_path / name, tmp_path / "good.txt"], tmp_path / "out")
    assert result.counts.quarantined == 1
    record = json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())
    assert record["line"] == 8 + bool(header)
    position = lines[7].decode("latin1").index(bad_bytes.decode("latin1"))
    # A character of two bytes counts as one; JSON readers may report the character before or after.
    assert abs(record["column"] - position) <= ("json" in name)
    assert re.search(reason, record["reason"])
    assert f"\u00fcbefore {escaped} behind" in record["snippet"]
    assert record["snippet"].startswith("...")
    assert record["snippet"].isprintable()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_wide_text_is_no_text_and_comes_with_its_remedy(tmp_path, name, encoding):
    text = {"a.json": '[{"text": "hello"}]', "a.csv": "text,n\nhello,1\n"}.get(name, '{"text": "hello"}\n')
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(InputError, match=r"; name it: --encoding utf-(16|32)(-le|-be)?"):
        prepare_store(tmp_path / name, tmp_path / "out")


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_records_need_no_ending_that_says_so(tmp_path, compress):
    (tmp_path / "a.jsonl").write_bytes(compress(b'{"text": "hello"}\n' * 9))
    assert read_texts(prepare_store(tmp_path / "a.jsonl", tmp_path / "out", dedup="none").path) == ["hello"] * 9


def test_white_space_of_any_length_between_records_costs_no_memory_and_little_time(tmp_path):
    blank = b" \n" * (2 << 20)
    # With chunks this small, reading the white space from its beginning for each of them would take long.
    limits = ReadLimits(chunk_bytes=1024)
    start = time.process_time()
    peaks = []
    for name, space in (("none", b""), ("all", blank)):
        (tmp_path / "a.json").write_bytes(b"[" + space + b'{"text": "a"},' + space + b'{"text": "b"}' + space + b"]")
        tracemalloc.start()
        try:
            assert read_texts(prepare_store(tmp_path / "a.json", tmp_path / name, limits=limits).path) == ["a", "b"]
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] - peaks[0] < 1 << 20
    assert time.process_time() - start < 4
    for prefix in (b"[ ,%s" % blank, b'[{"text": "a"},%s,' % blank, b'[{"text": "a"},%s]' % blank):
        (tmp_path / "a.json").write_bytes(prefix + b'{"text": "b"}]')
        with pytest.raises(InputError, match="comma|value"):
            prepare_store(tmp_path / "a.json", tmp_path / "odd")


def test_records_of_another_form_are_named_as_such(tmp_path):
    """No option reads both: neither a column nor a key is at fault."""
    rows = [{"question": f"{n}?", "answer": "Yes."} for n in range(150)]
    call = {"type": "function", "function": {"name": "f", "parameters": {}}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, {"messages": messages, "tools": [call]}])
    with pytest.raises(TooManyBadRecordsError, match="line 151: the record has 'messages', 'tools', and the first"):
        prepare_store(path, tmp_path / "s", max_bad=0)


def test_the_budget_of_bad_records(tmp_path):
    assert count_allowed_bad("0.1%", 100) == 10
    assert count_allowed_bad("0.1%", 20_000) == 20
    assert count_allowed_bad("0%", 10**6) == count_allowed_bad(0, 10**6) == 0
    assert count_allowed_bad("7", 10**6) == 7
    good = [json.dumps({"text": f"t{i}"}) for i in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join([good[0], "bad", *good, *["bad"] * 10, *good]))
    with pytest.raises(TooManyBadRecordsError) as error:
        prepare_store(tmp_path / "a.jsonl", tmp_path / "out", unit_bytes=1000)
    text = check_single_sentence(error)
    assert text.startswith("11 bad records in the first ")
    assert "more than --max-bad 0.1% allows. The first: Invalid JSON on line 2 in a.jsonl, column 1: " in text
    assert "raise the budget, for example --max-bad 5%" in text
    assert not (tmp_path / "out" / "dataset_metadata.json").exists()
    # A higher budget resumes the finished units.
    result = prepare_store(tmp_path / "a.jsonl", tmp_path / "out", unit_bytes=1000, max_bad="5%")
    assert result.resumed_units > 2
    assert result.counts.quarantined == 11


@pytest.mark.parametrize("unit", [50, 1 << 30])
def test_the_budget_is_judged_over_everything_whatever_the_units(tmp_path, unit):
    lines = ["bad"] * 10 + [json.dumps({"text": f"t{i}"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert prepare_store(tmp_path / "a.jsonl", tmp_path / "out", unit_bytes=unit).counts.quarantined == 10
    with pytest.raises(TooManyBadRecordsError, match="^10 bad records in the first"):
        prepare_store(tmp_path / "a.jsonl", tmp_path / "out2", unit_bytes=unit, max_bad=9)


def test_a_job_beyond_saving_stops_early(tmp_path):
    good = json.dumps({"text": "x" * 1000})
    (tmp_path / "a.jsonl").write_text("\n".join([good, *["bad"] * 3000, *[good] * 500]))
    with pytest.raises(TooManyBadRecordsError, match="bad records in the first"):
        prepare_store(tmp_path / "a.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_first_records_without_the_field_stop_before_any_work(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}] * 200)
    with pytest.raises(RecordError) as error:
        prepare_store(tmp_path / "a.jsonl", tmp_path / "out", text_field="anser")
    assert check_single_sentence(error) == (
        "a.jsonl, line 1: no field 'anser': the record has 'question', 'answer'; did you mean --text-field 'answer'?"
    )
    assert not (tmp_path / "out").exists()
    result = prepare_store(tmp_path / "a.jsonl", tmp_path / "out", text_field="answer", dedup="none")
    assert read_texts(result.path) == ["a"] * 200


def test_a_missing_an_empty_and_a_useless_input(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for name in ("missing.txt", "empty.txt", "folder"):
        with pytest.raises(InputMissingError) as error:
            prepare_store(tmp_path / name, tmp_path / "out")
        assert str(tmp_path / name) in check_single_sentence(error)
    assert not (tmp_path / "out").exists()


def test_an_input_that_gives_no_document(tmp_path):
    (tmp_path / "a.txt").write_text("  \n\n ")
    with pytest.raises(InputMissingError, match=r"No documents were made from 1 record: 1 empty\."):
        prepare_store(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfeh\x00")
    with pytest.raises(InputMissingError, match="The first bad one: a.txt: this is UTF-16"):
        prepare_store(tmp_path / "a.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_gzip_stops_the_job_and_finished_units_stay(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(200)])
    data = gzip.compress(os.urandom(1_500_000).hex().encode(), 1)
    (tmp_path / "b.txt.gz").write_bytes(data[:1_400_000])
    with pytest.raises(InputError) as error:
        prepare_store([tmp_path / "a.jsonl", tmp_path / "b.txt.gz"], tmp_path / "out", unit_bytes=2_000)
    sentence = "b.txt.gz is cut short: its gzip data ends or fails at byte 1,400,000 of 1,400,000;"
    assert check_single_sentence(error).startswith(sentence)
    assert list((tmp_path / "out" / ".work" / "units").glob("*/unit.json"))
    assert not (tmp_path / "out" / "dataset_metadata.json").exists()


def test_a_file_that_goes_while_it_is_prepared(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    (tmp_path / "b.txt").write_text("b" * 100)

    def remove(event):
        (tmp_path / "b.txt").unlink(missing_ok=True)

    with pytest.raises(InputMissingError, match="b.txt is missing"):
        prepare_store(
            [tmp_path / "a.txt", tmp_path / "b.txt"],
            tmp_path / "out",
            unit_bytes=100,
            listener=remove,
        )


def test_skipped_inputs_are_reported_before_the_work(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.pdf", "c.pdf", ".hidden"):
        (tmp_path / "in" / name).write_text("text")
    events = []
    inputs = [tmp_path / "in", tmp_path / "in" / "a.txt"]
    result = prepare_store(inputs, tmp_path / "out", listener=events.append, allow_skipped=True)
    notes = ["Left out of in: 2 .pdf, 1 hidden.", "Named more than once, read once: a.txt."]
    assert [event.text for event in events[:2]] == notes
    assert result.notes[:2] == tuple(notes)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["notes"][:2] == notes


@pytest.mark.parametrize("pack", ["folder", "in.zip", "in.tar.gz"])
def test_more_than_one_percent_of_unread_data_is_refused(tmp_path, pack):
    """By files or by bytes; what holds no data does not count."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(199):
        (folder / f"{number}.txt").write_text(f"text {number} " * 20)
    for name in ("a.pdf", "picture.png", ".hidden", "x.parquet.gz"):
        (folder / name).write_bytes(b"\x89PNG\0" if name == "picture.png" else b"short")

    def prepare(**options):
        source = folder
        if pack != "folder":
            source = Path(shutil.make_archive(str(tmp_path / "in"), {"in.zip": "zip"}.get(pack, "gztar"), folder))
        return prepare_store(source, tmp_path / "out", val_fraction=0, **options)

    assert prepare().counts.documents == 199
    shutil.rmtree(tmp_path / "out")
    (folder / "b.docx").write_bytes(b"short")
    with pytest.raises(InputError, match=r"(?s)3 of 202 data files cannot be read: .*\n.*a\.pdf \(\.pdf\): extract"):
        prepare()
    assert prepare(allow_skipped=True).counts.documents == 199
    (folder / "b.docx").write_bytes(bytes(1))
    for name in ("a.pdf", "x.parquet.gz"):
        (folder / name).unlink()
    (folder / "b.docx").write_bytes(bytes(5000))
    with pytest.raises(InputError, match=r"1 of 200 data files cannot be read"):
        prepare()


def test_a_document_that_spells_a_control_token_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("a<|endoftext|>b " * 50)
    prepare_store(tmp_path / "a.txt", tmp_path / "out", tokenizer="train:300")
    store = open_store(tmp_path / "out")
    assert (store[0].ids == store.end_id).sum() == 1


def test_wrong_tokenizers(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for spec in ("train:x", "gtp2", str(tmp_path / "no.json")):
        with pytest.raises(TokenizerError) as error:
            prepare_store(tmp_path / "a.txt", tmp_path / "out", tokenizer=spec)
        check_single_sentence(error)
        assert not (tmp_path / "out").exists()


def test_settings_are_judged_all_at_once():
    with pytest.raises(SettingsError) as error:
        make_recipe(
            inputs=(),
            split_on="lines",
            val_fraction=1,
            dtype="uint8",
            dedup="exat",
            tokens_per_shard=0,
            max_bad="some",
            text_field="",
        )
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "tokens_per_shard",
        "dtype",
        "val_fraction",
        "max_bad",
        "inputs",
        "dedup",
        "text_field",
        "split_on",
    ]
    assert "did you mean 'line'?" in str(error.value)
    assert "did you mean 'uint16'?" in str(error.value)
    assert "val_fraction: 1 is not in [0, 1)" in str(error.value)


def test_valid_settings_that_contradict_each_other_are_judged_at_once():
    with pytest.raises(SettingsError) as error:
        Recipe(
            inputs=("a",),
            val_fraction=0.6,
            test_fraction=0.5,
            sources=(SourceRecipe(max_samples=1),) * 2,
            reading=ReadRecipe(input_split="train[:1%]"),
        )
    assert [problem.split(":")[0] for problem in error.value.problems] == ["sources", "input_split", "val_fraction"]
    assert "val and test together take" in str(error.value)


def test_a_share_of_bad_records_is_exact():
    """29 % of 100 is exactly 29, where floating point gives 28.999..."""
    from batchloom.preparation.settings import count_allowed_bad

    assert [count_allowed_bad(f"{share}%", 100) for share in (29, 57, 58)] == [29, 57, 58]
    assert count_allowed_bad("0.1%", 20_000) == 20


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("tokens_per_shard", 10**5000, "from 1 to 1,000,000,000,000"),
        ("tokens_per_shard", 10**12 + 1, "from 1 to 1,000,000,000,000"),
        ("max_bad", 10**5000, "up to 1,000,000,000,000,000,000"),
        ("max_bad", "9" * 5000, "up to 1,000,000,000,000,000,000"),
        ("max_bad", "9" * 5000 + "%", "up to 100%"),
        ("max_bad", "101%", "up to 100%"),
        ("val_fraction", 10**5000, r"not in \[0, 1\)"),
        ("dtype", 10**5000, "is none of auto"),
        ("normalize", 10**5000, "neither True nor False"),
    ],
    ids=map(str, range(9)),
)
def test_absurd_numbers_are_refused_with_their_bound(name, value, bound):
    with pytest.raises(SettingsError, match=bound) as error:
        make_recipe(inputs=("a",), **{name: value})
    assert len(check_single_sentence(error)) < 400


def test_a_tokenizer_that_lacks_a_character_is_named(tmp_path):
    definition = {
        "model": {"type": "WordLevel", "vocab": {"known": 0, "<eos>": 1}, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    (tmp_path / "a.txt").write_text("known " * 100 + "k\xf6nig")
    with pytest.raises(TokenizerError) as error:
        prepare_store(
            tmp_path / "a.txt",
            tmp_path / "out",
            tokenizer=str(tmp_path / "tokenizer.json"),
            end_token="<eos>",
        )
    text = check_single_sentence(error)
    assert text.startswith("tokenizer 'tokenizer.json' cannot encode 'k")
    assert "choose another --tokenizer" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
@pytest.mark.parametrize("settings", [{"text_field": "text"}, {"mapping": {"text": "text"}}])
def test_a_column_of_bytes_is_text_if_it_is_named(tmp_path, kind, settings):
    """Its bytes are UTF-8, or the row is bad."""
    pq.write_table(pa.table({"text": pa.array(["ein Bär".encode()] * 20 + [b"caf\xe9"], kind)}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="if 'text' is text, name it: --text-field text"):
        prepare_store(tmp_path / "a.parquet", tmp_path / "out")
    result = prepare_store(tmp_path / "a.parquet", tmp_path / "out", dedup="none", **settings)
    assert read_texts(result.path) == ["ein Bär"] * 20
    record = json.loads((result.path / "quarantine.jsonl").read_text())
    assert (record["row"], record["snippet"]) == (21, r"caf\xe9")


def test_a_text_of_a_table_that_is_no_utf8_is_shown(tmp_path):
    raw = pa.array([b"good"] * 30 + [b"caf\xe9 au lait"])
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    table = pa.table({"question": text, "answer": ["yes"] * 31})
    pq.write_table(table, tmp_path / "a.parquet")
    prepare_store(tmp_path / "a.parquet", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "quarantine.jsonl").read_text())
    assert (record["row"], record["snippet"]) == (31, r"caf\xe9 au lait")
    assert record["reason"].startswith("column 'question': byte 0xe9 of a text is not valid UTF-8;")


def test_more_documents_of_a_unit_than_can_be_numbered_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unit_keys, "MAX_DOCUMENTS", 9)
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {n}"} for n in range(9)])
    prepare_store(tmp_path / "a.jsonl", tmp_path / "nine")
    write_jsonl(tmp_path / "b.jsonl", [{"text": f"document {n}"} for n in range(10)])
    prepare_store(tmp_path / "b.jsonl", tmp_path / "all", dedup="none")
    with pytest.raises(InputError, match="more than 9 documents"):
        prepare_store(tmp_path / "b.jsonl", tmp_path / "ten")


def make_conversation(number):
    turns = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}]
    if number % 2:
        call = {"function": {"name": "f", "arguments": {"n": number}}}
        turns[1] = {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"messages": turns}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_no_budget_is_proposed_for_half_of_the_records(tmp_path, workers):
    source = tmp_path / "a.jsonl"
    write_jsonl(source, [make_conversation(number) for number in range(300)])
    with source.open("a") as file:
        file.write("bad\n" * 2)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    template = str(tmp_path / "t.jinja")
    with pytest.raises(TooManyBadRecordsError) as error:
        prepare(source, out=tmp_path / "out", tokenizer="bytes", template=template, workers=workers)
    text = check_single_sentence(error)
    assert "The first: " in text
    assert "--max-bad 5%" not in text
    assert text.endswith(
        "which 150 of them have; --max-bad is meant for a few bad records, not for a fault in many."
    ) or (
        "Fix the most common fault, which 150 of them have (template t.jinja leaves out tool calls of turn 2: choose "
        "one that writes them, such as --template plain)" in text
    )
    # The suggested remedy works.
    out, settings = tmp_path / "out", {"tokenizer": "bytes", "max_bad": "5%", "restart": True}
    result = prepare(source, out=out, template="plain", workers=workers, **settings)
    assert result.counts.documents == 300
    assert result.counts.quarantined == 2


def test_a_few_bad_records_of_some_kinds_name_the_commonest(tmp_path):
    empty = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}
    good = make_conversation(0)
    source = tmp_path / "a.jsonl"
    lines = ["{bad" if n == 0 else json.dumps(empty if n % 3 else {**good, "id": n}) for n in range(90)]
    source.write_text("\n".join(lines))
    with pytest.raises(TooManyBadRecordsError) as error:
        prepare_store(source, tmp_path / "out")
    text = check_single_sentence(error)
    assert "The first: Invalid JSON on line 1" in text
    assert re.search(r"Fix the most common fault, which 5\d of them have \(messages\[1\]\.content", text)


def test_a_tokenizer_that_found_no_text_says_nothing_of_pairs(tmp_path):
    """No note about missing pairs if all records are bad: more text would not help."""
    (tmp_path / "a.jsonl").write_text('{"text": 1\n' * 3)
    notes = []
    settings = {"tokenizer": "train:300", "max_bad": 100, "progress": notes.append}
    with pytest.raises(InputMissingError, match="No documents were made from 3 records: 3 bad"):
        batchloom.prepare(tmp_path / "a.jsonl", out=tmp_path / "s", **settings)
    assert not any("pairs" in getattr(note, "text", "") for note in notes)
    (tmp_path / "b.jsonl").write_text('{"text": "few words"}\n')
    batchloom.prepare(tmp_path / "b.jsonl", out=tmp_path / "t", **settings)
    assert any("the input has no more pairs" in getattr(note, "text", "") for note in notes)
