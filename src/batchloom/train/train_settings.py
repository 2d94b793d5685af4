"""Settings of a run: the model's shape, the optimizer, the size of a step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from batchloom import PlanSpec
from batchloom.core.errors import InputMissingError, SettingsError
from batchloom.core.files import read_json_object
from batchloom.core.settings import (
    Setting,
    find_problems,
    from_plain,
    is_positive_number,
    list_settings,
    quote_value,
    raise_problems,
    suggest,
)

# Limits of a plan; a run's other counts of steps and rows follow them.
_PLAN_SETTINGS = {field.name: field.setting for field in list_settings(PlanSpec)}
MAX_STEPS, MAX_TOKENS, MAX_ROWS = (
    int(_PLAN_SETTINGS[name].maximum or 0) for name in ("steps", "seq_len", "global_batch_size")
)
# Far beyond the memory of any machine; the memory estimate multiplies these numbers.
_MAX_WIDTH = 1 << 24
_MAX_LAYERS = 4096
_MAX_IDS = 1 << 31

PRETRAINED_KEYS = {"init", "attn_implementation"}
# Groups of TrainSettings; an override of a group changes the given fields only.
_GROUPS = ("model", "optim", "order")

# Options of a run under their headings, and fields that only a configuration file sets.
DataSetting = partial(Setting, panel="Data")
ModelSetting = partial(Setting, panel="Model and step")
RunSetting = partial(Setting, panel="Run")
_FileSetting = partial(Setting, has_option=False)
_CONFIGURED = "that of the configuration"

Overlong = Literal["split", "drop", "truncate", "error"]


def _check_positive(value: object) -> str:
    return "" if is_positive_number(value) else "is not a finite number above 0"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Shape of the model in ``gpt_model.py``."""

    layers: Annotated[int, _FileSetting(help="Transformer layers.", minimum=1, maximum=_MAX_LAYERS)]
    heads: Annotated[int, _FileSetting(help="Attention heads per layer.", minimum=1, maximum=_MAX_WIDTH)]
    width: Annotated[
        int,
        _FileSetting(
            help="Size of the residual stream; a multiple of 2 * heads (rotary needs pairs).",
            minimum=2,
            maximum=_MAX_WIDTH,
        ),
    ]
    hidden: Annotated[
        int | None,
        _FileSetting(
            help="Hidden width of the SwiGLU.",
            minimum=1,
            maximum=_MAX_WIDTH,
            shown_default="8/3 of the width, rounded up to a multiple of 64",
        ),
    ] = None
    rotary_base: Annotated[
        float,
        _FileSetting(
            help="Base of the rotary frequencies; the longest period is about this many tokens times 2 pi.",
            minimum=1,
            maximum=1e12,
        ),
    ] = 10_000.0
    vocab_size: Annotated[
        int | None,
        _FileSetting(
            help="Vocabulary size; needed only for data without a tokenizer.",
            minimum=2,
            maximum=_MAX_IDS,
            shown_default="the tokenizer's",
        ),
    ] = None

    def problems(self) -> list[str]:
        """List the invalid values, each problem with its path."""
        problems = find_problems(self, "model.")
        if 0 < self.heads <= _MAX_WIDTH and self.width % (2 * self.heads):
            problems.append(
                f"model.width: {quote_value(self.width)} is not a multiple of {2 * self.heads} (2 x {self.heads} heads)"
            )
        return problems


@dataclass(frozen=True, slots=True)
class PretrainedSettings:
    """Hugging Face causal language model in a local folder, to be finetuned.

    Attributes:
        init: folder with config.json and safetensors weights.
        attn_implementation: name of the attention in transformers; None for SDPA if the model supports it.
    """

    init: str
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] | None = (
        None
    )

    def problems(self) -> list[str]:
        """List the problems that can be found without reading the folder."""
        return [] if self.init else ["model.init: does not name a folder"]


