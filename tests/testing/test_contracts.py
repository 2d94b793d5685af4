"""Contracts: they hold for shipped loaders and sources and detect each fault."""

import json
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchloom
from batchloom import Mixture, SettingsError
from batchloom.batches import Augment
from batchloom.sources import PartReader, ReadRules, RecordBounds, list_sources, split_source
from batchloom.testing import check_loader, check_source, write_store

SIZES = {"seq_len": 32, "global_batch_size": 12, "output": "numpy"}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(0, 256, rng.integers(1, 60)).tolist(), 256] for _ in range(80)]
    return write_store(tmp_path_factory.mktemp("store"), documents)


def make_factory(data, **options):
    return partial(batchloom.Loader, data, **{**SIZES, **options})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": "wrap", "form": "varlen", "prefetch": 0},
        {"balance": True, "labels": "shifted"},
        {"uneven": "pad", "micro_batch_size": 2, "packing": "none"},
        {"lanes": 4, "shuffle": False},
        {"align": 4, "form": "varlen"},
        {"augment": Augment(noise_prob=0.3)},
    ],
    ids=str,
)
def test_loaders(store, options):
    worlds = (1, 4, 5) if "uneven" in options else (1, 2, 4)
    # Noise changes tokens, so that rows do not equal the documents.
    documents = None if "augment" in options else store
    check_loader(make_factory(store, epochs=2, **options), documents=documents, epochs=2, worlds=worlds)


def test_tokens_announced_as_left_out_are_not_missing(store):
    make = make_factory(store, overlong="drop")
    left_out = make(rank=0, world_size=1).plan.left_out().tokens
    assert left_out
    check_loader(make, documents=store, left_out=left_out)
    with pytest.raises(AssertionError, match="; 0 were announced as left out"):
        check_loader(make, documents=store)


@pytest.mark.parametrize("exhausted", ["stop", "redistribute"])
def test_mixtures_that_end_with_their_sources(store, exhausted):
    alone = Mixture(weights={"a": 1.0}, stores={"a": store}, exhausted=exhausted)
    check_loader(make_factory(alone), documents=store)
    mixture = Mixture(weights={"a": 1, "b": 2}, stores={"a": store, "b": store}, exhausted=exhausted)
    documents = store if exhausted == "redistribute" else None
    for lanes in (1, 4):
        check_loader(make_factory(mixture, lanes=lanes), documents=documents, epochs=2)


def test_a_stream_whose_states_belong_to_their_ranks(tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} {n} " * 9 for n in range(30)))
    sizes = {"seq_len": 32, "global_batch_size": 12, "steps": 6, "lanes": 4, "workers": 0}
    stream = batchloom.stream([tmp_path], tokenizer="bytes", **sizes)
    check_loader(partial(batchloom.Loader, stream, output="numpy"), worlds=(2,))


def test_pytorch_datasets(store):
    pytest.importorskip("torch")
    from batchloom.adapters.pytorch import LoaderDataset, LoaderIterable

    for dataset_class in (LoaderIterable, LoaderDataset):
        check_loader(
            lambda dataset_class=dataset_class, **world: dataset_class(make_factory(store)(**world)), documents=store
        )


