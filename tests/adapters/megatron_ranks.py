"""One of two ranks of tests/adapters/test_megatron.py: what Megatron's processes are given under each parallelism.

Leaves ``rank_N.pt`` in the folder: for each layout the micro-batches, and what else was seen.
"""

import sys
import warnings

import torch
import torch.distributed as dist

import batchloom
from batchloom import BatchloomError, Store

warnings.simplefilter("ignore")
from megatron.core import num_microbatches_calculator as calc, parallel_state

from batchloom.adapters import megatron
from batchloom.batches import BatchOptions

SIZES = {"seq_len": 64, "global_batch_size": 8, "steps": 3}
PASSES = BatchOptions(micro_batch_size=2)
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "data": {},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    # Of each rank's two chunks of the model one begins or ends it, and the other lies between.
    "interleaved": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def run(store, layout, folder, rank):
    parallel_state.initialize_model_parallel(**LAYOUTS[layout])
    calc.init_num_microbatches_calculator(rank, None, 8, 2, parallel_state.get_data_parallel_world_size())
    loader = batchloom.Loader(store, **SIZES, **megatron.get_megatron_rank(PASSES))
    read, reads = Store.read, []
    Store.read = lambda *given: reads.append(1) or read(*given)
    stages = (0, 1) if layout == "interleaved" else (None,)

    def begin(stage):
        return megatron.make_megatron_iterator(loader, attention_mask=layout == "tensor", vp_stage=stage)

    chunks = [list(begin(stage)) for stage in stages]
    Store.read = read
    # Resumed at step 1: another iterator is first asked when one has given both steps that are left.
    megatron.resume_from_samples(loader, 8)
    one, other = begin(stages[0]), begin(stages[-1])
    apart = [list(one), list(other)]
    told = {
        "apart": apart,
        "place": (loader.next_step, loader.state_dict()["position"], loader.first_editable_step),
        "chunks": chunks,
        "batches": chunks[0],
        "reads": len(reads),
        "mesh": repr(loader.spec.mesh),
    }
    if layout == "tensor":
        told["losses"] = losses(chunks[0][0])
    calc.destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    return told


def losses(batch):
    """Of a tiny GPT, cut over the tensor-parallel ranks: of a packed micro-batch, and of its spans one by one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig

    # What its attention wants of a GPU: a place for a buffer, and the state of random numbers for dropout.
    torch.cuda.current_device = lambda: "cpu"
    initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="LayerNorm"),
        vocab_size=320,
        max_sequence_length=64,
        parallel_output=True,
    ).eval()

    def loss(tokens, positions, mask, labels, trained):
        given = model(tokens, positions, mask, labels=labels)
        return float((given * trained).sum().detach())

    packed = loss(*(batch[name] for name in ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")))
    alone = 0.0
    for row in range(len(batch["tokens"])):
        starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], 64], strict=True):
            at = (slice(row, row + 1), slice(start, stop))
            mask = torch.ones(1, 1, stop - start, stop - start).triu(1).bool()
            tokens, positions = batch["tokens"][at], batch["position_ids"][at]
            alone += loss(tokens, positions, mask, batch["labels"][at], batch["loss_mask"][at])
    return packed, alone


def refusals(store):
    """What is said before and while a run is badly set up."""
    said = []

    def asked(do):
        try:
            do()
        except BatchloomError as error:
            said.append(str(error))

    asked(megatron.get_megatron_rank)
    parallel_state.initialize_model_parallel()
    place = megatron.get_megatron_rank(PASSES)
    asked(
        lambda: megatron.make_megatron_iterator(
            batchloom.Loader(store, **SIZES, **{**place, "labels": "aligned"}), attention_mask=False
        )
    )
    half = batchloom.Loader(store, **SIZES, labels="shifted", rank=0, world_size=4, batch=PASSES)
    asked(lambda: megatron.make_megatron_iterator(half, attention_mask=False))
    other = batchloom.Loader(store, **SIZES, seed=dist.get_rank(), **place)
    asked(lambda: megatron.make_megatron_iterator(other, attention_mask=False))
    calc.init_num_microbatches_calculator(dist.get_rank(), None, 16, 2, 2)
    given = batchloom.Loader(store, **SIZES, **place)
    asked(lambda: next(megatron.make_megatron_iterator(given, attention_mask=False)))
    asked(lambda: megatron.make_megatron_iterator(given))
    parallel_state.destroy_model_parallel()
    return said


def main(data, folder):
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), batchloom.open_store(data)
    told = {name: run(store, name, folder, rank) for name in LAYOUTS}
    told["refusals"] = refusals(store)
    torch.save(told, f"{folder}/rank_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
