"""Two Megatron ranks: micro-batches under each parallelism.

Writes ``rank_N.pt`` for tests/adapters/test_megatron.py: per layout the micro-batches and other results.
"""

import sys
import warnings

import torch
import torch.distributed as dist

import batchloom
from batchloom import BatchloomError

warnings.simplefilter("ignore")
from megatron.core import num_microbatches_calculator as calc, parallel_state

from adapters.forked_ranks import fork_second_rank
from batchloom.adapters import megatron

SIZES = {"seq_len": 64, "global_batch_size": 8, "steps": 3}
PASSES = {"micro_batch_size": 2}
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2},
    "data": {},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    # One of each rank's two model chunks is the first or the last; the other is in the middle.
    "interleaved": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
}


def run_layout(store, layout, folder, rank):
    parallel_state.initialize_model_parallel(**LAYOUTS[layout])
    calc.init_num_microbatches_calculator(rank, None, 8, 2, parallel_state.get_data_parallel_world_size())
    loader = batchloom.Loader(store, **SIZES, **PASSES, **megatron.get_megatron_rank())
    reader, reads = type(store.reader), []
    # The native kernel reads the spans that it locates.
    original_methods = {name: getattr(reader, name) for name in ("read", "locate")}
    for name, method in original_methods.items():
        setattr(reader, name, lambda *args, method=method: reads.append(1) or method(*args))
    stages = (0, 1) if layout == "interleaved" else (None,)

    def make_iterator(stage):
        return megatron.make_megatron_iterator(loader, attention_mask=layout == "tensor", vp_stage=stage)

    chunks = [list(make_iterator(stage)) for stage in stages]
    for name, method in original_methods.items():
        setattr(reader, name, method)
    # Resumed at step 1: the second iterator is read only after the first has returned both remaining steps.
    megatron.resume_from_samples(loader, 8)
    first_iterator, last_iterator = make_iterator(stages[0]), make_iterator(stages[-1])
    resumed_batches = [list(first_iterator), list(last_iterator)]
    result = {
        "apart": resumed_batches,
        "place": (loader.next_step, loader.state_dict()["position"], loader.first_editable_step),
        "chunks": chunks,
        "batches": chunks[0],
        "reads": len(reads),
        "mesh": repr(loader.spec.mesh),
    }
    if layout == "tensor":
        result["losses"] = compute_gpt_losses(chunks[0][0])
    calc.destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    return result


def compute_gpt_losses(batch):
    """Return the losses of a tensor-parallel GPT: packed, and span by span."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import TransformerConfig

    # Its attention asks the GPU for a buffer device and for the random state of dropout.
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
        token_losses = model(tokens, positions, mask, labels=labels)
        return float((token_losses * trained).sum().detach())

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


def collect_errors(store):
    """Return the error messages of wrong setups."""
    messages = []

    def record_error(action):
        try:
            action()
        except BatchloomError as error:
            messages.append(str(error))

    record_error(megatron.get_megatron_rank)
    parallel_state.initialize_model_parallel()
    placement = PASSES | megatron.get_megatron_rank()
    record_error(
        lambda: megatron.make_megatron_iterator(
            batchloom.Loader(store, **SIZES, **{**placement, "labels": "aligned"}), attention_mask=False
        )
    )
    larger_world_loader = batchloom.Loader(store, **SIZES, labels="shifted", rank=0, world_size=4, **PASSES)
    record_error(lambda: megatron.make_megatron_iterator(larger_world_loader, attention_mask=False))
    other_seed_loader = batchloom.Loader(store, **SIZES, seed=dist.get_rank(), **placement)
    record_error(lambda: megatron.make_megatron_iterator(other_seed_loader, attention_mask=False))
    calc.init_num_microbatches_calculator(dist.get_rank(), None, 16, 2, 2)
    loader = batchloom.Loader(store, **SIZES, **placement)
    record_error(lambda: next(megatron.make_megatron_iterator(loader, attention_mask=False)))
    record_error(lambda: megatron.make_megatron_iterator(loader))
    parallel_state.destroy_model_parallel()
    return messages


def main(data, folder):
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), batchloom.open_store(data)
    results = {name: run_layout(store, name, folder, rank) for name in LAYOUTS}
    results["refusals"] = collect_errors(store)
    torch.save(results, f"{folder}/rank_{rank}.pt")
    # Nothing destroys the groups: torch joins their threads while it holds the GIL, and a thread may wait for it.
    dist.barrier()


if __name__ == "__main__":
    with fork_second_rank():
        main(*sys.argv[1:])
