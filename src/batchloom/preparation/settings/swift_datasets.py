"""ms-swift's jobs with ``NAME:SUBSET#COUNT``, and its ``dataset_info.json``."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchloom.core.settings import suggest
from batchloom.core.wording import format_list
from batchloom.preparation.settings.peer_keys import (
    PeerDatasets,
    PeerKeyReader,
    declare_keys,
    quote_yaml,
    read_length_limit,
    read_template,
    read_validation_share,
)

_COLUMN_NAMES = "query response history system messages tools images videos audios label"
_COLUMN_ROLES = {name: name for name in _COLUMN_NAMES.split()} | {"query": "prompt"}
# Agent templates that no model's chat template writes.
_PROMPTED_AGENT_TEMPLATES = (
    *("react_en", "react_zh", "react_grpo", "toolbench"),
    *("qwen_en", "qwen_zh", "qwen_en_parallel", "qwen_zh_parallel"),
)
# Data settings of a job (swift/arguments/base_args/data_args.py); its other settings are the trainer's.
JOB_KEYS = declare_keys(
    read="dataset columns model dataset_shuffle split_dataset_ratio use_hf template system loss_scale max_length "
    "truncation_strategy",
    unused={
        "another store": "val_dataset val_dataset_shuffle cached_val_dataset",
        "only speed": "dataset_num_proc load_from_cache_file download_mode cached_dataset",
        "a setting of the loader": "streaming shuffle_buffer_size packing packing_length",
        "mix stores with train --mixture": "interleave_prob stopping_strategy",
        "--max-bad decides": "strict",
        "columns without a role are reported": "remove_unused_columns",
        "the model's own chat template writes the tools": "agent_template",
        "set the variable of the chat template with --template-arg": "enable_thinking",
    },
    refused={
        "random records are chosen with the seed 42": "data_seed",
        "name the columns of each role in a manifest": "disable_auto_column_mapping",
        "give the file as an input of its own": "custom_dataset_info",
        "write the names into the records": "model_name model_author",
    },
    neutral={
        "data_seed": (42,),
        "remove_unused_columns": (True,),
        "agent_template": ("hermes", *_PROMPTED_AGENT_TEMPLATES),
    },
)
# What is trained by ``loss_scale``; its other values weight parts of an answer by patterns.
_LOSS_SCALES = {"default": None, "last_round": "last", "all": "all"}
# Values of ``rlhf_type`` that train rated answers.
_ANSWER_METHODS = ("dpo", "orpo", "simpo", "kto", "cpo", "rm")
_OVERLONG_POLICIES = {"delete": "drop", "right": "truncate", "left": "truncate-left", "split": "split"}
# Keys of one data set of its dataset_info.json (swift/dataset/register.py).
ENTRY_KEYS = declare_keys(
    read="dataset_path hf_dataset_id dataset_name columns messages hf_revision subsets split",
    unused={"a description": "tags help huge_dataset", "the Hugging Face Hub is read": "ms_dataset_id ms_revision"},
)
_IDENTIFIER_KEYS = ("dataset_name", "hf_dataset_id", "dataset_path")
_MESSAGE_KEYS = {
    "role_key": "role",
    "content_key": "content",
    "user_role": "user",
    "assistant_role": "assistant",
    "system_role": "system_role",
}


def translate_job(job: Mapping[str, Any]) -> PeerDatasets:
    """Translate the data settings of a job."""
    result = PeerDatasets()
    reader = result.check_job(job, JOB_KEYS)
    mapping = _translate_columns(reader)
    # Without shuffling, the first records are taken.
    count_key = "max_samples" if job.get("dataset_shuffle") is False else "num_samples"
    for name in reader.texts("dataset"):
        result.datasets += [
            {**dataset, **({"mapping": mapping} if mapping else {})}
            for dataset in _translate_name(name, count_key, reader)
        ]
    if not result.datasets and not result.problems:
        result.problems.append("dataset: there are none; write at least one")
    result.take_text("tokenizer", reader, "model")
    _translate_loss_scale(reader, result)
    read_template(reader, "ms-swift", result)
    if (system := reader.text("system")) is not None:
        if system.endswith(".txt"):
            result.problems.append(f"system: {system!r} names a file; write its text here")
        result.take("default_system", system.replace("\\n", "\n"), "system")
    if job.get("agent_template") == "hermes":
        result.take("tool_format", "hermes", "agent_template")
    elif job.get("agent_template") in _PROMPTED_AGENT_TEMPLATES:
        result.problems.append(
            f"agent_template: {quote_yaml(job['agent_template'])} has no equal --tool-format; hermes has one, and the "
            "formats of models are written by their own chat templates: name one of these, or leave it out"
        )
    read_length_limit(reader, "max_length", "truncation_strategy", _OVERLONG_POLICIES, result)
    if reader.values.get("val_dataset"):
        # Validation has data sets of its own, and ms-swift splits nothing off.
        result.take("val_fraction", 0.0, "val_dataset")
    else:
        read_validation_share(reader, "split_dataset_ratio", result, counts=False)
    return result


def _translate_loss_scale(reader: PeerKeyReader, result: PeerDatasets) -> None:
    """Add what is trained to the settings."""
    name = reader.text("loss_scale", "default")
    if name not in _LOSS_SCALES:
        result.problems.append(
            f"loss_scale: {quote_yaml(name)} is none of {', '.join(_LOSS_SCALES)}; weights by patterns are not "
            "supported, so write train flags or weights into the messages"
        )
    elif name == "last_round" and reader.values.get("rlhf_type") in _ANSWER_METHODS:
        result.not_taken.append("loss_scale (preferences train the last answer alone)")
    elif (train_on := _LOSS_SCALES[name]) is not None:
        result.take("train_on", train_on, "loss_scale")


def _translate_name(name: str, count_key: str, reader: PeerKeyReader) -> list[dict[str, Any]]:
    """Translate ``hf::NAME:SUBSET/SUBSET#COUNT``, one data set for each subset."""
    hub, colons, rest = name.rpartition("::")
    if colons and hub.lower() != "hf":
        reader.problems.append(f"dataset: {name!r}: only the Hugging Face Hub is read; download the data, and name it")
    rest, _, count = rest.rpartition("#") if "#" in rest else (rest, "", "")
    path, _, subsets = rest.partition(":")
    dataset: dict[str, Any] = {"path": path.strip()}
    if count:
        if not count.isdecimal() or int(count) < 1:
            reader.problems.append(f"dataset: {name!r}: {count!r} is not a number of records of at least 1")
            return []
        dataset[count_key] = int(count)
        if "/" in subsets:
            reader.problems.append(
                f"dataset: {name!r}: {count} records of all subsets together are not supported; give each subset its "
                "own number"
            )
    return [{**dataset, **({"config": subset.strip()} if subset.strip() else {})} for subset in subsets.split("/")]


