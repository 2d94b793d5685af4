"""Copies of a document: equal and similar ones in the store, and those that preparation removed."""

import json
import re
from html import unescape

import httpx
import pytest

import batchloom
from batchloom.testing import write_store
from view.conftest import TOKEN, serving

WORDS = [f"word{number}" for number in range(400)]


def make_text(*, start=0, changed=0):
    """Return a text of 200 words, whose last ones may differ."""
    return " ".join([*WORDS[start : start + 200 - changed], *(f"other{start}{number}" for number in range(changed))])


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def prepare(file, out, **options):
    batchloom.prepare(file, out=out, tokenizer="bytes", val_fraction=0, **options)
    return out


@pytest.fixture
def store(tmp_path):
    """A store whose first document has an equal and a similar copy that preparation removed."""
    texts = [make_text(), make_text(start=150), make_text(), make_text(changed=4)]
    return prepare(write_rows(tmp_path / "rows.jsonl", texts), tmp_path / "store", dedup="near")


def read_copies(page, address, number):
    page.goto(f"{address}/?token={TOKEN}")
    page.goto(f"{address}/document/{number}")
    section = page.locator("section[hx-get]")
    section.locator("h2").wait_for()
    return section


def test_removed_copies_are_those_of_the_report(page, store):
    with serving(store) as address:
        section = read_copies(page, address, 0)
        rows = section.locator("tbody tr").all_inner_texts()
        assert [row.split("\t")[:2] for row in rows] == [["rows.jsonl", "3"], ["rows.jsonl", "4"]]
        assert "No other document of subset train is equal or similar." in section.inner_text()
        assert "removed 1 exact duplicate and 1 near duplicate" in section.inner_text()
        assert "no copy of this document is among them" in read_copies(page, address, 1).inner_text()


def test_copies_in_a_report_by_folder_are_unknown(page, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(202):
        write_rows(tmp_path / "in" / f"{number:03}.jsonl", [make_text(start=number), make_text(start=number % 2)])
    with serving(prepare(tmp_path / "in", tmp_path / "store")) as address:
        text = read_copies(page, address, 0).inner_text()
        assert "removed 202 exact duplicates" in text
        assert "so the copies of this document are unknown" in text


def list_shingles(text):
    return {text.encode()[start : start + 5] for start in range(len(text) - 4)}


def test_a_similar_document_is_listed_with_its_estimated_similarity(page, store, tmp_path):
    # Appended documents are not compared with removed ones, so that a similar one gets into the store.
    (tmp_path / "named").write_text(batchloom.open_store(store)[0].provenance.hash + "\n")
    batchloom.store.remove_documents(store, documents_file=tmp_path / "named")
    text = make_text(changed=6)
    batchloom.prepare(write_rows(tmp_path / "more.jsonl", [text]), out=store, append=True, dedup="near")
    first, second = list_shingles(make_text()), list_shingles(text)
    with serving(store) as address:
        (row,) = read_copies(page, address, 2).locator("table.copies tbody tr").all()
        number, similarity, shared, begins = row.locator("th, td").all_inner_texts()
        assert (number, begins) == ("0", "(removed from the store)")
        expected = 100 * len(first & second) / len(first | second)
        assert float(similarity.removeprefix("about ").removesuffix("%")) == pytest.approx(expected, abs=6)
        assert 0 < int(shared.partition(" of ")[0]) <= 14


def test_the_search_for_copies_goes_on_from_a_document(tmp_path):
    # Documents 0 and 63,001 are equal, and a step of the search has 65,536 documents.
    store = write_store(tmp_path / "store", [[number % 251, number // 251 % 251] for number in range(70_000)])
    with serving(store.path) as address, httpx.Client(base_url=address, follow_redirects=True) as client:
        client.get("/", params={"token": TOKEN})
        for start, expected in ((1, ["63,001"]), (63_001, ["63,001"]), (63_002, [])):
            text = client.get(f"/document/0/copies?start={start}").text
            while more := re.search(r'hx-get="([^"]+)"', text.rpartition("<tr")[2]):
                text = text.rpartition("<tr")[0] + client.get(unescape(more[1])).text
            assert re.findall(r"<a href=[^>]+>([\d,]+)</a>", text) == expected


def test_equal_documents_are_listed_without_signatures(page, tmp_path):
    texts = [make_text(), make_text(start=50), make_text(), make_text()]
    with serving(prepare(write_rows(tmp_path / "rows.jsonl", texts), tmp_path / "store", dedup="none")) as address:
        section = read_copies(page, address, 2)
        rows = [row.split("\t")[:2] for row in section.locator("tbody tr").all_inner_texts()]
        assert rows == [["0", "equal text"], ["3", "equal text"]]
        assert "The store has no MinHash signatures" in section.inner_text()
        section.locator("tbody a").first.click()
        page.wait_for_url("**/document/0*")


def test_data_without_provenance_has_no_copies(page, tmp_path):
    store = write_store(tmp_path / "store", [[104, 105]])
    for data in (store.path / "train" / "shard_00000", "dummy:documents=2000000"):
        with serving(data) as address:
            page.goto(f"{address}/document/0?token={TOKEN}")
            assert page.locator("section[hx-get]").count() == 0
            for path in ("/document/0/copies", f"/documents?mode=hash&text={'0' * 32}"):
                assert page.goto(address + path).status == 400
                assert "hashes of" in page.get_by_role("alert").inner_text()
            # Chromium reports the status as an error of the console.
            page.problems.clear()
