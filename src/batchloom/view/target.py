"""Target of the pages: a store, a mixture or a run, with its plans."""

import atexit
import shlex
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from batchloom.analysis import (
    MissingDataError,
    PlanRequest,
    adopt_tables,
    apply_logged_edits,
    find_state_file,
    resolve_first_plan,
    resolve_plan,
)
from batchloom.analysis.compare import is_run_log
from batchloom.analysis.doctor import detect_prepared_kind
from batchloom.batches import Loader, read_mixture
from batchloom.batches.loading import MAX_INLINE_POOLS, start_counting_process
from batchloom.core.addresses import is_url
from batchloom.core.errors import InputError, InputMissingError, SettingsError
from batchloom.core.run_files import RunFiles
from batchloom.core.settings import suggest
from batchloom.plan import Mixture, Plan
from batchloom.store import MANIFEST_NAME, Store, open_store
from batchloom.store.format import describe_partial_store
from batchloom.view.step_log import StepLog

if TYPE_CHECKING:
    import subprocess

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@final
class ValueCache(Generic[K, V]):
    """Values by key. A request waits only for the value that it needs.

    Args:
        most: number of values that stay in memory.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._making: dict[K, threading.Lock] = {}
        self._values: OrderedDict[K, tuple[object, V]] = OrderedDict()

    def get(self, key: K, stamp: object, make: Callable[[], V]) -> V:
        """Return the value of a key, made again if its stamp changed."""
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            with self._lock:
                cached = self._values.get(key)
                if cached is not None and cached[0] == stamp:
                    self._values.move_to_end(key)
                    return cached[1]
            value = make()
            with self._lock:
                self._values[key] = stamp, value
                self._values.move_to_end(key)
                while len(self._values) > self._most:
                    oldest, _ = self._values.popitem(last=False)
                    self._making.pop(oldest, None)
            return value


COUNTING_NOTE = (
    "The sequences of the data are being counted, once for this plan. This page loads again until it is done."
)
# Seconds until a page that waits for the counts loads again.
RELOAD_HEADERS = {"Refresh": "2"}


@final
class PlanCounting:
    """Process that counts the sequences of a plan, one at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._fingerprint = ""
        atexit.register(self._stop)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def has_counts(self, plan: Plan) -> bool:
        """Return whether the counts of a plan are known; start to count them otherwise.

        Raises:
            InputError: counting failed.
        """
        if is_small(plan) or adopt_tables(plan):
            return True
        if self._process is None or self._fingerprint != plan.fingerprint:
            self._stop()
            self._process = start_counting_process(plan)
            self._fingerprint = plan.fingerprint
            return False
        if (code := self._process.poll()) is None:
            return False
        raise InputError(
            f"Counting the sequences of the data ended with code {code}. To see why, run batchloom plan on them."
        )


def is_small(plan: Plan) -> bool:
    """Return whether counting the sequences of a plan takes little time."""
    return all(order.pools.count <= MAX_INLINE_POOLS for order in plan.orders.latest())


def is_near(plan: Plan, step: int) -> bool:
    """Return whether packing a few pools reaches a step, without counts."""
    orders = plan.orders.latest()
    tokens = sum(order.store.tokens for order in orders)
    pools = sum(order.pools.count for order in orders)
    return plan.positions_of(step)[1] * plan.spec_at(step).seq_len * pools <= MAX_INLINE_POOLS * tokens


_SINGLE = "data"
_MIXTURE_SUFFIXES = (".yaml", ".yml")
# Assumed steps of a mixture that repeats its sources without end.
_MIXTURE_STEPS = 10_000
# Plans and stores that stay in memory: a reader compares a few settings.
_MAX_PLANS = 8
_MAX_STORES = 256


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Settings of the plan on a page.

    ``steps`` is None for one epoch of a store, and for the end of a mixture. ``split`` is the subset of a single
    store; empty for the first one.
    """

    seq_len: int = 2048
    global_batch_size: int = 8
    packing: str = "best_fit"
    seed: int = 0
    steps: int | None = None
    split: str = ""

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings, as they stand in addresses."""
        return {
            "seq_len": self.seq_len,
            "batch": self.global_batch_size,
            "packing": self.packing,
            "seed": self.seed,
            "steps": self.steps,
            "split": self.split,
        }


