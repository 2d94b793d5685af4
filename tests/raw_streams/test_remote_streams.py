"""Streams of inputs that lie elsewhere: an S3 server and a stand-in of the Hub, both on loopback."""

import json
import os
import subprocess
import sys

import pytest

from batchloom import InputError, Loader
from raw_streams.streams import rows_of, small_stream, texts
from sources.hub_server import hub_serving

CODE = """
import json, sys
import batchloom
stream = batchloom.stream(
    sys.argv[1], tokenizer="bytes", seq_len=32, global_batch_size=8, steps=6, workers=int(sys.argv[2])
)
rows = [batch["input_ids"].tolist() for batch in batchloom.Loader(stream, output="numpy")]
print("\\n@" + json.dumps(rows))
"""


def jsonl(count, seed=0):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts(count, seed)).encode()


@pytest.fixture
def bucket(s3):
    for number in range(3):
        s3.put_object(Bucket="bucket", Key=f"stream/{number}.jsonl", Body=jsonl(150, number))
    return "s3://bucket/stream/"


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_bucket_is_streamed_as_files_are(tmp_path, bucket, workers):
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(jsonl(150, number))
    far = small_stream(bucket, workers=workers)
    found = rows_of(far, 2)
    assert found == rows_of(small_stream(tmp_path))
    loader = Loader(far, output="numpy", prefetch=0)
    state = next(loader.state_dict() for batch in loader if batch.step == 5)
    rest = rows_of(small_stream(bucket), state=state)
    assert rest == {place: row for place, row in found.items() if place[0] > 5}


def test_an_object_that_changes_is_told(s3, bucket):
    stream = small_stream(bucket, lanes=1, steps=400)
    batches = iter(Loader(stream, output="numpy", prefetch=0))
    next(batches)
    s3.put_object(Bucket="bucket", Key="stream/1.jsonl", Body=jsonl(90, 7))
    with pytest.raises(InputError, match=r"1\.jsonl"):
        list(batches)


def test_a_data_set_of_the_hub_is_streamed(tmp_path):
    with hub_serving({"org/data": {"train.jsonl": jsonl(300)}}) as server:
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path / "home"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        found = []
        for workers in ("0", "2"):
            done = subprocess.run(
                [sys.executable, "-c", CODE, "org/data", workers],
                env=environment,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            found.append(json.loads(done.stdout.split("\n@")[1]))
    assert found[0] == found[1]
    assert len(found[0]) == 6
