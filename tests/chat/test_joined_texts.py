"""Prompts and completions as texts (``--template none``): agreement with TRL, and what is refused.

The comparisons run only where TRL is installed (the extra ``bench-chat``).
"""

import json
import shutil

import numpy as np
import pytest

import batchloom
from batchloom import InputError, SettingsError
from batchloom.preparation import ChatEncoder, ChatRecipe, encode_conversations
from batchloom.store import LabelledAnswers, PreferencePairs
from chat.conversations import make_conversation
from preparation.stores import write_jsonl

pytestmark = pytest.mark.filterwarnings("ignore")

END = "<|endoftext|>"
# Prompts and completions; in some a token holds the end of the prompt and the beginning of the completion.
TEXTS = [
    ("The quick", " brown fox"),
    ("The quick ", "brown fox"),
    ("The qui", "ck brown"),
    ("2 + 2 =  ", " 4"),
    ("a\n", "\nb"),
    ("ça va? ", "déjà vu 日本"),
    ("日", "本語 😀\n"),
    (" x", "y "),
    ("assist", "ant and the user"),
    ("end", f" of text{END}"),
]
PAIRS = [(prompt, completion, f" not {completion}") for prompt, completion in TEXTS]
PAIRS += [("The qui", "ck", "et"), ("x ", "dog", "1"), ("the ", " lazy", "lazy")]


TOKENIZERS = ["bos", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bytes", "nfc", "metaspace"))]


@pytest.fixture(params=TOKENIZERS)
def tokenizer_folder(tokenizer_folders, tmp_path, request):
    """Folder of a tokenizer that batchloom and TRL load; ``bos`` prepends a token to texts."""
    name = request.param
    shutil.copytree(tokenizer_folders["bytes" if name == "bos" else name], tmp_path / "tokenizer")
    if name == "bos":
        file = tmp_path / "tokenizer/tokenizer.json"
        definition = json.loads(file.read_text())
        (bos,) = [token for token in definition["added_tokens"] if token["content"] == "<|begin_of_text|>"]
        special = {"id": bos["content"], "type_id": 0}
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": special}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos["content"]: {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}},
        }
        file.write_text(json.dumps(definition))
    config = tmp_path / "tokenizer/tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token": END}))
    return tmp_path / "tokenizer"


def prepare(rows, tmp_path, **settings):
    tmp_path.mkdir(exist_ok=True)
    write_jsonl(tmp_path / "in.jsonl", rows)
    settings = {"template": "none", "val_fraction": 0, "dedup": "none", **settings}
    return batchloom.open_store(batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "store", **settings).path)


def prepare_with_trl(kind, tokenizer_folder, rows, tmp_path, **options):
    """Return the rows that a trainer of TRL prepares."""
    trl = pytest.importorskip("trl")
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    models = [
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)) for _ in range(1 if kind == "SFT" else 2)
    ]
    settings = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True, bf16=False, max_length=None, **options
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        *models, args=settings, processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(rows)
    )
    return list(trainer.train_dataset)


def read_labels(store):
    """Return the labels of each document, -100 where it is not trained."""
    spans = (
        np.arange(len(store)),
        np.zeros(len(store), np.int64),
        np.array([store[n].ids.size for n in range(len(store))]),
    )
    return [
        np.where(mask, ids.astype(np.int64), -100).tolist()
        for ids, mask in zip(store.read(*spans), store.mask(*spans), strict=True)
    ]


def check_ids_and_labels(tokenizer_folder, folder, train_on, texts):
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    only = train_on == "completion"
    expected = prepare_with_trl("SFT", tokenizer_folder, rows, folder, completion_only_loss=only)
    store = prepare(rows, folder, tokenizer=str(tokenizer_folder), train_on=train_on)
    assert [store[n].ids.tolist() for n in range(len(store))] == [row["input_ids"] for row in expected]
    assert read_labels(store) == [row["labels"] for row in expected]
    assert batchloom.check(store.path).sound


@pytest.mark.parametrize(
    ("tokenizer_folder", "train_on"),
    [
        *((name, "completion") for name in ("bytes", "nfc", "metaspace", "bos")),
        ("bytes", "all"),
        *(pytest.param(name, "all", marks=pytest.mark.slow) for name in ("nfc", "metaspace", "bos")),
    ],
    indirect=["tokenizer_folder"],
)
def test_ids_and_labels_are_those_of_the_sft_trainer(tokenizer_folder, tmp_path, train_on):
    check_ids_and_labels(tokenizer_folder, tmp_path, train_on, TEXTS)


@pytest.mark.parametrize("tokenizer_folder", ["bos"], indirect=True)
def test_real_texts_are_those_of_the_sft_trainer(tokenizer_folder, tmp_path, real_data):
    lines = (real_data / "gsm8k_train.jsonl").read_text().splitlines()[:50]
    texts = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    check_ids_and_labels(tokenizer_folder, tmp_path, "completion", texts)


def test_pairs_are_those_of_the_dpo_trainer(tokenizer_folder, tmp_path):
    rows = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in PAIRS]
    expected = prepare_with_trl("DPO", tokenizer_folder, rows, tmp_path)
    pairs = list(PreferencePairs(prepare(rows, tmp_path, tokenizer=str(tokenizer_folder))))
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    assert pairs == [{name: row[name] for name in columns} for row in expected]


