"""Checkpoints: weights, AdamW's moments and a position. No file is a pickle.

``state.json`` holds the step, the loader's state, the XXH3-128 of the two other files, which are read only if it
matches, and ``check``, the fingerprint of all this. There is no state of random generators: the data order is the
plan's, the model has no dropout, and only the initial weights are random.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchloom.core.errors import PlanError, StateError
from batchloom.core.fingerprint import fingerprint
from batchloom.train.json_files import MAX_RUN_FILE_BYTES, encode_json, read_json_object, write_json

_ADAM_STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")
_STATE_FILE = "state.json"
_MODEL_FILE, _OPTIMIZER_FILE = "model.safetensors", "optimizer.safetensors"
_BLOCK_BYTES = 1 << 24


def write_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, loader: dict[str, Any]
) -> None:
    """Write the files of a checkpoint into an empty folder."""
    save_file(_collect_weights(model), folder / _MODEL_FILE)
    save_file(_collect_optimizer_tensors(model, optimizer), folder / _OPTIMIZER_FILE)
    checksums = {name: _compute_checksum(folder / name) for name in (_MODEL_FILE, _OPTIMIZER_FILE)}
    write_state(folder, step, loader, checksums)


def write_state(folder: Path, step: int, loader: dict[str, Any], checksums: dict[str, Any]) -> None:
    """Replace ``state.json`` of a checkpoint."""
    state = {"step": step, "loader": loader, "checksums": checksums}
    write_json(folder / _STATE_FILE, {**state, "check": fingerprint(state)})


def check_journal(journal: list[dict[str, Any]]) -> None:
    """Raise PlanError for a journal that is too large to be read back."""
    size, most = len(encode_json({"loader": {"edits": journal}})), MAX_RUN_FILE_BYTES // 2
    if size > most:
        raise PlanError(
            f"The journal of edits would have {size:,} bytes, and a checkpoint can hold {most:,}; a banned document "
            "takes about 20. Ban fewer documents; or remove them from the store (batchloom remove) and start a run "
            "on the result."
        )


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Any]]:
    """Load model and optimizer from a checkpoint; return its step and loader state.

    A damaged checkpoint raises StateError and leaves both unchanged.
    """
    step, loader, checksums = read_checkpoint_state(path)
    weights = _read_tensors(path / _MODEL_FILE, checksums, _collect_weights(model))
    moments = _read_tensors(path / _OPTIMIZER_FILE, checksums, _make_moment_templates(model))
    # Shared weights are stored under the first of their names, and loading it fills all of them.
    model.load_state_dict(weights, strict=False)
    _fill_optimizer(model, optimizer, moments)
    return step, loader


def read_checkpoint_step(checkpoint: Path) -> int:
    """Return the number of steps done before a checkpoint, read from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def raise_damaged_file(file: Path, fault: object) -> NoReturn:
    """Raise StateError for a damaged file of a checkpoint, with a remedy."""
    raise StateError(
        f"The checkpoint cannot be used: {file} {fault}. Delete the folder {file.parent}; --resume then continues "
        "from the checkpoint before it, or from the start if there is none."
    )


def read_checkpoint_state(path: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the step, the loader's state and the checksums of a checkpoint.

    The other files are not read.

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
        raise_damaged_file(
            file,
            "was changed after it was written: its check does not match its fields (to add edits, use batchloom edit)",
        )
    if step != read_checkpoint_step(path):
        raise_damaged_file(file, f"says step {step!r} and is in the folder {path.name}")
    return read_checkpoint_step(path), loader, checksums


def _read_tensors(file: Path, checksums: dict[str, Any], expected_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Load the tensors of a file after checking checksum, names, shapes and dtypes."""
    try:
        checksum = _compute_checksum(file)
        if checksum != checksums.get(file.name):
            fault = f"has the checksum {checksum}, {_STATE_FILE} says {checksums.get(file.name)!r:.40}"
            raise_damaged_file(file, f"{fault}: its bytes changed after they were written")
        tensors = load_file(file)
    except OSError as error:
        raise_damaged_file(file, f"cannot be read: {error.strerror or error}")
    except SafetensorError as error:
        raise_damaged_file(file, f"is not a safetensors file: {error}")
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
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _collect_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model; shared tensors appear under their first name."""
    first_names: dict[int, str] = {}
    return {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first_names.setdefault(id(tensor), name) == name
    }


def _collect_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return AdamW's moments by the name of their weight: ``exp_avg.layers.0...``."""
    return {
        f"{moment}.{name}": optimizer.state[weight][moment]
        if weight in optimizer.state
        # No step has had a gradient for this weight (an expert that was never selected), so use AdamW's initial
        # values.
        else torch.zeros(())
        if moment == "step"
        else torch.zeros_like(weight)
        for name, weight in model.named_parameters()
        for moment in _ADAM_STATE_KEYS
    }


def _make_moment_templates(model: nn.Module) -> dict[str, Tensor]:
    """Return tensors with the names, shapes and dtypes of AdamW's moments."""
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