# Overrides of the defaults of TrainSettings: a pretrained model needs smaller updates.
_FINETUNING_DEFAULTS = {"steps": 100}
_FINETUNING_OPTIM = {"lr": 1e-5, "warmup_steps": 10, "weight_decay": 0.0, "beta2": 0.999}
_FINETUNING_SEQ_LEN = 2048


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW with a learning rate schedule of linear warm-up and cosine decay."""

    lr: Annotated[float, ModelSetting(help="Peak learning rate.", check=_check_positive, shown_default=_CONFIGURED)] = (
        1e-3
    )
    final_lr_share: Annotated[
        float, _FileSetting(help="Learning rate of the last step as a fraction of lr.", minimum=0, maximum=1)
    ] = 0.1
    warmup_steps: Annotated[int, _FileSetting(help="Steps until lr is reached.", minimum=0, maximum=MAX_STEPS)] = 20
    weight_decay: Annotated[
        float, _FileSetting(help="Weight decay of matrices; gains have none.", minimum=0, maximum=1e6)
    ] = 0.1
    beta1: Annotated[float, _FileSetting(help="Decay of the gradient's mean.", minimum=0, below=1)] = 0.9
    beta2: Annotated[float, _FileSetting(help="Decay of the gradient's square.", minimum=0, below=1)] = 0.95
    clip: Annotated[float, _FileSetting(help="Maximum norm of the gradient.", check=_check_positive)] = 1.0


@dataclass(frozen=True, slots=True)
class OrderSettings:
    """Packing, data order and distribution over ranks; see ``Loader``.

    A resumed run may change ``uneven`` and ``balance``.
    """

    packing: Annotated[str, replace(_PLAN_SETTINGS["packing"], panel="Data")] = "best_fit"
    overlong: Annotated[Overlong | None, replace(_PLAN_SETTINGS["overlong"], panel="Data")] = None
    shuffle: bool = True
    noise_prob: Annotated[
        float | None,
        DataSetting(
            help="Fraction of the input tokens that are replaced by random ones during training; labels stay.",
            shown_default="0",
        ),
    ] = None
    uneven: Annotated[
        Literal["refuse", "pad"],
        ModelSetting(
            help="Policy for a step that ranks and passes do not divide: refuse, or pad with rows without loss."
        ),
    ] = "refuse"
    balance: Annotated[
        bool,
        ModelSetting(
            help="Assign the rows of each step to ranks by their attention cost. Without it they are dealt in turn."
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSettings:
    """Steps at which a run is evaluated, saved and logged in more detail."""

    eval_interval: Annotated[
        int,
        RunSetting(
            help="Number of steps between evaluations on the val subset; 0 for the end only.",
            minimum=0,
            maximum=MAX_STEPS,
            shown_default=_CONFIGURED,
        ),
    ] = 100
    eval_batches: Annotated[
        int | None,
        RunSetting(help="Number of batches of an evaluation.", minimum=1, maximum=MAX_STEPS, shown_default=_CONFIGURED),
    ] = 20
    save_interval: Annotated[
        int,
        RunSetting(
            help="Number of steps between checkpoints; 0 for the end only.",
            minimum=0,
            maximum=MAX_STEPS,
            shown_default=_CONFIGURED,
        ),
    ] = 200
    log_row_loss: Annotated[
        int,
        RunSetting(
            help="Number of steps between log entries that hold the loss of each row; 0 for never.",
            minimum=0,
            maximum=MAX_STEPS,
        ),
    ] = 0


@dataclass(frozen=True, slots=True)
class TrainSettings(IntervalSettings):
    """All settings that determine the computation of a run.

    ``model`` is the shape of the model, or the folder of a pretrained one.
    """

    model: PretrainedSettings | ModelSettings
    optim: OptimSettings = field(default_factory=OptimSettings)
    steps: Annotated[
        int,
        RunSetting(
            help="Number of steps of the complete run.",
            minimum=1,
            maximum=MAX_STEPS,
            option="--max-iters",
            shown_default=_CONFIGURED,
        ),
    ] = 1000
    seq_len: Annotated[
        int,
        ModelSetting(help="Number of tokens of a sequence.", minimum=2, maximum=MAX_TOKENS, shown_default=_CONFIGURED),
    ] = 1024
    global_batch_size: Annotated[
        int,
        ModelSetting(
            help="Number of sequences of a step over all ranks.", minimum=1, maximum=MAX_ROWS, shown_default=_CONFIGURED
        ),
    ] = 32
    batch_size: Annotated[
        int | None,
        ModelSetting(
            help="Number of sequences in one forward pass of a rank; lower it if memory runs out.",
            minimum=1,
            maximum=MAX_ROWS,
            shown_default="all of the rank",
        ),
    ] = None
    order: OrderSettings = field(default_factory=OrderSettings)
    seed: Annotated[
        int,
        ModelSetting(
            help="Seed of the data order and of the initial weights.", minimum=-(1 << 127), maximum=(1 << 128) - 1
        ),
    ] = 0
    compile: Annotated[bool, ModelSetting(help="Compile the model with torch.compile.")] = False

    def __post_init__(self) -> None:
        raise_problems(find_problems(self) + self.model.problems() + find_problems(self.optim, "optim."))


def list_model_names() -> list[str]:
    """Return the names of the configurations that ship with the package."""
    folder = resources.files("batchloom.train") / "configs"
    names = [file.name for file in folder.iterdir() if file.name.endswith(".json")]
    return sorted(name.removesuffix(".json") for name in names)


def load_named_config(name: str) -> dict[str, Any]:
    """Return the plain values of a configuration that ships with the package.

    Raises:
        SettingsError: there is none of that name.
    """
    names = list_model_names()
    if name not in names:
        raise SettingsError([f"--model-name: {name!r} is none of {', '.join(names)}{suggest(name, names)}"])
    config: dict[str, Any] = json.loads((resources.files("batchloom.train") / "configs" / f"{name}.json").read_bytes())
    return config


def read_config(path: Path) -> dict[str, Any]:
    """Read the plain values of a configuration file without validating them.

    Raises:
        InputMissingError: there is no such file.
        SettingsError: it is not a JSON object.
    """
    if not path.exists():
        raise InputMissingError(
            f"{path}: no such file; --config-file takes a JSON file such as those behind --model-name "
            f"({', '.join(list_model_names())})"
        )
    try:
        return read_json_object(path)
    except ValueError as error:
        problem = f"{path}: {error}; --config-file takes a JSON file as in configs/"
        raise SettingsError([problem]) from error


def apply_finetuning_defaults(plain: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """Fill in the finetuning defaults of a configuration.

    Args:
        plain: plain values of a configuration file.
        longest: maximum context length of the model; None for no bound.
    """
    seq_len = min(_FINETUNING_SEQ_LEN, longest or _FINETUNING_SEQ_LEN)
    config = {**_FINETUNING_DEFAULTS, "seq_len": seq_len, **plain}
    optim = plain.get("optim", {})
    if isinstance(optim, dict):
        config["optim"] = {**_FINETUNING_OPTIM, **optim}
    return config


def make_settings(plain: Mapping[str, Any], changes: Mapping[str, Any], path: str = "") -> TrainSettings:
    """Build settings from a configuration's plain values and overrides.

    Args:
        plain: plain values of a configuration file.
        changes: fields of TrainSettings to override; those of a group in a dict of their own.
        path: prefix of every problem.

    Raises:
        SettingsError: unknown settings, missing ones, wrong types and impossible values.
    """
    return from_plain(TrainSettings, merge_settings(plain, changes), path)


def merge_settings(plain: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**plain, **changes}
    for group in _GROUPS:
        values = plain.get(group, {})
        group_changes = changes.get(group)
        if isinstance(group_changes, Mapping):
            # A group that is not an object stays unchanged, so that its problem is reported with the others.
            merged[group] = {**values, **group_changes} if isinstance(values, dict) else values
    return merged
