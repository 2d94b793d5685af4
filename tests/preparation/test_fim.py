import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash

import batchloom
from batchloom import Recipe, SettingsError, TokenizerError
from batchloom.core.fingerprint import derive_key
from batchloom.core.keyed_hashing import GOLDEN, mix_int
from batchloom.preparation import (
    ExecutionSettings,
    FimRecipe,
    Progress,
    ReadRecipe,
    RunSettings,
    compute_recipe_fingerprint,
    read_recipe,
    read_report,
    recipe_to_plain,
    run_recipe,
)
from batchloom.preparation.documents.fill_in_the_middle import FimCutter, apply_fim
from batchloom.preparation.documents.token_encoder import hash_documents
from batchloom.preparation.settings import fim_to_plain, parse_fim
from batchloom.tokens import train_tokenizer
from preparation.stores import SMALL, tree

STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001
LETTERS = "abc def\n\tghi (x) é日本 🙂 "
DOCUMENTS = 1200


def with_tokens(path, names, *, special=True):
    """A tokenizer that has these tokens, as a file."""
    whole = train_tokenizer(["abc def ghi abc def ghi"] * 3, 270).state()["tokenizer"]
    first = whole["added_tokens"][0]
    for number, name in enumerate(names, 1):
        own = {"id": first["id"] + number, "content": name, "special": special}
        whole["added_tokens"].append({**first, **own})
    path.write_text(json.dumps(whole))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fim")
    drawn = random.Random(0)
    texts = ["".join(drawn.choices(LETTERS, k=drawn.randrange(1, 120))) for _ in range(DOCUMENTS)]
    texts = [text for text in dict.fromkeys(texts) if not text.isspace()]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    with_tokens(folder / "tokenizer.json", STARCODER)
    return folder


def make(folder, out, *, recipe=None, **options):
    usual = {"tokenizer": str(folder / "tokenizer.json"), "val_fraction": 0.1, "normalize": False}
    batchloom.prepare([folder / "in.jsonl"], out=out, recipe=recipe, **{**usual, **options})
    return out


def documents(store, subset="train"):
    opened = batchloom.open_store(store, subset)
    return opened, [opened[number].ids.astype(np.int64).tolist() for number in range(len(opened))]


def parts_of(ids, tokenizer):
    """(order, text) of a document, put together again with an eye on nothing but its tokens."""
    prefix, suffix, middle = (tokenizer.control[one] for one in STARCODER)
    assert ids[-1] == tokenizer.end_id
    ids = ids[:-1]
    if prefix not in ids:
        assert not {suffix, middle} & set(ids)
        return "", tokenizer.decode(ids)
    assert [ids.count(one) for one in (prefix, suffix, middle)] == [1, 1, 1]
    assert ids[0] == prefix
    hole, last = ids.index(suffix), ids.index(middle)
    assert hole < last
    behind = tokenizer.decode(ids[hole + 1 : last])
    if hole == 1:
        # The prefix may be empty in either order; then both are the same but for where it would stand.
        return "spm", tokenizer.decode(ids[last + 1 :]) + behind
    return "psm", tokenizer.decode(ids[1:hole]) + tokenizer.decode(ids[last + 1 :]) + behind


def within(count, of, share):
    return abs(count - of * share) <= 6 * math.sqrt(of * share * (1 - share)) + 1e-9


def files_of(store):
    """The bytes of a store; where the time went is told in its reports."""
    return {
        path.relative_to(store): path.read_bytes()
        for path in Path(store).rglob("*")
        if path.is_file() and not path.name.startswith("report.")
    }


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_the_parts_are_the_text_again(folder, tmp_path, rate):
    plain = make(folder, tmp_path / "plain")
    moved = make(folder, tmp_path / "moved", fim=rate)
    orders = []
    for subset in ("train", "val"):
        before, old = documents(plain, subset)
        after, new = documents(moved, subset)
        assert len(old) == len(new)
        for number, (one, two) in enumerate(zip(old, new, strict=True)):
            assert before[number].provenance == after[number].provenance
            order, text = parts_of(two, after.tokenizer)
            assert text == before.tokenizer.decode(one[:-1])
            orders.append(order)
            if not order:
                assert one == two
    count = len(orders) - orders.count("")
    assert within(count, len(orders), rate)
    # Empty prefixes of short texts count as the other order: one of every len + 1.
    assert within(orders.count("psm"), count, 0.5 * 0.93)
    flows = {flow.step: flow for flow in read_report(moved).content.flows}
    assert flows["tokenize"].altered == count


def test_the_cuts_are_pinned():
    """Which texts are cut, and where, is part of a store: in plain integers, as docs/augmentation.md says it."""
    texts = [f"the text {n} of some" for n in range(200)]
    how = FimCutter(0.5, 0.5, derive_key("fim", 7), 1, 2, 3)
    cut = apply_fim(texts, hash_documents(texts), how)
    found = [cut.parts[a:b] for a, b in itertools.pairwise(cut.bounds.tolist())]
    assert found == [expected(text, 7) for text in texts]
    assert found[:4] == PINNED


