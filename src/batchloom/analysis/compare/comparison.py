"""Comparison of frameworks that train one small model on the same store.

Every framework starts from the same seed. The comparison covers received batches, losses and speed.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash

from batchloom import Loader, Store, open_store
from batchloom.adapters.requirements import get_installed_version, require_installed
from batchloom.analysis.compare.frameworks import (
    FRAMEWORKS,
    CompareSpec,
    Framework,
    WitnessRecord,
    find_framework,
    find_missing_packages,
    hash_example,
    run_example,
)
from batchloom.analysis.compare.loss_curves import is_close_loss
from batchloom.analysis.compare.witness import (
    LOOKAHEAD_STEPS,
    BatchDifference,
    ExpectedBatches,
    explain_difference,
    find_differing_batches,
)
from batchloom.batches import check_text_only
from batchloom.core.errors import InputError, SettingsError, TrainError
from batchloom.core.files import replace_file, wrap_os_errors
from batchloom.core.wording import format_count

# This folder is removed when the files of the comparison are written.
PARTIAL = "compare.partial"

# Default synthetic data: in memory, and large enough for any comparison.
SYNTHETIC_STORE = "distributed_dummy:documents=20000,vocab=4096"
_MAX_WARM_UP_STEPS = 5

SayFunction = Callable[[str], None]


def _open_records(out: Path, command: Mapping[str, Any], say: SayFunction) -> Path:
    """Return the folder of the records of finished frameworks.

    The same command reuses them after a stop.
    ``command`` is everything that determines the result of a run; records of another command are deleted.
    """
    folder = out / PARTIAL
    plain = json.loads(json.dumps(command))
    with wrap_os_errors("write", folder):
        previous_command = _read_json(folder / "command.json")
        if previous_command is not None and previous_command != plain:
            say(f"Starting over: {_describe_changes(previous_command, plain)}.")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "command.json", plain)
    return folder


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def _write_json(file: Path, value: Any) -> None:
    with replace_file(file) as partial_file:
        partial_file.write_text(json.dumps(value), "utf-8")


def _describe_changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    changed = [name for name in current if previous.get(name) != current[name]]
    return ", ".join(f"{name} was {previous.get(name)} and is {current[name]}" for name in changed)


@dataclass(frozen=True, slots=True)
class LossDifference:
    """The first step whose loss differs from the reference.

    ``loss`` is None if the step reported none.
    """

    step: int
    loss: float | None
    reference: float


@dataclass(frozen=True, slots=True)
class FrameworkSpeed:
    """Speed of a framework after its first steps.

    Attributes:
        warm_up: steps left out at the beginning.
        tokens_per_s: tokens per second of all ranks, without padding.
        data_wait: share of the time between the end of an optimizer step and the next first forward pass.
    """

    warm_up: int
    tokens_per_s: float
    data_wait: float


@dataclass(frozen=True, slots=True)
class FrameworkResult:
    """Result of one framework.

    Attributes:
        name: name of the framework.
        state: ``ran``, ``missing`` or ``failed``.
        problem: why it failed, or is missing, with the remedy.
        versions: installed versions of the packages it needs.
        hashes: hashes of the received batches, by rank and step.
        digest: hash of all of them.
        differing: (step, rank) of every batch that differs from the plan.
        difference: the first of them, explained.
        losses: loss of each step, nats per trained token.
        loss_difference: the first difference from the reference losses.
        speed: speed; None if batches differ (their padding is unknown), or there are too few steps.
        memory: peak bytes of the rank with the highest peak: ``resident``, and ``device`` with an accelerator.
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
        """True if it is missing, or ran on the planned batches with equal losses."""
        return self.state == "missing" or (self.state == "ran" and not self.differing and self.loss_difference is None)


