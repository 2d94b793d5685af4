"""A run on the data sets that a YAML file names: prepared below the run's folder, packed as it says."""

from pathlib import Path
from typing import Any

import batchloom
from batchloom import DatasetConfig
from batchloom.train.distributed import RankGroup
from batchloom.train.train_log import PrintLine
from batchloom.train.train_settings import TrainSettings

# What a person typed or wrote, by the name of the setting.
_COMMAND_OPTIONS = {"seq_len": "--seq-len", "packing": "--packing", "overlong": "--overlong"}
_CONFIG_KEYS = {
    "seq_len": "packing_length",
    "packing": "packing",
    "overlong": "filter_overlong, which says",
}
_OVERLONG_RESULTS = {"drop": "left out", "split": "cut", "truncate": "cut short"}


def prepare_dataset_store(
    config: DatasetConfig,
    folder: Path,
    tokenizer: str | None,
    ranks: RankGroup,
    print_line: PrintLine,
) -> Path:
    """Prepare data sets into ``folder``, or go on there; the first rank does it, the others wait.

    Args:
        config: the data sets.
        folder: of the store, where every rank finds it.
        tokenizer: as prepare takes it; None for the one that ``config`` names, else prepare's.
        ranks: this process's place.
        print_line: prints one line.

    Raises:
        BatchloomError: whatever prepare finds wrong.
    """

    def prepare() -> None:
        result = batchloom.prepare(config, out=folder, tokenizer=tokenizer)
        state = "is prepared already" if result.already_done else "was prepared"
        print_line(f"input  {config.location.file} {state} in {folder}, by tokenizer {result.tokenizer}")

    ranks.run_exclusively(prepare if ranks.first else None)
    return folder


def choose_tokenizer(config: DatasetConfig, tokenizer: str | None, init: Path | None) -> str | None:
    """The tokenizer that was asked for, else the file's, else the one of the model to finetune."""
    if tokenizer is not None or config.tokenizer is not None:
        return tokenizer or config.tokenizer
    return str(init) if init is not None and (init / "tokenizer.json").is_file() else None


def describe_order(
    config: DatasetConfig,
    dataset_settings: dict[str, Any],
    settings: TrainSettings,
    *,
    is_continuation: bool,
) -> str:
    """How documents become sequences, and who said so.

    Args:
        config: the data sets.
        dataset_settings: the settings it states for this run; empty where it says nothing of them.
        settings: those of the run.
        is_continuation: whether they are those the run was begun with.
    """
    order = settings.order
    packed = "one document a sequence" if order.packing == "none" else f"packing {order.packing}"
    facts = [f"{packed} of {settings.seq_len:,} tokens"]
    if order.overlong in _OVERLONG_RESULTS:
        facts.append(f"longer documents are {_OVERLONG_RESULTS[order.overlong]}")
    facts.append("shuffled" if order.shuffle else "in their order")
    description = f"order  {', '.join(facts)}"
    run_order = {"seq_len": settings.seq_len, "packing": order.packing, "overlong": order.overlong}
    if is_continuation:
        differences = [
            f"{_CONFIG_KEYS[name]} {value}"
            for name, value in config.plan_settings(settings.seq_len).items()
            if name in run_order and value != run_order[name]
        ]
        differs = f", not as {config.location.file} says now: {', '.join(differences)}" if differences else ""
        return f"{description}, as the run was begun{differs}"
    if not dataset_settings:
        return f"{description}; {config.location.file} says nothing of it"
    overrides = [
        f"{_COMMAND_OPTIONS[name]} {value} wins over {_CONFIG_KEYS[name]} {dataset_settings[name]}"
        for name, value in run_order.items()
        if value != dataset_settings[name]
    ]
    return "; ".join([f"{description}, as {config.location.file} says", *overrides])