PINNED = [
    ["the text 0 of some"],
    ["the text 1 o", " some", "f"],
    ["the text 2 of some"],
    ["the text 3 of some"],
]


def expected(text, seed):
    key, whole = derive_key("fim", seed), xxhash.xxh3_128_intdigest(text.encode())
    low, high = whole % 2**64, whole >> 64
    own = mix_int(mix_int(mix_int((low + key[0]) % 2**64) ^ key[1]) ^ high)
    words = [mix_int((own + number * GOLDEN) % 2**64) for number in range(5)]
    if (words[1] >> 11) * 2.0**-53 >= 0.5:
        return [text]
    start, stop = sorted((word >> 32) * (len(text) + 1) >> 32 for word in words[3:])
    if (words[2] >> 11) * 2.0**-53 < 0.5:
        return ["", text[stop:], text[:start], text[start:stop]]
    return [text[:start], text[stop:], text[start:stop]]


@pytest.mark.parametrize(("spm_rate", "order"), [(0.0, "psm"), (1.0, "spm")])
def test_one_order_alone(folder, tmp_path, spm_rate, order):
    store = make(folder, tmp_path / "s", fim={"rate": 1.0, "spm_rate": spm_rate})
    opened, ids = documents(store)
    found = [parts_of(one, opened.tokenizer)[0] for one in ids]
    assert found.count(order) / len(found) > (0.8 if order == "psm" else 0.99)


def test_cuts_are_anywhere(folder, tmp_path):
    store = make(folder, tmp_path / "s", fim={"rate": 1.0, "spm_rate": 0.0})
    opened, ids = documents(store)
    control = opened.tokenizer.control
    shares = []
    for one in ids:
        first, second = one.index(control["<fim_suffix>"]), one.index(control["<fim_middle>"])
        sizes = [first - 1, second - first - 1, len(one) - 2 - second]
        if len(one) > 60:
            shares.append([size / sum(sizes) for size in sizes])
    # Two uniform cuts make three parts of a third each, on average.
    assert np.allclose(np.mean(shares, axis=0), 1 / 3, atol=0.04)


def test_off_is_as_if_it_were_not_there(folder, tmp_path):
    plain = files_of(make(folder, tmp_path / "plain"))
    assert files_of(make(folder, tmp_path / "none", fim=0)) == plain
    assert b"fim" not in plain[Path("dataset_metadata.json")].replace(b"<fim_", b"")
    recipe = Recipe(inputs=("a",))
    assert "fim" not in recipe_to_plain(recipe)["reading"]
    # Pinned: stores that are there are found finished by the same command.
    assert compute_recipe_fingerprint(recipe) == FINGERPRINT


FINGERPRINT = "530f7466bcb781bd2d57537830ad6b0c"


