"""Target of the pages: a store, a mixture of stores, or a run."""

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from batchloom.analysis import PlanRequest, read_checkpoint, resolve_plan
from batchloom.analysis.compare import is_run_log
from batchloom.analysis.doctor import detect_prepared_kind
from batchloom.batches import Loader, read_mixture
from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.settings import suggest
from batchloom.plan import Plan
from batchloom.store import MANIFEST_NAME, Store, open_store
from batchloom.view.plan_counts import PlanCounting

_SINGLE = "data"
_MIXTURE_SUFFIXES = (".yaml", ".yml")
_RUN_FILE = "run.json"
# Steps of a mixture that may repeat its sources without end.
_MIXTURE_STEPS = 10_000
# Plans that stay in memory: a reader compares a few settings.
_MAX_PLANS = 8


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Settings of the plan on a page.

    ``steps`` is None for one epoch of a store, and for the default of a mixture.
    """

    seq_len: int = 2048
    global_batch_size: int = 8
    packing: str = "best_fit"
    seed: int = 0
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Data of a run, as ``batchloom explain --checkpoint`` takes them.

    Attributes:
        store: folder, URL or prefix of the store.
        mixture: YAML file of a mixture, or its text.
        checkpoint: file or folder of a loader's state; None for the newest checkpoint of the run's folder.
    """

    store: str | None = None
    mixture: str | None = None
    checkpoint: Path | None = None


