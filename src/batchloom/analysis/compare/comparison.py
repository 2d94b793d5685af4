"""One small model from one seed through every framework on the same store: what it was given, learned, took."""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from batchloom import Loader, Store, open_store
from batchloom.adapters.requirements import get_installed_version, require_installed
from batchloom.analysis.compare.batch_difference import (
    LOOKAHEAD_STEPS,
    BatchDifference,
    ExpectedBatches,
    explain_difference,
    find_differing_batches,
)
from batchloom.analysis.compare.finished_runs import FinishedRuns
from batchloom.analysis.compare.frameworks import (
    FRAMEWORKS,
    Framework,
    find_framework,
    find_missing_packages,
    hash_example,
)
from batchloom.analysis.compare.launch import WitnessRecord, run_example
from batchloom.analysis.compare.run_comparison import is_close_loss
from batchloom.batches import check_text_only
from batchloom.core.errors import InputError, SettingsError, TrainError
from batchloom.core.settings import (
    coerce_int_fields,
    is_positive_number,
    quote_value,
    raise_problems,
)
from batchloom.core.wording import format_count

# Made-up data where nothing else is asked for: enough of it for any comparison, in memory.
SYNTHETIC_STORE = "distributed_dummy:documents=20000,vocab=4096"
_MAX_WARM_UP_STEPS = 5
_MAX_COUNT = 1 << 31
_BOUNDS = {
    "processes": (1, 64),
    "steps": (1, 1_000_000),
    "seq_len": (2, 1 << 20),
    "global_batch_size": (1, 1 << 20),
    "batch_size": (1, 1 << 20),
    "seed": (0, _MAX_COUNT),
}

