"""Streams over small inputs, and the sequences they yield."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchloom import Loader, Recipe
from batchloom.plan import PlanSpec
from batchloom.preparation import DedupRecipe, RunSettings
from batchloom.sources import ReadLimits
from batchloom.streaming import Stream, StreamSettings

STEPS = 12
LIMITS = ReadLimits(
    record_bytes=1 << 16,
    whole_text_bytes=2048,
    document_bytes=256,
    reach_bytes=512,
    chunk_bytes=1024,
)


def make_texts(count: int, seed: int = 0, words: int = 40) -> list[str]:
    rng = random.Random(seed)
    return [f"text {n} of {seed}: " + "word " * rng.randint(1, words) for n in range(count)]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_texts(path: Path, count: int, seed: int = 0, words: int = 40) -> Path:
    return write_lines(path, [{"text": text} for text in make_texts(count, seed, words)])


def write_table(rows: list[str], folder: Path) -> Path:
    pq.write_table(pa.table({"text": rows}), folder / "rows.parquet", row_group_size=7)
    return folder / "rows.parquet"


def make_small_stream(*inputs, unit_bytes=4096, workers=0, keep=None, recipe=None, **plan_settings) -> Stream:
    """Open a stream of small units, so that few texts form many units."""
    recipe = recipe or Recipe(inputs=("-",), tokenizer="bytes", dedup=DedupRecipe(mode="none"))
    plan = {
        "seq_len": 32,
        "global_batch_size": 8,
        "steps": STEPS,
        "pool_size": 16,
        "seed": 3,
        **plan_settings,
    }
    run = RunSettings(unit_bytes=unit_bytes, limits=LIMITS)
    lanes, overlong = plan.pop("lanes", None), plan.pop("overlong", None)
    settings = StreamSettings(
        spec=PlanSpec(overlong=overlong or "split", **plan),
        choose_overlong=overlong is None,
        lanes=lanes,
        workers=workers,
        keep=keep,
        run=run,
    )
    return Stream(replace(recipe, inputs=tuple(map(str, inputs))), settings)


def collect_rows(stream: Stream, world: int = 1, state=None, ranks=None) -> dict:
    """Map (step, row) to the ids, labels and positions of every row of some or all ranks."""
    rows = {}
    for rank in range(world) if ranks is None else ranks:
        loader = Loader(stream, rank=rank, world_size=world, output="numpy", prefetch=0)
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            for row in range(len(batch["input_ids"])):
                position = batch.step, row * world + rank
                rows[position] = tuple(batch[key][row].tolist() for key in sorted(batch))
    return rows