@dataclass(frozen=True, slots=True)
class FrameworkComparison:
    """Result of a comparison of frameworks.

    Attributes:
        spec: the settings.
        origin: label of the data: ``source=real ...`` or ``source=synthetic ...``.
        synthetic: whether the data is synthetic.
        plan: fingerprint of the plan.
        digest: hash of the hashes of the plain loader.
        reference: framework whose losses are the reference.
        outcomes: result of each framework.
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
        """True if all installed frameworks got the planned batches and equal losses."""
        return all(outcome.agrees for outcome in self.outcomes)


def compare(spec: CompareSpec, say: SayFunction = print, out: Path | None = None) -> FrameworkComparison:
    """Run every framework and compare their batches and losses.

    Args:
        spec: the settings.
        say: callback that gets a line when a framework starts, and one with its verdict and seconds when it ends.
        out: folder for the records of finished frameworks, so that the same call resumes after a stop.

    Raises:
        SettingsError: sizes do not fit, a framework is unknown, or a synthetic store is given without ``synthetic``.
        MissingDependencyError: a given framework is not installed.
        InputError: the store does not name its tokenizer, or no framework is installed.
        StoreError: the store does not exist or is damaged.
        OutputError: ``out`` cannot be written.
    """
    frameworks = _select_frameworks(spec)
    store, store_location = _open_compare_store(spec)
    loaders = [_make_reference_loader(store, spec, rank) for rank in range(spec.processes)]
    expected = ExpectedBatches(loaders, spec.steps)
    command = _make_run_command(spec, frameworks, loaders[0].plan.fingerprint)
    records = None if out is None else _open_records(out, command, say)
    outcomes: list[FrameworkResult] = []
    losses: list[float] = []
    for number, framework in enumerate(frameworks, 1):
        print_progress = _make_progress_printer(say, f"[{number}/{len(frameworks)}] {framework.name}")
        record = None
        duration_text = ""
        problem = " ".join(find_missing_packages(framework))
        if not problem:
            record_file = records / f"{number}.json" if records else None
            record, duration_text, problem = _load_or_run(framework, spec, store_location, record_file, print_progress)
        losses = losses or (record.losses if record else [])
        outcomes.append(_judge_framework(framework, record, problem, (spec, expected, loaders, losses)))
        print_progress(f"{_describe_outcome(outcomes[-1], spec)}{duration_text}")
    return FrameworkComparison(
        spec=spec,
        origin=loaders[0].origin,
        synthetic=store.contents.synthetic,
        plan=loaders[0].plan.fingerprint,
        digest=_digest_hashes([_list_hashes(rank_entries[: spec.steps]) for rank_entries in expected.entries]),
        reference=next((outcome.name for outcome in outcomes if outcome.state == "ran"), ""),
        outcomes=tuple(outcomes),
    )


def _select_frameworks(spec: CompareSpec) -> list[Framework]:
    """Return the frameworks to compare, including missing ones."""
    if spec.frameworks:
        frameworks = [find_framework(name) for name in dict.fromkeys(spec.frameworks)]
        require_installed(*(requirement for framework in frameworks for requirement in framework.requirements))
        return frameworks
    if all(find_missing_packages(framework) for framework in FRAMEWORKS):
        raise InputError("No framework is installed: " + " ".join(dict.fromkeys(find_missing_packages(FRAMEWORKS[0]))))
    return list(FRAMEWORKS)


def _open_compare_store(spec: CompareSpec) -> tuple[Store, str]:
    """Open the store; return it and a location that is valid in every process."""
    location = spec.store or SYNTHETIC_STORE
    store = open_store(location)
    if store.contents.synthetic and not spec.synthetic:
        remedy = "give real data, or --synthetic for a pure throughput run"
        raise SettingsError([f"store: {location} is synthetic data, which says nothing about training; {remedy}"])
    if spec.synthetic and not store.contents.synthetic:
        raise SettingsError([f"synthetic: {location} is real data; leave --synthetic out, or leave the store out"])
    if store.vocab_size is None:
        raise InputError(
            f"{location} does not say which tokenizer made it, and a model needs the size of its vocabulary: convert "
            "it to a store with batchloom import."
        )
    is_url_or_synthetic = "://" in location or (store.contents.synthetic and not Path(location).exists())
    return store, location if is_url_or_synthetic else os.path.abspath(location)  # noqa: PTH100 - a prefix is no file


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


def _make_run_command(spec: CompareSpec, frameworks: Sequence[Framework], plan: str) -> dict[str, Any]:
    """Return everything that determines a framework's run, by the name to display.

    The plan represents the store: a URL can hold credentials, which must not be written.
    """
    settings = {name: value for name, value in asdict(spec).items() if name != "store"}
    packages = {requirement.package for framework in frameworks for requirement in framework.requirements}
    return {
        **settings,
        "plan": plan,
        "frameworks": [framework.name for framework in frameworks],
        **{f"the example {example.name}": hash_example(example) for example in frameworks},
        **{package: get_installed_version(package) for package in sorted({"batchloom", *packages})},
    }


def _make_progress_printer(print_line: SayFunction, title: str) -> SayFunction:
    return lambda line: print_line(f"{title}: {line}")


def _load_or_run(
    framework: Framework,
    spec: CompareSpec,
    store_location: str,
    record_file: Path | None,
    print_progress: SayFunction,
) -> tuple[WitnessRecord | None, str, str]:
    """Return a framework's record, its duration as text, and its problem if it failed."""
    if record_file is not None:
        with wrap_os_errors("read", record_file):
            saved_run = _read_json(record_file)
        if saved_run is not None:
            record = WitnessRecord(**saved_run["record"])
            return record, f", {saved_run['seconds']:.1f} s, before it was stopped", ""
    print_progress(f"running {format_count(spec.steps, 'step')} in {format_count(spec.processes, 'process')}")
    begin = time.monotonic()
    new_record, problem = _run_framework(framework, spec, store_location)
    seconds = time.monotonic() - begin
    # A failed framework runs again, since the stop itself may have caused the failure.
    if new_record is not None and record_file is not None:
        _write_json(record_file, {"seconds": seconds, "record": asdict(new_record)})
    return new_record, f", {seconds:.1f} s", problem


