"""Options of the commands train and worker, checked without loading torch."""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import combinations, count
from pathlib import Path
from threading import Event
from typing import Annotated, Any, Literal, final

from batchloom import Mixture
from batchloom.batches import MediaOptions
from batchloom.core.errors import MissingDependencyError
from batchloom.core.run_files import RunFiles
from batchloom.core.settings import (
    Setting,
    convert_int_settings,
    find_problems,
    list_settings,
    quote_value,
    raise_problems,
    suggest,
)
from batchloom.core.synthetic_data import SYNTHETIC_NAMES as SYNTHETIC, parse_synthetic_spec
from batchloom.train.train_settings import (
    MAX_ROWS,
    MAX_STEPS,
    MAX_TOKENS,
    DataSetting,
    ModelSetting,
    Overlong,
    RunSetting,
    TrainSettings,
    list_model_names,
)

# Default number of seconds to wait for a running job to answer an edit; it answers between two steps.
EDIT_TIMEOUT_S = 300.0
DEFAULT_MODEL = "tiny"
# Says how an edit adds a source to a run on a mixture.
NEW_SOURCE_REMEDY = (
    "to add a store, give edit a --mixture of the weights that the run was started with and the new store without one "
    "(as in --mixture stores/web=0.7,stores/code=0.3,stores/new)"
)
_SOURCES = ("data", "mixture", "input_file", "stream", "dataset_config")
DatasetType = Literal["dummy", "distributed_dummy", "huggingface", "store"]
# Sources of data that an option applies to, if not to all.
_APPLICABLE_SOURCES = {
    "tokenizer": ("input_file", "stream", "dataset_config"),
    "if_missing": ("data", "input_file"),
    "generation": ("data",),
    "lanes": ("stream",),
    "workers": ("stream",),
    "keep": ("stream",),
    "follow_links": ("input_file", "stream"),
    "encoding": ("input_file", "stream"),
    "include": ("input_file", "stream"),
    "exclude": ("input_file", "stream"),
    "processor": ("input_file", "stream"),
    "missing_media_lists": ("data", "mixture"),
    "cache": ("data",),
    "cache_limit": ("data",),
    "verify": ("data",),
}
# Names of the trainer's configurations by model size.
MODEL_SIZES = {"tiny": "tiny", "medium": "150M_1024"}
_DATASET_NAME_HELP = {
    "huggingface": "a data set of the Hub, as org/name[:config][/split][@revision]",
    "store": "the folder or the URL of a store (batchloom prepare makes one)",
}


