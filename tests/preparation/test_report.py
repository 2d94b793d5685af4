"""The report: merging of unit reports, bounded lists, and the HTML page."""

import gzip
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

import batchloom
from batchloom import Recipe
from batchloom.preparation import PrepareReport, ReadRecipe, ReportContent, StageTime, read_report
from batchloom.preparation.phases.duplicate_pairs import DuplicatePairCounter, group_sources
from batchloom.preparation.report import (
    DuplicateExample,
    DuplicatePair,
    OmittedRows,
    ReportedSource,
    build_content,
    encode_report,
    write_report_page,
)
from batchloom.preparation.report.report import (
    MAX_ROWS,
    Bar,
    _find_ending,
    _find_folder,
    draw_horizontal_bars,
    draw_vertical_bars,
    make_length_bars,
    render_report_page,
)
from batchloom.preparation.request import recipe_settings_for_report
from batchloom.preparation.units.unit_report import (
    MAX_SNIPPET_CHARACTERS,
    DropSample,
    SourceCounts,
    StepFlow,
    UnitReport,
    UnitReportMerger,
    UnitStatistics,
)
from batchloom.text import CleanStep
from preparation.stores import write_jsonl

HOSTILE = "</svg><script>alert(1)</script>\"'&<b onload=x>\x1b[31m\u202e\ud800\x00]]>"


def make_unit_report(seed):
    """Make the report of a unit; samples name the unit, so that their order shows."""
    rng = np.random.default_rng(seed)
    statistics = UnitStatistics()
    for step in ("read", "gopher", "tokenize"):
        numbers = rng.integers(0, 100, 7).tolist()
        names = [field for field in StepFlow.__struct_fields__ if field != "step"]
        statistics.flow(StepFlow(step=step, **dict(zip(names, numbers, strict=True))))
    for number in range(int(rng.integers(0, 4))):
        reason = f"reason {rng.integers(0, 3)}"
        statistics.dropped("gopher", reason, 2, DropSample(f"unit {seed}", number, "words"))
    statistics.lengths(rng.integers(0, 1 << 20, 50).astype(np.uint32))
    statistics.languages({"en": 2, f"x{rng.integers(0, 3)}": 1})
    statistics.source(f"source {rng.integers(0, 3)}", SourceCounts(3, 20, 5))
    # Eighths add up exactly in any order.
    return statistics.report({"read": StageTime(int(rng.integers(0, 100)) / 8, 10, 1)})


def merge_reports(units, unit_order=None):
    """Merge unit reports that arrive in this order."""
    merger = UnitReportMerger()
    for number in range(len(units)) if unit_order is None else unit_order:
        merger.add(number, units[number])
    return merger.report()


@given(st.lists(st.integers(0, 1000), max_size=8), st.data())
def test_units_come_together_in_any_order_and_grouping(seeds, data):
    units = [make_unit_report(seed) for seed in seeds]
    cut = data.draw(st.integers(0, len(units)))
    expected = merge_reports(units)
    unit_order = data.draw(st.permutations(range(len(units))))
    assert msgspec.json.encode(merge_reports(units, unit_order)) == msgspec.json.encode(expected)
    assert merge_reports([merge_reports(units[:cut]), merge_reports(units[cut:])]) == expected
    assert merge_reports([UnitReport(), expected, UnitReport()]) == expected
    # Dicts compare equal in any order, but a page shows their order.
    regrouped = merge_reports([merge_reports([unit]) for unit in units])
    assert msgspec.json.encode(regrouped) == msgspec.json.encode(expected)
    assert msgspec.json.decode(msgspec.json.encode(expected), type=UnitReport) == expected


def test_the_first_samples_in_input_order_stay_and_all_are_counted():
    statistics = UnitStatistics()
    for record in range(20):
        sample = DropSample("a.txt", record, "  \n" + "w\x00" * 500, "1 of 2")
        statistics.dropped("length", "too short", sample=sample)
    report = statistics.report({})
    merged_drops = merge_reports([report, report]).drops["too short"]
    assert (merged_drops.count, [sample.record for sample in merged_drops.samples]) == (40, [0, 1, 2, 3, 4])
    assert all(len(sample.words) <= MAX_SNIPPET_CHARACTERS for sample in merged_drops.samples)
    assert merged_drops.samples[0].words.startswith("w\\x00w\\x00")