_DEFAULT_CHOICE = PlanChoice()


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Plan of a run, or why it is unknown.

    Attributes:
        plan: the plan; None if it is unknown.
        done_steps: steps before the newest checkpoint; 0 before the first one.
        fault: why the plan is unknown, and the remedy; empty if it is known.
    """

    plan: Plan | None
    done_steps: int = 0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class _StoreAddress:
    address: str
    options: Mapping[str, Any]
    split: str


@final
class ViewTarget:
    """The data on the pages, reopened when they change on disk.

    Requests in several threads wait for each other only if they need the same plan or the same store.

    Args:
        path: a store's folder, URL, prefix or synthetic name; the YAML file of a mixture; or the folder or log of a
            run.
        split: the subset that is shown first.
        generation: generation of a store; None for the newest.
        run_request: the store or mixture of a run, and its checkpoint if it is not in the folder of the run.
        choice: settings of plans, unless a page names others.

    Attributes:
        path: the path as it was given.
        kind: ``store``, ``mixture`` or ``run``.

    Raises:
        InputError, StoreError: the path is none of these, or its data cannot be read.
    """

    def __init__(
        self,
        path: str,
        *,
        split: str = "train",
        generation: int | None = None,
        run_request: PlanRequest | None = None,
        choice: PlanChoice = _DEFAULT_CHOICE,
    ) -> None:
        self.path = path
        self._split = split
        self._generation = generation
        self.choice = choice
        self._run_request = run_request or PlanRequest()
        self.kind = _find_kind(path)
        self.log = StepLog(path)
        self._mixture: tuple[object, dict[str, _StoreAddress]] | None = None
        self._mixture_lock = threading.Lock()
        self._stores = ValueCache[tuple[str, str], Store](_MAX_STORES)
        self._plans = ValueCache[PlanChoice, Plan](_MAX_PLANS)
        self._runs = ValueCache[None, RunPlan](1)
        self._counting = PlanCounting()
        self._counting_lock = threading.Lock()
        self._list_addresses()

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources; ``data`` for a single store, none for a run without data."""
        return tuple(self._list_addresses())

    def _list_addresses(self) -> dict[str, _StoreAddress]:
        """Return the address of the store of each source."""
        if self.kind == "store":
            return {_SINGLE: _StoreAddress(self.path, {"generation": self._generation}, self._split)}
        if self.kind == "run":
            plan = self.read_run().plan
            return _collect_addresses(plan.stores) if plan else {}
        with self._mixture_lock:
            if self._mixture is None or self._mixture[0] != self._read_mixture_stamp(self._mixture[1]):
                addresses = _collect_addresses(read_mixture(self.path).stores)
                self._mixture = self._read_mixture_stamp(addresses), addresses
            return self._mixture[1]

    def _read_mixture_stamp(self, addresses: Mapping[str, _StoreAddress]) -> object:
        # A mixture may fix the generation of a store, or take the newest.
        return _read_stamp(Path(self.path)), [_read_manifest_stamp(store.address) for store in addresses.values()]

    def read_run(self) -> RunPlan:
        """Return the plan of the run, resolved again if its folder or its data changed."""
        request = self._run_request
        run = RunFiles(Path(self.path))
        try:
            state_file: Path | None = find_state_file(request.checkpoint or run.path)
        except InputMissingError:
            state_file = None
        edits = self.log.read_edits()
        stamp = (
            state_file,
            len(edits),
            *(_read_stamp(path) for path in (state_file, run.description) if path),
            *(_read_manifest_stamp(path) for path in (request.store or str(run.data), request.mixture) if path),
        )
        return self._runs.get(None, stamp, lambda: self._resolve_run(edits, is_saved=state_file is not None))

    def _resolve_run(self, edits: Sequence[Mapping[str, Any]], *, is_saved: bool) -> RunPlan:
        folder = Path(self.path)
        checkpoint = self._run_request.checkpoint
        if checkpoint is None and not RunFiles(folder).description.is_file():
            return RunPlan(
                None,
                fault="This log does not say which data its run is on. Give --checkpoint with the state of its loader, "
                "and --store or --mixture.",
            )
        request = replace(
            self._run_request, checkpoint=checkpoint or folder, split=self._split, generation=self._generation
        )
        try:
            if is_saved or checkpoint is not None:
                plan, saved = resolve_plan(request)
            else:
                plan = resolve_first_plan(request)
                saved = None
        except MissingDataError as error:
            options = ["--checkpoint", str(checkpoint)] if checkpoint else []
            command = shlex.join(["batchloom", "view", self.path, *options])
            return RunPlan(None, fault=f"Name the data of the run: {command} --{error.option} {error.option.upper()}.")
        except (InputError, SettingsError) as error:
            return RunPlan(None, fault=str(error))
        plan = apply_logged_edits(plan, edits)
        position = int(saved.state["position"]) if saved else 0
        return RunPlan(plan, plan.step_at(position)[0])

    def require_data(self) -> None:
        """Raise InputError if the data of a run are unknown."""
        if self.kind == "run" and (fault := self.read_run().fault):
            raise InputError(fault)

    def open_store(self, source: str, split: str = "") -> Store:
        """Open the store of a source, again if its manifest changed on disk.

        Args:
            source: name of the source.
            split: the subset; empty for the one that the source serves.

        Raises:
            InputError: there is no such source or subset.
            StoreError: the store is missing or damaged.
        """
        addresses = self._list_addresses()
        if source not in addresses:
            raise InputError(f"There is no source {source!r}{suggest(source, tuple(addresses)) or '.'}")
        address = addresses[source]
        subset = split or address.split
        return self._stores.get(
            (source, subset),
            _read_manifest_stamp(address.address),
            lambda: open_store(address.address, subset, **address.options),
        )

    def make_plan(self, choice: PlanChoice) -> Plan:
        """Return the plan of a run, or the plan of the data with chosen settings.

        Raises:
            SettingsError, PlanError: no plan is possible with these settings.
        """
        if self.kind == "run":
            self.require_data()
            plan = self.read_run().plan
            if plan is None:
                raise AssertionError("a run without a plan has a fault")
            return plan
        split = choice.split if self.kind == "store" else ""
        fingerprints = tuple(self.open_store(name, split).fingerprint for name in self.source_names)
        return self._plans.get(choice, fingerprints, lambda: self._make_plan(choice))

    def has_counts(self, plan: Plan) -> bool:
        """Return whether the counts of a plan are known; start to count them otherwise."""
        with self._counting_lock:
            return self._counting.has_counts(plan)

    def assumes_steps(self, plan: Plan, choice: PlanChoice) -> bool:
        """Return whether the steps of a plan are assumed, since its mixture has no end."""
        return self.kind == "mixture" and choice.steps is None and plan.spec.steps is not None

    def count_done_steps(self) -> int | None:
        """Return the steps done of a run; None for other data."""
        return self.read_run().done_steps if self.kind == "run" else None

    def _make_plan(self, choice: PlanChoice) -> Plan:
        settings = asdict(choice)
        split = settings.pop("split")
        # The open store has its tokenizer and its mapped files already; a mixture opens its stores again.
        data = self.open_store(_SINGLE, split) if self.kind == "store" else read_mixture(self.path)
        if isinstance(data, Mixture) and data.exhausted == "repeat" and choice.steps is None:
            settings["steps"] = _MIXTURE_STEPS
        return Loader(data, **settings, output="numpy", rank=0, world_size=1, prefetch=0).plan


