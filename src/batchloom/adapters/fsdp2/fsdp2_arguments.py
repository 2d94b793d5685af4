"""Settings of ``FSDP2SFTTrainer`` under Hugging Face's names; none is ignored."""

import dataclasses
import math
import os
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

from batchloom.core.errors import InputError
from batchloom.core.settings import as_int, is_bool, quote_value, raise_problems

LR_SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Arguments:
    """Settings with the names and defaults of ``transformers.TrainingArguments``.

    Attributes:
        output_dir: folder of checkpoints (``checkpoint-N``) and ``log.jsonl``.
        per_device_train_batch_size: sequences per forward pass of one rank.
        gradient_accumulation_steps: passes per step.
        num_train_epochs: complete passes over the data.
        max_steps: total number of steps, which overrides the epochs; -1 for none.
        learning_rate: peak learning rate.
        lr_scheduler_type: ``linear``, ``cosine``, ``constant`` or ``constant_with_warmup``.
        warmup_steps: number of steps, or below 1 their share of all steps.
        weight_decay: decay of weights with at least two dimensions, so not of norms and biases.
        adam_beta1: first beta of AdamW.
        adam_beta2: second beta of AdamW.
        adam_epsilon: epsilon of AdamW.
        max_grad_norm: norm to which gradients are clipped; 0 for no clipping.
        bf16: forward and backward in bfloat16; weights, updates and gradient sums keep their dtype.
        gradient_checkpointing: recompute activations in the backward pass.
        logging_steps: steps between two lines of the log.
        save_strategy: ``steps``, or ``no`` for no checkpoints.
        save_steps: steps between two checkpoints; the last step is always saved.
        save_total_limit: number of newest checkpoints to keep; None for all.
        seed: seed of the data order and of dropout.
        use_cpu: train on the CPU even if there is a GPU.
        resume_from_checkpoint: as the argument of ``train``.
        max_length: tokens per sequence.
        packing: pack documents into shared sequences, isolated from each other; False for one document per sequence.

    A plan has its own ``num_train_epochs``, ``seed``, ``max_length`` and ``packing``, and values set here have to
    equal them. None leaves a value unset; without a plan it then is 3, 42, 1024 or True.
    """

    output_dir: str
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_train_epochs: float | None = None
    max_steps: int = -1
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    bf16: bool = False
    gradient_checkpointing: bool = False
    logging_steps: int = 10
    save_strategy: str = "steps"
    save_steps: int = 500
    save_total_limit: int | None = None
    seed: int | None = None
    use_cpu: bool = False
    resume_from_checkpoint: bool | str | None = None
    max_length: int | None = None
    packing: bool | None = None


# Settings that a plan has too, with their defaults without a plan.
_PLAN_DEFAULTS: dict[str, Any] = {
    "num_train_epochs": 3.0,
    "seed": 42,
    "max_length": 1024,
    "packing": True,
}

