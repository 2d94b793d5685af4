"""Streams of remote inputs: an S3 server and a Hub stand-in, both on loopback."""

import json
import os
import subprocess
import sys

import pytest

from batchloom import InputError, Loader
from raw_streams.streams import collect_rows, make_small_stream, make_texts
from sources.hub_server import serve_hub

STREAM_SCRIPT = """
import json, sys
import batchloom
stream = batchloom.stream(
    sys.argv[1], tokenizer="bytes", seq_len=32, global_batch_size=8, steps=6, workers=int(sys.argv[2])
)
rows = [batch["input_ids"].tolist() for batch in batchloom.Loader(stream, output="numpy")]
print("\\n@" + json.dumps(rows))
"""


def encode_lines(count, seed=0):
    return "".join(json.dumps({"text": text}) + "\n" for text in make_texts(count, seed)).encode()


@pytest.fixture
def bucket(s3):
    for number in range(3):
        s3.put_object(Bucket="bucket", Key=f"stream/{number}.jsonl", Body=encode_lines(150, number))
    return "s3://bucket/stream/"


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_bucket_is_streamed_like_local_files(tmp_path, bucket, workers):
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(encode_lines(150, number))
    remote = make_small_stream(bucket, workers=workers)
    rows = collect_rows(remote, 2)
    assert rows == collect_rows(make_small_stream(tmp_path))
    loader = Loader(remote, output="numpy", prefetch=0)
    state = next(loader.state_dict() for batch in loader if batch.step == 5)
    resumed = collect_rows(make_small_stream(bucket), state=state)
    assert resumed == {position: row for position, row in rows.items() if position[0] > 5}


def test_a_changed_object_is_reported(s3, bucket):
    stream = make_small_stream(bucket, lanes=1, steps=400)
    batches = iter(Loader(stream, output="numpy", prefetch=0))
    next(batches)
    s3.put_object(Bucket="bucket", Key="stream/1.jsonl", Body=encode_lines(90, 7))
    with pytest.raises(InputError, match=r"1\.jsonl"):
        list(batches)


def test_a_hub_dataset_is_streamed(tmp_path):
    with serve_hub({"org/data": {"train.jsonl": encode_lines(300)}}) as server:
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        batches = []
        for workers in ("0", "2"):
            process = subprocess.run(
                [sys.executable, "-c", STREAM_SCRIPT, "org/data", workers],
                env=environment,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert process.returncode == 0, process.stderr
            batches.append(json.loads(process.stdout.split("\n@")[1]))
    assert batches[0] == batches[1]
    assert len(batches[0]) == 6
