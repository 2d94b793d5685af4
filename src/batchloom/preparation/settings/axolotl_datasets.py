"""axolotl's ``datasets:`` block, and the other data settings of its configuration."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from batchloom.core.settings import suggest
from batchloom.preparation.settings.peer_keys import (
    PeerDatasets,
    PeerKeyReader,
    declare_keys,
    describe_own_template,
    merge_values,
    quote_yaml,
    read_length_limit,
    read_validation_share,
)

# Keys of one data set (axolotl/utils/schemas/datasets.py).
ENTRY_KEYS = declare_keys(
    read="path type name split data_files ds_type revision field text_column field_messages field_tools "
    "field_thinking field_chosen field_rejected message_property_mappings roles "
    "message_field_training message_field_training_detail chat_template chat_template_jinja "
    "roles_to_train train_on_eos train_on_eot",
    unused={"only memory": "preprocess_shards"},
    refused={
        "templates get reasoning_content": "template_thinking_key",
        "write the reasoning into reasoning_content": "split_thinking",
        "remove the system turns from the records": "drop_system_message",
        "give the number of records to read with split: train[:N]": "shards shards_idx",
        "code of data sets never runs; write its output to a file": "trust_remote_code",
        "write message_property_mappings instead": "message_field_role message_field_content",
        "convert the records first": "conversation input_format input_transform field_human field_model temperature "
        "logprobs_field skip",
        "a line end follows each step": "step_separator",
        "each step is trained, in full": "max_completion_length train_on_last_step_only",
    },
    neutral={
        "template_thinking_key": ("reasoning_content",),
        "step_separator": ("\n",),
        "message_field_role": ("role",),
        "message_field_content": ("content",),
    },
)
# Keys that no data set of a manifest has.
MARKER_KEYS = ENTRY_KEYS.keys() - {"path", "type", "name", "split", "revision"}
# Data settings of a configuration; its other settings are the trainer's.
JOB_KEYS = declare_keys(
    read="datasets pretraining_dataset base_model tokenizer_config rl chat_template chat_template_jinja "
    "train_on_inputs val_set_size chat_template_kwargs sequence_len excess_length_strategy",
    unused={
        "a setting of the loader": "sample_packing eval_sample_packing",
        "only speed": "dataset_prepared_path dataset_num_proc dataset_processes",
        "another store, or a setting of the loader": "test_datasets streaming",
        "documents are shuffled by the loader": "shuffle_merged_datasets",
        "--dedup decides": "dataset_exact_deduplication",
    },
    refused={
        "it replaces a text of the template; --default-system adds a system turn to conversations without one": (
            "default_system_message"
        ),
    },
    neutral={"shuffle_merged_datasets": (True,), "dataset_exact_deduplication": (True,)},
)
_OVERLONG_POLICIES = {"drop": "drop", "truncate": "truncate", "raise": "error"}
_ALL_ROLES = "system,developer,user,assistant,tool"
# Settings of a data set that a store has once: the key that states each, and its default.
_COMMON_SETTINGS = {
    "template": ("chat_template", None),
    "train_on": ("roles_to_train", "assistant"),
    "train_on_eos": ("train_on_eos", "turn"),
}
# The values of these settings by the path of each data set.
_StatedSettings = dict[str, dict[str, str | None]]


class _PromptType(NamedTuple):
    """Columns of a type of prompt by role, and its own layout of the prompt."""

    mapping: Mapping[str, str]
    layout: str = ""


_ALPACA = _PromptType({"prompt": "instruction", "response": "output"}, "the Alpaca prompt")
_PAIR = _PromptType({"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}, "its own prompt")
_PROMPT_TYPES = {
    "alpaca": _ALPACA,
    **dict.fromkeys(("alpaca:chat", "alpaca:instruct", "alpaca_chat.load", "alpaca_instruct.load"), _ALPACA),
    **dict.fromkeys(("alpaca_chat", "alpaca_instruct", "alpaca_w_system", "alpaca_w_system.load"), _ALPACA),
    "alpaca_chat.load_qa": _ALPACA._replace(mapping={"prompt": "question", "response": "answer"}),
    "alpaca_chat.load_camel_ai": _ALPACA._replace(mapping={"prompt": "message_1", "response": "message_2"}),
    "alpaca_w_system.load_open_orca": _ALPACA._replace(
        mapping={"system": "system_prompt", "prompt": "question", "response": "response"}
    ),
    "gpteacher": _ALPACA._replace(mapping={"prompt": "instruction", "response": "response"}),
    "oasst": _ALPACA._replace(mapping={"prompt": "INSTRUCTION", "response": "RESPONSE"}),
    **dict.fromkeys(("chatml.prompt_pairs", "llama3.prompt_pairs", "chatml.ultra", "llama3.ultra"), _PAIR),
    **dict.fromkeys(("chatml.intel", "llama3.intel"), _PAIR._replace(mapping={**_PAIR.mapping, "prompt": "question"})),
    **dict.fromkeys(("chatml.icr", "llama3.icr"), _PAIR._replace(mapping={**_PAIR.mapping, "prompt": "input"})),
    **dict.fromkeys(
        ("chatml.argilla_chat", "llama3.argilla_chat", "chat_template.argilla_chat"),
        _PromptType({"chosen": "chosen", "rejected": "rejected"}),
    ),
}
_CHAT_TYPES = ("chat_template", "chat_template.default")
_TEXT_TYPES = ("completion", "pretrain")
_SEGMENTS_TYPE = "input_output"
_STEPS_TYPE = "stepwise_supervised"
_TYPES = (*_CHAT_TYPES, *_TEXT_TYPES, _SEGMENTS_TYPE, _STEPS_TYPE, *_PROMPT_TYPES)
_REFUSED_TYPES = {"_synthetic": "synthetic data is the input dummy"}
_DATA_TYPES = {"json": None, "jsonl": None, "text": None, "csv": "csv", "parquet": "parquet", "arrow": "arrow"}
_TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "alpaca": "alpaca"}
_EOS_RULES = ("turn", "all", "last", "none")
_TRAIN_FLAGS = ("train", "training")
# Names of messages, and of the keys that they have here.
_MESSAGE_PROPERTIES = ("role", "content", "tool_calls", "reasoning_content")
_ROLE_NAMES = {"user": "user", "assistant": "assistant", "tool": "tool", "system": "system_role"}
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_FIRST_RECORDS = re.compile(r"(\w+)\[:(\d{1,15})\]")


def is_axolotl_config(content: Mapping[str, Any]) -> bool:
    """Return whether a file with a list of data sets is axolotl's."""
    entries = content.get("datasets")
    if "pretraining_dataset" in content or ("base_model" in content and isinstance(entries, list)):
        return True
    return isinstance(entries, list) and any(
        isinstance(entry, dict) and (not MARKER_KEYS.isdisjoint(entry) or _is_axolotl_type(entry.get("type")))
        for entry in entries
    )


