"""Files of tokenizers: names, end and bos tokens, settings, invalid files."""

import copy
import json
import random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from batchloom import BatchloomError, TokenizerError
from batchloom.tokens import resolve_tokenizer

from .conftest import encode_text, encode_with_reference, make_added_token, make_reference, write_json

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
}


def replace_end_token(base, *names, is_special=True):
    """Return ``base`` with its end token replaced by the tokens ``names``."""
    tokenizer_json = copy.deepcopy(base)
    first_id = tokenizer_json["added_tokens"][0]["id"]
    tokenizer_json["added_tokens"] = [
        make_added_token(name, first_id + i, is_special=is_special) for i, name in enumerate(names)
    ]
    return tokenizer_json


def write_tokenizer_folder(path, tokenizer, **files):
    write_json(path / "tokenizer.json", tokenizer)
    for name, value in files.items():
        write_json(path / f"{name}.json", value)
    return path


def test_a_file_and_its_folder_are_the_same_tokenizer(tmp_path, tokenizer_json, trained):
    path = write_tokenizer_folder(tmp_path / "mine", tokenizer_json)
    by_folder, by_file = (
        resolve_tokenizer(str(path)),
        resolve_tokenizer(str(path / "tokenizer.json")),
    )
    assert by_folder.fingerprint == by_file.fingerprint == trained.fingerprint
    assert (by_folder.name, by_file.name) == ("mine", "tokenizer.json")


def test_names_hold_no_paths(tmp_path, tokenizer_json, monkeypatch):
    path = write_tokenizer_folder(tmp_path / "mine", tokenizer_json)
    monkeypatch.chdir(path)
    for spec in (".", "./", f"{path}/", "../mine"):
        assert resolve_tokenizer(spec).name == "mine"


def test_the_tokenizer_of_a_store_can_be_reused(tmp_path, trained):
    write_json(tmp_path / "store" / "tokenizer_state.json", trained.state())
    resolved = resolve_tokenizer(str(tmp_path / "store"))
    assert (resolved.name, resolved.fingerprint) == (trained.name, trained.fingerprint)
    with pytest.raises(TokenizerError, match="whose end token is fixed"):
        resolve_tokenizer(str(tmp_path / "store"), end_token="</s>")


@pytest.mark.parametrize(
    ("names", "config", "end"),
    [
        (["<|endoftext|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}, "<|endoftext|>"),
        (["<|eot_id|>", "<|end_of_text|>"], {"eos_token": "<|eot_id|>"}, "<|end_of_text|>"),
        ([DEEPSEEK_END, "</s>"], {}, DEEPSEEK_END),
        (["</s>", "<stop>"], {"eos_token": "<stop>"}, "<stop>"),
        (["</s>", "<stop>"], {"eos_token": {"content": "<stop>", "lstrip": False}}, "<stop>"),
        (["<eos>", "<end_of_turn>"], {"eos_token": "<end_of_turn>"}, "<eos>"),
        (["<im>", "<end_of_turn>"], {"eos_token": "<end_of_turn>"}, "<end_of_turn>"),
        (["<pad>", "</s>"], {}, "</s>"),
        (["<pad>", "<|eos|>"], {"eos_token": "<not here>"}, "<|eos|>"),
    ],
)
def test_which_token_ends_a_document(tmp_path, tokenizer_json, names, config, end):
    path = write_tokenizer_folder(tmp_path / "t", replace_end_token(tokenizer_json, *names), tokenizer_config=config)
    tokenizer = resolve_tokenizer(str(path))
    assert tokenizer.decode([tokenizer.end_id]) == end
    chosen = resolve_tokenizer(str(path), end_token=names[0])
    assert chosen.decode([chosen.end_id]) == names[0]


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}}, "<|im_end|>"),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, "<|im_end|>"),
        ({}, "no file next to it names an eos_token"),
        ({"tokenizer_config": {"eos_token": None}}, "no file next to it names an eos_token"),
        ({"tokenizer_config": {"eos_token": 3}}, "no file next to it names an eos_token"),
        ({"tokenizer_config": {"eos_token": "<gone>"}}, "'<gone>' is not in its vocabulary"),
    ],
)
def test_the_config_chooses_the_end_token(tmp_path, tokenizer_json, files, end):
    tokenizer_json = replace_end_token(tokenizer_json, "<|endoftext|>", "<|im_end|>")
    path = write_tokenizer_folder(tmp_path / "t", tokenizer_json, **files)
    if not end.startswith("<"):
        with pytest.raises(TokenizerError, match="--end-token config is the eos_token of tokenizer_config.json") as it:
            resolve_tokenizer(str(path), end_token="config")
        assert end in str(it.value)
        return
    tokenizer = resolve_tokenizer(str(path), end_token="config")
    assert tokenizer.decode([tokenizer.end_id]) == end
    hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(path) if "tokenizer_config" in files else None
    assert hf_tokenizer is None or hf_tokenizer.eos_token_id == tokenizer.end_id


