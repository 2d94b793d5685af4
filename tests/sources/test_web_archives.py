"""Web archives: WARC and WET files, and dumps that are refused by their beginning."""

import bz2
import gzip
import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastwarc.warc import ArchiveIterator, WarcRecordType

import batchloom
from batchloom import InputError, Plan, PlanSpec, StoreError, check, explain, open_store
from batchloom.sources import ReadLimits, list_sources
from batchloom.store import compact_store, export_store, remove_documents
from preparation.stores import prepare_store, read_texts
from sources.source_reading import read_inputs

PAGE = "<html><head><title>t</title></head><body><p>Caf\u00e9 %s</p></body></html>"


def make_record(kind, body, end=b"\r\n", length=None, number=0):
    lines = [
        *(b"WARC/1.0", b"WARC-Type: " + kind.encode(), b"WARC-Date: 2020-01-01T00:00:00Z"),
        *(f"WARC-Target-URI: http://host/{number}".encode(), b"WARC-Record-ID: <urn:uuid:%d>" % number),
        b"Content-Type: application/http; msgtype=response" if kind == "response" else b"Content-Type: text/plain",
        b"Content-Length: %d" % (len(body) if length is None else length),
    ]
    return end.join([*lines, b"", b""]) + body + end + end


def make_response(body, content_type="text/html; charset=iso-8859-1", headers=""):
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{headers}\r\n".encode() + body


def chunk(body):
    return b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


RESPONSES = [
    (make_response((PAGE % 0).encode("latin-1")), "Caf\u00e9 0"),
    (
        make_response(
            chunk(gzip.compress((PAGE % 1).encode())),
            "text/html; charset=utf-8",
            "Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        ),
        "Caf\u00e9 1",
    ),
    (make_response(gzip.compress((PAGE % 3).encode("latin-1")), headers="Content-Encoding: x-gzip\r\n"), "Caf\u00e9 3"),
    (make_response((PAGE % 2).encode("utf-16-le"), "text/html; charset=utf-16le"), "Caf\u00e9 2"),
    (make_response("\u65e5\u672c\u8a9e\u306e\u6587\u66f8\u3067\u3059".encode("shift_jis"), "text/plain; charset=shift_jis"), "\u65e5\u672c\u8a9e\u306e\u6587\u66f8\u3067\u3059"),
    (make_response(b"<html><meta charset=windows-1251><p>" + "\u041f\u0440\u0438\u0432\u0435\u0442".encode("cp1251"), "text/html"), "\u041f\u0440\u0438\u0432\u0435\u0442"),
]  # fmt: skip
ARCHIVE = b"".join(
    [
        make_record("warcinfo", b"software: x\r\n"),
        *(
            make_record(kind, body, number=number)
            for number, (response, _) in enumerate(RESPONSES)
            for kind, body in (("request", b"GET / HTTP/1.1\r\n\r\n"), ("response", response), ("metadata", b"a: b"))
        ),
        make_record("revisit", b"HTTP/1.1 304 Not Modified\r\n\r\n"),
        make_record("response", make_response(b"\x89PNG", "image/png")),
    ]
)
WET = [f"Page {n}: a text with caf\u00e9.\n" for n in range(40)]


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.warc", bytes), ("a.warc.gz", gzip.compress), ("a.warc.bz2", bz2.compress), ("data", bytes)],
)
def test_responses_are_documents_and_other_records_are_counted(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(ARCHIVE))
    result = prepare_store(tmp_path / name, tmp_path / "out", dedup="none", val_fraction=0)
    assert read_texts(result.path) == [text for _, text in RESPONSES]
    dropped = {
        f"{kind} records of web archives": count
        for kind, count in (("request", len(RESPONSES)), ("metadata", len(RESPONSES)))
    }
    dropped |= {f"{kind} records of web archives": 1 for kind in ("warcinfo", "revisit")}
    assert result.counts.dropped == {**dropped, "responses without text": 1}
    [first, *_] = read_inputs(tmp_path / name).values
    assert first == {"text": "Caf\u00e9 0", "url": "http://host/0", "date": "2020-01-01T00:00:00Z"}


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
@pytest.mark.parametrize("chunk_bytes", [1 << 20, 97])
def test_conversions_are_those_of_fastwarc(tmp_path, monkeypatch, end, chunk_bytes):
    monkeypatch.setattr("batchloom.sources.formats.warc_format._CHUNK_BYTES", chunk_bytes)
    data = b"".join(make_record("conversion", text.encode(), end, number=n) for n, text in enumerate(WET))
    (tmp_path / "a.warc.wet").write_bytes(data)
    result = read_inputs(tmp_path / "a.warc.wet", field="text")
    assert result.values == WET
    records = list(ArchiveIterator(io.BytesIO(data), record_types=WarcRecordType.any_type, quirks_mode=True))
    if end == b"\r\n":
        assert result.offsets == [record.stream_pos for record in records]


