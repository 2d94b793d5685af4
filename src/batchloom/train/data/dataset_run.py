"""Run on the data sets of a YAML file, prepared below the run's folder."""

from pathlib import Path
from typing import Any

import batchloom
from batchloom import DatasetConfig
from batchloom.train.distributed import RankGroup
from batchloom.train.train_log import PrintLine
from batchloom.train.train_settings import TrainSettings

# Names under which users know each setting, on the command line and in the file.
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
    """Prepare data sets into ``folder``, or resume there.

    The first rank prepares, the others wait.

    Args:
        config: the data sets.
        folder: folder of the store, at the same path on every rank.
        tokenizer: tokenizer in the form prepare takes; None for that of ``config``, else prepare's default.
        ranks: rank group of this process.
        print_line: function that prints one line.

    Raises:
        BatchloomError: any error of prepare.
    """

    def prepare() -> None:
        result = batchloom.prepare(config, out=folder, tokenizer=tokenizer)
        state = "is prepared already" if result.already_done else "was prepared"
        print_line(f"input  {config.location.file} {state} in {folder}, by tokenizer {result.tokenizer}")

    ranks.run_exclusively(prepare if ranks.first else None)
    return folder


def choose_tokenizer(config: DatasetConfig, tokenizer: str | None, init: Path | None) -> str | None:
    """Return the requested tokenizer, else the file's, else the pretrained model's."""
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
    """Describe how documents become sequences, and the origin of each setting.

    Args:
        config: the data sets.
        dataset_settings: the plan settings that ``config`` states for this run; may be empty.
        settings: settings of the run.
        is_continuation: whether the run was started earlier with these settings.
    """
    order = settings.order
    packed = "one document per sequence" if order.packing == "none" else f"packing {order.packing}"
    facts = [f"{packed} of {settings.seq_len:,} tokens"]
    if order.overlong in _OVERLONG_RESULTS:
        facts.append(f"longer documents are {_OVERLONG_RESULTS[order.overlong]}")
    facts.append("shuffled" if order.shuffle else "in store order")
    description = f"order  {', '.join(facts)}"
    run_order = {"seq_len": settings.seq_len, "packing": order.packing, "overlong": order.overlong}
    if is_continuation:
        differences = [
            f"{_CONFIG_KEYS[name]} {value}"
            for name, value in config.plan_settings(settings.seq_len).items()
            if name in run_order and value != run_order[name]
        ]
        differs = f"; {config.location.file} now says {', '.join(differences)}" if differences else ""
        return f"{description}, as the run was started{differs}"
    if not dataset_settings:
        return f"{description}; {config.location.file} sets none of these"
    overrides = [
        f"{_COMMAND_OPTIONS[name]} {value} overrides {_CONFIG_KEYS[name]} {dataset_settings[name]}"
        for name, value in run_order.items()
        if value != dataset_settings[name]
    ]
    return "; ".join([f"{description}, as {config.location.file} says", *overrides])