def _is_axolotl_type(value: object) -> bool:
    """Return whether a type is a name or a custom prompt of axolotl."""
    return isinstance(value, dict) or (isinstance(value, str) and (value in _TYPES or value in _REFUSED_TYPES))


def translate_config(content: Mapping[str, Any]) -> PeerDatasets:
    """Translate the data settings of a configuration of axolotl."""
    result = PeerDatasets(column_keys="field_messages:, message_property_mappings: or another type:")
    reader = result.check_job(content, JOB_KEYS)
    stated: _StatedSettings = {setting: {} for setting in _COMMON_SETTINGS}
    for block, default_type in (("datasets", None), ("pretraining_dataset", "pretrain")):
        entries = content.get(block) or []
        for number, value in enumerate(entries if isinstance(entries, list) else [entries]):
            path = f"{block}[{number}]"
            entry = {"path": value} if isinstance(value, str) and block == "pretraining_dataset" else value
            if not isinstance(entry, dict):
                result.problems.append(f"{path}: {quote_yaml(entry)} is not a mapping")
                continue
            typed_entry = {**entry, "type": default_type} if entry.get("type") is None and default_type else entry
            _translate_entry(PeerKeyReader(typed_entry, f"{path}.", result.problems), content, stated, result)
    if not result.datasets and not result.problems:
        result.problems.append("datasets: there are none; write at least one")
    trains_inputs = reader.flag("train_on_inputs")
    for setting, values in stated.items():
        _add_common_setting(setting, values, result, trains_inputs=trains_inputs)
    for key in ("base_model", "tokenizer_config"):
        result.take_text("tokenizer", reader, key)
    if (arguments := reader.mapping("chat_template_kwargs")) is not None:
        result.take("template_args", dict(arguments.values), "chat_template_kwargs")
    read_length_limit(reader, "sequence_len", "excess_length_strategy", _OVERLONG_POLICIES, result)
    read_validation_share(reader, "val_set_size", result)
    return result


