"""Bad records are sorted in input order, in bounded memory."""

import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given, strategies as st

from batchloom.core.document import BadRecord
from batchloom.preparation import DedupRecipe
from batchloom.preparation.units import UnitFiles, unit_files
from batchloom.preparation.units.unit_files import sort_bad_records
from batchloom.preparation.units.work_folder import BAD_NAME


def encode_line(part, record, reason=""):
    return msgspec.json.encode((part, BadRecord(record, 0, None, reason, "x" * 40))) + b"\n"


@given(
    positions=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60),
    run=st.integers(1, 2000),
    block=st.integers(1, 400),
)
def test_any_runs_give_the_same_order(tmp_path_factory, positions, run, block):
    path = tmp_path_factory.mktemp("bad") / "bad.jsonl"
    lines = [encode_line(*position, f"number {n}") for n, position in enumerate(positions)]
    path.write_bytes(b"".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_files, "_RUN_BYTES", run)
        patch.setattr(unit_files, "_BLOCK_BYTES", block)
        sort_bad_records(path)
    expected = sorted(zip(positions, lines, strict=True), key=lambda pair: pair[0])
    assert path.read_bytes() == b"".join(text for _, text in expected)
    assert [file.name for file in path.parent.iterdir()] == ["bad.jsonl"]


def test_a_unit_of_bad_records_alone_takes_no_more_memory(tmp_path):
    records = list(range(50_000))
    random.Random(0).shuffle(records)
    with UnitFiles(tmp_path, DedupRecipe(mode="none")) as files:
        for record in records:
            files.add_bad(0, [BadRecord(record, 0, None, "not valid JSON", "x" * 500)])
        tracemalloc.start()
        try:
            files.sync()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (tmp_path / BAD_NAME).stat().st_size > 24 << 20
    assert peak < 24 << 20
    with (tmp_path / BAD_NAME).open("rb") as file:
        assert [unit_files._record_position(text) for text in file] == [(0, n) for n in range(50_000)]
