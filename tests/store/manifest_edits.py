"""Changed manifests with a correct checksum, as if the writer had made them so."""

import json

import xxhash

NAME = "dataset_metadata.json"


def write_sealed(path, manifest):
    """Write a manifest with the checksum of its content."""
    unsealed = {name: value for name, value in manifest.items() if name != "checksum"}
    content = json.dumps(unsealed, indent=1) + "\n"
    sealed = {**unsealed, "checksum": xxhash.xxh3_128_hexdigest(content.encode())}
    path.write_text(json.dumps(sealed, indent=1) + "\n")


def edit_manifest(folder, change, name=NAME):
    """Change a manifest of a store and its checksum."""
    path = folder / name
    manifest = json.loads(path.read_text())
    change(manifest)
    write_sealed(path, manifest)
