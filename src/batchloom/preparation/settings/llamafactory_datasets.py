"""LLaMA-Factory's ``dataset_info.json``, and the data settings of its jobs."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchloom.chat.templates import TOOL_FORMATS
from batchloom.core.settings import suggest
from batchloom.core.wording import format_list
from batchloom.preparation.settings.peer_keys import (
    PeerDatasets,
    PeerKey,
    PeerKeyReader,
    declare_keys,
    is_neutral,
    quote_yaml,
    read_template,
    read_validation_share,
)

# Keys of one data set (llamafactory/data/parser.py).
ENTRY_KEYS = declare_keys(
    read="file_name cloud_file_name hf_hub_url formatting ranking subset split num_samples columns tags",
    unused={"files are not compared with it": "file_sha1"},
    refused={
        "it names code to run; write its output to a file and name that with file_name": "script_url",
        "only the Hugging Face Hub is read; download the data and write file_name": "ms_hub_url om_hub_url",
        "give the folder of the repository as an input: hf://datasets/ORG/NAME/FOLDER": "folder",
    },
)
# Columns, and the roles that they have here.
_COLUMN_NAMES = "prompt query response history messages system tools images videos audios chosen rejected kto_tag"
_COLUMN_ROLES = {name: name for name in _COLUMN_NAMES.split()} | {"query": "context", "kto_tag": "label"}
_COLUMN_SETTINGS = "columns: and tags:"
_ALPACA_COLUMNS = {"prompt": "instruction", "response": "output"}
# Roles that are read only if a column is named.
_OPTIONAL_ROLES = ("context", "history", "system", "tools", "label")
_ALPACA_ROLES = ("prompt", "query", "response", "history")
# Tags, and the names inside messages that they are here.
_TAG_ROLES = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system_role",
}
_FORMATS = ("alpaca", "sharegpt", "openai")
# Data settings of a job (llamafactory/hparams/data_args.py); its other settings are the trainer's.
JOB_KEYS = declare_keys(
    read="dataset dataset_dir max_samples train_on_prompt mask_history val_size stage model_name_or_path "
    "enable_thinking tool_format template default_system",
    unused={
        "a setting of the loader": "packing neat_packing streaming buffer_size",
        "it cuts the question and the answer of each turn; --max-tokens with --overlong truncate cuts the end": (
            "cutoff_len"
        ),
        "the chat template decides": "preserve_thinking",
        "only speed": "overwrite_cache preprocessing_batch_size preprocessing_num_workers data_shared_file_system "
        "tokenized_path",
        "another store": "eval_dataset eval_on_each_dataset eval_num_beams",
        "mix stores with train --mixture": "mix_strategy interleave_probs",
        "media lie next to the data, or in --data-folder": "media_dir",
        "there are no padding tokens": "ignore_pad_token_for_loss",
    },
    neutral={"mix_strategy": ("concat",), "ignore_pad_token_for_loss": (True,)},
)
# Keys by which a job is one of LLaMA-Factory.
JOB_MARKERS = ("dataset_dir", "stage", "finetuning_type", "cutoff_len")
# ms-swift's name for a format is not one of LLaMA-Factory.
_TOOL_FORMATS = tuple(name for name in TOOL_FORMATS if name != "hermes")
_MODEL_TOOL_FORMATS = ("gemma4", "glm4_moe", "minimax1", "minimax2", "seed_oss")
_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto")
_RANKING_STAGES = ("rm", "dpo")


def translate_dataset_info(
    info: Mapping[str, Any], names: Sequence[str], *, stage: str = "sft", max_samples: int | None = None
) -> PeerDatasets:
    """Translate data sets of a ``dataset_info.json``.

    Args:
        info: content of the file.
        names: names of the data sets.
        stage: stage of the job; ``pt`` trains on the prompt column as text.
        max_samples: number of first records of each data set; None for all.
    """
    result = PeerDatasets(column_keys=_COLUMN_SETTINGS)
    for name in names:
        entry = info.get(name)
        if name not in info:
            known_names = format_list([repr(known) for known in info], 8)
            result.problems.append(
                f"{name}: there is no such data set{suggest(name, info)}; the file has {known_names}"
            )
        elif not isinstance(entry, dict):
            result.problems.append(f"{name}: {quote_yaml(entry)} is not a mapping")
        else:
            _translate_entry(str(name), entry, stage, max_samples, result)
    return result


def _translate_entry(
    name: str, entry: Mapping[str, Any], stage: str, max_samples: int | None, result: PeerDatasets
) -> None:
    reader = PeerKeyReader(entry, f"{name}.", result.problems)
    hub = reader.text("hf_hub_url")
    # Without modelscope or openMind, LLaMA-Factory reads the Hugging Face Hub if both are named.
    keys = {key: PeerKey("unused", "hf_hub_url is read") for key in ("ms_hub_url", "om_hub_url")} if hub else {}
    result.notes += [f"{name}: not taken: {text}" for text in reader.check({**ENTRY_KEYS, **keys})]
    path = hub or reader.text("cloud_file_name") or reader.text("file_name")
    if path is None and is_neutral(entry.get("script_url")) and is_neutral(entry.get("ms_hub_url")):
        result.problems.append(f"{name}: has no file_name and no hf_hub_url, which one of them must name the data")
    dataset: dict[str, Any] = {"path": path, "name": name, "mapping": _translate_columns(reader, stage)}
    if hub:
        dataset |= {"data_type": "hf_dataset", "split": reader.text("split", "train"), "config": reader.text("subset")}
    elif (split := reader.text("split", "train")) != "train":
        result.problems.append(f"{name}.split: {split!r} is not 'train', the only split of a file")
    dataset |= {"num_samples": reader.number("num_samples"), "max_samples": max_samples}
    if path is not None and path.endswith(".txt"):
        result.notes.append(
            f"{name}: LLaMA-Factory reads each line of a .txt as one record; --split-on line does so for all text files"
        )
        del dataset["mapping"]
    result.datasets.append({key: value for key, value in dataset.items() if value is not None})


def _translate_columns(reader: PeerKeyReader, stage: str) -> dict[str, str]:
    """Return the mapping of a data set."""
    formatting = reader.choice("formatting", _FORMATS, "alpaca")
    ranking = reader.flag("ranking")
    named = reader.mapping("columns")
    if named is not None:
        named.check(declare_keys(_COLUMN_NAMES))
        columns = {key: column for key in _COLUMN_ROLES if (column := named.text(key))}
    else:
        columns = dict(_ALPACA_COLUMNS) if formatting == "alpaca" else {"messages": "conversations"}
    required = {"alpaca": ["prompt"], "sharegpt": ["messages"], "openai": ["messages"]}[formatting]
    required += ["chosen", "rejected"] if ranking else []
    reader.problems += [
        f"{reader.path}columns.{key}: missing; formatting {formatting}{' and ranking' * ranking} needs it"
        for key in required
        if key not in columns
    ]
    # Columns of the other format are not read.
    unread = {"messages"} if formatting == "alpaca" else set(_ALPACA_ROLES)
    unread |= set() if ranking else {"chosen", "rejected"}
    columns = {key: column for key, column in columns.items() if key not in unread}
    if formatting == "alpaca" and (stage == "pt" or ("response" not in columns and not ranking)):
        return {"text": columns.get("prompt", "text")}
    mapping = {_COLUMN_ROLES[key]: column for key, column in columns.items()}
    if ranking:
        mapping.pop("response", None)
        if "messages" in mapping:
            mapping["prompt"] = mapping.pop("messages")
    if named is not None:
        optional_roles = [
            role for role in _OPTIONAL_ROLES if formatting == "alpaca" or role not in ("context", "history")
        ]
        mapping |= {role: "" for role in optional_roles if role not in mapping}
    return mapping | (_translate_tags(reader) if formatting != "alpaca" else {})


def _translate_tags(reader: PeerKeyReader) -> dict[str, str]:
    """Return the names inside messages of a data set."""
    tags = reader.mapping("tags")
    if tags is None:
        return {}
    tags.check(declare_keys(" ".join(_TAG_ROLES)))
    names = {role: value for key, role in _TAG_ROLES.items() if (value := tags.text(key))}
    if names.get("function_call") == names.get("assistant"):
        # The roles of calls and answers are equal where tool_calls tell them apart.
        names.pop("function_call", None)
    return names


def translate_job(job: Mapping[str, Any], info: Mapping[str, Any]) -> PeerDatasets:
    """Translate the data settings of a job and its ``dataset_info.json``."""
    result = PeerDatasets(column_keys=_COLUMN_SETTINGS)
    reader = result.check_job(job, JOB_KEYS)
    stage, max_samples = reader.choice("stage", _STAGES, "sft"), reader.number("max_samples")
    names = list_names(reader)
    result.take_text("tokenizer", reader, "model_name_or_path")
    if not names and not result.problems:
        result.problems.append("dataset: there are none; name at least one data set of dataset_info.json")
    result.problems += [
        f"{name}: a data set {'with' if ranks else 'without'} ranking does not fit stage {stage}; LLaMA-Factory trains "
        "rankings in the stages rm and dpo alone"
        for name in names
        if (ranks := bool(_get_entry(info, name).get("ranking"))) != (stage in _RANKING_STAGES) and name in info
    ]
    _translate_chat_settings(reader, stage, result)
    read_validation_share(reader, "val_size", result)
    if names:
        listed = translate_dataset_info(info, names, stage=stage, max_samples=max_samples)
        result.datasets = listed.datasets
        result.problems += [f"dataset_info.json: {problem}" for problem in listed.problems]
        result.notes += [f"dataset_info.json: {note}" for note in listed.notes]
    return result


def _get_entry(info: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    entry = info.get(name)
    return entry if isinstance(entry, dict) else {}


def _translate_chat_settings(reader: PeerKeyReader, stage: str, result: PeerDatasets) -> None:
    """Take the settings of conversations."""
    trains_prompts, masks_history = reader.flag("train_on_prompt"), reader.flag("mask_history")
    if trains_prompts and masks_history:
        reader.problems.append("mask_history: contradicts train_on_prompt; leave one of them out")
    elif (trains_prompts or masks_history) and stage != "sft":
        key = "train_on_prompt" if trains_prompts else "mask_history"
        result.not_taken.append(f"{key} (LLaMA-Factory uses it in the stage sft alone)")
    elif trains_prompts:
        result.take("train_on", "all", "train_on_prompt")
    elif masks_history:
        result.take("train_on", "last", "mask_history")
    read_template(reader, "LLaMA-Factory", result)
    result.take_text("default_system", reader, "default_system")
    reader.flag("enable_thinking")
    # Missing means true. Null adds an empty thought that is not trained, as false does.
    if reader.values.get("enable_thinking", True) in (None, False):
        result.take("template_args", {"enable_thinking": False}, "enable_thinking")
        result.not_taken.append("the removal of thoughts by enable_thinking (remove them from the records)")
    tool_format = reader.text("tool_format")
    if tool_format in _MODEL_TOOL_FORMATS:
        result.not_taken.append("tool_format (the template of its models writes the tools)")
    elif tool_format is not None:
        result.take("tool_format", reader.choice("tool_format", _TOOL_FORMATS, ""), "tool_format")


def list_names(reader: PeerKeyReader) -> list[str]:
    """Return the names of the data sets of a job, also separated by commas."""
    return [name.strip() for text in reader.texts("dataset") for name in text.split(",") if name.strip()]