def test_lengths_are_counted_by_their_binary_digits():
    statistics = UnitStatistics()
    lengths = [0, 1, 2, 3, 4, 1023, 1024, 2047, 2048, (1 << 32) - 1]
    statistics.lengths(np.array(lengths, np.uint32))
    counts = statistics.report({}).lengths
    assert {digits: count for digits, count in enumerate(counts) if count} == {
        0: 1,
        1: 1,
        2: 2,
        3: 1,
        10: 1,
        11: 2,
        12: 1,
        32: 1,
    }
    labels = [bar.label for bar in make_length_bars(counts)]
    assert labels[:4] == ["0", "1", "2-3", "4-7"]
    assert labels[10:13] == ["512-1023", "1k-2k", "2k-4k"]
    assert (labels[20], labels[21], labels[-1]) == ("512k-1024k", "1M-2M", "2G-4G")


def test_lists_are_bounded_and_omitted_rows_are_counted():
    units = UnitReport(
        drops={f"reason {n}": make_drop_report(n + 1) for n in range(MAX_ROWS + 7)},
        languages={f"l{n}": 1 for n in range(MAX_ROWS + 2)},
        sources={f"s{n}": SourceCounts(n, 10 * n, n) for n in range(1000)},
    )
    pairs = [DuplicatePair(dropped_from=f"{n}", kept_in="a", count=n) for n in range(MAX_ROWS + 1)]
    content = build_content(units, duplicates=pairs, duplicates_rest=OmittedRows(4, 4))
    assert len(content.drops) == len(content.languages) == len(content.sources) == MAX_ROWS
    assert next(iter(content.drops)) == f"reason {MAX_ROWS + 6}"
    assert content.drops_rest == OmittedRows(7, sum(range(1, 8)))
    assert content.languages_rest == OmittedRows(2, 2)
    assert next(iter(content.languages)) == "l0"
    assert content.duplicates[0].count == MAX_ROWS
    assert content.duplicates_rest == OmittedRows(5, 4)
    below = sum(range(1000 - MAX_ROWS))
    assert content.sources_rest == OmittedRows(1000 - MAX_ROWS, below)
    assert content.sources_others == SourceCounts(below, 10 * below, below)


def make_drop_report(count):
    statistics = UnitStatistics()
    statistics.dropped("gopher", "r", count)
    return statistics.report({}).drops["r"]


def test_pairs_of_sources_are_counted_and_their_examples_are_the_first():
    counter = DuplicatePairCounter(["a", "b", "c"])
    counter.add(np.array([1, 1, 2]), np.array([0, 0, 0]))
    counter.add(np.array([1, 2]), np.array([0, 2]))
    for number in range(9):
        counter.add_example(1, 0, DuplicateExample(number, 0, "x" * 999))
    pairs, omitted = counter.list_pairs()
    assert [(pair.dropped_from, pair.kept_in, pair.count) for pair in pairs] == [
        ("b", "a", 3),
        ("c", "a", 1),
        ("c", "c", 1),
    ]
    assert [example.dropped_record for example in pairs[0].examples] == [0, 1, 2, 3, 4]
    assert len(pairs[0].examples[0].words) == MAX_SNIPPET_CHARACTERS
    assert omitted == OmittedRows()


def test_omitted_pairs_are_counted():
    counter = DuplicatePairCounter([f"{n}" for n in range(20)])
    dropped_from, kept_in = np.divmod(np.arange(400), 20)
    counter.add(dropped_from, kept_in)
    pairs, omitted = counter.list_pairs()
    assert (len(pairs), omitted) == (MAX_ROWS, OmittedRows(400 - MAX_ROWS, 400 - MAX_ROWS))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a/1", "b/2"], ["a/1", "b/2"]),
        ([f"{n % 3}/{n}" for n in range(900)], ["0", "1", "2"]),
        ([f"{n}/x" for n in range(900)], ["all of it"]),
    ],
)
def test_sources_are_grouped_so_that_a_table_of_pairs_can_be_read(names, expected):
    group_numbers, result = group_sources(names, ["all of it"] * len(names))
    assert result == expected
    assert len(group_numbers) == len(names)
    assert max(group_numbers) == len(expected) - 1


