"""A tokenizer.json and what lies beside it: names, end and bos tokens, traps, bad files."""

import copy
import json
import random

import pytest
from transformers import AutoTokenizer

from batchloom import BatchloomError, TokenizerError
from batchloom.tokens import resolve_tokenizer

from .conftest import encoded, expected, reference, special, write_json

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
}


def with_tokens(base, *names, is_special=True):
    """``base`` with its end token replaced by the tokens ``names``."""
    changed = copy.deepcopy(base)
    first = changed["added_tokens"][0]["id"]
    changed["added_tokens"] = [special(name, first + i, is_special=is_special) for i, name in enumerate(names)]
    return changed


def folder(path, tokenizer, **files):
    write_json(path / "tokenizer.json", tokenizer)
    for name, value in files.items():
        write_json(path / f"{name}.json", value)
    return path


def test_a_file_and_its_folder_are_the_same_tokenizer(tmp_path, small, trained):
    path = folder(tmp_path / "mine", small)
    by_folder, by_file = (
        resolve_tokenizer(str(path)),
        resolve_tokenizer(str(path / "tokenizer.json")),
    )
    assert by_folder.fingerprint == by_file.fingerprint == trained.fingerprint
    assert (by_folder.name, by_file.name) == ("mine", "tokenizer.json")


def test_names_hold_no_paths(tmp_path, small, monkeypatch):
    path = folder(tmp_path / "mine", small)
    monkeypatch.chdir(path)
    for spec in (".", "./", f"{path}/", "../mine"):
        assert resolve_tokenizer(spec).name == "mine"


def test_a_store_s_tokenizer_can_be_used_again(tmp_path, trained):
    write_json(tmp_path / "store" / "tokenizer_state.json", trained.state())
    again = resolve_tokenizer(str(tmp_path / "store"))
    assert (again.name, again.fingerprint) == (trained.name, trained.fingerprint)
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
def test_which_token_ends_a_document(tmp_path, small, names, config, end):
    path = folder(tmp_path / "t", with_tokens(small, *names), tokenizer_config=config)
    tokenizer = resolve_tokenizer(str(path))
    assert tokenizer.decode([tokenizer.end_id]) == end
    asked = resolve_tokenizer(str(path), end_token=names[0])
    assert asked.decode([asked.end_id]) == names[0]


def test_the_special_tokens_map_names_an_end_too(tmp_path, small):
    path = folder(
        tmp_path / "t",
        with_tokens(small, "<a>", "<b>"),
        special_tokens_map={"eos_token": {"content": "<b>"}},
    )
    tokenizer = resolve_tokenizer(str(path))
    assert tokenizer.decode([tokenizer.end_id]) == "<b>"


def test_no_end_token_lists_what_there_is(tmp_path, small):
    path = folder(tmp_path / "t", with_tokens(small, *(f"<t{i}>" for i in range(30))))
    with pytest.raises(TokenizerError) as caught:
        resolve_tokenizer(str(path))
    assert "pass --end-token; its special tokens are '<t0>', '<t1>'" in str(caught.value)
    assert "and 10 more" in str(caught.value)
    with pytest.raises(TokenizerError, match="it has no special tokens"):
        resolve_tokenizer(str(folder(tmp_path / "u", with_tokens(small))))


def test_text_cannot_spell_the_end_token_even_where_the_file_lets_it(tmp_path, small):
    """</s> declared as an ordinary added token would match inside documents."""
    path = folder(
        tmp_path / "t",
        with_tokens(small, "</s>", is_special=False),
        tokenizer_config={"eos_token": "</s>"},
    )
    tokenizer = resolve_tokenizer(str(path))
    ids = encoded(tokenizer, "a</s>b")
    assert tokenizer.end_id not in ids
    assert ids == expected(reference(tokenizer), "a</s>b")


def test_ordinary_added_tokens_still_match(tmp_path, small):
    changed = with_tokens(small, "<|endoftext|>", "<think>", "<x>")
    changed["added_tokens"][1]["special"] = False
    tokenizer = resolve_tokenizer(str(folder(tmp_path / "t", changed)))
    think = changed["added_tokens"][1]["id"]
    ids = encoded(tokenizer, "a<think>b<x>")
    assert ids.count(think) == 1
    assert ids == expected(reference(tokenizer), "a<think>b<x>")