@pytest.mark.parametrize("fault", ["long", "short", "no length", "no header"])
def test_a_broken_record_is_bad_with_its_offset_and_reading_goes_on(tmp_path, fault):
    records = [make_record("conversion", text.encode(), number=n) for n, text in enumerate(WET)]
    broken = {
        "long": make_record("conversion", b"broken", length=60),
        "short": make_record("conversion", b"broken " * 9, length=4),
        "no length": make_record("conversion", b"broken").replace(b"Content-Length", b"Length"),
        "no header": b"some other text\r\n\r\n",
    }[fault]
    (tmp_path / "a.wet").write_bytes(b"".join([*records[:7], broken, *records[7:]]))
    result = read_inputs(tmp_path / "a.wet", field="text")
    # What stands between two records cannot be told from a wrong length of the first.
    assert result.values == (WET[:6] + WET[7:] if fault == "no header" else WET)
    [bad] = result.bad
    assert bad.startswith(f"a.wet, row {7 if fault == 'no header' else 8}")
    (tmp_path / "b.wet").write_bytes(b"".join(records)[:-12])
    cut = read_inputs(tmp_path / "b.wet", field="text")
    assert cut.values == WET[:-1]
    assert "the file ends before the" in cut.bad[0]


def test_a_response_that_cannot_be_decoded_and_one_that_is_too_large(tmp_path):
    encoded = make_response(b"no gzip", "text/html", "Content-Encoding: gzip\r\n")
    large = make_response(b"x" * 3000, "text/plain")
    data = b"".join(make_record("response", body) for body in (encoded, large, RESPONSES[0][0]))
    (tmp_path / "a.warc").write_bytes(data)
    result = read_inputs(tmp_path / "a.warc", field="text", limits=ReadLimits(record_bytes=2000))
    assert result.values == [RESPONSES[0][1]]
    assert "the response cannot be decoded" in result.bad[0]
    assert "record larger than 2000 bytes" in result.bad[1]


def test_a_conversion_that_is_no_utf8_is_bad(tmp_path):
    records = [make_record("conversion", data) for data in (b"one", b"caf\xe9", "caf\u00e9".encode())]
    (tmp_path / "a.wet").write_bytes(b"".join(records))
    result = read_inputs(tmp_path / "a.wet", field="text")
    assert result.values == ["one", "caf\u00e9"]
    assert "byte 0xe9 of the conversion is not valid UTF-8; fetch the archive again" in result.bad[0]


@pytest.mark.parametrize(
    ("label", "body", "text"),
    [
        ("utf-8", "caf\u00e9 cr\u00e8me".encode() + b" \x96", "caf\u00e9 cr\u00e8me \ufffd"),
        ("gb2312", "\u6731\u9555\u57fa".encode("gbk"), "\u6731\u9555\u57fa"),
        ("euc-kr", "\ub620\ubc29\uac01\ud558 \ubdc1".encode("cp949"), "\ub620\ubc29\uac01\ud558 \ubdc1"),
        ("iso-8859-1", "It\u2019s".encode("cp1252"), "It\u2019s"),
        *((label, b"plain", "plain") for label in ("undefined", "hex", "base64", "unicode_escape", "nonsense")),
    ],
)
def test_labels_are_read_as_browsers_read_them(tmp_path, label, body, text):
    page = b"<html><body><p>" + body + b"</p></body></html>"
    (tmp_path / "a.warc").write_bytes(make_record("response", make_response(page, f"text/html; charset={label}")))
    assert [row["text"] for row in read_inputs(tmp_path / "a.warc").values] == [text]


def test_random_bytes_end_nothing(tmp_path):
    chooser = random.Random(3)
    for _ in range(200):
        data = bytearray(ARCHIVE)
        for _ in range(chooser.randrange(1, 20)):
            data[chooser.randrange(len(data))] = chooser.randrange(256)
        (tmp_path / "a.warc").write_bytes(data)
        read_inputs(tmp_path / "a.warc", field="text")


@pytest.mark.parametrize(
    ("name", "data", "label"),
    [
        ("wiki.xml", b'<?xml version="1.0"?>\n<mediawiki xmlns="x"><page/>', "dump of MediaWiki"),
        ("wiki.xml.bz2", bz2.compress(b"<mediawiki><page/>"), "dump of MediaWiki"),
        ("a.arc.gz", gzip.compress(b"filedesc://x 0.0.0.0", mtime=0), ".arc"),
        ("a", b"filedesc://x 0.0.0.0", "ARC archive"),
        ("a.cdx", b" CDX N b a m s k r M S V g\n", ".cdx"),
        ("b.warc.wat.gz", gzip.compress(make_record("metadata", b"{}"), mtime=0), ".wat"),
    ],
)
def test_dumps_of_other_forms_are_refused_with_their_remedy(tmp_path, name, data, label):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=rf"is not supported \({label}\): (?:extract|convert|it holds no pages)"):
        list_sources([str(tmp_path / name)])
    (tmp_path / "other.xml").write_text("<root>text</root>")
    listing = list_sources([str(tmp_path)])
    assert [source.kind for source in listing.sources] == ["code"]
    assert f"1 {label}" in listing.notes[0]


