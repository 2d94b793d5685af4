"""Bad records are sorted in input order, with an index in memory."""

import random
import tracemalloc

import msgspec
from hypothesis import given, strategies as st

from batchloom.core.document import BadRecord
from batchloom.preparation import DedupRecipe
from batchloom.preparation.units.unit_files import UnitFiles, sort_bad_records
from batchloom.preparation.units.work_folder import BAD_NAME


def encode_line(part, record, reason=""):
    return msgspec.json.encode((part, BadRecord(record, 0, None, reason, "x" * 40))) + b"\n"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60))
def test_equal_positions_keep_their_order(tmp_path_factory, positions):
    path = tmp_path_factory.mktemp("bad") / "bad.jsonl"
    lines = [encode_line(*position, f"number {n}") for n, position in enumerate(positions)]
    path.write_bytes(b"".join(lines))
    sort_bad_records(path)
    expected = sorted(zip(positions, lines, strict=True), key=lambda pair: pair[0])
    assert path.read_bytes() == b"".join(text for _, text in expected)
    assert [file.name for file in path.parent.iterdir()] == ["bad.jsonl"]


def test_a_unit_of_bad_records_alone_takes_no_more_memory(tmp_path):
    records = list(range(8_000))
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
    assert (tmp_path / BAD_NAME).stat().st_size > 4 << 20
    assert peak < 4 << 20
    with (tmp_path / BAD_NAME).open("rb") as file:
        positions = [msgspec.json.decode(line, type=tuple[int, BadRecord]) for line in file]
    assert [(part, bad.record) for part, bad in positions] == [(0, n) for n in range(8_000)]
