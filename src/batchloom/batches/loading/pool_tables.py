"""Sequences-per-pool tables: counted once during training, cached by fingerprint.

A table is a pure function of a source's ``table_identity``, so it is cached next to the store
(``STORE/plans/NAME.counts``) or, for a read-only store, in the user's cache folder. One
process of a node counts it, under a lock that dies with its holder; the others wait for the
file. Small plans are counted directly on demand, which takes milliseconds. As a program,
``python -m batchloom.batches.loading.pool_tables``, this module counts in the background.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchloom.batches.loading.data_logging import make_data_logger
from batchloom.core.errors import InputError, StoreError
from batchloom.core.files import find_cache_folder
from batchloom.core.fingerprint import encode_canonical, fingerprint
from batchloom.core.settings import from_plain, to_plain
from batchloom.plan import Plan, PlanSpec
from batchloom.plan.order import SOURCE, SourceOrder
from batchloom.store import Store, StoreLengths, open_store

# Up to this many pools (a million documents) counting takes less time than starting a process.
MAX_INLINE_POOLS = 16
_PROGRESS_SECONDS = 5.0
_MAGIC = b"BLMPOOLS"
_HEADER = struct.Struct("<8sQ16s")
_TABLE_FOLDER = "plans"


def make_table_name(order: SourceOrder) -> str:
    """Return the file name of a source's table."""
    return fingerprint(order.table_identity) + ".counts"


def list_table_folders(store: Store) -> list[Path]:
    """Return the folders of tables: next to a local store, then the user's cache."""
    cache = find_cache_folder() / _TABLE_FOLDER
    if not store.location.on_disk or store.location.is_remote:
        return [cache]
    store_folder = store.path if store.path.is_dir() else store.path.parent
    return [store_folder / _TABLE_FOLDER, cache]


def load_tables(plan: Plan) -> None:
    for order in plan.orders.latest():
        if not order.counts.is_complete:
            load_table(order)


def load_table(order: SourceOrder) -> bool:
    """Load the cached table of a source; return False if it is missing or damaged."""
    store = get_open_store(order)
    for folder in list_table_folders(store):
        path = folder / make_table_name(order)
        try:
            data = path.read_bytes()
        except OSError:
            continue  # Missing, or not readable for this user: treated as not counted.
        counts = _decode_counts(data)
        if counts is None:
            make_data_logger(store).warning("%s is damaged; it is counted again.", path)
            continue
        order.counts.adopt(counts)
        return True
    return False


def write_table(order: SourceOrder, progress: Callable[[int, int], None] | None = None) -> Path:
    """Count all pools and write the table to the first writable folder."""
    lengths = order.store.lengths
    if isinstance(lengths, StoreLengths):
        lengths.read_through()
    data = _encode_counts(order.counts.count_all(progress))
    reasons = []
    for folder in list_table_folders(get_open_store(order)):
        path = folder / make_table_name(order)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Use a unique name: two nodes with the same process id may count at once.
            with tempfile.NamedTemporaryFile(
                dir=folder, prefix=f"{path.name}.", suffix=".partial", delete=False
            ) as partial_file:
                partial_file.write(data)
                partial_file.flush()
                os.fsync(partial_file.fileno())
            Path(partial_file.name).replace(path)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        return path
    raise StoreError(
        "The table of sequences per pool cannot be saved ("
        + "; ".join(reasons)
        + "). Make one of these folders writable, or set XDG_CACHE_HOME to one that is."
    )


def wait_for_tables(plan: Plan) -> None:
    """Wait until the plan has its counts, loaded from a table or counted here."""
    while not plan.orders.is_counted:
        # Pools after a change of seq_len can be counted when those before it are known.
        for order in plan.orders.latest():
            if order.pools.count <= MAX_INLINE_POOLS:
                order.counts.count_all()
            else:
                wait_for_table(order)


