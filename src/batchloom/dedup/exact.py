"""Exact duplicates: stub until the real one comes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KEY = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u4"), ("part", "<u4")])
DUPLICATE = np.dtype(
    [
        ("unit", "<u4"),
        ("number", "<u4"),
        ("part", "<u4"),
        ("first_unit", "<u4"),
        ("first_number", "<u4"),
        ("first_part", "<u4"),
    ]
)


def write_keys(path, hashes, numbers, parts) -> None:
    keys = np.empty(len(hashes), KEY)
    keys["high"], keys["low"], keys["number"], keys["part"] = (
        hashes[:, 1],
        hashes[:, 0],
        numbers,
        parts,
    )
    keys = keys[np.lexsort((keys["number"], keys["low"], keys["high"]))]
    keys.tofile(path)


def partitions_for(keys: int) -> int:
    return 1


def find(
    files: Sequence[Path], partition: int, partitions: int, first_new: int
) -> NDArray[np.void]:
    first = {}
    out = []
    for unit, path in enumerate(files):
        for key in sorted(np.fromfile(path, KEY).tolist(), key=lambda k: k[2]):
            k = key[:2]
            if k in first:
                if unit >= first_new:
                    out.append((unit, key[2], key[3], *first[k]))
            else:
                first[k] = (unit, key[2], key[3])
    return np.array(sorted(out), DUPLICATE)


def gather(files: Sequence[Path], unit: int) -> NDArray[np.void]:
    found = [np.fromfile(path, DUPLICATE) for path in files]
    found = np.concatenate([np.zeros(0, DUPLICATE), *found])
    found = found[found["unit"] == unit]
    return np.sort(found, order="number")
