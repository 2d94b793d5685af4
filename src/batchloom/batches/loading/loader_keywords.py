"""Keyword arguments of functions; docs/write_reference.py writes them."""

from typing import Literal, TypedDict

from batchloom.batches.assembly.batch_spec import MediaOptions
from batchloom.plan import Mesh


class LoaderOptions(TypedDict, total=False):
    """Settings of the order and of batches; None is unset."""

    seq_len: int | None
    global_batch_size: int | None
    packing: str | None
    overlong: Literal["split", "drop", "truncate", "error"] | None
    seed: int | None
    shuffle: bool | None
    epochs: int | None
    steps: int | None
    last: Literal["fill", "drop"] | None
    pool_size: int | None
    block: int | None
    lanes: int | None
    align: int | None
    group_by_length: int | None
    rank: int | None
    world_size: int | None
    labels: Literal["aligned", "shifted"] | None
    output: Literal["torch", "numpy"] | None
    form: Literal["rows", "varlen"] | None
    prefetch: int | None
    device: object
    mesh: Mesh | None
    uneven: Literal["refuse", "pad"] | None
    micro_batch_size: int | None
    balance: bool | None
    dtype: Literal["int64", "int32"] | None
    media: MediaOptions | None
