"""Simulation of the largest run: 15T tokens, 12B documents and 16,384 ranks.

    python bench/simulate.py [--scale 1e-5] [--only NAME]

It has 200 sources. The world is resized every thousand steps, and there is an edit every hundred thousand. Lengths are
computed, not stored. No tokens are read: only the plan is timed. Times are medians of one process's CPU time, with the
ratio to entering one pool (drawing, packing and ordering 8,192 documents), measured in the same run.

Queries at distant positions need the table of sequences per pool. Counting 1.5 million pools is not part of a
benchmark, so these use sources whose pools all hold the same lengths: their table is correct and known at once (pools
that are entered are checked against it). All other queries use sources of 65,536 different lengths, without a table.

With ``--scale`` the same run is checked row by row: every rank of every step, each world resumed from the state of
the previous one.
"""

import argparse
import itertools
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import NormalDist, median
from typing import TYPE_CHECKING

import numpy as np

from batchloom.batches import BatchSpec, make_rank_share, select_rank_rows
from batchloom.core.keyed_hashing import hash_indices
from batchloom.plan import Edit, Mixture, Plan, PlanSpec, find_document_positions, with_journal

if TYPE_CHECKING:
    from batchloom.plan.packing import Rows

BLOCK = 64
MIB = 1 << 20
_NORMAL = NormalDist(0, 1.1)