def _translate_columns(reader: PeerKeyReader) -> dict[str, str]:
    """Return the mapping of ``columns``, which holds ms-swift's name by column."""
    columns = reader.mapping("columns")
    if columns is None:
        return {}
    mapping: dict[str, str] = {}
    for column in columns.values:
        name = columns.text(column)
        if name in _COLUMN_ROLES:
            mapping[_COLUMN_ROLES[name]] = column
        elif name is not None:
            known_names = ", ".join(_COLUMN_ROLES)
            hint = suggest(name, _COLUMN_ROLES)
            columns.problems.append(f"{columns.path}{column}: {name!r} is none of {known_names}{hint}")
    return mapping


def list_dataset_names(entries: Sequence[Any]) -> list[str]:
    """Return a name of each data set, for :func:`translate_dataset_info`."""
    return list(dict.fromkeys(_list_identifiers(number, entry)[0] for number, entry in enumerate(entries)))


def _list_identifiers(number: int, entry: object) -> list[str]:
    """Return the names of an entry, at last its position."""
    values = [entry.get(key) for key in _IDENTIFIER_KEYS] if isinstance(entry, dict) else []
    return [*(value for value in values if isinstance(value, str) and value), f"[{number}]"]


def translate_dataset_info(entries: Sequence[Any], names: Sequence[str]) -> PeerDatasets:
    """Translate the named data sets of a ``dataset_info.json``."""
    result = PeerDatasets()
    found: set[str] = set()
    for number, entry in enumerate(entries):
        identifiers = _list_identifiers(number, entry)
        if not set(names) & set(identifiers):
            continue
        found |= set(identifiers)
        if not isinstance(entry, dict):
            result.problems.append(f"[{number}]: {quote_yaml(entry)} is not a mapping")
            continue
        reader = PeerKeyReader(entry, f"[{number}].", result.problems)
        reader.check(ENTRY_KEYS)
        path = reader.text("dataset_path") or reader.text("hf_dataset_id")
        if path is None:
            result.problems.append(f"[{number}]: has no dataset_path and no hf_dataset_id; only these are read")
            continue
        mapping = _translate_columns(reader)
        if (messages := reader.mapping("messages")) is not None:
            messages.check(declare_keys(" ".join(_MESSAGE_KEYS)))
            mapping |= {role: name for key, role in _MESSAGE_KEYS.items() if (name := messages.text(key))}
        dataset = {"path": path, "name": reader.text("dataset_name"), "revision": reader.text("hf_revision")}
        splits: list[Any] = reader.texts("split") or [None]
        subsets: list[Any] = reader.texts("subsets") or [None]
        if len(splits) * len(subsets) > 1:
            # A name is one data set's alone.
            dataset["name"] = None
        result.datasets += [
            {
                key: value
                for key, value in {**dataset, "mapping": mapping or None, "config": subset, "split": split}.items()
                if value is not None
            }
            for subset in subsets
            for split in splits
        ]
    known_names = list_dataset_names(entries)
    result.problems += [
        f"{name}: there is no such data set{suggest(name, known_names)}; the file has "
        f"{format_list([repr(known) for known in known_names], 8)}"
        for name in names
        if name not in found
    ]
    return result
