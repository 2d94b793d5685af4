"""NeMo 2 and Megatron-Bridge: plans in data modules, stores in recipes.

Both take samples from a map-style dataset, in the order of Megatron's ``MegatronPretrainingSampler`` (``single``):
micro-batch by micro-batch, each distributed to the ranks. ``PlanSamples`` maps a sample number to the plan's sequence
for that rank. So a step has on each rank the same rows as with the plain loader, and ``consumed_samples`` is the
position.

Neither can be installed without CUDA; docs/frameworks.md lists what was tested.
"""

from batchloom.adapters.requirements import LIGHTNING, MEGATRON, TORCH, require_installed

require_installed(TORCH, LIGHTNING, MEGATRON)

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import LightningDataModule
from megatron.core import num_microbatches_calculator, parallel_state
from torch.utils.data import DataLoader, Dataset

from batchloom.adapters.agreement import require_agreement
from batchloom.adapters.checkpoints import resume_loader
from batchloom.adapters.megatron import (
    list_megatron_prefixes,
    needs_attention_mask,
    resume_from_samples,
)
from batchloom.adapters.pytorch import LoaderDataset
from batchloom.batches import BatchOptions, Loader, check_text_only, make_megatron_arrays
from batchloom.core.errors import InputError, StateError, TrainError
from batchloom.store import Store, open_store


