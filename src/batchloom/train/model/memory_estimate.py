"""Memory checks: a lower bound before the run, and a clear error when it runs out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from batchloom.core.errors import TrainError
from batchloom.train.distributed import RankGroup
from batchloom.train.train_settings import PretrainedSettings, TrainSettings, compute_rank_rows

# A float32 parameter takes its weight, its gradient and AdamW's two moments.
_TRAINING_BYTES_PER_PARAMETER = 16
_BYTES_PER_WEIGHT = 4
# A token of a batch has int64 input_ids, labels and position_ids.
_BYTES_PER_TOKEN = 24
# torch's CPU allocator has no exception class of its own, so its messages are matched.
_ALLOCATION_MESSAGES = ("can't allocate memory", "Storage size calculation overflowed")


def check_memory(settings: TrainSettings, parameters: int, ranks: RankGroup) -> None:
    """Refuse a run whose model or batch alone exceeds the total memory.

    Raises:
        TrainError: names the needed and the available memory, and the sizes to lower.
    """
    on_gpu = ranks.device.type == "cuda"
    if on_gpu:
        gpu_memory = torch.cuda.get_device_properties(ranks.device).total_memory
        _check_needed_memory(settings, parameters, _TRAINING_BYTES_PER_PARAMETER * parameters, gpu_memory, "the GPU")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = (_BYTES_PER_WEIGHT if on_gpu else _TRAINING_BYTES_PER_PARAMETER) * parameters
    _check_needed_memory(settings, parameters, needed, machine, "this machine")
    rows = compute_rank_rows(settings, ranks.world_size)
    if (batch := _BYTES_PER_TOKEN * rows * settings.seq_len) > machine:
        raise TrainError(
            f"A rank's share of a step, {rows:,} sequences of {settings.seq_len:,} tokens, takes "
            f"{_format_size(batch)}, and this machine has {_format_size(machine)}: lower --global-batch-size or "
            "--seq-len, or start more ranks on more machines."
        )


def _check_needed_memory(
    settings: TrainSettings, parameters: int, needed: int, available: int, device_name: str
) -> None:
    if needed <= available:
        return
    shape = settings.model
    if isinstance(shape, PretrainedSettings):
        kind, remedy = shape.init, "give --init a smaller model"
    else:
        kind = f"{shape.layers:,} layers of width {shape.width:,}"
        remedy = "lower the configuration's model.layers, model.width, model.hidden or model.vocab_size"
    raise TrainError(
        f"A model of {parameters:,} parameters ({kind}) needs {_format_size(needed)} to train, and {device_name} has "
        f"{_format_size(available)}: {remedy}."
    )


def _format_size(size: int) -> str:
    unit, shift = ("GiB", 30) if size >= 1 << 30 else ("MiB", 20)
    return f"{size / (1 << shift):,.1f} {unit}"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out."""
    error_types = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, error_types) or any(message in str(error) for message in _ALLOCATION_MESSAGES)


@contextmanager
def explain_memory_errors(settings: TrainSettings, parameters: int) -> Iterator[None]:
    """Convert out-of-memory errors to an error that names the sizes to lower.

    Raises:
        TrainError: the body of the context ran out of memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows = settings.batch_size or "all"
        smaller = (
            "give --init a smaller model"
            if isinstance(settings.model, PretrainedSettings)
            else "the configuration's model.layers and model.width"
        )
        raise TrainError(
            f"Out of memory with {parameters:,} parameters "
            f"({_format_size(_TRAINING_BYTES_PER_PARAMETER * parameters)} to "
            f"train) and passes of {rows} rows of {settings.seq_len} tokens: lower --batch-size "
            f"(more passes make the same step), --seq-len, or {smaller} (another run)."
        ) from error
