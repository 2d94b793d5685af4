"""``doctor`` of raw inputs with media: it says before the work what the store will be."""

import json
import shlex

import pytest

import batchloom
from batchloom import inspect
from batchloom.cli import run_command_line
from media.made import talk, write_images, write_sounds
from media.test_batches import saved
from media.test_streams import captions, held, talks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def sight(tmp_path_factory):
    return saved("qwen2_vl", tmp_path_factory.mktemp("sight"))[2]


@pytest.mark.parametrize("kind", [write_images, talks, held, captions])
def test_what_it_counts_is_what_the_store_holds(tmp_path, monkeypatch, sight, kind, capsys):
    source = kind(tmp_path / "in")
    found = batchloom.doctor(source, media={"processor": str(sight)}, seq_len=900)
    assert found.sound
    assert found.tokenizer.name == str(sight)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(found.commands[0])
    assert words[:2] == ["batchloom", "prepare"]
    assert run_command_line([*words[1:], "--val-fraction", "0", "--no-dedup"]) == 0
    made = inspect("store", seq_len=900)
    counted = {}
    for one in found.sources:
        for medium, some in one.media.items():
            counted[medium] = [a + b for a, b in zip(counted.get(medium, (0, 0, 0)), some, strict=True)]
    assert counted == {medium: list(some) for medium, some in made.media.items()}
    assert (found.documents, found.tokens) == (made.documents, made.tokens)
    capsys.readouterr()
    assert run_command_line(["doctor", str(source), "--processor", str(sight), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    told = sum(one["media"].get("image", [0])[0] for one in plain["sources"])
    assert told == made.media["image"].media


def test_it_shows_media_by_their_number(tmp_path, sight, capsys):
    source = write_images(tmp_path / "in")
    assert run_command_line(["doctor", str(source), "--processor", str(sight), "--preview", "9"]) == 0
    said = capsys.readouterr().out
    assert "images in 8 documents: " in said
    assert "<|vision_start|><|image_pad|>[x" in said
    assert "a loader leaves them out (overlong='drop')" not in said
    assert run_command_line(["doctor", str(source), "--processor", str(sight), "--seq-len", "60"]) == 0
    assert "a loader leaves them out (overlong='drop'), as it does for all data with images" in " ".join(
        capsys.readouterr().out.split()
    )


def test_media_that_moved_are_found_in_their_folder(tmp_path, sight, capsys):
    source = write_images(tmp_path / "in", 30)
    moved = (tmp_path / "in" / "pictures").rename(tmp_path / "pictures")
    words = ["doctor", str(source), "--processor", str(sight)]
    assert run_command_line(words) == 1
    assert "pictures/0_0.jpg" in capsys.readouterr().out
    assert run_command_line([*words, "--data-folder", str(moved.parent)]) == 0
    assert f"--data-folder {moved.parent}" in capsys.readouterr().out


def test_a_model_that_hears(tmp_path):
    folder = saved("qwen2_audio", tmp_path / "processor")[2]
    source = write_sounds(tmp_path / "in")
    found = batchloom.doctor(source, media={"processor": str(folder)})
    assert found.sound
    assert found.sources[0].media["audio"].media == 5


def test_prepare_takes_the_tokenizer_beside_the_processor(tmp_path, sight):
    source = write_images(tmp_path / "in")
    made = [
        batchloom.prepare(source, out=tmp_path / name, media={"processor": str(sight)}, **more)
        for name, more in (("a", {}), ("b", {"tokenizer": str(sight)}))
    ]
    first, second = (one.path / "dataset_metadata.json" for one in made)
    assert first.read_bytes() == second.read_bytes()


def test_the_real_conversations_by_the_command_alone(real_data, tmp_path, capsys):
    for name, file in (("qwen2_vl", "mllm_demo.json"), ("qwen2_audio", "mllm_audio_demo.json")):
        settings = {"chunk_length": 6} if name == "qwen2_audio" else {}
        folder = saved(name, tmp_path / name, **settings)[2]
        words = ["--processor", str(folder), "--tokenizer", str(folder)]
        assert run_command_line(["doctor", str(real_data / "multimodal" / file), *words]) == 0
        assert "verdict:       sound" in capsys.readouterr().out


@pytest.mark.parametrize("seq_len", [60, 90, 200])
def test_rows_and_steps_are_those_of_a_loader(tmp_path, sight, seq_len):
    source = talks(tmp_path / "in")
    media = {"processor": str(sight)}
    found = batchloom.doctor(source, media=media, seq_len=seq_len, global_batch_size=2)
    batchloom.prepare(source, out=tmp_path / "store", media=media, val_fraction=0, dedup="none")
    plan = batchloom.Loader(batchloom.open_store(tmp_path / "store"), seq_len=seq_len, global_batch_size=2).plan
    looked = inspect(tmp_path / "store", seq_len=seq_len)
    best = next(one for one in looked.efficiencies if one.packing == "best_fit")
    assert found.packing.sequences == best.sequences == plan.orders.sequences_per_epoch
    assert found.packing.steps == plan.steps
    assert found.packing.fill == pytest.approx(best.fill)
    assert best.cut == 0
    assert "wrap" not in {one.packing for one in looked.efficiencies}


def test_conversations_alone_are_left_out_as_a_loader_does(tmp_path):
    rows = [{"messages": talk("Who? " * (1 + n % 30), "Nobody. " * (1 + n % 9))} for n in range(80)]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = batchloom.doctor(file, tokenizer="bytes", seq_len=128, global_batch_size=2)
    batchloom.prepare(file, out=tmp_path / "store", tokenizer="bytes", val_fraction=0, dedup="none")
    store = batchloom.open_store(tmp_path / "store")
    plan = batchloom.Loader(store, seq_len=128, global_batch_size=2).plan
    assert found.packing.sequences == plan.orders.sequences_per_epoch
    assert found.packing.longer > 0
    best = inspect(tmp_path / "store", seq_len=128).efficiencies[0]
    assert (best.packing, best.sequences) == ("best_fit", plan.orders.sequences_per_epoch)