def _translate_entry(
    reader: PeerKeyReader, content: Mapping[str, Any], stated: _StatedSettings, result: PeerDatasets
) -> None:
    result.notes += [f"{reader.path.rstrip('.')}: not taken: {text}" for text in reader.check(ENTRY_KEYS)]
    mapping, layout = _translate_type(reader)
    if mapping is None:
        return
    if layout:
        result.notes.append(
            f"{reader.path}type: axolotl writes {layout}, and batchloom the chat template; choose one with --template"
        )
    _state_common_settings(reader, content, mapping, stated, result)
    dataset: dict[str, Any] = {"mapping": mapping, "revision": reader.text("revision")}
    split = reader.text("split")
    if split is not None and (match := _FIRST_RECORDS.fullmatch(split)):
        split, dataset["max_samples"] = match[1], int(match[2])
    elif split is not None and not split.isidentifier():
        reader.problems.append(
            f"{reader.path}split: {split!r} is not supported; name a split, or its start: train[:500]"
        )
    dataset["split"] = split
    ds_type = reader.text("ds_type")
    if ds_type is not None and ds_type not in _DATA_TYPES:
        hint = suggest(ds_type, _DATA_TYPES)
        reader.problems.append(f"{reader.path}ds_type: {ds_type!r} is none of {', '.join(_DATA_TYPES)}{hint}")
    dataset["data_type"] = _DATA_TYPES.get(ds_type or "json")
    path, data_files = reader.text("path"), reader.texts("data_files")
    if reader.values.get("path") is None and not data_files:
        reader.problems.append(f"{reader.path}path: missing")
    is_builder = path in _DATA_TYPES
    if is_builder:
        dataset["data_type"] = _DATA_TYPES[str(path)]
    for data_file in data_files or [""]:
        located = {**dataset, "path": path}
        if data_file:
            # Without a repository, data_files are paths of their own.
            located |= {"path": data_file, "repository": None if is_builder else path}
        configs: list[str | None] = [*reader.texts("name")]
        for config in configs or [None]:
            located["config"] = config
            result.datasets.append({key: value for key, value in located.items() if value is not None})


def _translate_type(reader: PeerKeyReader) -> tuple[dict[str, str] | None, str]:
    """Return the mapping and layout of a type of prompt; None if it is not read."""
    kind = reader.values.get("type")
    if kind is None:
        # Tokenized data sets have no type.
        return {}, ""
    if not isinstance(kind, str) or kind not in _TYPES:
        remedy = _REFUSED_TYPES.get(kind) if isinstance(kind, str) else None
        hint = suggest(kind, _TYPES) if isinstance(kind, str) else ""
        reader.problems.append(
            f"{reader.path}type: {quote_yaml(kind)} is not read{hint}; "
            f"{remedy or 'name the columns of the records in a manifest (docs/how-to/prepare/manifests.md)'}"
        )
        return None, ""
    if kind in _TEXT_TYPES:
        return {"text": reader.text("field") or reader.text("text_column") or "text"}, ""
    if kind == _SEGMENTS_TYPE:
        return {"segments": "segments"}, ""
    if kind == _STEPS_TYPE:
        return {role: role for role in ("prompt", "completions", "labels")}, ""
    if kind in _CHAT_TYPES:
        return _translate_chat(reader, is_pair=kind == "chat_template.default"), ""
    prompt_type = _PROMPT_TYPES[kind]
    return dict(prompt_type.mapping), prompt_type.layout


def _translate_chat(reader: PeerKeyReader, *, is_pair: bool) -> dict[str, str]:
    """Return the mapping of conversations, or of pairs whose prompt they are."""
    messages = reader.text("field_messages", "messages") or "messages"
    if is_pair:
        mapping = {
            "prompt": messages,
            "chosen": reader.text("field_chosen", "chosen") or "chosen",
            "rejected": reader.text("field_rejected", "rejected") or "rejected",
        }
    else:
        mapping = {"messages": messages}
    if tools := reader.text("field_tools"):
        mapping["tools"] = tools
    properties = reader.mapping("message_property_mappings")
    names = {} if properties is None else {key: properties.text(key) for key in properties.values}
    if thinking := reader.text("field_thinking"):
        names.setdefault("reasoning_content", thinking)
    for key, name in names.items():
        if key in _MESSAGE_PROPERTIES:
            mapping |= {key: name} if name and name != key else {}
        elif name != key:
            reader.problems.append(
                f"{reader.path}message_property_mappings.{key}: only {', '.join(_MESSAGE_PROPERTIES)} can have other "
                "names"
            )
    if (training := reader.text("message_field_training")) and training not in _TRAIN_FLAGS:
        mapping["train"] = training
    if (detail := reader.text("message_field_training_detail")) and detail != "train_detail":
        mapping["train_detail"] = detail
    return mapping | _translate_roles(reader)


