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
    config: DatasetConfig, folder: Path, tokenizer: str | None, ranks: RankGroup, say: PrintLine
) -> Path:
    """Prepare data sets into ``folder``, or go on there; the first rank does it, the others wait.

    Args:
        config: the data sets.
        folder: of the store, where every rank finds it.
        tokenizer: as prepare takes it; None for the one that ``config`` names, else prepare's.
        ranks: this process's place.
        say: prints one line.

    Raises:
        BatchloomError: whatever prepare finds wrong.
    """

    def prepare() -> None:
        done = batchloom.prepare(config, out=folder, tokenizer=tokenizer)
        state = "is prepared already" if done.already_done else "was prepared"
        say(f"input  {config.written.file} {state} in {folder}, by tokenizer {done.tokenizer}")

    ranks.run_exclusively(prepare if ranks.first else None)
    return folder


def choose_tokenizer(config: DatasetConfig, asked: str | None, init: Path | None) -> str | None:
    """The tokenizer that was asked for, else the file's, else the one of the model to finetune."""
    if asked is not None or config.tokenizer is not None:
        return asked or config.tokenizer
    return str(init) if init is not None and (init / "tokenizer.json").is_file() else None


def describe_order(
    config: DatasetConfig, stated: dict[str, Any], settings: TrainSettings, *, goes_on: bool
) -> str:
    """How documents become sequences, and who said so.

    Args:
        config: the data sets.
        stated: the settings it states for this run; empty where it says nothing of them.
        settings: those of the run.
        goes_on: whether they are those the run was begun with.
    """
    order = settings.order
    packed = "one document a sequence" if order.packing == "none" else f"packing {order.packing}"
    facts = [f"{packed} of {settings.seq_len:,} tokens"]
    if order.overlong in _OVERLONG_RESULTS:
        facts.append(f"longer documents are {_OVERLONG_RESULTS[order.overlong]}")
    facts.append("shuffled" if order.shuffle else "in their order")
    said = f"order  {', '.join(facts)}"
    now = {"seq_len": settings.seq_len, "packing": order.packing, "overlong": order.overlong}
    if goes_on:
        other = [
            f"{_CONFIG_KEYS[name]} {value}"
            for name, value in config.plan_settings(settings.seq_len).items()
            if name in now and value != now[name]
        ]
        differs = f", not as {config.written.file} says now: {', '.join(other)}" if other else ""
        return f"{said}, as the run was begun{differs}"
    if not stated:
        return f"{said}; {config.written.file} says nothing of it"
    over = [
        f"{_COMMAND_OPTIONS[name]} {value} wins over {_CONFIG_KEYS[name]} {stated[name]}"
        for name, value in now.items()
        if value != stated[name]
    ]
    return "; ".join([f"{said}, as {config.written.file} says", *over])
