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
from batchloom.preparation.documents.document_facts import hash_documents
from batchloom.preparation.documents.fill_in_the_middle import FimCutter, apply_fim
from batchloom.preparation.settings import fim_to_plain, parse_fim
from batchloom.tokens import train_tokenizer
from preparation.stores import SMALL_LIMITS, hash_store_files

STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")  # noqa: RUF001
LETTERS = "abc def\n\tghi (x) é日本 🙂 "
DOCUMENTS = 300


def write_tokenizer(path, names, *, special=True):
    """Write a tokenizer file that has these tokens."""
    definition = train_tokenizer(["abc def ghi abc def ghi"] * 3, 270).state()["tokenizer"]
    end_token = definition["added_tokens"][0]
    for number, name in enumerate(names, 1):
        token = {"id": end_token["id"] + number, "content": name, "special": special}
        definition["added_tokens"].append({**end_token, **token})
    path.write_text(json.dumps(definition))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fim")
    rng = random.Random(0)
    texts = ["".join(rng.choices(LETTERS, k=rng.randrange(1, 120))) for _ in range(DOCUMENTS)]
    texts = [text for text in dict.fromkeys(texts) if not text.isspace()]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    write_tokenizer(folder / "tokenizer.json", STARCODER)
    return folder


@pytest.fixture(scope="module")
def plain_store(folder):
    """Return a store of the documents as they are."""
    return make(folder, folder / "plain")


@pytest.fixture(scope="module")
def cut_store(folder):
    """Return a store of which half of the documents are cut."""
    return make(folder, folder / "cut", fim=0.5)


def make(folder, out, *, recipe=None, **options):
    # Cut texts have other lengths, so that balancing would move other documents between subsets.
    defaults = {"val_fraction": 0.1, "normalize": False, "balance_subsets": False}
    defaults["tokenizer"] = str(folder / "tokenizer.json")
    batchloom.prepare([folder / "in.jsonl"], out=out, recipe=recipe, **{**defaults, **options})
    return out


def read_documents(store, subset="train"):
    opened_store = batchloom.open_store(store, subset)
    return opened_store, [opened_store[number].ids.astype(np.int64).tolist() for number in range(len(opened_store))]


def reassemble_text(ids, tokenizer):
    """Return (order, text) of a document, reassembled from its tokens alone."""
    prefix, suffix, middle = (tokenizer.control[name] for name in STARCODER)
    assert ids[-1] == tokenizer.end_id
    ids = ids[:-1]
    if prefix not in ids:
        assert not {suffix, middle} & set(ids)
        return "", tokenizer.decode(ids)
    assert [ids.count(name) for name in (prefix, suffix, middle)] == [1, 1, 1]
    assert ids[0] == prefix
    suffix_position, middle_position = ids.index(suffix), ids.index(middle)
    assert suffix_position < middle_position
    suffix_text = tokenizer.decode(ids[suffix_position + 1 : middle_position])
    if suffix_position == 1:
        # With an empty prefix, both orders differ only in the place of its token.
        return "spm", tokenizer.decode(ids[middle_position + 1 :]) + suffix_text
    return "psm", tokenizer.decode(ids[1:suffix_position]) + tokenizer.decode(ids[middle_position + 1 :]) + suffix_text


def is_near_share(count, total, share):
    return abs(count - total * share) <= 6 * math.sqrt(total * share * (1 - share)) + 1e-9


def read_store_files(store):
    """Return the bytes of the files of a store, except reports, which contain times."""
    return {
        path.relative_to(store): path.read_bytes()
        for path in Path(store).rglob("*")
        if path.is_file() and not path.name.startswith("report.")
    }


