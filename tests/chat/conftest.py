"""Small tokenizers with control tokens, shared by the tests of conversations."""

import functools
import json

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from batchloom.preparation import ChatEncoder
from batchloom.tokens import resolve_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog; the assistant and the user talk.\n",
    "<think>\nLet me see: 2 + 2 = 4.\n</think>\n\nIt is 4, of course.\n",
    "user assistant system tool User: Assistant: ### Response: ### Instruction:\n\n",
    "Ça va? Déjà vu, naïve café; ﬁn \u0301 日本語 тест 😀 end of turn im_end start_header_id |> <|\n",
] * 4
CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>",
]  # fmt: skip
PLAIN_ADDED = ["<think>", "</think>"]


def save_tokenizer(tokenizer, folder, *, control=CONTROL, plain_added=PLAIN_ADDED, **config):
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain_added])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_byte_level_tokenizer(folder, normalizer=None, **options):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return save_tokenizer(tokenizer, folder, **options)


def make_metaspace_tokenizer(folder):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return save_tokenizer(tokenizer, folder, unk_token="<unk>")


@pytest.fixture(scope="session")
def tokenizer_folders(tmp_path_factory):
    """Folders of small tokenizers with control tokens, as transformers saves them."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "bytes": make_byte_level_tokenizer(root / "bytes"),
        "nfc": make_byte_level_tokenizer(root / "nfc", normalizers.NFC()),
        "metaspace": make_metaspace_tokenizer(root / "metaspace"),
    }


@pytest.fixture(scope="session")
def tokenizers(tokenizer_folders):
    return {name: resolve_tokenizer(str(folder)) for name, folder in tokenizer_folders.items()}


@pytest.fixture(scope="session")
def hf_tokenizers(tokenizer_folders):
    from transformers import PreTrainedTokenizerFast

    return {name: PreTrainedTokenizerFast.from_pretrained(folder) for name, folder in tokenizer_folders.items()}


@pytest.fixture(scope="session")
def published_tokenizer(tmp_path_factory):
    """Tokenizer with the control tokens of all published templates."""
    from chat.template_cases import BOS, EOS, find_control_tokens

    folder = make_byte_level_tokenizer(
        tmp_path_factory.mktemp("tokenizer") / "t",
        control=find_control_tokens(),
        plain_added=[*PLAIN_ADDED, "<tool_call>", "</tool_call>"],
        bos_token=BOS,
        eos_token=EOS,
    )
    return resolve_tokenizer(str(folder))


@pytest.fixture(scope="session")
def make_published_encoder(published_tokenizer, tmp_path_factory):
    """Function that makes the encoder of a published template, by its name."""
    from chat.template_cases import read_template

    folder = tmp_path_factory.mktemp("templates")

    @functools.cache
    def make(name):
        path = folder / f"{name.replace('/', '_')}.jinja"
        path.write_text(read_template(name))
        return ChatEncoder(published_tokenizer, str(path))

    return make
