"""torchtitan's data loader protocol: an iterator of (inputs, labels) with a state.

In a configuration of torchtitan:

    dataloader=StoreDataLoader.Config(dataset_path="store", global_batch_size=64)
"""

from batchloom.adapters.requirements import TORCH, TORCHTITAN, require_installed

require_installed(TORCH, TORCHTITAN)

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torchtitan.components.dataloader import BaseDataLoader

from batchloom.adapters.agreement import require_agreement
from batchloom.batches import Loader, check_text_only, get_token_reader
from batchloom.core.errors import InputError, StateError
from batchloom.core.settings import quote_value
from batchloom.store import open_store

_STATE_KEY = "batchloom"


@final
class StoreDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Micro-batches of a store's plan for one data-parallel rank.

    torchtitan builds it. Items are ``{"input": ids, "positions": positions}`` and next-token labels, each int64
    [local_batch_size, seq_len], labels -100 without a loss, positions restarting with each document.

    The state is one value, the same on every rank. It resumes on any number of ranks, which torchtitan's own loaders
    reject. It is the position after the steps whose micro-batches were all returned.

    Raises:
        PlanError: ``local_batch_size`` and the ranks do not make up ``global_batch_size``; the error names
            valid sizes.
        TrainError: raised on iteration, which all ranks begin: they do not read the same data.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Settings of torchtitan's ``dataloader``.

        Attributes:
            dataset_path: folder of the store (``dataset`` stays empty).
            split: name of the subset.
            global_batch_size: ``training.global_batch_size``; 0 for local_batch_size on every rank.
            packing, seed, epochs, steps: see ``batchloom.Loader``.
            infinite: restart when the plan ends, as torchtitan's validator requires.
        """

        split: str = "train"
        global_batch_size: int = 0
        packing: str = "best_fit"
        seed: int = 0
        epochs: int | None = None
        steps: int | None = None
        infinite: bool = False

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        tokenizer: object = None,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        # The store has its own tokenizer, and a state costs nothing.
        del tokenizer, snapshot_every_n_steps
        self.loader = Loader(
            open_store(config.dataset_path or config.dataset, config.split),
            seq_len=seq_len,
            global_batch_size=max(config.global_batch_size, 0) or local_batch_size * dp_world_size,
            packing=config.packing,
            seed=config.seed,
            epochs=config.epochs,
            steps=config.steps,
            labels="shifted",
            rank=dp_rank,
            world_size=dp_world_size,
            micro_batch_size=local_batch_size,
        )
        check_text_only(self.loader, "the adapter of torchtitan")
        if get_token_reader(self.loader.store).weighted:
            raise InputError(
                f"{self.loader.origin} has loss weights, which torchtitan's loss does not take: train it with another "
                "trainer, or prepare the data without them (--ignore)."
            )
        self._size = local_batch_size
        self._infinite = config.infinite
        self._done = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        # torchtitan counts data-parallel ranks; tensor-parallel ones read the same share.
        require_agreement(self.loader, world_size=self.loader.spec.world_size)
        while True:
            for batch in self.loader:
                parts = batch.split(self._size)
                for part in parts:
                    # A state that is requested after a step's last micro-batch includes that step.
                    self._done = batch.step + (part is parts[-1])
                    inputs = {"input": part["input_ids"], "positions": part["position_ids"]}
                    yield inputs, part["labels"]
            if not self._infinite:
                return

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the returned steps, as one JSON text.

        So the checkpoint's entries have the same names at any step.
        """
        return {_STATE_KEY: json.dumps(self.loader.state_at(self._done))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state, on any number of ranks.

        Raises:
            StateError: the state is invalid, or of another plan; names each field that differs.
        """
        if not state_dict:
            return
        if _STATE_KEY not in state_dict:
            raise StateError(
                f"The checkpoint's data loader has {', '.join(map(str, state_dict))}, no {_STATE_KEY}: it belongs to "
                "another loader."
            )
        try:
            state = json.loads(state_dict[_STATE_KEY])
        except (TypeError, ValueError) as error:
            raise StateError(
                f"The checkpoint's data loader has {quote_value(state_dict[_STATE_KEY])} as {_STATE_KEY}, which is "
                f"not JSON ({error}): it is damaged. Resume from another checkpoint."
            ) from error
        self.loader.load_state_dict(state)
        self._done = self.loader.next_step