@pytest.mark.parametrize("rate", [0.5, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_parts_are_the_text_again(folder, plain_store, cut_store, tmp_path, rate):
    cut = cut_store if rate == 0.5 else make(folder, tmp_path / "cut", fim=rate)
    orders = []
    for subset in ("train", "val"):
        before, ids_before = read_documents(plain_store, subset)
        after, ids_after = read_documents(cut, subset)
        assert len(ids_before) == len(ids_after)
        for number, (before_ids, after_ids) in enumerate(zip(ids_before, ids_after, strict=True)):
            assert before[number].provenance == after[number].provenance
            order, text = reassemble_text(after_ids, after.tokenizer)
            assert text == before.tokenizer.decode(before_ids[:-1])
            orders.append(order)
            if not order:
                assert before_ids == after_ids
    count = len(orders) - orders.count("")
    assert is_near_share(count, len(orders), rate)
    # Texts with an empty prefix, one of len + 1, count as the other order.
    assert is_near_share(orders.count("psm"), count, 0.5 * 0.93)
    flows = {flow.step: flow for flow in read_report(cut).content.flows}
    assert flows["tokenize"].altered == count


def test_the_cuts_are_pinned():
    """Cut texts and positions are part of a store; docs/reference/seeded-choices.md defines them."""
    texts = [f"the text {n} of some" for n in range(200)]
    cutter = FimCutter(0.5, 0.5, derive_key("fim", 7), 1, 2, 3)
    cut = apply_fim(texts, hash_documents(texts), cutter)
    parts = [cut.parts[start:stop] for start, stop in itertools.pairwise(cut.bounds.tolist())]
    assert parts == [cut_in_plain_python(text, 7) for text in texts]
    assert parts[:4] == PINNED


PINNED = [
    ["the text 0 of some"],
    ["the text 1 o", " some", "f"],
    ["the text 2 of some"],
    ["the text 3 of some"],
]


def cut_in_plain_python(text, seed):
    key, digest = derive_key("fim", seed), xxhash.xxh3_128_intdigest(text.encode())
    low, high = digest % 2**64, digest >> 64
    seed_value = mix_int(mix_int(mix_int((low + key[0]) % 2**64) ^ key[1]) ^ high)
    words = [mix_int((seed_value + number * GOLDEN) % 2**64) for number in range(5)]
    if (words[1] >> 11) * 2.0**-53 >= 0.5:
        return [text]
    start, stop = sorted((word >> 32) * (len(text) + 1) >> 32 for word in words[3:])
    if (words[2] >> 11) * 2.0**-53 < 0.5:
        return ["", text[stop:], text[:start], text[start:stop]]
    return [text[:start], text[stop:], text[start:stop]]


@pytest.mark.parametrize(("spm_rate", "order"), [(0.0, "psm"), (1.0, "spm")])
def test_one_order_alone(folder, tmp_path, spm_rate, order):
    store = make(folder, tmp_path / "s", fim={"rate": 1.0, "spm_rate": spm_rate})
    opened, ids = read_documents(store)
    orders = [reassemble_text(document_ids, opened.tokenizer)[0] for document_ids in ids]
    assert orders.count(order) / len(orders) > (0.8 if order == "psm" else 0.99)


def test_cuts_are_anywhere(folder, tmp_path):
    store = make(folder, tmp_path / "s", fim={"rate": 1.0, "spm_rate": 0.0})
    opened, ids = read_documents(store)
    control = opened.tokenizer.control
    shares = []
    for document_ids in ids:
        suffix_position, middle_position = (
            document_ids.index(control["<fim_suffix>"]),
            document_ids.index(control["<fim_middle>"]),
        )
        sizes = [suffix_position - 1, middle_position - suffix_position - 1, len(document_ids) - 2 - middle_position]
        if len(document_ids) > 60:
            shares.append([size / sum(sizes) for size in sizes])
    # Two uniform cuts make parts of a third each on average.
    assert np.allclose(np.mean(shares, axis=0), 1 / 3, atol=0.04)


def test_a_rate_of_zero_changes_nothing(folder, plain_store, tmp_path):
    plain = read_store_files(plain_store)
    assert read_store_files(make(folder, tmp_path / "none", fim=0)) == plain
    assert b"fim" not in plain[Path("dataset_metadata.json")].replace(b"<fim_", b"")
    recipe = Recipe(inputs=("a",))
    assert "fim" not in recipe_to_plain(recipe)["reading"]
    # Pinned: the same command must recognize existing stores as finished.
    assert compute_recipe_fingerprint(recipe) == FINGERPRINT


FINGERPRINT = "530f7466bcb781bd2d57537830ad6b0c"


def test_units_workers_and_order_decide_nothing(folder, cut_store, tmp_path):
    assert read_store_files(make(folder, tmp_path / "two", fim=0.5, workers=2)) == read_store_files(cut_store)
    lines = (folder / "in.jsonl").read_text().splitlines()
    (tmp_path / "in.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    reversed_store = make(tmp_path, tmp_path / "turned", fim=0.5, tokenizer=str(folder / "tokenizer.json"))
    assert sorted(read_documents(reversed_store)[1]) == sorted(read_documents(cut_store)[1])
    other_seed = make(folder, tmp_path / "other", fim={"rate": 0.5, "seed": 1})
    assert read_documents(other_seed)[1] != read_documents(cut_store)[1]


class StopError(Exception):
    pass


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stopped_in_small_units_it_goes_on_to_the_same_bytes(folder, tmp_path, workers):
    recipe = Recipe(
        inputs=(str(folder / "in.jsonl"),),
        tokenizer=str(folder / "tokenizer.json"),
        reading=ReadRecipe(fim=FimRecipe(rate=0.5), normalize=False),
        balance_subsets=False,
    )

    def run(out, listener=lambda event: None, workers=1):
        execution = ExecutionSettings(workers=workers)
        settings = RunSettings(limits=SMALL_LIMITS, unit_bytes=4000, execution=execution)
        run_recipe(recipe, out, listener, settings=settings)
        return hash_store_files(out)

    def stop(event):
        if isinstance(event, Progress) and event.phase == "tokenize" and event.documents > 100:
            raise StopError

    expected = run(tmp_path / "whole")
    with pytest.raises(StopError):
        run(tmp_path / "stopped", stop, workers)
    assert run(tmp_path / "stopped", workers=workers) == expected
    one_unit = make(folder, tmp_path / "one", fim=0.5, val_fraction=0.01)
    assert sorted(read_documents(one_unit)[1]) == sorted(read_documents(tmp_path / "whole")[1])


def test_a_store_is_made_again_from_its_recipe(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    for number, fim in enumerate((0.25, {"rate": 0.5, "spm_rate": 1.0, "seed": 3})):
        first, rerun = tmp_path / f"first{number}", tmp_path / f"again{number}"
        make(folder, first, fim=fim)
        batchloom.prepare(recipe=first, out=rerun)
        assert read_store_files(rerun) == read_store_files(first)
        assert read_recipe(first).reading.fim == parse_fim(fim)


@pytest.mark.parametrize("dedup", [pytest.param("exact", marks=pytest.mark.slow), "near"])
def test_duplicates_are_found_as_without(folder, tmp_path, dedup):
    lines = (folder / "in.jsonl").read_text().splitlines()[:100]
    long = [json.loads(line)["text"] + " ".join(map(str, range(n, n + 400))) for n, line in enumerate(lines[:5])]
    near_texts = [text + " the end" for text in long]
    lines += [json.dumps({"text": text}) for text in (*long, *near_texts)] + lines[:50]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    options = {"tokenizer": str(folder / "tokenizer.json"), "dedup": dedup}
    plain, cut = (read_documents(make(tmp_path, tmp_path / f"s{fim}", fim=fim, **options))[0] for fim in (0, 1))
    provenance = [[store[n].provenance for n in range(len(store))] for store in (plain, cut)]
    assert provenance[0] == provenance[1]
    assert len(plain) < (107 if dedup == "near" else 111)


def test_conversations_and_ids_stay_as_they_are(folder, tmp_path):
    rows = [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "ids").mkdir()
    ids = [{"input_ids": [n, n + 1, 7]} for n in range(40)]
    (tmp_path / "ids" / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ids))
    for source in (tmp_path, tmp_path / "ids"):
        options = {"tokenizer": str(folder / "tokenizer.json")}
        plain = read_documents(make(source, source / "plain", **options))[1]
        assert read_documents(make(source, source / "moved", fim=1.0, **options))[1] == plain


@pytest.mark.parametrize("special", [True, False])
def test_other_models_tokens_are_known(folder, tmp_path, special):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", DEEPSEEK, special=special)
    opened, ids = read_documents(make(folder, tmp_path / "s", fim=1.0, tokenizer=tokenizer))
    ids_by_token = {**opened.tokenizer.control, **opened.tokenizer.added}
    tokens = [ids_by_token[name] for name in DEEPSEEK]
    assert all([number for number in document_ids if number in tokens] == tokens for document_ids in ids)


def test_named_tokens_are_used(folder, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", ("<a>", "<b>", "<c>"))
    fim = {"rate": 1.0, "prefix": "<a>", "suffix": "<b>", "middle": "<c>"}
    opened, ids = read_documents(make(folder, tmp_path / "s", fim=fim, tokenizer=tokenizer))
    assert all(document_ids[0] == opened.tokenizer.control["<a>"] for document_ids in ids)


def test_a_tokenizer_without_such_tokens_is_refused_with_what_to_do(folder, tmp_path):
    with pytest.raises(TokenizerError, match="none of the known fill-in-the-middle tokens .* name those it has"):
        make(folder, tmp_path / "s", tokenizer="bytes", fim=0.5)
    token_names = {"prefix": "<fim_prefx>", "suffix": "<fim_suffix>", "middle": "<fim_middle>"}
    with pytest.raises(TokenizerError, match="no token '<fim_prefx>'; did you mean '<fim_prefix>'"):
        make(folder, tmp_path / "s", fim={"rate": 0.5, **token_names})
    # A failed job leaves no files that block another command.
    make(folder, tmp_path / "s")


def test_a_tokenizer_that_puts_spaces_before_parts_is_refused(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    definition = json.loads(Path(write_tokenizer(path, STARCODER)).read_text())
    definition["pre_tokenizer"]["add_prefix_space"] = True
    path.write_text(json.dumps(definition))
    with pytest.raises(TokenizerError, match="adds text at the beginning of a text"):
        make(folder, tmp_path / "s", tokenizer=str(path), fim=0.5)


@pytest.mark.parametrize(
    ("fim", "message"),
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
def test_wrong_settings_are_refused(tmp_path, fim, message):
    with pytest.raises(SettingsError, match=message):
        batchloom.prepare(["nowhere.txt"], out=tmp_path / "s", fim=fim)


@pytest.mark.parametrize("fim", [0.5, 1, {"rate": 0.5, "seed": 2}, {"rate": 0.1, "spm_rate": 0}])
def test_the_short_form_round_trips(fim):
    value = parse_fim(fim)
    assert parse_fim(fim_to_plain(value)) == value == parse_fim(value)
    assert fim_to_plain(parse_fim(1)) == fim_to_plain(FimRecipe(rate=1.0)) == 1.0


def test_texts_in_the_middle_keep_their_weights(tmp_path, folder):
    weights = dict(zip("kwyz", (0.5, 1, 2, 0), strict=True))
    texts = [letter * size for size in range(5, 30) for letter in weights]
    lines = [json.dumps({"text": text, "weight": weights[text[0]]}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = {"tokenizer": str(folder / "tokenizer.json"), "fim": 0.5, "val_fraction": 0}
    batchloom.prepare(tmp_path / "in.jsonl", out=tmp_path / "s", **options)
    store = batchloom.open_store(tmp_path / "s")
    assert len(store) == 75
    for document in store:
        (letter,) = set(document.text) & set(weights)
        assert set(document.loss_weights.tolist()) == {weights[letter]}
