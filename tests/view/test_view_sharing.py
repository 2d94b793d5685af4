"""Pages in one file, displays in a notebook, and rows in a terminal."""

import importlib.metadata
import re
import sys

import numpy as np
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.testing import write_store


@pytest.fixture
def loader(chats):
    return batchloom.Loader(batchloom.open_store(chats), seq_len=256, global_batch_size=4, output="numpy")


@pytest.mark.parametrize(
    ("choice", "name", "heading", "content"),
    [
        ([], "the overview", "store, subset train", "chats.jsonl"),
        (["--step", "1", "--seq-len", "256"], "step 1", "Step 1", "store, subset train"),
        (["--document", "7"], "document 7", "Document 7", "<script>alert(1)</script>"),
    ],
)
def test_a_page_file_needs_no_server_and_no_script(chats, tmp_path, page, capsys, choice, name, heading, content):
    file = tmp_path / "page.html"
    assert run_command_line(["view", str(chats), "--out", str(file), *choice]) == 0
    assert capsys.readouterr().out == f"Wrote {name} of {chats} to {file}.\n"
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(file.as_uri())
    assert page.locator("h1").inner_text().startswith(heading)
    text = page.locator("main").inner_text()
    assert content in text
    # Others read the file, and the folders of its author are none of their business.
    assert str(chats.parent) not in text
    # The stylesheet inside the file is the only one its policy admits.
    assert page.evaluate("getComputedStyle(document.body).marginTop") == "0px"
    assert requests == [file.as_uri()]
    assert page.locator("script, form, link, a[href], button").count() == 0
    assert len(file.read_bytes()) < 200_000


def test_a_page_file_is_of_one_prepared_page(chats, tmp_path, capsys):
    file = str(tmp_path / "page.html")
    for arguments, message in (
        ([str(chats), "--step", "1", "--document", "2"], "have a page each"),
        ([str(chats.parent / "chats.jsonl")], "prepared data"),
        ([str(chats), "--document", "999"], "There is no document 999"),
        ([str(chats), "--step", "999999"], "no step 999,999"),
    ):
        assert run_command_line(["view", *arguments, "--out", file]) != 0
        assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_notebook_shows_stores_plans_and_batches(loader, page, tmp_path):
    batch = loader[1]
    frames = [value._repr_html_() for value in (loader.store, loader.plan, batch)]
    (tmp_path / "notebook.html").write_text("".join(frames))
    page.goto((tmp_path / "notebook.html").as_uri())
    headings = [page.frame_locator(f"iframe >> nth={number}").locator("h1").inner_text() for number in range(3)]
    assert headings[1:] == ["Step 0 4 rows of 256 tokens", f"Batch of step 1 {batch.origin}"]
    shown = page.frame_locator("iframe >> nth=2")
    assert shown.locator("rect.span").count() == len(batch.layout.lengths)
    trained = sum(int(mark.get_attribute("width")) for mark in shown.locator("rect.loss").all())
    assert trained == int((batch["labels"] != -100).sum())
    assert "input_ids" in shown.locator("table").inner_text()


def test_a_rebuilt_or_varlen_batch_lists_its_arrays(loader):
    for batch in (type(loader[0])(dict(loader[0])), batchloom.batches.Batch({"input_ids": np.zeros(3, np.int64)})):
        assert "input_ids" in batch._repr_html_()
        assert "rect class" not in batch._repr_html_()


def test_a_notebook_shows_the_text_without_the_packages_of_the_pages(loader, monkeypatch):
    def find_version(name, find=importlib.metadata.version):
        if name == "starlette":
            raise importlib.metadata.PackageNotFoundError(name)
        return find(name)

    monkeypatch.delitem(sys.modules, "batchloom.view", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", find_version)
    assert loader.store._repr_html_() is None
    assert loader.plan._repr_html_() is None


def test_a_terminal_shows_spans_loss_and_padding(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "25")
    write_store(tmp_path / "store", [[97] * 8, [98] * 4], trained=[[0] * 4 + [1] * 4, [1] * 4])
    loader = batchloom.Loader(
        batchloom.open_store(tmp_path / "store"), seq_len=16, global_batch_size=1, output="numpy", shuffle=False
    )
    loader.show(0)
    row = capsys.readouterr().out.splitlines()[1]
    match = re.fullmatch(r"0 (\S{16})  75.0%", row)
    assert match
    drawn = np.array(list(match[1]))
    assert ((drawn == "█") == np.append(loader[0]["labels"][0] != -100, [])).all()
    assert ((drawn == "·") == (np.arange(16) >= 12)).all()
    with pytest.raises(batchloom.SettingsError):
        loader.show(-1)
