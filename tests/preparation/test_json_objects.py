"""Files of one JSON object each: records, or facts beside a data set."""

import json
import tarfile

import pytest

from batchloom.core.errors import InputError
from batchloom.preparation import convert
from preparation.stores import prepare_store, read_texts

SETTINGS = {"dedup": "none", "val_fraction": 0}


def write_objects(folder, rows, indent=None):
    folder.mkdir()
    for number, row in enumerate(rows):
        (folder / f"{number}.json").write_text(json.dumps(row, indent=indent))
    return folder


@pytest.mark.parametrize("indent", [None, 2])
def test_each_object_is_a_record(tmp_path, indent):
    """Also beside a text, and in an archive."""
    folder = write_objects(tmp_path / "in", [{"text": f"document {n}"} for n in range(12)], indent)
    expected = sorted(f"document {n}" for n in range(12))
    assert sorted(read_texts(prepare_store(folder, tmp_path / "a", **SETTINGS).path)) == expected
    with tarfile.open(tmp_path / "in.tar.gz", "w:gz") as archive:
        archive.add(folder, "in")
    assert sorted(read_texts(prepare_store(tmp_path / "in.tar.gz", tmp_path / "b", **SETTINGS).path)) == expected
    (folder / "notes.txt").write_text("a text")
    assert sorted(read_texts(prepare_store(folder, tmp_path / "c", **SETTINGS).path)) == ["a text", *expected]


def test_objects_without_text_are_left_out_and_counted(tmp_path):
    """Settings of a project beside its code."""
    folder = write_objects(tmp_path / "in", [{"name": "x", "version": 1}, {"compilerOptions": {}}])
    (folder / "main.py").write_text("print()")
    result = prepare_store(folder, tmp_path / "out", **SETTINGS)
    assert read_texts(result.path) == ["print()"]
    assert "Left out of in: 2 JSON objects without text." in result.notes
    (folder / "main.py").unlink()
    with pytest.raises(InputError, match="There is nothing to read. Left out of in: 2 JSON objects without text. Name"):
        prepare_store(folder, tmp_path / "out", **SETTINGS)
    assert read_texts(prepare_store(folder, tmp_path / "named", text_field="name", **SETTINGS).path) == ["x"]


def test_rows_of_any_columns_are_converted(tmp_path):
    folder = write_objects(tmp_path / "in", [{"id": n} for n in range(3)])
    convert(folder, out=tmp_path / "out.jsonl")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        {"id": n} for n in range(3)
    ]