def test_units_workers_and_order_decide_nothing(folder, tmp_path):
    whole = make(folder, tmp_path / "whole", fim=0.5)
    assert files_of(make(folder, tmp_path / "two", fim=0.5, workers=2)) == files_of(whole)
    lines = (folder / "in.jsonl").read_text().splitlines()
    (tmp_path / "in.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    turned = make(tmp_path, tmp_path / "turned", fim=0.5, tokenizer=str(folder / "tokenizer.json"))
    assert sorted(documents(turned)[1]) == sorted(documents(whole)[1])
    other = make(folder, tmp_path / "other", fim={"rate": 0.5, "seed": 1})
    assert documents(other)[1] != documents(whole)[1]


class StopError(Exception):
    pass


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopped_in_small_units_it_goes_on_to_the_same_bytes(folder, tmp_path, workers):
    recipe = Recipe(
        inputs=(str(folder / "in.jsonl"),),
        tokenizer=str(folder / "tokenizer.json"),
        reading=ReadRecipe(fim=FimRecipe(rate=0.5), normalize=False),
    )

    def run(out, listener=lambda event: None, workers=1):
        execution = ExecutionSettings(workers=workers)
        settings = RunSettings(limits=SMALL, unit_bytes=8000, execution=execution)
        run_recipe(recipe, out, listener, settings=settings)
        return tree(out)

    def stop(event):
        if isinstance(event, Progress) and event.phase == "tokenize" and event.documents > 400:
            raise StopError

    whole = run(tmp_path / "whole")
    with pytest.raises(StopError):
        run(tmp_path / "stopped", stop, workers)
    assert run(tmp_path / "stopped", workers=workers) == whole
    one = make(folder, tmp_path / "one", fim=0.5, val_fraction=0.01)
    assert sorted(documents(one)[1]) == sorted(documents(tmp_path / "whole")[1])


def test_a_store_is_made_again_from_its_recipe(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    for number, fim in enumerate((0.25, {"rate": 0.5, "spm_rate": 1.0, "seed": 3})):
        first, again = tmp_path / f"first{number}", tmp_path / f"again{number}"
        make(folder, first, fim=fim)
        batchloom.prepare(recipe=first, out=again)
        assert files_of(again) == files_of(first)
        assert read_recipe(first).reading.fim == parse_fim(fim)


@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_duplicates_are_found_as_without(folder, tmp_path, dedup):
    lines = (folder / "in.jsonl").read_text().splitlines()[:100]
    long = [json.loads(line)["text"] + " ".join(map(str, range(n, n + 400))) for n, line in enumerate(lines[:5])]
    alike = [text + " the end" for text in long]
    lines += [json.dumps({"text": text}) for text in (*long, *alike)] + lines[:50]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    # Texts with their middle last have other lengths, by which documents would move between subsets.
    options = {
        "tokenizer": str(folder / "tokenizer.json"),
        "dedup": dedup,
        "balance_subsets": False,
    }
    plain, moved = (documents(make(tmp_path, tmp_path / f"s{fim}", fim=fim, **options))[0] for fim in (0, 1))
    origins = [[store[n].provenance for n in range(len(store))] for store in (plain, moved)]
    assert origins[0] == origins[1]
    assert len(plain) < (107 if dedup == "near" else 111)


def test_conversations_and_ids_stay_as_they_are(folder, tmp_path):
    rows = [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ids").mkdir()
    ids = [{"input_ids": [n, n + 1, 7]} for n in range(40)]
    (tmp_path / "ids" / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ids))
    for place in (tmp_path, tmp_path / "ids"):
        options = {"tokenizer": str(folder / "tokenizer.json")}
        plain = documents(make(place, place / "plain", **options))[1]
        assert documents(make(place, place / "moved", fim=1.0, **options))[1] == plain


@pytest.mark.parametrize("special", [True, False])
def test_other_models_tokens_are_known(folder, tmp_path, special):
    tokenizer = with_tokens(tmp_path / "tokenizer.json", DEEPSEEK, special=special)
    opened, ids = documents(make(folder, tmp_path / "s", fim=1.0, tokenizer=tokenizer))
    words = {**opened.tokenizer.control, **opened.tokenizer.added}
    tokens = [words[name] for name in DEEPSEEK]
    assert all([number for number in one if number in tokens] == tokens for one in ids)


def test_named_tokens_are_used(folder, tmp_path):
    tokenizer = with_tokens(tmp_path / "tokenizer.json", ("<a>", "<b>", "<c>"))
    fim = {"rate": 1.0, "prefix": "<a>", "suffix": "<b>", "middle": "<c>"}
    opened, ids = documents(make(folder, tmp_path / "s", fim=fim, tokenizer=tokenizer))
    assert all(one[0] == opened.tokenizer.control["<a>"] for one in ids)


def test_a_tokenizer_without_such_tokens_is_refused_with_what_to_do(folder, tmp_path):
    with pytest.raises(TokenizerError, match="none of the known fill-in-the-middle tokens .* name those it has"):
        make(folder, tmp_path / "s", tokenizer="bytes", fim=0.5)
    named = {"prefix": "<fim_prefx>", "suffix": "<fim_suffix>", "middle": "<fim_middle>"}
    with pytest.raises(TokenizerError, match="no token '<fim_prefx>'; did you mean '<fim_prefix>'"):
        make(folder, tmp_path / "s", fim={"rate": 0.5, **named})
    # Nothing is left behind that another command would trip over.
    make(folder, tmp_path / "s")


def test_a_tokenizer_that_puts_spaces_before_parts_is_refused(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    whole = json.loads(Path(with_tokens(path, STARCODER)).read_text())
    whole["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(whole))
    with pytest.raises(TokenizerError, match="adds text at the beginning of a text"):
        make(folder, tmp_path / "s", tokenizer=str(path), fim=0.5)


@pytest.mark.parametrize(
    ("fim", "said"),
    [
        (1.5, "fim.rate: 1.5 is not a number from 0 to 1"),
        (math.nan, "fim.rate: nan is not a number from 0 to 1"),
        ("half", "fim: 'half' is no rate"),
        (True, "fim: True is no rate"),
        ({"rte": 0.5}, "fim.rte: unknown setting; did you mean 'rate'"),
        ({"spm_rate": -1}, "fim.spm_rate: -1 is not a number from 0 to 1"),
        ({"seed": "x"}, "fim.seed: 'x' is not a whole number"),
        ({"prefix": "<a>"}, "fim.prefix: alone is not enough; name suffix, middle"),
        ({"prefix": "<a>", "suffix": "<a>", "middle": "<b>"}, "three different tokens"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, fim, said):
    with pytest.raises(SettingsError, match=said):
        batchloom.prepare(["nowhere.txt"], out=tmp_path / "s", fim=fim)


@pytest.mark.parametrize("fim", [0.5, 1, {"rate": 0.5, "seed": 2}, {"rate": 0.1, "spm_rate": 0}])
def test_the_short_form_is_read_again(fim):
    value = parse_fim(fim)
    assert parse_fim(fim_to_plain(value)) == value == parse_fim(value)
    assert fim_to_plain(parse_fim(1)) == fim_to_plain(FimRecipe(rate=1.0)) == 1.0
