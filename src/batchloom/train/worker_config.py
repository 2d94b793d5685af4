"""What one worker of an elastic run is asked for."""

from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import final, get_args

from batchloom.core.settings import nearest, raise_problems, set_wholes, shown
from batchloom.core.synthetic_data import NAMES as SYNTHETIC, parse_synthetic
from batchloom.train.train_settings import MOST_ROWS, MOST_STEPS, MOST_TOKENS, Overlong

HUGGINGFACE, STORE = "huggingface", "store"
DATASET_TYPES = (*SYNTHETIC, HUGGINGFACE, STORE)
# The configurations of the trainer that they are.
MODEL_SIZES = {"tiny": "tiny", "medium": "150M_1024"}
_OVERLONG = get_args(Overlong)
_BOUNDS = {
    "batch_size": (1, MOST_ROWS),
    "seq_len": (2, MOST_TOKENS),
    "num_steps": (1, MOST_STEPS),
    "save_interval": (0, MOST_STEPS),
}
_NAMED = {
    HUGGINGFACE: "a data set of the Hub, as org/name[:config][/split][@revision]",
    STORE: "the folder or the URL of a store (batchloom prepare makes one)",
}


@final
class Leave(Event):
    """Asks the workers of a run, when it is set, to save and stop after the step they are at.

    Attributes:
        heeded: whether there are steps at work, between which it is looked at.
    """

    heeded = False


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker of a run; all workers of a run have the same, but for ``worker_id``.

    Attributes:
        worker_id: what its lines call it.
        dataset_type: ``dummy`` (made-up data, the same on every worker), ``distributed_dummy`` (made-up data, shared
            out), ``huggingface`` or ``store``. Nothing stands in for it.
        dataset_name: a data set of the Hub, or the folder or URL of a store; of made-up data its settings
            (``documents=1000,kind=text``), or None.
        tokenizer_name: of a data set of the Hub, as prepare takes it; None for its default.
        batch_size: sequences of a step for this worker; a step has as many for each of the others.
        seq_len: tokens of a sequence.
        num_steps: steps of the whole run, whoever makes them.
        model_size: ``tiny`` or ``medium``.
        out: the folder of the run, the same for all workers, where all of them find it.
        save_interval: steps between two checkpoints; 0 for the end only.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        overlong: what becomes of a document longer than ``seq_len``; None for the loader's choice.
    """

    worker_id: str
    dataset_type: str
    dataset_name: str | None = None
    tokenizer_name: str | None = None
    batch_size: int = 4
    seq_len: int = 32
    num_steps: int = 100
    model_size: str = "tiny"
    out: Path = Path("runs/worker")
    save_interval: int = 10
    device: str = "auto"
    overlong: Overlong | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        problems = set_wholes(self, _BOUNDS)
        for name, known in (("dataset_type", DATASET_TYPES), ("model_size", MODEL_SIZES)):
            value = getattr(self, name)
            if value not in known:
                fault = "missing" if not value else f"{shown(value)} is no {name.split('_')[1]}"
                problems.append(
                    f"{name}: {fault}; give one of {', '.join(known)}{nearest(str(value), known)}"
                )
        if self.overlong not in (None, *_OVERLONG):
            problems.append(
                f"overlong: {shown(self.overlong)} is none of {', '.join(_OVERLONG)}"
                f"{nearest(str(self.overlong), _OVERLONG)}"
            )
        raise_problems(problems + self._data_problems())

    def _data_problems(self) -> list[str]:
        kind, name = self.dataset_type, self.dataset_name
        problems = []
        if kind in _NAMED and not name:
            problems.append(f"dataset_name: missing; {kind} is read from {_NAMED[kind]}")
        if kind in DATASET_TYPES and kind != HUGGINGFACE and self.tokenizer_name is not None:
            why = "a store has its own" if kind == STORE else "made-up data has no text"
            problems.append(
                f"tokenizer_name: {shown(self.tokenizer_name)} goes with {HUGGINGFACE} only; {why}"
            )
        if kind in SYNTHETIC and name:
            try:
                parse_synthetic(self.place)
            except ValueError as error:
                problems.append(
                    f"dataset_name: {error}; or leave it out. Real data is of another dataset_type, {HUGGINGFACE} or "
                    f"{STORE}"
                )
        return problems

    @property
    def place(self) -> str:
        """What is read, as ``open_store`` or ``prepare`` takes it."""
        name = self.dataset_name or ""
        return f"{self.dataset_type}:{name}" if self.dataset_type in SYNTHETIC else name
