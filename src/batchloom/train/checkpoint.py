"""A checkpoint: the weights, AdamW's moments and one position. None of its files is a pickle.

``state.json`` holds the step, the loader's state, the XXH3-128 of the two other files, which
are read only when it fits, and ``check``, the fingerprint of all this. There is no state of
random generators: the order of the data is the plan's, the model has no dropout, and only the
first weights are drawn.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchloom.core.errors import OutputError, PlanError, StateError
from batchloom.core.fingerprint import find_broken_link, fingerprint
from batchloom.train.json_files import MAX_RUN_FILE_BYTES, read_json_object

PARTIAL_SUFFIX = ".partial"
_ADAM_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
_STATE_FILE = "state.json"
_MODEL_FILE, _OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
_BLOCK_BYTES = 1 << 24


def write_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: dict[str, Any],
) -> None:
    """Write the files of a checkpoint into an empty folder, and sync them.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    save_file(_collect_weights(model), folder / _MODEL_FILE)
    save_file(_collect_optimizer_tensors(model, optimizer), folder / _OPTIMIZER_FILE)
    checksums = {name: _compute_checksum(folder / name) for name in (_MODEL_FILE, _OPTIMIZER_FILE)}
    write_state(folder, step, loader, checksums)
    for file in (*folder.iterdir(), folder):
        fsync_path(file)


def write_state(folder: Path, step: int, loader: dict[str, Any], checksums: dict[str, Any]) -> None:
    """Write ``state.json`` of a checkpoint, in place of the one there is.

    Raises:
        OSError: it cannot be written; the one there was stays.
    """
    state = {"step": step, "loader": loader, "checksums": checksums}
    write_json(folder / _STATE_FILE, {**state, "check": fingerprint(state)})


def check_journal(journal: list[dict[str, Any]]) -> None:
    """Refuse edits that a checkpoint could not keep: what is written is to be read again.

    Raises:
        PlanError: says how large they are.
    """
    size, most = len(_encode_json({"loader": {"edits": journal}})), MAX_RUN_FILE_BYTES // 2
    if size > most:
        raise PlanError(
            f"The journal of edits would have {size:,} bytes, and a checkpoint keeps up to {most:,}: a banned document "
            "takes some 20. Ban fewer; or remove them from the store (batchloom remove), and start a run on that."
        )


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
    """Fill model and optimizer from a checkpoint; both stay as they are when it is damaged.

    Returns:
        The step it was taken after, and the loader's state there.

    Raises:
        StateError: a file is damaged, missing or of another model.
    """
    step, loader, checksums = read_checkpoint_state(path)
    weights = _read_tensors(path / _MODEL_FILE, checksums, _collect_weights(model))
    moments = _read_tensors(path / _OPTIMIZER_FILE, checksums, _make_moment_templates(model))
    # Shared weights are filled by the first of their names.
    model.load_state_dict(weights, strict=False)
    _fill_optimizer(model, optimizer, moments)
    return step, loader


def read_checkpoint_step(checkpoint: Path) -> int:
    """The step a checkpoint was taken after."""
    return int(checkpoint.name.removeprefix("step_"))


def raise_damaged_file(file: Path, fault: object) -> NoReturn:
    """Say what is wrong with a file of a checkpoint, and how to go on without that.

    Raises:
        StateError: always.
    """
    raise StateError(
        f"The checkpoint cannot be used: {file} {fault}. Delete the folder {file.parent}; --resume "
        "then goes on from the checkpoint before it, or from the start where there is none."
    )


def has_only_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether every number that a checkpoint would hold is finite."""
    tensors = (
        *_collect_weights(model).values(),
        *_collect_optimizer_tensors(model, optimizer).values(),
    )
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def read_checkpoint_state(path: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The step of a checkpoint, the loader's state, and the checksums of the other files, which are not looked at.

    Raises:
        StateError: ``state.json`` is damaged or was changed by hand.
    """
    file = path / _STATE_FILE
    try:
        state = read_json_object(file, MAX_RUN_FILE_BYTES)
        is_intact = state.pop("check", None) == fingerprint(state)
    except ValueError as error:
        raise_damaged_file(file, error)
    step, loader, checksums = (state.get(name) for name in ("step", "loader", "checksums"))
    if not (is_intact and isinstance(loader, dict) and isinstance(checksums, dict)):
        _check_journal_unchanged(file, loader)
        raise_damaged_file(
            file,
            "was changed after it was written: its check does not fit its fields (batchloom edit adds edits)",
        )
    if step != read_checkpoint_step(path):
        raise_damaged_file(file, f"says step {step!r} and lies in the folder {path.name}")
    return read_checkpoint_step(path), loader, checksums


