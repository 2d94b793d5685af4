"""Reading a store behind a slow link against the same store on this machine.

    python bench/remote.py [--documents 200000] [--latency 0.05] [--megabytes 100] [--pace 10] [--ranks 4]

A server on loopback serves byte ranges of files; every answer waits ``--latency`` seconds, and a
connection carries ``--megabytes`` a second. Prints

- the first batch, and the rate of a consumer that takes ``--pace`` million tokens a second, from either store;
- the rate of an unlimited consumer: over the first pool, the rest of the first epoch, and the second epoch, in which
  a cached store is read from the cache; with the processor seconds of this process and of the server;
- the rate of the link itself: the same byte ranges requested by fsspec alone, as many at a time, and the processor
  seconds of this client and of the server: no loader on this machine can be faster than that;
- the bytes that the ranks of a node, and of two nodes with and without lanes, fetch over an epoch, relative to those
  of its tokens.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEQ_LEN, BATCH, BLOCK = 2048, 32, 64
CHUNK = 64 << 10


async def serve(folder: Path, latency: float, rate: float, log: Path) -> None:
    """Answer GETs of files and byte ranges slowly; log a line per byte range."""
    asked_for = log.open("a", buffering=1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                path = folder / head.split(b" ", 2)[1].decode().lstrip("/")
                asked = re.search(rb"(?i)\r\nrange: bytes=(\d+)-(\d+)", head)
                await asyncio.sleep(latency)
                await reply(writer, path, asked)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def reply(writer, path, asked) -> None:
        if not path.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        size = path.stat().st_size
        first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
        if asked:
            asked_for.write(f"{path.relative_to(folder)} {first} {last + 1}\n")
        status = b"206 Partial Content" if asked else b"200 OK"
        about = f"\r\nContent-Length: {last - first + 1}\r\nContent-Range: bytes {first}-{last}/{size}"
        writer.write(b"HTTP/1.1 " + status + about.encode() + b'\r\nETag: "1"\r\n\r\n')
        began, sent = time.perf_counter(), 0
        with path.open("rb") as file:
            file.seek(first)
            while sent <= last - first:
                data = file.read(min(CHUNK, last - first + 1 - sent))
                writer.write(data)
                sent += len(data)
                await writer.drain()
                wait = began + sent / rate - time.perf_counter()
                if wait > 0.001:
                    await asyncio.sleep(wait)

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def opened(place: str, options: dict):
    """Return a loader's batches, the store, and seconds to the first batch."""
    import batchloom

    begin = time.perf_counter()
    store = batchloom.open_store(place, **options)
    loader = batchloom.Loader(
        store, seq_len=SEQ_LEN, global_batch_size=BATCH, epochs=1000, rank=0, world_size=1,
        output="numpy", block=BLOCK,
    )  # fmt: skip
    batches = iter(loader)
    next(batches)
    return batches, store, time.perf_counter() - begin


