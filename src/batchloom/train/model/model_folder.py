"""Files of a Hugging Face model folder: safety checks, fingerprint and tokenizer.

This module loads neither torch nor transformers, so that an unusable folder is refused at once.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import xxhash

from batchloom import Store
from batchloom.core.errors import InputError, InputMissingError, TrainError
from batchloom.core.files import refuse_url
from batchloom.train.json_files import read_json_object

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE, _WEIGHTS_INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")
_TOKENIZER_FILE = "tokenizer.json"
# Files that transformers' AutoTokenizer reads next to tokenizer.json; none of them is code.
_TOKENIZER_FILES = (
    _TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_EDGE_BYTES = 1 << 20
# The store's vocabulary may differ a little from the model's, for example by tokens of a chat template.
_MAX_DIFFERENT_SHARE = 0.05


def read_safe_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a folder that is safe to load: no pickles, no code.

    A missing folder or model raises InputMissingError, an unsafe or quantized one InputError.
    """
    refuse_url(folder, "--init")
    if not folder.is_dir():
        raise InputMissingError(
            f"--init: {folder} is not a folder. Give a local folder with config.json and safetensors weights; "
            "download a model of the Hub first: hf download ORG/NAME --local-dir FOLDER"
        )
    try:
        config = read_json_object(folder / _CONFIG_FILE)
    except ValueError as error:
        raise InputMissingError(
            f"--init: {folder / _CONFIG_FILE} {error}; give a folder that transformers' save_pretrained wrote"
        ) from error
    kernel = str(config.get("attn_implementation") or config.get("_attn_implementation") or "")
    if "auto_map" in config or "/" in kernel:
        setting = "auto_map" if "auto_map" in config else f"attn_implementation {kernel!r}"
        raise InputError(
            f"--init: {folder / _CONFIG_FILE} has {setting}: it needs code from outside transformers, which "
            "batchloom never runs. Use a model that transformers itself supports; if it supports this one, delete "
            f"the entry from {_CONFIG_FILE}"
        )
    if "quantization_config" in config:
        raise InputError(
            f"--init: the weights in {folder} are quantized and cannot be finetuned: give the folder of the full "
            "weights"
        )
    _list_weight_files(folder)
    return config