def _translate_roles(reader: PeerKeyReader) -> dict[str, str]:
    roles = reader.mapping("roles")
    if roles is None:
        return {}
    roles.check(declare_keys(" ".join(_ROLE_NAMES)))
    return {name: merge_values(values) for role, name in _ROLE_NAMES.items() if (values := roles.texts(role))}


def _choose_template(reader: PeerKeyReader, result: PeerDatasets) -> str | None:
    """Return the template that a data set names; None for the tokenizer's."""
    name, jinja = reader.text("chat_template"), reader.text("chat_template_jinja")
    if jinja is not None and name in (None, "jinja"):
        if "\n" in jinja or "{" in jinja:
            reader.problems.append(f"{reader.path}chat_template_jinja: write the template to a file, and name it here")
        return jinja
    if name is None or name.startswith("tokenizer_default"):
        return None
    if name not in _TEMPLATES:
        note = describe_own_template("chat_template", name, "axolotl")
        if note not in result.not_taken:
            result.not_taken.append(note)
    return _TEMPLATES.get(name)


def _state_common_settings(
    reader: PeerKeyReader,
    content: Mapping[str, Any],
    mapping: Mapping[str, str],
    stated: _StatedSettings,
    result: PeerDatasets,
) -> None:
    """Note the settings of a data set that a store has once."""
    train_on = _choose_train_on(reader, mapping, trains_inputs=content.get("train_on_inputs") is True)
    if train_on is not None:
        stated["train_on"][reader.path] = train_on
    if reader.values.get("type") in _CHAT_TYPES:
        chat_template = PeerKeyReader({**content, **reader.values}, reader.path, reader.problems)
        stated["template"][reader.path] = _choose_template(chat_template, result)
        stated["train_on_eos"][reader.path] = _choose_train_on_eos(reader)


def _choose_train_on(reader: PeerKeyReader, mapping: Mapping[str, str], *, trains_inputs: bool) -> str | None:
    """Return what is trained of a data set; None if no setting decides about it."""
    if not mapping or not {"text", "chosen", "label", "completions"}.isdisjoint(mapping):
        return None
    if reader.values.get("type") not in _CHAT_TYPES:
        return "all" if trains_inputs else None if "segments" in mapping else "assistant"
    names = reader.texts("roles_to_train")
    own_roles = {name: role for role, key in _ROLE_NAMES.items() for name in mapping.get(key, "").split("|")}
    known_roles = {role: role for role in _ALL_ROLES.split(",")} | _SHAREGPT_ROLES | own_roles
    reader.problems += [
        f"{reader.path}roles_to_train: {name!r} is none of {', '.join(filter(None, known_roles))}"
        for name in names
        if name not in known_roles
    ]
    if trains_inputs:
        return _ALL_ROLES
    if reader.values.get("roles_to_train") == []:
        return "flagged"
    return ",".join(dict.fromkeys(known_roles.get(name, "") for name in names)) or "assistant"


def _choose_train_on_eos(reader: PeerKeyReader) -> str:
    """Return the rule for the tokens that end turns, which has two names."""
    rule = reader.choice("train_on_eos", _EOS_RULES, "turn")
    turn_rule = reader.choice("train_on_eot", _EOS_RULES, rule)
    if turn_rule != rule:
        reader.problems.append(
            f"{reader.path}train_on_eot: {turn_rule!r} differs from train_on_eos, which is {rule!r}, and one rule "
            "decides about all tokens that end a turn; give both the same value"
        )
    return rule


def _add_common_setting(
    setting: str, stated: Mapping[str, str | None], result: PeerDatasets, *, trains_inputs: bool
) -> None:
    """Take the common value of all data sets."""
    key, default = _COMMON_SETTINGS[setting]
    values = list(dict.fromkeys(stated.values()))
    if len(values) > 1:
        (first, first_value), (second, second_value) = (
            next((path, value) for path, value in stated.items() if value == wanted) for wanted in values[:2]
        )
        result.problems.append(
            f"{second}{key}: {second_value or 'the tokenizer default'} differs from {first_value or 'that'} of "
            f"{first.rstrip('.')}, and a store has one {setting}; prepare two stores"
        )
    elif values and values[0] != default:
        result.take(setting, values[0], "train_on_inputs" if setting == "train_on" and trains_inputs else key)
