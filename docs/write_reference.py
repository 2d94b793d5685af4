"""Write the pages of docs/reference that derive from the code: one function for each page.

Names, settings, keys, metrics and errors are declared in the code. Run this script after changing a declaration.
"""

import dataclasses
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click

from batchloom import PlanSpec
from batchloom.batches import BATCH_KEYS, METRICS
from batchloom.chat import COLUMN_TABLES, FORM_RULES, MESSAGE_KEYS, PART_KEYS
from batchloom.chat.schema.message_names import MESSAGE_MAPPING_NAMES
from batchloom.chat.schema.schemas import INTERLEAVED_RULE, PROMPT_RULES, ROLE_MEANINGS, FormRule
from batchloom.chat.schema.train_flags import TRAIN_FLAGS
from batchloom.chat.schema.turns import ROLE_BY_SENDER
from batchloom.cli.commands import APP, COMMANDS, load_command
from batchloom.cli.options import QUIET
from batchloom.core import errors
from batchloom.core.settings import SettingField, list_settings
from batchloom.media import FrameSampling, MediaLimits
from batchloom.preparation import (
    ChatRecipe,
    DedupRecipe,
    ExecutionSettings,
    FimRecipe,
    MediaRecipe,
    ReadRecipe,
    Recipe,
    RunSettings,
)
from batchloom.text import KNOWN_STEPS
from batchloom.train import DataRequest, MediaPaths, StoreOptions, StreamOptions, TrainSettings

REFERENCE = Path(__file__).parent / "reference"
# An option in a sentence. As code it keeps its two hyphens, which a page may replace by a dash.
_OPTION_PATTERN = re.compile(r"(?<![\w`-])--[a-z][a-z-]*")