# Settings without effect on this trainer, which has its own loading, logging and launching. Evaluation needs
# eval_strategy, which is rejected.
_IGNORED_SETTINGS = frozenset(
    {
        *(
            "do_train",
            "do_eval",
            "do_predict",
            "eval_steps",
            "disable_tqdm",
            "log_level",
            "log_level_replica",
        ),
        *("log_on_each_node", "run_name", "local_rank", "per_device_eval_batch_size"),
        *("remove_unused_columns", "skip_memory_metrics", "dataset_num_proc"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        # Later name of gradient_checkpointing.
        "activation_checkpointing",
    }
)
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def convert_arguments(args: Any) -> FSDP2Arguments:
    """Convert and check the settings in ``args``.

    Args:
        args: ``FSDP2Arguments``, ``transformers.TrainingArguments`` or ``trl.SFTConfig``.

    Raises:
        InputError: ``args`` is of another type.
        SettingsError: settings are unsupported or invalid; the error lists all of them.
    """
    if isinstance(args, FSDP2Arguments):
        plan_defaults = {name: value for name, value in _PLAN_DEFAULTS.items() if getattr(args, name) is None}
        full_arguments = dataclasses.replace(args, **plan_defaults)
        raise_problems(_find_setting_problems(full_arguments))
        return full_arguments
    argument_classes = [
        base_class
        for base_class in type(args).__mro__
        if base_class.__module__.split(".")[0] in ("transformers", "trl") and dataclasses.is_dataclass(base_class)
    ]
    if not argument_classes or not hasattr(args, "per_device_train_batch_size"):
        raise InputError(
            "FSDP2SFTTrainer takes args=FSDP2Arguments(output_dir=...), TrainingArguments or SFTConfig, not "
            f"{quote_value(args)}."
        )
    field_names = {field.name for field in dataclasses.fields(FSDP2Arguments)}
    values = {name: _to_plain_setting(getattr(args, name)) for name in field_names if hasattr(args, name)}
    # TrainingArguments have neither setting, and no length is a good default.
    values = {"packing": _PLAN_DEFAULTS["packing"], "max_length": None, **values}
    # bf16 is None if it was not set.
    values["bf16"] = values["bf16"] or False
    # Newer versions of transformers have this name.
    activation_checkpointing = getattr(args, "activation_checkpointing", False)
    values["gradient_checkpointing"] = values["gradient_checkpointing"] or activation_checkpointing
    arguments = FSDP2Arguments(**values)
    raise_problems(
        [*_find_unsupported_settings(args, argument_classes[0], field_names), *_find_setting_problems(arguments)]
    )
    return arguments


def collect_plan_settings(args: Any) -> dict[str, Any]:
    """Return the plan settings that were set explicitly.

    Hugging Face's classes do not distinguish a default from an equal value that was set: it counts as the default.
    """
    is_native = isinstance(args, FSDP2Arguments)
    return {
        field.name: value
        for field in dataclasses.fields(args)
        if field.name in _PLAN_DEFAULTS
        and (value := getattr(args, field.name)) is not None
        and (is_native or value != field.default)
    }


def _find_unsupported_settings(args: Any, kind: type, field_names: set[str]) -> list[str]:
    """Return a problem for each changed setting that this trainer does not support."""
    problems = []
    for field in dataclasses.fields(kind):
        value = getattr(args, field.name)
        if field.name == "optim":
            if _to_plain_setting(value) not in _OPTIMIZERS:
                problems.append(f"optim: {_to_plain_setting(value)!r} is not one of {', '.join(_OPTIMIZERS)}")
        elif not (field.name in field_names or field.name in _IGNORED_SETTINGS or _is_default(field, value)):
            problems.append(
                f"{field.name}: FSDP2SFTTrainer does not support it, and it is "
                f"{quote_value(_to_plain_setting(value))}; leave it out"
            )
    return problems


def _is_default(field: Any, value: Any) -> bool:
    """Return whether a setting has its default value."""
    default = field.default
    if default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value == default:
        return True
    if value is None:
        return True
    # TrainingArguments create objects for some settings that were not given.
    if default not in (None, "", "none") or isinstance(value, bool | int | float | str):
        return False
    return bool(value == type(value)())


def _to_plain_setting(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


# Ranges of the settings that are floats: minimum, maximum, and their description.
_MAX_FLOAT = sys.float_info.max
_NON_NEGATIVE = (0.0, _MAX_FLOAT, "of at least 0")
_FRACTION = (0.0, math.nextafter(1.0, 0.0), "of at least 0 and below 1")
_NUMBER_RANGES = {
    "num_train_epochs": (-_MAX_FLOAT, _MAX_FLOAT, "that is finite"),
    "learning_rate": _NON_NEGATIVE,
    "warmup_steps": _NON_NEGATIVE,
    "weight_decay": _NON_NEGATIVE,
    "adam_beta1": _FRACTION,
    "adam_beta2": _FRACTION,
    "adam_epsilon": _NON_NEGATIVE,
    "max_grad_norm": (0.0, _MAX_FLOAT, "of at least 0; 0 sets no limit"),
}


def _find_setting_problems(args: FSDP2Arguments) -> list[str]:
    problems_by_name = {
        **_find_integer_problems(args),
        **_find_number_problems(args),
        **_find_choice_problems(args),
    }
    problems = [f"{name}: {quote_value(getattr(args, name))} {problem}" for name, problem in problems_by_name.items()]
    epochs = args.num_train_epochs or 0
    if (
        not {"max_steps", "num_train_epochs"} & problems_by_name.keys()
        and args.max_steps <= 0
        and (epochs < 1 or epochs % 1)
    ):
        problems.append(f"num_train_epochs: {epochs} is not a whole number of at least 1; give max_steps")
    if args.lr_scheduler_type == "constant" and "warmup_steps" not in problems_by_name and args.warmup_steps:
        problems.append(
            f"warmup_steps: constant has no warm-up and {args.warmup_steps} is requested; set "
            "lr_scheduler_type='constant_with_warmup'"
        )
    return problems


def _find_integer_problems(args: FSDP2Arguments) -> dict[str, str]:
    """Return the problem of each setting that must be an integer and is not."""
    counts = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "logging_steps",
        "save_steps",
        "save_total_limit",
        "max_length",
    )
    problems_by_name = {
        name: "is not a whole number of at least 1"
        for name in counts
        if not _is_count(getattr(args, name), optional=name in ("save_total_limit", "max_length"))
    }
    if as_int(args.max_steps) is None:
        problems_by_name["max_steps"] = "is not a whole number; with -1, num_train_epochs applies"
    if args.seed is not None and as_int(args.seed) is None:
        problems_by_name["seed"] = "is not a whole number"
    return problems_by_name


def _find_number_problems(args: FSDP2Arguments) -> dict[str, str]:
    """Return the problem of each setting that must be a number in a range and is not."""
    problems_by_name = {}
    for name, (minimum, maximum, requirement) in _NUMBER_RANGES.items():
        value = getattr(args, name)
        if value is None and name == "num_train_epochs":
            continue
        # NaN is in no range.
        in_range = isinstance(value, int | float) and minimum <= value <= maximum
        if not in_range or isinstance(value, bool):
            problems_by_name[name] = f"is not an int or float {requirement}"
    return problems_by_name


def _find_choice_problems(args: FSDP2Arguments) -> dict[str, str]:
    """Return the problem of each setting that is not one of its allowed values."""
    problems_by_name = {
        name: "is neither True nor False"
        for name in ("bf16", "gradient_checkpointing", "use_cpu", "packing")
        if not is_bool(getattr(args, name))
    }
    for name, choices in (("lr_scheduler_type", LR_SCHEDULES), ("save_strategy", ("steps", "no"))):
        if getattr(args, name) not in choices:
            problems_by_name[name] = f"is not one of {', '.join(choices)}"
    folder: Any = args.output_dir
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        problems_by_name["output_dir"] = "is not the name of a folder"
    resume_setting: Any = args.resume_from_checkpoint
    if not isinstance(resume_setting, bool | str | os.PathLike | None):
        problems_by_name["resume_from_checkpoint"] = "is neither True, nor False, nor a folder"
    return problems_by_name


def _is_count(value: Any, *, optional: bool) -> bool:
    if value is None:
        return optional
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
