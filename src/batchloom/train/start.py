"""From the options of ``batchloom train`` to a trained model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchloom import DatasetConfig, Mixture, Store
from batchloom.adapters.rank_group import join_ranks
from batchloom.core.errors import SettingsError
from batchloom.train.checkpoint import read_checkpoint_step
from batchloom.train.loop import TrainResult, train
from batchloom.train.model.pretrained import get_max_positions, read_model_config
from batchloom.train.request import DEFAULT_MODEL, DataRequest, TrainRequest
from batchloom.train.run import set_up_run
from batchloom.train.run_data import describe_order, open_run_data, open_source
from batchloom.train.run_folder import RunFolder
from batchloom.train.train_log import PrintLine, RunLog
from batchloom.train.train_settings import (
    PRETRAINED_KEYS,
    PretrainedSettings,
    TrainSettings,
    apply_finetuning_defaults,
    load_named_config,
    make_settings,
    merge_settings,
    nest_order_settings,
    read_config,
)


def start_training(request: TrainRequest, print_line: PrintLine) -> TrainResult:
    """Run the train command.

    After the run began, KeyboardInterrupt describes the remaining files and how to resume.
    """
    folder = RunFolder(request.run_path, prepares=request.data.dataset_config is not None)
    dataset = DatasetConfig.load(request.data.dataset_config) if request.data.dataset_config else None
    dataset_settings = _get_dataset_settings(request, dataset)
    settings = _make_run_settings(request, folder, dataset_settings)
    if not request.resume:
        # The loop checks this again. Here it fails before an input is prepared for hours.
        folder.check_new()
    try:
        with (
            join_ranks(request.device) as ranks,
            open_run_data(request, settings, dataset, folder, ranks, print_line) as data,
        ):
            log = RunLog(folder.log if ranks.first else None, print_line)
            if dataset is not None:
                log.print_line(
                    describe_order(dataset, dataset_settings, settings, is_continuation=request.is_continuation)
                )
            source: Store | Mixture | DataRequest
            if isinstance(data, DataRequest):
                source = data
            else:
                generation, open_options = request.data.generation, request.data.open_options
                source = open_source(
                    data, folder, ranks, resume=request.resume, generation=generation, open_options=open_options
                )
            given_path, media = data if isinstance(data, Path) else None, request.data.read_media
            run = set_up_run(source, settings, folder, ranks, log, given_path=given_path, media=media)
            return train(run, resume=request.resume, stop_at=request.stop_at)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(*_describe_interrupted_run(folder, prepares=dataset is not None)) from error


def _get_dataset_settings(request: TrainRequest, dataset: DatasetConfig | None) -> dict[str, Any]:
    """Return the settings of the data sets' file; a resumed run ignores them."""
    if dataset is None or request.is_continuation:
        return {}
    init = request.model_folder
    longest = get_max_positions(read_model_config(PretrainedSettings(init))) if init else None
    return dataset.plan_settings(longest)


def _make_run_settings(request: TrainRequest, folder: RunFolder, dataset_settings: Mapping[str, Any]) -> TrainSettings:
    model_options = {"init": request.model_folder, "attn_implementation": request.attn_implementation}
    model_changes = {name: value for name, value in model_options.items() if value is not None}
    changes = {**request.changes, **({"model": model_changes} if model_changes else {})}
    if request.is_continuation:
        return _read_previous_settings(folder, changes)
    config_file = request.config_file
    path = "" if config_file is None else str(config_file)
    if config_file is not None:
        plain = read_config(config_file)
    elif request.init is not None:
        plain = {"model": {}}
    else:
        plain = load_named_config(request.model_name or DEFAULT_MODEL)
    model_values = plain.get("model")
    if request.init is not None and isinstance(model_values, dict) and not model_values.keys() <= PRETRAINED_KEYS:
        problem = f"model: the shape in {path} and --init exclude each other: give one"
        raise SettingsError([problem])
    init_folder = request.model_folder or (model_values.get("init") if isinstance(model_values, dict) else None)
    if init_folder is None and request.attn_implementation is not None:
        raise SettingsError(["--attn-implementation: requires --init; the GPT has its own"])
    if isinstance(init_folder, str):
        plain = apply_finetuning_defaults(plain, get_max_positions(read_model_config(PretrainedSettings(init_folder))))
    return make_settings(merge_settings(plain, nest_order_settings(dataset_settings)), changes, path)


def _read_previous_settings(folder: RunFolder, changes: Mapping[str, Any]) -> TrainSettings:
    previous = folder.read_settings()
    try:
        make_settings(previous, {})
    except SettingsError as error:
        raise folder.make_damaged_error(f"does not hold the settings of a run ({error})") from error
    return make_settings(previous, changes)


def _describe_interrupted_run(folder: RunFolder, *, prepares: bool) -> tuple[str, ...]:
    """Describe the remains of an interrupted run and how to resume; empty without any."""
    if not folder.has_run:
        if not prepares or not folder.data.exists():
            return ()
        return (f"Stopped before the run began. Its data in {folder.data} stays; continue with the same command.",)
    newest = folder.find_newest_checkpoint()
    if newest is None:
        message = "it has no checkpoint yet, so its steps are lost (--save-interval sets how often one is made)"
        return (f"Stopped the run in {folder.path}; {message}. Start it again with --resume.",)
    message = f"Stopped the run in {folder.path}; its newest checkpoint is of step {read_checkpoint_step(newest)}. "
    return (f"{message}Continue with the same command and --resume.",)