SayFunction = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSpec:
    """What is compared.

    Attributes:
        store: a store's folder or URL, or a name of synthetic data; None with ``synthetic`` for some of that.
        frameworks: names, or modules or files of examples; empty for all that are installed.
        processes: ranks.
        steps: of each run.
        seq_len, global_batch_size: of the plan.
        batch_size: sequences of one forward pass of one rank.
        seed: of the order and of the first weights.
        tolerance: relative, within which losses agree.
        synthetic: a pure throughput run on made-up data.
        seconds: after which a framework is given up.
    """

    store: str | None = None
    frameworks: tuple[str, ...] = ()
    processes: int = 1
    steps: int = 50
    seq_len: int = 128
    global_batch_size: int = 8
    batch_size: int = 2
    seed: int = 0
    tolerance: float = 1e-4
    synthetic: bool = False
    seconds: float = 600

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, _BOUNDS)
        for name in ("tolerance", "seconds"):
            if not is_positive_number(getattr(self, name)):
                problems.append(f"{name}: {quote_value(getattr(self, name))} is no number above 0")
        if not problems:
            problems += self._contradictions()
        raise_problems(problems)

    def _contradictions(self) -> list[str]:
        if self.store is None and not self.synthetic:
            return [
                "store: missing; give a store, or --synthetic for a throughput run on made-up data"
            ]
        passed = self.processes * self.batch_size
        if self.global_batch_size % passed:
            size = -(-self.global_batch_size // passed) * passed
            dealt = f"cannot be dealt to {self.processes} processes in passes of {self.batch_size}"
            remedy = f"give a multiple of {passed}, such as {size}"
            return [f"global_batch_size: {self.global_batch_size} sequences {dealt}: {remedy}"]
        return []


@dataclass(frozen=True, slots=True)
class LossDifference:
    """The first step whose loss is not the reference's: what was told (None for nothing), and the reference's."""

    step: int
    loss: float | None
    reference: float


@dataclass(frozen=True, slots=True)
class FrameworkSpeed:
    """How fast a framework was, behind its first steps.

    Attributes:
        warm_up: steps left out at the beginning.
        tokens_per_s: of all ranks, padding not counted.
        data_wait: share of the time between the end of an optimizer's step and the next first forward pass.
    """

    warm_up: int
    tokens_per_s: float
    data_wait: float


@dataclass(frozen=True, slots=True)
class FrameworkResult:
    """What became of a framework.

    Attributes:
        name: of it.
        state: ``ran``, ``find_missing_packages`` or ``failed``.
        problem: why it is missing, with the remedy, or failed.
        versions: of the packages it needs, those that are installed.
        hashes: of each rank, of each step, what reached the model.
        digest: of all of them.
        differing: the (step, rank) of every batch that is not the plan's.
        difference: the first of them, explained.
        losses: of each step, nats a trained token.
        loss_difference: the first that is not the reference's.
        speed: None where batches differ (what came has no known padding), or there are too few steps.
        memory: bytes at the most, of the rank that had most: ``resident``, ``device`` where there is one.
    """

    name: str
    state: Literal["ran", "missing", "failed"]
    problem: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    hashes: tuple[tuple[str, ...], ...] = ()
    digest: str = ""
    differing: tuple[tuple[int, int], ...] = ()
    difference: BatchDifference | None = None
    losses: tuple[float, ...] = ()
    loss_difference: LossDifference | None = None
    speed: FrameworkSpeed | None = None
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether it is missing, or ran on the plan's batches with the reference's losses."""
        return self.state == "missing" or (
            self.state == "ran" and not self.differing and self.loss_difference is None
        )


@dataclass(frozen=True, slots=True)
class FrameworkComparison:
    """Frameworks that were compared.

    Attributes:
        spec: as asked for.
        origin: of the data: ``source=real ...`` or ``source=synthetic ...``.
        synthetic: whether the data is made up.
        plan: the plan's fingerprint.
        digest: of the hashes of the plain loader.
        reference: the framework whose losses the others are held against.
        outcomes: of each framework.
    """

    spec: CompareSpec
    origin: str
    synthetic: bool
    plan: str
    digest: str
    reference: str
    outcomes: tuple[FrameworkResult, ...]

    @property
    def agree(self) -> bool:
        """Whether every framework that is there got the plan's batches and came to the same losses."""
        return all(one.agrees for one in self.outcomes)


def compare(
    spec: CompareSpec, say: SayFunction = print, out: Path | None = None
) -> FrameworkComparison:
    """Run every framework and compare.

    Args:
        spec: what is asked for.
        say: gets a line when a framework begins, and one with its verdict and seconds when it ends.
        out: a folder that keeps the records of finished frameworks, so that the same call goes on after a stop.

    Raises:
        SettingsError: sizes that do not fit, an unknown framework, a synthetic store that was not asked for.
        MissingDependencyError: a framework that was named is not installed.
        InputError: the store does not name its tokenizer; no framework is installed.
        StoreError: there is no store, or it is damaged.
        OutputError: ``out`` cannot be written.
    """
    chosen = _select_frameworks(spec)
    store, place = _open_compare_store(spec)
    loaders = [_make_reference_loader(store, spec, rank) for rank in range(spec.processes)]
    wanted = ExpectedBatches(loaders, spec.steps)
    finished = None
    if out is not None:
        command = _make_run_command(spec, chosen, loaders[0].plan.fingerprint)
        finished = FinishedRuns(out, command, say)
    outcomes: list[FrameworkResult] = []
    losses: list[float] = []
    for number, framework in enumerate(chosen, 1):
        tell = _make_progress_printer(say, f"[{number}/{len(chosen)}] {framework.name}")
        record, took, problem = None, "", " ".join(find_missing_packages(framework))
        if not problem:
            record, took, problem = _load_or_run(framework, number, spec, place, finished, tell)
        losses = losses or (record.losses if record else [])
        outcomes.append(
            _judge_framework(framework, record, problem, (spec, wanted, loaders, losses))
        )
        tell(f"{_describe_outcome(outcomes[-1], spec)}{took}")
    return FrameworkComparison(
        spec=spec,
        origin=loaders[0].origin,
        synthetic=store.contents.synthetic,
        plan=loaders[0].plan.fingerprint,
        digest=_digest_hashes([_list_hashes(one[: spec.steps]) for one in wanted.entries]),
        reference=next((one.name for one in outcomes if one.state == "ran"), ""),
        outcomes=tuple(outcomes),
    )


def _select_frameworks(spec: CompareSpec) -> list[Framework]:
    """The frameworks to look at, those that are missing as well."""
    if spec.frameworks:
        chosen = [find_framework(name) for name in dict.fromkeys(spec.frameworks)]
        require_installed(*(need for framework in chosen for need in framework.needs))
        return chosen
    if all(find_missing_packages(framework) for framework in FRAMEWORKS):
        raise InputError(
            "No framework is installed: "
            + " ".join(dict.fromkeys(find_missing_packages(FRAMEWORKS[0])))
        )
    return list(FRAMEWORKS)


def _open_compare_store(spec: CompareSpec) -> tuple[Store, str]:
    """The store, and the place under which every process finds it."""
    given = spec.store or SYNTHETIC_STORE
    store = open_store(given)
    if store.contents.synthetic and not spec.synthetic:
        remedy = "give real data, or --synthetic for a pure throughput run"
        raise SettingsError(
            [f"store: {given} is synthetic data, which says nothing of training; {remedy}"]
        )
    if spec.synthetic and not store.contents.synthetic:
        raise SettingsError(
            [f"synthetic: {given} is real data; leave --synthetic out, or leave the store out"]
        )
    if store.vocab_size is None:
        raise InputError(
            f"{given} does not say which tokenizer made it, and a model needs the size of its vocabulary: "
            "batchloom import makes a store of it."
        )
    elsewhere = "://" in given or (store.contents.synthetic and not Path(given).exists())
    return store, given if elsewhere else os.path.abspath(given)  # noqa: PTH100 - a prefix is no file


def _make_reference_loader(store: Store, spec: CompareSpec, rank: int) -> Loader:
    loader = Loader(
        store,
        seq_len=spec.seq_len,
        global_batch_size=spec.global_batch_size,
        seed=spec.seed,
        steps=spec.steps + LOOKAHEAD_STEPS,
        rank=rank,
        world_size=spec.processes,
        output="numpy",
        prefetch=0,
    )
    check_text_only(loader, "batchloom compare")
    return loader


def _make_run_command(spec: CompareSpec, chosen: Sequence[Framework], plan: str) -> dict[str, Any]:
    """Return everything that decides what a framework's run gives, by the name to show for it.

    The plan stands for the store: a URL can hold credentials, which are written nowhere.
    """
    settings = {name: value for name, value in asdict(spec).items() if name != "store"}
    packages = {one.package for framework in chosen for one in framework.needs}
    return {
        **settings,
        "plan": plan,
        "frameworks": [framework.name for framework in chosen],
        **{f"the example {one.name}": hash_example(one) for one in chosen},
        **{package: get_installed_version(package) for package in sorted({"batchloom", *packages})},
    }


def _make_progress_printer(say: SayFunction, title: str) -> SayFunction:
    return lambda line: say(f"{title}: {line}")


def _load_or_run(
    framework: Framework,
    number: int,
    spec: CompareSpec,
    place: str,
    finished: FinishedRuns | None,
    tell: SayFunction,
) -> tuple[WitnessRecord | None, str, str]:
    """Return the record of a framework, the seconds it took in words, and the problem where it failed."""
    kept = finished.load(number) if finished else None
    if kept is not None:
        record, seconds = kept
        return record, f", {seconds:.1f} s, before the stop", ""
    tell(f"running {format_count(spec.steps, 'step')} in {format_count(spec.processes, 'process')}")
    begin = time.monotonic()
    found, problem = _run_framework(framework, spec, place)
    seconds = time.monotonic() - begin
    # A framework that failed runs again: a stop can be what it failed by.
    if found is not None and finished is not None:
        finished.save(number, found, seconds)
    return found, f", {seconds:.1f} s", problem


def _describe_outcome(outcome: FrameworkResult, spec: CompareSpec) -> str:
    """Return the verdict of a framework in a few words."""
    if outcome.state != "ran":
        return f"{outcome.state} ({outcome.problem.splitlines()[0]})"
    if outcome.differing:
        batches = spec.steps * spec.processes
        return f"{len(outcome.differing):,} of {batches:,} batches differ"
    apart = outcome.loss_difference
    return "agrees" if apart is None else f"losses differ from step {apart.step:,}"


def _run_framework(
    framework: Framework, spec: CompareSpec, place: str
) -> tuple[WitnessRecord | None, str]:
    """What a framework's witnesses told, or why they did not."""
    with tempfile.TemporaryDirectory(prefix="batchloom-compare-") as folder:
        job = {
            "data": place,
            "out": str(Path(folder) / "out"),
            "seq_len": spec.seq_len,
            "global_batch_size": spec.global_batch_size,
            "batch_size": spec.batch_size,
            "steps": spec.steps,
            # None: writing them would count as waiting.
            "save_every": spec.steps + 1,
            "seed": spec.seed,
        }
        try:
            found = run_example(
                framework.name,
                job,
                Path(folder) / "record",
                processes=spec.processes,
                seconds=spec.seconds,
            )
        except TrainError as error:
            return None, str(error)
    return found, ""


_Reference = tuple[CompareSpec, ExpectedBatches, Sequence[Loader], Sequence[float]]


def _judge_framework(
    framework: Framework, found: WitnessRecord | None, problem: str, against: _Reference
) -> FrameworkResult:
    """A framework's outcome against the plan and the reference's losses."""
    needs = {one.package: get_installed_version(one.package) for one in framework.needs}
    versions = {package: version for package, version in needs.items() if version}
    if found is None:
        state: Literal["missing", "failed"] = (
            "missing" if find_missing_packages(framework) else "failed"
        )
        return FrameworkResult(framework.name, state, problem, versions)
    spec, wanted, loaders, losses = against
    places = find_differing_batches(wanted, found.ranks)
    peaks = [entry["memory"] for told in found.ranks for entry in told]
    names = {name for peak in peaks for name in peak}
    hashes = [_list_hashes(told) for told in found.ranks]
    return FrameworkResult(
        framework.name,
        "ran",
        versions=versions,
        hashes=tuple(tuple(one) for one in hashes),
        digest=_digest_hashes(hashes),
        differing=tuple(places),
        difference=explain_difference(wanted, found.ranks, *places[0]) if places else None,
        losses=tuple(found.losses),
        loss_difference=_find_loss_difference(found.losses, losses, spec),
        speed=None if places else _measure_speed(found.ranks, loaders),
        memory={name: max(peak.get(name, 0) for peak in peaks) for name in sorted(names)},
    )


def _list_hashes(told: Sequence[dict[str, Any]]) -> list[str]:
    return [str(entry["hash"]) for entry in told]


def _digest_hashes(hashes: Sequence[Sequence[str]]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(" ".join(one) for one in hashes).encode())


def _find_loss_difference(
    losses: Sequence[float], reference: Sequence[float], spec: CompareSpec
) -> LossDifference | None:
    for step, wanted in enumerate(reference[: spec.steps]):
        loss = losses[step] if step < len(losses) else None
        if loss is None or not is_close_loss(loss, wanted, spec.tolerance):
            return LossDifference(step, loss, wanted)
    return None


def _measure_speed(
    ranks: Sequence[Sequence[dict[str, Any]]], loaders: Sequence[Loader]
) -> FrameworkSpeed | None:
    """Behind the first steps, in which libraries start, compile and warm up."""
    steps = len(ranks[0])
    warm_up = min(_MAX_WARM_UP_STEPS, max(1, steps // 4))
    if steps <= warm_up:
        return None
    took = [sum(entry["took"] for entry in told[warm_up:]) for told in ranks]
    waited = sum(entry["waited"] for told in ranks for entry in told[warm_up:])
    tokens = sum(loader.tokens(step) for loader in loaders for step in range(warm_up, steps))
    return FrameworkSpeed(warm_up, tokens / max(took), waited / sum(took))
