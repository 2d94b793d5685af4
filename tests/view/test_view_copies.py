"""Copies of a document: equal and similar ones in the store, and those that preparation dropped."""

import gzip
import json
import re
import zipfile
from html import unescape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchloom
from batchloom.testing import write_store
from view.conftest import TOKEN, open_client, serving
from waiting import LIMIT_S

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


@pytest.fixture(autouse=True)
def time_for_texts(monkeypatch):
    """Let the page read texts on a busy machine, too."""
    monkeypatch.setattr("batchloom.view.documents.document_family._TEXT_SECONDS", LIMIT_S)


@pytest.fixture
def store(tmp_path):
    """A store whose first document has an equal and a similar copy that preparation dropped."""
    texts = [make_text(), make_text(start=150), make_text(), make_text(changed=4)]
    return prepare(write_rows(tmp_path / "rows.jsonl", texts), tmp_path / "store", dedup="near")


def read_copies(page, address, number):
    page.goto(f"{address}/?token={TOKEN}")
    page.goto(f"{address}/document/{number}")
    section = page.locator("section[hx-get]")
    section.locator("h2").wait_for()
    return section


def read_dropped(section):
    """Return the rows of dropped duplicates: file, position, similarity, beginning."""
    return [row.split("\t") for row in section.locator("table.dropped tbody tr").all_inner_texts()]


def test_all_dropped_duplicates_are_listed_with_their_texts(page, tmp_path):
    """A family of 7 exact and 12 near duplicates over three files."""
    exact, near = [make_text()], [make_text(changed=count) for count in range(1, 7)]
    longer = [f"{text} and more" for text in near]
    files = {"a": exact + near, "b": [make_text(start=150), *exact * 3, *longer], "c": exact * 4}
    paths = [write_rows(tmp_path / f"{name}.jsonl", texts) for name, texts in files.items()]
    with serving(prepare(paths, tmp_path / "store", dedup="near")) as address:
        section = read_copies(page, address, 0)
        rows = read_dropped(section)
        copies = [(name, line, text) for name in files for line, text in enumerate(files[name], 1)]
        expected = [copy for copy in copies if copy[:2] not in (("a", 1), ("b", 1))]
        assert len(rows) == len(expected) == 19
        for (name, line, text), row in zip(expected, rows, strict=True):
            assert row[:2] == [f"{name}.jsonl", f"line {line}"]
            assert row[3].startswith(text[:100])
            assert (row[2] == "equal text") == (text in exact)
            if text not in exact:
                first, second = list_shingles(make_text()), list_shingles(text)
                similarity = 100 * len(first & second) / len(first | second)
                assert float(row[2].removeprefix("about ").removesuffix("%")) == pytest.approx(similarity, abs=10)
        assert "dropped 7 exact duplicates and 12 near duplicates in all." in section.inner_text()
        assert "none of them a copy of this document" in read_copies(page, address, 1).inner_text()
        (tmp_path / "b.jsonl").unlink()
        rows = read_dropped(read_copies(page, address, 0))
        assert [row[3].startswith("Its file cannot be read") for row in rows] == [row[0] == "b.jsonl" for row in rows]


@pytest.mark.slow
def test_dropped_duplicates_of_appended_documents_are_listed(page, store, tmp_path):
    batchloom.prepare(
        write_rows(tmp_path / "more.jsonl", [make_text(changed=2), make_text(start=60), make_text(start=60)]),
        out=store,
        append=True,
        dedup="near",
    )
    with serving(store) as address:
        for number, expected in ((0, ["rows.jsonl:3", "rows.jsonl:4", "more.jsonl:1"]), (2, ["more.jsonl:3"])):
            rows = read_dropped(read_copies(page, address, number))
            assert [f"{row[0]}:{row[1].removeprefix('line ')}" for row in rows] == expected


@pytest.mark.slow
def test_the_overview_counts_the_stored_documents_of_all_generations(page, store, tmp_path):
    batchloom.prepare(write_rows(tmp_path / "more.jsonl", ["one", "two"]), out=store, append=True)
    with serving(store) as address:
        page.goto(f"{address}/?token={TOKEN}")
        rows = page.locator("section", has=page.locator("#sources")).locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [["rows.jsonl", "2"], ["more.jsonl", "2"]]


