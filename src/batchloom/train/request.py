"""Options of the train command and their contradictions; no torch is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from batchloom import Mixture
from batchloom.batches import MediaOptions
from batchloom.core.errors import MissingDependencyError
from batchloom.core.settings import Setting, quote_value, raise_problems, suggest
from batchloom.train.train_settings import (
    DATA_PANEL,
    MAX_STEPS,
    MODEL_PANEL,
    RUN_PANEL,
    Bounds,
    TrainSettings,
    find_out_of_bounds,
)

# Default number of seconds to wait for a running job to answer an edit; it answers between two steps.
EDIT_TIMEOUT_S = 300.0
DEFAULT_MODEL = "tiny"
MISSING_DATA_POLICIES = ("error", "synthetic")


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
        Setting(
            help="Number of parts of a --stream that are read in parallel; a multiple of every number of ranks.",
            shown_default="greatest common divisor of the batch and 64",
            panel=DATA_PANEL,
        ),
    ] = None
    workers: Annotated[
        int | None,
        Setting(
            help="Number of tokenizing processes of each rank for a --stream; 0 for none but its own.",
            option="--stream-workers",
            shown_default="one per core",
            panel=DATA_PANEL,
        ),
    ] = None
    keep: Annotated[
        Path | None, Setting(help="Folder in which the store of a --stream is written meanwhile.", panel=DATA_PANEL)
    ] = None
    follow_links: Annotated[
        bool,
        Setting(
            help="Follow symbolic links that lead out of an input folder. Without it they are skipped.",
            panel=DATA_PANEL,
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPaths:
    """Locations of the processor and the media of a run."""

    processor: Annotated[
        str | None,
        Setting(
            help="Processor of images and audio of --input-file or --stream: a folder of transformers or a Hub id.",
            panel=DATA_PANEL,
        ),
    ] = None
    data_folder: Annotated[
        str | None,
        Setting(
            help="Base of relative paths of images and audio; of a store, their new folder if they have moved.",
            shown_default="the folder of the file that names them",
            panel=DATA_PANEL,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of opening a store; see ``batchloom.open_store``."""

    cache: Annotated[
        Path | None,
        Setting(
            help="Folder of the block cache of a remote store, shared by the ranks of a node.",
            shown_default="~/.cache/batchloom/blocks",
            panel=DATA_PANEL,
        ),
    ] = None
    cache_limit: Annotated[
        int | None,
        Setting(
            help="Maximum size of the block cache, as 200GB.", option_type=str, shown_default="50GB", panel=DATA_PANEL
        ),
    ] = None
    verify: Annotated[
        str | None,
        Setting(
            help="Compare each 4 KiB of tokens with their checksum: first-read, full or off.",
            shown_default="first-read for a remote store, else off",
            panel=DATA_PANEL,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """Data options of a run; :meth:`problems` lists their errors.

    One of ``data``, ``mixture``, ``input_file``, ``dataset_config`` and ``stream`` names the data. ``media`` are the
    processor and the folder of media of prepared or streamed data; of stores only the folder.
    """

    data: Annotated[
        Path | str | None,
        Setting(
            help="Folder or URL of a store (s3://, gs://, https://), a bare Megatron prefix, or synthetic data: dummy "
            "or distributed_dummy, with settings as in dummy:documents=1000,kind=text.",
            option_type=str,
            panel=DATA_PANEL,
        ),
    ] = None
    mixture: Annotated[
        Mixture | None,
        Setting(
            help="Several stores and their weights: a YAML file, or stores/web=0.7,stores/code=0.3. Replaces --data.",
            option_type=str,
            panel=DATA_PANEL,
        ),
    ] = None
    input_file: Annotated[
        Path | None, Setting(help="File to prepare into a temporary store. Replaces --data.", panel=DATA_PANEL)
    ] = None
    dataset_config: Annotated[
        Path | None,
        Setting(
            help="YAML file of data sets and their packing, prepared into OUT/data. Replaces --data.", panel=DATA_PANEL
        ),
    ] = None
    stream: Annotated[
        tuple[str, ...] | None,
        Setting(
            help="File, folder, glob or URL to read during the run; may be given several times. Replaces --data.",
            option_type=list,
            panel=DATA_PANEL,
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        Setting(
            help="Tokenizer of --input-file, --stream or --dataset-config, in the form prepare takes.",
            shown_default="that of prepare",
            panel=DATA_PANEL,
        ),
    ] = None
    if_missing: Annotated[
        str,
        Setting(
            help="Policy if --data or --input-file does not exist: error, or synthetic to train on synthetic data.",
            panel=DATA_PANEL,
        ),
    ] = "error"
    generation: Annotated[
        int | None,
        Setting(
            help="Generation of the store at --data.",
            shown_default="the newest; with --resume that of the run",
            panel=DATA_PANEL,
        ),
    ] = None
    options: StreamOptions = field(default_factory=StreamOptions)
    media: Annotated[Mapping[str, str], MediaPaths] = field(default_factory=dict)
    missing_media_lists: Annotated[
        tuple[str, ...],
        Setting(
            help="List of documents whose media are missing (check --missing-media FILE), served as padding; may be "
            "given several times.",
            option="--missing-media",
            option_type=list,
            panel=DATA_PANEL,
        ),
    ] = ()
    open_options: Annotated[Mapping[str, Any], StoreOptions] = field(default_factory=dict)

    @property
    def read_media(self) -> MediaOptions:
        """Options of reading images and audio of stores."""
        folder = self.media.get("data_folder") if self.stream is None else None
        return MediaOptions(folder=folder, replace=self.missing_media_lists)

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
                f"--tokenizer: {self.tokenizer} requires --input-file, --stream or --dataset-config; a store "
                "has its own"
            )
        media, has_raw_input = self.media, self.stream is not None or self.input_file is not None
        if "processor" in media and not has_raw_input:
            problems.append(f"--processor: {media['processor']} requires --stream or --input-file; a store has its own")
        if self.options.follow_links and not has_raw_input:
            problems.append("--follow-links: requires --stream or --input-file")
        if self.missing_media_lists and self.data is None and self.mixture is None:
            problems.append("--missing-media: requires --data or --mixture")
        stream_options = {
            "lanes": self.options.lanes,
            "stream-workers": self.options.workers,
            "keep": self.options.keep,
        }
        problems += [
            f"--{option}: {value} requires --stream"
            for option, value in stream_options.items()
            if value is not None and self.stream is None
        ]
        if self.generation is not None and self.data is None:
            problems.append(f"--generation: {self.generation} requires --data")
        if self.open_options and self.data is None:
            problems.append("--cache, --cache-limit, --verify: require --data")
        if self.if_missing not in MISSING_DATA_POLICIES:
            words = ", ".join(MISSING_DATA_POLICIES)
            hint = suggest(str(self.if_missing), MISSING_DATA_POLICIES)
            problems.append(f"--if-missing: {quote_value(self.if_missing)} is none of {words}{hint}")
        elif self.if_missing != "error" and (self.dataset_config or self.stream or self.mixture) is not None:
            problems.append("--if-missing: requires --data or --input-file; leave it out")
        return problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Model options of a run; :meth:`problems` lists their errors."""

    model_name: Annotated[
        str | None,
        Setting(help="Configuration: tiny, 150M_1024 or 250M_1024.", shown_default=DEFAULT_MODEL, panel=MODEL_PANEL),
    ] = None
    config_file: Annotated[
        Path | None, Setting(help="JSON file of your own configuration, as in configs/*.json.", panel=MODEL_PANEL)
    ] = None
    init: Annotated[
        Path | None,
        Setting(
            help="Local folder of a Hugging Face model to finetune; one with images or audio for such data.",
            panel=MODEL_PANEL,
        ),
    ] = None
    attn_implementation: Annotated[
        str | None,
        Setting(
            help="Attention of the --init model: sdpa, eager, flex_attention, ...",
            shown_default="sdpa",
            panel=MODEL_PANEL,
        ),
    ] = None

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

    ``changes`` are fields of TrainSettings that override the configuration, those of a group in a dict of their own.
    """

    data: DataRequest = field(default_factory=DataRequest)
    model: ModelRequest = field(default_factory=ModelRequest)
    changes: Annotated[Mapping[str, Any], TrainSettings] = field(default_factory=dict)
    device: Annotated[str, Setting(help="Device: auto, cpu, cuda or cuda:N.", panel=MODEL_PANEL)] = "auto"
    out: Annotated[
        Path | None,
        Setting(help="Folder of the run.", shown_default="runs/ and the name of the model", panel=RUN_PANEL),
    ] = None
    resume: Annotated[
        bool, Setting(help="Resume the run in --out. Without it that folder must be new.", panel=RUN_PANEL)
    ] = False
    stop_at: Annotated[
        int | None,
        Setting(help="Save and stop after this step; --resume goes on.", shown_default="--max-iters", panel=RUN_PANEL),
    ] = None

    def __post_init__(self) -> None:
        problems = self.data.problems() + self.model.problems()
        bounds: Bounds = {"stop_at": (1, MAX_STEPS)}
        problems += [problem.replace("stop_at", "--stop-at") for problem in find_out_of_bounds(bounds, self)]
        try:
            str(self.run_path).encode()
        except UnicodeEncodeError:
            problems.append(
                f"--out: {str(self.run_path)!r} is not UTF-8, and safetensors cannot read such a path: give a "
                "folder with a UTF-8 name"
            )
        raise_problems(problems)

    @property
    def run_path(self) -> Path:
        """Folder of the run."""
        return self.out or Path("runs") / self.model.stem

    @property
    def is_continuation(self) -> bool:
        """True if the settings are those of the run in the folder."""
        return self.resume and self.model.config_file is None and self.model.model_name is None


def _find_exclusive_options(request: DataRequest | ModelRequest, *pairs: tuple[str, ...]) -> list[str]:
    """List an error for each pair of options that are both given."""
    return [
        f"--{first.replace('_', '-')} and --{second.replace('_', '-')} exclude each other: give one"
        for first, second in pairs
        if getattr(request, first) is not None and getattr(request, second) is not None
    ]