def test_no_more_groups_than_a_table_takes():
    names = [f"{n}/x" for n in range(900)]
    assert group_sources(names, names) == ([0] * 900, ["all inputs"])


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words, self.attributes = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def make_full_report(name):
    statistics = UnitStatistics()
    for step in ("read", name, "tokenize"):
        statistics.flow(StepFlow(step=step, documents_in=9, documents_out=8, bytes_in=70, bytes_out=60))
    statistics.dropped(name, name, sample=DropSample(name, 3, name, name))
    statistics.lengths(np.array([1, 5, 900], np.uint32))
    statistics.languages({name: 3})
    statistics.source(name, SourceCounts(8, 60, 20))
    pair = DuplicatePair(dropped_from=name, kept_in=name, count=1, examples=(DuplicateExample(2, 1, name),))
    content = build_content(
        statistics.report({"read": StageTime(1.5, 10**7, 8), "encode": StageTime(0.0)}),
        after=[StepFlow(step="write", documents_in=8, documents_out=8, tokens_in=20, tokens_out=20)],
        duplicates=[pair],
    )
    return PrepareReport(
        sources=[ReportedSource("a", "/a", 70, 1)],
        out=name,
        engine_note=name,
        notes=[name] * 300,
        seconds_by_phase={name: 1.0},
        executor=name,
        content=content,
    )


