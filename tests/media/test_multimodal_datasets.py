"""``MultiModalDataset`` and ``MultiModalIterableDataset`` give a loader's rows."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import batchloom
from batchloom import DatasetConfig, InputError, PlanError, SettingsError
from batchloom.compat import MultiModalDataset, MultiModalIterableDataset
from media.processors import PROCESSORS, save_processor
from media.sample_media import make_messages, write_images, write_sounds
from processes import start_processes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SEQ_LEN = 420


@pytest.fixture(
    scope="module",
    params=[
        "qwen2_vl",
        "qwen2_audio",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llava_next", "idefics3", "gemma3")),
    ],
)
def config(request, tmp_path_factory):
    """Config of conversations with media and of texts, and the store's folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return make_config(request.param, folder), folder / "store"


def make_config(name, folder, **overrides):
    save_processor(PROCESSORS[name](), folder / "processor")
    write_source = write_sounds if name == "qwen2_audio" else write_images
    source = write_source(folder / "in", 6)
    texts = [{"messages": make_messages(f"What is {n}?", f"{n} is a number. " * 9)} for n in range(24)]
    (folder / "texts.json").write_text(json.dumps(texts))
    media_type = "vision_audio" if name == "qwen2_audio" else "vision"
    return DatasetConfig(
        datasets=[{"path": str(source)}, {"path": str(folder / "texts.json"), "type": "text"}],
        **{
            "dataset_type": media_type,
            "processor_config": {"processor_name": str(folder / "processor")},
            "packing": True,
            "packing_length": SEQ_LEN,
            "packing_strategy": "best_fit",
            **overrides,
        },
    )


def build_dataset(dataset_class, config, **options):
    dataset_config, out = config
    dataset = dataset_class(dataset_config, out=out, **options)
    dataset.build()
    return dataset


def load_batches(config, rows, rank=0, world_size=1):
    store = batchloom.open_store(config[1])
    sizes = {"global_batch_size": rows * world_size, "rank": rank, "world_size": world_size}
    return list(batchloom.Loader(store, **sizes, **config[0].plan_settings()))


def assert_same_arrays(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def take_rows(batch, count):
    """Return the first ``count`` rows of a batch whose other rows are empty."""
    return {
        name: value[:, :count] if value.ndim == 3 and name == "position_ids" else value[:count]
        for name, value in batch.items()
        if name in ("input_ids", "labels", "position_ids", "token_type_ids")
    }


@pytest.mark.parametrize(("dataset_class", "workers"), [(MultiModalDataset, 0), (MultiModalIterableDataset, 2)])
def test_a_dataloader_gives_the_batches_of_a_loader(config, dataset_class, workers):
    options = {"batch_size": 2} if dataset_class is MultiModalIterableDataset else {}
    dataset = build_dataset(dataset_class, config, **options)
    dataloader = DataLoader(dataset, batch_size=2, collate_fn=dataset.get_collator(), num_workers=workers)
    actual, expected = list(dataloader), load_batches(config, 2)
    assert len(actual) == len(expected) == len(dataloader) > 2
    assert any("input_features" in batch or "pixel_values" in batch for batch in actual)
    for batch, loader_batch in zip(actual[:-1], expected, strict=False):
        assert_same_arrays(batch, loader_batch)
    last_rows = len(dataset) - 2 * (len(expected) - 1)
    assert_same_arrays(take_rows(actual[-1], last_rows), take_rows(expected[-1], last_rows))
    assert len(actual[-1]["input_ids"]) == last_rows


def test_both_classes_have_one_order_and_length(config):
    map_dataset, iterable_dataset = (
        build_dataset(MultiModalDataset, config),
        build_dataset(MultiModalIterableDataset, config),
    )
    assert len(map_dataset) == len(iterable_dataset) == sum(1 for _ in iterable_dataset)
    for mapped, streamed in zip(map_dataset, iterable_dataset, strict=True):
        assert_same_arrays(mapped, streamed)
    assert map_dataset.modality_length == iterable_dataset.modality_length
    seed = build_dataset(MultiModalDataset, config, seed=1)
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(map_dataset, seed, strict=False))


def test_lengths_say_which_rows_hold_media(config):
    dataset = build_dataset(MultiModalDataset, config)
    lengths = dataset.modality_length
    assert len(lengths) == len(dataset)
    assert all(lengths)
    assert min(lengths) < 0 < max(lengths)
    plan = batchloom.Loader(batchloom.open_store(config[1]), global_batch_size=1, **config[0].plan_settings()).plan
    for number, length in enumerate(lengths):
        row = dataset[number]
        assert (length > 0) == ("input_features" in row or "pixel_values" in row)
        assert abs(length) == int(plan.rows(number, number + 1).lengths.sum())
    assert torch.equal(dataset[-1]["input_ids"], dataset[len(dataset) - 1]["input_ids"])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return make_config("qwen2_vl", folder), folder / "store"


