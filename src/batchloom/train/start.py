"""From the options of a command to a run: its settings, data and folder."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from batchloom import DatasetConfig, Mixture
from batchloom.batches import MediaOptions
from batchloom.core.errors import SettingsError
from batchloom.core.settings import quote_value, raise_problems, suggest
from batchloom.train.checkpoint import read_checkpoint_step
from batchloom.train.data import (
    StreamOptions,
    StreamRequest,
    choose_synthetic_data,
    choose_tokenizer,
    describe_order,
    open_mixture_generations,
    prepare_dataset_store,
    prepare_temporary_store,
)
from batchloom.train.distributed import RankGroup, join_ranks
from batchloom.train.loop import TrainResult, train
from batchloom.train.model import get_max_positions, read_model_config
from batchloom.train.run import set_up_run
from batchloom.train.run_folder import RunFolder
from batchloom.train.run_generation import find_initial_generation
from batchloom.train.train_log import PrintLine, RunLog
from batchloom.train.train_settings import (
    MAX_STEPS,
    PRETRAINED_KEYS,
    Bounds,
    PretrainedSettings,
    TrainSettings,
    apply_finetuning_defaults,
    find_out_of_bounds,
    load_named_config,
    make_settings,
    read_config,
)

DEFAULT_MODEL = "tiny"
MISSING_DATA_POLICIES = ("error", "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """Data options of a run; :meth:`problems` lists their errors.

    Attributes:
        data: folder or URL of a store, a bare Megatron prefix, or a name of synthetic data.
        mixture: several stores and their weights; excludes ``data``.
        input_file: a file or folder to prepare into a temporary store; excludes ``data``.
        dataset_config: a YAML file of data sets, which are prepared below the run's folder; excludes ``data`` and
            ``input_file``.
        tokenizer: tokenizer of prepared or streamed data in the form prepare takes; None for its default.
        if_missing: policy for missing data: ``error``, or ``synthetic`` to replace it.
        generation: generation of the store at ``data``; None for the newest, or for the initial one of a resumed
            run.
        stream: raw inputs to read during the run; excludes the others.
        options: options of reading a stream; for prepared data only whether links are followed.
        media: settings of images and audio: ``processor`` and ``data_folder`` of prepared or streamed data; for
            stores ``data_folder``, the new base of media paths that have moved.
        missing_media_lists: for stores, lists of documents whose media are missing, which are served as padding.
        open_options: further options of ``open_store``: cache and verification of a remote store.
    """

    data: Path | str | None = None
    mixture: Mixture | None = None
    input_file: Path | None = None
    dataset_config: Path | None = None
    tokenizer: str | None = None
    if_missing: str = "error"
    generation: int | None = None
    stream: tuple[str, ...] | None = None
    options: StreamOptions = field(default_factory=StreamOptions)
    media: Mapping[str, str] | None = None
    missing_media_lists: tuple[str, ...] = ()
    open_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def read_media(self) -> MediaOptions:
        """Options of reading images and audio of stores."""
        folder = (self.media or {}).get("data_folder") if self.stream is None else None
        return MediaOptions(folder=folder, replace=self.missing_media_lists)

    @property
    def streams(self) -> StreamRequest | None:
        """Request of the raw inputs to stream; None without any."""
        if self.stream is None:
            return None
        return StreamRequest(
            inputs=self.stream,
            tokenizer=self.tokenizer,
            media=self.media,
            options=self.options,
        )

    def problems(self) -> list[str]:
        """List the errors of the request, by the names of the options."""
        source_fields = ("data", "mixture", "input_file", "dataset_config", "stream")
        problems = _find_exclusive_options(self, *combinations(source_fields, 2))
        if all(getattr(self, source_field) is None for source_field in source_fields):
            problems.append(
                "--data: missing; give the folder of a store (batchloom prepare makes one), --mixture with several "
                "stores, --input-file with a file to prepare in memory, --stream with inputs to read during the "
                "run, or --dataset-config with a YAML file"
            )
        if self.tokenizer is not None and self.data is not None:
            problems.append(
                f"--tokenizer: {self.tokenizer} goes with --input-file, --stream and --dataset-config only; a store "
                "has its own"
            )
        media, has_raw_input = (
            self.media or {},
            self.stream is not None or self.input_file is not None,
        )
        if "processor" in media and not has_raw_input:
            problems.append(
                f"--processor: {media['processor']} goes with --stream and --input-file only; a store has its own"
            )
        if self.options.follow_links and not has_raw_input:
            problems.append("--follow-links: goes with --stream and --input-file only")
        if self.missing_media_lists and self.data is None and self.mixture is None:
            problems.append("--missing-media: goes with --data and --mixture only")
        stream_options = self.options
        problems += [
            f"--{option}: {value} goes with --stream only"
            for option, value in (
                *(
                    ("lanes", stream_options.lanes),
                    ("stream-workers", stream_options.workers),
                    ("keep", stream_options.keep),
                ),
            )
            if value is not None and self.stream is None
        ]
        if self.generation is not None and self.data is None:
            problems.append(f"--generation: {self.generation} goes with --data only")
        if self.open_options and self.data is None:
            problems.append("--cache, --cache-limit, --verify: go with --data only")
        if self.if_missing not in MISSING_DATA_POLICIES:
            words = ", ".join(MISSING_DATA_POLICIES)
            hint = suggest(str(self.if_missing), MISSING_DATA_POLICIES)
            problems.append(f"--if-missing: {quote_value(self.if_missing)} is none of {words}{hint}")
        elif self.if_missing != "error" and (self.dataset_config or self.stream or self.mixture) is not None:
            problems.append("--if-missing: goes with --data and --input-file only; leave it out")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Model options of a run; :meth:`problems` lists their errors.

    Attributes:
        model_name: name of a configuration that ships with the package.
        config_file: a configuration file; excludes ``model_name``.
        init: folder of a Hugging Face model to finetune; excludes ``model_name``.
        attn_implementation: attention implementation of that model; None for its default.
    """

    model_name: str | None = None
    config_file: Path | None = None
    init: Path | None = None
    attn_implementation: str | None = None

    @property
    def folder(self) -> str | None:
        """Absolute path of the model to finetune; None without one."""
        return None if self.init is None else str(self.init.resolve())

    @property
    def stem(self) -> str:
        """Default name of a run of this model."""
        config_name = self.config_file.stem if self.config_file else self.model_name or DEFAULT_MODEL
        return self.init.resolve().name if self.init else config_name

    def problems(self) -> list[str]:
        """List the errors of the request, by the names of the options."""
        return _find_exclusive_options(self, ("model_name", "config_file"), ("model_name", "init"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Options of the train command.

    Attributes:
        data: data options.
        model: model options.
        out: folder of the run; None for ``runs/`` and the configuration's name.
        resume: whether to resume the run in ``out``, with its own settings unless others are given.
        stop_at: step after which to save and stop.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        changes: fields of TrainSettings (and ``lr``) that override the configuration; None values are ignored.
    """

    data: DataRequest
    model: ModelRequest = field(default_factory=ModelRequest)
    out: Path | None = None
    resume: bool = False
    stop_at: int | None = None
    device: str = "auto"
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = self.data.problems() + self.model.problems()
        bounds: Bounds = {"stop_at": (1, MAX_STEPS)}
        problems += [problem.replace("stop_at", "--stop-at") for problem in find_out_of_bounds(bounds, self)]
        try:
            str(self.folder.path).encode()
        except UnicodeEncodeError:
            problems.append(
                f"--out: {str(self.folder.path)!r} is not UTF-8, and safetensors cannot read such a path: give a "
                "folder with a UTF-8 name"
            )
        raise_problems(problems)

    @property
    def folder(self) -> RunFolder:
        """Folder of the run."""
        prepares = self.data.dataset_config is not None
        return RunFolder(self.out or Path("runs") / self.model.stem, prepares=prepares)

    @property
    def is_continuation(self) -> bool:
        """True if the settings are those of the run in the folder."""
        return self.resume and self.model.config_file is None and self.model.model_name is None

    def get_dataset_settings(self, dataset: DatasetConfig | None) -> dict[str, Any]:
        """Return the settings of the data sets' file; a resumed run ignores them."""
        if dataset is None or self.is_continuation:
            return {}
        init = self.model.folder
        longest = get_max_positions(read_model_config(PretrainedSettings(init))) if init else None
        return dataset.plan_settings(longest)

    def settings(self, dataset_settings: Mapping[str, Any] | None = None) -> TrainSettings:
        """Return the settings of the run.

        ``dataset_settings`` override the configuration, and options override both. A SettingsError lists all
        problems at once.
        """
        config_file = self.model.config_file
        if self.is_continuation:
            return self._read_previous_settings()
        path = "" if config_file is None else str(config_file)
        if config_file is not None:
            plain = read_config(config_file)
        elif self.model.init is not None:
            plain = {"model": {}}
        else:
            plain = load_named_config(self.model.model_name or DEFAULT_MODEL)
        model_values = plain.get("model")
        if (
            self.model.init is not None
            and isinstance(model_values, dict)
            and not model_values.keys() <= PRETRAINED_KEYS
        ):
            problem = f"model: the shape in {path} and --init exclude each other: give one"
            raise SettingsError([problem])
        init_folder = self._config_changes.get("init") or (
            model_values.get("init") if isinstance(model_values, dict) else None
        )
        if init_folder is None and self.model.attn_implementation is not None:
            raise SettingsError(["--attn-implementation: goes with --init; the GPT has its own"])
        if isinstance(init_folder, str):
            plain = apply_finetuning_defaults(
                plain, get_max_positions(read_model_config(PretrainedSettings(init_folder)))
            )
        requested_changes = {name: value for name, value in self._config_changes.items() if value is not None}
        return make_settings(plain, {**(dataset_settings or {}), **requested_changes}, path)

    @property
    def _config_changes(self) -> dict[str, Any]:
        """Overrides of a configuration."""
        attention = self.model.attn_implementation
        return {**self.changes, "init": self.model.folder, "attn_implementation": attention}

    def _read_previous_settings(self) -> TrainSettings:
        """Return the settings of the run in the folder with overrides applied."""
        run_description = self.folder.read()
        run_description.pop("data", None)
        run_description.pop("init", None)
        try:
            make_settings(run_description, {})
        except SettingsError as error:
            raise self.folder.make_damaged_error(f"does not hold the settings of a run ({error})") from error
        return make_settings(run_description, self._config_changes)


def _find_exclusive_options(request: DataRequest | ModelRequest, *pairs: tuple[str, ...]) -> list[str]:
    """List an error for each pair of options that are both given."""
    return [
        f"--{first.replace('_', '-')} and --{second.replace('_', '-')} exclude each other: give one"
        for first, second in pairs
        if getattr(request, first) is not None and getattr(request, second) is not None
    ]


def start_training(request: TrainRequest, print_line: PrintLine) -> TrainResult:
    """Run the train command.

    After the run began, KeyboardInterrupt describes the remaining files and how to resume.
    """
    dataset = DatasetConfig.load(request.data.dataset_config) if request.data.dataset_config else None
    dataset_settings, folder = request.get_dataset_settings(dataset), request.folder
    settings = request.settings(dataset_settings)
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
    if (streams := request.data.streams) is not None:
        yield streams
        return
    if request.data.mixture is not None:
        yield request.data.mixture
        return
    if dataset is not None:
        tokenizer = choose_tokenizer(dataset, request.data.tokenizer, request.model.init)
        yield prepare_dataset_store(dataset, request.folder.data, tokenizer, ranks, print_line)
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
        *(data.input_file, data.tokenizer, data.media, ranks, print_line),
        follow_links=data.options.follow_links,
    ) as store:
        yield store


def _describe_interrupted_run(request: TrainRequest) -> tuple[str, ...]:
    """Describe the remains of an interrupted run and how to resume; empty without any."""
    folder = request.folder
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
