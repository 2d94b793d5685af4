"""The sequences-per-pool table: counted once beside the training, kept by fingerprint.

A table is a pure function of a source's ``table_identity``, so it is cached beside the store
(``STORE/plans/NAME.counts``) or, where the store is read-only, in the user's cache folder. One
process of a node counts it, under a lock that dies with its holder; the others wait for the
file. Small plans are counted in place when asked: that takes milliseconds.
"""

import contextlib
import fcntl
import hashlib
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

from batchloom.batches.loading.data_source import make_data_logger
from batchloom.core.errors import InputError, StoreError
from batchloom.core.fingerprint import encode_canonical, fingerprint
from batchloom.core.settings import to_plain
from batchloom.plan import Plan
from batchloom.plan.order import SOURCE, SourceOrder
from batchloom.store import Store, StoreLengths

# Up to this many pools (a million documents) counting takes less time than starting a process.
MAX_INLINE_POOLS = 16

_PROGRESS_SECONDS = 5.0
_MAGIC = b"BLMPOOLS"
_HEADER = struct.Struct("<8sQ16s")
_TABLE_FOLDER = "plans"


def table_name(order: SourceOrder) -> str:
    """File name of a source's table."""
    return fingerprint(order.table_identity) + ".counts"


def table_folders(store: Store) -> list[Path]:
    """Folders a table may lie in: beside a store that lies somewhere, else in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchloom" / _TABLE_FOLDER
    if not store.location.on_disk or store.location.is_remote:
        return [cache]
    store_folder = store.path if store.path.is_dir() else store.path.parent
    return [store_folder / _TABLE_FOLDER, cache]


def load_tables(plan: Plan) -> None:
    """Let the sources of a plan adopt those of their tables that are cached."""
    for order in plan.orders.latest():
        if not order.is_counted:
            load_table(order, table_folders(get_open_store(order)))


def load_table(order: SourceOrder, folders: list[Path]) -> bool:
    """Let a source adopt its cached table; False when there is none yet, or a damaged one.

    Raises:
        PlanError: a table that contradicts what the source has counted itself.
    """
    for folder in folders:
        path = folder / table_name(order)
        try:
            data = path.read_bytes()
        except OSError:
            continue  # Not there, or a folder this user may not read: as good as not counted.
        counts = _decode_counts(data)
        if counts is None:
            make_data_logger(get_open_store(order)).warning("%s is damaged; it is counted again.", path)
            continue
        order.adopt(counts)
        return True
    return False


def write_table(order: SourceOrder, folders: list[Path], progress: Callable[[int, int], None] | None = None) -> Path:
    """Count all pools and write the table to the first folder that can be written.

    Raises:
        StoreError: none of the folders can be written.
    """
    lengths = order.store.lengths
    if isinstance(lengths, StoreLengths):
        lengths.read_through()
    data = _encode_counts(order.count_all(progress))
    reasons = []
    for folder in folders:
        path = folder / table_name(order)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A name of its own: two nodes may count at once, with one process number.
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
        "The table of sequences per pool cannot be kept (" + "; ".join(reasons) + "). "
        "Make one of these folders writable, or set XDG_CACHE_HOME to one that is."
    )


def wait_for_tables(plan: Plan) -> None:
    """Return when the plan has its counts: adopted from another process, or counted here.

    Sources of few pools are counted at once. Tells the log ``batchloom`` (level INFO) every few seconds how far it is.
    """
    while not plan.orders.is_counted:
        # What another seq_len packs anew follows when what was packed before is known.
        for order in plan.orders.latest():
            if order.pools.count <= MAX_INLINE_POOLS:
                order.count_all()
            else:
                wait_for_table(order, table_folders(get_open_store(order)))


def wait_for_table(order: SourceOrder, folders: list[Path]) -> None:
    """Return when a source has its counts: adopted from another process, or counted here."""
    log, last_report_time = make_data_logger(get_open_store(order)), time.monotonic()

    def report_progress(done: int, pools: int) -> None:
        nonlocal last_report_time
        if time.monotonic() - last_report_time > _PROGRESS_SECONDS:
            last_report_time = time.monotonic()
            log.info(
                "Counting sequences for the length of the run: %d of %d pools%s.",
                done,
                pools,
                source_suffix,
            )

    source_suffix = "" if order.name == SOURCE else f" of {order.name}"
    while not order.is_counted and not load_table(order, folders):
        with lock_table(order, folders) as has_lock:
            if has_lock and not load_table(order, folders):
                write_table(order, folders, report_progress)
            elif not has_lock:
                if time.monotonic() - last_report_time > _PROGRESS_SECONDS:
                    last_report_time = time.monotonic()
                    log.info("Waiting for another process of this node to count sequences.")
                time.sleep(0.05)


def get_open_store(order: SourceOrder) -> Store:
    """The open store of a source.

    Raises:
        InputError: it is only lengths.
    """
    if not isinstance(order.store, Store):
        raise InputError(
            f"A Loader reads the tokens of an open store; this plan was made of {type(order.store).__name__}. "
            "Give Plan(open_store(path), spec)."
        )
    return order.store


@contextlib.contextmanager
def lock_table(order: SourceOrder, folders: list[Path]) -> Iterator[bool]:
    """Whether this process is the one that counts; the lock dies with the process."""
    descriptor = _lock_file(table_name(order), folders)
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
            # No locks on this file system: counting twice is slow, not wrong.
            make_data_logger(get_open_store(order)).warning("No lock beside %s: %s.", folders[0], error.strerror)
        yield True
    finally:
        # Closing alone would leave the lock to children forked meanwhile.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock_file(name: str, folders: list[Path]) -> int | None:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            continue  # Read-only: the next folder.
    return None


def start_counting_once_per_node(plan: Plan) -> None:
    """Start counting the pools of a plan whose run has begun, in one process of the node."""
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    large = any(order.pools.count > MAX_INLINE_POOLS and not order.is_counted for order in plan.orders.latest())
    if local == "0" and large:
        start_counting_process(plan)


def start_counting_process(plan: Plan) -> None:
    """Start counting in a process of its own, at low priority; see :mod:`batchloom.batches.count`.

    Should it fail, whoever needs the table counts it and meets the reason.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "batchloom.batches.count"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    waiting = [order for order in plan.orders.latest() if not order.is_counted]
    request = encode_canonical([_make_count_request(order) for order in waiting])
    threading.Thread(target=process.communicate, args=(request,), daemon=True).start()


def _make_count_request(order: SourceOrder) -> dict[str, object]:
    store = get_open_store(order)
    return {
        "name": order.name,
        "path": store.location.address,
        "split": store.split,
        "opened": store.location.options,
        "spec": to_plain(order.spec),
    }


def _encode_counts(counts: NDArray[np.int64]) -> bytes:
    body = counts.astype("<u4").tobytes()
    return _HEADER.pack(_MAGIC, len(counts), hashlib.blake2b(body, digest_size=16).digest()) + body


def _decode_counts(data: bytes) -> NDArray[np.int64] | None:
    """The counts in a table's bytes; None when it is damaged."""
    if len(data) >= _HEADER.size:
        magic, count, digest = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        digest_matches = hashlib.blake2b(body, digest_size=16).digest() == digest
        if magic == _MAGIC and len(body) == 4 * count and digest_matches:
            return np.frombuffer(body, "<u4").astype(np.int64)
    return None