@pytest.mark.parametrize(("rows", "world", "workers"), [(1, 2, 0), (2, 2, 1), (1, 3, 0), (3, 2, 0)])
def test_ranks_have_the_rows_of_a_loader_and_as_many_each(qwen, rows, world, workers):
    datasets = [
        build_dataset(MultiModalIterableDataset, qwen, batch_size=rows, rank=rank, world_size=world)
        for rank in range(world)
    ]
    count = len(build_dataset(MultiModalDataset, qwen))
    assert {len(dataset) for dataset in datasets} == {len(list(datasets[0]))}
    assert len(datasets[0]) == -(-count // world) or count % (rows * world)
    full_steps = count // (rows * world)
    served_rows = []
    for rank, dataset in enumerate(datasets):
        dataloader = DataLoader(dataset, batch_size=rows, collate_fn=dataset.get_collator(), num_workers=workers)
        expected = load_batches(qwen, rows, rank, world)
        actual = list(dataloader)
        for batch, loader_batch in zip(actual[:full_steps], expected[:full_steps], strict=True):
            assert_same_arrays(batch, loader_batch)
        served_rows += [row.tobytes() for batch in actual for row in batch["input_ids"].numpy()]
        trained = [(batch["labels"] != -100).any(dim=1) for batch in actual[full_steps:]]
        # Of the last rows each rank has at most one without a document.
        assert sum(int((~rows_of).sum()) for rows_of in trained) <= 1
    mapped = [row["input_ids"].numpy().tobytes() for row in build_dataset(MultiModalDataset, qwen)]
    assert set(mapped) <= set(served_rows)
    assert len(served_rows) == world * len(datasets[0])


@pytest.mark.slow
def test_spawned_workers_give_the_same(qwen):
    dataset = build_dataset(MultiModalDataset, qwen)
    dataloader = DataLoader(
        dataset,
        batch_size=2,
        collate_fn=dataset.get_collator(),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    for batch, loader_batch in zip(dataloader, load_batches(qwen, 2)[:-1], strict=False):
        assert_same_arrays(batch, loader_batch)


def test_a_sampler_by_modality_takes_the_lengths(qwen):
    """LLaVA's and Hugging Face's samplers group rows by the sign of the length."""
    dataset = build_dataset(MultiModalDataset, qwen)
    lengths = np.array(dataset.modality_length)
    order = np.argsort(-lengths, kind="stable").tolist()
    dataloader = DataLoader(dataset, batch_size=1, sampler=order, collate_fn=dataset.get_collator())
    has_media = ["pixel_values" in batch for batch in dataloader]
    assert has_media == (lengths[order] > 0).tolist()


def test_arrays_of_numpy(qwen):
    dataset = build_dataset(MultiModalDataset, qwen, output="numpy")
    batch = dataset.get_collator()([dataset[0], dataset[1], dataset[2]])
    assert all(isinstance(value, np.ndarray) for value in batch.values())
    assert batch["input_ids"].shape == (3, SEQ_LEN)
    assert batch["position_ids"].shape == (4, 3, SEQ_LEN)


def test_one_document_a_row_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = make_config("qwen2_vl", tmp_path, packing=False)
    dataset = MultiModalDataset(config)
    dataset.build()
    (folder,) = [path for path in (tmp_path / "cache/batchloom/datasets").iterdir() if path.is_dir()]
    store = batchloom.open_store(folder)
    assert len(dataset) == len(store) == 6 + 1 + 24
    reopened = MultiModalDataset(replace(config))
    reopened.build()
    assert reopened.modality_length == dataset.modality_length


def write_text_config(folder):
    lines = [json.dumps({"text": f"{n} " * 40}) + "\n" for n in range(30)]
    (folder / "t.jsonl").write_text("".join(lines))
    (folder / "c.yaml").write_text(
        "dataset: {dataset_type: text, dataset_path: t.jsonl, packing: true, packing_length: 160,"
        " processor_config: {processor_name: bytes}}"
    )
    return folder / "c.yaml"


def test_several_processes_build_one_store(tmp_path):
    command = ("-m", "media.build_dataset", write_text_config(tmp_path), tmp_path / "store")
    with start_processes(*command, environments=[{}, {}]) as processes:
        results = [process.wait() for process in processes]
    assert [result.returncode for result in results] == [0, 0], results


def test_a_dataset_of_plain_texts(tmp_path):
    dataset = MultiModalDataset(write_text_config(tmp_path), out=tmp_path / "store")
    dataset.build()
    assert all(length < 0 for length in dataset.modality_length)
    batch = dataset.get_collator()([dataset[0], dataset[1]])
    assert batch["input_ids"].shape == (2, 160)


def test_invalid_use_is_refused(qwen, tmp_path):
    config, out = qwen
    dataset = MultiModalDataset(config, out=out)
    for access in (lambda: len(dataset), lambda: dataset[0], dataset.get_collator):
        with pytest.raises(InputError, match=r"call build\(\) first"):
            access()
    dataset.build()
    with pytest.raises(IndexError, match="There is no row"):
        dataset[len(dataset)]
    with pytest.raises(TypeError, match="by a whole number"):
        dataset["first"]
    with pytest.raises(SettingsError, match="batch_size"):
        MultiModalIterableDataset(config, out=out, batch_size=0)
    with pytest.raises(PlanError, match="rank 3 of world_size 2"):
        MultiModalIterableDataset(config, out=out, rank=3, world_size=2)
    (tmp_path / "list.yaml").write_text("datasets: [{path: a.json}]")
    with pytest.raises(SettingsError, match="does not say how to make rows"):
        MultiModalDataset(tmp_path / "list.yaml")