@pytest.mark.parametrize("spec", ["bytes", "gpt2"])
def test_a_built_in_tokenizer_has_no_config(spec, gpt2):
    with pytest.raises(TokenizerError, match="leave --end-token out"):
        resolve_tokenizer(spec, end_token="config")


def test_the_special_tokens_map_names_an_end_too(tmp_path, tokenizer_json):
    path = write_tokenizer_folder(
        tmp_path / "t",
        replace_end_token(tokenizer_json, "<a>", "<b>"),
        special_tokens_map={"eos_token": {"content": "<b>"}},
    )
    tokenizer = resolve_tokenizer(str(path))
    assert tokenizer.decode([tokenizer.end_id]) == "<b>"


def test_no_end_token_lists_special_tokens(tmp_path, tokenizer_json):
    path = write_tokenizer_folder(tmp_path / "t", replace_end_token(tokenizer_json, *(f"<t{i}>" for i in range(30))))
    with pytest.raises(TokenizerError) as caught:
        resolve_tokenizer(str(path))
    assert "pass --end-token; its special tokens are '<t0>', '<t1>'" in str(caught.value)
    assert "and 10 more" in str(caught.value)
    with pytest.raises(TokenizerError, match="it has no special tokens"):
        resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "u", replace_end_token(tokenizer_json))))


def test_text_cannot_spell_the_end_token(tmp_path, tokenizer_json):
    """If ``</s>`` were an ordinary added token, it would match inside documents."""
    path = write_tokenizer_folder(
        tmp_path / "t",
        replace_end_token(tokenizer_json, "</s>", is_special=False),
        tokenizer_config={"eos_token": "</s>"},
    )
    tokenizer = resolve_tokenizer(str(path))
    ids = encode_text(tokenizer, "a</s>b")
    assert tokenizer.end_id not in ids
    assert ids == encode_with_reference(make_reference(tokenizer), "a</s>b")


def test_ordinary_added_tokens_still_match(tmp_path, tokenizer_json):
    changed = replace_end_token(tokenizer_json, "<|endoftext|>", "<think>", "<x>")
    changed["added_tokens"][1]["special"] = False
    tokenizer = resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "t", changed)))
    think = changed["added_tokens"][1]["id"]
    ids = encode_text(tokenizer, "a<think>b<x>")
    assert ids.count(think) == 1
    assert ids == encode_with_reference(make_reference(tokenizer), "a<think>b<x>")


def test_bos_of_the_post_processor(tmp_path, tokenizer_json):
    changed = replace_end_token(tokenizer_json, "</s>", "<s>")
    number = changed["added_tokens"][1]["id"]
    tokens = {"<s>": {"id": "<s>", "ids": [number], "tokens": ["<s>"]}}
    template = TEMPLATE | {"special_tokens": tokens}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    for i, processor in enumerate(
        (
            template,
            {"type": "Sequence", "processors": [byte_level, template]},
            {
                "type": "RobertaProcessing",
                "sep": ["</s>", number - 1],
                "cls": ["<s>", number],
                "trim_offsets": True,
                "add_prefix_space": False,
            },
        )
    ):
        path = write_tokenizer_folder(tmp_path / str(i), changed | {"post_processor": processor})
        tokenizer = resolve_tokenizer(str(path))
        assert tokenizer.bos_id == number
        assert AutoTokenizer.from_pretrained(path)("a").input_ids[0] == number
        assert encode_text(tokenizer, "a") == [tokenizer.encode_batch(["a"])[0][0]]
    assert resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "none", changed))).bos_id is None


def test_bos_of_the_config(tmp_path, tokenizer_json):
    changed = replace_end_token(tokenizer_json, "</s>", "<s>")
    number = changed["added_tokens"][1]["id"]
    config_with_bos = {"bos_token": "<s>", "add_bos_token": True}
    for i, (config, bos) in enumerate(
        ((config_with_bos, number), (config_with_bos | {"add_bos_token": False}, None), ({"bos_token": "<s>"}, None))
    ):
        path = write_tokenizer_folder(tmp_path / str(i), changed, tokenizer_config=config)
        assert resolve_tokenizer(str(path)).bos_id == bos