@final
class PlanSamples(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a plan, numbered as Megatron's sampler does; every rank makes them.

    Args:
        loader: loader of this data-parallel rank, with ``labels="shifted"`` and ``micro_batch_size``.
        attention_mask: whether an item has one; see ``adapters.megatron.needs_attention_mask``.

    Attributes:
        loader: the given loader; None in a worker process.

    Raises:
        InputError: the loader has other options; or, when reading an item, its number belongs to another rank, because
            the framework shuffles or uses other batch sizes.
        TrainError: the ranks do not read the same data, or not all of it.
    """

    def __init__(self, loader: Loader, *, attention_mask: bool | None = None) -> None:
        spec = loader.spec
        if (
            (spec.labels, spec.uneven, spec.mesh.processes_per_data_rank) != ("shifted", "refuse", 1)
            or spec.micro_batch_size is None
            or loader.plan.edits
        ):
            raise InputError(
                f"Megatron's samples require labels='shifted' (here {spec.labels!r}), a micro_batch_size (here "
                f"{spec.micro_batch_size}), uneven='refuse', data-parallel ranks only, and a plan without edits."
            )
        check_text_only(loader, "the adapter of NeMo")
        require_agreement(loader, world_size=parallel_state.get_data_parallel_world_size())
        self.loader = loader
        self._batches, self._mask = (
            LoaderDataset(loader),
            needs_attention_mask(loader, attention_mask),
        )
        self._share = (spec.rank, spec.world_size, spec.micro_batch_size)
        self._size = loader.plan.spec.global_batch_size
        self._latest = (-1, torch.empty(0))

    def __getstate__(self) -> dict[str, Any]:
        # A worker process makes its own loader, because locks cannot be pickled.
        return {**self.__dict__, "loader": None}

    def __len__(self) -> int:
        return len(self._batches) * self._size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        rank, ranks, micro = self._share
        step, inside = divmod(number, self._size)
        turn, inside = divmod(inside, micro * ranks)
        owner, row = divmod(inside, micro)
        if owner != rank:
            raise InputError(
                f"Sample {number} belongs to data-parallel rank {owner} and was requested on rank {rank}: give the "
                f"framework micro_batch_size {micro}, {ranks} data-parallel ranks and dataloader_type='single', "
                "which does not shuffle."
            )
        # All rows of a step are requested one after the other, so one step is cached.
        if self._latest[0] != step:
            batch = self._batches[step]
            self._latest = (step, torch.stack([batch[key] for key in _BATCH_KEYS]))
        part = self._latest[1][:, turn * micro + row][:, None]
        tensors = make_megatron_arrays(*part, attention_mask=self._mask)
        return {name: value[0] for name, value in tensors.items()}


_BATCH_KEYS = ("input_ids", "labels", "position_ids")


@dataclass(kw_only=True)
class StoreDatasets:
    """``build_datasets`` of a Megatron-Bridge dataset provider, over a store.

    Megatron-Bridge recognizes a provider by its base class, so combine both:

        @dataclass(kw_only=True)
        class StoreProvider(StoreDatasets, DatasetProvider): ...

        cfg.dataset = StoreProvider(store="data", seq_length=4096, ..., dataloader_type="single")

    Attributes:
        store: folder of the store.
        seq_length, micro_batch_size, global_batch_size: as in the recipe's ``cfg.model`` and ``cfg.train``.
        packing, seed: see ``batchloom.Loader``.
        validation, test: names of the subsets; None for none.
        attention_mask: whether samples have a mask; must be set unless ``packing`` is ``none``.
        skip_getting_attention_mask_from_dataset: Megatron-Bridge's name for the opposite.

    Raises:
        InputError: raised on building if samples of a missing subset are requested.
    """

    store: str
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    packing: str = "best_fit"
    seed: int = 0
    validation: str | None = "val"
    test: str | None = "test"
    attention_mask: bool | None = None

    @property
    def sequence_length(self) -> int:
        """Other name of ``seq_length`` in Megatron-Bridge."""
        return self.seq_length

    @property
    def skip_getting_attention_mask_from_dataset(self) -> bool:
        """True if samples have no attention mask."""
        return not self.attention_mask

    def build_datasets(self, context: Any) -> tuple[PlanSamples, PlanSamples | None, PlanSamples | None]:
        """Return training, validation and test samples in the numbers of ``context``.

        They repeat over epochs as needed. None in ``context`` means one epoch.
        """
        return (
            self._make_samples(open_store(self.store), context.train_samples),
            self._make_subset_samples("validation", self.validation, context.valid_samples),
            self._make_subset_samples("test", self.test, context.test_samples),
        )

    def _make_subset_samples(self, field: str, name: str | None, samples: int | None) -> PlanSamples | None:
        if name is None or samples == 0:
            return None
        subset_names = open_store(self.store).subsets
        if name not in subset_names:
            raise InputError(
                f"{field} samples are requested and {self.store} has no subset {name!r} (it has "
                f"{', '.join(subset_names) or 'none'}): give {field}= an existing one, or {field}=None for none."
            )
        return self._make_samples(open_store(self.store, name), samples)

    def _make_samples(self, store: Store, samples: int | None) -> PlanSamples:
        loader = Loader(
            store,
            seq_len=self.seq_length,
            global_batch_size=self.global_batch_size,
            packing=self.packing,
            seed=self.seed,
            steps=None if samples is None else -(-samples // self.global_batch_size),
            labels="shifted",
            rank=parallel_state.get_data_parallel_rank(),
            world_size=parallel_state.get_data_parallel_world_size(),
            batch=BatchOptions(micro_batch_size=self.micro_batch_size),
        )
        return PlanSamples(loader, attention_mask=self.attention_mask)


@dataclass(frozen=True)
class _SampleCounts:
    """Sample counts for ``build_datasets``, which NeMo 2 does not provide."""

    train_samples: int
    valid_samples: int | None
    test_samples: int | None


@final
class StoreDataModule(LightningDataModule):  # type: ignore[misc]
    """NeMo 2's ``PreTrainingDataModule`` over a store: same methods, the plan's order.

    Args:
        datasets: store and batch sizes.
        data_sampler: NeMo's ``MegatronDataSampler`` of the same sizes, ``dataloader_type="single"``.
        num_workers, pin_memory, persistent_workers: options of the DataLoader.

    Raises:
        InputError: the sampler has other sizes, shuffles, or has a ``rampup_batch_size``.
    """

    def __init__(
        self,
        datasets: StoreDatasets,
        *,
        data_sampler: Any,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__()
        _check_sampler(datasets, data_sampler)
        self.datasets, self.data_sampler = datasets, data_sampler
        self.seq_length = datasets.seq_length
        self.micro_batch_size = datasets.micro_batch_size
        self.global_batch_size = datasets.global_batch_size
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.persistent_workers = persistent_workers
        self.init_global_step = 0

    def build(
        self,
        trainer_max_steps: int,
        trainer_val_check_interval: int,
        trainer_limit_val_batches: float,
        trainer_limit_test_batches: float,
    ) -> None:
        """Make the datasets for a number of steps, as ``setup`` does with the Trainer's.

        Limits are numbers of steps, or a float of at most 1: that share of the subset, read once.

        Raises:
            TrainError: ``trainer_max_steps`` is below 1, or a share is less than one step.
            InputError: evaluation is requested on a subset that the store does not have.
        """
        if trainer_max_steps < 1:
            raise TrainError(f"max_steps {trainer_max_steps} sets no number of steps: give Trainer(max_steps=...).")
        rounds = trainer_max_steps // max(1, int(trainer_val_check_interval)) + 1
        size = self.global_batch_size
        samples = _SampleCounts(
            trainer_max_steps * size,
            None if _is_fraction(limit := trainer_limit_val_batches) else int(rounds * limit) * size,
            None if _is_fraction(limit := trainer_limit_test_batches) else int(limit) * size,
        )
        self._train, self._validation, self._test = self.datasets.build_datasets(samples)
        self._limit_to_steps("limit_val_batches", trainer_limit_val_batches, self._validation)
        self._limit_to_steps("limit_test_batches", trainer_limit_test_batches, self._test)

    def _limit_to_steps(self, name: str, limit: float, samples: PlanSamples | None) -> float:
        """Return a limit that is a share of samples as a number of steps."""
        if samples is None or not _is_fraction(limit):
            return limit
        steps = len(samples) // self.global_batch_size
        if int(limit * steps) < 1:
            raise TrainError(
                f"{name} {limit} of {steps} steps is less than one step: give at least {1 / steps:.3g}, or a whole "
                "number of steps."
            )
        return int(limit * steps)

    def setup(self, stage: str = "") -> None:
        """Make the datasets for the Trainer's steps."""
        del stage
        trainer = self.trainer
        limits = (trainer.limit_val_batches, trainer.limit_test_batches)
        self.build(trainer.max_steps, trainer.val_check_interval, *limits)

    def reconfigure_limit_batches(self) -> None:
        """Convert the Trainer's integer limits to micro-batches for NeMo's strategy.

        A share of the validation becomes a number, too: it has to end with a step.
        """
        trainer, passes = self.trainer, num_microbatches_calculator.get_num_microbatches()
        trainer.limit_val_batches = self._limit_to_steps(
            "limit_val_batches", trainer.limit_val_batches, self._validation
        )
        for name in ("limit_train_batches", "limit_val_batches", "num_sanity_val_steps"):
            if isinstance(limit := getattr(trainer, name), int):
                setattr(trainer, name, limit * passes)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader, to which NeMo's strategy adds the sampler."""
        # Set it only here: an evaluation during training must not move the step at which training began.
        self.init_global_step = self.data_sampler.init_global_step = self.trainer.global_step
        return self._make_dataloader(self._train, "train")

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the validation loader for NeMo's strategy."""
        return self._make_dataloader(self._validation, "validation") if self._validation else []

    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the test loader for NeMo's strategy."""
        return self._make_dataloader(self._test, "test") if self._test else []

    def _make_dataloader(self, samples: PlanSamples, mode: str) -> DataLoader[Any]:
        dataloader = DataLoader(
            samples,
            batch_size=self.micro_batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers,
        )
        dataloader.mode = mode  # NeMo's sampler reads it.
        return dataloader

    def state_dict(self) -> dict[str, Any]:
        """Return ``consumed_samples`` and the loader's state, which identifies its plan."""
        steps = self.trainer.global_step - self.init_global_step
        consumed = int(self.data_sampler.compute_consumed_samples(steps))
        state = self._train.loader.state_at(consumed // self.global_batch_size)
        return {"consumed_samples": consumed, "loader": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the saved number of samples.

        Raises:
            StateError: the state belongs to another plan (names each field that differs), inside a step, of another
                step than the loader's state, or without a loader state.
        """
        if not {"consumed_samples", "loader"} <= set(state_dict):
            raise StateError(
                f"The checkpoint's data module has {', '.join(map(str, state_dict)) or 'nothing'}, and no loader "
                "state: another data module wrote it, whose consumed_samples count samples in another order. "
                "Continue with that one, or start the data from the beginning."
            )
        consumed, loader = state_dict["consumed_samples"], self._train.loader
        step = resume_from_samples(loader, consumed)
        resume_loader(loader, state_dict["loader"], f"A checkpoint of consumed_samples {consumed}", step)
        sampler = self.data_sampler
        sampler.init_consumed_samples = sampler.prev_consumed_samples = consumed
        sampler.if_first_step = 1


def _is_fraction(limit: float) -> bool:
    """Return whether a Lightning limit is a share: 1 is one batch, and 1.0 all."""
    return isinstance(limit, float) and 0 < limit <= 1


def _check_sampler(datasets: StoreDatasets, sampler: Any) -> None:
    expected = {
        "seq_len": datasets.seq_length,
        "micro_batch_size": datasets.micro_batch_size,
        "global_batch_size": datasets.global_batch_size,
        "dataloader_type": "single",
        "rampup_batch_size": None,
    }
    problems = [
        f"{name} is {getattr(sampler, name, None)!r} and must be {value!r}"
        for name, value in expected.items()
        if getattr(sampler, name, None) != value
    ]
    if problems:
        raise InputError(f"The data_sampler distributes samples differently from the plan: {'; '.join(problems)}.")


def link_text_documents(store: Store, folder: str | os.PathLike[str], name: str) -> list[str]:
    """Link a store's shards under recipe names: ``NAME_00000_text_document.bin``.

    A single shard is ``NAME_text_document``. They are hard links, or symbolic links if the file system has none.

    Returns:
        Weights and prefixes, as ``paths`` of a recipe takes them.

    Raises:
        InputError: see ``adapters.megatron.list_megatron_prefixes``; or the names are taken.
    """
    prefixes, output_folder = list_megatron_prefixes(store), Path(folder)
    output_folder.mkdir(parents=True, exist_ok=True)
    linked_prefixes: list[str] = []
    for number, (tokens, prefix) in enumerate(zip(prefixes[::2], prefixes[1::2], strict=True)):
        part = f"_{number:05d}" if len(prefixes) > 2 else ""
        stem = output_folder / f"{name}{part}_text_document"
        for suffix in (".bin", ".idx"):
            _link_file(Path(prefix + suffix).resolve(), stem.with_name(stem.name + suffix))
        linked_prefixes += [tokens, str(stem)]
    return linked_prefixes


def _link_file(source: Path, target: Path) -> None:
    if target.exists():
        if target.samefile(source):
            return
        raise InputError(f"{target} exists and is another file: choose another name or folder.")
    try:
        target.hardlink_to(source)
    except OSError:
        # The target is on another file system, or on one without hard links.
        target.symlink_to(source)
