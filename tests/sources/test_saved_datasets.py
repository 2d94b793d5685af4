"""Folders of datasets.save_to_disk: the order of data files, and splits."""

import json

import pyarrow as pa
import pytest

from batchloom import InputError
from batchloom.core.errors import InputMissingError
from sources.source_reading import read_inputs


def save_dataset(folder, rows, shards=2):
    """Write a folder as save_to_disk does: IPC streams and two JSON files."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        table = pa.Table.from_pylist(rows[i::shards])
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as out,
        ):
            out.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names[::-1]], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


ROWS = [{"text": f"row {i}"} for i in range(20)]


def test_the_files_come_in_the_order_of_the_state(tmp_path):
    folder = save_dataset(tmp_path / "set", ROWS)
    (folder / "cache-0.arrow").write_bytes(b"left by map()")
    result = read_inputs(folder)
    assert result.values == ROWS[1::2] + ROWS[::2]
    assert [source.name for source in result.sources] == [
        "set/data-00001-of-00002.arrow",
        "set/data-00000-of-00002.arrow",
    ]


def test_the_train_split_is_read_unless_another_is_named(tmp_path):
    folder = tmp_path / "set"
    save_dataset(folder / "train", ROWS[:10], 1)
    save_dataset(folder / "test", ROWS[10:], 1)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    result = read_inputs(folder)
    assert result.values == ROWS[:10]
    [note] = result.notes
    assert note.startswith(f"Split train of the saved dataset {folder} is read, and not test (--input-split NAME")
    assert read_inputs(folder / "test").values == ROWS[10:]
    # The same applies to a saved dataset in a folder of other inputs.
    (tmp_path / "a.jsonl").write_text('{"text": "first"}')
    assert read_inputs(tmp_path).values == [{"text": "first"}, *ROWS[:10]]
    (folder / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(InputError, match=f"holds the splits a, b; name one, for example {folder}/a"):
        read_inputs(folder)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("{", "state.json is not JSON"),
        ("{}", "does not name its data files"),
        ('{"_data_files": [{"filename": "../../secret.arrow"}]}', "does not name its data files"),
        (
            '{"_data_files": [{"filename": "x"}], "_indices_data_files": [1]}',
            "after flatten_indices",
        ),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, state, sentence):
    folder = save_dataset(tmp_path / "set", ROWS)
    (folder / "state.json").write_text(state)
    with pytest.raises(InputError, match=sentence):
        read_inputs(folder)


def test_a_missing_data_file_is_named(tmp_path):
    folder = save_dataset(tmp_path / "set", ROWS)
    (folder / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(InputMissingError, match="data-00000-of-00002.arrow is missing: the saved"):
        read_inputs(folder)
    (folder / "dataset_dict.json").write_text('{"splits": ["../.."]}')
    with pytest.raises(InputError, match="names no splits"):
        read_inputs(folder)