def test_truncation_and_padding_are_removed(tmp_path, tokenizer_json, trained):
    """A saved truncation would silently cut every document."""
    changed = tokenizer_json | {
        "truncation": {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        },
    }
    tokenizer = resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "t", changed)))
    text = "the dog and the fox and the dog " * 20
    assert encode_text(tokenizer, text) == encode_text(trained, text)
    assert tokenizer.fingerprint == trained.fingerprint
    assert tokenizer.state()["tokenizer"]["truncation"] is None


def test_dropout_is_refused(tmp_path, tokenizer_json):
    tokenizer_json["model"]["dropout"] = 0.1
    with pytest.raises(TokenizerError, match="sets BPE dropout 0.1: the ids of a text would be random"):
        resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "t", tokenizer_json)))
    tokenizer_json["model"]["dropout"] = 0.0
    resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "t", tokenizer_json)))


def test_added_tokens_of_the_config_are_those_transformers_adds(tmp_path, tokenizer_json):
    first_id = tokenizer_json["added_tokens"][0]["id"]
    flags = {key: value for key, value in make_added_token("", 0).items() if key not in ("id", "content")}
    changed = copy.deepcopy(tokenizer_json)
    changed["added_tokens"].append(make_added_token("<quiet>", first_id + 1, is_special=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(first_id): flags | {"content": "<|endoftext|>"},
            str(first_id + 1): flags | {"content": "<quiet>", "special": True},
            str(first_id + 2): flags | {"content": "<think>", "special": False},
            str(first_id + 3): flags | {"content": "<pad>"},
        },
    }
    path = write_tokenizer_folder(tmp_path / "t", changed, tokenizer_config=config)
    tokenizer = resolve_tokenizer(str(path))
    oracle = AutoTokenizer.from_pretrained(path)
    text = "a<think>b<pad>c<quiet>d<|endoftext|>e"
    assert encode_text(tokenizer, text) == oracle(text, split_special_tokens=True, add_special_tokens=False).input_ids
    assert tokenizer.vocab_size == len(oracle) == first_id + 4


@pytest.mark.parametrize("spelling", ["strings", "no defaults", "offsets", "flags"])
def test_two_spellings_of_a_tokenizer_have_one_fingerprint(tmp_path, tokenizer_json, trained, spelling):
    model = tokenizer_json["model"]
    if spelling == "strings":
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    elif spelling == "no defaults":
        tokenizer_json["model"] = {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"]}
    elif spelling == "offsets":
        tokenizer_json["pre_tokenizer"]["trim_offsets"] = not tokenizer_json["pre_tokenizer"]["trim_offsets"]
        tokenizer_json["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    else:
        tokenizer_json["added_tokens"][0] |= {"lstrip": True, "normalized": True}
    assert (
        resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "t", tokenizer_json))).fingerprint
        == trained.fingerprint
    )


@pytest.mark.parametrize("change", ["merges", "prefix", "normalizer", "added", "end", "vocab"])
def test_changes_of_ids_change_the_fingerprint(tmp_path, tokenizer_json, trained, change):
    end_token = None
    if change == "merges":
        tokenizer_json["model"]["merges"].reverse()
    elif change == "prefix":
        tokenizer_json["pre_tokenizer"]["add_prefix_space"] = True
    elif change == "normalizer":
        tokenizer_json["normalizer"] = {"type": "NFC"}
    elif change == "added":
        tokenizer_json["added_tokens"].append(make_added_token("<x>", tokenizer_json["added_tokens"][0]["id"] + 1))
    elif change == "end":
        end_token = next(iter(tokenizer_json["model"]["vocab"]))
    else:
        vocab = tokenizer_json["model"]["vocab"]
        vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    tokenizer = resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "t", tokenizer_json)), end_token=end_token)
    assert tokenizer.fingerprint != trained.fingerprint
    assert (tokenizer.vocabulary_hash != trained.vocabulary_hash) == (change in ("added", "vocab"))


