"""Frameworks that divide the rows of a ``MultiModalIterableDataset`` serve each row once."""

import json
from collections import Counter
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from batchloom import DatasetConfig
from batchloom.compat import MultiModalIterableDataset
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_messages
from processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
WORKER = Path(__file__).with_name("divided_rows_worker.py")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Config of 72 conversations, a row each, and the store's folder."""
    folder = tmp_path_factory.mktemp("divided")
    save_processor(PROCESSORS["qwen2_vl"](), folder / "processor")
    texts = [{"messages": make_messages(f"What is {n}?", f"{n} is a number.")} for n in range(72)]
    (folder / "texts.json").write_text(json.dumps(texts))
    lines = [
        f"datasets: [{{path: {folder / 'texts.json'}, type: text}}]",
        f"dataset_type: vision\nprocessor_config: {{processor_name: {folder / 'processor'}}}",
        "packing: false\nmax_length: 128",
    ]
    (folder / "config.yaml").write_text("\n".join(lines))
    dataset = MultiModalIterableDataset(DatasetConfig.load(folder / "config.yaml"), out=folder / "store")
    dataset.build()
    rows = [tuple(row["input_ids"].tolist()) for row in dataset]
    assert len(set(rows)) == len(rows) == 72
    return folder / "config.yaml", folder / "store", rows


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("framework", ["accelerate", "trainer"])
def test_each_row_is_served_once(config, framework, ranks, workers):
    path, out, rows = config
    results = run_ranks(WORKER, path, out, framework, workers, ranks=ranks)
    served, steps = Counter(), set()
    for result in results:
        assert result.returncode == 0, result.stderr[-4000:]
        [line] = [line for line in result.stdout.splitlines() if line.startswith("rows ")]
        count, read = json.loads(line.removeprefix("rows "))
        steps.add(count)
        served.update(tuple(token for token in row) for row in read)
    assert served == Counter(dict.fromkeys(rows, 1))
    assert steps == {72 // (2 * ranks)}


def test_a_plain_dataloader_serves_this_ranks_rows(config):
    path, out, rows = config
    datasets = [
        MultiModalIterableDataset(DatasetConfig.load(path), out=out, batch_size=2, rank=rank, world_size=2)
        for rank in range(2)
    ]
    for dataset in datasets:
        dataset.build()
    served = [tuple(row) for one in datasets for row in (r["input_ids"].tolist() for r in one)]
    assert sorted(served) == sorted(rows)
    assert len(DataLoader(datasets[0], batch_size=2, collate_fn=datasets[0].get_collator())) == 18
