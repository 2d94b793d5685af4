"""Loader of ``FSDP2SFTTrainer`` for a store, mixture, plan, loader or records."""

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchloom.adapters.fsdp2.fsdp2_arguments import FSDP2Arguments
from batchloom.batches import IGNORE_INDEX, BatchOptions, Loader
from batchloom.core.errors import InputError, PlanError, SettingsError
from batchloom.core.settings import quote_value, raise_problems
from batchloom.plan import Mixture, Plan
from batchloom.plan.order import count_rank_rows, list_divisors
from batchloom.store import Store, open_store, write_file
from batchloom.store.format import MaskBuilder, encode_index
from batchloom.store.write import write_mask

_DATA_HELP = (
    "Give an open store (batchloom.open_store), a Mixture, a Plan, a Loader, or a list of records "
    '{"input_ids": [...], "labels": [...]}; batchloom prepare makes a store of texts and conversations'
)


def make_fsdp2_loader(data: Any, args: FSDP2Arguments, plan_settings: Mapping[str, Any], world_size: int) -> Loader:
    """Make the loader of this rank from any form of training data.

    ``plan_settings`` holds the explicitly set plan settings, as of ``collect_plan_settings``.

    Raises:
        InputError: the data cannot be trained on, or records are invalid.
        SettingsError: ``args`` contradict the given plan, or ``max_length`` is missing without a plan.
        PlanError: the batch sizes in ``args`` do not make the plan's global batch; the error names valid ones.
    """
    micro = args.per_device_train_batch_size
    size = micro * args.gradient_accumulation_steps * world_size
    if isinstance(data, Loader):
        _check_loader(data)
        _check_plan(data.plan, args, plan_settings, size)
        rows = count_rank_rows(size, world_size, micro)
        if data.spec.micro_batch_size not in (None, micro) or rows % micro:
            raise PlanError(
                f"The Loader was made with micro_batch_size={data.spec.micro_batch_size} and "
                f"per_device_train_batch_size is {micro}: make them equal."
            )
        return data
    if isinstance(data, Plan):
        _check_plan(data, args, plan_settings, size)
        return Loader(data, batch=BatchOptions(micro_batch_size=micro))
    if not isinstance(data, Store | Mixture):
        data = _store_records(data)
    if args.max_length is None:
        raise SettingsError(
            ["max_length: TrainingArguments has none; give SFTConfig or FSDP2Arguments, or a Plan as train_dataset"]
        )
    limited = args.max_steps > 0
    return Loader(
        data,
        seq_len=args.max_length,
        global_batch_size=size,
        packing="best_fit" if args.packing else "none",
        seed=args.seed or 0,
        steps=args.max_steps if limited else None,
        epochs=None if limited else int(args.num_train_epochs or 1),
        batch=BatchOptions(micro_batch_size=micro),
    )


def _check_loader(loader: Loader) -> None:
    spec = loader.spec
    problems = [
        f"{name}: {actual!r} instead of {expected!r}"
        for name, actual, expected in (
            ("form", spec.form, "rows"),
            ("output", spec.output, "torch"),
            ("labels", spec.labels, "aligned"),
            ("uneven", spec.uneven, "refuse"),
            ("mesh.peers", spec.mesh.processes_per_data_rank, 1),
        )
        if actual != expected
    ]
    if loader.streamed:
        problems.append("a stream: prepare the data, so that any step can be read again")
    if problems:
        raise SettingsError([f"train_dataset is a Loader with {problem}" for problem in problems])


def _check_plan(plan: Plan, args: FSDP2Arguments, plan_settings: Mapping[str, Any], size: int) -> None:
    spec = plan.spec
    epochs = spec.epochs or (None if spec.steps else 1)
    plan_values: dict[str, tuple[Any, str]] = {
        "max_length": (spec.seq_len, f"seq_len={spec.seq_len}"),
        "packing": (spec.packing != "none", f"packing={spec.packing!r}"),
        "seed": (spec.seed, f"seed={spec.seed}"),
    }
    if args.max_steps <= 0:
        description = f"epochs={epochs}" if epochs else f"steps={spec.steps}"
        plan_values["num_train_epochs"] = (epochs, description)
    raise_problems(
        [
            f"{name}: {plan_settings[name]} is requested and the plan has {description}: leave it out, or make "
            "another Plan"
            for name, (value, description) in plan_values.items()
            if name in plan_settings and plan_settings[name] != value
        ]
    )
    if size != spec.global_batch_size:
        world = size // (args.per_device_train_batch_size * args.gradient_accumulation_steps)
        rows, remainder = divmod(spec.global_batch_size, world)
        valid_sizes = [] if remainder else [f"{micro} x {rows // micro}" for micro in list_divisors(rows)]
        raise PlanError(
            f"per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps} x {world} ranks are {size} sequences per step and the plan's "
            f"global_batch_size is {spec.global_batch_size}: "
            + (f"give {' or '.join(valid_sizes[-4:])}." if valid_sizes else "use a number of ranks that divides it.")
        )


