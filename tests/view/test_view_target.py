"""The data of the pages follow what is on disk."""

import batchloom
from batchloom.testing import append_documents, write_store
from batchloom.view import PlanChoice, ViewTarget


def test_an_appended_store_is_opened_again(tmp_path):
    write_store(tmp_path / "store", [[1, 2, 3]])
    target = ViewTarget(str(tmp_path / "store"))
    before = target.open_store("data")
    assert target.open_store("data") is before
    append_documents(tmp_path / "store", [[4, 5], [6]])
    assert len(target.open_store("data")) == 3
    assert target.make_plan(PlanChoice(seq_len=4, global_batch_size=1)).steps >= 2


def test_a_mixture_keeps_the_generation_that_it_names(tmp_path):
    for name in ("a", "b"):
        write_store(tmp_path / name, [[1, 2, 3]])
    (tmp_path / "mix.yaml").write_text(
        f"weights: {{a: 1, b: 1}}\nstores: {{a: {{path: {tmp_path}/a, generation: 1}}, b: {tmp_path}/b}}\n"
    )
    target = ViewTarget(str(tmp_path / "mix.yaml"))
    assert target.source_names == ("a", "b")
    for name in ("a", "b"):
        append_documents(tmp_path / name, [[4, 5]])
    assert [len(target.open_store(name)) for name in ("a", "b")] == [1, 2]
    mixture = batchloom.batches.read_mixture(str(tmp_path / "mix.yaml"))
    loader = batchloom.Loader(mixture, seq_len=8, global_batch_size=2, steps=5)
    assert target.make_plan(PlanChoice(seq_len=8, global_batch_size=2, steps=5)).fingerprint == loader.plan.fingerprint
