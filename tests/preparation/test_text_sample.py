"""The sample for training a tokenizer: bounded, spread and reproducible."""

import gzip
import json
import os

from batchloom.preparation import Recipe, sample_texts
from batchloom.preparation.documents import RecordParsers
from batchloom.sources import ReadLimits, list_sources


def sample(path, max_bytes, probe_bytes):
    sources = list_sources([str(path)]).sources
    record_parsers = RecordParsers(Recipe(inputs=(str(path),)), ReadLimits())
    return sample_texts(sources, record_parsers, normalized=True, most=max_bytes, probe=probe_bytes)


def test_a_small_input_is_taken_completely(tmp_path):
    (tmp_path / "a.txt").write_text("cafe\u0301")
    (tmp_path / "b.jsonl").write_text('{"text":"b"}\nbroken\n{"text":"c"}\n')
    assert sample(tmp_path, 1000, 10) == ["café", "b", "c"]


def test_a_large_input_is_probed_all_over_and_never_beyond_the_size(tmp_path):
    lines = [json.dumps({"text": f"{i:06d} " + "x" * 90}) for i in range(20_000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    texts = sample(tmp_path, 50_000, 2000)
    assert 25_000 <= sum(map(len, texts)) <= 50_000
    numbers = [int(text[:6]) for text in texts if len(text) > 6]
    assert numbers == sorted(set(numbers))
    tenths = {number // 2000 for number in numbers}
    assert tenths == set(range(10))
    assert sample(tmp_path, 50_000, 2000) == texts


def test_compressed_files_and_single_documents_are_sampled_at_their_beginning(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(os.urandom(30_000).hex().encode()))
    (tmp_path / "b.py").write_text("y" * 40_000)
    texts = sample(tmp_path, 10_000, 1000)
    assert sum(map(len, texts)) <= 10_000
    assert any(set(text) == {"y"} for text in texts)
    assert any(set(text) <= set("0123456789abcdef") for text in texts)


def test_records_larger_than_a_probe_are_still_seen(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "z" * 50_000}) for _ in range(5)))
    texts = sample(tmp_path, 10_000, 100)
    assert sum(map(len, texts)) == 10_000
