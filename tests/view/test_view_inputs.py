"""The page of raw inputs in a real browser: findings, the form and its effect."""

import json

import pytest

from golden.inputs import make_tokenizer_json
from view.conftest import TOKEN, serving

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    inputs = tmp_path_factory.mktemp("inputs")
    rows = [{"question": f"What is {n} * 2?", "answer": f"It is {2 * n}."} for n in range(20)]
    (inputs / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    (inputs / "tokenizer.json").write_text(make_tokenizer_json(CONTROL))
    return inputs


@pytest.fixture
def opened(page, folder):
    with serving(folder / "questions.jsonl") as address:
        page.goto(f"{address}/?token={TOKEN}&tokenizer=bytes")
        yield page


def test_findings_first_documents_and_the_next_command_are_shown(opened):
    row = opened.locator("section", has_text="Schema and mapping").locator("tbody tr, table > tr").last.inner_text()
    assert "question" in row
    assert "line 21" in opened.locator("section", has_text="Bad records").inner_text()
    assert "What is 3 * 2?" in opened.locator("section", has_text="First documents").first.inner_text()
    assert opened.locator(".command code").first.inner_text().startswith("batchloom prepare")


def test_a_changed_setting_shows_its_effect_and_stays_in_the_address(opened, folder):
    opened.get_by_label("Tokenizer").fill(str(folder / "tokenizer.json"))
    opened.get_by_label("Template").fill("chatml")
    opened.get_by_label("Template").press("Tab")
    shown = opened.locator(".text", has_text="<|im_start|>assistant").first
    shown.wait_for()
    assert "template=chatml" in opened.url
    trained = shown.locator(".trained").all_inner_texts()
    assert "It is 0." in "".join(trained)
    assert "What is" not in "".join(trained)


# The second is longer than the name of a file can be.
@pytest.mark.parametrize("template", [pytest.param("chatmll", marks=pytest.mark.slow), "chatmll" * 50])
def test_a_wrong_setting_is_explained_beside_the_form(opened, template):
    opened.get_by_label("Template").fill(template)
    opened.get_by_label("Template").press("Tab")
    opened.locator("[role=alert]").wait_for()
    assert f"there is no template '{template}'" in opened.locator("[role=alert]").first.inner_text()
    assert opened.get_by_label("Template").input_value() == template