@final
class ViewTarget:
    """The data on the pages, reopened when they change on disk.

    Args:
        path: a store's folder, URL, prefix or synthetic name; the YAML file of a mixture; or the folder or log of a
            run.
        split: the subset that is shown first.
        generation: generation of a store; None for the newest.
        run_data: the store or mixture of a run, and its checkpoint if it is not in the folder of the run.

    Attributes:
        path: the path as it was given.
        kind: ``store``, ``mixture`` or ``run``.

    Raises:
        InputError, StoreError: the path is none of these, or its data cannot be read.
    """

    def __init__(
        self, path: str, *, split: str = "train", generation: int | None = None, run_data: RunData | None = None
    ) -> None:
        self.path, self._split, self._generation = path, split, generation
        self._run_data = run_data or RunData()
        self.kind = _find_kind(path)
        self._stores: dict[tuple[str, str], tuple[tuple[int, int] | None, Store]] = {}
        self._plans: dict[PlanChoice | None, tuple[tuple[str, ...], Plan]] = {}
        self._counting = PlanCounting()
        # Pages are made in several threads.
        self._lock = threading.RLock()
        self._refresh_addresses()

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources; ``data`` for a single store, none for a run without data."""
        if not self._addresses:
            # The first checkpoint may have been made in the meantime.
            self._refresh_addresses()
        return tuple(self._addresses)

    def _refresh_addresses(self) -> None:
        self._addresses = self._find_addresses()
        self._stamps = {name: _read_stamp(address) for name, (address, _, _) in self._addresses.items()}

    def _find_addresses(self) -> dict[str, tuple[str, Mapping[str, Any], str]]:
        """Return address, options and subset of the store of each source."""
        if self.kind == "store":
            return {_SINGLE: (self.path, {"generation": self._generation}, self._split)}
        if self.kind == "run" and self.find_data_fault():
            return {}
        stores = read_mixture(self.path).stores if self.kind == "mixture" else self._resolve_run().stores
        return {
            name: (store.location.address, store.location.options, store.split)
            for name, store in stores.items()
            if isinstance(store, Store)
        }

    @property
    def _checkpoint(self) -> Path:
        """Folder or file with the state of a run."""
        return self._run_data.checkpoint or Path(self.path)

    def _resolve_run(self) -> Plan:
        data = self._run_data
        return resolve_plan(
            PlanRequest(
                store=data.store,
                mixture=data.mixture,
                checkpoint=self._checkpoint,
                split=self._split,
                generation=self._generation,
            )
        )[0]

    def find_data_fault(self) -> str:
        """Return why a run's plan is unknown, and the remedy; empty if it is known."""
        data = self._run_data
        if data.checkpoint is None and not (Path(self.path) / _RUN_FILE).is_file():
            return (
                "This log does not say which data its run is on. Give --checkpoint with the state of its loader, and "
                "--store or --mixture."
            )
        try:
            read_checkpoint(self._checkpoint)
        except InputMissingError as error:
            return str(error)
        if data.store is None and data.mixture is None:
            try:
                self._resolve_run()
            except (InputError, SettingsError) as error:
                return str(error)
        return ""

    def require_data(self) -> None:
        """Raise InputError if the data of a run are unknown."""
        if not self.source_names:
            raise InputError(self.find_data_fault())

    def open_store(self, source: str, split: str = "") -> Store:
        """Open the store of a source, again if its manifest changed on disk.

        Args:
            source: name of the source.
            split: the subset; empty for the one that the source serves.

        Raises:
            InputError: there is no such source or subset.
            StoreError: the store is missing or damaged.
        """
        with self._lock:
            address, _, own_split = self._find_address(source)
            key, stamp = (source, split or own_split), _read_stamp(address)
            cached = self._stores.get(key)
            if cached is None or cached[0] != stamp:
                if self._stamps[source] != stamp:
                    # A mixture may fix the generation of a store, or take the newest.
                    self._refresh_addresses()
                address, options, _ = self._find_address(source)
                cached = self._stores[key] = (stamp, open_store(address, key[1], **options))
            return cached[1]

    def _find_address(self, source: str) -> tuple[str, Mapping[str, Any], str]:
        if source not in self._addresses:
            raise InputError(f"There is no source {source!r}{suggest(source, self.source_names) or '.'}")
        return self._addresses[source]

    def make_plan(self, choice: PlanChoice | None) -> Plan:
        """Return the plan of a run, or the plan of the data with chosen settings.

        Raises:
            SettingsError, PlanError: no plan is possible with these settings.
        """
        if self.kind == "run":
            choice = None
            self.require_data()
        with self._lock:
            fingerprints = tuple(self.open_store(name).fingerprint for name in self.source_names)
            if self.kind == "run":
                # Edits of a run are in its newer checkpoints.
                fingerprints += (str(read_checkpoint(self._checkpoint).state.get("fingerprint")),)
            cached = self._plans.get(choice)
            if cached is None or cached[0] != fingerprints:
                cached = self._plans[choice] = (fingerprints, self._make_plan(choice))
                while len(self._plans) > _MAX_PLANS:
                    self._plans.pop(next(iter(self._plans)))
            return cached[1]

    def has_counts(self, plan: Plan) -> bool:
        """Return whether the counts of a plan are known; start to count them otherwise."""
        with self._lock:
            return self._counting.has_counts(plan)

    def count_done_steps(self, plan: Plan) -> int | None:
        """Return the steps done of a run; None for other data."""
        if self.kind != "run":
            return None
        return plan.orders.run_layout.step_at(int(read_checkpoint(self._checkpoint).state["position"]))[0]

    def _make_plan(self, choice: PlanChoice | None) -> Plan:
        if choice is None:
            return self._resolve_run()
        if self.kind == "store":
            # The open store has its tokenizer and its mapped files already.
            store = self.open_store(_SINGLE)
            return Loader(store, **asdict(choice), output="numpy", rank=0, world_size=1, prefetch=0).plan
        settings = asdict(choice)
        if choice.steps is None:
            settings["steps"] = _MIXTURE_STEPS
        return resolve_plan(PlanRequest(mixture=self.path, settings=settings))[0]


def _find_kind(path: str) -> str:
    if is_url(path):
        return "store"
    local = Path(path)
    if local.suffix in _MIXTURE_SUFFIXES and local.is_file():
        return "mixture"
    if (local / MANIFEST_NAME).is_file():
        return "store"
    if (local / _RUN_FILE).is_file() or is_run_log(path):
        return "run"
    return "store"


def is_raw_input(path: str) -> bool:
    """Return whether a path is an existing file or folder that is not prepared yet."""
    return not is_url(path) and Path(path).exists() and _find_kind(path) == "store" and not detect_prepared_kind(path)


def _read_stamp(address: str) -> tuple[int, int] | None:
    """Return time and size of a local manifest, which a changed store writes anew."""
    if is_url(address):
        return None
    try:
        status = (Path(address) / MANIFEST_NAME).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