def test_labelled_answers_are_those_of_the_kto_trainer(tokenizer_folder, tmp_path):
    rows = [{"prompt": prompt, "completion": text, "label": n % 2 == 0} for n, (prompt, text) in enumerate(TEXTS)]
    expected = prepare_with_trl("KTO", tokenizer_folder, rows, tmp_path, loss_type="apo_zero_unpaired")
    answers = list(LabelledAnswers(prepare(rows, tmp_path, tokenizer=str(tokenizer_folder))))
    columns = ("prompt_ids", "completion_ids", "label")
    assert answers == [{name: row[name] for name in columns} for row in expected]


def test_instructions_are_joined_too(tmp_path):
    rows = [{"instruction": "Add.\n", "input": "1 + 1", "output": " = 2"}, {"question": "x", "answer": "y"}]
    for number, (row, text) in enumerate(zip(rows, ("Add.\n\n1 + 1 = 2", "xy"), strict=True)):
        store = prepare([row], tmp_path / str(number), tokenizer="bytes")
        assert store[0].text == text + END
        assert [label != -100 for label in read_labels(store)[0]].count(False) == len(text) - len((" = 2", "y")[number])


def test_contents_that_spell_control_tokens_are_text(tokenizers):
    # TRL reads them as control tokens, except for an end that it does not repeat.
    encoder = ChatEncoder(tokenizers["bytes"], "none")
    conversations = [
        make_conversation("<|im_start|>a", "b<|im_end|>", completion=1),
        make_conversation(f"a{END}", f"{END}b", completion=1),
        make_conversation("a", f"b{END}{END}", completion=1),
        make_conversation("a", f"b{END} ", completion=1),
    ]
    encoded = encode_conversations(conversations, encoder, ChatRecipe(train_on="completion", prove=True))
    assert not encoded.faults
    tokenizer = tokenizers["bytes"]
    assert tokenizer.decode(encoded.ids) == (f"<|im_start|>ab<|im_end|>{END}a{END}{END}b{END}ab{END}{END}ab{END} {END}")
    assert np.isin(encoded.ids, list(tokenizer.control.values())).sum() == len(conversations)


@pytest.mark.parametrize(
    ("overlong", "documents", "dropped"),
    [
        ("drop", 0, ["overlong"]),
        ("truncate-turns", 0, ["overlong"]),
        # Parts of the prompt alone train nothing.
        ("split", 1, ["nothing to train", "nothing to train"]),
    ],
)
def test_long_texts(tokenizers, overlong, documents, dropped):
    rules = ChatRecipe(train_on="completion", max_tokens=4, overlong=overlong)
    encoder = ChatEncoder(tokenizers["metaspace"], "none")
    encoded = encode_conversations([make_conversation("a b c", " d 1", completion=1)], encoder, rules)
    assert ([fault.rule for fault in encoded.dropped], len(encoded.lengths)) == (dropped, documents)


TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
JOINS = "--template none joins a prompt and its completion, which are texts"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": TALK[:1], "completion": TALK[1:]},
        {"prompt": "a", "completion": TALK[1:]},
        {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [{"role": "assistant", "content": "c"}]},
        {"chosen": TALK, "rejected": [TALK[0], {"role": "assistant", "content": "c"}]},
        {"prompt": "a", "chosen": TALK[1], "rejected": {"role": "assistant", "content": "c"}},
        {"messages": TALK, "label": True},
        {"messages": TALK, "rejected_response": "c"},
        {"prompt": json.dumps(TALK[:1]), "completion": json.dumps(TALK[1:])},
    ],
)
def test_a_source_of_messages_is_refused(tmp_path, row):
    with pytest.raises(InputError, match=f"in.jsonl holds messages .*{JOINS}: leave it out to render messages"):
        prepare([row], tmp_path, tokenizer="bytes")
    assert JOINS in batchloom.doctor(tmp_path / "in.jsonl", tokenizer="bytes", template="none").faults[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "c", "completion": TALK[1:]}, "column 'completion' holds messages"),
        ({"prompt": TALK[:1], "completion": "d"}, "column 'prompt' holds messages"),
        ({"prompt": "c", "completion": "d", "system": "e"}, "it has more than a prompt and its completion"),
        ({"prompt": "c", "completion": "d", "tools": [{"name": "f"}]}, "it has more than a prompt and its completion"),
        ({"prompt": "c", "completion": 3}, "column 'completion' holds a number"),
        ({"prompt": "", "completion": "d"}, "column 'prompt' is empty"),
    ],
)
def test_a_record_of_anything_else_is_quarantined(tmp_path, row, reason):
    store = prepare([{"prompt": "a", "completion": "b"}, row], tmp_path, tokenizer="bytes")
    assert [store[n].text for n in range(len(store))] == [f"ab{END}"]
    (bad,) = map(json.loads, (tmp_path / "store/quarantine.jsonl").read_text().splitlines())
    assert reason in bad["reason"]


@pytest.mark.parametrize(
    "settings", [{"template_args": {"a": 1}}, {"template_date": "2026-07-26"}, {"template_args": ["a=1"]}]
)
def test_arguments_without_a_template_are_refused(settings):
    (name,) = settings
    with pytest.raises(SettingsError, match=f"{name}: is for a chat template, and template is none"):
        batchloom.prepare("in.jsonl", out="out", template="none", **settings)


def test_full_texts_need_no_template(tmp_path):
    row = {"chosen": "Human: a\n\nAssistant: b", "rejected": "Human: a\n\nAssistant: c"}
    stores = [prepare([row], tmp_path / name, tokenizer="bytes", template=name) for name in ("none", "plain")]
    assert stores[0][0].ids.tolist() == stores[1][0].ids.tolist()