def test_bad_files_get_one_sentence(tmp_path, tokenizer_json):
    cases = {
        "text": (b"hello", "is not JSON"),
        "latin": (b'{"model": "\xe9"}', "is not JSON"),
        "deep": (b"[" * 5000, "is not JSON"),
        "list": (b"[1]", "holds a list"),
        "config": (b'{"eos_token": "</s>"}', "has no model with a vocabulary"),
        "nothing": (b"{}", "has no model with a vocabulary"),
        "empty": (
            json.dumps(
                tokenizer_json | {"model": tokenizer_json["model"] | {"vocab": {}}, "added_tokens": []}
            ).encode(),
            "is empty",
        ),
        "minus": (
            json.dumps(tokenizer_json | {"model": tokenizer_json["model"] | {"vocab": {"a": -1}}}).encode(),
            "token 'a' has id -1",
        ),
        "huge": (
            json.dumps(tokenizer_json | {"model": tokenizer_json["model"] | {"vocab": {"a": 2**40}}}).encode(),
            "token 'a' has id",
        ),
        "twice": (
            json.dumps(tokenizer_json | {"added_tokens": [make_added_token("<|endoftext|>", 0)]}).encode(),
            "has id 0 in the file",
        ),
        "two": (
            json.dumps(tokenizer_json | {"added_tokens": [make_added_token("!", 5)]}).encode(),
            "has id 5 in the file, and tokenizers gives it 0",
        ),
        "junk": (
            json.dumps(tokenizer_json | {"added_tokens": [7]}).encode(),
            "an added token without content: 7",
        ),
    }
    for name, (content, sentence) in cases.items():
        path = tmp_path / f"{name}.json"
        path.write_bytes(content)
        with pytest.raises(TokenizerError) as caught:
            resolve_tokenizer(str(path))
        assert sentence in str(caught.value), name
        assert f"{name}.json" in str(caught.value)


def test_ids_that_tokenizers_would_renumber_are_refused(tmp_path, tokenizer_json):
    tokenizer_json["added_tokens"].append(make_added_token("<far>", 5000))
    with pytest.raises(TokenizerError, match="'<far>' has id 5000 in the file, and tokenizers gives it"):
        resolve_tokenizer(str(write_tokenizer_folder(tmp_path / "t", tokenizer_json)))


def test_folders_without_a_tokenizer_json_are_refused_with_their_files(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vocab.json").write_text("{}")
    (tmp_path / "old" / "merges.txt").write_text("")
    with pytest.raises(TokenizerError, match=r"no tokenizer.json, only vocab.json, merges.txt: .* save_pretrained"):
        resolve_tokenizer(str(tmp_path / "old"))
    with pytest.raises(
        TokenizerError,
        match=r"there is no file .*tokeniser.json; did you mean 'old'|there is no file",
    ):
        resolve_tokenizer(str(tmp_path / "tokeniser.json"))


def test_a_mistyped_file_gets_a_suggestion(tmp_path, tokenizer_json):
    write_json(tmp_path / "tokenizer.json", tokenizer_json)
    with pytest.raises(TokenizerError, match="did you mean '.*/tokenizer.json'"):
        resolve_tokenizer(str(tmp_path / "tokenzier.json"))


@pytest.mark.parametrize("share", [0.1, pytest.param(0.4, marks=pytest.mark.slow)])
def test_a_damaged_file_gives_ids_or_an_error(tmp_path, tokenizer_json, share):
    """A file with any value replaced by junk gives ids or a BatchloomError."""
    tokenizer_json["model"]["merges"] = tokenizer_json["model"]["merges"][:20]
    merged_tokens = {part for pair in tokenizer_json["model"]["merges"] for part in (*pair, "".join(pair))}
    tokens = [token for token in tokenizer_json["model"]["vocab"] if len(token) == 1 or token in merged_tokens]
    tokenizer_json["model"]["vocab"] = {token: number for number, token in enumerate(tokens)}
    tokenizer_json["added_tokens"] = [
        make_added_token("<|endoftext|>", len(tokens)),
        make_added_token("<x>", len(tokens) + 1, is_special=False),
    ]
    tokenizer_json["post_processor"] = TEMPLATE
    rng = random.Random(0)
    key_paths = []

    def walk(value, key_path):
        key_paths.append(key_path)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            if key_path[:2] != ("model", "vocab") and key_path[:2] != ("model", "merges"):
                walk(item, (*key_path, key))

    walk(tokenizer_json, ())
    key_paths += [("model", "vocab", "a"), ("model", "merges", 3), ("model", "merges", 3, 0)]
    count = 0
    for key_path in key_paths[1:]:
        for junk in (
            None,
            True,
            -1,
            2**70,
            0.5,
            "x",
            "",
            [],
            {},
            [[]],
            [None],
            {"type": "x"},
            {"a": 1},
        ):
            if rng.random() > share:
                continue
            changed = copy.deepcopy(tokenizer_json)
            parent = changed
            for key in key_path[:-1]:
                parent = parent[key]
            parent[key_path[-1]] = junk
            path = write_json(tmp_path / "t.json", changed)
            count += 1
            try:
                tokenizer = resolve_tokenizer(str(path))
                ids = tokenizer.encode_batch(["ab <|endoftext|> <x>"])[0]
                assert ids.max(initial=0) < tokenizer.vocab_size
                tokenizer.decode(ids)
            except BatchloomError:
                pass
    assert count > 500 * share
