"""--include and --exclude choose the files of inputs."""

import gzip
import hashlib
import json
import shlex
import tarfile
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import batchloom
from batchloom import InputError, SettingsError
from batchloom.cli import run_command_line
from batchloom.core.errors import DamagedFileError, SchemaError, TooManyBadRecordsError
from batchloom.preparation import Note, convert
from batchloom.preparation.report.report import read_report
from batchloom.sources import PartReader
from preparation.stores import write_jsonl

FILES = {
    "a.txt": "first",
    "b.log": "second",
    "logs/c.txt": "third",
    "logs/deep/d.txt": "fourth",
    "logs.txt": "fifth",
}
CHOICES = [
    ({"include": "*.txt"}, {"a.txt", "logs/c.txt", "logs/deep/d.txt", "logs.txt"}),
    ({"include": "logs/*"}, {"logs/c.txt", "logs/deep/d.txt"}),
    ({"include": ["*.txt"], "exclude": ["logs/*"]}, {"a.txt", "logs.txt"}),
    ({"exclude": "*.log, deep/*"}, {"a.txt", "logs/c.txt", "logs.txt"}),
    ({"exclude": "logs"}, {"a.txt", "b.log", "logs.txt"}),
    ({"exclude": "./logs/"}, {"a.txt", "b.log", "logs.txt"}),
    ({"include": "logs/deep"}, {"logs/deep/d.txt"}),
    ({"exclude": "tree,lo?s/deep"}, {"a.txt", "b.log", "logs/c.txt", "logs.txt"}),
    ({"exclude": "[ab]*"}, {"logs/c.txt", "logs/deep/d.txt", "logs.txt"}),
    ({"exclude": "tree*/logs/c.txt"}, {"a.txt", "b.log", "logs/deep/d.txt", "logs.txt"}),
    ({"include": "/*.txt", "exclude": "/c.txt,/logs/*"}, {"a.txt", "logs.txt"}),
    ({"include": "**/*.txt", "exclude": "logs/**/*.txt"}, {"a.txt", "logs.txt"}),
    ({"exclude": "**/deep/**"}, {"a.txt", "b.log", "logs/c.txt", "logs.txt"}),
]


