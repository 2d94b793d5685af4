"""Settings of batches: form, distribution of rows, and media."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from batchloom.core.settings import coerce_int_fields, is_bool, is_text, quote_value, raise_problems, suggest
from batchloom.plan import Mesh
from batchloom.plan.order import DATA_PARALLEL, UnevenPolicy
from batchloom.plan.packing import list_choice_problems

Labels = Literal["aligned", "shifted"]
Output = Literal["torch", "numpy"]
Form = Literal["rows", "varlen"]
IdType = Literal["int64", "int32"]
_MAX_RANKS = (1 << 24) - 1
_BOUNDS = {
    "prefetch": (0, 1024),
    "rank": (0, _MAX_RANKS),
    "world_size": (1, _MAX_RANKS + 1),
    "micro_batch_size": (1, 1 << 24),
}
_DEVICE = re.compile(r"cpu|cuda(:\d{1,4})?", re.ASCII)
_CHOICES = {"labels": Labels, "output": Output, "form": Form, "uneven": UnevenPolicy, "dtype": IdType}


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Media settings of a ``Loader``.

    Attributes:
        workers: number of threads that decode and process media; 0 for the number of cores, at most 8.
        memory: limit of the memory for media being decoded, in bytes.
        folder: base folder of media paths, instead of the one in the store's report.
        replace: one or several files that list documents with missing media, as ``batchloom check --missing-media``
            writes them. These documents are served as padding. Any other medium that cannot be read is an error.
    """

    workers: int = 0
    memory: int = 1 << 30
    folder: str | None = None
    replace: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, {"workers": (0, 256), "memory": (1 << 20, 1 << 50)})
        if self.folder is not None and not is_text(self.folder):
            problems.append(f"folder: {quote_value(self.folder)} is not a path; name a folder or a URL")
        value: object = self.replace
        files = tuple(value) if isinstance(value, list | tuple) else (value,)
        problems += [
            f"replace: {quote_value(file)} is not the path of a list; batchloom check STORE --missing-media FILE "
            "writes one"
            for file in files
            if not is_text(file)
        ]
        object.__setattr__(self, "replace", files)
        raise_problems(problems)


DEFAULT_MEDIA_SPEC = MediaOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Batch settings; none of them changes which tokens a step holds.

    Attributes:
        labels: ``aligned`` with input_ids, as Hugging Face models expect (they shift), or
            ``shifted``: next-token targets. Both train the same set of tokens.
        output: ``torch`` tensors or ``numpy`` arrays.
        form: ``rows`` [batch, seq_len], or ``varlen``: spans back to back without padding.
        prefetch: number of batches that the producer thread makes ahead, or starts together if they hold media;
            0 makes each batch on demand.
        rank: data-parallel rank of this process; with a mesh, its rank among all processes of the mesh.
        world_size: number of data-parallel ranks; with a mesh, of all its processes.
        device: device of torch tensors, ``cpu``, ``cuda`` or ``cuda:N``; None for tensors that share the memory
            batches are assembled in.
        mesh: layout of tensor-, context- and pipeline-parallel processes. Peers get the same rows, context-parallel
            ones each a slice of them.
        uneven: ``refuse`` a world size that does not divide the batch, or ``pad`` ranks, and their rows to full
            micro-batches, with rows that carry no loss.
        micro_batch_size: rows of one forward pass, which must divide a rank's rows; None for all rows.
            ``batch.split(micro_batch_size)`` cuts a batch into them.
        balance: whether rows are distributed so that ranks have similar costs: squared span lengths and media tokens.
        dtype: ``int64``; or ``int32`` for ids and labels of half the size. torch's ``cross_entropy``, and so
            Hugging Face models and the trainer adapters, take int64 labels only.
        media: settings for reading images and audio.
    """

    rank: int
    world_size: int
    labels: Labels = "aligned"
    output: Output = "torch"
    form: Form = "rows"
    prefetch: int = 4
    device: str | None = None
    mesh: Mesh = DATA_PARALLEL
    uneven: UnevenPolicy = "refuse"
    micro_batch_size: int | None = None
    balance: bool = False
    dtype: IdType = "int64"
    media: MediaOptions = DEFAULT_MEDIA_SPEC

    def __post_init__(self) -> None:
        problems = coerce_int_fields(self, _BOUNDS) + list_choice_problems(self, _CHOICES)
        mesh: object = self.mesh
        if not isinstance(mesh, Mesh):
            problems.append(f"mesh: {quote_value(mesh)} is not a batchloom.plan.Mesh")
        elif mesh.context > 1 and self.labels == "aligned":
            # A model that shifts them would need the label of the next slice's first token, which another rank
            # holds.
            problems.append(
                f"labels: the model shifts 'aligned' labels, which it cannot do with slices of {mesh.context} "
                "context ranks: give labels='shifted' and a loss that does not shift (transformers' shift_labels)"
            )
        media: object = self.media
        if not isinstance(media, MediaOptions):
            problems.append(f"media: {quote_value(media)} is not a MediaOptions; give MediaOptions(workers=4)")
        if not is_bool(self.balance):
            problems.append(f"balance: {quote_value(self.balance)} is neither True nor False")
        raise_problems(problems + self._find_device_problems())

    def _find_device_problems(self) -> list[str]:
        if self.device is None:
            return []
        if not _DEVICE.fullmatch(str(self.device)):
            return [f"device: {quote_value(self.device)} is none of cpu, cuda, cuda:N"]
        if self.output == "numpy":
            contradiction = f"{self.device!r} is for torch tensors, but output is 'numpy'"
            return [f"device: {contradiction}: leave device out, or give output='torch'"]
        return []


# Settings of a loader by their names in other libraries.
_OTHER_NAMES = {
    "batch_size": "global_batch_size, the rows of a step over all ranks",
    **dict.fromkeys(
        ("sequence_length", "max_length", "max_seq_length", "max_seq_len", "block_size", "context_length"), "seq_len"
    ),
    "num_workers": "prefetch, the number of batches that are made ahead",
    "prefetch_factor": "prefetch",
    "drop_last": "last='drop'",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "pin_memory": "device='cuda'",
    "split": "it open_store(path, split)",
    "generation": "it open_store(path, generation=...)",
    **{field.name: f"media=MediaOptions({field.name}=...)" for field in fields(MediaOptions)},
}
# Arguments of other loaders that this one does not need, and why.
_NEEDLESS_NAMES = {
    "tokenizer": "the store has it",
    "collate_fn": "batches are complete",
    "sampler": "the order is that of shuffle and seed",
}


def refuse_other_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError for arguments that a ``Loader`` does not have.

    It names the argument that is meant.
    """
    for name in names:
        meant = _OTHER_NAMES.get(name)
        hint = f"; give {meant}" if meant else suggest(name, known)
        if name in _NEEDLESS_NAMES:
            hint = f"; leave it out: {_NEEDLESS_NAMES[name]}"
        raise TypeError(f"Loader() has no argument {name!r}{hint}")