@dataclass
class BrokenLoader:
    """Loader with one fault, or none."""

    store: object
    rank: int
    world_size: int
    fault: str = ""
    step: int = 0
    loader: object = field(init=False)

    def __post_init__(self):
        self.loader = make_factory(self.store)(rank=self.rank, world_size=self.world_size)
        self.steps = len(self.loader)
        if self.fault == "uneven end" and self.rank:
            self.steps -= 1

    def __len__(self):
        return self.steps + (self.fault == "wrong length")

    def __iter__(self):
        while self.step < self.steps:
            batch = self.loader.batch(self.step)
            if self.fault == "other rows" and self.world_size > 1 and self.step == 2:
                batch = self.loader.batch(3)
            if self.fault == "lost document" and self.step == 1:
                batch["input_ids"][:, :8] = 256
            if self.fault == "moved token" and self.step == 1 and not self.rank:
                batch["input_ids"][0] = batch["input_ids"][0][::-1]
            if self.fault == "other labels" and self.world_size > 1:
                batch["labels"][0, 1:4] = -100
            self.spoil(batch)
            if self.fault == "shape" and self.rank:
                batch = {name: array[1:] for name, array in batch.items()}
            self.step += 1
            yield batch

    def spoil(self, batch):
        """Apply the faults of labels that are the same for every world size."""
        labels, ids, positions = (batch[name] for name in ("labels", "input_ids", "position_ids"))
        is_first = positions == 0
        if self.fault == "every id":
            labels[:] = ids
        if self.fault == "no first":
            labels[is_first] = ids[is_first]
        if self.fault == "padding":
            padding = (labels == -100) & ~is_first
            labels[padding] = ids[padding]
        if self.fault == "nothing":
            labels[:] = -100
        if self.fault == "constant":
            labels[~is_first] = 7
        if self.fault == "one label":
            labels[:, 5] = -100
        if self.fault == "mask":
            labels[~is_first] = ids[~is_first]

    def state_dict(self):
        step = self.step - (self.fault == "one late" and self.step > 0)
        return {"step": np.int64(step) if self.fault == "no JSON" else step}

    def load_state_dict(self, state):
        self.step = state["step"] + (self.fault == "skips" and state["step"] == 3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("uneven end", r"Rank 1 of 2 has \d+ steps and rank 0 has \d+: a collective"),
        ("wrong length", r"len of rank 0 of 1 is \d+, and it gives \d+ steps"),
        ("other rows", r"Step 2 over 2 ranks does not hold the same rows as over 1"),
        ("other labels", r"Step 0 over 2 ranks does not hold the same rows"),
        ("shape", r"Step 0 has batches of different shapes on 2 ranks"),
        (
            "one late",
            r"From the state of step 1 2 ranks read \[\d+\] more steps, and \d+ remain",
        ),
        ("skips", r"From the state of step 3"),
        ("no JSON", r"The state of step 0 is not plain JSON"),
        ("lost document", r"tokens are missing and .* not served completely .*: \["),
        ("every id", r"Labels are neither the ids .* nor the next ids"),
        ("no first", r"Labels are neither the ids .* nor the next ids"),
        ("padding", r"[1-9]\d* tokens have a label and are padding or masked"),
        ("nothing", r"0 tokens have a label .*, and \d,\d+ trained tokens have none"),
        ("constant", r"Labels are neither the ids .* have labels \[-100, 7, 7"),
        ("one label", r"0 tokens have a label .*, and \d+ trained tokens have none"),
        ("moved token", r"pairs of tokens are adjacent that are adjacent in no document"),
    ],
)
def test_broken_loaders(store, fault, message):
    check_loader(partial(BrokenLoader, store), documents=store)
    with pytest.raises(AssertionError, match=message):
        check_loader(partial(BrokenLoader, store, fault=fault), documents=store)


def test_labels_are_those_of_the_masks(tmp_path):
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 250, rng.integers(1, 60)).tolist() for _ in range(150)]
    trained = [(rng.random(len(document)) < 0.4).tolist() for document in documents]
    store = write_store(tmp_path / "s", documents, trained=trained)
    for options in ({}, {"labels": "shifted", "form": "varlen", "align": 4}):
        check_loader(make_factory(store, **options), documents=store)
    for fault in ("mask", "nothing"):
        with pytest.raises(AssertionError, match="tokens have a label and are padding or masked"):
            check_loader(partial(BrokenLoader, store, fault=fault), documents=store)


def test_what_is_nothing_is_no_loader_that_holds(store):
    with pytest.raises(AssertionError, match="gives no batch, so nothing can be checked"):
        check_loader(lambda **_: iter(()))
    for worlds in ((), (0,), (1, -1), (1.0,)):
        with pytest.raises(SettingsError, match="worlds: .* are not numbers of ranks"):
            check_loader(make_factory(store), worlds=worlds)


def test_a_loader_that_cannot_go_on(store):
    with pytest.raises(AssertionError, match=r"no load_state_dict and no loader\[step\]"):
        check_loader(lambda **world: iter(list(make_factory(store)(**world))))
    batches = list(make_factory(store)(rank=0, world_size=1))
    shifted = dict(enumerate(batches[1:])) | {len(batches) - 1: batches[0]}

    class Shifted(list):
        def __getitem__(self, step):
            return shifted[step]

    with pytest.raises(AssertionError, match=r"loader\[\d+\] of rank 0 does not hold the same rows"):
        check_loader(lambda **_: Shifted(batches), worlds=(1,))


