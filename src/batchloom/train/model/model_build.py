"""Model of a run: its size is checked first, then it is built or loaded.

A pretrained model is then tested on documents of the store.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchloom import Loader, Store
from batchloom.adapters.isolation_check import measure_isolation
from batchloom.adapters.rank_group import RankGroup
from batchloom.batches import Batch, DocumentRows, add_model_masks, select_probe_documents
from batchloom.core.errors import InputError, SettingsError, TrainError
from batchloom.core.wording import format_size
from batchloom.streaming import Stream
from batchloom.train.model.gpt_model import GPT, pad_vocabulary
from batchloom.train.model.pretrained import (
    PretrainedModel,
    build_meta_model,
    check_size,
    describe_tokenizer_difference,
    get_max_positions,
    load_pretrained,
)
from batchloom.train.run_data import get_data_name
from batchloom.train.run_folder import RunLog
from batchloom.train.train_settings import ModelSettings, PretrainedSettings, TrainSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TrainableModel = GPT | PretrainedModel

# A float32 parameter takes its weight, its gradient and AdamW's two moments.
_TRAINING_BYTES_PER_PARAMETER = 16
# torch's CPU allocator has no exception class of its own, so its messages are matched.
_ALLOCATION_MESSAGES = ("can't allocate memory", "Storage size calculation overflowed")
_TEXT_KEYS = ("input_ids", "labels", "position_ids", "loss_weights")
# Errors that transformers models raise for features of another model's processor.
_UNSUITABLE_MODEL_ERRORS = (ValueError, TypeError, IndexError, AttributeError, RuntimeError)


def build_blueprint(settings: TrainSettings, data: Store | Stream, *, media: bool) -> "GPT | PreTrainedModel":
    """Build the model on the meta device, where its weights take no memory."""
    if isinstance(settings.model, ModelSettings):
        if media:
            raise InputError(
                "The data holds images or audio, and the trainer's own GPT accepts only text: finetune a multimodal "
                "model, made for the processor that the data was prepared with (batchloom train --init FOLDER)."
            )
        with torch.device("meta"):
            return GPT(settings.model, _choose_vocabulary_size(data, settings.model))
    blueprint = build_meta_model(settings.model, media=media)
    max_positions = get_max_positions(blueprint.config)
    if max_positions is not None and settings.seq_len > max_positions:
        problem = f"{settings.seq_len} is more than the {max_positions} positions of {settings.model.init}"
        raise SettingsError([f"seq_len: {problem}; --seq-len {max_positions} is the most"])
    check_size(settings.model, blueprint, data)
    return blueprint


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; shared ones count once."""
    return sum(weight.numel() for weight in model.parameters())


def build_model(
    blueprint: nn.Module, settings: TrainSettings, data: Store | Stream, loader: Loader, ranks: RankGroup, log: RunLog
) -> tuple[TrainableModel, nn.Module]:
    with explain_memory_errors(settings, count_parameters(blueprint)):
        if isinstance(settings.model, PretrainedSettings):
            model: TrainableModel = _build_pretrained(blueprint, settings, settings.model, data, loader, ranks, log)
            learner: nn.Module = model
        else:
            model = GPT(settings.model, _choose_vocabulary_size(data, settings.model), settings.seed).to(ranks.device)
            learner = torch.compile(model) if settings.compile else model  # type: ignore[assignment]
        if ranks.world_size > 1:
            with ranks.collective_errors():
                # Ranks and passes without images or audio do not use the weights for them.
                learner = DistributedDataParallel(learner, find_unused_parameters=loader.holds_media)
    return model, learner


def _build_pretrained(
    blueprint: Any,
    settings: TrainSettings,
    model_settings: PretrainedSettings,
    data: Store | Stream,
    loader: Loader,
    ranks: RankGroup,
    log: RunLog,
) -> PretrainedModel:
    """Load a pretrained model and verify that it keeps packed documents apart."""
    if note := describe_tokenizer_difference(Path(model_settings.init), data):
        log.print_line(f"note   {note}")
    examples = DocumentRows(loader) if loader.holds_media else None
    if examples is not None and (misfit := examples.describe_media_mismatch(blueprint, settings.seq_len)):
        raise InputError(f"--init: {model_settings.init} holds a {misfit}")
    model = load_pretrained(model_settings, blueprint).to(ranks.device)
    data_name = get_data_name(data)
    documents = _select_probe_documents(data, loader)
    model.detect_linear_head(documents[0], data_name)
    if settings.compile:
        model.compile_body()
    packed = settings.order.packing != "none"
    rows = loader.feed.share_at(0).micro_batch_size
    if packed or examples is not None:
        distances = _measure_isolation(model, loader, documents, rows, data_name)
    if examples is not None and not examples.with_media(settings.seq_len):
        log.print_line("note   the first steps hold no images or audio: the model was tested on texts only")
    if packed:
        model.check_no_leak(*distances, data_name)
        log.print_line(
            "packed documents do not see each other: the losses of their tokens match those of the documents alone "
            f"({distances[0]:.1e} nats apart)"
        )
    return model


