"""Ranks that would train on different data fail before the first step."""

import json

import pytest

import batchloom
from batchloom.adapters.agreement import find_disagreement, require_agreement
from batchloom.core.errors import TrainError
from batchloom.testing import write_store
from processes import run_two_ranks

SIZES = {"seq_len": 16, "global_batch_size": 4}
SCRIPT = """
import json, os, sys
import torch.distributed as dist
import batchloom
from batchloom.adapters.agreement import require_agreement
from batchloom.core.errors import TrainError
from batchloom.plan import Edit

dist.init_process_group("gloo")
rank = dist.get_rank()
stores = sys.argv[1:]
SIZES = {"seq_len": 16, "global_batch_size": 4}
cases = {
    "alike": ({}, {}),
    "store": ({"data": stores[0]}, {"data": stores[1]}),
    "seed": ({}, {"seed": 1}),
    "share": ({"rank": 0, "world_size": 2}, {"rank": 0, "world_size": 2}),
    "world": ({}, {"rank": 0, "world_size": 1}),
    "labels": ({}, {"labels": "shifted"}),
    "step": ({}, {"resume": 1}),
    "edit": ({}, {"edit": 3}),
    "augment": ({}, {"augment": {"noise_prob": 0.3, "vocab_size": 999}}),
    "half": ({"rank": 0, "world_size": 4}, {"rank": 1, "world_size": 4}),
    "peers": ({"rank": 0, "world_size": 1, "shares": 1},) * 2,
    "twice": ({"rank": 0, "world_size": 2, "shares": 2},) * 2,
}
messages = {}
for name, rank_options in cases.items():
    options = dict(rank_options[rank])
    defaults = (("data", stores[0]), ("resume", 0), ("edit", 0), ("shares", None))
    store, resume, edit, shares = (options.pop(key, default) for key, default in defaults)
    loader = batchloom.Loader(batchloom.open_store(store), **SIZES, **options)
    if resume:
        loader.load_state_dict(loader.state_at(resume))
    if edit:
        loader.edit(Edit(step=edit, global_batch_size=2))
    try:
        require_agreement(loader, world_size=shares)
        messages[name] = ""
    except TrainError as error:
        messages[name] = str(error)
with open(f"{sys.argv[3]}/rank_{rank}.json", "w") as file:
    json.dump(messages, file)
# Nothing destroys the group: torch joins its threads while it holds the GIL, and a thread may wait for it.
dist.barrier()
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agreement")
    for name, base in (("one", 1), ("two", 2)):
        write_store(folder / name, [[base + n % 7 for n in range(k)] for k in range(1, 60)])
    (folder / "script.py").write_text(SCRIPT)
    run_two_ranks(folder / "script.py", folder / "one", folder / "two", folder)
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


def test_ranks_that_agree_go_on(messages):
    assert [messages[0][case] for case in ("alike", "peers")] == ["", ""]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("store", "identity.sources.data.store is "),
        ("seed", "identity.spec.seed is 0 on rank 0 and 1 on rank 1"),
        ("share", "Ranks 0 and 1 both read the share of rank 0 of 2"),
        ("world", "world_size is 2 on rank 0 and 1 on rank 1"),
        ("labels", "labels is 'aligned' on rank 0 and 'shifted' on rank 1"),
        ("step", "next_step is 0 on rank 0 and 1 on rank 1"),
        ("edit", "edits is "),
        ("augment", "augment.noise_prob is 0.0 on rank 0 and 0.3 on rank 1"),
        (
            "half",
            "reads the share of rank 0 of 4, and world_size is 2: parts of a step would",
        ),
        ("twice", "Ranks 0 and 1 both read the share of rank 0 of 2"),
    ],
)
def test_what_differs_is_named_on_every_rank(messages, case, message):
    assert message in messages[0][case]
    assert messages[0][case] == messages[1][case]


def test_versions_are_compared(tmp_path):
    first = {"place": [0, 2], "equal": {"batchloom": "1.0"}}
    second = {"place": [1, 2], "equal": {"batchloom": "1.1"}}
    assert "batchloom is '1.0' on rank 0 and '1.1' on rank 1" in find_disagreement([first, second])


def test_one_process_has_nothing_to_compare(tmp_path):
    store = write_store(tmp_path, [[1, 2, 3]])
    require_agreement(batchloom.Loader(store, **SIZES))
    rank_1_loader = batchloom.Loader(store, **SIZES, rank=1, world_size=2)
    with pytest.raises(TrainError, match="the share of rank 1 of 2, and world_size is 1"):
        require_agreement(rank_1_loader)
    # The framework knows the second rank; torch.distributed does not.
    require_agreement(rank_1_loader, world_size=2)
