"""Commands and options that errors suggest: each mends the input that caused it."""

import json
import re
import shlex
import shutil
import subprocess

import pytest

from batchloom import InputError, open_store
from golden.interface import run_command
from preparation.stores import prepare_store, read_texts, write_jsonl

TEXTS = [f"你好世界这是第{n}个文件。" for n in range(6)]
FRENCH = [f"Café à l\u2019été, déjà vu {n}" for n in range(6)]

OPTION = re.compile(r"--(?:map|text-field|ignore)\b [^'\s;)]*(?:'[^']*')?")
CONVERSATION = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
PAIR = {"prompt": "a?", "chosen": "b.", "rejected": "c."}
TURNS = {"prompt": "a?", "response": "b."}
RESPONSE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b."}]}
CALL = {"role": "assistant", "content": "c", "function_call": {"name": "f", "arguments": "{}"}}
SMALL_IMAGE = [{"role": "user", "content": [{"type": "text", "text": "a?", "min_pixels": 3}]}, CONVERSATION[1]]
FUNCTION = {"type": "function", "function": {"name": "f"}}
# Records that are refused, and the options of the error that read them.
REFUSED = [
    ({"txet": "b.", "n": 1}, "--map text=txet"),
    ({"body": "b.", "x": "c"}, "--map text=body"),
    ({"data": {"text": "b."}}, "--map text=data.text"),
    ({"text by page": ["b.", "c."], "id": "1"}, "--map 'text=text by page[]'"),
    ({"pages": ["b.", "c."]}, "--map 'text=pages[]'"),
    ({"pages": [{"text": "b."}, {"text": "c."}]}, "--map 'text=pages[].text'"),
    ({"pages": [{"words": "b.", "number": 1}]}, "--map 'text=pages[].words'"),
    ({"response": "b."}, "--map response=response"),
    ({"dialog": CONVERSATION}, "--map messages=dialog"),
    ({"question_text": "a?", "answer_text": "b."}, "--map prompt=question_text,response=answer_text"),
    (
        {"question": "a?", "good_answer": "b.", "bad_answer": "c."},
        "--map chosen=good_answer,rejected=bad_answer,prompt=question",
    ),
    ({"input": [CONVERSATION[0]], "output": [RESPONSE]}, "--map prompt=input,response=output"),
    ({"messages": CONVERSATION, "chosen": "b", "rejected": "c"}, "--ignore chosen,rejected"),
    ({"messages": CONVERSATION, "loss_scale": [0.0, 2.0]}, "--ignore loss_scale"),
    ({"messages": CONVERSATION, "functions": [{"name": "f"}]}, "--ignore functions"),
    ({"messages": CONVERSATION, "segments": [{"text": "b.", "label": True}]}, "--map segments=segments"),
    ({"messages": CONVERSATION, "label": "good"}, "--ignore label"),
    ({"messages": CONVERSATION, "mask": "assistant"}, "--ignore mask"),
    ({"messages": CONVERSATION, "history": [["a", "b"]]}, "--ignore history"),
    ({"messages": CONVERSATION, "objects": {"ref": ["x"]}}, "--ignore objects"),
    ({"messages": CONVERSATION, "negative_messages": [CONVERSATION]}, "--ignore negative_messages"),
    ({"messages": CONVERSATION, "rejected_images": ["x.png"]}, "--ignore rejected_images"),
    ({"messages": [CONVERSATION[0], CALL, *CONVERSATION]}, "--ignore function_call"),
    ({"messages": SMALL_IMAGE}, "--ignore min_pixels"),
    ({**TURNS, "tools": [FUNCTION]}, "--map tools=tools"),
    ({**TURNS, "system": ["x"]}, "--map system="),
    ({**TURNS, "context": ["x", "y"]}, "--map context="),
    ({**PAIR, "margin": 0.5}, "--ignore margin"),
    ({**PAIR, "weight": 0.5}, "--ignore weight"),
    ({"input_ids": [98, 46], "completion_mask": [0, 1]}, "--map input_ids=input_ids,loss_mask=completion_mask"),
    ({"input_ids": [98, 46], "assistant_masks": [0, 1]}, "--map input_ids=input_ids,loss_mask=assistant_masks"),
    ({"input_ids": [98, 46], "position_ids": [0, 0]}, "--ignore position_ids"),
]  # fmt: skip


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
    assert f"--encoding {name}" in reason or "--encoding ENCODING" in reason
    options = {"encoding": name, "dedup": "none", "val_fraction": 0}
    mended = read_texts(prepare_store(tmp_path / "in.jsonl", tmp_path / "mended", **options).path)
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


@pytest.mark.parametrize(("record", "options"), REFUSED)
def test_suggested_options_read_the_records(tmp_path, record, options):
    write_jsonl(tmp_path / "in.jsonl", [record] * 4)
    words = [
        *("prepare", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"),
        *("--template", "plain", "--dedup", "none", "--val-fraction", "0", "--workers", "1"),
    ]
    refusal = run_command(words)
    assert refusal.code == 1
    suggested = [option.rstrip(",.") for option in OPTION.findall(refusal.err) if "..." not in option]
    assert suggested[0] == options
    result = run_command([*words, "--max-bad", "0", *shlex.split(options)])
    assert result.code == 0, result.err
    store = open_store(tmp_path / "out")
    texts = [bytes(n for n in document.ids if n < 256).decode() for document in store]
    assert sum("b." in text for text in texts) == 4


def test_of_several_strings_none_is_suggested(tmp_path):
    said = [{"speaker": "user", "words": "a?"}, {"speaker": "bot", "words": "b."}]
    assert "said[].speaker, said[].words (--map text=PATH joins" in get_reason(
        tmp_path, json.dumps({"said": said}).encode()
    )
