"""Settings of ``FSDP2SFTTrainer`` under Hugging Face's names; none is ignored."""

import dataclasses
import os
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

from batchloom.core.errors import InputError
from batchloom.core.settings import Setting, find_problems, is_positive_number, quote_value, raise_problems

LRSchedule = Literal["linear", "cosine", "constant", "constant_with_warmup"]


def _check_folder(value: object) -> str:
    return "" if isinstance(value, str | os.PathLike) and str(value) else "is not the name of a folder"


def _check_not_negative(value: object) -> str:
    return "" if is_positive_number(value, zero=True) else "is not a finite number of at least 0"


def _check_resume(value: object) -> str:
    return "" if isinstance(value, bool | str | os.PathLike) else "is neither True, nor False, nor a folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Arguments:
    """Settings with the names and defaults of ``transformers.TrainingArguments``.

    A plan has its own ``num_train_epochs``, ``seed``, ``max_length`` and ``packing``, and values set here have to
    equal them. None leaves a value unset; without a plan it then is 3, 42, 1024 or True.
    """

    output_dir: Annotated[
        str, Setting(help="Folder of checkpoints (``checkpoint-N``) and ``log.jsonl``.", check=_check_folder)
    ]
    per_device_train_batch_size: Annotated[int, Setting(help="Sequences per forward pass of one rank.", minimum=1)] = 8
    gradient_accumulation_steps: Annotated[int, Setting(help="Passes per step.", minimum=1)] = 1
    num_train_epochs: Annotated[
        float | None, Setting(help="Complete passes over the data.", check=_check_not_negative)
    ] = None
    max_steps: Annotated[
        int,
        Setting(
            help="Total number of steps, which overrides the epochs; with -1, num_train_epochs applies.", minimum=-1
        ),
    ] = -1
    learning_rate: Annotated[float, Setting(help="Peak learning rate.", check=_check_not_negative)] = 5e-5
    lr_scheduler_type: Annotated[LRSchedule, Setting(help="Schedule of the learning rate.")] = "linear"
    warmup_steps: Annotated[
        float, Setting(help="Number of steps, or below 1 their share of all steps.", check=_check_not_negative)
    ] = 0.0
    weight_decay: Annotated[
        float,
        Setting(help="Decay of weights with at least two dimensions, so not of norms.", check=_check_not_negative),
    ] = 0.0
    adam_beta1: Annotated[float, Setting(help="First beta of AdamW.", minimum=0, below=1)] = 0.9
    adam_beta2: Annotated[float, Setting(help="Second beta of AdamW.", minimum=0, below=1)] = 0.999
    adam_epsilon: Annotated[float, Setting(help="Epsilon of AdamW.", check=_check_not_negative)] = 1e-8
    max_grad_norm: Annotated[
        float, Setting(help="Norm to which gradients are clipped; 0 for no clipping.", check=_check_not_negative)
    ] = 1.0
    bf16: Annotated[
        bool, Setting(help="Forward and backward in bfloat16; weights, updates and gradient sums keep their dtype.")
    ] = False
    gradient_checkpointing: Annotated[bool, Setting(help="Recompute activations in the backward pass.")] = False
    logging_steps: Annotated[int, Setting(help="Steps between two lines of the log.", minimum=1)] = 10
    save_strategy: Annotated[Literal["steps", "no"], Setting(help="``steps``, or ``no`` for no checkpoints.")] = "steps"
    save_steps: Annotated[
        int, Setting(help="Steps between two checkpoints; the last step is always saved.", minimum=1)
    ] = 500
    save_total_limit: Annotated[
        int | None, Setting(help="Number of newest checkpoints to keep; None for all.", minimum=1)
    ] = None
    seed: Annotated[int | None, Setting(help="Seed of the data order and of dropout.", minimum=0)] = None
    use_cpu: Annotated[bool, Setting(help="Train on the CPU even if there is a GPU.")] = False
    resume_from_checkpoint: Annotated[
        bool | str | None, Setting(help="As the argument of ``train``.", check=_check_resume)
    ] = None
    max_length: Annotated[int | None, Setting(help="Tokens per sequence.", minimum=1)] = None
    packing: Annotated[
        bool | None,
        Setting(
            help="Pack documents into shared sequences, isolated from each other; False for one document per sequence."
        ),
    ] = None


# Settings that a plan has too, with their defaults without a plan.
_PLAN_DEFAULTS: dict[str, Any] = {"num_train_epochs": 3.0, "seed": 42, "max_length": 1024, "packing": True}

# Settings without effect on this trainer, which has its own loading, logging and launching. Evaluation needs
# eval_strategy, which is rejected.
_IGNORED_SETTINGS = frozenset(
    [
        "do_train",
        "do_eval",
        "do_predict",
        "eval_steps",
        "disable_tqdm",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "run_name",
        "local_rank",
        "per_device_eval_batch_size",
        "remove_unused_columns",
        "skip_memory_metrics",
        "dataset_num_proc",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "activation_checkpointing",
    ]
)
_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")


def convert_arguments(args: Any) -> FSDP2Arguments:
    """Convert and check FSDP2Arguments, TrainingArguments or SFTConfig."""
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


def _find_setting_problems(args: FSDP2Arguments) -> list[str]:
    problems = find_problems(args)
    invalid_names = {problem.split(":")[0] for problem in problems}
    epochs = args.num_train_epochs or 0
    if not {"max_steps", "num_train_epochs"} & invalid_names and args.max_steps <= 0 and (epochs < 1 or epochs % 1):
        problems.append(f"num_train_epochs: {epochs} is not a whole number of at least 1; give max_steps")
    if args.lr_scheduler_type == "constant" and "warmup_steps" not in invalid_names and args.warmup_steps:
        problems.append(
            f"warmup_steps: constant has no warm-up and {args.warmup_steps} is requested; set "
            "lr_scheduler_type='constant_with_warmup'"
        )
    return problems
