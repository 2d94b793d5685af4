"""Images: speed of header inspection, and of loading against bare processor calls.

    python bench/media.py [--images 2000] [--steps 300] [--workers 2] [--seq-len 4096] [--rows 4]

Inspection is reported in images/s of one process, with Pillow's opening of the same files for comparison. Loading is
a share of the speed at which as many threads decode the same images and call the same image processor. Both alternate
in one run: each round is a run of its own with the defaults, from before its first batch to its end, after one
untimed batch. All files are in the page cache. With --steps 10000 the memory of each tenth of such a run is reported.
The processor is Qwen2-VL's, over a tokenizer trained here.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

import batchloom
from batchloom.batches import MediaOptions
from batchloom.core.medium import Medium
from batchloom.media import FrameSampling, MediaInspector, MediaLimits, MediaResolver

SIZES = ((640, 480), (480, 640), (1024, 768), (320, 240), (800, 600))
TURNS = 5


def write_images(folder: Path, count: int) -> list[str]:
    """Write JPEGs of soft noise, about as compressible as photos; return their names."""
    rng, names = np.random.default_rng(0), []
    (folder / "images").mkdir()
    for number in range(count):
        width, height = SIZES[number % len(SIZES)]
        small = rng.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        soft = Image.fromarray(small).resize((width, height)).filter(ImageFilter.GaussianBlur(1))
        names.append(f"images/{number}.jpg")
        soft.save(folder / names[-1], quality=88)
    return names


def write_talks(folder: Path, names: list[str]) -> Path:
    """Write a conversation per image, plus one without an image for every fifth."""
    rows = []
    for number, name in enumerate(names):
        question = {"role": "user", "content": f"<image>What is on picture {number}?"}
        answer = {
            "role": "assistant",
            "content": f"Colours, softly mixed, number {number}. " * (1 + number % 9),
        }
        rows.append({"messages": [question, answer], "images": [name]})
        if number % 5 == 0:
            rows.append({"messages": [{**question, "content": f"And {number}?"}, answer]})
    file = folder / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_processor(folder: Path) -> str:
    """Save Qwen2-VL's image processor and a byte-level tokenizer with its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    control = ["<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=control
    )
    made.train_from_iterator(["What is on picture 1? Colours, softly mixed"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>").save_pretrained(folder)
    Qwen2VLImageProcessorPil(max_pixels=28 * 28 * 256).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "Qwen2VLProcessor"}))
    return str(folder)


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def look_at(folder: Path, names: list[str]) -> str:
    """Compare the inspection of every image in preparation with Pillow's opening."""
    look = MediaInspector(MediaResolver(str(folder), MediaLimits()), ["image"], FrameSampling(), embed=False)

    def ours() -> None:
        for name in names:
            look([Medium("image", name)])

    def pillow() -> None:
        for name in names:
            with Image.open(folder / name) as image:
                assert image.size[0]

    pillow()
    times = [(seconds(ours), seconds(pillow)) for _ in range(TURNS)]
    # Inspected images are cached, so only the first round counts.
    first = times[0][0]
    alone = statistics.median(second for _, second in times)
    return (
        f"headers: {len(names) / first:,.0f} images/s a core, checked and hashed at their edges; "
        f"{alone / first:.2f} of the speed of Pillow's opening alone"
    )


def paths_of(loader: batchloom.Loader, step: int, folder: Path) -> list[Path]:
    """Return the images of a step, in order."""
    from batchloom.store import StoreMedia

    rows = loader.plan.rows(*loader.plan.positions_of(step))
    media = StoreMedia(loader.store).of(rows.documents)
    return [folder / one.location for some in media for one in some]


def load(store: batchloom.Store, folder: Path, processor: str, asked: argparse.Namespace) -> Iterator[str]:
    """Compare the loader's batches with bare processor calls on the same images."""
    from transformers import AutoImageProcessor

    workers, steps = asked.workers, asked.steps

    def run(seed: int, steps: int) -> batchloom.Loader:
        return batchloom.Loader(
            store,
            seq_len=asked.seq_len,
            global_batch_size=asked.rows,
            seed=seed,
            steps=steps,
            media=MediaOptions(workers=workers),
        )

    part = AutoImageProcessor.from_pretrained(processor)

    def bare(path: Path) -> object:
        with Image.open(path) as image:
            return part(images=[image.convert("RGB")], return_tensors="np")

    ratios, images, size = [], 0, max(1, steps // (2 * TURNS))
    with ThreadPoolExecutor(workers) as pool:
        for turn in range(TURNS):
            loader = run(turn, size)
            paths = [path for step in range(size) for path in paths_of(loader, step, folder)]
            loader.batch(0)
            # Both discard their results, as training does.
            ours = seconds(lambda loader=loader: deque(loader, maxlen=0))
            theirs = seconds(lambda paths=paths: deque(pool.map(bare, paths), maxlen=0))
            ratios.append(theirs / ours)
            images += len(paths)
    yield (
        f"loading: {statistics.median(ratios):.2f} of the speed of bare calls ({min(ratios):.2f} to {max(ratios):.2f} "
        f"in {TURNS} turns), {images / (TURNS * size):.1f} images a step, {workers} threads"
    )
    found = batchloom.inspect(folder / "store", seq_len=asked.seq_len)
    packed = next(one for one in found.efficiencies if one.packing == "best_fit")
    least = -(-found.tokens // asked.seq_len)
    yield (
        f"{packed.sequences:,} rows of {asked.seq_len:,} are {packed.fill:.2%} full: {found.tokens:,} tokens in "
        f"{found.documents:,} documents, whole, need {least:,} at least"
    )
    if steps >= 10_000:
        yield memory(run(0, steps))


def memory(loader: batchloom.Loader) -> str:
    """Report the peak memory in each tenth of a run, measured after each batch."""
    tenth, most = loader.plan.steps // 10, [0] * 10
    for batch in loader:
        held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
        at = min(batch.step // tenth, 9)
        most[at] = max(most[at], held)
    told = ", ".join(f"{one:,}" for one in most)
    return f"memory: MiB at most in each tenth of {loader.plan.steps:,} steps: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names = write_images(folder, asked.images)
        print(look_at(folder, names))
        processor = make_processor(folder / "processor")
        batchloom.prepare(
            write_talks(folder, names), out=folder / "store", tokenizer=processor,
            media={"processor": processor}, val_fraction=0,
        )  # fmt: skip
        store = batchloom.open_store(folder / "store")
        for line in load(store, folder, processor, asked):
            print(line)


if __name__ == "__main__":
    main()
