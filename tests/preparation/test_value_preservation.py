"""Values pass through unchanged: rows do not need a common schema."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings, strategies as st

import batchloom
from batchloom.preparation import convert
from preparation.stores import prepare_store, write_jsonl
from tiers import examples

# Everything JSON can hold: 64-bit numbers and all text. Names are distinct, because the last of two equal keys counts.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["id", "meta", "tags", "n", "\u00e9"]), VALUES, max_size=5),
    min_size=1,
    max_size=8,
)
FEW_EXAMPLES = settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


def encode_exactly(value):
    """Encode a value with its type: 1, 1.0 and True are three values."""
    return json.dumps(value, sort_keys=True)


def read_rows(path):
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return [json.loads(line) for line in path.read_text().split("\n") if line]


@FEW_EXAMPLES
@given(rows=ROWS, form=st.sampled_from(["jsonl", "json"]), out=st.sampled_from(["jsonl", "json"]))
def test_convert_hands_on_what_it_was_given(tmp_path, rows, form, out):
    rows = [{"id": 0}, *rows]
    source = tmp_path / f"in.{form}"
    if form == "json":
        source.write_text(json.dumps(rows))
    else:
        write_jsonl(source, rows)
    convert(source, out=tmp_path / f"out.{out}", force=True)
    assert encode_exactly(read_rows(tmp_path / f"out.{out}")) == encode_exactly(rows)


ARGUMENTS = st.none() | st.dictionaries(TEXT.filter(str.isidentifier), VALUES, max_size=3) | st.just('{"x": 1}')
PARTS = st.lists(st.just({"type": "text", "text": "said"}), min_size=1, max_size=2)


@st.composite
def records_of_mixed_types(draw):
    """Draw a record whose columns have their own types, as real collections have."""
    calls = [{"type": "function", "function": {"name": "f", "arguments": draw(ARGUMENTS)}}]
    answer = draw(
        st.sampled_from(
            [
                {"role": "assistant", "content": "yes"},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "assistant", "content": "yes", "tool_calls": calls},
            ]
        )
    )
    question = {"role": "user", "content": draw(st.just("why") | PARTS)}
    return {"id": draw(VALUES), "messages": [question, answer], "meta": draw(VALUES)}


TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content | tojson }}{{ m.tool_calls | default(none) | tojson }}{{ eos_token }}{% endfor %}"


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(records_of_mixed_types(), min_size=2, max_size=6))
def test_a_template_sees_the_values_of_the_record(tmp_path_factory, records):
    """Each record gives the text of its own JSON, whatever records are in the file."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "t.jinja").write_text(TEMPLATE)
    write_jsonl(folder / "in.jsonl", records)
    settings = {
        "tokenizer": "bytes",
        "template": str(folder / "t.jinja"),
        "train_on": "all",
        "val_fraction": 0,
        "max_bad": "100%",
        "dedup": "none",
    }
    result = batchloom.prepare(folder / "in.jsonl", out=folder / "out", **settings)
    assert result.counts.quarantined == 0, (folder / "out/quarantine.jsonl").read_text()
    store = batchloom.open_store(folder / "out")
    for number, record in enumerate(records):
        expected = "".join(
            f"{message['role']}:{json.dumps(message.get('content'), ensure_ascii=False)}"
            f"{json.dumps(message.get('tool_calls'), ensure_ascii=False)}<|endoftext|>"
            for message in record["messages"]
        )
        assert store[number].text == expected


def test_a_table_may_mix_what_json_lines_mix(tmp_path):
    """Parquet columns of JSON text, for values of mixed types, are parsed."""
    conversations = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b", "extra": {"n": [1, None, "x"]}},
        ],
    ]
    table = pa.table({"messages": [json.dumps(turns) for turns in conversations]})
    pq.write_table(table, tmp_path / "in.parquet")
    result = prepare_store(tmp_path / "in.parquet", tmp_path / "out", val_fraction=0)
    store = batchloom.open_store(result.path)
    assert store[0].text == store[1].text