def test_bos_is_what_the_post_processor_puts_first(tmp_path, small):
    changed = with_tokens(small, "</s>", "<s>")
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
        path = folder(tmp_path / str(i), changed | {"post_processor": processor})
        tokenizer = resolve_tokenizer(str(path))
        assert tokenizer.bos_id == number
        assert AutoTokenizer.from_pretrained(path)("a").input_ids[0] == number
        assert encoded(tokenizer, "a") == [tokenizer.encode_batch(["a"])[0][0]]
    assert resolve_tokenizer(str(folder(tmp_path / "none", changed))).bos_id is None


def test_bos_is_what_the_config_asks_for(tmp_path, small):
    changed = with_tokens(small, "</s>", "<s>")
    number = changed["added_tokens"][1]["id"]
    wanted = {"bos_token": "<s>", "add_bos_token": True}
    for i, (config, bos) in enumerate(
        ((wanted, number), (wanted | {"add_bos_token": False}, None), ({"bos_token": "<s>"}, None))
    ):
        path = folder(tmp_path / str(i), changed, tokenizer_config=config)
        assert resolve_tokenizer(str(path)).bos_id == bos


def test_truncation_and_padding_are_taken_out(tmp_path, small, trained):
    """The famous silent bug: every document cut to the length of the file's last use."""
    changed = small | {
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
    tokenizer = resolve_tokenizer(str(folder(tmp_path / "t", changed)))
    text = "the dog and the fox and the dog " * 20
    assert encoded(tokenizer, text) == encoded(trained, text)
    assert tokenizer.fingerprint == trained.fingerprint
    assert tokenizer.state()["tokenizer"]["truncation"] is None


def test_dropout_is_refused(tmp_path, small):
    small["model"]["dropout"] = 0.1
    with pytest.raises(TokenizerError, match="sets BPE dropout 0.1: the ids of a text would be random"):
        resolve_tokenizer(str(folder(tmp_path / "t", small)))
    small["model"]["dropout"] = 0.0
    resolve_tokenizer(str(folder(tmp_path / "t", small)))


def test_added_tokens_of_the_config_are_those_transformers_adds(tmp_path, small):
    first = small["added_tokens"][0]["id"]
    flags = {key: value for key, value in special("", 0).items() if key not in ("id", "content")}
    changed = copy.deepcopy(small)
    changed["added_tokens"].append(special("<quiet>", first + 1, is_special=False))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {
            str(first): flags | {"content": "<|endoftext|>"},
            str(first + 1): flags | {"content": "<quiet>", "special": True},
            str(first + 2): flags | {"content": "<think>", "special": False},
            str(first + 3): flags | {"content": "<pad>"},
        },
    }
    path = folder(tmp_path / "t", changed, tokenizer_config=config)
    tokenizer = resolve_tokenizer(str(path))
    oracle = AutoTokenizer.from_pretrained(path)
    text = "a<think>b<pad>c<quiet>d<|endoftext|>e"
    assert encoded(tokenizer, text) == oracle(text, split_special_tokens=True, add_special_tokens=False).input_ids
    assert tokenizer.vocab_size == len(oracle) == first + 4