def test_url_and_date_are_beside_the_tokens(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.warc.gz").write_bytes(gzip.compress(ARCHIVE + make_record("response", RESPONSES[0][0])))
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "no web page"}\n')
    result = prepare_store(tmp_path / "in", tmp_path / "out", val_fraction=0)
    table = pq.read_table(result.path / "train" / "shard_00000.parquet")
    dates = ["2020-01-01T00:00:00Z"] * len(RESPONSES)
    # Duplicates have no row, and the record of another format has nulls.
    assert table.to_pydict() == {
        "url": [*(f"http://host/{number}" for number in range(len(RESPONSES))), None],
        "date": [*dates, None],
    }
    store = open_store(result.path, split="train")
    assert dict(store.provenance.of(1).columns) == {"url": "http://host/1", "date": dates[0]}
    assert dict(store.provenance.of(len(RESPONSES)).columns) == {}
    sequences = explain(Plan(store, PlanSpec(seq_len=4096, global_batch_size=1)), 0)
    spans = {span.document: span for sequence in sequences for span in sequence.spans}
    assert spans[1].origin.columns["url"] == "http://host/1"


def test_columns_of_old_archives_and_of_exports(tmp_path):
    record = make_record("conversion", b"text").replace(b"http://host/0", b"<http://host/0>")
    without_date = make_record("conversion", b"other", number=1).replace(b"WARC-Date", b"WARC-Some")
    (tmp_path / "a.wet").write_bytes(record + without_date)
    result = prepare_store(tmp_path / "a.wet", tmp_path / "out", val_fraction=0)
    store = open_store(result.path, split="train")
    assert [dict(store.provenance.of(number).columns) for number in (0, 1)] == [
        {"url": "http://host/0", "date": "2020-01-01T00:00:00Z"},
        {"url": "http://host/1"},
    ]
    assert hash(store.provenance.of(0))
    export_store(result.path, to="parquet", out=tmp_path / "exported")
    [path] = (tmp_path / "exported").rglob("*.parquet")
    assert pq.read_table(path)["url"].to_pylist() == ["http://host/0", "http://host/1"]


def test_columns_stay_with_their_documents(tmp_path):
    (tmp_path / "a.wet").write_bytes(
        b"".join(make_record("conversion", t.encode(), number=n) for n, t in enumerate(WET))
    )
    (tmp_path / "b.wet").write_bytes(
        b"".join(make_record("conversion", b"more %d" % n, number=n) for n in range(50, 60))
    )
    settings = {"tokens_per_shard": 100, "val_fraction": 0.3}
    store = tmp_path / "out"
    batchloom.prepare(tmp_path / "a.wet", out=store, **settings)
    batchloom.prepare(tmp_path / "b.wet", out=store, append=True, **settings)
    (tmp_path / "list").write_text("a.wet 5\n")
    assert remove_documents(store, documents_file=tmp_path / "list").documents == 1
    compact_store(store)
    assert not check(store).faults
    pages = {f"http://host/{n}": text for n, text in [*enumerate(WET), *((n, f"more {n}") for n in range(50, 60))]}
    del pages["http://host/5"]
    seen = {}
    for subset in ("train", "val"):
        opened = open_store(store, split=subset)
        assert len(opened.shards) > 1
        for number in range(len(opened)):
            seen[opened.provenance.of(number).columns["url"]] = opened.tokenizer.decode(opened[number].ids[:-1])
    assert seen == pages


@pytest.mark.parametrize("damage", ["flip", "cut", "other rows"])
def test_damaged_columns_are_named(tmp_path, damage):
    (tmp_path / "a.wet").write_bytes(make_record("conversion", b"text"))
    result = prepare_store(tmp_path / "a.wet", tmp_path / "out", val_fraction=0)
    path = result.path / "train" / "shard_00000.parquet"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    if damage == "other rows":
        table = pq.read_table(path)
        pq.write_table(pa.concat_tables([table, table]), path)
    else:
        path.write_bytes(data if damage == "flip" else data[:-20])
    assert any(str(path) in fault for fault in check(result.path).faults)
    with pytest.raises(StoreError, match=r"shard_00000\.parquet"):
        open_store(result.path, split="train").provenance.of(0)