@pytest.mark.slow
def test_a_generation_without_duplicates_is_complete(page, tmp_path):
    store = prepare(write_rows(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "store")
    batchloom.prepare(write_rows(tmp_path / "b.jsonl", ["one"]), out=store, append=True)
    with serving(store) as address:
        section = read_copies(page, address, 0)
        assert [row[:2] for row in read_dropped(section)] == [["b.jsonl", "line 1"]]
        assert "dropped 1 exact duplicate in all." in section.inner_text()


@pytest.mark.slow
def test_a_large_family_is_shown_page_by_page(page, tmp_path):
    with serving(prepare(write_rows(tmp_path / "rows.jsonl", ["same"] * 108), tmp_path / "store")) as address:
        section = read_copies(page, address, 0)
        for count in (50, 100):
            assert f"{count} of 107 copies are shown." in section.inner_text()
            section.get_by_role("button", name="Show more").click()
            section.locator("table.dropped tbody tr").nth(count + 1).wait_for()
        assert [row[1] for row in read_dropped(section)] == [f"line {number}" for number in range(2, 109)]


def test_a_damaged_file_of_dropped_duplicates_is_named(page, store):
    path = store / "report.duplicates"
    path.write_bytes(path.read_bytes()[:-1])
    with serving(store) as address:
        page.goto(f"{address}/document/0?token={TOKEN}")
        page.get_by_role("heading", name="Copies").wait_for()
        assert "report.duplicates declares 2 rows" in page.get_by_role("alert").inner_text()


def fetch_dropped(store, number=0):
    """Return the rows of the dropped duplicates of a document without a browser."""
    with serving(store) as address, open_client(address) as client:
        table = client.get(f"/document/{number}/copies").text.partition('<table class="dropped">')[2]
    rows = re.findall(r"<tr>(<td.*?)</tr>", table)
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in re.findall("<td.*?>(.*?)</td>", row)] for row in rows]


def test_an_impossible_offset_of_a_dropped_duplicate_hides_its_text(store):
    path = store / "report.duplicates"
    data = path.read_bytes()
    assert fetch_dropped(store)[0][3].startswith("word0 word1")
    # The rows begin at byte 48, and the offset is the third number of the first.
    path.write_bytes(data[:64] + b"\xff" * 8 + data[72:])
    assert "too far inside its file" in fetch_dropped(store)[0][3]


def compress_rows(path, texts, level=9):
    path.write_bytes(gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts), level))


FORMATS = {
    "a.jsonl": write_rows,
    "a.jsonl.gz": compress_rows,
    "a.json": lambda path, texts: path.write_text(json.dumps([{"text": text} for text in texts])),
    "a.csv": lambda path, texts: path.write_text("id,text\n" + "".join(f'{n},"{t}"\n' for n, t in enumerate(texts))),
    "a.parquet": lambda path, texts: pq.write_table(
        pa.table({"text": texts, "id": list(range(len(texts)))}), path, row_group_size=3
    ),
    "a.txt": lambda path, texts: path.write_text("\n\n".join(texts)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "a.jsonl.gz" else [pytest.mark.slow]) for name in FORMATS],
)
def test_the_text_of_a_dropped_duplicate_is_read_from_its_file(tmp_path, name):
    texts = [f"the first text, {'long ' * 60}", *(f"text {n} " * 20 for n in range(9))]
    FORMATS[name](tmp_path / name, [*texts, *texts[:2], *texts[0:5:2]])
    store = prepare(tmp_path / name, tmp_path / "store", split_on="paragraph", dedup="exact")
    for number, count in enumerate((2, 1, 1, 0, 1)):
        rows = fetch_dropped(store, number)
        assert [row[2:] for row in rows] == [["equal text", " ".join(texts[number][:240].split())]] * count


