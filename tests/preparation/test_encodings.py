"""Texts in other encodings than UTF-8, named by ``--encoding``."""

import gzip
import io
import json
import tarfile

import pytest

import batchloom
from batchloom.core.errors import InputError, SettingsError
from batchloom.preparation import convert
from golden.interface import run_command
from preparation.stores import prepare_store, read_texts

CHINESE = [f"你好世界这是第{number}篇文章。" for number in range(40)]
FRENCH = [f"Un café crème à l'été, numéro {number}." for number in range(40)]


def make_files(texts):
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    return {
        "a.jsonl": lines,
        "a.json": "[" + ",".join(lines.splitlines()) + "]",
        "a.csv": "text,n\n" + "".join(f'"{text}",1\n' for text in texts),
        "a.txt": "\n".join(texts),
        "data": lines,
    }


@pytest.mark.parametrize("name", make_files([]))
@pytest.mark.parametrize(
    ("encoding", "texts"),
    [
        ("gb18030", CHINESE),
        ("cp1252", FRENCH),
        ("utf-16", CHINESE),
        ("utf-16-le", FRENCH),
        ("shift_jis", ["日本語"] * 40),
    ],
)
def test_a_named_encoding_is_read(tmp_path, name, encoding, texts):
    data = make_files(texts)[name].encode(encoding)
    (tmp_path / name).write_bytes(data)
    split_on = "line" if name == "a.txt" else "auto"
    options = {"dedup": "none", "val_fraction": 0, "max_bad": 0, "encoding": encoding, "split_on": split_on}
    assert read_texts(prepare_store(tmp_path / name, tmp_path / "out", **options).path) == texts
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
    assert read_texts(prepare_store(tmp_path / f"{name}.gz", tmp_path / "gz", **options).path) == texts


