"""Mixtures read from a YAML file or from a text of stores and weights."""

import pytest

from batches.small_tokenizer import write_tokenizer
from batchloom import Mixture, PlanError, SettingsError
from batchloom.batches import read_mixture
from batchloom.core.errors import InputMissingError, RecordError
from batchloom.plan import SourceSpec, Stage
from batchloom.testing import append_documents, write_store


@pytest.fixture
def stores(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("web", "code", "math")):
        write_store(tmp_path / "stores" / name, [[number] * 5] * 10)
    return tmp_path / "stores"


def test_a_file_says_what_a_mixture_can_be_given(stores, tmp_path):
    append_documents(stores / "math", [[1]])
    file = tmp_path / "conf" / "mix.yaml"
    file.parent.mkdir()
    file.write_text(
        """
        weights: {web: 0.7, rest: {weight: 0.3, sources: {code: 2, math: 1}}}
        stores:
          web: ../stores/web
          code: ../stores/code/
          math: {path: ../stores/math, generation: 1}
        unit: documents
        exhausted: redistribute
        sources: {web: {epochs: 2, seed: 3}, code: {overlong: drop}}
        stages: [{step: 10, weights: size}, {step: 20, weights: {code: 1}}]
        """
    )
    mixture = read_mixture(file)
    assert {name: (s.path.name, len(s)) for name, s in mixture.stores.items()} == {
        "web": ("web", 10),
        "code": ("code", 10),
        "math": ("math", 10),
    }
    assert mixture.weights == {
        "web": 0.7,
        "rest": {"weight": 0.3, "sources": {"code": 2, "math": 1}},
    }
    assert (mixture.unit, mixture.exhausted) == ("documents", "redistribute")
    assert mixture.sources == {
        "web": SourceSpec(epochs=2, seed=3),
        "code": SourceSpec(overlong="drop"),
    }
    assert mixture.stages == [Stage(step=10, weights="size"), Stage(step=20, weights={"code": 1})]


def test_a_text_names_sources_by_their_folders(stores):
    mixture = read_mixture("stores/web=0.7, stores/code/=3,stores/math")
    assert mixture.weights == {"web": 0.7, "code": 3.0}
    assert list(mixture.stores) == ["web", "code", "math"]