ROWS = [{"text": f'Row {n} says, "{"word " * (n % 5)}"\n' + "äö" * (n % 3)} for n in range(20)]


def write_rows(path):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" * (1 + n % 2) for n, row in enumerate(ROWS)))
        with path.open("a") as file:
            file.write('{"text": 7}\nno json\n{"text": "last"}')
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, ensure_ascii=False, indent=1))
    elif path.suffix == ".csv":
        quoted = [row["text"].replace('"', '""') for row in ROWS]
        path.write_text("id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(quoted)))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        path.write_text("\n\n".join(row["text"] for row in ROWS))
    return path


@dataclass
class PartRecords:
    """Records of one part, read on iteration."""

    part: object
    rules: ReadRules

    def __iter__(self):
        with PartReader(self.part, self.rules, RecordBounds(self.rules)) as reader:
            yield from reader


def make_split(path, rules):
    (source,) = list_sources([str(path)]).sources
    return lambda unit: [PartRecords(part, rules) for part in split_source(source, rules, unit)]


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("rows.jsonl", {"text_field": "text"}),
        pytest.param("rows.json", {"text_field": "text"}, marks=pytest.mark.slow),
        ("rows.csv", {"text_field": "text"}),
        pytest.param("rows.parquet", {"text_field": "text"}, marks=pytest.mark.slow),
        ("rows.txt", {"split_on": "line"}),
        ("rows.txt", {"split_on": "paragraph"}),
        ("rows.txt", {"split_on": "word"}),
        ("rows.txt", {}),
    ],
)
def test_sources(tmp_path, name, rules):
    path = write_rows(tmp_path / name)
    check_source(make_split(path, ReadRules(**rules)), size=path.stat().st_size)


LINES = b"".join(b"line %d\n" % n for n in range(30))


@dataclass
class LineRange:
    """Lines of a byte range, with one fault, or none."""

    start: int
    stop: int
    fault: str
    values: list = field(default_factory=list)
    records: list = field(default_factory=list)
    offsets: list = field(default_factory=list)
    bad: tuple = ()
    records_read: int = 0

    def __iter__(self):
        begin = 0 if not self.start else LINES.find(b"\n", self.start - 1) + 1
        if self.fault == "cuts a line":
            begin = self.start
        while begin < self.stop:
            end = LINES.index(b"\n", begin) + 1
            if self.fault == "loses what crosses" and end > self.stop:
                break
            self.values.append(LINES[begin:end])
            self.records.append(self.records_read)
            self.offsets.append(begin - (self.start if self.fault == "counts from the part" else 0))
            self.records_read += self.fault != "one number"
            begin = end
        if self.fault == "no offsets":
            self.offsets.clear()
        if self.fault == "one number":
            self.records_read = len(self.values)
        yield self


READ_NUMBERS = iter(range(10**6))


def make_ranges(fault, unit):
    if fault == "other each time" and next(READ_NUMBERS) % 2:
        return [LineRange(0, len(LINES) - 8, "")]
    return [LineRange(a, min(a + unit, len(LINES)), fault) for a in range(0, len(LINES), unit)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cuts a line", r"in parts of 1 bytes 230; the first that differs is \(record 1, byte 7\)"),
        ("loses what crosses", r"gives 30 records and in parts of 1 bytes 0; .* bytes nothing"),
        ("counts from the part", r"record \d+ is at byte \d+ and record|the first that differs"),
        ("no offsets", r"30 values have 30 record numbers and 0 offsets"),
        ("one number", r"two records have the number 0"),
        ("other each time", r"gives 30 records and read again 29"),
    ],
)
def test_broken_sources(fault, message):
    check_source(partial(make_ranges, ""), size=len(LINES))
    with pytest.raises(AssertionError, match=message):
        check_source(partial(make_ranges, fault), size=len(LINES))


def test_an_input_without_records():
    with pytest.raises(AssertionError, match="gives no record"):
        check_source(lambda _: [], size=10)
