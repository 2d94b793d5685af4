"""Run metrics as a flat dict: from lengths over all ranks, and this rank's clock.

``METRICS`` lists every metric with its unit; docs/reference/metrics.md is made from it.

Ranks exchange their latest clocks without a collective: one that a rank does not join would hang all others. A thread
uses the key-value store of ``torch.distributed`` over its own connection; training passes metrics to it and takes
the latest it has read. A silent rank is not included, a dead one keeps its last values, and the thread ends if the
store fails.
"""

import json
import logging
import queue
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.assembly.array_filling import IGNORE_INDEX, Ids
from batchloom.batches.assembly.batch_assembly import Batch
from batchloom.batches.background import BackgroundThread
from batchloom.batches.loading.combined_store import is_replicated
from batchloom.batches.loading.loader import Loader, require_plan_feed
from batchloom.batches.loading.plan_feed import PlanFeed
from batchloom.batches.loading.rank_share import assign_balanced_ranks
from batchloom.core.errors import PlanError, SettingsError
from batchloom.core.settings import as_int, is_positive_number, quote_value, raise_problems
from batchloom.plan import compute_row_costs
from batchloom.plan.order import Imbalance
from batchloom.plan.packing import align_lengths

_LOG = logging.getLogger("batchloom")
# Silent ranks to check per read, since each check is one request.
_MAX_NEW_RANKS_PER_READ = 64
# Limits of one :meth:`Meter.metrics` call: the last steps, up to this many sequences and steps.
_MAX_ROWS = 1 << 16
_MAX_STEPS = 1024
_PUBLISH_SECONDS = 1.0


class Metric(NamedTuple):
    """A metric of a run; NAME stands for the name of a source."""

    name: str
    unit: str
    scope: str
    meaning: str