@dataclass(frozen=True)
class Size:
    """Size of a run; ``of`` scales all of it down."""

    documents: int = 12_000_000_000
    tokens: int = 15_000_000_000_000
    sources: int = 200
    ranks: int = 16_384
    pool: int = 8_192
    seq_len: int = 2_048
    resized: int = 1_000
    edited: int = 100_000
    worlds: tuple[int, ...] = field(default=(16_384, 8_192, 12_288, 4_096, 16_000))

    @staticmethod
    def of(scale: float) -> "Size":
        steps = int(450_000 * scale * 16_384 / 16)
        return Size(
            int(12e9 * scale),
            int(15e12 * scale),
            ranks=16,
            pool=256,
            resized=steps // 40,
            edited=steps // 5,
            worlds=(16, 8, 12, 4, 15),
        )

    def edits(self) -> list[Edit]:
        """Return three edits.

        They change the weights; ban documents, skip steps and enlarge batches; and lengthen sequences.
        """
        weights = {name: 1 + number % 7 for number, name in enumerate(self.names())}
        return [
            Edit(step=self.edited, weights=weights, note="the mixture of the second quarter"),
            Edit(
                step=2 * self.edited,
                skip=50,
                ban={"s000": list(range(0, 1000, 7)), "s017": [5]},
                global_batch_size=2 * self.ranks,
                note="the loss spiked",
            ),
            Edit(step=3 * self.edited, seq_len=2 * self.seq_len, global_batch_size=self.ranks),
        ]

    def names(self) -> list[str]:
        return [f"s{number:03}" for number in range(self.sources)]

    def steps(self) -> int:
        """Return the steps until the tokens are served.

        From the second edit on, steps hold twice as many.
        """
        step = self.ranks * self.seq_len
        first = 2 * self.edited * step
        return 2 * self.edited + (self.tokens - first) // (2 * step)

    def world(self, step: int) -> int:
        number = step // self.resized
        return self.worlds[0] if not number else self.worlds[(number * 7 + number // 3) % len(self.worlds)]


def quantiles(count: int) -> np.ndarray:
    """Return log-normal lengths with a mean of 1,250 tokens, uint32 [count]."""
    z = np.array([_NORMAL.inv_cdf((n + 0.5) / count) for n in range(count)])
    return np.exp(np.log(1250) - 0.605 + z).astype(np.uint32) + 1


class Drawn:
    """Lengths chosen from 65,536 values by the keyed hash of the document."""

    table = quantiles(65_536)

    def __init__(self, size: int, key: int) -> None:
        self.size, self.key = size, key

    def take(self, documents: np.ndarray) -> np.ndarray:
        return self.table[(hash_indices(documents, (self.key, 1)) >> np.uint64(48)).astype(int)]

    def tokens(self) -> int:
        return int(self.size * self.table.mean())


class Even:
    """Lengths that are the same 64 in each block of 64, each time in another order.

    Every pool packs alike.
    """

    table = quantiles(BLOCK)

    def __init__(self, size: int, key: int) -> None:
        self.size, self.key = size, key

    def take(self, documents: np.ndarray) -> np.ndarray:
        blocks, inside = np.divmod(documents, BLOCK)
        turn = (hash_indices(blocks, (self.key, 2)) >> np.uint64(32)).astype(np.int64)
        return self.table[(inside * (2 * (turn & 31) + 1) + (turn >> 5)) % BLOCK]

    def tokens(self) -> int:
        return self.size // BLOCK * int(self.table.sum())


class Simulated:
    """A plan's view of a store."""

    def __init__(self, lengths: Drawn | Even) -> None:
        self.lengths, self.tokens = lengths, lengths.tokens()
        self.fingerprint = f"simulated {type(lengths).__name__} {lengths.key} {lengths.size}"


def mixture(size: Size, kind: type[Drawn] | type[Even]) -> Mixture:
    """Make sources from large to small, weighted by the square root of their sizes."""
    shares = 1 / np.arange(2, size.sources + 2) ** 0.8
    documents = shares / shares.sum() * size.documents
    stores = {
        name: Simulated(kind(max(round(count / size.pool), 1) * size.pool, number))
        for number, (name, count) in enumerate(zip(size.names(), documents, strict=True))
    }
    return Mixture("size", stores=stores, temperature=2.0)


def plan_of(size: Size, kind: type[Drawn] | type[Even], edits: list[Edit] | None = None) -> Plan:
    spec = PlanSpec(
        seq_len=size.seq_len,
        global_batch_size=size.ranks,
        steps=size.steps(),
        pool_size=size.pool,
        block=BLOCK,
        seed=11,
    )
    return Plan(mixture(size, kind), spec, edits or ())


def adopt(plan: Plan, era: int) -> None:
    """Adopt the table of sources whose pools all pack alike."""
    for number in range(len(plan.names)):
        order = plan.orders.order(number, era)
        if not order.counts.is_complete:
            one = order.pools.count_sequences(0)
            order.counts.adopt(np.full(order.pools.count, one))


def ranks_rows(plan: Plan, step: int, rank: int, world: int) -> tuple:
    of = BatchSpec(rank=rank, world_size=world, uneven="pad")
    return select_rank_rows(plan, step, make_rank_share(plan.spec_at(step), of))


class Clock:
    """Medians of CPU seconds, and their ratio to entering a pool."""

    def __init__(self, entering: float) -> None:
        self.entering = entering

    def tell(self, what: str, action: Callable[[], object], repeats: int = 1) -> object:
        times, answer = [], None
        for _ in range(repeats):
            begin = time.process_time()
            answer = action()
            times.append(time.process_time() - begin)
        least, most = median(times), max(times)
        worst = f" (at most {most * 1e3:.2f})" if repeats > 1 else ""
        print(f"  {what:66} {least * 1e3:9.2f} ms {least / self.entering:8.2f} x{worst}")
        return answer


def near(size: Size, clock: Clock) -> None:
    """Measure without a table: start, consecutive steps, states, edits."""
    print("Without a table, 65,536 different lengths")
    made = clock.tell("the plan: measuring its sources, the schedule", lambda: plan_of(size, Drawn), 3)
    assert isinstance(made, Plan)
    clock.tell("its fingerprint", lambda: made.fingerprint)
    clock.tell("the first step of rank 7", lambda: ranks_rows(made, 0, 7, size.ranks))
    steps = itertools.count(1)
    clock.tell(
        "a step of one rank, one after the other",
        lambda: ranks_rows(made, next(steps), 7, size.ranks),
        200,
    )
    at = next(steps)
    position = made.positions_of(at)[0]
    clock.tell("a state, where one rank has read on alone", lambda: made.state(position))
    state = clock.tell("a state again", lambda: json.dumps(made.state(position)))
    print(f"  {'a state is':66} {len(str(state)) / 1024:9.0f} KiB")
    fresh = Plan(made.data, made.spec)
    clock.tell(
        "resuming in a new process (a plan made before)",
        lambda: fresh.resume(json.loads(str(state))),
    )
    clock.tell("its first step of one of 4,096 ranks", lambda: ranks_rows(fresh, at, 3, 4096))
    for name, edit in {
        "weights": {"weights": dict.fromkeys(size.names()[5:], 1)},
        "a ban": {"ban": {"s003": [1, 2, 3]}},
        "global_batch_size": {"global_batch_size": 2 * size.ranks},
        "40 steps left out": {"skip": 40},
        "seq_len": {"seq_len": 4096},
    }.items():
        edited = clock.tell(f"an edit: {name}", lambda edit=edit: fresh.edited(Edit(step=at + 2, **edit)))
        assert isinstance(edited, Plan)
        clock.tell("   the first step after it", lambda e=edited: ranks_rows(e, at + 2, 3, 4096))
    order = made.orders.order(3)
    pools = itertools.count(100)
    clock.tell("counting a pool, for the table", lambda: order.pools.count_sequences(next(pools)), 50)
    begin = time.process_time()
    for pool in range(200, 260):
        order.pools.count_sequences(pool)
    each = (time.process_time() - begin) / 60
    total = sum(o.pools.count for o in made.orders.latest())
    print(
        f"  {'the whole table':66} {total * each / 60:9.0f} min of one core, {total:,} pools, {total * 4 / MIB:.0f} MiB"
    )


def far(size: Size, clock: Clock) -> None:
    """Measure with the table: any step, any document, and totals of the run."""
    print("With the table, pools that pack alike")
    plan = plan_of(size, Even, size.edits())
    for era in (0, 1):
        clock.tell(f"taking the table of packing {era}", lambda era=era: adopt(plan, era))
    draw = np.random.default_rng(5)
    steps = [int(step) for step in draw.integers(0, plan.steps, 100)]

    def located() -> None:
        position = int(draw.integers(0, plan.positions))
        plan.run.locate(position)

    clock.tell("where a position stands, epochs met for the first time", located, 2000)
    clock.tell("where a position stands", located, 4000)
    asked = iter(steps)

    def step_of_a_rank() -> None:
        step = next(asked)
        world = size.world(step)
        ranks_rows(plan, step, int(draw.integers(0, world)), world)

    clock.tell("any step of any rank of its world (explain, without text)", step_of_a_rank, 100)
    position = plan.positions_of(steps[0])[0]
    state = clock.tell("a state at any step", lambda: plan.state(position))
    fresh = Plan(plan.data, plan.spec)
    print("  a new process, without the table, from that state")
    clock.tell("   its journal", lambda: with_journal(fresh, state))
    resumed = with_journal(fresh, state)
    clock.tell("   resuming", lambda: resumed.resume(state))
    clock.tell("   its first step", lambda: ranks_rows(resumed, steps[0], 5, 4096))
    whole, sightings = 0, []
    for _ in range(20):
        number = int(draw.integers(0, size.sources))
        document = int(draw.integers(0, plan.stores[plan.names[number]].lengths.size))
        begin = time.process_time()
        found = find_document_positions(plan, number, document, plan.steps)
        sightings.append(time.process_time() - begin)
        whole += covered(plan, number, document, found)
    print(
        f"  {'when a document is seen in the whole run':66} {median(sightings) * 1e3:9.2f} ms"
        f" {median(sightings) / clock.entering:8.2f} x (at most {max(sightings) * 1e3:.2f})"
    )
    print(
        f"  coverage, sampled: {whole} sightings of 20 documents are in the rows they name, every whole epoch adds up"
    )
    off = max(mixture_error(plan, int(p)) for p in draw.integers(0, plan.positions, 3000))
    print(f"  mixture error, sampled at 3,000 positions: at most {off:.6f} sequences")
    assert off < 1


def covered(plan: Plan, number: int, document: int, found: list) -> int:
    """Check the positions of a document; return their number.

    Every position must hold it, and complete epochs must hold all of its tokens.
    """
    length = int(plan.stores[plan.names[number]].lengths.take(np.array([document]))[0])
    tokens: dict[int, int] = {}
    for one in found:
        rows = plan.rows(one.position, one.position + 1)
        mine = (rows.sources == number) & (rows.documents == document)
        assert mine.any()
        tokens[one.epoch] = tokens.get(one.epoch, 0) + int(rows.lengths[mine].sum())
    for epoch, count in tokens.items():
        assert count == length or epoch == max(tokens), (count, length, epoch)
    return len(found)


def mixture_error(plan: Plan, position: int) -> float:
    """Return the largest deviation from a source's share in the current schedule."""
    segment, _ = plan.serve_until(position + 1).segments[-1]
    counts = np.array(segment.schedule.counts)
    had = (segment.served(position) - segment.bases)[segment.sources]
    return float(np.abs(had - (position - segment.position) * counts / counts.sum()).max())


def memory(size: Size) -> None:
    """Measure the memory of a plan after complete steps of 1, 100 and all sources."""
    print("Memory of a plan's own (traced), after a whole step of 16,384 sequences")
    for sources in (1, 100, size.sources):
        few = Size(sources=sources, pool=65_536 if sources == 1 else 8_192)
        tracemalloc.start()
        plan = plan_of(few, Drawn)
        for step in range(2):
            plan.rows(*plan.positions_of(200 * step))
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"  {sources:4} sources: {held / MIB:6.0f} MiB, at most {peak / MIB:.0f}")


class Covered:
    """Number of times each token of each source was served."""

    def __init__(self, plan: Plan) -> None:
        lengths = [s.lengths.take(np.arange(s.lengths.size)) for s in plan.stores.values()]
        self.sizes = [int(own.sum()) + 1 for own in lengths]
        self.first = np.cumsum([0, *(own.size for own in lengths)])
        ends = [np.cumsum(own.astype(np.int64)) - own for own in lengths]
        begins = np.cumsum([0, *self.sizes])
        self.begins = np.concatenate([own + at for own, at in zip(ends, begins, strict=False)])
        self.changes = np.zeros(begins[-1], np.int32)

    def add(self, rows: "Rows") -> None:
        first = self.begins[self.first[rows.sources] + rows.documents] + rows.starts
        np.add.at(self.changes, first, 1)
        np.add.at(self.changes, first + rows.lengths, -1)

    def uneven(self) -> int:
        """Return the largest difference in passes between tokens of a source."""
        ends = np.cumsum(self.sizes)
        parts = np.split(self.changes, ends[:-1])
        return max(int(np.ptp(np.cumsum(part)[:-1])) for part in parts)


def disturbed(size: Size) -> Iterator[tuple["Rows", np.ndarray]]:
    """Yield rows and positions of every rank at every step.

    Each world resumes from the state of the previous one.
    """
    edits, plan = size.edits(), plan_of(size, Drawn)
    for step in range(size.steps()):
        if edits and edits[0].step == step:
            plan = plan.edited(edits.pop(0))
        if step % size.resized == 0:
            position = plan.positions_of(step)[0]
            state = json.loads(json.dumps(plan.state(position)))
            plan = with_journal(plan_of(size, Drawn), state)
            assert plan.resume(state) == position
        for rank in range(size.world(step)):
            yield ranks_rows(plan, step, rank, size.world(step))


def exhaustive(scale: float) -> None:
    """Check coverage and shares at every position of a smaller run."""
    size = Size.of(scale)
    plan = plan_of(size, Drawn, size.edits())
    covered_tokens = Covered(plan)
    sources = np.full(plan.positions, -1)
    begin, asked = time.perf_counter(), 0
    for rows, positions in disturbed(size):
        kept = positions >= 0
        covered_tokens.add(rows)
        assert (sources[positions[kept]] < 0).all()
        sources[positions[kept]] = rows.sources[rows.pointers[:-1][kept]]
        asked += 1
    took = time.perf_counter() - begin
    skipped = np.flatnonzero(sources < 0)
    if skipped.size:
        rows = plan.rows(int(skipped[0]), int(skipped[-1]) + 1)
        covered_tokens.add(rows)
        sources[skipped] = rows.sources[rows.pointers[:-1]]
    uneven, off = covered_tokens.uneven(), worst_share(plan, sources)
    print(
        f"  scale {scale:g}: {size.steps():,} steps, {asked:,} answers to ranks, {len(sources):,} positions "
        f"({skipped.size:,} left out), {took:.0f} s\n  coverage: tokens of a source differ by at most {uneven} pass; "
        f"mixture error of every prefix at most {off:.6f} sequences"
    )
    assert uneven <= 1
    assert off < 1


def worst_share(plan: Plan, sources: np.ndarray) -> float:
    """Return the largest deviation from a share after any prefix of any schedule."""
    off = 0.0
    for segment, stop in plan.serve_until(plan.positions).segments:
        slots = np.array(segment.schedule.counts)
        share = np.arange(1, stop - segment.position + 1) / slots.sum()
        for local, number in enumerate(segment.sources.tolist()):
            had = np.cumsum(sources[segment.position : stop] == number)
            off = max(off, float(np.abs(had - share * slots[local]).max(initial=0)))
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=2e-6, help="of the run that is checked row by row")
    parser.add_argument("--only", choices=["near", "far", "memory", "exhaustive"])
    parser.add_argument(
        "--peers",
        action="store_true",
        help="accepted for `make bench`; none answers these questions",
    )
    options = parser.parse_args()
    size = Size()
    plan = plan_of(size, Drawn)
    order, times = plan.orders.order(3), []
    for pool in range(1000, 1040):
        begin = time.process_time()
        order.pools.rows(pool, 0)
        times.append(time.process_time() - begin)
    clock = Clock(median(times))
    documents = sum(store.lengths.size for store in plan.stores.values())
    print(
        f"{documents / 1e9:.1f}B documents, {sum(s.tokens for s in plan.stores.values()) / 1e12:.1f}T tokens in {size.sources} sources; "
        f"{size.steps():,} steps, {size.ranks:,} ranks; entering a pool takes {clock.entering * 1e3:.1f} ms"
    )
    if options.only in (None, "near"):
        near(size, clock)
    if options.only in (None, "far"):
        far(size, clock)
    if options.only in (None, "memory"):
        memory(size)
    if options.only in (None, "exhaustive"):
        print("Checked row by row")
        exhaustive(options.scale)


if __name__ == "__main__":
    main()