@pytest.mark.parametrize("name", ["wiki", HOSTILE, "x" * 5000, ""])
def test_a_page_shows_all_names_and_takes_none_for_markup(name, tmp_path):
    text = render_report_page(make_full_report(name))
    page = Page(text)
    assert page.open == []
    assert "script" not in page.tags
    assert not [
        attribute for attribute in page.attributes if attribute[1].startswith("on") or attribute[1] in ("src", "href")
    ]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\ud800-\udfff]", text)
    # Every chart is XML and has a title and a description.
    pictures = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(pictures) == 6
    for picture in pictures:
        tree = ET.fromstring(picture)
        ids = tree.attrib["aria-labelledby"].split()
        assert [child.attrib["id"] for child in tree[:2]] == ids
        assert all(child.text for child in tree[:2])
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    write_report_page(make_full_report(name), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8") == text


def test_a_page_says_what_the_report_says():
    text = " ".join("".join(Page(render_report_page(make_full_report("gopher: few"))).words).split())
    for part in (
        "gopher: few",
        "And 200 more, in report.json.",
        "0.333",
        "1 document",
        "512-1023",
        "6.7",
    ):
        assert part in text, part


def test_a_report_of_nothing_makes_a_page():
    text = render_report_page(PrepareReport())
    assert "<svg" not in text
    assert Page(text).open == []


def test_omitted_rows_are_shown_on_the_page():
    content = ReportContent(
        drops={"r": make_drop_report(1)},
        drops_rest=OmittedRows(2, 30),
        languages={"en": 1},
        languages_rest=OmittedRows(1, 1),
    )
    text = render_report_page(PrepareReport(content=content))
    assert "And 2 reasons more, of 30 documents." in text
    assert "And 1 language more, of 1 document." in text


def test_the_file_holds_what_a_later_run_reads(tmp_path):
    report = make_full_report("wiki")
    (tmp_path / "report.json").write_bytes(encode_report(report))
    assert read_report(tmp_path) == report
    plain = json.loads((tmp_path / "report.json").read_bytes())
    assert plain["sources"][0]["mtime_ns"] == 1
    assert plain["content"]["flows"][0]["step"] == "read"
    (tmp_path / "report.json").write_bytes(b'{"seconds": "soon"}')
    assert read_report(tmp_path) is None


def test_bars_are_as_long_as_their_numbers_say():
    tree = ET.fromstring(draw_horizontal_bars("x", "t", [Bar("a", 50, "50"), Bar("b", 100, "100"), Bar("c", 0, "0")]))
    widths = [float(bar.attrib["width"]) for bar in tree.iter("rect")]
    assert widths[1] == 2 * widths[0] > widths[2] == 0
    tree = ET.fromstring(draw_vertical_bars("x", "t", [Bar("a", 1, "1"), Bar("b", 4, "4")]))
    heights = [float(bar.attrib["height"]) for bar in tree.iter("rect")]
    assert heights[1] == pytest.approx(4 * heights[0])
    assert "a: 1; b: 4" in ET.tostring(tree, "unicode")


def test_the_page_says_what_was_asked_for_and_what_was_left_out(tmp_path):
    rows = [{"text": "the same words"}] * 3 + [{"text": "other words"}, {"words": "no text"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    sets = {"far": "https://somewhere.example/sets.jsonl?token=secret"}
    settings = {"out": tmp_path / "out", "tokenizer": "bytes", "clean": ["whitespace"]}
    batchloom.prepare(tmp_path / "a.jsonl", **settings, dry_run=True)
    page = (tmp_path / "out" / ".work" / "report.html").read_text()
    assert "nothing was written" in page
    batchloom.prepare(tmp_path / "a.jsonl", **settings)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "nothing was written" not in page
    assert "2 exact duplicate" in page
    assert re.search(r"quarantined</th><td>1<", page)
    assert re.search(r"clean</th><td>whitespace", page)
    assert re.search(r"dedup</th><td>exact<", page)
    step = CleanStep("decontaminate", {"sets": sets})
    reported = recipe_settings_for_report(Recipe(inputs=("a",), reading=ReadRecipe(clean=(step,))))
    assert "secret" not in str(reported)


def test_every_pair_of_sources_has_its_examples_however_many_precede(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"a text {number}"} for number in range(3000)])
    write_jsonl(tmp_path / "b.jsonl", [{"text": f"a text {number}"} for number in range(2000)])
    write_jsonl(tmp_path / "c.jsonl", [{"text": "a text 2999"}] * 40 + [{"text": "of its own"}])
    names = [str(tmp_path / f"{name}.jsonl") for name in "abc"]
    batchloom.prepare(names, out=tmp_path / "out", tokenizer="bytes", val_fraction=0, workers=1)
    pairs = read_report(tmp_path / "out").content.duplicates
    pairs_by_sources = {(pair.dropped_from, pair.kept_in): pair for pair in pairs}
    assert pairs_by_sources["b.jsonl", "a.jsonl"].count == 2000
    last_pair = pairs_by_sources["c.jsonl", "a.jsonl"]
    assert last_pair.count == 40
    assert [(example.dropped_record, example.kept_record) for example in last_pair.examples] == [
        (number, 2999) for number in range(5)
    ]
    assert last_pair.examples[0].words.startswith("a text 2999")
    assert {(one.dropped_file, one.kept_file) for one in last_pair.examples} == {("c.jsonl", "a.jsonl")}


def test_folders_beyond_the_largest_are_summed_as_one(tmp_path):
    for number in range(MAX_ROWS + 3):
        path = tmp_path / f"in/{number}/a.txt"
        path.parent.mkdir(parents=True)
        path.write_text("abc")
    batchloom.prepare(tmp_path / "in", out=tmp_path / "s", tokenizer="bytes", dedup="none", val_fraction=0)
    folders = read_report(tmp_path / "s").content.folders
    assert len(folders) == MAX_ROWS + 1
    assert (folders[-1].name, folders[-1].sources, folders[-1].counts) == ("3 others", 3, SourceCounts(3, 9, 12))


@pytest.mark.parametrize(
    ("name", "folder", "ending"),
    [
        ("in/a/b/c.txt", "in/a", ".txt"),
        ("c", ".", "(none)"),
        ("https://host.org/a/b/c.jsonl.gz", "https://host.org/a", ".jsonl.gz"),
        ("s3://bucket/c.txt", "s3://bucket", ".txt"),
    ],
)
def test_folder_and_ending_of_a_source(name, folder, ending):
    assert (_find_folder(name), _find_ending(name)) == (folder, ending)


def test_sources_are_summed_by_folder_and_ending(tmp_path):
    for name in ("a/1.txt", "a/2.md", "a/deep/er/3.txt", "b/4.jsonl.gz", "5.txt"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(mtime=0, data=b'{"text": "abc"}') if name.endswith("gz") else b"abc")
    batchloom.prepare(tmp_path / "in", out=tmp_path / "s", tokenizer="bytes", dedup="none", val_fraction=0)
    content = read_report(tmp_path / "s").content
    counts = lambda number: SourceCounts(number, 3 * number, 4 * number)  # noqa: E731 - bytes and tokens of the texts
    assert [(group.name, group.sources, group.counts) for group in content.folders] == [
        ("in/a", 3, counts(3)),
        ("in", 1, counts(1)),
        ("in/b", 1, counts(1)),
    ]
    assert [(group.name, group.sources) for group in content.endings] == [(".txt", 3), (".md", 1), (".jsonl.gz", 1)]
    page = (tmp_path / "s/report.html").read_text()
    assert "By folder" in page
    assert '<th scope="row">.jsonl.gz</th>' in page