METRICS = (
    Metric("perf/steps", "steps", "all ranks", "number of steps that the metrics cover"),
    Metric("perf/seconds", "s", "this rank's clock", "duration of these steps"),
    Metric("perf/tokens", "tokens", "all ranks", "tokens of these steps, without padding"),
    Metric("perf/tokens_per_s", "tokens/s", "all ranks", "`perf/tokens` divided by `perf/seconds`"),
    Metric("perf/tokens_per_s_per_gpu", "tokens/s", "all ranks", "the same divided by `devices`"),
    Metric("perf/global_seq_len_avg", "tokens", "all ranks", "tokens of a rank in a step, mean over ranks and steps"),
    Metric("perf/global_seq_len_min", "tokens", "all ranks", "the minimum over ranks and steps"),
    Metric("perf/global_seq_len_max", "tokens", "all ranks", "the maximum over ranks and steps"),
    Metric("perf/packing_efficiency", "share", "all ranks", "tokens divided by the capacity of the sequences"),
    Metric(
        "perf/padding_share",
        "share",
        "all ranks",
        "padding in all positions that ranks compute; in the varlen form only alignment, and one token for a rank "
        "without documents",
    ),
    Metric(
        "perf/trained_share",
        "share",
        "all ranks",
        "tokens with a loss; for masked stores only with `meter.step(batch, trained=N)`, N over all ranks",
    ),
    Metric("perf/imbalance", "ratio", "all ranks", "highest attention cost of a rank over the mean, as distributed"),
    Metric("perf/imbalance_in_order", "ratio", "all ranks", "the same without `balance`"),
    Metric("perf/flops_per_s_per_gpu", "FLOP/s", "all ranks", "speed of one device; with `cost`"),
    Metric("perf/mfu", "share", "all ranks", "share of `peak_flops`; with `cost` and `peak_flops`"),
    Metric(
        "perf/data_wait_share",
        "share",
        "this rank's clock",
        "share of the time spent waiting for batches; with `meter.over`",
    ),
    Metric("perf/ranks_heard", "ranks", "ranks heard", "number of ranks whose clocks were read"),
    Metric("perf/step_s_max", "s", "ranks heard", "mean step time of the slowest rank"),
    Metric("perf/data_wait_share_max", "share", "ranks heard", "longest wait for data of a rank"),
    Metric(
        "perf/steps_apart",
        "steps",
        "ranks heard",
        "steps between the most and the least advanced rank; it grows if a rank dies or hangs",
    ),
    Metric(
        "rank/trained_share",
        "share",
        "this rank",
        "replaces `perf/trained_share` where that is unknown; counted in the labels of its batches",
    ),
    Metric("rank/steps", "steps", "this rank, streams", "as `perf/steps`"),
    Metric("rank/seconds", "s", "this rank, streams", "as `perf/seconds`"),
    Metric("rank/tokens", "tokens", "this rank, streams", "as `perf/tokens`"),
    Metric("rank/tokens_per_s", "tokens/s", "this rank, streams", "as `perf/tokens_per_s`"),
    Metric("rank/tokens_per_s_per_gpu", "tokens/s", "this rank, streams", "as `perf/tokens_per_s_per_gpu`"),
    Metric("rank/packing_efficiency", "share", "this rank, streams", "as `perf/packing_efficiency`"),
    Metric("rank/padding_share", "share", "this rank, streams", "as `perf/padding_share`"),
    Metric("data/step", "steps", "the run", "steps done so far"),
    Metric("data/position", "sequences", "the run", "sequences done so far"),
    Metric("data/NAME/tokens", "tokens", "all ranks", "tokens of the source in these steps; `data` for a single store"),
    Metric("data/NAME/epoch", "passes", "the run", "passes over the source so far"),
    Metric(
        "data/banned",
        "spans",
        "all ranks",
        "spans replaced by padding: their documents are banned or their media missing; only in such runs",
    ),
    Metric("data/synthetic", "0 or 1", "the run", "1 for synthetic data; always present"),
)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Statistics of one step over all ranks."""

    tokens: Ids  # tokens of each data-parallel rank without padding, int64 [ranks]
    sources: Ids  # tokens of each source of the plan, int64 [sources]
    squares: int  # sum of the squared lengths of all spans
    trained: int | None  # tokens that carry a loss; None if it depends on masks
    capacity: int  # tokens that its sequences can hold
    computed_tokens: int  # tokens that all ranks compute, including padding
    imbalance: Imbalance | None  # imbalance of its cost, see ``Loader.imbalance``; None if ranks cannot differ
    banned: int  # spans that are padding because their documents are banned or their media missing


def collect_step_facts(loader: Loader, step: int) -> StepFacts:
    feed = require_plan_feed(loader.feed, step)
    plan = feed.plan
    batch_spec = feed.spec
    spec = plan.spec_at(step)
    share = feed.share_at(step)
    ranks = share.placement.world_size
    copies = ranks if is_replicated(feed.store) else 1
    uneven = None
    if is_replicated(feed.store):
        rows, _ = feed.select_rows(step)
        owners = np.zeros(len(rows), np.int64)
    else:
        rows = plan.rows(*plan.positions_of(step))
        costs = feed.costs.of(plan, rows)
        owners, uneven = assign_balanced_ranks(plan, costs, ranks, balance=batch_spec.balance)
    served = rows.lengths if rows.banned is None else np.where(rows.banned, 0, rows.lengths)
    computed_tokens = ranks * share.rows * spec.seq_len
    if batch_spec.form == "varlen":
        computed_tokens = copies * int(align_lengths(rows.lengths, spec.align).sum())
        # A rank without a span computes padding: models take no empty input.
        spans = np.bincount(owners.repeat(np.diff(rows.pointers)), minlength=ranks // copies)
        computed_tokens += copies * spec.align * int((spans == 0).sum())
    tokens = _sum_by_key(owners.repeat(np.diff(rows.pointers)), served, ranks)
    return StepFacts(
        tokens=np.repeat(tokens[:1], ranks) if copies > 1 else tokens,
        sources=copies * _sum_by_key(rows.sources, served, len(plan.stores)),
        squares=copies * int(compute_row_costs(rows).sum()),
        trained=None if _requires_masks(feed) else copies * int((served - 1).clip(0).sum()),
        capacity=copies * len(rows) * spec.seq_len,
        computed_tokens=computed_tokens,
        imbalance=uneven if ranks > 1 else None,
        banned=0 if rows.banned is None else copies * int(rows.banned.sum()),
    )


def _requires_masks(feed: PlanFeed) -> bool:
    """Return whether masks, not lengths alone, decide which tokens carry a loss."""
    drops = feed.augmentation is not None and feed.augmentation.drops_loss
    return feed.store.masked or drops


def _sum_by_key(keys: NDArray[np.integer], values: Ids, count: int) -> Ids:
    """Sum values by key; exact below 2**53."""
    return np.bincount(keys, values, count).astype(np.int64)


class KeyValueStore(Protocol):
    """Interface of a ``torch.distributed`` store."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values, without waiting for them."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of existing keys."""


def open_default_store() -> KeyValueStore | None:
    """Open a connection to the default process group's store; None without a group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    # torch marks this function private, so newer versions may lack it: access it by name.
    group = getattr(distributed, "distributed_c10d", None)
    store: Any = getattr(group, "_get_default_store", lambda: None)()
    # An older torch has no clone; a call on the shared connection might block one of the group's.
    clone = getattr(store, "clone", None)
    try:
        return None if clone is None else clone()
    except RuntimeError:
        return None


