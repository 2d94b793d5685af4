"""Print the rows of a stream.

``python -m raw_streams.stream_from_hub INPUT WORKERS``
"""

import json
import sys

import batchloom


def read_rows(source, workers):
    """Return the token ids of six steps."""
    plan = {"seq_len": 32, "global_batch_size": 8, "steps": 6}
    stream = batchloom.stream(source, tokenizer="bytes", workers=workers, **plan)
    return [batch["input_ids"].tolist() for batch in batchloom.Loader(stream, output="numpy")]


if __name__ == "__main__":
    print("\n@" + json.dumps(read_rows(sys.argv[1], int(sys.argv[2]))))
