"""Model of a run: its size is checked first, then it is built or loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchloom import Loader, Store
from batchloom.batches import DocumentRows
from batchloom.core.errors import InputError, SettingsError
from batchloom.train.data.train_media import check_media_isolation, check_media_model
from batchloom.train.distributed import RankGroup
from batchloom.train.model.gpt_model import GPT, estimate_parameter_count, pad_vocabulary
from batchloom.train.model.memory_estimate import explain_memory_errors
from batchloom.train.model.model_folder import describe_tokenizer_difference
from batchloom.train.model.pretrained import (
    PretrainedModel,
    build_meta_model,
    check_size,
    get_max_positions,
    load_pretrained,
)
from batchloom.train.train_log import RunLog
from batchloom.train.train_settings import (
    ModelSettings,
    PretrainedSettings,
    TrainSettings,
    compute_rank_rows,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TrainableModel = GPT | PretrainedModel


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Size of a model before it takes memory.

    Attributes:
        parameters: number of trainable parameters.
        vocab_size: rows of its embedding; 0 for a pretrained model.
        blueprint: pretrained model on the meta device; None for one that is trained from scratch.
    """

    parameters: int
    vocab_size: int = 0
    blueprint: "PreTrainedModel | None" = None


def outline_model(settings: TrainSettings, store: Store, *, media: bool) -> ModelOutline:
    """Return the outline of a run's model, for data with or without ``media``.

    It raises SettingsError for an unknown vocabulary size or too long rows, InputError for an unusable folder or
    media without one, and TrainError if the model lacks ids of the store.
    """
    if isinstance(settings.model, ModelSettings):
        if media:
            raise InputError(
                "The data holds images or audio, and the trainer's own GPT accepts only text: finetune a multimodal "
                "model, made for the processor that the data was prepared with (batchloom train --init FOLDER)."
            )
        vocab_size = _choose_vocabulary_size(store, settings.model)
        return ModelOutline(estimate_parameter_count(settings.model, vocab_size), vocab_size)
    blueprint = build_meta_model(settings.model, media=media)
    max_positions = get_max_positions(blueprint.config)
    if max_positions is not None and settings.seq_len > max_positions:
        problem = f"{settings.seq_len} is more than the {max_positions} positions of {settings.model.init}"
        raise SettingsError([f"seq_len: {problem}; --seq-len {max_positions} is the most"])
    check_size(settings.model, blueprint, store, media=media)
    return ModelOutline(sum(weight.numel() for weight in blueprint.parameters()), blueprint=blueprint)


def build_model(
    outline: ModelOutline,
    settings: TrainSettings,
    store: Store,
    loader: Loader,
    ranks: RankGroup,
    log: RunLog,
) -> tuple[TrainableModel, nn.Module]:
    """Build the model on its device.

    Return it plain, and compiled and wrapped for data parallelism. A pretrained model is tested on the first
    documents of ``store``. Damaged weights raise InputError; out of memory, another tokenizer and leaking
    attention raise TrainError.
    """
    with explain_memory_errors(settings, outline.parameters):
        if isinstance(settings.model, ModelSettings):
            model: TrainableModel = GPT(settings.model, outline.vocab_size, settings.seed).to(ranks.device)
            learner: nn.Module = torch.compile(model) if settings.compile else model  # type: ignore[assignment]
        else:
            model = learner = _build_pretrained(outline, settings, store, loader, ranks, log)
        if ranks.world_size > 1:
            with ranks.collective_errors():
                # Ranks and passes without images or audio do not use the weights for them.
                learner = DistributedDataParallel(learner, find_unused_parameters=loader.holds_media)
    return model, learner


def _build_pretrained(
    outline: ModelOutline,
    settings: TrainSettings,
    store: Store,
    loader: Loader,
    ranks: RankGroup,
    log: RunLog,
) -> PretrainedModel:
    """Load a pretrained model and verify that it keeps packed documents apart."""
    model_settings = settings.model
    if not isinstance(model_settings, PretrainedSettings) or outline.blueprint is None:
        raise AssertionError("this is only for pretrained models")
    if note := describe_tokenizer_difference(Path(model_settings.init), store):
        log.print_line(f"note   {note}")
    examples = DocumentRows(loader) if loader.holds_media else None
    if examples is not None:
        check_media_model(outline.blueprint, model_settings.init, examples, settings.seq_len)
    model = load_pretrained(model_settings, outline.blueprint).to(ranks.device)
    model.detect_linear_head(store)
    if settings.compile:
        model.compile_body()
    packed = settings.order.packing != "none"
    rows = settings.batch_size or compute_rank_rows(settings, ranks.world_size)
    distance = 0.0
    if examples is not None:
        sizes = rows, settings.seq_len
        distance = check_media_isolation(model, examples, store, sizes, packed=packed)
        if not examples.with_media(settings.seq_len):
            log.print_line("note   the first steps hold no images or audio: the model was tested on texts only")
    elif packed:
        distance = model.prove_isolation(store, settings.seq_len, rows)
    if packed:
        log.print_line(
            "packed documents do not see each other: the losses of their tokens match those of the documents alone "
            f"({distance:.1e} nats apart)"
        )
    return model


def _choose_vocabulary_size(store: Store, shape: ModelSettings) -> int:
    """Return the tokenizer's vocabulary size, rounded up to a multiple of 64."""
    store_vocab_size, model_vocab_size = store.vocab_size, shape.vocab_size
    if store_vocab_size is None and model_vocab_size is None:
        problem = (
            f"missing; {store.location.name} does not name its tokenizer: set it in a --config-file to more than the "
            "store's largest id"
        )
        raise SettingsError([f"model.vocab_size: {problem}"])
    if store_vocab_size is not None and model_vocab_size is not None and model_vocab_size < store_vocab_size:
        problem = f"{model_vocab_size} is less than the {store_vocab_size} ids of the store; leave it unset"
        raise SettingsError([f"model.vocab_size: {problem}"])
    return pad_vocabulary(model_vocab_size or store_vocab_size or 0)
