"""From the options of a command to a run: its settings, data and folder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchloom import DatasetConfig, Mixture
from batchloom.core.errors import SettingsError
from batchloom.train.checkpoint import read_checkpoint_step
from batchloom.train.data.dataset_run import choose_tokenizer, describe_order, prepare_dataset_store
from batchloom.train.data.memory_store import prepare_temporary_store
from batchloom.train.data.missing_data import choose_synthetic_data
from batchloom.train.data.mixture_report import open_mixture_generations
from batchloom.train.data.stream_run import StreamRequest
from batchloom.train.distributed import RankGroup, join_ranks
from batchloom.train.loop import TrainResult, train
from batchloom.train.model.pretrained import get_max_positions, read_model_config
from batchloom.train.request import DEFAULT_MODEL, TrainRequest
from batchloom.train.run import set_up_run
from batchloom.train.run_folder import RunFolder
from batchloom.train.run_generation import find_initial_generation
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


def _get_run_folder(request: TrainRequest) -> RunFolder:
    return RunFolder(request.run_path, prepares=request.data.dataset_config is not None)


def get_dataset_settings(request: TrainRequest, dataset: DatasetConfig | None) -> dict[str, Any]:
    """Return the settings of the data sets' file; a resumed run ignores them."""
    if dataset is None or request.is_continuation:
        return {}
    init = request.model.folder
    longest = get_max_positions(read_model_config(PretrainedSettings(init))) if init else None
    return dataset.plan_settings(longest)


def make_run_settings(request: TrainRequest, dataset_settings: Mapping[str, Any]) -> TrainSettings:
    """Return the settings of the run.

    ``dataset_settings`` override the configuration, and options override both. A SettingsError lists all
    problems at once.
    """
    config_file = request.model.config_file
    if request.is_continuation:
        return _read_previous_settings(request)
    path = "" if config_file is None else str(config_file)
    if config_file is not None:
        plain = read_config(config_file)
    elif request.model.init is not None:
        plain = {"model": {}}
    else:
        plain = load_named_config(request.model.model_name or DEFAULT_MODEL)
    model_values = plain.get("model")
    if request.model.init is not None and isinstance(model_values, dict) and not model_values.keys() <= PRETRAINED_KEYS:
        problem = f"model: the shape in {path} and --init exclude each other: give one"
        raise SettingsError([problem])
    changes = _make_changes(request)
    init_folder = request.model.folder or (model_values.get("init") if isinstance(model_values, dict) else None)
    if init_folder is None and request.model.attn_implementation is not None:
        raise SettingsError(["--attn-implementation: requires --init; the GPT has its own"])
    if isinstance(init_folder, str):
        plain = apply_finetuning_defaults(plain, get_max_positions(read_model_config(PretrainedSettings(init_folder))))
    return make_settings(merge_settings(plain, nest_order_settings(dataset_settings)), changes, path)


def _make_changes(request: TrainRequest) -> dict[str, Any]:
    """Return the overrides of a configuration."""
    model = {"init": request.model.folder, "attn_implementation": request.model.attn_implementation}
    model_changes = {name: value for name, value in model.items() if value is not None}
    return {**request.changes, **({"model": model_changes} if model_changes else {})}


def _read_previous_settings(request: TrainRequest) -> TrainSettings:
    """Return the settings of the run in the folder with overrides applied."""
    run_description = _get_run_folder(request).read()
    run_description.pop("data", None)
    run_description.pop("init", None)
    try:
        make_settings(run_description, {})
    except SettingsError as error:
        raise _get_run_folder(request).make_damaged_error(f"does not hold the settings of a run ({error})") from error
    return make_settings(run_description, _make_changes(request))


def start_training(request: TrainRequest, print_line: PrintLine) -> TrainResult:
    """Run the train command.

    After the run began, KeyboardInterrupt describes the remaining files and how to resume.
    """
    dataset = DatasetConfig.load(request.data.dataset_config) if request.data.dataset_config else None
    dataset_settings, folder = get_dataset_settings(request, dataset), _get_run_folder(request)
    settings = make_run_settings(request, dataset_settings)
    if not request.resume:
        # The loop checks this again. Here it fails before an input is prepared for hours.
        folder.check_new()
    try:
        with (
            join_ranks(request.device) as ranks,
            _open_run_data(request, settings, dataset, ranks, print_line) as data,
        ):
            log = RunLog(folder.log if ranks.first else None, print_line)
            if dataset is not None:
                log.print_line(
                    describe_order(dataset, dataset_settings, settings, is_continuation=request.is_continuation)
                )
            generation = request.data.generation
            run_data = data
            if request.resume and isinstance(data, Mixture):
                run_data = open_mixture_generations(data, folder, ranks)
            elif request.resume and isinstance(data, (Path, str)) and generation is None:
                generation = find_initial_generation(data, folder, ranks, request.data.open_options)
            open_options = {"generation": generation, **request.data.open_options}
            media = request.data.read_media
            run = set_up_run(run_data, settings, folder, ranks, log, open_options=open_options, media=media)
            return train(run, resume=request.resume, stop_at=request.stop_at)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(*_describe_interrupted_run(request)) from error


@contextmanager
def _open_run_data(
    request: TrainRequest,
    settings: TrainSettings,
    dataset: DatasetConfig | None,
    ranks: RankGroup,
    print_line: PrintLine,
) -> Iterator[Path | str | Mixture | StreamRequest]:
    if request.data.stream is not None:
        yield StreamRequest(
            inputs=request.data.stream,
            tokenizer=request.data.tokenizer,
            media=request.data.media or None,
            options=request.data.options,
        )
        return
    if request.data.mixture is not None:
        yield request.data.mixture
        return
    if dataset is not None:
        tokenizer = choose_tokenizer(dataset, request.data.tokenizer, request.model.init)
        yield prepare_dataset_store(dataset, _get_run_folder(request).data, tokenizer, ranks, print_line)
        return
    if request.data.if_missing == "synthetic":
        synthetic_data = choose_synthetic_data(request.data.data, request.data.input_file, settings, ranks)
        if synthetic_data is not None:
            yield synthetic_data
            return
    data = request.data
    if data.input_file is None:
        yield data.data or Path()
        return
    with prepare_temporary_store(
        *(data.input_file, data.tokenizer, data.media or None, ranks, print_line),
        follow_links=data.options.follow_links,
    ) as store:
        yield store


def _describe_interrupted_run(request: TrainRequest) -> tuple[str, ...]:
    """Describe the remains of an interrupted run and how to resume; empty without any."""
    folder = _get_run_folder(request)
    if not folder.has_run:
        if request.data.dataset_config is None or not folder.data.exists():
            return ()
        return (f"Stopped before the run began. Its data in {folder.data} stays; continue with the same command.",)
    newest = folder.find_newest_checkpoint()
    if newest is None:
        message = "it has no checkpoint yet, so its steps are lost (--save-interval sets how often one is made)"
        return (f"Stopped the run in {folder.path}; {message}. Start it again with --resume.",)
    message = f"Stopped the run in {folder.path}; its newest checkpoint is of step {read_checkpoint_step(newest)}. "
    return (f"{message}Continue with the same command and --resume.",)