def _collect_addresses(stores: Mapping[str, object]) -> dict[str, _StoreAddress]:
    return {
        name: _StoreAddress(store.location.address, store.location.options, store.split)
        for name, store in stores.items()
        if isinstance(store, Store)
    }


def _find_kind(path: str) -> str:
    if is_url(path):
        return "store"
    local = Path(path)
    if local.suffix in _MIXTURE_SUFFIXES and local.is_file():
        return "mixture"
    if (local / MANIFEST_NAME).is_file():
        return "store"
    if RunFiles(local).description.is_file() or is_run_log(path):
        return "run"
    return "store"


def is_raw_input(path: str) -> bool:
    """Return whether a path is an existing file or folder that is not prepared yet."""
    if is_url(path) or not Path(path).exists() or _find_kind(path) != "store":
        return False
    return not detect_prepared_kind(path) and not describe_partial_store(Path(path))


def _read_manifest_stamp(address: str) -> tuple[int, ...] | None:
    """Return the stamp of a store's local manifest, or of a file."""
    if is_url(address):
        return None
    return _read_stamp(Path(address) / MANIFEST_NAME) or _read_stamp(Path(address))


def _read_stamp(file: Path) -> tuple[int, ...] | None:
    """Return time, size and number of a file; None if it cannot be read."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
