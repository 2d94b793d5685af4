"""Settings of one worker of an elastic run."""

from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Annotated, final, get_args

from batchloom.core.settings import Setting, convert_int_settings, quote_value, raise_problems, suggest
from batchloom.core.synthetic_data import SYNTHETIC_NAMES as SYNTHETIC, parse_synthetic_spec
from batchloom.train.train_settings import MAX_ROWS, MAX_STEPS, MAX_TOKENS, Overlong

HUGGINGFACE_TYPE, STORE_TYPE = "huggingface", "store"
DATASET_TYPES = (*SYNTHETIC, HUGGINGFACE_TYPE, STORE_TYPE)
# Names of the trainer's configurations by model size.
MODEL_SIZES = {"tiny": "tiny", "medium": "150M_1024"}
_OVERLONG_POLICIES = get_args(Overlong)
_DATASET_NAME_HELP = {
    HUGGINGFACE_TYPE: "a data set of the Hub, as org/name[:config][/split][@revision]",
    STORE_TYPE: "the folder or the URL of a store (batchloom prepare makes one)",
}


@final
class LeaveEvent(Event):
    """Event that asks the workers of a run to save and stop after the current step.

    Attributes:
        heeded: whether a run is training and checks the event between steps.
    """

    heeded = False


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker; all workers of a run share them except ``worker_id``."""

    worker_id: Annotated[str, Setting(help="Name of the worker in its output.", shown_default="machine and process")]
    dataset_type: Annotated[str, Setting(help=f"Type of the data: {', '.join(DATASET_TYPES)}. Required.")]
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
    model_size: Annotated[str, Setting(help=f"Size of the model: {', '.join(MODEL_SIZES)}.")] = "tiny"
    out: Annotated[Path, Setting(help="Folder of the run, shared by all workers; an existing run is resumed.")] = Path(
        "runs/worker"
    )
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
        problems = convert_int_settings(self)
        for name, options in (("dataset_type", DATASET_TYPES), ("model_size", MODEL_SIZES)):
            value = getattr(self, name)
            if value not in options:
                fault = "missing" if not value else f"{quote_value(value)} is not a {name.split('_')[1]}"
                problems.append(f"{name}: {fault}; give one of {', '.join(options)}{suggest(str(value), options)}")
        if self.overlong not in (None, *_OVERLONG_POLICIES):
            problems.append(
                f"overlong: {quote_value(self.overlong)} is none of {', '.join(_OVERLONG_POLICIES)}"
                f"{suggest(str(self.overlong), _OVERLONG_POLICIES)}"
            )
        raise_problems(problems + self._data_problems())

    def _data_problems(self) -> list[str]:
        kind, name = self.dataset_type, self.dataset_name
        problems = []
        if kind in _DATASET_NAME_HELP and not name:
            problems.append(f"dataset_name: missing; {kind} is read from {_DATASET_NAME_HELP[kind]}")
        if kind in DATASET_TYPES and kind != HUGGINGFACE_TYPE and self.tokenizer_name is not None:
            why = "a store has its own" if kind == STORE_TYPE else "synthetic data has no text"
            problems.append(f"tokenizer_name: {quote_value(self.tokenizer_name)} requires {HUGGINGFACE_TYPE}; {why}")
        if kind in SYNTHETIC and name:
            try:
                parse_synthetic_spec(self.data_source)
            except ValueError as error:
                problems.append(
                    f"dataset_name: {error}; or leave it out. For real data give dataset_type {HUGGINGFACE_TYPE} or "
                    f"{STORE_TYPE}"
                )
        return problems

    @property
    def data_source(self) -> str:
        """Data of the run in the form ``open_store`` or ``prepare`` takes."""
        name = self.dataset_name or ""
        return f"{self.dataset_type}:{name}" if self.dataset_type in SYNTHETIC else name