# Request of the exchange for the metrics of other ranks; every other request is a message to publish.
_READ = ""


@final
class MetricsExchange:
    """One rank's view of the metrics exchange; no call blocks."""

    def __init__(self, store: KeyValueStore, rank: int, world_size: int, name: str) -> None:
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._rank_metrics: dict[int, dict[str, float]] = {}
        keys = [f"batchloom/{name}/{n}" for n in range(world_size)]
        # The thread must not refer to this object, so that None ends it when nothing else does.
        weakref.finalize(self, self._requests.put, None)
        run = partial(_run_exchange, self._requests, self._rank_metrics, store, keys, rank)
        BackgroundThread("batchloom-metrics", run, partial(self._requests.put, None)).start()

    def publish(self, metrics: Mapping[str, float]) -> None:
        self._requests.put(json.dumps(dict(metrics)))

    def get_rank_metrics(self) -> dict[int, dict[str, float]]:
        """Return the last read metrics by rank, and request a read for the next call."""
        self._requests.put(_READ)
        return dict(self._rank_metrics)


def _run_exchange(
    requests: "queue.SimpleQueue[str | None]",
    rank_metrics: dict[int, dict[str, float]],
    store: KeyValueStore,
    keys: list[str],
    rank: int,
) -> None:
    active_ranks: list[int] = []
    silent_ranks = list(range(len(keys)))
    while True:
        # If the store is slow, only the latest of several messages is published.
        waiting = [requests.get()]
        while not requests.empty():
            waiting.append(requests.get())
        if None in waiting:
            return
        messages = [request for request in waiting if request]
        try:
            if messages:
                store.set(keys[rank], messages[-1])
            if _READ in waiting:
                rank_metrics.update(_read_rank_metrics(store, keys, active_ranks, silent_ranks))
        except (RuntimeError, OSError, ValueError) as error:
            _LOG.warning(
                "Metrics of other ranks are no longer read: %s. Training and this rank's own metrics continue.",
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
            # Old values would stay forever and look current.
            rank_metrics.clear()
            # Requests are discarded from here on; a queue without a reader would grow with every step.
            while requests.get() is not None:
                pass
            return


def _read_rank_metrics(
    store: KeyValueStore, keys: list[str], active_ranks: list[int], silent_ranks: list[int]
) -> dict[int, dict[str, float]]:
    for _ in range(min(_MAX_NEW_RANKS_PER_READ, len(silent_ranks))):
        rank = silent_ranks.pop(0)
        (active_ranks if store.check([keys[rank]]) else silent_ranks).append(rank)
    if not active_ranks:
        return {}
    values = store.multi_get([keys[rank] for rank in active_ranks])
    return dict(zip(active_ranks, map(json.loads, values), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Floating-point operations of a model, forward and backward.

    Attributes:
        per_token: operations for each token, regardless of its context.
        per_pair: operations for each pair of tokens of a span; a span of n tokens has n * n pairs.
    """

    per_token: float
    per_pair: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers({"per_token": self.per_token, "per_pair": self.per_pair})


def _check_numbers(values: Mapping[str, object]) -> None:
    raise_problems(
        [
            f"{name}: {quote_value(n)} is not a number of at least 0"
            for name, n in values.items()
            if not is_positive_number(n, zero=True)
        ]
    )


def transformer_cost(*, parameters: int, layers: int = 0, width: int = 0) -> ModelCost:
    """Return the cost of a dense transformer: 6 N + 12 L H Q T per token (PaLM).

    See PaLM, appendix B, arXiv:2204.02311; T is the length of the token's span here. As in PaLM, a causal mask
    saves nothing, and recomputation to save memory is not counted.

    Args:
        parameters: N; for a mixture of experts the parameters that a token passes.
        layers: L; 0 leaves attention out.
        width: H * Q, number of attention heads times the width of one.

    Raises:
        SettingsError: invalid numbers.
    """
    _check_numbers({"parameters": parameters, "layers": layers, "width": width})
    return ModelCost(per_token=6.0 * parameters, per_pair=12.0 * layers * width)


class _StepRecord(NamedTuple):
    """A completed step.

    ``tokens`` is of this rank, for streams only; ``trained`` is of all ranks, as given;
    ``trained_labels`` counts this rank's labels with a loss if no other source has it: a number or a scalar tensor.
    """

    step: int
    seconds: float
    waited: float | None
    tokens: int | None
    trained: float | None
    trained_labels: Any


@final
class Meter:
    """Counter of completed steps that computes metrics on request.

    Use ``for batch in meter.over(loader): ...``, which also measures the wait for data; or call
    ``meter.step(batch)`` once per optimizer step. A step is cheap; :meth:`metrics` computes the values from lengths.

    Args:
        loader: loader of the steps.
        cost: cost of the model, for its share of ``peak_flops``; see :func:`transformer_cost`.
        peak_flops: peak operations per second of one device, from its data sheet for the dtype used.
        devices: number of devices of the run; None for one per process.
        exchange: whether ranks publish their clocks to each other if ``torch.distributed`` is initialised; this
            never uses a collective.

    Raises:
        SettingsError: invalid numbers, or a peak without a cost.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        cost: ModelCost | None = None,
        peak_flops: float | None = None,
        devices: int | None = None,
        exchange: bool = True,
    ) -> None:
        problems = []
        if peak_flops is not None and not is_positive_number(peak_flops):
            problems.append(f"peak_flops: {quote_value(peak_flops)} is not a number above 0")
        if peak_flops is not None and cost is None:
            problems.append("cost: missing; the share of peak_flops is computed from it: give transformer_cost(...)")
        if devices is not None and (as_int(devices) or 0) < 1:
            problems.append(f"devices: {quote_value(devices)} is not a whole number of at least 1")
        raise_problems(problems)
        self._loader = loader
        self._cost = cost
        self._peak = peak_flops
        self._devices = devices or loader.spec.world_size
        self._exchange = exchange
        self._metrics_exchange: MetricsExchange | None = None
        self._name = loader.plan.fingerprint[:16]
        self._records: deque[_StepRecord] = deque(maxlen=_MAX_STEPS)
        self._last: int | None = None
        self._count = 0
        # Steps not yet published: count, seconds, seconds waited; and the time of the last publication.
        self._unpublished = (0, 0.0, 0.0)
        self._published_at = float("-inf")
        self._began = time.perf_counter()
        self._waited: float | None = None

    def over(self, batches: Iterable[Batch] | None = None) -> Iterator[Batch]:
        """Yield batches, of the loader by default, and count each at the next request.

        A step reported to :meth:`step` is counted then: later work (an evaluation, a checkpoint) is not
        part of its time.
        """
        source = iter(self._loader if batches is None else batches)
        while True:
            request_time = time.perf_counter()
            batch = next(source, None)
            if batch is None:
                return
            count_before = self._count
            self._began = request_time
            self._waited = time.perf_counter() - request_time
            yield batch
            if self._count == count_before:
                self.step(batch)

    def begin(self) -> None:
        """Start the clock of the next step now, to exclude the time since the last step."""
        self._began = time.perf_counter()
        self._waited = None

    def step(self, batch: Batch | int, *, trained: float | None = None) -> None:
        """Record a completed optimizer step.

        Consecutive reports of one step, for example of its micro-batches, count as one step: time and
        ``trained`` are summed.

        Args:
            batch: batch of the step, or its number.
            trained: tokens with a loss over all ranks, if the training has summed them anyway.

        Raises:
            PlanError: a batch that was rebuilt from its arrays and does not know its step.
            SettingsError: an invalid number of a step or of tokens.
        """
        step = _get_step(batch)
        if trained is not None and not is_positive_number(trained, zero=True):
            raise SettingsError([f"trained: {quote_value(trained)} is not a number of tokens (at least 0)"])
        again = step == self._last
        self._count = self._count + 1
        if again and not self._records:
            # Its metrics were already returned; further time counts for the next step.
            return
        seconds = time.perf_counter() - self._began
        waited = self._waited
        tokens = self._loader.tokens(step) if self._loader.streamed else None
        trained_labels = None
        # Without masks, lengths alone show which tokens carry a loss.
        feed = self._loader.feed
        needs_labels = not isinstance(feed, PlanFeed) or _requires_masks(feed)
        if trained is None and isinstance(batch, Mapping) and needs_labels:
            # The sum of a tensor stays a tensor, so this does not synchronize with the device.
            trained_labels = (batch["labels"] != IGNORE_INDEX).sum()
        record = _StepRecord(step, seconds, waited, tokens, trained, trained_labels)
        self._records.append(_merge_step_records(self._records.pop(), record) if again else record)
        self._last = step
        self._publish(seconds, waited or 0.0, steps=0 if again else 1)
        self.begin()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call.

        They cover at most the latest 1,024 steps and 65,536 sequences. A stream does not know the other ranks'
        rows, so its metrics are of this rank and named ``rank/`` instead of ``perf/``.

        Raises:
            SettingsError: more trained tokens were reported for a step than it has.
        """
        loader = self._loader
        metrics = {"data/synthetic": float("source=synthetic" in loader.origin)}
        if self._last is None:
            return metrics
        metrics["data/step"] = self._last + 1
        records = self._select_latest()
        self._records.clear()
        if loader.streamed:
            metrics["data/position"] = (self._last + 1) * loader.plan.spec.global_batch_size
            metrics |= self._compute_rank_metrics(records) if records else {}
        else:
            position = loader.plan.positions_of(self._last)[1]
            metrics["data/position"] = position
            metrics |= self._compute_global_metrics(records) if records else {}
            for name, epochs in loader.plan.epochs(position).items():
                metrics[f"data/{name}/epoch"] = epochs
        return metrics | self._compute_rank_spread()

    def _select_latest(self) -> list[_StepRecord]:
        rows = 0
        records: list[_StepRecord] = []
        for record in reversed(self._records):
            rows += self._spec_at(record.step).global_batch_size
            if records and rows > _MAX_ROWS:
                break
            records.append(record)
        return records[::-1]

    def _spec_at(self, step: int) -> Any:
        plan = self._loader.plan
        return plan.spec if self._loader.streamed else plan.spec_at(step)

    def _compute_global_metrics(self, records: list[_StepRecord]) -> dict[str, float]:
        """Compute the metrics of the steps over all ranks, from their lengths."""
        facts = [collect_step_facts(self._loader, record.step) for record in records]
        _check_trained_tokens(records, facts)
        ranks = np.stack([fact.tokens for fact in facts])
        tokens = int(ranks.sum())
        flops = 0.0
        if self._cost is not None:
            squares = sum(fact.squares for fact in facts)
            flops = self._cost.per_token * tokens + self._cost.per_pair * squares
        metrics = _compute_time_metrics(records, "perf", tokens, self._devices)
        metrics |= {
            "perf/global_seq_len_avg": float(ranks.mean()),
            "perf/global_seq_len_min": float(ranks.min()),
            "perf/global_seq_len_max": float(ranks.max()),
            "perf/packing_efficiency": tokens / max(1, sum(fact.capacity for fact in facts)),
            "perf/padding_share": 1 - tokens / max(tokens, 1, sum(fact.computed_tokens for fact in facts)),
            **self._compute_utilization(flops, metrics["perf/seconds"]),
            **self._compute_trained_metrics(records, facts, tokens),
        }
        uneven = [fact.imbalance for fact in facts if fact.imbalance is not None]
        if uneven:
            metrics["perf/imbalance"] = sum(imbalance.actual for imbalance in uneven) / len(uneven)
            metrics["perf/imbalance_in_order"] = sum(imbalance.in_order for imbalance in uneven) / len(uneven)
        source_tokens = np.sum([fact.sources for fact in facts], 0).tolist()
        if any(segment.bans for segment in self._loader.plan.segments):
            metrics["data/banned"] = float(sum(fact.banned for fact in facts))
        for name, own in zip(self._loader.plan.stores, source_tokens, strict=True):
            metrics[f"data/{name}/tokens"] = float(own)
        return metrics

    def _compute_utilization(self, flops: float, seconds: float) -> dict[str, float]:
        """Return the devices' throughput, and its share of their peak."""
        if not flops or not seconds:
            return {}
        each = flops / seconds / self._devices
        metrics = {"perf/flops_per_s_per_gpu": each}
        return metrics | ({"perf/mfu": each / self._peak} if self._peak else {})

    def _compute_trained_metrics(
        self, records: list[_StepRecord], facts: list[StepFacts], tokens: int
    ) -> dict[str, float]:
        trained_counts = [
            record.trained if record.trained is not None else fact.trained
            for record, fact in zip(records, facts, strict=True)
        ]
        known_counts = [count for count in trained_counts if count is not None]
        if len(known_counts) == len(trained_counts):
            return {"perf/trained_share": sum(known_counts) / max(tokens, 1)}
        rank = self._loader.feed.share_at(records[-1].step).placement.rank
        return _compute_trained_share(
            records, sum(int(fact.tokens[rank]) for fact in facts) // self._loader.spec.mesh.context
        )

    def _compute_rank_metrics(self, records: list[_StepRecord]) -> dict[str, float]:
        tokens = sum(record.tokens or 0 for record in records)
        capacity = sum(
            self._loader.feed.share_at(record.step).rows * self._spec_at(record.step).seq_len for record in records
        )
        filled = tokens / max(1, capacity)
        metrics = _compute_time_metrics(records, "rank", tokens, self._loader.spec.mesh.processes_per_data_rank)
        return metrics | {
            "rank/packing_efficiency": filled,
            "rank/padding_share": 0.0 if self._loader.spec.form == "varlen" else 1 - filled,
            **_compute_trained_share(records, tokens // self._loader.spec.mesh.context),
        }

    def _publish(self, seconds: float, waited: float, *, steps: int) -> None:
        before, total, waits = self._unpublished
        self._unpublished = (before + steps, total + seconds, waits + waited)
        now = time.monotonic()
        early = now - self._published_at < _PUBLISH_SECONDS or not self._unpublished[0]
        if early or not self._exchange:
            return
        if self._metrics_exchange is None:
            spec = self._loader.spec
            store = open_default_store() if spec.world_size > 1 else None
            if store is None:
                # Retry later, but not at every step.
                self._published_at = now
                return
            self._metrics_exchange = MetricsExchange(store, spec.rank, spec.world_size, self._name)
        steps, total, waits = self._unpublished
        share = waits / total if total else 0.0
        self._metrics_exchange.publish({"step": float((self._last or 0) + 1), "step_s": total / steps, "wait": share})
        self._unpublished = (0, 0.0, 0.0)
        self._published_at = now

    def _compute_rank_spread(self) -> dict[str, float]:
        rank_metrics = (
            list(self._metrics_exchange.get_rank_metrics().values()) if self._metrics_exchange is not None else []
        )
        if not rank_metrics:
            return {}
        return {
            "perf/ranks_heard": float(len(rank_metrics)),
            "perf/step_s_max": max(metrics["step_s"] for metrics in rank_metrics),
            "perf/data_wait_share_max": max(metrics["wait"] for metrics in rank_metrics),
            "perf/steps_apart": max(metrics["step"] for metrics in rank_metrics)
            - min(metrics["step"] for metrics in rank_metrics),
        }


def _get_step(batch: Batch | int) -> int:
    if not isinstance(batch, Mapping):
        if (number := as_int(batch)) is None or number < 0:
            raise SettingsError(
                [f"step: {quote_value(batch)} is not a whole number of at least 0; give a step number or a batch"]
            )
        return number
    # Frameworks also turn a batch into a plain dict.
    step: int = getattr(batch, "step", -1)
    if step < 0:
        raise PlanError(
            "A batch that was rebuilt from its arrays does not know its step: give the step number of the loader's "
            "batch (meter.step(number))."
        )
    return step


def _check_trained_tokens(records: list[_StepRecord], facts: list[StepFacts]) -> None:
    for record, fact in zip(records, facts, strict=True):
        most = int(fact.tokens.sum())
        if record.trained is not None and record.trained > most:
            problem = f"{record.trained:,.0f} were reported for step {record.step}, which has {most:,} tokens"
            raise SettingsError([f"trained: {problem} over all ranks; report each token once"])


def _merge_step_records(first: _StepRecord, more: _StepRecord) -> _StepRecord:
    return _StepRecord(
        first.step,
        first.seconds + more.seconds,
        _sum_known(first.waited, more.waited),
        more.tokens,
        _sum_known(first.trained, more.trained),
        _sum_known(first.trained_labels, more.trained_labels),
    )


def _sum_known(*values: Any) -> Any:
    known_values = [value for value in values if value is not None]
    return reduce(add, known_values) if known_values else None


def _compute_time_metrics(records: list[_StepRecord], prefix: str, tokens: int, devices: int) -> dict[str, float]:
    seconds = sum(record.seconds for record in records)
    waits = [record.waited for record in records if record.waited is not None]
    metrics = {
        f"{prefix}/steps": float(len(records)),
        f"{prefix}/tokens": float(tokens),
        f"{prefix}/seconds": seconds,
        f"{prefix}/tokens_per_s": tokens / seconds if seconds else 0.0,
        f"{prefix}/tokens_per_s_per_gpu": tokens / seconds / devices if seconds else 0.0,
    }
    if len(waits) == len(records):
        metrics["perf/data_wait_share"] = sum(waits) / seconds if seconds else 0.0
    return metrics


def _compute_trained_share(records: list[_StepRecord], tokens: int) -> dict[str, float]:
    if any(record.trained_labels is None for record in records):
        return {}
    return {"rank/trained_share": sum(int(record.trained_labels) for record in records) / max(tokens, 1)}
