"""Digests of the files of a store, and of the fields of its manifests."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from golden.expectations import digest, digest_json

# test_golden_outputs covers reports, which hold times and paths, and quarantine files, which hold sentences.
# Tables of plans appear if another test has built a plan.
_EXCLUDED = ("report", "quarantine", "plans/")
_JSON_NAMES = ("dataset_metadata.json", "generations/")


def describe_store(folder: Path) -> dict[str, Any]:
    """Return the digest of each file of a store, and of each field of its manifests."""
    digests: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name.startswith(_EXCLUDED):
            continue
        data = path.read_bytes()
        if name.startswith(_JSON_NAMES):
            data = remove_checksum(data)
            digests[f"{name} fields"] = _describe_fields(json.loads(data))
        digests[name] = digest(data)
    return digests


def remove_checksum(data: bytes) -> bytes:
    """Return a manifest in the format without a checksum; check its checksum first."""
    unsigned, count = re.subn(rb',\n "checksum": "([0-9a-f]{32})"\n}\n$', b"\n}\n", data)
    assert count == 1
    assert json.loads(data)["checksum"] == xxhash.xxh3_128_hexdigest(unsigned)
    return unsigned


def _describe_fields(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each field of a manifest, and of each of its subsets."""
    subsets = manifest["subsets"].items()
    fields = {name: digest_json(value) for name, value in manifest.items() if name != "subsets"}
    return fields | {f"subsets.{name}": digest_json(value) for name, value in subsets}
