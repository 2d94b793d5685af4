"""Loss weights of tokens in a store: written, read, verified, rewritten, exported and imported."""

import itertools
import re
import shutil
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.core.errors import StoreError
from batchloom.core.loss_weights import LossFlags
from batchloom.preparation import import_tokens
from batchloom.store import compact_store, export_store, open_store, remove_documents
from batchloom.store.format import ProvenanceTable
from batchloom.store.write import ShardWriter
from batchloom.testing import append_documents, write_store
from preparation.stores import write_jsonl
from store.remote_stores import copy_to_memory

# Weights that have codes, so that they are stored exactly.
WEIGHTS = np.array([0, 0.25, 0.5, 1, 1, 2, 10])


def make_documents(count=60, seed=0, weights=WEIGHTS):
    """Return documents and the weight of each token."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(97, 107, int(rng.integers(1, 40))).tolist() for _ in range(count)]
    return documents, [rng.choice(weights, len(ids)).tolist() for ids in documents]


def assert_weights(store, weights):
    """Compare the weights and flags of all documents, and of ranges of them."""
    assert len(store) == len(weights)
    for document, expected in zip(store, weights, strict=True):
        assert document.loss_weights.tolist() == expected
        assert document.mask.tolist() == [weight > 0 for weight in expected]
    numbers = np.arange(len(store))
    lengths = np.array(list(map(len, weights)))
    starts = np.minimum(lengths - 1, 3)
    flags = store.reader.flags(numbers, starts, lengths - starts)
    for start, part, expected in zip(starts.tolist(), flags, weights, strict=True):
        assert part.weights.tolist() == expected[start:]


@pytest.mark.parametrize("forms", list(itertools.product(["plain", "masked", "weighted", "rounded"], repeat=2)))
def test_flags_of_all_forms_agree_with_their_weights(forms):
    """Flags that hold no array answer like those that do."""
    parts = {
        "plain": LossFlags.all_trained(3),
        "masked": LossFlags.from_codes(np.array([True, False, True])),
        "weighted": LossFlags.from_weights(np.array([0, 0.5, 1])),
        "rounded": LossFlags.from_weights(np.array([2, 0.123, 0])),
    }
    joined = LossFlags.join(parts[form] for form in forms)
    weights = np.concatenate([parts[form].weights for form in forms])
    assert joined.is_plain == (set(forms) == {"plain"})
    assert joined.rounded == ("rounded" in forms)
    kept = np.array([True, False, False, True, True, False])
    results = {
        "all": (joined, weights),
        "slice": (joined[1:5], weights[1:5]),
        "end": (joined[4:99], weights[4:99]),
        "selection": (joined[kept], weights[kept]),
        "repeated": (joined.repeat(np.arange(6)), np.repeat(weights, np.arange(6))),
        "scaled": (joined.scale(0.5), weights * np.float32(0.5)),
    }
    for name, (flags, expected) in results.items():
        assert flags.size == expected.size, name
        assert np.allclose(flags.weights, expected), name
        assert flags.trained.tolist() == (expected > 0).tolist(), name
        assert flags.count_trained() == np.count_nonzero(expected), name
        assert flags.has_weights == (not set(expected.tolist()) <= {0, 1}), name
        assert sum(flags.count_weights().values()) == flags.count_trained(), name


@pytest.fixture
def weighted(tmp_path):
    """A store of three shards: with weights, only with a mask, and without either."""
    documents, weights = make_documents()
    weights = [
        *weights[:20],
        *([float(weight > 0) for weight in row] for row in weights[20:40]),
        *([1.0] * len(row) for row in weights[40:]),
    ]
    return write_store(tmp_path / "s", documents, documents_per_shard=20, trained=weights), weights


def test_only_shards_with_weights_have_the_file(weighted):
    store, weights = weighted
    files = {path.name for path in (store.path / "train").iterdir()}
    assert {name for name in files if name.endswith((".mask", ".weights"))} == {
        "shard_00000.mask",
        "shard_00000.weights",
        "shard_00001.mask",
    }
    assert store.reader.weighted
    assert store.masked
    assert_weights(store, weights)
    tokens = sum(map(len, weights[:20]))
    data = (store.path / "train" / "shard_00000.weights").read_bytes()
    assert data[:8] == b"BLMWGHT\x00"
    header = np.frombuffer(data[8:32], "<u8").tolist()
    assert header == [1, tokens, sum(weight > 0 for row in weights[:20] for weight in row)]
    codes = np.frombuffer(data[32:], np.uint8)
    assert np.array_equal(codes, LossFlags.from_weights(np.concatenate(weights[:20])).codes)
    assert not batchloom.check(store.path).faults


def test_a_shard_may_have_weights_and_no_mask(tmp_path):
    documents, weights = make_documents(weights=WEIGHTS[1:])
    store = write_store(tmp_path / "s", documents, trained=weights)
    assert not (tmp_path / "s" / "train" / "shard_00000.mask").exists()
    assert store.reader.weighted
    assert not store.masked
    assert_weights(store, weights)
    assert not batchloom.check(tmp_path / "s").faults


def test_weights_change_the_fingerprint(tmp_path, weighted):
    store, weights = weighted
    documents = [document.ids.tolist() for document in store]
    masks = [[float(weight > 0) for weight in row] for row in weights]
    masked = write_store(tmp_path / "masked", documents, documents_per_shard=20, trained=masks)
    assert not masked.reader.weighted
    assert masked.fingerprint != store.fingerprint


@pytest.mark.parametrize("verify", ["off", "first-read", "full"])
def test_weights_are_read_with_verification(weighted, verify):
    store, weights = weighted
    assert_weights(open_store(store.path, verify=verify), weights)


def test_remote_weights(weighted, tmp_path, monkeypatch):
    store, weights = weighted
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "cache"))
    assert_weights(open_store(copy_to_memory(store.path, "weighted")), weights)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: data[:-1], "declares .* tokens in"),
        (lambda data: b"BLMMASK\x00" + data[8:], "is not a .weights file of version 1"),
        (lambda data: data[:8] + b"\x02" + data[9:], "is not a .weights file of version 1"),
        (lambda data: data[:16] + b"\x00" + data[17:], "declares .* tokens in"),
        (lambda data: data[:10], "is cut short"),
        (lambda data: data[:32] + bytes([data[32] ^ 64]) + data[33:], "checksum differs"),
        (None, "shard_00000.weights"),
    ],
)
def test_damaged_weights(weighted, damage, fault):
    store, _ = weighted
    path = store.path / "train" / "shard_00000.weights"
    data = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage(data))
    assert any(re.search(fault, text) for text in batchloom.check(store.path).faults)
    with pytest.raises(StoreError):
        open_store(store.path, verify="first-read")[0].loss_weights  # noqa: B018 - reading it raises


def test_weights_that_contradict_the_mask_are_a_fault(weighted):
    store, _ = weighted
    path = store.path / "train" / "shard_00000.weights"
    data = bytearray(path.read_bytes())
    data[32] = 0 if data[32] else 1
    path.write_bytes(data)
    faults = batchloom.check(store.path).faults
    assert any(fault.endswith("its weights of 0 are not the untrained tokens of the shard.") for fault in faults)


def test_an_unlisted_file_of_weights_is_a_fault(weighted):
    store, _ = weighted
    folder = store.path / "train"
    shutil.copy(folder / "shard_00000.weights", folder / "shard_00002.weights")
    assert any("the manifest does not list it" in fault for fault in batchloom.check(store.path).faults)


def test_removal_compaction_and_append(weighted, tmp_path):
    store, weights = weighted
    documents, more = make_documents(10, seed=1)
    weights += more
    append_documents(store.path, documents, trained=more)
    assert_weights(open_store(store.path), weights)
    removed = [3, 25, 62]
    (tmp_path / "list.txt").write_text("".join(f"train:{number}\n" for number in removed))
    remove_documents(store.path, documents_file=tmp_path / "list.txt")
    served = [[0.0] * len(row) if number in removed else row for number, row in enumerate(weights)]
    store = open_store(store.path)
    assert [store[number].loss_weights.tolist() for number in range(len(store))] == served
    compact_store(store.path)
    assert_weights(open_store(store.path), [row for number, row in enumerate(weights) if number not in removed])
    assert not batchloom.check(store.path).faults


@pytest.mark.parametrize("mode", ["link", "copy"])
@pytest.mark.parametrize("merge", [None, "all"])
def test_megatron_prefixes_keep_weights(weighted, tmp_path, mode, merge):
    store, weights = weighted
    report = export_store(store.path, to="megatron", out=tmp_path / "m", merge=merge)
    assert any(".weights files say which" in note for note in report.notes)
    first = tmp_path / "m" / (merge or "shard_00000")
    prefix = open_store(first)
    assert prefix.reader.weighted
    expected = weights if merge else weights[:20]
    assert_weights(prefix, expected)
    plain = open_store(shutil.copytree(tmp_path / "m", tmp_path / "n") / first.name)
    assert plain.fingerprint == prefix.fingerprint
    (tmp_path / "n" / f"{first.name}.weights").unlink()
    assert open_store(tmp_path / "n" / first.name).fingerprint != prefix.fingerprint
    import_tokens(tmp_path / "m", out=tmp_path / "again", tokenizer="bytes", how=mode, val_fraction=0)
    assert_weights(open_store(tmp_path / "again"), weights)
    assert not batchloom.check(tmp_path / "again").faults
    codes = bytearray((tmp_path / "m" / f"{first.name}.weights").read_bytes())
    codes[32:] = bytes([1] * (len(codes) - 32))
    (tmp_path / "m" / f"{first.name}.weights").write_bytes(codes)
    with pytest.raises(StoreError, match="tokens are trained: it is damaged. Export it again"):
        import_tokens(tmp_path / "m", out=tmp_path / "bad", tokenizer="bytes")


def test_a_flat_file_keeps_weights(tmp_path):
    documents, weights = make_documents()
    documents = [[*ids, 256] for ids in documents]
    weights = [[*row, 0.5] for row in weights]
    store = write_store(tmp_path / "s", documents, trained=weights)
    export_store(store.path, to="flat", out=tmp_path / "f")
    import_tokens(tmp_path / "f" / "train.bin", out=tmp_path / "again", tokenizer="bytes", val_fraction=0)
    assert_weights(open_store(tmp_path / "again"), weights)


def test_tables_have_a_column_of_weights_and_are_read_back(weighted, tmp_path):
    store, weights = weighted
    export_store(store.path, to="parquet", out=tmp_path / "p")
    tables = [pq.read_table(path) for path in sorted((tmp_path / "p").glob("*.parquet"))]
    rows = [row for table in tables for row in table.column("loss_weights").to_pylist()]
    assert rows == weights
    masks = [row for table in tables for row in table.column("loss_mask").to_pylist()]
    assert masks == [[int(weight > 0) for weight in row] for row in weights]
    batchloom.prepare(tmp_path / "p", out=tmp_path / "again", tokenizer="bytes", val_fraction=0, dedup="none")
    again = open_store(tmp_path / "again")
    kept = [row for row in weights if any(row)]
    assert sorted(document.loss_weights.tolist() for document in again) == sorted(kept)
    datasets = pytest.importorskip("datasets")
    export_store(store.path, to="hf", out=tmp_path / "h")
    assert datasets.load_from_disk(str(tmp_path / "h"))["loss_weights"][:] == weights


@pytest.mark.parametrize("workers", [1, 2])
def test_prepared_weights_do_not_depend_on_workers_and_subsets(tmp_path, workers):
    documents, weights = make_documents(200)
    table = {"input_ids": documents, "loss_scale": weights}
    pq.write_table(pa.table(table), tmp_path / "in.parquet")
    batchloom.prepare(
        tmp_path / "in.parquet",
        out=tmp_path / "s",
        tokenizer="bytes",
        val_fraction=0.2,
        tokens_per_shard=1000,
        workers=workers,
    )
    found = {}
    for split in ("train", "val"):
        for document in open_store(tmp_path / "s", split):
            found[tuple(document.ids.tolist())] = document.loss_weights.tolist()
    expected = {tuple(ids): row for ids, row in zip(documents, weights, strict=True) if any(row)}
    # Of equal documents the first stays.
    for ids, row in reversed(list(zip(documents, weights, strict=True))):
        if any(row):
            expected[tuple(ids)] = row
    assert found == expected
    assert not batchloom.check(tmp_path / "s").faults


RECORD_WEIGHTS = [1, 0.5, 0, 2, None]
# A record of each kind, and whether its first token is trained.
RECORDS = {
    "text": (lambda n: {"text": f"{n}  line\nline"}, True),
    "tokens": (lambda n: {"input_ids": [*f"{n} ids".encode()], "labels": [-100, *f"{n} ids".encode()[1:]]}, False),
    "segments": (lambda n: {"segments": [{"text": f"{n}", "label": False}, {"text": "yes", "label": True}]}, False),
    "conversation": (lambda n: {"prompt": f"{n}?", "completion": "yes"}, False),
}


@pytest.mark.parametrize("settings", [{}, {"clean": ["whitespace"], "dedup": "lines"}], ids=str)
@pytest.mark.parametrize("kind", RECORDS)
def test_every_kind_of_record_may_have_a_weight(tmp_path, kind, settings):
    """Weights stay with their texts when others are cleaned, dropped or reordered."""
    make_record, is_first_trained = RECORDS[kind]
    rows = [{**make_record(10 + n), "weight": RECORD_WEIGHTS[n % 5]} for n in range(50)]
    blank = [{"text": " ", "weight": 4}] if kind == "text" else []
    write_jsonl(tmp_path / "in.jsonl", [*blank, *rows, *rows[:7]])
    result = batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "s", tokenizer="bytes", val_fraction=0, **settings)
    assert result.counts.dropped["nothing to train"] >= 10
    documents = list(open_store(tmp_path / "s"))
    assert len(documents) == 40
    for document in documents:
        number = int(re.search(r"\d\d", document.text)[0]) - 10
        expected = np.float32(RECORD_WEIGHTS[number % 5] or 1)
        assert set(document.loss_weights[document.mask].tolist()) == {expected}
        assert document.mask[0] == is_first_trained
    assert not batchloom.check(tmp_path / "s").faults


def test_the_weights_of_a_csv_table(tmp_path):
    cells = ["1", "0.5", "", "2", "0"]
    (tmp_path / "in.csv").write_text("text,weight\n" + "".join(f"{n},{cells[n % 5]}\n" for n in range(10, 60)))
    batchloom.prepare(tmp_path / "in.csv", out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    for document in open_store(tmp_path / "s"):
        expected = float(cells[int(document.text[:2]) % 5] or 1)
        assert document.loss_weights.tolist() == [expected] * 3


def test_the_file_is_written_in_parts(tmp_path):
    """The first weight comes late, so the flags before it are copied from the mask."""
    writer = ShardWriter(tmp_path / "shard_00000", np.dtype("<u2"))
    parts = [
        LossFlags.all_trained(5),
        LossFlags.from_codes(np.array([True, False, True])),
        LossFlags.all_trained(6),
        LossFlags.from_codes(np.array([0, 1, 50, 200], np.uint8)),
        LossFlags.none_trained(13),
    ]
    for flags in parts:
        writer.append(np.arange(flags.size), flags)
    zeros = np.zeros(1, np.uint64)
    provenance = ProvenanceTable(np.zeros((1, 2), np.uint64), zeros, zeros, np.zeros(1, np.uint32))
    entry = writer.finish(np.array([sum(flags.size for flags in parts)], np.uint32), provenance)
    codes = LossFlags.join(parts).codes
    assert np.array_equal(np.frombuffer((tmp_path / "shard_00000.weights").read_bytes()[32:], np.uint8), codes)
    assert entry.trained == np.count_nonzero(codes)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == sorted(entry.checksums)


def test_joined_texts_and_segments_keep_weights_and_limits(tmp_path):
    rows = [{"prompt": f"{n}?", "completion": " Yes.", "weight": 0.5} for n in range(20)]
    write_jsonl(tmp_path / "in.jsonl", rows)
    prepare = partial(batchloom.prepare, tokenizer="bytes", val_fraction=0)
    document = open_store(prepare(tmp_path / "in.jsonl", out=tmp_path / "a", template="none").path)[3]
    assert document.trained_text == " Yes.<|endoftext|>"
    assert document.loss_weights.tolist() == [0, 0] + [0.5] * 6
    segments = [{"text": "x" * 10, "label": False}, {"text": "y", "label": True}]
    write_jsonl(tmp_path / "in.jsonl", [{"segments": segments}, {"segments": segments[1:]}])
    result = prepare(tmp_path / "in.jsonl", out=tmp_path / "b", max_tokens=10)
    assert [document.text for document in open_store(result.path)] == ["y"]


def test_inspect_and_explain_show_weights(tmp_path, capsys):
    weights = [[1, 0.5, 1, 0.5], [1, 1, 0, 1], [1, 2, 0.3, 1]]
    write_store(tmp_path / "s", [[1, 2, 3, 4]] * 3, trained=weights)
    inspection = batchloom.inspect(tmp_path / "s")
    assert inspection.loss_weights == {0.3: 1, 0.5: 2, 1.0: 7, 2.0: 1}
    plan = batchloom.Plan(open_store(tmp_path / "s"), batchloom.PlanSpec(seq_len=12, global_batch_size=1))
    (sequence,) = batchloom.explain(plan, 0)
    # No token predicts the first one of a document.
    spans = {span.document: (span.trained, span.loss_weights) for span in sequence.spans}
    assert spans == {0: (3, (0.5, 1.0)), 1: (2, ()), 2: (3, (0.3, 1.0, 2.0))}
    assert run_command_line(["inspect", str(tmp_path / "s")]) == 0
    assert (
        "first 11 trained tokens: mean 0.936; 0.3 (9.1%), 0.5 (18.2%), 1 (63.6%), 2 (9.1%)" in capsys.readouterr().out
    )
    settings = ["--seq-len", "12", "--global-batch-size", "1", "--step", "0"]
    assert run_command_line(["explain", str(tmp_path / "s"), *settings]) == 0
    output = capsys.readouterr().out
    assert "data document 2, all 4 tokens, loss weights 0.3, 1, 2" in output
    assert "data document 1, all 4 tokens, 2 trained" in output
    write_store(tmp_path / "plain", [[1, 2]] * 3)
    assert batchloom.inspect(tmp_path / "plain").loss_weights == {}
