"""Images and audio in training: what a pass gives the model of them, and whether a model is made for a store's."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchloom import Loader, Mixture, Store
from batchloom.batches import Batch, DocumentRows, add_model_masks, measure_batch_leakage
from batchloom.core.errors import InputError, TrainError
from batchloom.train.data.stream_run import as_stream
from batchloom.train.model import PretrainedModel, is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TEXT_KEYS = ("input_ids", "labels", "position_ids")
# What transformers' models raise over features that are not theirs.
_UNSUITABLE_MODEL_ERRORS = (ValueError, TypeError, IndexError, AttributeError, RuntimeError)


def holds_media(data: Store | Mixture) -> bool:
    """Whether any store that is read was prepared with a processor, or a stream reads media."""
    if not isinstance(data, Mixture) and (stream := as_stream(data)) is not None:
        return stream.stream.processor is not None
    stores = data.stores.values() if isinstance(data, Mixture) else (data,)
    return any(
        isinstance(store, Store) and store.manifest is not None and bool(store.manifest.processor) for store in stores
    )


def make_model_inputs(part: Batch, window: int | None) -> dict[str, Any]:
    """What a model is called with in a pass: tokens, labels, positions, and ``media`` where there is more.

    Args:
        part: rows of a batch.
        window: tokens that the model's layers of sliding attention look back on.
    """
    model_inputs = {name: part[name] for name in _TEXT_KEYS}
    masked_items = add_model_masks(part, window).items()
    media = {name: value for name, value in masked_items if name not in _TEXT_KEYS}
    return {**model_inputs, "media": media} if media else model_inputs


def check_media_model(blueprint: "PreTrainedModel", folder: str, examples: DocumentRows, seq_len: int) -> None:
    """Refuse a model that is made for other media than a store holds.

    Args:
        blueprint: its blueprint.
        folder: of it, for people.
        examples: documents of the run.
        seq_len: tokens of a row.

    Raises:
        InputError: it takes other features, or another token stands for media in it.
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
    """Put a few documents with their media through a model, and make sure that packed ones do not see each other.

    Args:
        model: on its device.
        examples: documents of the run.
        store: named in errors.
        sizes: rows of a pass, and tokens of a row.
        packed: whether rows hold several documents in training.

    Returns:
        The mean distance between packed and single documents, in nats a token; 0 where none are packed.

    Raises:
        TrainError: it cannot take them, or they do.
        MediumError: a medium cannot be read.
    """
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
            f"{type(model.model).__name__} of {model.name} cannot take documents of {store.location.name} with "
            "their media: "
            f"{message_lines[0] if message_lines else type(error).__name__}. Prepare the data with the model's own "
            "processor."
        ) from error
    return model.check_no_leak(*distances, store)


def write_processor_files(loader: Loader, out: Path) -> None:
    """Write the settings of the processor that a model was trained with beside its weights.

    Raises:
        OSError: they cannot be written.
    """
    if loader.media is None:
        raise AssertionError("asked of a run with media")
    for name, text in loader.media.processor_files.items():
        (out / name).write_text(text, "utf-8")


def _move_batch(device: torch.device, batch: Batch) -> Batch:
    """The same batch, its tensors on a device."""
    batch.update({name: value.to(device) for name, value in batch.items()})
    return batch
