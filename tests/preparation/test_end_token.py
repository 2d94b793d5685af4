"""The token that ends plain documents: which one, why, and the notes about it."""

import json

import pytest

import batchloom
from batchloom.tokens import resolve_tokenizer, train_tokenizer
from preparation.stores import write_jsonl

# Published instruct tokenizers: the end of texts in the vocabulary, and the eos_token of the config.
PUBLISHED = {"qwen3": ("<|endoftext|>", "<|im_end|>"), "llama3_1": ("<|end_of_text|>", "<|eot_id|>")}
TEXTS = [{"text": "a first text"}, {"text": "and a second one"}]
QUESTIONS = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?", "answer": "4"}]
OTHER_EOS = (
    "Plain documents end with '<|endoftext|>' (id 260), which ends texts in this vocabulary. The eos_token of "
    "tokenizer_config.json is '<|im_end|>', which TRL and Megatron append (--end-token config)."
)
CONFIG_EOS = (
    "Plain documents end with '<|im_end|>' (id 261), the eos_token of tokenizer_config.json (--end-token config)."
)
CHOSEN = (
    "Plain documents end with '<|endoftext|>' (id 260), as --end-token says. The eos_token of tokenizer_config.json "
    "is '<|im_end|>', which TRL and Megatron append (--end-token config)."
)


@pytest.fixture(scope="module")
def definition():
    """Definition of a tokenizer with a token for the end of a chat turn."""
    definition = train_tokenizer(["a first text, a second text"], 300).state()["tokenizer"]
    (end,) = definition["added_tokens"]
    definition["added_tokens"].append({**end, "content": "<|im_end|>", "id": end["id"] + 1})
    return definition


@pytest.fixture
def folder(tmp_path, definition):
    """Folder of a tokenizer whose config names the end of a chat turn."""
    path = tmp_path / "instruct"
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(definition))
    write_config(path, "<|im_end|>")
    return path


def write_config(folder, eos_token):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))


@pytest.mark.parametrize(
    ("rows", "end_token", "eos_token", "note"),
    [
        (TEXTS, None, "<|im_end|>", OTHER_EOS),
        (TEXTS, "config", "<|im_end|>", CONFIG_EOS),
        (TEXTS, "<|endoftext|>", "<|im_end|>", CHOSEN),
        (TEXTS, None, "<|endoftext|>", None),
        # A template writes the end of conversations.
        (QUESTIONS, None, "<|im_end|>", None),
    ],
)
def test_one_line_says_which_token_ends_documents(tmp_path, folder, rows, end_token, eos_token, note):
    write_config(folder, eos_token)
    write_jsonl(tmp_path / "in.jsonl", rows)
    options = {"tokenizer": str(folder), "end_token": end_token}
    result = batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", val_fraction=0, **options)
    found = batchloom.doctor(tmp_path / "in.jsonl", **options)
    for lines in (result.notes, found.warnings):
        assert [line for line in lines if line.startswith("Plain documents end")] == [note] * (note is not None)
    store = batchloom.open_store(result.path)
    if rows is TEXTS:
        end = eos_token if end_token == "config" else "<|endoftext|>"
        assert store[0].text == f"a first text{end}"
    assert store.manifest.recipe["end_token"] == end_token


def test_the_choice_is_part_of_the_recipe_and_survives_an_append(tmp_path, folder):
    write_jsonl(tmp_path / "in.jsonl", TEXTS)
    write_jsonl(tmp_path / "more.jsonl", [{"text": "a third text"}])
    out = tmp_path / "out"
    batchloom.prepare(tmp_path / "in.jsonl", out=out, val_fraction=0, tokenizer=str(folder), end_token="config")
    result = batchloom.prepare(tmp_path / "more.jsonl", out=out, append=True)
    assert CONFIG_EOS in result.notes
    store = batchloom.open_store(out)
    assert [store[number].text for number in range(3)] == [
        *(f"{row['text']}<|im_end|>" for row in TEXTS),
        "a third text<|im_end|>",
    ]


@pytest.mark.parametrize("end_token", ["config", "</s>"])
def test_a_learned_tokenizer_has_one_end_token(tmp_path, end_token):
    write_jsonl(tmp_path / "in.jsonl", TEXTS)
    with pytest.raises(batchloom.InputError, match=f"train:300 has one control token, .* and not '{end_token}'"):
        batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "out", tokenizer="train:300", end_token=end_token)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_instruct_tokenizers(real_tokenizers, name):
    folders = [path.parent for path in real_tokenizers.rglob("tokenizer.json") if name in str(path)]
    if not folders:
        pytest.skip(f"BATCHLOOM_REAL_TOKENIZERS has no {name}")
    tokenizers = [resolve_tokenizer(str(folders[0]), end_token=end) for end in (None, "config")]
    assert tuple(tokenizer.decode([tokenizer.end_id]) for tokenizer in tokenizers) == PUBLISHED[name]
