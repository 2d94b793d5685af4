"""Commands that errors suggest: each mends the input that caused it."""

import json
import re
import shlex
import shutil
import subprocess

import pytest

from batchloom import InputError
from preparation.stores import prepare_store, read_texts

TEXTS = [f"你好世界这是第{n}个文件。" for n in range(6)]
FRENCH = [f"Café à l\u2019été, déjà vu {n}" for n in range(6)]


def write_lines(texts, encoding="utf-8"):
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode(encoding)


def get_reason(folder, data):
    (folder / "in.jsonl").write_bytes(data)
    with pytest.raises(InputError) as caught:
        prepare_store(folder / "in.jsonl", folder / "out")
    return str(caught.value)


def mend(folder, command):
    """Run a suggested command on the input and return the texts of a store of its output."""
    words = [str(folder / "in.jsonl") if word == "FILE" else word for word in shlex.split(command)]
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    if str(folder / "in.jsonl") not in words:
        words.append(str(folder / "in.jsonl"))
    mended = subprocess.run(words, capture_output=True, check=True).stdout
    (folder / "mended.jsonl").write_bytes(mended)
    return read_texts(prepare_store(folder / "mended.jsonl", folder / "mended", dedup="none", val_fraction=0).path)


@pytest.mark.parametrize(
    ("texts", "encoding", "word"), [(TEXTS, "gb18030", "你好世界这是第"), (FRENCH, "cp1252", "Café")]
)
def test_the_reading_that_is_right_names_the_encoding(tmp_path, texts, encoding, word):
    reason = get_reason(tmp_path, write_lines(texts, encoding))
    name = re.search(rf"(\w+) reads {word}", reason)[1]
    command = re.search(r"with: (iconv .*? UTF-8)", reason)[1].replace("ENCODING", name)
    mended = mend(tmp_path, command)
    assert mended == texts if encoding == "gb18030" else word in mended[0]


def test_objects_over_several_lines(tmp_path):
    data = "\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS)
    reason = get_reason(tmp_path, data.encode())
    assert mend(tmp_path, re.search(r"one object per line with: (jq -c \. FILE)", reason)[1]) == TEXTS


def test_commas_behind_lines(tmp_path):
    reason = get_reason(tmp_path, write_lines(TEXTS).replace(b"\n", b",\n"))
    assert mend(tmp_path, re.search(r"remove it with: (sed .*? FILE)", reason)[1]) == TEXTS


def test_marks_between_concatenated_files_are_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "in.jsonl").write_bytes(mark + write_lines(TEXTS[:3]) + mark + write_lines(TEXTS[3:]))
    result = prepare_store(tmp_path / "in.jsonl", tmp_path / "out", dedup="none", val_fraction=0, max_bad=0)
    assert read_texts(result.path) == TEXTS
