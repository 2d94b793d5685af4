"""``MultiModalDataset`` and ``MultiModalIterableDataset``: the rows of a ``Loader``, through a DataLoader."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import batchloom
from batchloom import DatasetConfig, InputError, PlanError, SettingsError
from batchloom.compat import MultiModalDataset, MultiModalIterableDataset
from media.made import talk, write_images, write_sounds
from media.processors import MADE, save
from processes import start_processes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SEQ_LEN = 420


@pytest.fixture(scope="module", params=["qwen2_vl", "llava_next", "idefics3", "gemma3", "qwen2_audio"])
def config(request, tmp_path_factory):
    """A config of conversations with media and of texts; the store is made once."""
    folder = tmp_path_factory.mktemp(request.param)
    return config_of(request.param, folder), folder / "store"


def config_of(name, folder, **said):
    save(MADE[name](), folder / "processor")
    write = write_sounds if name == "qwen2_audio" else write_images
    file = write(folder / "in", 6)
    texts = [{"messages": talk(f"What is {n}?", f"{n} is a number. " * 9)} for n in range(24)]
    (folder / "texts.json").write_text(json.dumps(texts))
    kind = "vision_audio" if name == "qwen2_audio" else "vision"
    return DatasetConfig(
        datasets=[{"path": str(file)}, {"path": str(folder / "texts.json"), "type": "text"}],
        **{
            "dataset_type": kind,
            "processor_config": {"processor_name": str(folder / "processor")},
            "packing": True,
            "packing_length": SEQ_LEN,
            "packing_strategy": "best_fit",
            **said,
        },
    )


def built(door, config, **more):
    given, out = config
    dataset = door(given, out=out, **more)
    dataset.build()
    return dataset


def batches_of(config, rows, rank=0, world_size=1):
    store = batchloom.open_store(config[1])
    sizes = {"global_batch_size": rows * world_size, "rank": rank, "world_size": world_size}
    return list(batchloom.Loader(store, **sizes, **config[0].plan_settings()))


def same(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def rows_with(batch, count):
    """The first rows of a batch whose others hold nothing."""
    return {
        name: value[:, :count] if value.ndim == 3 and name == "position_ids" else value[:count]
        for name, value in batch.items()
        if name in ("input_ids", "labels", "position_ids", "token_type_ids")
    }


@pytest.mark.parametrize(("door", "workers"), [(MultiModalDataset, 0), (MultiModalIterableDataset, 2)])
def test_a_dataloader_gives_the_batches_of_a_loader(config, door, workers):
    more = {"batch_size": 2} if door is MultiModalIterableDataset else {}
    dataset = built(door, config, **more)
    given = DataLoader(dataset, batch_size=2, collate_fn=dataset.get_collator(), num_workers=workers)
    found, wanted = list(given), batches_of(config, 2)
    assert len(found) == len(wanted) == len(given) > 2
    assert any("input_features" in one or "pixel_values" in one for one in found)
    for one, other in zip(found[:-1], wanted, strict=False):
        same(one, other)
    left = len(dataset) - 2 * (len(wanted) - 1)
    same(rows_with(found[-1], left), rows_with(wanted[-1], left))
    assert len(found[-1]["input_ids"]) == left


def test_both_doors_have_one_order_and_length(config):
    one, other = built(MultiModalDataset, config), built(MultiModalIterableDataset, config)
    assert len(one) == len(other) == sum(1 for _ in other)
    for mapped, streamed in zip(one, other, strict=True):
        same(mapped, streamed)
    assert one.modality_length == other.modality_length
    seed = built(MultiModalDataset, config, seed=1)
    assert any(not torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, seed, strict=False))


def test_lengths_say_which_rows_hold_media(config):
    dataset = built(MultiModalDataset, config)
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
    return config_of("qwen2_vl", folder), folder / "store"


@pytest.mark.parametrize(("rows", "world"), [(1, 2), (2, 2), (1, 3), (3, 2)])
def test_ranks_have_the_rows_of_a_loader_and_as_many_each(qwen, rows, world):
    datasets = [
        built(MultiModalIterableDataset, qwen, batch_size=rows, rank=rank, world_size=world) for rank in range(world)
    ]
    count = len(built(MultiModalDataset, qwen))
    assert {len(dataset) for dataset in datasets} == {len(list(datasets[0]))}
    assert len(datasets[0]) == -(-count // world) or count % (rows * world)
    whole = count // (rows * world)
    seen = []
    for rank, dataset in enumerate(datasets):
        given = DataLoader(dataset, batch_size=rows, collate_fn=dataset.get_collator(), num_workers=1)
        wanted = batches_of(qwen, rows, rank, world)
        found = list(given)
        for one, other in zip(found[:whole], wanted[:whole], strict=True):
            same(one, other)
        seen += [row.tobytes() for one in found for row in one["input_ids"].numpy()]
        trained = [(one["labels"] != -100).any(dim=1) for one in found[whole:]]
        # Of what is left each rank has at most one row without a document.
        assert sum(int((~rows_of).sum()) for rows_of in trained) <= 1
    mapped = [row["input_ids"].numpy().tobytes() for row in built(MultiModalDataset, qwen)]
    assert set(mapped) <= set(seen)
    assert len(seen) == world * len(datasets[0])


@pytest.mark.slow
def test_spawned_workers_give_the_same(qwen):
    dataset = built(MultiModalDataset, qwen)
    given = DataLoader(
        dataset,
        batch_size=2,
        collate_fn=dataset.get_collator(),
        num_workers=1,
        multiprocessing_context="spawn",
    )
    for one, other in zip(given, batches_of(qwen, 2)[:-1], strict=False):
        same(one, other)


def test_a_sampler_by_modality_takes_the_lengths(qwen):
    """LLaVA's and Hugging Face's samplers: batches of one modality, by the sign of the length."""
    dataset = built(MultiModalDataset, qwen)
    lengths = np.array(dataset.modality_length)
    order = np.argsort(-lengths, kind="stable").tolist()
    given = DataLoader(dataset, batch_size=1, sampler=order, collate_fn=dataset.get_collator())
    found = ["pixel_values" in batch for batch in given]
    assert found == (lengths[order] > 0).tolist()


def test_arrays_of_numpy(qwen):
    dataset = built(MultiModalDataset, qwen, output="numpy")
    batch = dataset.get_collator()([dataset[0], dataset[1], dataset[2]])
    assert all(isinstance(value, np.ndarray) for value in batch.values())
    assert batch["input_ids"].shape == (3, SEQ_LEN)
    assert batch["position_ids"].shape == (4, 3, SEQ_LEN)


def test_one_document_a_row_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = config_of("qwen2_vl", tmp_path, packing=False)
    dataset = MultiModalDataset(config)
    dataset.build()
    (folder,) = [one for one in (tmp_path / "cache/batchloom/datasets").iterdir() if one.is_dir()]
    store = batchloom.open_store(folder)
    assert len(dataset) == len(store) == 6 + 1 + 24
    again = MultiModalDataset(config.model_copy())
    again.build()
    assert again.modality_length == dataset.modality_length


def of_texts(folder):
    lines = [json.dumps({"text": f"{n} " * 40}) + "\n" for n in range(30)]
    (folder / "t.jsonl").write_text("".join(lines))
    (folder / "c.yaml").write_text(
        "dataset: {dataset_type: text, dataset_path: t.jsonl, packing: true, packing_length: 160,"
        " processor_config: {processor_name: bytes}}"
    )
    return folder / "c.yaml"


def test_several_processes_build_one_store(tmp_path):
    command = ("-m", "media.build_dataset", of_texts(tmp_path), tmp_path / "store")
    with start_processes(*command, environments=[{}, {}]) as processes:
        finished = [one.wait() for one in processes]
    assert [one.returncode for one in finished] == [0, 0], finished


def test_texts_alone_go_through_the_same_doors(tmp_path):
    dataset = MultiModalDataset(of_texts(tmp_path), out=tmp_path / "store")
    dataset.build()
    assert all(length < 0 for length in dataset.modality_length)
    batch = dataset.get_collator()([dataset[0], dataset[1]])
    assert batch["input_ids"].shape == (2, 160)


def test_what_cannot_be(qwen, tmp_path):
    config, out = qwen
    dataset = MultiModalDataset(config, out=out)
    for ask in (lambda: len(dataset), lambda: dataset[0], dataset.get_collator):
        with pytest.raises(InputError, match=r"call build\(\) first"):
            ask()
    dataset.build()
    with pytest.raises(IndexError, match="There is no row"):
        dataset[len(dataset)]
    with pytest.raises(InputError, match="a whole number"):
        dataset["first"]
    with pytest.raises(SettingsError, match="batch_size"):
        MultiModalIterableDataset(config, out=out, batch_size=0)
    with pytest.raises(PlanError, match="rank 3 of world_size 2"):
        MultiModalIterableDataset(config, out=out, rank=3, world_size=2)
    (tmp_path / "list.yaml").write_text("datasets: [{path: a.json}]")
    with pytest.raises(SettingsError, match="does not say how to make rows"):
        MultiModalDataset(tmp_path / "list.yaml")
