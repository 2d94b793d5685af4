"""``doctor`` on raw inputs with media forecasts the store that prepare writes."""

import json
import shlex

import pytest

import batchloom
from batchloom import inspect
from batchloom.cli import run_command_line
from media.sample_media import make_messages, write_images, write_sounds
from media.test_batches import save_with_template
from media.test_streams import write_captions, write_embedded, write_talks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def image_processor(tmp_path_factory):
    return save_with_template("qwen2_vl", tmp_path_factory.mktemp("sight"))[2]


@pytest.mark.parametrize(
    "write_source", [write_images, pytest.param(write_talks, marks=pytest.mark.slow), write_embedded, write_captions]
)
def test_counts_are_those_of_the_store(tmp_path, monkeypatch, image_processor, write_source, capsys):
    source = write_source(tmp_path / "in")
    report = batchloom.doctor(source, media={"processor": str(image_processor)}, seq_len=900)
    assert report.sound
    assert report.tokenizer.name == str(image_processor)
    monkeypatch.chdir(tmp_path)
    command = shlex.split(report.commands[0])
    assert command[:2] == ["batchloom", "prepare"]
    assert "--media" not in command
    assert run_command_line([*command[1:], "--val-fraction", "0", "--no-dedup"]) == 0
    store = inspect("store", seq_len=900)
    counted = {}
    for entry in report.sources:
        for medium, counts in entry.media.items():
            counted[medium] = [a + b for a, b in zip(counted.get(medium, (0, 0, 0)), counts, strict=True)]
    assert counted == {medium: list(counts) for medium, counts in store.media.items()}
    assert (report.documents, report.tokens) == (store.documents, store.tokens)
    capsys.readouterr()
    assert run_command_line(["doctor", str(source), "--processor", str(image_processor), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    images = sum(entry["media"].get("image", [0])[0] for entry in plain["sources"])
    assert images == store.media["image"].media


def test_a_preview_shows_the_number_of_media_tokens(tmp_path, image_processor, capsys):
    source = write_images(tmp_path / "in")
    assert run_command_line(["doctor", str(source), "--processor", str(image_processor), "--preview", "9"]) == 0
    output = capsys.readouterr().out
    assert "images in 8 documents: " in output
    assert "<|vision_start|><|image_pad|>[x" in output
    assert "a loader leaves them out (overlong='drop')" not in output
    assert run_command_line(["doctor", str(source), "--processor", str(image_processor), "--seq-len", "60"]) == 0
    assert "a loader leaves them out (overlong='drop'), as it does for all data with images" in " ".join(
        capsys.readouterr().out.split()
    )


def test_media_that_moved_are_found_in_their_folder(tmp_path, image_processor, capsys):
    source = write_images(tmp_path / "in", 30)
    moved = (tmp_path / "in" / "pictures").rename(tmp_path / "pictures")
    command = ["doctor", str(source), "--processor", str(image_processor)]
    assert run_command_line(command) == 1
    assert "pictures/0_0.jpg" in capsys.readouterr().out
    assert run_command_line([*command, "--data-folder", str(moved.parent)]) == 0
    assert f"--data-folder {moved.parent}" in capsys.readouterr().out


def test_sounds_are_counted(tmp_path):
    folder = save_with_template("qwen2_audio", tmp_path / "processor")[2]
    source = write_sounds(tmp_path / "in")
    report = batchloom.doctor(source, media={"processor": str(folder)})
    assert report.sound
    assert report.sources[0].media["audio"].media == 5


def test_prepare_takes_the_tokenizer_next_to_the_processor(tmp_path, image_processor):
    source = write_images(tmp_path / "in")
    results = [
        batchloom.prepare(source, out=tmp_path / name, media={"processor": str(image_processor)}, **options)
        for name, options in (("a", {}), ("b", {"tokenizer": str(image_processor)}))
    ]
    manifest, explicit = (result.path / "dataset_metadata.json" for result in results)
    assert manifest.read_bytes() == explicit.read_bytes()


def test_the_real_conversations_by_the_command_alone(real_data, tmp_path, capsys):
    for name, file in (("qwen2_vl", "mllm_demo.json"), ("qwen2_audio", "mllm_audio_demo.json")):
        settings = {"chunk_length": 6} if name == "qwen2_audio" else {}
        folder = save_with_template(name, tmp_path / name, **settings)[2]
        options = ["--processor", str(folder), "--tokenizer", str(folder)]
        assert run_command_line(["doctor", str(real_data / "multimodal" / file), *options]) == 0
        assert "verdict:       sound" in capsys.readouterr().out


@pytest.mark.parametrize("seq_len", [60, 90, 200])
def test_rows_and_steps_are_those_of_a_loader(tmp_path, image_processor, seq_len):
    source = write_talks(tmp_path / "in")
    media = {"processor": str(image_processor)}
    report = batchloom.doctor(source, media=media, seq_len=seq_len, global_batch_size=2)
    batchloom.prepare(source, out=tmp_path / "store", media=media, val_fraction=0, dedup="none")
    plan = batchloom.Loader(batchloom.open_store(tmp_path / "store"), seq_len=seq_len, global_batch_size=2).plan
    inspection = inspect(tmp_path / "store", seq_len=seq_len)
    best = next(estimate for estimate in inspection.efficiencies if estimate.packing == "best_fit")
    assert report.packing.sequences == best.sequences == plan.orders.sequences_per_epoch
    assert report.packing.steps == plan.steps
    assert report.packing.fill == pytest.approx(best.fill)
    assert best.cut == 0
    assert "wrap" not in {estimate.packing for estimate in inspection.efficiencies}


def test_long_conversations_are_left_out_as_a_loader_does(tmp_path):
    rows = [{"messages": make_messages("Who? " * (1 + n % 30), "Nobody. " * (1 + n % 9))} for n in range(80)]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = batchloom.doctor(file, tokenizer="bytes", seq_len=128, global_batch_size=2)
    batchloom.prepare(file, out=tmp_path / "store", tokenizer="bytes", val_fraction=0, dedup="none")
    store = batchloom.open_store(tmp_path / "store")
    plan = batchloom.Loader(store, seq_len=128, global_batch_size=2).plan
    assert report.packing.sequences == plan.orders.sequences_per_epoch
    assert report.packing.longer > 0
    best = inspect(tmp_path / "store", seq_len=128).efficiencies[0]
    assert (best.packing, best.sequences) == ("best_fit", plan.orders.sequences_per_epoch)