def test_a_dropped_conversation_is_shown_as_its_record(tmp_path):
    row = {"messages": [{"role": "user", "content": "1 < 2?"}, {"role": "assistant", "content": "Yes"}]}
    (tmp_path / "a.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    ((_, _, _, words),) = fetch_dropped(prepare(tmp_path / "a.jsonl", tmp_path / "store", template="plain"))
    assert json.loads(words) == row


@pytest.mark.slow
def test_both_documents_of_a_pair_have_its_dropped_duplicates(tmp_path):
    pairs = [{"prompt": "p", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in (0, 1, 0, 1, 0)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    store = prepare(tmp_path / "a.jsonl", tmp_path / "store", template="plain")
    for number, lines in enumerate((["line 3", "line 5"], ["line 3", "line 5"], ["line 4"], ["line 4"])):
        assert [row[1] for row in fetch_dropped(store, number)] == lines


@pytest.mark.slow
def test_the_page_says_why_a_text_is_not_read(tmp_path):
    file, store = tmp_path / "a.jsonl", tmp_path / "store"
    prepare(write_rows(file, ["one text"] * 2), store)
    file.touch()
    assert fetch_dropped(store) == [["a.jsonl", "line 2", "equal text", "Its file was changed after it was prepared."]]
    file.unlink()
    assert fetch_dropped(store)[0][3].startswith("Its file cannot be read: ")
    report = json.loads((store / "report.json").read_text())
    report["sources"][0]["path"] = "https://example.com/a.jsonl"
    (store / "report.json").write_text(json.dumps(report))
    assert fetch_dropped(store)[0][3] == "Its file is remote and is not read here."
    (store / "report.json").unlink()
    assert fetch_dropped(store)[0][3] == "The report of the store does not name its file."


def test_copies_in_an_archive_are_listed_without_texts(tmp_path):
    write_rows(tmp_path / "a.jsonl", ["one text"] * 2)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "a.jsonl", "a.jsonl")
    rows = fetch_dropped(prepare(tmp_path / "a.zip", tmp_path / "store"))
    assert [row[1:] for row in rows] == [["line 2", "equal text", "It is in an archive, which is not read here."]]


def test_a_record_far_inside_a_compressed_file_is_not_read(tmp_path):
    # Without compression, so that the file has over 4 MiB.
    compress_rows(tmp_path / "a.jsonl.gz", ["one text", *(f"{n}" * 50_000 for n in range(10, 60)), "one text"], level=0)
    rows = fetch_dropped(prepare(tmp_path / "a.jsonl.gz", tmp_path / "store"))
    assert [row[3] for row in rows] == ["It is too far inside its file to be read here."]


def test_a_deleted_file_of_dropped_duplicates_is_named(store):
    (store / "report.duplicates").unlink()
    assert fetch_dropped(store) == []
    with serving(store) as address, open_client(address) as client:
        text = client.get("/document/0/copies").text
    assert "dropped 1 exact duplicate and 1 near duplicate in all. The store does not record all of them" in text


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
    with serving(store.path) as address, open_client(address) as client:
        for start, expected in ((1, ["63,001"]), (63_001, ["63,001"]), (63_002, [])):
            text = client.get(f"/document/0/copies?start={start}").text
            while more := re.search(r'hx-get="([^"]+)"', text.rpartition("<tr")[2]):
                text = text.rpartition("<tr")[0] + client.get(unescape(more[1])).text
            assert re.findall(r"<a href=[^>]+>([\d,]+)</a>", text) == expected


def test_a_long_list_of_equal_documents_goes_on(tmp_path):
    store = write_store(tmp_path / "store", [[7, 7]] * 250)
    with serving(store.path) as address, open_client(address) as client:
        listed, path = [], "/document/5/copies"
        while path:
            text = client.get(path).text
            numbers = [int(number) for number in re.findall(r"<a href=[^>]+>(\d+)</a>", text)]
            assert len(numbers) <= 100
            listed += numbers
            # A reader asks for each part, as there may be millions.
            more = re.search(r'<tr class="more" hx-get="([^"]+)" hx-trigger="click"', text)
            path = unescape(more[1]) if more else ""
    assert listed == [number for number in range(250) if number != 5]


@pytest.mark.slow
def test_equal_documents_are_listed_without_signatures(page, tmp_path):
    texts = [make_text(), make_text(start=50), make_text(), make_text()]
    with serving(prepare(write_rows(tmp_path / "rows.jsonl", texts), tmp_path / "store", dedup="none")) as address:
        section = read_copies(page, address, 2)
        rows = [row.split("\t")[:2] for row in section.locator("tbody tr").all_inner_texts()]
        assert rows == [["0", "equal text"], ["3", "equal text"]]
        assert "The store has no MinHash signatures" in section.inner_text()
        section.locator("tbody a").first.click()
        page.wait_for_url("**/document/0*")


@pytest.mark.slow
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