def format_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [f"| {' | '.join(map(_escape_cell, cells))} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])


def _escape_cell(text: str) -> str:
    """Escape a pipe anywhere, and outside code the characters that begin emphasis or HTML."""
    parts = text.replace("|", r"\|").split("`")
    parts[::2] = [part.replace("*", r"\*").replace("<", r"\<") for part in parts[::2]]
    return "`".join(parts)


def format_names(names: Iterable[str]) -> str:
    """Return names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def mark_options(sentence: str) -> str:
    """Mark the options in a sentence as code."""
    return _OPTION_PATTERN.sub(r"`\g<0>`", sentence)


# settings.md and recipe.schema.json

SETTINGS_HEAD = """# Settings

Each setting is declared once, in a settings class. Its option on the command line, its keyword in Python, its key in a
recipe file, the [schema of recipe files](recipe.schema.json) for editors and this page derive from the declaration.

A key with a dot is nested: `dedup: {mode: near, similarity: 0.7}`.
"""
# Prefix of the keys of a class: the mapping that holds them, and the beginning of their names in it.
_KEY_PREFIXES: dict[type, str] = {
    DedupRecipe: "dedup.",
    MediaRecipe: "media.",
    MediaLimits: "media.",
    FrameSampling: "media.video_",
    FimRecipe: "fim.",
}
_GROUPS: dict[str, tuple[type, ...]] = {
    "Preparing data: `prepare`, `stream`, `doctor`, recipe files": (
        *(Recipe, ReadRecipe, ChatRecipe, DedupRecipe, MediaRecipe),
    ),
    "Running `prepare`": (RunSettings, ExecutionSettings),
    "Fill-in-the-middle: Python and recipe files": (FimRecipe,),
    "Images, audio and video: Python and recipe files": (MediaLimits, FrameSampling),
    "Data order: `Loader`, `plan`, `explain`, `when`": (PlanSpec,),
    "Training: `train` and its configuration files": (TrainSettings,),
    "Data of a run: options of `train`": (DataRequest, StreamOptions, MediaPaths, StoreOptions),
}


def format_settings() -> str:
    """Return the page of all settings."""
    sections = [SETTINGS_HEAD]
    for title, classes in _GROUPS.items():
        rows = [_describe_setting(cls, field) for cls in classes for field in _list_fields(cls)]
        sections.append(f"## {title}\n\n{format_table(('setting', 'option', 'value', 'default', 'meaning'), rows)}")
    return "\n".join(sections)


def _list_fields(cls: type) -> list[SettingField]:
    """List the declared fields of a class, inherited ones last, as the command line does."""
    return sorted(list_settings(cls), key=lambda field: field.name not in cls.__annotations__)


def _describe_setting(cls: type, field: SettingField) -> tuple[str, ...]:
    option = format_names(field.option_names) if cls is not FimRecipe else ""
    key = _KEY_PREFIXES.get(cls, "") + field.name
    return f"`{key}`", option, _format_type(field), _format_default(field), mark_options(field.setting.help)


def _format_type(field: SettingField) -> str:
    setting = field.setting
    hint = setting.option_type if setting.check and setting.option_type else field.hint
    if typing.get_origin(hint) is typing.Literal:
        return format_names(typing.get_args(hint))
    name = _name_type(hint)
    # A check of the field itself replaces the bounds.
    if hint in (int, float) and not (setting.check and hint is field.hint):
        return name + _format_bounds(setting.minimum, setting.maximum, setting.below)
    return name


def _name_type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_name_type(option) for option in typing.get_args(hint) if option is not types.NoneType)
    names = {str: "text", int: "number", float: "number", bool: "yes or no", Path: "path", tuple: "list", list: "list"}
    kind = typing.get_origin(hint) or hint
    return names.get(kind) or ("mapping" if issubclass(kind, Mapping) else f"`{kind.__name__}`")


def _format_bounds(minimum: float | None, maximum: float | None, below: float | None) -> str:
    if below is not None:
        return f" from {minimum or 0:g} to below {below:g}"
    # Limits above 2**62 only keep a number inside its storage.
    least = f" from {int(minimum or 0):,}" if abs(minimum or 0) < 1 << 62 else ""
    return least + (f" to {int(maximum):,}" if maximum is not None and maximum < 1 << 62 else "")


def _format_default(field: SettingField) -> str:
    if field.setting.shown_default:
        return mark_options(field.setting.shown_default)
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return "" if field.default in (None, MISSING, ()) else str(field.default)


def format_recipe_schema() -> str:
    """Return the JSON schema of recipe files, for completion and checks in editors."""
    fields = [field for cls in (Recipe, ReadRecipe, ChatRecipe) for field in list_settings(cls)]
    properties = {field.name: _describe_value(field) for field in fields}
    properties["inputs"] = {
        "description": "Files, folders, globs, URLs and data sets, in reading order.",
        "type": "array",
        "items": {"type": ["string", "object"]},
    }
    modes = next(field for field in list_settings(DedupRecipe) if field.name == "mode")
    mode = _describe_value(modes)
    properties["dedup"] = {
        "description": mode["description"],
        "anyOf": [{"enum": mode["enum"]}, _describe_class(DedupRecipe)],
    }
    properties["media"] = _describe_class(MediaRecipe, MediaLimits, FrameSampling)
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Recipe of batchloom prepare",
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=1) + "\n"


def _describe_class(*classes: type) -> dict[str, Any]:
    properties = {
        _KEY_PREFIXES.get(cls, "").rpartition(".")[2] + field.name: _describe_value(field)
        for cls in classes
        for field in list_settings(cls)
    }
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _describe_value(field: SettingField) -> dict[str, Any]:
    """Return the schema of a setting's value; short forms of texts are allowed, null is the default."""
    setting, described = field.setting, {"description": field.setting.help}
    if field.default not in (None, MISSING, ()):
        described["default"] = field.default
    if typing.get_origin(field.hint) is typing.Literal:
        return {**described, "enum": [*typing.get_args(field.hint), None]}
    if dataclasses.is_dataclass(field.hint):
        return {**described, "anyOf": [{"type": ["number", "null"]}, _describe_class(field.hint)]}
    kind = typing.get_origin(field.hint) or field.hint
    names = {str: "string", int: "integer", float: "number", bool: "boolean", tuple: "array"}
    types_of_value = [names.get(kind, "object"), "null"]
    if (setting.option_type is str and kind is not str) or kind is tuple:
        types_of_value.append("string")
    bounds = {"minimum": setting.minimum, "maximum": setting.maximum, "exclusiveMaximum": setting.below}
    if kind not in (int, float) or setting.check:
        bounds = {}
    return {**described, "type": types_of_value, **{name: value for name, value in bounds.items() if value is not None}}


# python.md

# Names of the interface by heading and module. Errors have a page of their own.
_PUBLIC_NAMES: dict[str, dict[str, str]] = {
    "Prepare data": {
        "batchloom": "prepare Recipe DatasetConfig list_datasets",
        "batchloom.preparation": "ReadRecipe ChatRecipe DedupRecipe MediaRecipe FimRecipe read_recipe read_report "
        "prepare_mixture convert import_tokens",
        "batchloom.tokens": "train_tokenizer",
        "batchloom.chat": "detect_schema make_record_reader",
    },
    "Clean texts": {
        "batchloom.text": "parse_steps find_clean_problems make_clean_function TextCleaner detect_language",
    },
    "Open and maintain stores": {
        "batchloom": "open_store Store",
        "batchloom.store.read.store_reader": "StoredDocument StoreContents StoreProvenance StoreShards StoreLocation",
        "batchloom.store": "PreferencePairs LabelledAnswers StoredPrompts LabelledSteps export_store read_log "
        "remove_documents compact_store read_range_bounds",
    },
    "Plan the order": {
        "batchloom": "PlanSpec Plan Mixture Edit",
        "batchloom.plan": "SourceSpec Stage Mesh LanePlan parse_assumed_stores",
    },
    "Load batches": {
        "batchloom": "Loader stream",
        "batchloom.batches": "Batch PlanOptions BatchOptions MediaOptions Augment read_mixture PairMediaCollator",
        "batchloom.streaming": "merge_states",
        "batchloom.batches.forms": "to_padded to_shifted to_varlen to_megatron",
        "batchloom.batches.masks": "add_dense_mask add_block_mask add_image_masks",
    },
    "Measure a run": {
        "batchloom.batches": "Meter ModelCost transformer_cost",
        "batchloom.adapters.logging": "send_to_tensorboard send_to_wandb send_to_jsonl send_to_all",
    },
    "Check and explain": {
        "batchloom": "check doctor inspect explain when",
        "batchloom.analysis": "forecast_plan PlanRequest resolve_plan read_journal",
        "batchloom.analysis.compare": "CompareSpec compare judge_loss_curve read_loss_curve",
    },
    "Train": {
        "batchloom.train": "run_worker",
    },
    "Train with a framework": {
        "batchloom.adapters": "apply_loss_weights sum_next_token_losses sum_token_losses MetricsCallback "
        "FSDP2SFTTrainer FSDP2Arguments",
        "batchloom.adapters.agreement": "require_agreement",
        "batchloom.adapters.requirements": "require_installed",
        "batchloom.adapters.pytorch": "LoaderIterable LoaderDataset",
        "batchloom.adapters.fsdp2": "shard_model save_fsdp2 load_newest_fsdp2",
        "batchloom.adapters.hugging_face": "make_trainer_parts TrainerParts compute_row_losses compute_token_loss",
        "batchloom.adapters.accelerate": "attach require_isolation get_loss_scale save_checkpoint "
        "load_newest_checkpoint",
        "batchloom.adapters.deepspeed": "make_batch_size_config check_engine loss_multiplier save_engine_checkpoint "
        "load_newest_engine_checkpoint",
        "batchloom.adapters.lightning": "LoaderDataModule LightningMetricsCallback",
        "batchloom.adapters.megatron": "get_megatron_rank make_megatron_iterator needs_attention_mask "
        "count_consumed_samples resume_from_samples list_megatron_prefixes",
        "batchloom.adapters.torchtitan": "StoreDataLoader",
        "batchloom.adapters.ray_train": "get_rank_and_world_size report_step load_restored_state",
    },
    "Test your code": {
        "batchloom.testing": "assert_packed_equals_unpacked check_loader check_source write_store append_documents",
    },
    "Keep the calls of common loaders: `batchloom.compat`": {
        "batchloom.compat": "load_jsonl_file iter_jsonl_file SFTDataset MultiModalDataset MultiModalIterableDataset "
        "load_lmms_engine_config create_huggingface_dataset GPTDataLoader IndexedDataset PretrainingDataset "
        "WorkerConfig WorkerClient",
    },
}
PYTHON_HEAD = """# Python interface

```python
import batchloom

assert batchloom.PlanSpec(seq_len=2048, global_batch_size=32).packing == "best_fit"
```

Names of `batchloom` are loaded on first use. Import all other names from the module in the table. Names that are not on
this page, nor on the pages of [settings](settings.md) and [errors](errors.md), are internal and may change.
"""


def format_python() -> str:
    """Return the page of the public names, whose details Sphinx takes from the docstrings."""
    sections = [PYTHON_HEAD]
    for title, modules in _PUBLIC_NAMES.items():
        members = [(module, name) for module, names in modules.items() for name in names.split()]
        rows = [(f"`{module}`", f"`{name}`", summarize(_find(module, name))) for module, name in members]
        directives = "".join(_format_directive(module, name) for module, name in members)
        sections.append(f"## {title}\n\n{format_table(('module', 'name', 'meaning'), rows)}")
        sections.append(f"~~~{{eval-rst}}\n{directives}~~~\n")
    error_names = [name for name in importlib.import_module("batchloom").__all__ if name.endswith("Error")]
    sections.append(f"## Errors\n\nFrom `batchloom`: {format_names(error_names)}; see [errors](errors.md).\n")
    return "\n".join(sections)


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def summarize(documented: Any) -> str:
    """Return the first paragraph of a docstring as Markdown."""
    summary = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", summary).replace("``", "`")


def _format_directive(module: str, name: str) -> str:
    """Return the reStructuredText directive with which Sphinx inserts the docstring."""
    if inspect.isclass(_find(module, name)):
        return f".. autoclass:: {module}.{name}\n   :members:\n"
    return f".. autofunction:: {module}.{name}\n"


# batch-keys.md

BATCH_KEYS_HEAD = """# Keys of a batch

A batch of a `Loader` is a dict with these keys, as numpy arrays or torch tensors (`output=`).

```python
import batchloom
from batchloom.testing import write_store

store = write_store("tiny", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
sizes = {"seq_len": 8, "global_batch_size": 1, "output": "numpy"}
rows = batchloom.Loader(store, **sizes)[0]
assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
varlen = batchloom.Loader(store, form="varlen", **sizes)[0]
assert varlen["cu_seq_lens_q"].tolist() == [0, 4, 7]
```

`form="rows"` gives padded rows: R rows of this rank and S = `seq_len` tokens. `form="varlen"` gives the spans of these
rows without padding: T tokens and N spans. A step without spans is one token of padding.
"""
BATCH_KEYS_TAIL = """
- **Ids** and labels are int32 with `BatchOptions(dtype="int32")`.
- **Context parallelism** gives each rank a slice of each row or span, so S and T are smaller.
- **Media.** A step with images, audio or video also has the features of the processor, with its names, dtypes and
  shapes (`pixel_values`, `image_grid_thw`, `input_features`, ...), joined over the media of the batch in their order.
- **No `attention_mask`**: the restarting positions separate documents, and an all-ones mask would join them. For models
  that need a mask, `batchloom.batches.masks` makes one; `batchloom.batches.forms` makes other forms
  ([Python interface](python.md#load-batches)).
- **Attributes.** `batch.step` is the optimizer step, `batch.origin` names the data, `batch.layout` has the bounds of
  the spans. A batch that a framework rebuilds from its arrays loses them.
"""


def format_batch_keys() -> str:
    """Return the page of the keys of a batch."""
    head = ("key", "dtype", "rows", "varlen", "present", "meaning")
    rows = [
        (f"`{key.name}`", key.dtype, key.rows_shape or "-", key.varlen_shape, key.presence, key.meaning)
        for key in BATCH_KEYS
    ]
    return f"{BATCH_KEYS_HEAD}\n{format_table(head, rows)}{BATCH_KEYS_TAIL}"


# metrics.md

METRICS_HEAD = """# Metrics

A `Meter` counts the steps of a loader and returns flat metrics, `dict[str, float]`, for any logger.

```python
from batchloom import Loader
from batchloom.adapters.logging import send_to_all, send_to_jsonl
from batchloom.batches import Meter, transformer_cost
from batchloom.testing import write_store

store = write_store("tiny", [[n % 256 for n in range(k)] for k in range(1, 200)])
loader = Loader(store, seq_len=256, global_batch_size=8, epochs=2, output="numpy")
cost = transformer_cost(parameters=124_000_000, layers=12, width=768)
meter = Meter(loader, cost=cost, peak_flops=989e12)
send = send_to_all(send_to_jsonl("run/metrics.jsonl"))

for batch in meter.over(loader):
    ...  # forward, backward, optimizer step
    meter.step(batch)
    if (batch.step + 1) % 5 == 0:
        send(meter.metrics(), batch.step + 1)
```

Metrics that depend on lengths come from the plan. So one rank reports them for all ranks, without communication, and
cannot hang. Only times are measured. Tokens never include padding. A rank is a data-parallel rank; peers in a tensor-,
context- or pipeline-parallel mesh count as devices.
"""
METRICS_TAIL = """
- **Steps.** `metrics()` covers the steps since its last call, at most the latest 1,024 steps and 65,536 sequences.
  `meter.step(batch)` marks the end of an optimizer step; several calls for one step, as for micro-batches, are added.
  Give `meter.step(number)` if a framework rebuilds the batch. `meter.begin()` excludes the time before it.
- **MFU** follows PaLM, appendix B ([arXiv:2204.02311](https://arxiv.org/abs/2204.02311)): 6 N + 12 L H Q T operations
  per token. T is the length of the token's span, not `seq_len`. Causal masking saves nothing, and recomputation is not
  counted. `peak_flops` is that of one device for the dtype in use.
- **Media.** With images or audio, imbalance is that of attention cost or media tokens, whichever is worse.
- **Streams** do not know the rows of other ranks, so their metrics are of this rank, with the prefix `rank/`.
- **Clocks of other ranks.** With `torch.distributed`, a thread writes this rank's clock to the key-value store of the
  process group about once a second. No collective is used. A rank that never steps does not appear; a dead one keeps
  its last values. `Meter(loader, exchange=False)` turns this off.
- **Loggers** are functions of (metrics, step): `send_to_jsonl(path)`, `send_to_tensorboard(writer)`,
  `send_to_wandb(run)` and `send_to_all(...)` of `batchloom.adapters.logging`.
- **Trainers.** Hugging Face's trainers take `MetricsCallback(Meter(loader), send)` of `batchloom.adapters`, Lightning
  `LightningMetricsCallback()` of `batchloom.adapters.lightning`. `batchloom train` and `FSDP2SFTTrainer` write metrics
  to `log.jsonl`.
"""


def format_metrics() -> str:
    """Return the page of the metrics."""
    rows = [(f"`{metric.name}`", metric.unit, metric.scope, metric.meaning) for metric in METRICS]
    return f"{METRICS_HEAD}\n{format_table(('name', 'unit', 'scope', 'meaning'), rows)}{METRICS_TAIL}"


# errors.md

ERRORS_HEAD = """# Errors

Every error that batchloom raises on purpose derives from `batchloom.BatchloomError` and from the built-in exception
that fits. Its message says what was found, where, and what to do.

```python
import batchloom

try:
    batchloom.prepare("missing.jsonl", out="store", tokenizer="bytes")
except FileNotFoundError as error:
    assert isinstance(error, batchloom.BatchloomError)
    assert "missing.jsonl" in str(error)
```

Import the names that `batchloom` does not have from `batchloom.core.errors`. The command line turns an error into an
[exit code](cli.md#exit-codes).
"""


def format_errors() -> str:
    """Return the page of the error classes, as a tree."""
    head = ("class", "built-in base", "meaning")
    return f"{ERRORS_HEAD}\n{format_table(head, _list_errors(errors.BatchloomError, 0))}"


def _list_errors(error: type, depth: int) -> list[tuple[str, ...]]:
    """List a class of core/errors.py and, indented, the classes that derive from it."""
    built_in = [base for base in error.__bases__ if not issubclass(base, errors.BatchloomError)]
    names = [f"{base.__module__.split('.')[0]}.{base.__name__}".removeprefix("builtins.") for base in built_in]
    subclasses = [cls for cls in error.__subclasses__() if cls.__module__ == errors.__name__]
    row = ("&nbsp;&nbsp;" * 2 * depth + f"`{error.__name__}`", format_names(names), summarize(error))
    return [row, *(line for cls in subclasses for line in _list_errors(cls, depth + 1))]


# schemas.md

SCHEMAS_HEAD = """# Schemas

The columns of a record decide whether it is a text, a conversation, a preference, a prompt or token ids.

```python
from batchloom.chat import detect_schema, make_record_reader

records = [{"instruction": "Add.", "input": "1 + 2", "output": "3"}]
schema = detect_schema(records)
assert schema.description == "instruction/output -> 2 turns, with input"
assert make_record_reader(schema)(records[0]).messages == [
    {"role": "user", "content": "Add.\\n1 + 2"},
    {"role": "assistant", "content": "3"},
]
```

`batchloom prepare` detects the schema of each source from its first records and reports it before work starts.
`--map role=column` names other columns; `--text-field NAME` reads one column as the text and checks no others.

## Records

The first row whose columns are in at least half of the first records applies. If there is none, the row that
most records match applies. Of several names, the first existing column is read. With an instruction, `tools` is read
only if it is mapped. A conversation with images, audio or video is refused without `--processor`.
"""
SCHEMAS_PROMPTS = """
With `--prompts`, records are read for their prompts only, and `--carry` stores further columns with each prompt:
"""
SCHEMAS_ROLES = """
## Roles

`--map` takes these roles; without it, the columns in the table are read. A column may be a path such as
`answers.text[0]`. An empty column leaves a role out (`context=`). A text or answer that is missing, empty or
not text makes the record a bad one; numbers are never converted.
"""
SCHEMAS_MESSAGES = """
## Messages

Messages are a list of dicts, or JSON text of one, with `role` and `content` (or ShareGPT's `from` and `value`). The
roles are `system`, `user`, `assistant`, `tool` and `developer`. Also read:
"""
SCHEMAS_NAMES = """
A content is a string or typed parts. Other keys, such as `tool_calls` and `reasoning_content`, go to the chat template.

### Names inside messages

In `--map`, these names stand for keys and roles of messages: {names}. For example:
`--map messages=dialog,role=speaker,content=utterance,assistant=bot|agent`.

### Train flags

Flags of a message override `--train-on`. Segments may have all but `train_detail`. Flags that contradict each other
are an error.
"""
SCHEMAS_WEIGHTS = """
Ranges count characters of the content and include their ends. The stop token has the weight of its turn, without a
factor.

## Loss weights

The weight of a token is the product of the weights of its record, of its message, segment or token, and of its part. A
weight is from 0 to 55. The store rounds it to one of [256 values](format.md#weights). A record of weight 0 is dropped.
Preferences have no weights.

## All other columns and keys

Nothing is ignored silently. A key that is not read is one of these:

- **Unsupported**: another library gives it a meaning that changes what is trained. It is an error with the remedy in
  the table below.
- **Unknown**: it is left out, and `prepare` and `doctor` report it.
- **Metadata**, left out without a report: {metadata}; in messages also {message_metadata}.

`--ignore lang,score` treats columns and message keys as absent, unsupported ones included. Values without effect are
accepted: null, an empty list or text, a `weight` or `loss_scale` of 1.
"""
_FLAG_KINDS = {
    "switch": "true or false",
    "inverted switch": "true (not trained) or false",
    "weight": "a weight; 0 is not trained, another selects the turn",
    "factor": "a factor of a turn that is trained anyway",
    "ranges": "`[{begin_offset, end_offset, train}]`; the rest of the content is not trained",
}


def format_schemas() -> str:
    """Return the page of the schemas of records."""
    form_head = ("columns", "optional roles", "become")
    text_rule, metadata = FORM_RULES[-1], COLUMN_TABLES["text"].metadata
    rules = (*FORM_RULES[:-1], INTERLEAVED_RULE, text_rule)
    senders = [(f"`{sender}`", role) for sender, role in sorted(ROLE_BY_SENDER.items()) if sender != role]
    flags = [
        (f"`{name}`", rule.library, _FLAG_KINDS[rule.kind], "yes" * rule.is_assistant_only, "yes" * rule.is_for_parts)
        for name, rule in TRAIN_FLAGS.items()
    ]
    flag_head = ("flag", "of", "value", "selects assistant turns only", "in parts")
    return "".join(
        (
            SCHEMAS_HEAD,
            "\n" + format_table(form_head, map(_describe_form, rules)),
            SCHEMAS_PROMPTS,
            "\n" + format_table(form_head, map(_describe_form, PROMPT_RULES)),
            SCHEMAS_ROLES,
            "\n" + format_table(("role", "columns", "meaning"), _list_roles()),
            SCHEMAS_MESSAGES,
            "\n" + format_table(("role in the records", "becomes"), senders),
            SCHEMAS_NAMES.format(names=format_names(MESSAGE_MAPPING_NAMES)),
            "\n" + format_table(flag_head, flags),
            SCHEMAS_WEIGHTS.format(
                metadata=format_names(sorted(metadata)),
                message_metadata=format_names(sorted(MESSAGE_KEYS.metadata - metadata)),
            ),
            "\n" + format_table(("key", "of", "library", "its effect there", "instead"), _list_unsupported()),
        )
    )


def _describe_form(rule: FormRule) -> tuple[str, ...]:
    required = " + ".join(" or ".join(f"`{name}`" for name in names) for names in rule.required.values())
    return required, format_names(rule.optional), rule.result


def _list_roles() -> list[tuple[str, ...]]:
    """List the roles with the columns that are read for them, in any kind of record."""
    columns: dict[str, dict[str, None]] = {role: {} for role in ROLE_MEANINGS}
    for rule in (*FORM_RULES, INTERLEAVED_RULE):
        for role, names in (*rule.required.items(), *rule.optional.items()):
            columns[role] |= dict.fromkeys(names)
    return [(f"`{role}`", format_names(columns[role]), meaning) for role, meaning in ROLE_MEANINGS.items()]


def _list_unsupported() -> list[tuple[str, ...]]:
    """List each unsupported key once, with the kinds of records that it belongs to."""
    kinds: dict[tuple[str, Any], list[str]] = {}
    for kind, table in COLUMN_TABLES.items():
        for name, entry in table.unsupported.items():
            kinds.setdefault((name, entry), []).append(kind)
    rows = [(name, f"column: {', '.join(names)}", entry) for (name, entry), names in kinds.items()]
    rows += [(name, "message", entry) for name, entry in MESSAGE_KEYS.unsupported.items()]
    rows += [(name, "part of a content", entry) for name, entry in PART_KEYS.items()]
    return [(f"`{name}`", place, entry.library, entry.effect, entry.remedy) for name, place, entry in rows]


# cleaning-steps.md

CLEANING_HEAD = """# Cleaning steps

The steps of `--clean NAME[,NAME...]`, in the recommended order. [Clean and filter texts](../how-to/prepare/cleaning.md)
shows how to use them. In a recipe file a step may have settings: `clean: [html, {length: {least_words: 20}}]`.
A limit of `null` (`None` in Python) is off.
"""


def format_cleaning_steps() -> str:
    """Return the page of the cleaning steps and their settings."""
    sections = [CLEANING_HEAD]
    for name, step in KNOWN_STEPS.items():
        summary, meanings = _parse_attributes(step.settings)
        packages = sorted({f"`{package}`" for _, package in step.requirements})
        needs = f" Needs {' and '.join(packages)} (extra `clean`)." if packages else ""
        help_text = step.help[0].upper() + step.help[1:]
        rows = [
            (f"`{field.name}`", _format_step_default(field), meanings[field.name])
            for field in dataclasses.fields(step.settings)
        ]
        notes = "" if summary.startswith("Settings of the step") else f"\n{summary}\n"
        table = format_table(("setting", "default", "meaning"), rows)
        sections.append(f"\n## `{name}`\n\n{help_text}.{needs}\n{notes}\n{table}")
    return "".join(sections)


def _parse_attributes(settings: type) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the meaning of each attribute."""
    text = inspect.getdoc(settings) or ""
    summary, _, attributes = text.partition("\nAttributes:\n")
    meanings = {}
    for match in re.finditer(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        meaning = " ".join(match[2].split()).rstrip(".").replace("``", "`")
        meanings.update(dict.fromkeys(match[1].split(", "), meaning[0].upper() + meaning[1:] + "."))
    return " ".join(summary.split()).replace("``", "`"), meanings


def _format_step_default(field: "dataclasses.Field[Any]") -> str:
    value = {} if field.default is MISSING else field.default
    if value is None or (isinstance(value, (dict, tuple)) and not value):
        return ""
    plain = json.dumps(value, ensure_ascii=False)
    return f"`{plain if isinstance(value, (tuple, bool)) else value}`"


# cli.md

CLI_HEAD = """# Command line

`batchloom` and `python -m batchloom` are the same command. `batchloom COMMAND --help` prints the options below.
"""
CLI_OUTPUT = """## Output

Commands print their result on standard output, and progress, notes, warnings and errors on standard error.
`demo`, `train` and `worker` print their progress on standard output too. With `--json`, `train` and `worker` print it
on standard error.

- `--json` prints the result as one JSON document on one line. Standard output holds nothing else.
- `NO_COLOR=1` removes colors. `FORCE_COLOR=1` keeps them in a pipe. `TERM=dumb` removes colors and redrawn lines.
- An underscore in the name of an option reads as a hyphen: `--seq_len` is `--seq-len`.
"""
CLI_COMPLETION = """## Shell completion

`batchloom --install-completion` completes commands, options, choices and file names by the Tab key.
A second call changes nothing.

| shell | script | loaded by |
|---|---|---|
| bash, from 4.4 | `~/.local/share/batchloom/completion.bash` | a line in `~/.bashrc` |
| zsh | `~/.local/share/batchloom/completion.zsh` | a line in `~/.zshrc` |
| fish | `~/.config/fish/completions/batchloom.fish` | fish |

`XDG_DATA_HOME`, `XDG_CONFIG_HOME` and `ZDOTDIR` replace the folders `~/.local/share`, `~/.config` and `~`.
"""


def format_cli() -> str:
    """Return the page of the commands, their options and the exit codes."""
    context = click.Context(APP, info_name="batchloom", **APP.context_settings)
    general_options = [*APP.get_params(context), QUIET]
    commands = [(f"[`{name}`](#batchloom-{name})", entry[1]) for name, entry in COMMANDS.items()]
    codes = [(str(int(code)), code.meaning) for code in errors.ExitCode]
    sections = [
        CLI_HEAD,
        format_table(("command", "result"), commands),
        "## General options\n",
        "`-q` and `-h` follow the name of any command, as in `batchloom check store -q`. The others stand alone.\n",
        _format_options(context, general_options),
        CLI_OUTPUT,
        "## Exit codes\n",
        format_table(("code", "meaning"), codes),
        CLI_COMPLETION,
        *map(_format_command, COMMANDS),
    ]
    return "\n".join(sections)


def _format_command(name: str) -> str:
    command = load_command(name)
    context = click.Context(command, info_name=f"batchloom {name}")
    params = [param for param in command.params if param is not QUIET]
    arguments = [param for param in params if isinstance(param, click.Argument)]
    options = [param for param in params if isinstance(param, click.Option)]
    usage = " ".join([context.info_name or "", *command.collect_usage_pieces(context)])
    parts = [
        f"## batchloom {name}\n",
        f"{mark_options(inspect.cleandoc(command.help or ''))}\n",
        _format_block("text", [usage]),
    ]
    if arguments:
        parts.append(format_table(("argument", "meaning"), [_describe_argument(param, context) for param in arguments]))
    # Options without a heading come first, as in the help text.
    for panel in dict.fromkeys([None, *(getattr(option, "panel", None) for option in options)]):
        members = [option for option in options if getattr(option, "panel", None) == panel]
        if members:
            parts += [f"**{panel}**\n"] * (panel is not None)
            parts.append(_format_options(context, members))
    parts.append(_format_block("sh", (command.epilog or "").splitlines()))
    return "\n".join(parts)


def _describe_argument(param: click.Argument, context: click.Context) -> tuple[str, str]:
    placeholder, help_text = param.get_help_record(context) or ("", "")
    return f"`{placeholder}`", mark_options(help_text.replace("  [required]", " Required."))


def _format_options(context: click.Context, options: Iterable[click.Parameter]) -> str:
    rows = [
        (
            format_names([*option.opts, *option.secondary_opts]),
            _format_option_value(option),
            mark_options(_format_option_default(option, context)),
            mark_options(option.help or ""),
        )
        for option in options
        if isinstance(option, click.Option)
    ]
    return format_table(("option", "value", "default", "meaning"), rows)


def _format_option_value(option: click.Option) -> str:
    if option.is_flag:
        return ""
    return format_names((option.metavar or "").strip("[]").split("|"))


def _format_option_default(option: click.Option, context: click.Context) -> str:
    if option.required:
        return "required"
    default = option.get_help_extra(context).get("default", "")
    # click puts a default that is described in words in parentheses.
    return default[1:-1] if default.startswith("(") else default


def _format_block(language: str, lines: Sequence[str]) -> str:
    return f"```{language}\n" + "".join(f"{line}\n" for line in lines) + "```\n"


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": format_settings,
    "recipe.schema.json": format_recipe_schema,
    "cli.md": format_cli,
    "python.md": format_python,
    "batch-keys.md": format_batch_keys,
    "metrics.md": format_metrics,
    "errors.md": format_errors,
    "schemas.md": format_schemas,
    "cleaning-steps.md": format_cleaning_steps,
}

if __name__ == "__main__":
    for page, format_page in PAGES.items():
        (REFERENCE / page).write_text(format_page())