def wait_for_table(order: SourceOrder) -> None:
    """Wait until a source has its counts, loaded from its table or counted here."""
    log = make_data_logger(get_open_store(order))
    last_report_time = time.monotonic()

    def report_progress(done: int, pools: int) -> None:
        nonlocal last_report_time
        if time.monotonic() - last_report_time > _PROGRESS_SECONDS:
            last_report_time = time.monotonic()
            log.info("Counting sequences for the length of the run: %d of %d pools%s.", done, pools, source_suffix)

    source_suffix = "" if order.name == SOURCE else f" of {order.name}"
    while not order.counts.is_complete and not load_table(order):
        with lock_table(order) as has_lock:
            if has_lock and not load_table(order):
                write_table(order, report_progress)
            elif not has_lock:
                if time.monotonic() - last_report_time > _PROGRESS_SECONDS:
                    last_report_time = time.monotonic()
                    log.info("Waiting for another process of this node to count sequences.")
                time.sleep(0.05)


def get_open_store(order: SourceOrder) -> Store:
    """Return the open store of a source."""
    if not isinstance(order.store, Store):
        raise InputError(
            f"A Loader reads the tokens of an open store; this plan was made of {type(order.store).__name__}. "
            "Give Plan(open_store(path), spec)."
        )
    return order.store


@contextlib.contextmanager
def lock_table(order: SourceOrder) -> Iterator[bool]:
    """Yield whether this process counts the table; the lock dies with the process."""
    folders = list_table_folders(get_open_store(order))
    descriptor = _lock_file(make_table_name(order), folders)
    if descriptor is None:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            # This file system has no locks: counting twice is slow, but correct.
            make_data_logger(get_open_store(order)).warning("No lock next to %s: %s.", folders[0], error.strerror)
        yield True
    finally:
        # Closing alone would leave the lock to children forked in the meantime.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock_file(name: str, folders: list[Path]) -> int | None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            continue  # Read-only: try the next folder.
    return None


def start_counting_once_per_node(plan: Plan) -> None:
    """Start counting the pools of a running plan, in one process of the node."""
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    large = any(order.pools.count > MAX_INLINE_POOLS and not order.counts.is_complete for order in plan.orders.latest())
    if local == "0" and large:
        start_counting_process(plan)


def start_counting_process(plan: Plan) -> "subprocess.Popen[bytes]":
    """Start counting in a low-priority process, and return it; see :func:`main`.

    If it fails, a process that needs the table counts it and meets the error.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "batchloom.batches.loading.pool_tables"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    requests = []
    for order in plan.orders.latest():
        if not order.counts.is_complete:
            store = get_open_store(order)
            requests.append(
                {
                    "name": order.name,
                    "path": store.location.address,
                    "split": store.split,
                    "opened": store.location.options,
                    "spec": to_plain(order.spec),
                }
            )
    threading.Thread(target=process.communicate, args=(encode_canonical(requests),), daemon=True).start()
    return process


def _encode_counts(counts: NDArray[np.int64]) -> bytes:
    body = counts.astype("<u4").tobytes()
    return _HEADER.pack(_MAGIC, len(counts), hashlib.blake2b(body, digest_size=16).digest()) + body


def _decode_counts(data: bytes) -> NDArray[np.int64] | None:
    """Return the counts of a table; None if it is damaged."""
    if len(data) >= _HEADER.size:
        magic, count, digest = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        digest_matches = hashlib.blake2b(body, digest_size=16).digest() == digest
        if magic == _MAGIC and len(body) == 4 * count and digest_matches:
            return np.frombuffer(body, "<u4").astype(np.int64)
    return None


def main() -> None:
    """Count the tables that standard input requests, unless another process does."""
    os.nice(10)
    parent = os.getppid()

    def leave_with_parent(_done: int, _pools: int) -> None:
        if os.getppid() != parent:
            raise SystemExit

    for request in json.load(sys.stdin):
        store = open_store(request["path"], request["split"] or "train", **request["opened"])
        order = SourceOrder(request["name"], store, from_plain(PlanSpec, request["spec"]))
        with lock_table(order) as has_lock:
            if has_lock and not load_table(order):
                write_table(order, leave_with_parent)


if __name__ == "__main__":
    main()