def test_members_of_archives_are_decoded_and_tables_are_not(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = io.BytesIO()
    parquet.write_table(pa.table({"text": CHINESE[20:]}), table)
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        for name, data in (
            ("a.jsonl", make_files(CHINESE[:20])["a.jsonl"].encode("gbk")),
            ("b.parquet", table.getvalue()),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    store = prepare_store(tmp_path / "in.tar", tmp_path / "out", encoding="GBK", dedup="none", val_fraction=0).path
    assert read_texts(store) == CHINESE


def test_bytes_that_the_encoding_lacks_are_quarantined(tmp_path):
    lines = make_files(CHINESE)["a.jsonl"].encode("gbk").splitlines(keepends=True)
    lines[7] = lines[7].replace("世".encode("gbk"), b"\xff")
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    result = prepare_store(tmp_path / "a.jsonl", tmp_path / "out", encoding="gbk", dedup="none", val_fraction=0)
    assert result.counts.quarantined == 1
    assert read_texts(result.path) == CHINESE[:7] + CHINESE[8:]
    bad = json.loads((result.path / "quarantine.jsonl").read_text())
    assert bad["line"] == 8
    assert bad["reason"].startswith("byte 0xff is not valid gbk; remove it")


@pytest.mark.parametrize("encoding", ["gb18030", "cp1252"])
def test_a_folder_may_hold_utf8_beside_the_named_encoding(tmp_path, encoding):
    """Valid UTF-8 beyond ASCII, and byte order marks, are no chance."""
    texts = CHINESE if encoding == "gb18030" else FRENCH
    (tmp_path / "in").mkdir()
    names = {"a": encoding, "b": "utf-8", "c": "utf-8-sig", "d": "utf-16"}
    for number, (name, spelled) in enumerate(names.items()):
        part = make_files(texts[number::4])["a.jsonl"]
        (tmp_path / "in" / f"{name}.jsonl").write_bytes(part.encode(spelled))
    store = prepare_store(tmp_path / "in", tmp_path / "out", encoding=encoding, dedup="none", val_fraction=0, max_bad=0)
    assert sorted(read_texts(store.path)) == sorted(texts)


def test_cards_and_long_lines(tmp_path):
    """A card is UTF-8 whatever the data is; a line may be longer than what shows the kind of a file."""
    (tmp_path / "in").mkdir()
    card = "---\nconfigs:\n- config_name: 你\n  data_files:\n  - {split: train, path: a*}\n  - {split: test, path: b*}\n---\n"
    (tmp_path / "in" / "README.md").write_text(card, encoding="utf-8")
    long_line = json.dumps({"text": "é" * 9000}, ensure_ascii=False) + "\n"
    for name in ("a", "b"):
        (tmp_path / "in" / name).write_bytes(long_line.encode("utf-16"))
    result = prepare_store(tmp_path / "in", tmp_path / "out", encoding="utf-16", dedup="none", val_fraction=0)
    assert read_texts(result.path) == ["é" * 9000]


def test_the_encoding_of_one_data_set(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(make_files(CHINESE[:20])["a.jsonl"].encode("gbk"))
    (tmp_path / "b.jsonl").write_bytes(make_files(CHINESE[20:])["a.jsonl"].encode("big5", "ignore"))
    (tmp_path / "sets.yaml").write_text(
        "datasets:\n- {path: a.jsonl, encoding: gbk}\n- {path: b.jsonl, encoding: big5}\n"
    )
    result = batchloom.prepare(
        tmp_path / "sets.yaml", out=tmp_path / "out", tokenizer="bytes", dedup="none", val_fraction=0
    )
    assert read_texts(result.path)[:20] == CHINESE[:20]
    assert len(read_texts(result.path)) == 40


def test_the_spelling_of_an_encoding_is_no_other_job(tmp_path):
    (tmp_path / "a.txt").write_bytes("你好".encode("gbk"))
    options = {"out": tmp_path / "out", "tokenizer": "bytes", "val_fraction": 0}
    batchloom.prepare(tmp_path / "a.txt", encoding="GBK", **options)
    assert batchloom.prepare(tmp_path / "a.txt", encoding="gbk", **options).already_done


def test_half_a_character_of_utf16_is_quarantined(tmp_path):
    lines = make_files(CHINESE)["a.jsonl"].replace("你", "\ud800", 1)
    (tmp_path / "a.jsonl").write_bytes(lines.encode("utf-16-le", "surrogatepass"))
    result = prepare_store(tmp_path / "a.jsonl", tmp_path / "out", encoding="utf-16-le", dedup="none", val_fraction=0)
    assert result.counts.quarantined == 1
    assert read_texts(result.path) == CHINESE[1:]


LATE = "ascii " * 200_000 + "Café 你好世界\n"
# The named encoding, the bytes of a file, and its text.
OTHERS = {
    "ASCII beside UTF-16": ("utf-16-le", b"plain ASCII text here, even.", "plain ASCII text here, even."),
    "UTF-8 beside UTF-16": ("utf-16-le", "Café au lait!".encode(), "Café au lait!"),
    "ASCII beside UTF-16 with marks": ("utf-16", b"A plain note in ASCII.", "A plain note in ASCII."),
    "four characters": ("gb18030", "你好世界".encode(), "你好世界"),
    "two that fit both": ("gb18030", "Café au lait, naïve".encode(), "Caf茅 au lait, na茂ve"),
    "one that fits both": ("cp1252", b"CAF\xc9\x92S MENU", "CAFÉ\u2019S MENU"),
    "the first beyond ASCII is late": ("cp1252", LATE.encode(), LATE),
    "a late one of its own": ("gb18030", LATE.replace("é", "e").encode("gb18030"), LATE.replace("é", "e")),
    "an encoding of ASCII bytes": ("iso2022_jp", "日本語".encode("iso2022_jp"), "日本語"),
}  # fmt: skip


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("case", OTHERS)
def test_the_first_characters_beyond_ascii_decide(tmp_path, case, pack):
    encoding, data, expected = OTHERS[case]
    name = "a.txt" if pack is bytes else "a.txt.gz"
    (tmp_path / name).write_bytes(pack(data))
    options = {"encoding": encoding, "dedup": "none", "val_fraction": 0, "split_on": "file"}
    assert read_texts(prepare_store(tmp_path / name, tmp_path / "out", **options).path) == [expected]


@pytest.mark.parametrize("form", ["folder", "names", "tar"])
def test_the_encoding_of_a_tree_is_that_of_files_that_are_not_utf8(tmp_path, form):
    texts = ["un café", "CAF\u0252S MENU", "plain ASCII", "déjà vu"]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number}.txt").write_bytes(text.encode("cp1252" if number == 3 else "utf-8"))
    paths = {"folder": tmp_path / "in", "names": sorted((tmp_path / "in").iterdir()), "tar": tmp_path / "in.tar"}
    with tarfile.open(tmp_path / "in.tar", "w") as tar:
        tar.add(tmp_path / "in", "in")
    store = prepare_store(paths[form], tmp_path / "out", encoding="cp1252", val_fraction=0, max_bad=0).path
    assert sorted(read_texts(store)) == sorted(texts)


def test_a_file_in_another_encoding_is_left_out_of_a_folder(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(100):
        (tmp_path / "in" / f"{number}.txt").write_text("ASCII text ", encoding="utf-16-le")
    (tmp_path / "in/a.jsonl").write_bytes(make_files(FRENCH[:1])["a.jsonl"].encode("utf-16-le") + b"\n")
    with pytest.raises(InputError, match=r"a\.jsonl cannot be read as utf-16-le"):
        prepare_store(tmp_path / "in/a.jsonl", tmp_path / "out", encoding="utf-16-le")
    result = prepare_store(tmp_path / "in", tmp_path / "out", encoding="utf-16-le", allow_skipped=True, dedup="none")
    assert result.counts.documents == 100
    assert any("a.jsonl cannot be read as utf-16-le (" in note for note in result.notes)


def test_a_file_in_another_encoding_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(make_files(FRENCH)["a.jsonl"].encode("utf-16-le") + b"\n")
    with pytest.raises(
        InputError,
        match=r"a.jsonl cannot be read as utf-16-le \(.* truncated data\): give another --encoding, name its own",
    ):
        prepare_store(tmp_path / "a.jsonl", tmp_path / "out", encoding="utf-16-le")


@pytest.mark.parametrize("encoding", ["gb", "base64", "", "idna", "undefined", "a\0b"])
def test_an_unknown_encoding_is_refused(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(SettingsError, match="encoding: '.*' is no encoding of texts that Python knows; write one such"):
        prepare_store(tmp_path / "a.txt", tmp_path / "out", encoding=encoding)


def test_commands_and_streams_agree(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(make_files(CHINESE)["a.jsonl"].encode("gbk"))
    assert run_command(["doctor", str(path), "--tokenizer", "bytes"]).code == 1
    told = run_command(["doctor", str(path), "--tokenizer", "bytes", "--encoding", "gbk"])
    assert told.code == 0, told.err
    assert "你好" in told.out
    assert run_command(["check", str(path)]).code == 1
    assert run_command(["check", str(path), "--encoding", "gbk"]).code == 0
    words = [
        "train",
        "--input-file",
        str(path),
        "--tokenizer",
        "bytes",
        "--max-iters",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    assert run_command([*words, "--encoding", "gbk", "--seq-len", "64", "--global-batch-size", "2"]).code == 0
    convert(path, out=tmp_path / "b.jsonl", encoding="gbk")
    assert [json.loads(line)["text"] for line in (tmp_path / "b.jsonl").read_text().splitlines()] == CHINESE
    options = {"seq_len": 64, "global_batch_size": 2, "steps": 20, "tokenizer": "bytes", "workers": 0}
    rows = [
        row
        for batch in batchloom.Loader(batchloom.stream(path, encoding="gbk", **options))
        for row in batch["input_ids"]
    ]
    texts = [bytes(token for token in row.tolist() if token < 256).decode() for row in rows]
    assert len(texts) == 40
    assert set(texts) <= set(CHINESE)
