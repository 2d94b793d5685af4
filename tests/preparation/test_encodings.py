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
    assert json.loads((result.path / "quarantine.jsonl").read_text())["line"] == 8


def test_a_file_in_another_encoding_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(make_files(FRENCH)["a.jsonl"].encode("utf-16-le") + b"\n")
    with pytest.raises(InputError, match=r"a.jsonl cannot be read as utf-16-le \(truncated data\): give another --enc"):
        prepare_store(tmp_path / "a.jsonl", tmp_path / "out", encoding="utf-16-le")


@pytest.mark.parametrize("encoding", ["gb", "base64", ""])
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