@pytest.fixture(params=["folder", "tar"])
def tree(request, tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if request.param == "folder":
        return tmp_path / "tree"
    with tarfile.open(tmp_path / "tree.tar", "w") as tar:
        tar.add(tmp_path / "tree", arcname="")
    return tmp_path / "tree.tar"


def list_texts(store):
    opened = batchloom.open_store(store)
    return {opened[number].text.removesuffix("<|endoftext|>") for number in range(len(opened))}


@pytest.mark.parametrize(("options", "names"), CHOICES)
def test_files_are_chosen_by_globs(tree, tmp_path, options, names):
    result = batchloom.prepare(
        tree, out=tmp_path / "store", tokenizer="bytes", val_fraction=0, workers=1, progress=lambda _: None, **options
    )
    assert list_texts(tmp_path / "store") == {FILES[name] for name in names}
    left_out = len(FILES) - len(names)
    assert any(f"{left_out} by --include or --exclude" in note for note in result.notes)
    rows = convert(tree, out=tmp_path / "rows.jsonl", **options)
    assert rows.rows == len(names)
    assert batchloom.doctor(tree, tokenizer="bytes", **options).documents == len(names)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": "/a.txt"}, {"a.txt"}),
        ({"include": "/logs/*", "exclude": "bucket"}, {"logs/c.txt", "logs/deep/d.txt"}),
        ({"exclude": "/**/deep/**/*.txt,*.log"}, {"a.txt", "logs/c.txt", "logs.txt"}),
    ],
)
def test_patterns_begin_at_the_root_of_a_remote_folder(options, names, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name, text in FILES.items():
        memory.pipe(f"/bucket/tree/{name}", text.encode())
    try:
        batchloom.prepare(
            "memory://bucket/tree", out=tmp_path / "s", tokenizer="bytes", val_fraction=0, workers=1, **options
        )
    finally:
        memory.rm("/bucket", recursive=True)
    assert list_texts(tmp_path / "s") == {FILES[name] for name in names}


def test_patterns_match_what_a_glob_finds(tmp_path):
    for name in ("p1/a.txt", "p2/a.txt", "p2/b.txt"):
        path = tmp_path / "g" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for number, (include, names) in enumerate(
        [("/p1/*", {"p1/a.txt"}), ("p2", {"p2/a.txt", "p2/b.txt"}), ("a.txt", {"p1/a.txt", "p2/a.txt"})]
    ):
        out = tmp_path / str(number)
        batchloom.prepare(tmp_path / "g/p*/*.txt", out=out, tokenizer="bytes", val_fraction=0, include=include)
        assert list_texts(out) == names


def test_a_pattern_that_matches_no_file_is_named(tree, tmp_path):
    messages, choice = [], {"include": "*.txt", "exclude": "log,*.md,logs"}
    batchloom.prepare(tree, out=tmp_path / "s", tokenizer="bytes", progress=messages.append, **choice)
    notes = [message.text for message in messages if isinstance(message, Note) and message.is_warning]
    assert [note for note in notes if "matches no file" in note] == [
        "--exclude '*.md' matches no file.",
        "--exclude 'log' matches no file.",
    ]
    assert any("--exclude 'x' matches no file" in warning for warning in batchloom.doctor(tree, exclude="x").notes)


def test_a_manifest_chooses_files_of_each_data_set(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(f"datasets:\n  - path: {tree}\n    include: ['*.log']\n")
    batchloom.prepare("one.yaml", out="one", tokenizer="bytes", val_fraction=0, workers=1)
    assert list_texts("one") == {"second"}


def test_a_stream_reads_the_chosen_files(tree):
    stream = batchloom.stream(
        tree, tokenizer="bytes", seq_len=8, global_batch_size=1, steps=2, include="*.log", workers=0, shuffle=False
    )
    batch = next(iter(batchloom.Loader(stream, rank=0, world_size=1, output="numpy", prefetch=0)))
    assert bytes(batch["input_ids"][0][:6].astype("u1")) == b"second"


def test_nothing_chosen_and_bad_globs_are_errors(tree, tmp_path, capsys):
    problem = rf"--include '\*\.md' leaves no file of .*{tree.name} to read, although {tree.name}/a\.txt is there\.$"
    with pytest.raises(InputError, match=problem):
        batchloom.prepare(tree, out=tmp_path / "s", include="*.md")
    with pytest.raises(InputError, match=r"a\.md.* is there\. Quote patterns"):
        batchloom.prepare(tree, out=tmp_path / "s", include="a.md")
    with pytest.raises(SettingsError, match="include: "):
        batchloom.prepare(tree, out=tmp_path / "s", include=[1])
    assert run_command_line(["doctor", str(tree), "--include", "a.*", "--tokenizer", "bytes"]) == 0
    assert "1 document" in capsys.readouterr().out


def test_patterns_choose_among_named_files(tree, tmp_path):
    paths = [tree / "a.txt", tree / "b.log", tree / "logs.txt"] if tree.is_dir() else [tree]
    for number, (options, names, count) in enumerate(
        [({"exclude": "b.log,z"}, {"a.txt", "logs.txt"}, 1), ({"include": "*.log,z"}, {"b.log"}, 2)]
        if tree.is_dir()
        else [
            ({"exclude": f"{tree.name},z"}, {"new.txt"}, 1),
            ({"include": "b.log,new.txt,z"}, {"b.log", "new.txt"}, 0),
        ]
    ):
        (tmp_path / "new.txt").write_text("new")
        inputs = paths if tree.is_dir() else [*paths, tmp_path / "new.txt"]
        result = batchloom.prepare(
            inputs, out=tmp_path / str(number), tokenizer="bytes", val_fraction=0, workers=1, **options
        )
        assert list_texts(tmp_path / str(number)) == {{**FILES, "new.txt": "new"}[name] for name in names}
        assert any(f"Left out: {count} named file" in note for note in result.notes) == bool(count)
        assert any("'z' matches no file." in note for note in result.notes)
    with pytest.raises(InputError, match="--exclude '.*' leaves no file of the inputs to read"):
        batchloom.prepare(tree / "a.txt" if tree.is_dir() else tree, out=tmp_path / "s", exclude=[tree.name, "a.txt"])


def test_an_append_names_the_patterns_of_the_store(tmp_path):
    for name in ("a.txt", "b.md"):
        (tmp_path / name[0]).mkdir()
        (tmp_path / name[0] / name).write_text(name)
    batchloom.prepare(tmp_path / "a", out=tmp_path / "s", tokenizer="bytes", include="*.txt", workers=1)
    with pytest.raises(InputError, match=r"b/b\.md is there\. --include '\*\.txt' is a setting of .*s; give another"):
        batchloom.prepare(tmp_path / "b", out=tmp_path / "s", append=True)
    with pytest.raises(InputError, match=r"b/b\.md is there\.$"):
        batchloom.prepare(tmp_path / "b", out=tmp_path / "s", append=True, include="*.py")


def test_markup_is_named_with_the_option_that_reads_it(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("a.html", "b.htm", "c.svg", "d.min.js", "e.js", "f.txt"):
        (tree / name).write_text(f"<p>text of {name}</p>")
    diagnosis = batchloom.doctor(tree, tokenizer="bytes", exclude="x*")
    notes = diagnosis.notes
    assert diagnosis.commands[0].endswith("--exclude 'x*,*.svg,*.min.*' --clean html")
    assert f"HTML with its tags in 2 files of {tree.name}: --clean html keeps the visible text." in notes
    assert f"SVG drawings in 1 file of {tree.name}: --exclude '*.svg' leaves them out." in notes
    assert f"Minified code in 1 file of {tree.name}: --exclude '*.min.*' leaves it out." in notes
    result = batchloom.prepare(
        tree, out=tmp_path / "s", tokenizer="bytes", clean=["html"], exclude="*.svg,*.min.*", workers=1, val_fraction=0
    )
    assert not any("HTML" in note or "SVG" in note or "Minified" in note for note in result.notes)
    assert list_texts(tmp_path / "s") >= {"text of a.html", "text of b.htm"}


@pytest.fixture
def rows_and_a_table(tmp_path):
    """A folder with 150 files of texts, and a table without any."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number in range(150):
        (folder / f"{number}.jsonl").write_text(f'{{"text": "document {number}"}}\n')
    (folder / "x.csv").write_text("x,y\n1,2\n")
    return folder


PREPARE = {"tokenizer": "bytes", "workers": 1, "progress": lambda _: None}


def test_a_table_that_fits_no_schema_is_left_out_of_a_folder(rows_and_a_table, tmp_path):
    result = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE)
    assert result.counts.documents == 150
    left_out = "  mixed/x.csv: no schema fits"
    assert any(note.startswith(left_out) for note in result.notes)
    assert batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE).already_done
    (rows_and_a_table / "new.jsonl").write_text('{"text": "a new one"}\n')
    appended = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", append=True, **PREPARE)
    assert (appended.counts.documents, appended.in_all[0]) == (1, 151)
    diagnosis = batchloom.doctor(rows_and_a_table, tokenizer="bytes")
    assert diagnosis.sound
    assert any(warning.startswith(left_out) for warning in diagnosis.warnings)


def test_many_tables_that_fit_no_schema_are_an_error(rows_and_a_table, tmp_path):
    (rows_and_a_table / "y.csv").write_text("x,y\n1,2\n")
    with pytest.raises(
        SchemaError, match=r"2 files .*; --allow-skipped leaves such files out:\n  mixed/x\.csv: no schema fits"
    ):
        batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE)
    assert not batchloom.doctor(rows_and_a_table, tokenizer="bytes").sound
    result = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", allow_skipped=True, **PREPARE)
    assert result.counts.documents == 150
    assert batchloom.doctor(rows_and_a_table, tokenizer="bytes", allow_skipped=True).sound


CUT_FILES = {"cut.jsonl.gz": gzip.compress(b'{"text": "one"}\n' * 9)[:20], "cut.parquet": b"PAR1 PAR1"}


@pytest.mark.parametrize("name", CUT_FILES)
def test_a_damaged_file_is_left_out_of_a_folder_and_more_are_listed(rows_and_a_table, tmp_path, name):
    (rows_and_a_table / "x.csv").unlink()
    (rows_and_a_table / name).write_bytes(CUT_FILES[name])
    left_out = f"  mixed/{name} is "
    result = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE)
    assert result.counts.documents == 150
    assert any(note.startswith(left_out) for note in result.notes)
    assert batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE).already_done
    diagnosis = batchloom.doctor(rows_and_a_table, tokenizer="bytes")
    assert diagnosis.sound
    assert any(warning.startswith(left_out) for warning in diagnosis.warnings)

    (rows_and_a_table / f"second.{name}").write_bytes(CUT_FILES[name])
    with pytest.raises(DamagedFileError) as caught:
        batchloom.prepare(rows_and_a_table, out=tmp_path / "t", **PREPARE)
    sentences = str(caught.value).splitlines()
    assert sentences[0] == "2 files cannot be read; --allow-skipped leaves such files out:"
    assert sentences[1].startswith(f"  mixed/{name} is ")
    assert sentences[2] == f"  mixed/second.{name}: likewise"
    faults = batchloom.doctor(rows_and_a_table, tokenizer="bytes").faults
    assert sum("cut.jsonl.gz" in fault or "cut.parquet" in fault for fault in faults) == 2
    batchloom.prepare(rows_and_a_table, out=tmp_path / "t", exclude=f"*{name}", **PREPARE)
    with pytest.raises(DamagedFileError):
        batchloom.prepare([rows_and_a_table, rows_and_a_table / name], out=tmp_path / "u", **PREPARE)


def test_the_report_lists_every_file_that_is_left_out(rows_and_a_table, tmp_path):
    for number in range(11):
        (rows_and_a_table / f"x{number:02}.csv").write_text("x,y\n1,2\n")
    (rows_and_a_table / "a.pdf").write_text("%PDF")
    (rows_and_a_table / "settings.json").write_text('{"indent": 4}')
    result = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", allow_skipped=True, **PREPARE)
    assert sum(note.startswith("  mixed/x") for note in result.notes) == 10
    assert result.notes.count("  mixed/x05.csv: likewise") == 1
    assert "  and 2 more (report.json of the store lists all)" in result.notes
    names = {"a.pdf", "settings.json", "x.csv", *(f"x{number:02}.csv" for number in range(11))}
    report = read_report(tmp_path / "s")
    assert {file.name for file in report.left_out} == {f"mixed/{name}" for name in names}
    page = (tmp_path / "s/report.html").read_text()
    assert all(file.reason.startswith(file.name) and file.name in page for file in report.left_out)


BAD_CSV = "# a comment\nsymbol,text\n" + "".join(f"S{number},a text\n" for number in range(30))


def test_a_file_without_a_usable_record_is_left_out(rows_and_a_table, tmp_path):
    (rows_and_a_table / "x.csv").unlink()
    for number in range(30):
        (rows_and_a_table / f"{number}.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (rows_and_a_table / "bad.csv").write_text(BAD_CSV)
    (rows_and_a_table / "one.jsonl").write_text('{"text": "a good one"}\n{"text": 1\n')
    with pytest.raises(DamagedFileError, match=r"^31 files cannot be read; --allow-skipped leaves such files out:\n"):
        batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE)
    assert not batchloom.doctor(rows_and_a_table, tokenizer="bytes").sound
    options = {**PREPARE, "allow_skipped": True}
    result = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **options)
    assert (result.counts.documents, result.counts.quarantined) == (151, 62)
    reasons = {file.name: file.reason for file in read_report(tmp_path / "s").left_out}
    assert len(reasons) == 31
    assert "0xe9 at offset 3 is not valid UTF-8" in reasons["mixed/0.txt"]
    assert reasons["mixed/bad.csv"].startswith("mixed/bad.csv: all its 31 records are bad, first: 2 fields where")
    assert not batchloom.check(tmp_path / "s").faults
    again = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **options)
    assert again.already_done
    assert "Left out of mixed: 31 files that cannot be read:" in again.notes
    diagnosis = batchloom.doctor(rows_and_a_table, tokenizer="bytes", allow_skipped=True)
    assert diagnosis.sound
    assert "Left out of mixed: 31 files that cannot be read:" in diagnosis.warnings
    with pytest.raises(DamagedFileError):
        batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE)
    with pytest.raises(TooManyBadRecordsError):
        batchloom.prepare(rows_and_a_table, out=tmp_path / "s", max_bad=0, **options)


def test_bad_records_of_few_files_need_no_consent(rows_and_a_table, tmp_path):
    (rows_and_a_table / "x.csv").unlink()
    for number in range(5):
        (rows_and_a_table / f"{number}.txt").write_bytes(b"caf\xe9")
    result = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE)
    assert (result.counts.documents, result.counts.quarantined) == (150, 5)
    assert "Left out of mixed: 5 files that cannot be read:" in result.notes
    assert batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE).already_done
    (rows_and_a_table / "bad.csv").write_text(BAD_CSV)
    with pytest.raises(TooManyBadRecordsError):
        batchloom.prepare(rows_and_a_table / "bad.csv", out=tmp_path / "t", **PREPARE)


def test_a_damaged_archive_is_left_out_of_a_folder(rows_and_a_table, tmp_path):
    (rows_and_a_table / "x.csv").unlink()
    (rows_and_a_table / "a.zip").write_bytes(b"PK\x03\x04 broken")
    result = batchloom.prepare(rows_and_a_table, out=tmp_path / "s", **PREPARE)
    assert result.counts.documents == 150
    assert any("1 damaged" in note for note in result.notes)
    with pytest.raises(DamagedFileError, match="not a valid zip archive"):
        batchloom.prepare(rows_and_a_table / "a.zip", out=tmp_path / "t", **PREPARE)


def _list_lines(number):
    return [f"file {number} line {n} {hashlib.sha256(b'%d %d' % (number, n)).hexdigest()}" for n in range(6000)]


def _write_file(path, number):
    lines = _list_lines(number)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": lines}), path, row_group_size=1000)
        return
    text = "\n".join(lines) if ".txt" in path.suffixes else "".join(json.dumps({"text": line}) + "\n" for line in lines)
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))


@pytest.fixture
def damaged_tree(tmp_path):
    """Eight files, of which the last four turn out to be damaged when most of them is read."""
    (tmp_path / "in").mkdir()
    names = ("a.jsonl", "b.txt.gz", "c.parquet", "d.jsonl.gz", "e.jsonl.gz", "f.jsonl.zst", "g.txt.gz", "h.parquet")
    for number, name in enumerate(names):
        path = tmp_path / "in" / name
        _write_file(path, number)
        data = path.read_bytes()
        if name == "h.parquet":
            path.write_bytes(data[: len(data) // 2] + bytes(2000) + data[len(data) // 2 + 2000 :])
        elif number > 3:
            path.write_bytes(data[:-2000])
    return tmp_path / "in"


DAMAGED = ("e.jsonl.gz", "f.jsonl.zst", "g.txt.gz", "h.parquet")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"dedup": "lines"}, marks=pytest.mark.slow),
        pytest.param({"workers": 2}, marks=pytest.mark.slow),
        pytest.param({"dedup": "near"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_files_that_turn_out_to_be_damaged_are_left_out_at_the_end(damaged_tree, tmp_path, settings):
    settings = {**PREPARE, **settings}
    with pytest.raises(DamagedFileError) as caught:
        batchloom.prepare(damaged_tree, out=tmp_path / "s", **settings)
    first, *others = str(caught.value).splitlines()
    assert first == "4 files cannot be read; --allow-skipped leaves such files out:"
    assert [line.partition(" is ")[0].strip() for line in others] == [f"in/{name}" for name in DAMAGED]
    result = batchloom.prepare(damaged_tree, out=tmp_path / "s", allow_skipped=True, **settings)
    assert any("units were finished by an earlier run" in note for note in result.notes)
    number = result.notes.index("Left out of in: 4 files that cannot be read:")
    listed = [note.partition(" is ")[0].strip() for note in result.notes[number + 1 : number + 5]]
    assert listed == [f"in/{name}" for name in DAMAGED]
    report = read_report(tmp_path / "s")
    assert [file.name for file in report.left_out] == listed
    for name in DAMAGED:
        (damaged_tree / name).unlink()
    batchloom.prepare(damaged_tree, out=tmp_path / "t", **settings)
    assert list_texts(tmp_path / "s") == list_texts(tmp_path / "t")
    assert not batchloom.check(tmp_path / "s").faults


def test_a_finished_store_names_what_was_left_out(damaged_tree, tmp_path):
    settings = {**PREPARE, "allow_skipped": True, "tokenizer": "train:300"}
    first = batchloom.prepare(damaged_tree, out=tmp_path / "s", **settings)
    damage = {source.name: source.damage for source in batchloom.open_store(tmp_path / "s").manifest.sources}
    assert [name for name, reason in damage.items() if reason] == [f"in/{name}" for name in DAMAGED]
    again = batchloom.prepare(damaged_tree, out=tmp_path / "s", **settings)
    assert again.already_done
    [note] = [note for note in first.notes if "4 files that cannot be read" in note]
    assert note in again.notes
    with pytest.raises(DamagedFileError, match="4 files cannot be read"):
        batchloom.prepare(damaged_tree, out=tmp_path / "s", **{**settings, "allow_skipped": False})
    # A mended file is new.
    _write_file(damaged_tree / "e.jsonl.gz", 4)
    appended = batchloom.prepare(damaged_tree, out=tmp_path / "s", append=True, **settings)
    assert appended.counts.documents == 6000


@pytest.mark.slow
def test_many_damaged_files_are_found_in_one_more_reading(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for number in range(24):
        _write_file(tmp_path / "in" / f"{number:02}.jsonl.gz", number)
    for number in range(8):
        path = tmp_path / "in" / f"{2 * number:02}.jsonl.gz"
        path.write_bytes(path.read_bytes()[:-3000])
    reader = "batchloom.preparation.phases.tokenize_unit.PartReader"
    readings = []
    monkeypatch.setattr(reader, lambda part, *rest: readings.append(part.source.name) or PartReader(part, *rest))
    result = batchloom.prepare(tmp_path / "in", out=tmp_path / "s", allow_skipped=True, **PREPARE)
    assert result.counts.documents == 16 * 6000
    assert max(Counter(readings).values()) <= 2


def test_a_damaged_part_of_a_table_ends_the_work_with_what_leaves_it_out(tmp_path):
    (tmp_path / "in" / "odd[1],x").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "a.jsonl", [{"text": "x"}])
    path = tmp_path / "in" / "odd[1],x" / "t.parquet"
    lines = [hashlib.sha256(b"%d" % n).hexdigest() for n in range(600_000)]
    pq.write_table(pa.table({"text": lines}), path, row_group_size=50_000, compression="none")
    data = bytearray(path.read_bytes())
    metadata = pq.ParquetFile(path).metadata.row_group(9).column(0)
    start = metadata.dictionary_page_offset or metadata.data_page_offset
    data[start : start + 40] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="--exclude") as caught:
        batchloom.prepare(tmp_path / "in", out=tmp_path / "s", **PREPARE)
    [pattern] = shlex.split(str(caught.value).partition("--exclude ")[2])
    result = batchloom.prepare(tmp_path / "in", out=tmp_path / "s", exclude=pattern, restart=True, **PREPARE)
    assert result.counts.records == 1


def test_a_damaged_file_that_is_named_ends_the_work(damaged_tree, tmp_path):
    with pytest.raises(DamagedFileError, match=r"g\.txt\.gz is cut short"):
        batchloom.prepare([damaged_tree / "a.jsonl", damaged_tree / "g.txt.gz"], out=tmp_path / "s", **PREPARE)


def test_a_named_table_that_fits_no_schema_is_an_error(rows_and_a_table, tmp_path):
    with pytest.raises(SchemaError, match="no schema fits"):
        batchloom.prepare([rows_and_a_table / "0.jsonl", rows_and_a_table / "x.csv"], out=tmp_path / "s", **PREPARE)


def test_the_default_tokenizer_is_named(tree, tmp_path, caplog):
    batchloom.prepare(tree, out=tmp_path / "s", workers=1)
    assert "The tokenizer is gpt2, the default (tokenizer=)." in caplog.messages
    caplog.clear()
    batchloom.prepare(tree, out=tmp_path / "t", workers=1, tokenizer="gpt2")
    assert not any("tokenizer" in message for message in caplog.messages)