def _describe_outcome(outcome: FrameworkResult, spec: CompareSpec) -> str:
    """Return a short verdict of a framework."""
    if outcome.state != "ran":
        return f"{outcome.state} ({outcome.problem.splitlines()[0]})"
    if outcome.differing:
        batches = spec.steps * spec.processes
        return f"{len(outcome.differing):,} of {batches:,} batches differ"
    loss_difference = outcome.loss_difference
    return "agrees" if loss_difference is None else f"losses differ from step {loss_difference.step:,}"


def _run_framework(framework: Framework, spec: CompareSpec, store_location: str) -> tuple[WitnessRecord | None, str]:
    """Run a framework; return the record of its witnesses, or the problem."""
    with tempfile.TemporaryDirectory(prefix="batchloom-compare-") as folder:
        job = {
            "data": store_location,
            "out": str(Path(folder) / "out"),
            "seq_len": spec.seq_len,
            "global_batch_size": spec.global_batch_size,
            "batch_size": spec.batch_size,
            "steps": spec.steps,
            # Past the last step, so that no checkpoint is written: writing would count as data wait.
            "save_every": spec.steps + 1,
            "seed": spec.seed,
        }
        try:
            record = run_example(
                framework.name,
                job,
                Path(folder) / "record",
                processes=spec.processes,
                seconds=spec.seconds,
            )
        except TrainError as error:
            return None, str(error)
    return record, ""


_Reference = tuple[CompareSpec, ExpectedBatches, Sequence[Loader], Sequence[float]]


def _judge_framework(
    framework: Framework, record: WitnessRecord | None, problem: str, reference: _Reference
) -> FrameworkResult:
    """Compare a framework with the plan and the reference losses."""
    package_versions = {
        requirement.package: get_installed_version(requirement.package) for requirement in framework.requirements
    }
    versions = {package: version for package, version in package_versions.items() if version}
    if record is None:
        state: Literal["missing", "failed"] = "missing" if find_missing_packages(framework) else "failed"
        return FrameworkResult(framework.name, state, problem, versions)
    spec, expected, loaders, losses = reference
    differing_batches = find_differing_batches(expected, record.ranks)
    peaks = [entry["memory"] for rank_entries in record.ranks for entry in rank_entries]
    names = {name for peak in peaks for name in peak}
    hashes = [_list_hashes(rank_entries) for rank_entries in record.ranks]
    return FrameworkResult(
        framework.name,
        "ran",
        versions=versions,
        hashes=tuple(tuple(rank_hashes) for rank_hashes in hashes),
        digest=_digest_hashes(hashes),
        differing=tuple(differing_batches),
        difference=explain_difference(expected, record.ranks, *differing_batches[0]) if differing_batches else None,
        losses=tuple(record.losses),
        loss_difference=_find_loss_difference(record.losses, losses, spec),
        speed=None if differing_batches else _measure_speed(record.ranks, loaders),
        memory={name: max(peak.get(name, 0) for peak in peaks) for name in sorted(names)},
    )


def _list_hashes(entries: Sequence[dict[str, Any]]) -> list[str]:
    return [str(entry["hash"]) for entry in entries]


def _digest_hashes(hashes: Sequence[Sequence[str]]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(" ".join(rank_hashes) for rank_hashes in hashes).encode())


def _find_loss_difference(
    losses: Sequence[float], reference: Sequence[float], spec: CompareSpec
) -> LossDifference | None:
    for step, expected_loss in enumerate(reference[: spec.steps]):
        loss = losses[step] if step < len(losses) else None
        if loss is None or not is_close_loss(loss, expected_loss, spec.tolerance):
            return LossDifference(step, loss, expected_loss)
    return None


def _measure_speed(ranks: Sequence[Sequence[dict[str, Any]]], loaders: Sequence[Loader]) -> FrameworkSpeed | None:
    """Measure after the first steps, in which libraries start, compile and warm up."""
    steps = len(ranks[0])
    warm_up = min(_MAX_WARM_UP_STEPS, max(1, steps // 4))
    if steps <= warm_up:
        return None
    rank_seconds = [sum(entry["took"] for entry in rank_entries[warm_up:]) for rank_entries in ranks]
    waiting_seconds = sum(entry["waited"] for rank_entries in ranks for entry in rank_entries[warm_up:])
    tokens = sum(loader.tokens(step) for loader in loaders for step in range(warm_up, steps))
    return FrameworkSpeed(warm_up, tokens / max(rank_seconds), waiting_seconds / sum(rank_seconds))
