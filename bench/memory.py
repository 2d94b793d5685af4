"""Peak memory of a worker of ``prepare`` on memory-intensive inputs. Aim: 700 MiB.

    python bench/memory.py [--scale 1.0] [--only NAME]

Prints per input the largest resident size of any process of the command (VmHWM of each,
sampled until it ends).
"""

import argparse
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20


def words(rng: random.Random, count: int) -> str:
    """Return text of made-up words with spaces, as a tokenizer expects."""
    return " ".join(f"w{rng.randrange(99999)}" for _ in range(count))


def lineless(folder: Path, scale: float) -> None:
    """JSONL line of 2 GB without any newline."""
    stretch = words(random.Random(1), 100_000).encode() + b" "
    with (folder / "lineless.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        while file.tell() < scale * 2e9:
            file.write(stretch)
        file.write(b'"}')
    (folder / "good.jsonl").write_text('{"text": "a good document"}\n' * 20)


def tiny(folder: Path, scale: float) -> None:
    """Ten million documents of a few bytes, all different."""
    count = int(scale * 1e7)
    with (folder / "tiny.jsonl").open("w") as file:
        for start in range(0, count, 100_000):
            file.write("".join(f'{{"text":"d{n}"}}\n' for n in range(start, start + 100_000)))


def repeats(folder: Path, scale: float) -> None:
    """Twenty million copies of the same document."""
    line = b'{"text":"a"}\n'
    with (folder / "repeats.jsonl").open("wb") as file:
        for _ in range(int(scale * 200)):
            file.write(line * 100_000)


def huge(folder: Path, scale: float) -> None:
    """Documents of 15 MB each, alternately of words and of digits."""
    rng = random.Random(2)
    with (folder / "huge.jsonl").open("w") as file:
        for number in range(max(int(scale * 40), 2)):
            text = words(rng, 2_000_000)[:15_000_000] if number % 2 else f"{number} " * 2_200_000
            file.write(json.dumps({"text": text[:15_000_000]}) + "\n")


def wide(folder: Path, scale: float) -> None:
    """Rows of two thousand columns in addition to a text."""
    row = {f"column{n}": "value" * 5 for n in range(2000)} | {"text": "a short text"}
    line = json.dumps(row) + "\n"
    with (folder / "wide.jsonl").open("w") as file:
        for _ in range(int(scale * 10_000)):
            file.write(line)


def archives(folder: Path, scale: float) -> None:
    """Tar and zip of fifty thousand members each, twenty folders deep."""
    rng = random.Random(3)
    text = words(rng, 400).encode()
    deep = "/".join("d" * 10 for _ in range(20))
    count = int(scale * 50_000)
    with tarfile.open(folder / "deep.tar.gz", "w:gz", compresslevel=1) as tar:
        for number in range(count):
            info = tarfile.TarInfo(f"{deep}/{number}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    with zipfile.ZipFile(folder / "deep.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for number in range(count):
            file.writestr(f"{deep}/{number}.txt", text)


def bomb(folder: Path, scale: float) -> None:
    """Gzip of fifty million blank lines between few documents."""
    import gzip

    with gzip.open(folder / "blank.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(int(scale * 100)):
            file.write(b'{"text": "a document"}\n' + b"\n" * 500_000)


INPUTS: dict[str, Callable[[Path, float], None]] = {
    "lineless": lineless,
    "tiny": tiny,
    "repeats": repeats,
    "huge": huge,
    "wide": wide,
    "archives": archives,
    "bomb": bomb,
}


def peak(command: list[str]) -> tuple[int, int, str]:
    """Return peak resident bytes of any process of a command, exit status, last line."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr or []))
    reader.start()
    most = 0
    while process.poll() is None:
        most = max([most, *map(high_water, family(process.pid))])
        time.sleep(0.02)
    reader.join()
    return most, process.returncode, (said[-1].strip() if said else "")


def family(pid: int) -> list[int]:
    """Return a process and all of its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def high_water(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="sizes of the inputs")
    parser.add_argument("--only", choices=INPUTS, action="append")
    parser.add_argument("--options", default="", help="of prepare, such as '--workers 2'")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="batchloom-memory-"))
    try:
        for name in options.only or INPUTS:
            folder = work / name
            folder.mkdir()
            INPUTS[name](folder, options.scale)
            size = sum(path.stat().st_size for path in folder.iterdir())
            command = [sys.executable, "-m", "batchloom", "prepare", str(folder)]
            command += ["--out", str(work / "out"), "--tokenizer", "gpt2", "--max-bad", "100%"]
            began = time.perf_counter()
            most, status, words_of = peak([*command, *options.options.split()])
            told = "" if status == 0 else f" exit {status}: {words_of[:160]}"
            print(
                f"{name:<10} {size / 1e6:8.0f} MB  peak {most / MIB:6.0f} MiB  "
                f"{time.perf_counter() - began:6.1f} s  {INPUTS[name].__doc__}{told}"
            )
            shutil.rmtree(folder)
            shutil.rmtree(work / "out", ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
