"""Images and audio in training: model inputs, and checks of the model."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchloom import Loader, Mixture, Store
from batchloom.batches import Batch, DocumentRows, add_model_masks, measure_batch_leakage
from batchloom.core.errors import InputError, TrainError
from batchloom.train.data.stream_run import as_stream
from batchloom.train.model.memory_estimate import is_out_of_memory
from batchloom.train.model.pretrained import PretrainedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TEXT_KEYS = ("input_ids", "labels", "position_ids")
# Errors that transformers models raise for features of another model's processor.
_UNSUITABLE_MODEL_ERRORS = (ValueError, TypeError, IndexError, AttributeError, RuntimeError)


def holds_media(data: Store | Mixture) -> bool:
    """Return whether a store was prepared with a processor, or a stream reads media."""
    if not isinstance(data, Mixture) and (stream := as_stream(data)) is not None:
        return stream.stream.processor is not None
    stores = data.stores.values() if isinstance(data, Mixture) else (data,)
    return any(
        isinstance(store, Store) and store.manifest is not None and bool(store.manifest.processor) for store in stores
    )


def make_model_inputs(part: Batch, window: int | None) -> dict[str, Any]:
    """Return the keyword arguments of a model call: tokens, labels, positions, media.

    ``media`` is present only if the batch has more than text.

    Args:
        part: rows of a batch.
        window: context in tokens of the model's sliding-window layers.
    """
    model_inputs = {name: part[name] for name in _TEXT_KEYS}
    masked_items = add_model_masks(part, window).items()
    media = {name: value for name, value in masked_items if name not in _TEXT_KEYS}
    return {**model_inputs, "media": media} if media else model_inputs


def check_media_model(blueprint: "PreTrainedModel", folder: str, examples: DocumentRows, seq_len: int) -> None:
    """Refuse a model that is made for other media than a store holds.

    Args:
        blueprint: the model on the meta device.
        folder: folder of the model, for messages.
        examples: documents of the run.
        seq_len: tokens of a row.

    Raises:
        InputError: the model takes other features, or another placeholder token for media.
    """
    if misfit := examples.describe_media_mismatch(blueprint, seq_len):
        raise InputError(f"--init: {folder} holds a {misfit}")


@torch.no_grad()
def check_media_isolation(
    model: PretrainedModel,
    examples: DocumentRows,
    store: Store,
    sizes: tuple[int, int],
    *,
    packed: bool,
) -> float:
    """Run documents with media through a model; verify that packed ones are isolated."""
    device = next(model.parameters()).device
    rows, longest = sizes
    numbers = examples.few(longest)
    orders = [numbers, numbers[::-1]][: min(rows, 2)]
    single_batches = _move_batch(device, examples.batch([[number] for order in orders for number in order])).split(1)
    packed_batch = _move_batch(device, examples.batch(orders))

    def compute_scores(batch: Batch) -> Callable[[int, slice], torch.Tensor]:
        model_inputs = make_model_inputs(batch, model.window)
        return model.scores(model_inputs["input_ids"], model_inputs["position_ids"], model_inputs.get("media"))

    try:
        with model.make_probe_autocast(device):
            if not packed:
                compute_scores(single_batches[0])
                return 0.0
            distances = measure_batch_leakage(compute_scores, packed_batch, single_batches)
    except _UNSUITABLE_MODEL_ERRORS as error:
        if is_out_of_memory(error):
            raise
        message_lines = str(error).strip().splitlines()
        raise TrainError(
            f"{type(model.model).__name__} of {model.name} cannot process documents of {store.location.name} with "
            f"their media: {message_lines[0] if message_lines else type(error).__name__}. Prepare the data with the "
            "model's own processor."
        ) from error
    return model.check_no_leak(*distances, store)


def write_processor_files(loader: Loader, out: Path) -> None:
    """Write the settings of the processor used in training next to the weights.

    Raises:
        OSError: the files cannot be written.
    """
    if loader.media is None:
        raise AssertionError("this is only for runs with media")
    for name, text in loader.media.processor_files.items():
        (out / name).write_text(text, "utf-8")


def _move_batch(device: torch.device, batch: Batch) -> Batch:
    """Move the tensors of a batch to a device in place, and return the batch."""
    batch.update({name: value.to(device) for name, value in batch.items()})
    return batch