def _store_records(records: Any) -> Store:
    """Write records to a store in a temporary folder that is deleted with the store."""
    if isinstance(records, str | bytes | Mapping) or not (
        hasattr(records, "__len__") and hasattr(records, "__getitem__")
    ):
        raise InputError(f"train_dataset is {quote_value(records)}. {_DATA_HELP}.")
    if not len(records):
        raise InputError(f"train_dataset is a {type(records).__name__} without records. {_DATA_HELP}.")
    bits, id_buffers, lengths = MaskBuilder(), [], []
    for number in range(len(records)):
        ids, trained_mask = _parse_document(records[number], number)
        bits.append(trained_mask)
        id_buffers.append(ids.tobytes())
        lengths.append(ids.size)
    folder = tempfile.mkdtemp(prefix="batchloom-")
    stem = Path(folder) / "records"
    write_file(stem.with_suffix(".bin"), b"".join(id_buffers))
    write_file(stem.with_suffix(".idx"), encode_index(np.array(lengths, np.uint32), _ID_DTYPE))
    write_mask(stem, bits)
    store = open_store(stem)
    weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
    return store


_ID_DTYPE = np.dtype("<i4")
_MAX_ID = int(np.iinfo(_ID_DTYPE).max)

# Columns that other trainers read in addition to ids and labels, to mask the loss or to separate documents.
_UNSUPPORTED_COLUMNS = (
    "assistant_masks",
    "completion_mask",
    "label",
    "label_ids",
    "loss_mask",
    "position_ids",
    "seq_lengths",
)


def _parse_document(record: Any, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the ids of a record, and the mask of its trained tokens."""
    if not isinstance(record, Mapping) or "input_ids" not in record:
        raise InputError(f"Record {number} of train_dataset is {quote_value(record)}. {_DATA_HELP}.")
    ids = _to_integer_array(record["input_ids"])
    if ids is None or not ids.size or ids.min() < 0 or ids.max() > _MAX_ID:
        raise InputError(
            f"input_ids of record {number} of train_dataset are {quote_value(record['input_ids'])}, not a list of "
            f"token ids from 0 to {_MAX_ID}."
        )
    _check_columns(record, number, ids.shape)
    labels = ids if record.get("labels") is None else _to_integer_array(record["labels"])
    if labels is None:
        raise InputError(
            f"labels of record {number} of train_dataset are {quote_value(record['labels'])}, not a list of token "
            "ids or -100."
        )
    if labels.shape != ids.shape:
        raise InputError(
            f"Record {number} of train_dataset has {ids.size} input_ids and {labels.size} labels: give one label per "
            "token, -100 where there is no loss."
        )
    trained_mask = labels != IGNORE_INDEX
    if bool((labels[trained_mask] != ids[trained_mask]).any()):
        position = int(np.flatnonzero(trained_mask & (labels != ids))[0])
        raise InputError(
            f"Label {position} of record {number} of train_dataset is {int(labels[position])} and the token is "
            f"{int(ids[position])}: labels must be the tokens themselves (models shift them), or -100."
        )
    return ids.astype(_ID_DTYPE), trained_mask


def _to_integer_array(values: Any) -> NDArray[Any] | None:
    """Convert values to a one-dimensional integer array; None if they are no integers."""
    try:
        array = np.asarray(values)
    except ValueError:
        # The rows have different lengths.
        return None
    return array if array.ndim == 1 and array.dtype.kind in "iu" else None


def _check_columns(record: Mapping[str, Any], number: int, shape: tuple[int, ...]) -> None:
    """Reject columns that change the loss in other trainers and have no effect here."""
    columns = [name for name in _UNSUPPORTED_COLUMNS if record.get(name) is not None]
    mask = record.get("attention_mask")
    if mask is not None and not np.array_equal(mask, np.ones(shape)):
        columns.append("attention_mask (with values other than 1)")
    if columns:
        raise InputError(
            f"Record {number} of train_dataset has {', '.join(columns)}, which FSDP2SFTTrainer does not support: "
            "give labels that are -100 where there is no loss, one document per record without padding, and leave "
            "the rest out."
        )