def _select_probe_documents(data: Store | Stream, loader: Loader) -> list[torch.Tensor]:
    """Return documents of the data for a test of the model, each int64 [tokens]."""
    seq_len = loader.plan.spec.seq_len
    if isinstance(data, Store):
        return select_probe_documents(data, seq_len)
    first_batch = iter(
        Loader(
            data, rank=loader.spec.rank, world_size=loader.spec.world_size, output="numpy", form="varlen", prefetch=0
        )
    )
    batch = next(first_batch)
    first_batch.close()  # type: ignore[attr-defined]  # a generator
    return select_probe_documents(np.split(batch["input_ids"][0], batch["cu_seq_lens_q"][1:-1]), seq_len)


def _choose_vocabulary_size(data: Store | Stream, shape: ModelSettings) -> int:
    """Return the tokenizer's vocabulary size, rounded up to a multiple of 64."""
    store_vocab_size = data.vocab_size
    model_vocab_size = shape.vocab_size
    if store_vocab_size is None and model_vocab_size is None:
        problem = (
            f"missing; {get_data_name(data)} does not name its tokenizer: set it in a --config-file to more than the "
            "store's largest id"
        )
        raise SettingsError([f"model.vocab_size: {problem}"])
    if store_vocab_size is not None and model_vocab_size is not None and model_vocab_size < store_vocab_size:
        problem = f"{model_vocab_size} is less than the {store_vocab_size} ids of the store; leave it unset"
        raise SettingsError([f"model.vocab_size: {problem}"])
    return pad_vocabulary(model_vocab_size or store_vocab_size or 0)


def make_model_inputs(part: Batch, window: int | None) -> dict[str, Any]:
    """Return the keyword arguments of a model call: tokens, labels, positions, media."""
    model_inputs = {name: part[name] for name in _TEXT_KEYS if name in part}
    masked_items = add_model_masks(part, window).items()
    media = {name: value for name, value in masked_items if name not in _TEXT_KEYS}
    return {**model_inputs, "media": media} if media else model_inputs


@torch.no_grad()
def _measure_isolation(
    model: PretrainedModel, loader: Loader, documents: list[torch.Tensor], rows: int, data_name: str
) -> tuple[float, float]:
    """Return the loss differences of packed and mixed documents from single ones."""
    device = next(model.parameters()).device

    def compute_logits(batch: Batch) -> torch.Tensor:
        return model.logits(batch["input_ids"].to(device), batch["position_ids"].to(device))

    def compute_scores(batch: Batch) -> Callable[[int, slice], torch.Tensor]:
        batch.update({name: value.to(device) for name, value in batch.items()})
        model_inputs = make_model_inputs(batch, model.window)
        return model.compute_scores(model_inputs["input_ids"], model_inputs["position_ids"], model_inputs.get("media"))

    try:
        with model.make_probe_autocast(device):
            return measure_isolation(compute_logits, loader, rows, documents=documents, compute_scores=compute_scores)
    except _UNSUITABLE_MODEL_ERRORS as error:
        if not loader.holds_media or is_out_of_memory(error):
            raise
        message_lines = str(error).strip().splitlines()
        raise TrainError(
            f"{type(model.model).__name__} of {model.name} cannot process documents of {data_name} with "
            f"their media: {message_lines[0] if message_lines else type(error).__name__}. Prepare the data with the "
            "model's own processor."
        ) from error


def check_memory(settings: TrainSettings, parameters: int, ranks: RankGroup) -> None:
    """Refuse a run whose model alone exceeds the total memory of its device."""
    device_name = "this machine"
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if ranks.device.type == "cuda":
        device_name = "the GPU"
        available = torch.cuda.get_device_properties(ranks.device).total_memory
    needed = _TRAINING_BYTES_PER_PARAMETER * parameters
    if needed > available:
        raise TrainError(
            f"A model of {parameters:,} parameters needs {format_size(needed)} to train, and {device_name} has "
            f"{format_size(available)}: {_describe_smaller_model(settings)}."
        )


def _describe_smaller_model(settings: TrainSettings) -> str:
    if isinstance(settings.model, PretrainedSettings):
        return "give --init a smaller model"
    return "lower the configuration's model.layers, model.width, model.hidden or model.vocab_size"


def is_out_of_memory(error: Exception) -> bool:
    error_types = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, error_types) or any(message in str(error) for message in _ALLOCATION_MESSAGES)


@contextmanager
def explain_memory_errors(settings: TrainSettings, parameters: int) -> Iterator[None]:
    """Convert out-of-memory errors to an error that names the sizes to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows = settings.batch_size or "all"
        raise TrainError(
            f"Out of memory with {parameters:,} parameters "
            f"({format_size(_TRAINING_BYTES_PER_PARAMETER * parameters)} to train) and passes of {rows} rows of "
            f"{settings.seq_len} tokens: lower --batch-size (more passes make the same step) or --seq-len; or "
            f"{_describe_smaller_model(settings)} (another run)."
        ) from error