def _list_weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model; refuse pickles."""
    if (folder / _WEIGHTS_FILE).is_file():
        return [folder / _WEIGHTS_FILE]
    if not (folder / _WEIGHTS_INDEX_FILE).is_file():
        pickles = [name for name in _PICKLE_FILES if (folder / name).is_file()]
        if not pickles:
            raise InputMissingError(f"--init: {folder} has no {_WEIGHTS_FILE}: it holds no model")
        raise InputError(
            f"--init: {folder} has its weights only in {pickles[0]}, a pickle. A pickle can run code when it is "
            "opened, so it is never loaded. If you trust it, convert it to safetensors: "
            "transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )
    try:
        parts = read_json_object(folder / _WEIGHTS_INDEX_FILE).get("weight_map")
    except ValueError as error:
        raise InputError(f"--init: {folder / _WEIGHTS_INDEX_FILE} {error}") from error
    names = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
    missing_names = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing_names or not names:
        fault = f"names {missing_names[0]!r}, which is not a file in this folder" if missing_names else "names no file"
        raise InputMissingError(f"--init: {folder / _WEIGHTS_INDEX_FILE} {fault}: download the model again")
    return [folder / name for name in names]


def compute_folder_fingerprint(folder: Path) -> str:
    """Return a fingerprint of a model.

    It covers the config, and size, first and last MiB of each weight file.
    """
    digest = xxhash.xxh3_128()
    for file in (folder / _CONFIG_FILE, *_list_weight_files(folder)):
        size = file.stat().st_size
        with file.open("rb") as opened:
            digest.update(f"{file.name} {size} ".encode() + opened.read(_EDGE_BYTES))
            opened.seek(max(0, size - _EDGE_BYTES))
            digest.update(opened.read(_EDGE_BYTES))
    return digest.hexdigest()


def describe_tokenizer_difference(folder: Path, store: Store) -> str | None:
    """Describe how a store's tokenizer differs from a model's; None if it does not.

    Raises:
        TrainError: the ids of the store are other tokens in the model.
    """
    if store.manifest is None:
        return f"{store.location.name} names no tokenizer, so its ids cannot be compared with the model's"
    store_vocabulary, model_vocabulary = (
        _get_store_vocabulary(store),
        _get_folder_vocabulary(folder),
    )
    if model_vocabulary is None:
        return f"{folder} has no {_TOKENIZER_FILE} that can be compared with the store's tokenizer"
    if store_vocabulary is None:
        return (
            f"the store was prepared with {store.tokenizer.name!r}, and {folder} has a {_TOKENIZER_FILE}: their ids "
            "differ, unless the model was trained with the store's tokenizer"
        )
    shared_ids = store_vocabulary.keys() & model_vocabulary.keys()
    differing_ids = sorted(number for number in shared_ids if store_vocabulary[number] != model_vocabulary[number])
    unknown_ids = len(store_vocabulary.keys() - model_vocabulary.keys())
    if not differing_ids and not unknown_ids:
        return None
    example = (
        f", id {differing_ids[0]} is {store_vocabulary[differing_ids[0]]!r} in the store and " if differing_ids else ""
    )
    example += f"{model_vocabulary[differing_ids[0]]!r} in the model" if differing_ids else ""
    fact = (
        f"{len(differing_ids):,} of {len(store_vocabulary):,} ids of the store's tokenizer ({store.tokenizer.name!r}) "
        f"are other tokens in {folder / _TOKENIZER_FILE}{example}, and {unknown_ids:,} are not in it"
    )
    if len(differing_ids) > _MAX_DIFFERENT_SHARE * len(store_vocabulary):
        raise TrainError(f"{fact}: the model would learn nonsense. Prepare the data with --tokenizer {folder}.")
    return fact


def _get_store_vocabulary(store: Store) -> dict[int, str] | None:
    """Return the tokens by id of a store's tokenizer; None if it is no tokenizer.json."""
    definition = store.tokenizer.state().get("tokenizer")
    return None if definition is None else _parse_vocabulary(json.dumps(definition))


def _get_folder_vocabulary(folder: Path) -> dict[int, str] | None:
    """Return the tokens by id of a model's tokenizer.json; None if there is none."""
    file = folder / _TOKENIZER_FILE
    return _parse_vocabulary(file.read_text("utf-8")) if file.is_file() else None


def _parse_vocabulary(definition: str) -> dict[int, str]:
    from tokenizers import Tokenizer  # noqa: PLC0415 - not needed to train from scratch

    vocabulary = Tokenizer.from_str(definition).get_vocab(with_added_tokens=True)
    return {number: word for word, number in vocabulary.items()}


def copy_tokenizer(folder: Path, store: Store, out: Path) -> None:
    """Copy the tokenizer files of a model's folder next to its trained weights.

    Without any, the store's tokenizer is written, if it is a tokenizer.json.

    Raises:
        OSError: the files cannot be written.
    """
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    has_tokenizer = any((out / name).is_file() for name in _TOKENIZER_FILES)
    if has_tokenizer or store.manifest is None:
        return
    if (definition := store.tokenizer.state().get("tokenizer")) is not None:
        (out / _TOKENIZER_FILE).write_text(json.dumps(definition, ensure_ascii=False), "utf-8")
        chat = store.tokenizer.chat
        # The default class of the model type may apply other rules, so name the generic one.
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **chat.tokens}
        (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, ensure_ascii=False), "utf-8")
        if (template := chat.templates.get("default")) is not None:
            (out / "chat_template.jinja").write_text(template, "utf-8")