def require_train_packages() -> None:
    """Check that the packages training needs are installed, before hours are spent.

    Raises:
        MissingDependencyError: names all missing packages.
    """
    missing = [name for name in ("torch", "safetensors", "matplotlib") if find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f"Training needs {', '.join(missing)}, not installed: pip install 'batchloom[train]'."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """Options of reading a stream; see ``batchloom.stream``."""

    lanes: Annotated[
        int | None,
        DataSetting(
            help="Number of parts of a --stream that are read in parallel; a multiple of every number of ranks.",
            shown_default="greatest common divisor of the batch and 64",
        ),
    ] = None
    workers: Annotated[
        int | None,
        DataSetting(
            help="Number of tokenizing processes of each rank for a --stream; 0 for none but its own.",
            option="--stream-workers",
            shown_default="one per core",
        ),
    ] = None
    keep: Annotated[
        Path | None, DataSetting(help="Folder of a store that is written from a --stream during the run.")
    ] = None
    encoding: Annotated[
        str | None, DataSetting(help="Encoding of the texts of --input-file or --stream.", shown_default="utf-8")
    ] = None
    include: Annotated[
        str | None,
        DataSetting(
            help="Globs of the files of --input-file or --stream to read, as for prepare.", shown_default="all"
        ),
    ] = None
    exclude: Annotated[
        str | None,
        DataSetting(help="Globs of the files of --input-file or --stream to leave out.", shown_default="none"),
    ] = None
    follow_links: Annotated[
        bool, DataSetting(help="Follow symbolic links that lead out of an input folder. Without it they are skipped.")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPaths:
    """Locations of the processor and the media of a run."""

    processor: Annotated[
        str | None,
        DataSetting(
            help="Processor of images and audio of --input-file or --stream: a folder of transformers or a Hub id."
        ),
    ] = None
    data_folder: Annotated[
        str | None,
        DataSetting(
            help="Base of relative paths of images and audio; of a store, their new folder if they have moved.",
            shown_default="the folder of the file that names them",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of opening a store; see ``batchloom.open_store``."""

    cache: Annotated[
        Path | None,
        DataSetting(
            help="Folder of the block cache of a remote store, shared by the ranks of a node.",
            shown_default="~/.cache/batchloom/blocks",
        ),
    ] = None
    cache_limit: Annotated[
        int | None,
        DataSetting(
            help="Maximum size of the block cache (200GB).", option_type=str, metavar="SIZE", shown_default="50GB"
        ),
    ] = None
    verify: Annotated[
        str | None,
        DataSetting(
            help="Compare each 4 KiB of tokens with their checksum: first-read, full or off.",
            shown_default="first-read for a remote store, else off",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """Data options of a run; :meth:`problems` lists their errors.

    One of ``data``, ``mixture``, ``input_file``, ``dataset_config`` and ``stream`` names the data.
    """

    data: Annotated[
        Path | str | None,
        DataSetting(
            help="Folder or URL of a store (s3://, gs://, https://), a bare Megatron prefix, or synthetic data: dummy "
            "or distributed_dummy, with settings as in dummy:documents=1000,kind=text.",
            option_type=str,
        ),
    ] = None
    mixture: Annotated[
        Mixture | None,
        DataSetting(
            help="Several stores and their weights: a YAML file, or stores/web=0.7,stores/code=0.3 (stores/new alone "
            "waits for an edit). Replaces --data.",
            option_type=str,
        ),
    ] = None
    input_file: Annotated[Path | None, DataSetting(help="File to prepare into a temporary store. Replaces --data.")] = (
        None
    )
    dataset_config: Annotated[
        Path | None,
        DataSetting(help="YAML file of data sets and their packing, prepared into OUT/data. Replaces --data."),
    ] = None
    stream: Annotated[
        tuple[str, ...] | None,
        DataSetting(
            help="File, folder, glob or URL to read during the run. Repeatable. Replaces --data.",
            option_type=list,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        DataSetting(
            help="Tokenizer of --input-file, --stream or --dataset-config, in the form prepare takes.",
            shown_default="that of prepare",
        ),
    ] = None
    if_missing: Annotated[
        Literal["error", "synthetic"],
        DataSetting(
            help="Policy if --data or --input-file does not exist: error, or synthetic to train on synthetic data."
        ),
    ] = "error"
    generation: Annotated[
        int | None,
        DataSetting(
            help="Generation of the store at --data.", shown_default="the newest; with --resume that of the run"
        ),
    ] = None
    options: StreamOptions = field(default_factory=StreamOptions)
    media: MediaPaths = field(default_factory=MediaPaths)
    missing_media_lists: Annotated[
        tuple[str, ...],
        DataSetting(
            help="List of documents whose media are missing (check --missing-media FILE), served as padding. "
            "Repeatable.",
            option="--missing-media",
            option_type=list,
        ),
    ] = ()
    store: StoreOptions = field(default_factory=StoreOptions)

    @property
    def read_media(self) -> MediaOptions:
        """Options of reading images and audio of stores."""
        folder = self.media.data_folder if self.stream is None else None
        return MediaOptions(folder=folder, replace=self.missing_media_lists)

    @property
    def sources(self) -> set[str]:
        """Options that name the data."""
        return {name for name in _SOURCES if getattr(self, name) is not None}

    def problems(self, *, is_resumed: bool = False) -> list[str]:
        """List the errors of the request, by the names of the options.

        A run that is resumed remembers its data.
        """
        problems = _find_exclusive_options(self, *combinations(_SOURCES, 2))
        sources = self.sources
        if not sources and not is_resumed:
            problems.append(
                "--data: missing; give the folder of a store (batchloom prepare makes one), --mixture with several "
                "stores, --input-file with a file to prepare first, --stream with inputs to read during the "
                "run, or --dataset-config with a YAML file"
            )
        if not sources and is_resumed:
            # That of the run, whatever it is.
            sources = {*_SOURCES}
        for group in (self, self.options, self.media, self.store):
            group_class: Any = type(group)
            for option in list_settings(group_class):
                allowed = _APPLICABLE_SOURCES.get(option.name, _SOURCES)
                value = getattr(group, option.name)
                if value != option.default and not sources & {*allowed}:
                    *others, last = map(_format_option, allowed)
                    alternatives = f"{', '.join(others)} or {last}" if others else last
                    text = ", ".join(value) if isinstance(value, tuple) else str(value)
                    shown_value = "" if value is True else f" {text}"
                    problems.append(f"{option.option_names[0]}:{shown_value} requires {alternatives}")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """Options of the train command.

    ``changes`` are fields of TrainSettings that override the configuration, those of a group in a dict of their own.
    """

    data: DataRequest = field(default_factory=DataRequest)
    model_name: Annotated[
        str | None,
        ModelSetting(
            help="Configuration: tiny, 150M_1024 or 250M_1024; any other name is that of the run, whose model is tiny "
            "unless --config-file says more.",
            shown_default=DEFAULT_MODEL,
        ),
    ] = None
    config_file: Annotated[
        Path | None, ModelSetting(help="JSON file of your own configuration, as in configs/*.json.")
    ] = None
    init: Annotated[
        Path | None,
        ModelSetting(help="Local folder of a Hugging Face model to finetune; one with images or audio for such data."),
    ] = None
    attn_implementation: Annotated[
        str | None,
        ModelSetting(help="Attention of the --init model: sdpa, eager, flex_attention, ...", shown_default="sdpa"),
    ] = None
    changes: Annotated[Mapping[str, Any], TrainSettings] = field(default_factory=dict)
    device: Annotated[str, ModelSetting(help="Device: auto, cpu, cuda or cuda:N.")] = "auto"
    out: Annotated[
        Path | None, RunSetting(help="Folder of the run.", shown_default="runs/ and the name of the model")
    ] = None
    resume: Annotated[bool, RunSetting(help="Resume the run in --out. Without it that folder must be new.")] = False
    stop_at: Annotated[
        int | None,
        RunSetting(help="Save and stop after this many steps; --resume goes on.", shown_default="--max-iters"),
    ] = None

    def __post_init__(self) -> None:
        is_forgotten = not self.resume and not self.data.sources and RunFiles(self.run_path).description.is_file()
        if is_forgotten:
            remedy = "give --resume, or for a new run data and another --out"
            raise_problems([f"--resume: missing; {self.run_path} holds a run: {remedy}"])
        problems = self.data.problems(is_resumed=self.resume)
        problems += self._find_name_problems()
        if self.stop_at is not None and self.stop_at < 1:
            problems.append(f"--stop-at: {self.stop_at} is not a number of steps, from 1")
        try:
            str(self.run_path).encode()
        except UnicodeEncodeError:
            problems.append(
                f"--out: {str(self.run_path)!r} is not UTF-8, and safetensors cannot read such a path: give a "
                "folder with a UTF-8 name"
            )
        raise_problems(problems)

    def _find_name_problems(self) -> list[str]:
        """Refuse a name of the run that is no file name, or resembles a configuration."""
        name = self.model_name
        known = list_model_names()
        if name in known:
            # Both say the sizes, unless the file is that of the name.
            is_own_file = self.config_file is None or self.config_file.stem == name
            others = [("--config-file", not is_own_file), ("--init", self.init is not None)]
            return [f"--model-name and {option} exclude each other: give one" for option, given in others if given]
        if name is None:
            return []
        if name != Path(name).name or name in (".", ".."):
            return [f"--model-name: {name!r} is not the name of a folder"]
        if hint := suggest(name, known):
            return [f"--model-name: {name!r} is none of {', '.join(known)}{hint}"]
        return []

    @property
    def config_name(self) -> str:
        """Name of the shipped configuration, unless a file or a model gives the sizes."""
        name = self.model_name
        return name if name is not None and name in list_model_names() else DEFAULT_MODEL

    def describe_name(self) -> str:
        """Return a note on a name of the run that leaves the model to the default."""
        if self.model_name in (None, self.config_name) or self.config_file or self.init or self.resume:
            return ""
        return f"model  {self.model_name!r} names the run; its sizes are those of {self.config_name} (--config-file)"

    @property
    def model_folder(self) -> str | None:
        """Absolute path of the model to finetune; None without one."""
        return None if self.init is None else str(self.init.resolve())

    @property
    def run_path(self) -> Path:
        """Folder of the run."""
        if self.model_name is None and self.init is not None:
            name = self.init.resolve().name
        else:
            name = self.model_name or (self.config_file.stem if self.config_file else DEFAULT_MODEL)
        return self.out or Path("runs") / name

    @property
    def is_continuation(self) -> bool:
        """True if the settings are those of the run in the folder."""
        names_config = self.model_name is not None and self.config_name == self.model_name
        return self.resume and self.config_file is None and not names_config


def list_given(options: MediaPaths | StoreOptions) -> dict[str, Any]:
    """Return the options that are given, by name."""
    return {name: value for name, value in asdict(options).items() if value is not None}


def _format_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _find_exclusive_options(request: DataRequest, *pairs: tuple[str, ...]) -> list[str]:
    """List an error for each pair of options that are both given."""
    return [
        f"{_format_option(first)} and {_format_option(second)} exclude each other: give one"
        for first, second in pairs
        if getattr(request, first) is not None and getattr(request, second) is not None
    ]


@final
class LeaveEvent(Event):
    """Event that asks the workers of a run to save and stop after the current step.

    Attributes:
        heeded: whether a run is training and checks the event between steps.
    """

    heeded = False


_WORKER_NUMBERS = count()


def make_worker_id() -> str:
    """Make a name that no other worker has: machine, process and number."""
    return f"{socket.gethostname()}-{os.getpid()}-{next(_WORKER_NUMBERS)}"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker; all workers of a run share them except ``worker_id``.

    Without a type of the data, it is synthetic.
    """

    worker_id: Annotated[
        str, Setting(help="Name of the worker in its output.", shown_default="machine and process")
    ] = field(default_factory=make_worker_id)
    # The command requires it: synthetic data is announced at the start, and in the result.
    dataset_type: Annotated[DatasetType, Setting(help="Type of the data. Required.")] = "dummy"
    dataset_name: Annotated[
        str | None,
        Setting(
            help="org/name of the Hub, or the folder or URL of a store; for synthetic data its settings, as in "
            "documents=1000,kind=text."
        ),
    ] = None
    tokenizer_name: Annotated[
        str | None,
        Setting(help="Tokenizer of a data set of the Hub, in the form prepare takes.", option="--tokenizer"),
    ] = None
    batch_size: Annotated[
        int, Setting(help="Number of sequences of a step for each worker.", minimum=1, maximum=MAX_ROWS)
    ] = 4
    seq_len: Annotated[int, Setting(help="Number of tokens of a sequence.", minimum=2, maximum=MAX_TOKENS)] = 32
    num_steps: Annotated[
        int, Setting(help="Number of steps of the complete run, over all restarts.", minimum=1, maximum=MAX_STEPS)
    ] = 100
    model_size: Annotated[Literal["tiny", "medium"], Setting(help="Size of the model.")] = "tiny"
    out: Annotated[
        Path,
        Setting(
            help="Folder of the run, shared by all workers; an existing run is resumed.",
            check=lambda value: "" if isinstance(value, Path) else "is not a path",
        ),
    ] = Path("runs/worker")
    save_interval: Annotated[
        int,
        Setting(
            help="Number of steps between checkpoints, the most that a kill costs; 0 for the end only.",
            minimum=0,
            maximum=MAX_STEPS,
        ),
    ] = 10
    device: Annotated[str, Setting(help="Device: auto, cpu, cuda or cuda:N.")] = "auto"
    overlong: Annotated[
        Overlong | None,
        Setting(
            help="Policy for documents longer than a sequence: split, drop, truncate or error.",
            shown_default="split; drop for conversations and media",
        ),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        # Without the option the command passes an empty string.
        dataset_type: object = self.dataset_type
        if not dataset_type:
            raise_problems(["--dataset-type: missing; give dummy, distributed_dummy, huggingface or store"])
        # Integers of numpy become plain ones, which the ranks exchange as JSON.
        convert_int_settings(self)
        kind = self.dataset_type
        name = self.dataset_name
        problems = find_problems(self)
        if kind in _DATASET_NAME_HELP and not name:
            problems.append(f"dataset_name: missing; {kind} is read from {_DATASET_NAME_HELP[kind]}")
        if kind != "huggingface" and self.tokenizer_name is not None:
            problems.append(
                f"tokenizer_name: {quote_value(self.tokenizer_name)} requires dataset_type huggingface; stores have "
                "their own tokenizer, and synthetic data has no text"
            )
        if kind in SYNTHETIC and name:
            try:
                parse_synthetic_spec(self.data_source)
            except ValueError as error:
                problems.append(
                    f"dataset_name: {error}; or leave it out. For real data give dataset_type huggingface or store"
                )
        raise_problems(problems)

    @property
    def data_source(self) -> str:
        """Data of the run in the form ``open_store`` or ``prepare`` takes."""
        name = self.dataset_name or ""
        return f"{self.dataset_type}:{name}" if self.dataset_type in SYNTHETIC else name