def paced(place: str, options: dict, steps: int, pace: float):
    """Return seconds to the first batch and later tokens/s of a paced consumer."""
    batches, _, first = opened(place, options)
    # Skip the steps after the start: the backlog of the start does not represent a run of days.
    for _ in range(steps // 4):
        next(batches)
        time.sleep(SEQ_LEN * BATCH / pace)
    begin = due = time.perf_counter()
    for _ in range(steps):
        next(batches)
        due = max(due, begin) + SEQ_LEN * BATCH / pace
        time.sleep(max(0.0, due - time.perf_counter()))
    return first, steps * SEQ_LEN * BATCH / (time.perf_counter() - begin)


def fast(place: str, options: dict):
    """Return (tokens/s, processor seconds) of three parts of a run.

    The parts are the first pool, the rest of the first epoch and the second epoch.
    """
    batches, store, _ = opened(place, options)
    steps = store.tokens // (SEQ_LEN * BATCH)
    pool = min(steps // 2, int(steps * 65536 / len(store)))
    found = []
    for count in (pool, steps - pool, steps):
        begin, own = time.perf_counter(), time.process_time()
        for _ in range(count):
            next(batches)
        seconds = time.perf_counter() - begin
        found.append((count * SEQ_LEN * BATCH / seconds, time.process_time() - own))
    return found


def bare(url: str, stretches: list, at_once: int):
    """Fetch byte ranges with fsspec alone; return bytes, seconds, processor seconds."""
    import fsspec

    async def all_of_them(fs) -> int:
        left, total = iter(stretches), 0

        async def some() -> None:
            nonlocal total
            for name, start, stop in left:
                data = await fs._cat_file(f"{url}/{name}", start=start, end=stop)
                total += len(data)

        await asyncio.gather(*(some() for _ in range(at_once)))
        return total

    fs = fsspec.filesystem("http")
    fs.cat_file(f"{url}/{stretches[0][0]}", start=0, end=1)
    begin, own = time.perf_counter(), time.process_time()
    total = fsspec.asyn.sync(fs.loop, all_of_them, fs)
    return total, time.perf_counter() - begin, time.process_time() - own


def epoch(place: str, cache: str, rank: int, ranks: int, lanes: int = 1) -> int:
    """Return the bytes that one rank fetched in an epoch."""
    import batchloom

    store = batchloom.open_store(place, cache=cache)
    loader = batchloom.Loader(
        store, seq_len=SEQ_LEN, global_batch_size=BATCH * ranks, rank=rank, world_size=ranks,
        output="numpy", block=BLOCK, lanes=lanes, pool_size=8192 if lanes > 1 else 65536,
    )  # fmt: skip
    for _ in loader:
        pass
    return store.reader.fetched_bytes


def together(url: str, work: Path, ranks: int, nodes: int = 1, lanes: int = 1) -> int:
    """Return the bytes that all ranks fetched in an epoch.

    Each rank is a process, and each node has a cache.
    """
    running = []
    for rank in range(ranks):
        cache = work / f"node{nodes}.{rank * nodes // ranks}.{lanes}"
        asked = {"place": url, "cache": str(cache), "rank": rank, "ranks": ranks, "lanes": lanes}
        command = [sys.executable, __file__, "--epoch", json.dumps(asked)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return sum(int(one.communicate()[0]) for one in running)


def apart(what: str, **arguments):
    """Return the result of a function of this file, run in a separate process."""
    command = [sys.executable, __file__, "--one", json.dumps([what, arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def processor(process: subprocess.Popen) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compared_paced(options: argparse.Namespace, folder: Path, url: str, work: Path) -> None:
    about = {"steps": options.steps, "pace": options.pace * 1e6}
    far = {"cache": str(work / "paced")}
    found = [apart("paced", place=str(folder), options={}, **about)]
    found += [apart("paced", place=url, options=far, **about) for _ in range(2)]
    rates = " / ".join(f"{rate / 1e6:.1f}" for _, rate in found)
    firsts = " / ".join(f"{first:.2f}" for first, _ in found)
    print(f"paced, local / remote / again from the cache: {rates} Mtok/s; first batch {firsts} s")


def compared_fast(folder: Path, url: str, work: Path, server: subprocess.Popen, log: Path) -> None:
    far = {"cache": str(work / "fast")}
    print("as fast as it goes, Mtok/s (seconds of processor): first pool, rest of the epoch, second epoch")
    local = apart("fast", place=str(folder), options={})
    _told("local", local, local)
    log.write_text("")
    before = processor(server)
    cold = apart("fast", place=url, options=far)
    served = processor(server) - before
    lines = [line.split() for line in log.read_text().splitlines()]
    asked = [(name, int(start), int(stop)) for name, start, stop in lines if name.endswith(".bin")]
    _told("remote", cold, local, f"; server {served:.2f} s")
    _told("again from the cache", apart("fast", place=url, options=far), local)
    _told("again, verify=off", apart("fast", place=url, options={**far, "verify": "off"}), local)
    for at_once in (16, 96):
        before = processor(server)
        size, seconds, own = apart("bare", url=url, stretches=asked, at_once=at_once)
        print(
            f"the link alone, the same {len(asked):,} stretches of {size / 1e6:.0f} MB, {at_once} at a time: "
            f"{size / 1e6 / seconds:.0f} MB/s, which is {size / 2e6 / seconds:.0f} Mtok/s of 2 bytes; processor: client "
            f"{own:.2f} s, server {processor(server) - before:.2f} s"
        )


def _told(name: str, found: list, local: list, more: str = "") -> None:
    parts = [
        f"{rate / 1e6:6.1f} {rate / other[0]:4.0%} ({own:.2f} s)"
        for (rate, own), other in zip(found, local, strict=True)
    ]
    print(f"{name:22}" + "  ".join(parts) + more)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--sparse", action="store_true", help="files of holes, for large stores")
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--pace", type=float, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--peers", action="store_true", help="accepted for `make bench`; there is none here")
    parser.add_argument("--serve")
    parser.add_argument("--log")
    parser.add_argument("--one")
    parser.add_argument("--epoch")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if options.serve:
        work = serve(Path(options.serve), options.latency, options.megabytes * 1e6, Path(options.log))
        asyncio.run(work)
        return
    if options.epoch:
        print(epoch(**json.loads(options.epoch)))
        return
    if options.one:
        what, arguments = json.loads(options.one)
        print(json.dumps({"paced": paced, "fast": fast, "bare": bare}[what](**arguments)))
        return
    from corpus import make_store

    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    folder = make_store(work / "store", options.documents, sparse=options.sparse)
    log = work / "asked"
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(folder), "--latency", str(options.latency),
         "--megabytes", str(options.megabytes), "--log", str(log)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        compared_paced(options, folder, url, work)
        if not options.sparse:
            compared_fast(folder, url, work, server, log)
            size = sum(path.stat().st_size for path in folder.glob("train/*.bin"))
            fetched = together(url, work, options.ranks)
            print(f"{options.ranks} ranks of a node fetched {fetched / size:.3f} x the bytes of their tokens")
            for lanes in (1, 2, options.ranks):
                fetched = together(url, work, options.ranks, nodes=2, lanes=lanes)
                print(f"on two nodes, {lanes} lanes: {fetched / size:.3f} x")
    finally:
        server.terminate()
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