def test_synthetic_data_is_named_as_anywhere(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("weights: size\nstores: {a: 'dummy:documents=10', b: {path: 'dummy:documents=20'}}\n")
    mixture = read_mixture(str(file))
    assert [len(store) for store in mixture.stores.values()] == [10, 20]
    assert all(store.contents.synthetic for store in mixture.stores.values())


def test_every_problem_of_a_file_is_reported_at_once(stores, tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text(
        """
        wieghts: {web: 1}
        stores: {web: stores/wbe, code: {path: stores/code, generaton: 1}, math: 3}
        sources: {web: {epochs: 0, sede: 1}, code: 7}
        stages: [{step: 5}, 6, {steps: 7, weights: size}]
        """
    )
    with pytest.raises(SettingsError) as caught:
        read_mixture(file)
    report = "\n".join(caught.value.problems)
    assert all(problem.startswith(f"{file}: ") for problem in caught.value.problems)
    for words in (
        "wieghts: unknown setting; did you mean 'weights'?",
        "weights: missing",
        "stores.web: ",
        "stores.code.generaton: unknown setting; did you mean 'generation'?",
        "stores.math: 3 is not the path of a store",
        "sources.web.sede: unknown setting; did you mean 'seed'?",
        "sources.web.epochs: 0 is not",
        "sources.code: 7 is not a mapping",
        "stages[0].weights: missing",
        "stages[1]: 6 is not a mapping",
        "stages[2].steps: unknown setting; did you mean 'step'?",
    ):
        assert words in report, words


def test_a_file_that_is_wrong_in_every_way_is_mended_in_a_few_rounds(stores, tmp_path):
    write_store(stores / "other", [[1, 2, 3]], tokenizer=write_tokenizer(tmp_path / "tokenizer.json"))
    file = tmp_path / "m.yaml"
    file.write_text(
        """
        weights: {web: -1, cod: 2, rest: {weight: 1, sources: {math: x}}}
        stores: {web: stores/web, code: stores/cod, other: stores/other, math: stores/math}
        unit: tokns
        exhausted: never
        most_epochs: 0
        colour: red
        sources: {wbe: {epochs: 1}, cod: {epochs: 0}, web: {seed: x}}
        stages: [{step: 9, weights: {x: 1}}, {step: 0, weights: {y: 1}}, {step: 5, weights: {web: 0}}]
        """
    )
    with pytest.raises(SettingsError) as caught:
        read_mixture(file)
    problems = [problem.removeprefix(f"{file}: ") for problem in caught.value.problems]
    assert sorted({problem.split(":")[0] for problem in problems}) == [
        *("colour", "exhausted", "most_epochs"),
        *("sources.cod", "sources.cod.epochs", "sources.wbe", "sources.web.seed"),
        *("stages[1].step", "stores.code", "unit"),
        *("weights.cod", "weights.rest.sources.math", "weights.web"),
    ]
    assert len(set(problems)) == len(problems)
    file.write_text(
        """
        weights: {web: 1}
        stores: {web: stores/web}
        stages: [{step: 9, weights: {x: 1}}, {step: 5, weights: {web: 0}}]
        """
    )
    with pytest.raises(SettingsError) as caught:
        read_mixture(file)
    problems = [problem.removeprefix(f"{file}: ").split(":")[0] for problem in caught.value.problems]
    assert problems == ["stages[0].weights.x", "stages[1].weights", "stages"]
    file.write_text("weights: {web: 1}\nstores: {web: stores/web, other: stores/other}\n")
    with pytest.raises(PlanError, match="different tokenizers"):
        read_mixture(file)


def test_values_are_checked_although_a_store_cannot_be_opened(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("stores: {web: none}\nweights: {web: -1, rest: {weight: 1, sources: [a, 3]}}\nunit: x\n")
    with pytest.raises(SettingsError) as caught:
        read_mixture(file)
    report = "\n".join(caught.value.problems)
    for words in (
        "stores.web: ",
        "weights.web: -1",
        "unit: 'x'",
        "weights.rest.sources.3: unknown source",
    ):
        assert f"{file}: {words}" in report


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weights: {wbe: 1}", "weights.wbe: unknown source; the sources are web; did you mean 'web'?"),
        ("weights: {web: -1}", "weights.web: -1 is neither 0 nor a number from"),
        ("weights: {web: .nan}", "weights.web: nan is neither 0 nor a number"),
        ("weights: {web: 0}", "weights: all weights are 0"),
        (
            "weights: {web: 1}\nunit: tokns",
            "unit: 'tokns' is none of tokens, documents, epochs; did you mean",
        ),
        ("weights: {web: 1}\nexhausted: [1]", "exhausted: [1] is none of"),
        ("weights: {web: 1}\ntemperature: hot", "temperature: 'hot' is not a number from"),
        ("weights: {web: 1}\nsources: {wbe: {epochs: 1}}", "sources.wbe: unknown source"),
        (
            "weights: {web: 1}\nstages: [{step: 2, weights: {x: 1}}]",
            "stages[0].weights.x: unknown source",
        ),
    ],
)
def test_what_a_mixture_refuses_is_named_with_the_file(stores, tmp_path, text, words):
    file = tmp_path / "m.yaml"
    file.write_text(f"stores: {{web: stores/web}}\n{text}\n")
    with pytest.raises(SettingsError) as caught:
        read_mixture(file)
    assert any(p.startswith(f"{file}: {words}") for p in caught.value.problems), caught.value


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("stores/web=0.7,stores/cod=1", SettingsError, "stores.cod: "),
        ("stores/web=much", SettingsError, "'stores/web=much' is not PATH=WEIGHT"),
        ("=1,stores/web=1,", SettingsError, "'=1' is not PATH=WEIGHT"),
        ("stores/web=1,other/web=1", SettingsError, "both called 'web'; name them in a YAML file"),
        ("stores/web=-1", SettingsError, "weights.web: -1.0 is neither 0 nor a number from"),
        ("m.yaml", InputMissingError, "There is no file or folder m.yaml"),
        (
            "stores/web,stores/code",
            SettingsError,
            "none of its sources has a weight; write PATH=WEIGHT",
        ),
        ("stores/web:0.5,stores/code:0.5", SettingsError, "as in stores/web=0.7,stores/code=0.3"),
        ("stores/web:0.5", SettingsError, "is not a file, and none of its sources has a weight"),
        ("stores/web", SettingsError, "stores/web is a folder without a weight; write PATH"),
        ("stores/web=-1,stores/cod=1,=2", SettingsError, "'=2' is not PATH=WEIGHT"),
        ("stores/web=-1,stores/cod=1,=2", SettingsError, "stores.cod: "),
        ("stores/web=-1,stores/cod=1,=2", SettingsError, "weights.web: -1.0 is neither"),
    ],
)
def test_what_a_text_must_not_be(stores, text, error, words):
    with pytest.raises(error) as caught:
        read_mixture(text)
    assert words in str(caught.value)


def test_a_file_that_is_no_mapping_or_no_yaml(tmp_path):
    for text, error in (("- 1", SettingsError), ("a: [", RecordError), ("", InputMissingError)):
        (tmp_path / "m.yaml").write_text(text)
        with pytest.raises(error):
            read_mixture(tmp_path / "m.yaml")


def test_a_store_of_another_tokenizer_is_named(stores, tmp_path):
    write_store(stores / "other", [[1, 2, 3]], tokenizer=write_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(PlanError, match="'web' and 'other' were prepared with different tokenizers"):
        read_mixture("stores/web=1,stores/other=1")


def test_the_public_name_is_the_value(stores):
    assert isinstance(read_mixture("stores/web=1"), Mixture)
