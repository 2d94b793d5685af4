"""Reading a store behind a slow link against the same store on this machine.

    python bench/remote.py [--documents 200000] [--latency 0.05] [--megabytes 100] [--pace 10] [--ranks 4]

A server on loopback gives stretches of files; every answer waits ``--latency`` seconds, and a
connection carries ``--megabytes`` a second. Prints the first batch, what a consumer that takes
``--pace`` million tokens a second gets from either store and what one gets that takes all it can,
and the bytes that the ranks of a node, and of two nodes with and without lanes, fetched over an epoch, over those of
its tokens.
"""

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SEQ_LEN, BATCH, BLOCK = 2048, 32, 64
CHUNK = 64 << 10


async def serve(folder: Path, latency: float, rate: float) -> None:
    """Answer GETs of files and stretches of them, late and slowly."""

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
        status = b"206 Partial Content" if asked else b"200 OK"
        about = (
            f"\r\nContent-Length: {last - first + 1}\r\nContent-Range: bytes {first}-{last}/{size}"
        )
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


def loaded(place: str, options: dict, steps: int, pace: float, rank: int = 0, ranks: int = 1):
    """(seconds to the first batch, tokens/s behind it, bytes fetched, tokens) of one rank."""
    import batchloom

    begin = time.perf_counter()
    store = batchloom.open_store(place, **options)
    loader = batchloom.Loader(
        store, seq_len=SEQ_LEN, global_batch_size=BATCH * ranks, epochs=1000, block=BLOCK,
        rank=rank, world_size=ranks, output="numpy",
    )  # fmt: skip
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - begin
    # What the start left undone is not what goes on for days.
    for _ in range(steps // 4):
        next(batches)
        if pace:
            time.sleep(SEQ_LEN * BATCH / pace)
    begin = due = time.perf_counter()
    for _ in range(steps):
        next(batches)
        if pace:
            due = max(due, begin) + SEQ_LEN * BATCH / pace
            time.sleep(max(0.0, due - time.perf_counter()))
    seconds = time.perf_counter() - begin
    tokens = (1 + steps // 4 + steps) * SEQ_LEN * BATCH
    return first, steps * SEQ_LEN * BATCH / seconds, store.fetched_bytes, tokens


def epoch(place: str, cache: str, rank: int, ranks: int, lanes: int = 1) -> int:
    """Bytes that one rank fetched in an epoch."""
    import batchloom

    store = batchloom.open_store(place, cache=cache)
    loader = batchloom.Loader(
        store, seq_len=SEQ_LEN, global_batch_size=BATCH * ranks, block=BLOCK, lanes=lanes,
        pool_size=8192 if lanes > 1 else 65536, rank=rank, world_size=ranks, output="numpy",
    )  # fmt: skip
    for _ in loader:
        pass
    return store.fetched_bytes


def together(url: str, work: Path, ranks: int, nodes: int = 1, lanes: int = 1) -> int:
    """Bytes that ranks on so many nodes fetched in an epoch, each rank a process, each node a cache."""
    running = []
    for rank in range(ranks):
        cache = work / f"node{nodes}.{rank * nodes // ranks}.{lanes}"
        asked = {"place": url, "cache": str(cache), "rank": rank, "ranks": ranks, "lanes": lanes}
        command = [sys.executable, __file__, "--epoch", json.dumps(asked)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    return sum(int(one.communicate()[0]) for one in running)


def apart(arguments: dict) -> dict:
    """What :func:`loaded` gives in a process of its own."""
    return json.loads(
        subprocess.run(_command(arguments), stdout=subprocess.PIPE, text=True, check=True).stdout
    )


def _command(arguments: dict) -> list[str]:
    return [sys.executable, __file__, "--one", json.dumps(arguments)]


def compared(options: argparse.Namespace, folder: Path, url: str, work: Path) -> None:
    def far(name: str) -> dict:
        return {"cache": str(work / name)}

    steps = options.steps
    for name, pace in (("paced", options.pace * 1e6), ("as fast as it goes", 0.0)):
        local = apart({"place": str(folder), "options": {}, "steps": steps, "pace": pace})
        cold = apart({"place": url, "options": far(name), "steps": steps, "pace": pace})
        warm = apart({"place": url, "options": far(name), "steps": steps, "pace": pace})
        print(
            f"{name:20} local {local[1] / 1e6:7.1f} Mtok/s, remote {cold[1] / 1e6:7.1f} ({cold[1] / local[1]:.0%}), "
            f"again from the cache {warm[1] / 1e6:7.1f} ({warm[1] / local[1]:.0%}); first batch "
            f"{local[0]:.2f} / {cold[0]:.2f} / {warm[0]:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--sparse", action="store_true", help="files of holes, for large stores")
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--pace", type=float, default=10)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--peers", action="store_true", help="accepted for `make bench`; there is none here"
    )
    parser.add_argument("--serve")
    parser.add_argument("--one")
    parser.add_argument("--epoch")
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(Path(options.serve), options.latency, options.megabytes * 1e6))
        return
    if options.epoch:
        print(epoch(**json.loads(options.epoch)))
        return
    if options.one:
        print(json.dumps(loaded(**json.loads(options.one))))
        return
    from corpus import make_store

    work = Path(tempfile.mkdtemp(prefix="batchloom-bench-"))
    folder = make_store(work / "store", options.documents, sparse=options.sparse)
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(folder), "--latency", str(options.latency),
         "--megabytes", str(options.megabytes)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        compared(options, folder, url, work)
        if not options.sparse:
            size = sum(path.stat().st_size for path in folder.glob("train/*.bin"))
            fetched = together(url, work, options.ranks)
            print(
                f"{options.ranks} ranks of a node fetched {fetched / size:.3f} x the bytes of their tokens"
            )
            for lanes in (1, options.ranks):
                fetched = together(url, work, options.ranks, nodes=2, lanes=lanes)
                print(f"on two nodes, {lanes} lanes: {fetched / size:.3f} x")
    finally:
        server.terminate()
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