@pytest.mark.parametrize("spelling", ["strings", "no defaults", "offsets", "flags"])
def test_two_spellings_of_a_tokenizer_have_one_fingerprint(tmp_path, small, trained, spelling):
    model = small["model"]
    if spelling == "strings":
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    elif spelling == "no defaults":
        small["model"] = {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"]}
    elif spelling == "offsets":
        small["pre_tokenizer"]["trim_offsets"] = not small["pre_tokenizer"]["trim_offsets"]
        small["post_processor"] = {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        }
    else:
        small["added_tokens"][0] |= {"lstrip": True, "normalized": True}
    assert resolve_tokenizer(str(folder(tmp_path / "t", small))).fingerprint == trained.fingerprint


@pytest.mark.parametrize("change", ["merges", "prefix", "normalizer", "added", "end", "vocab"])
def test_what_changes_ids_changes_the_fingerprint(tmp_path, small, trained, change):
    end_token = None
    if change == "merges":
        small["model"]["merges"].reverse()
    elif change == "prefix":
        small["pre_tokenizer"]["add_prefix_space"] = True
    elif change == "normalizer":
        small["normalizer"] = {"type": "NFC"}
    elif change == "added":
        small["added_tokens"].append(special("<x>", small["added_tokens"][0]["id"] + 1))
    elif change == "end":
        end_token = next(iter(small["model"]["vocab"]))
    else:
        vocab = small["model"]["vocab"]
        vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    tokenizer = resolve_tokenizer(str(folder(tmp_path / "t", small)), end_token=end_token)
    assert tokenizer.fingerprint != trained.fingerprint
    assert (tokenizer.vocabulary_hash != trained.vocabulary_hash) == (change in ("added", "vocab"))


def test_bad_files_get_one_sentence(tmp_path, small):
    cases = {
        "text": (b"hello", "is not JSON"),
        "latin": (b'{"model": "\xe9"}', "is not JSON"),
        "deep": (b"[" * 5000, "is not JSON"),
        "list": (b"[1]", "holds a list"),
        "config": (b'{"eos_token": "</s>"}', "has no model with a vocabulary"),
        "nothing": (b"{}", "has no model with a vocabulary"),
        "empty": (
            json.dumps(small | {"model": small["model"] | {"vocab": {}}, "added_tokens": []}).encode(),
            "is empty",
        ),
        "minus": (
            json.dumps(small | {"model": small["model"] | {"vocab": {"a": -1}}}).encode(),
            "token 'a' has id -1",
        ),
        "huge": (
            json.dumps(small | {"model": small["model"] | {"vocab": {"a": 2**40}}}).encode(),
            "token 'a' has id",
        ),
        "twice": (
            json.dumps(small | {"added_tokens": [special("<|endoftext|>", 0)]}).encode(),
            "has id 0 in the file",
        ),
        "two": (
            json.dumps(small | {"added_tokens": [special("!", 5)]}).encode(),
            "has id 5 in the file, and tokenizers gives it 0",
        ),
        "junk": (
            json.dumps(small | {"added_tokens": [7]}).encode(),
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


def test_ids_that_tokenizers_would_renumber_are_refused(tmp_path, small):
    small["added_tokens"].append(special("<far>", 5000))
    with pytest.raises(TokenizerError, match="'<far>' has id 5000 in the file, and tokenizers gives it"):
        resolve_tokenizer(str(folder(tmp_path / "t", small)))


def test_folders_without_a_tokenizer_json_say_what_they_hold(tmp_path):
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


def test_a_mistyped_file_is_told_its_neighbour(tmp_path, small):
    write_json(tmp_path / "tokenizer.json", small)
    with pytest.raises(TokenizerError, match="did you mean 'tokenizer.json'"):
        resolve_tokenizer(str(tmp_path / "tokenzier.json"))


def test_a_damaged_file_gives_ids_or_a_sentence(tmp_path, small):
    """Any part replaced by junk: never a traceback of something else."""
    small["model"]["merges"] = small["model"]["merges"][:20]
    kept = {part for pair in small["model"]["merges"] for part in (*pair, "".join(pair))}
    words = [word for word in small["model"]["vocab"] if len(word) == 1 or word in kept]
    small["model"]["vocab"] = {word: number for number, word in enumerate(words)}
    small["added_tokens"] = [
        special("<|endoftext|>", len(words)),
        special("<x>", len(words) + 1, is_special=False),
    ]
    small["post_processor"] = TEMPLATE
    rng = random.Random(0)
    places = []

    def walk(value, place):
        places.append(place)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            if place[:2] != ("model", "vocab") and place[:2] != ("model", "merges"):
                walk(item, (*place, key))

    walk(small, ())
    places += [("model", "vocab", "a"), ("model", "merges", 3), ("model", "merges", 3, 0)]
    seen = 0
    for place in places[1:]:
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
            if rng.random() < 0.6:
                continue
            changed = copy.deepcopy(small)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = junk
            path = write_json(tmp_path / "t.json", changed)
            seen += 1
            try:
                tokenizer = resolve_tokenizer(str(path))
                ids = tokenizer.encode_batch(["ab <|endoftext|> <x>"])[0]
                assert ids.max(initial=0) < tokenizer.vocab_size
                tokenizer.decode(ids)
            except BatchloomError:
                pass
    assert seen > 200