def _check_journal_unchanged(file: Path, loader: Any) -> None:
    """Say which edit of a journal was changed by hand, where that is what was changed.

    Raises:
        StateError: names its fields.
    """
    edits = loader.get("edits") if isinstance(loader, dict) else None
    if not isinstance(edits, list) or not all(isinstance(entry, dict) for entry in edits):
        return
    number = find_broken_link(loader.get("identity"), edits)
    if number is not None:
        fields = ", ".join(name for name in edits[number] if name != "fingerprint")
        raise_damaged_file(
            file,
            f"was changed by hand: its check does not fit, and edit {number} of the journal has another {fields} than "
            "its fingerprint says (batchloom edit adds edits)",
        )


def _read_tensors(file: Path, checksums: dict[str, Any], expected_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, which are those wanted in name, shape and dtype."""
    try:
        checksum = _compute_checksum(file)
        if checksum != checksums.get(file.name):
            fault = f"has the checksum {checksum}, {_STATE_FILE} says {checksums.get(file.name)!r:.40}"
            raise_damaged_file(file, f"{fault}: its bytes changed after they were written")
        tensors = load_file(file)
    except OSError as error:
        raise_damaged_file(file, f"cannot be read: {error.strerror or error}")
    except SafetensorError as error:
        raise_damaged_file(file, f"is no safetensors file: {error}")
    for name in sorted({*tensors, *expected_tensors}):
        actual, expected = (_describe_tensor(group.get(name)) for group in (tensors, expected_tensors))
        if actual != expected:
            raise_damaged_file(file, f"has {actual} for {name}, the model has {expected}")
    return tensors


def _describe_tensor(tensor: Tensor | None) -> str:
    if tensor is None:
        return "nothing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _compute_checksum(file: Path) -> str:
    """XXH3-128 of a file, 32 hex digits."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model, each of those that several parts share under its first name."""
    first_names: dict[int, str] = {}
    return {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first_names.setdefault(id(tensor), name) == name
    }


def _collect_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments by the name of their weight: ``exp_avg.layers.0...``."""
    return {
        f"{moment}.{name}": optimizer.state[weight][moment]
        if weight in optimizer.state
        # No step had a gradient for it yet (an expert nobody asked): AdamW would begin like this.
        else torch.zeros(())
        if moment == "step"
        else torch.zeros_like(weight)
        for name, weight in model.named_parameters()
        for moment in _ADAM_STATE_KEYS
    }


def _make_moment_templates(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of the names, shapes and dtypes of AdamW's moments, without memory of their own."""
    count = torch.empty((), device="meta")
    return {
        f"{moment}.{name}": count if moment == "step" else weight
        for name, weight in model.named_parameters()
        for moment in _ADAM_STATE_KEYS
    }


def _fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    numbers = {
        id(weight): number
        for number, weight in enumerate(weight for group in optimizer.param_groups for weight in group["params"])
    }
    moments = {
        numbers[id(weight)]: {moment: tensors[f"{moment}.{name}"] for moment in _ADAM_STATE_KEYS}
        for name, weight in model.named_parameters()
    }
    plain = optimizer.state_dict()
    optimizer.load_state_dict({**plain, "state": moments})


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write an object aside, sync it, and give it its name.

    Raises:
        OutputError: it is larger than what is read again; nothing was written.
        OSError: it cannot be written.
    """
    partial_path, text = path.with_name(path.name + PARTIAL_SUFFIX), _encode_json(value)
    if len(text) > MAX_RUN_FILE_BYTES:
        raise OutputError(
            f"{path} was not written: it would have {len(text):,} bytes, and more than {MAX_RUN_FILE_BYTES:,} are "
            f"not read. "
            "Give fewer stores or edits."
        )
    partial_path.write_text(text, "utf-8")
    fsync_path(partial_path)
    partial_path.rename(path)


def _encode_json(value: dict[str, Any]) -> str:
    """An object as its file has it, each letter one byte."""
    return json.dumps(value, indent=2) + "\n"


def fsync_path(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
