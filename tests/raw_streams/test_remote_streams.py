"""Streams of remote inputs: an S3 server and a Hub stand-in, both on loopback."""

import json
import os
import subprocess
import sys

import pytest

from batchloom import InputError, Loader
from raw_streams.stream_from_hub import read_rows
from raw_streams.streams import collect_rows, make_small_stream, make_texts
from sources.hub_server import serve_hub


def encode_lines(count, seed=0):
    return "".join(json.dumps({"text": text}) + "\n" for text in make_texts(count, seed)).encode()


@pytest.fixture
def bucket(s3):
    for number in range(3):
        s3.put_object(Bucket="bucket", Key=f"stream/{number}.jsonl", Body=encode_lines(150, number))
    return "s3://bucket/stream/"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
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


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_hub_dataset_is_streamed(tmp_path, workers):
    (tmp_path / "train.jsonl").write_bytes(encode_lines(100))
    with serve_hub({"org/data": {"train.jsonl": encode_lines(100)}}) as server:
        # The Hub's library reads these variables when it is imported.
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", "raw_streams.stream_from_hub", "org/data", workers]
        streamed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert streamed.returncode == 0, streamed.stderr
    local = read_rows(tmp_path / "train.jsonl", workers=0)
    assert json.loads(streamed.stdout.split("\n@")[1]) == local
    assert len(local) == 6
