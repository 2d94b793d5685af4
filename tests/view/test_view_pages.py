"""The pages in a real browser: navigation, search, documents, masks and packed rows."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import batchloom
from batchloom.cli import run_command_line
from batchloom.testing import write_store
from media.sample_media import make_messages
from view.conftest import TOKEN, open_client, serving, write_chats


def test_the_overview_shows_counts_removed_documents_and_bad_records(opened, address):
    assert opened.url == f"{address}/"
    facts = opened.locator(".facts").inner_text()
    assert "121" in facts
    assert "trained" in facts
    assert "chats.jsonl" in opened.locator("section", has_text="Sources").inner_text()
    bad = opened.locator("section", has_text="Bad records").inner_text()
    assert "line 123" in bad
    opened.locator("summary", has_text="Duplicates").click()
    assert "What is 3 + 3" in opened.locator("details[open]").inner_text()


def test_a_document_shows_turns_origin_and_mask(opened):
    opened.get_by_role("link", name="Documents").click()
    opened.get_by_role("link", name="5", exact=True).click()
    opened.wait_for_url("**/document/5*")
    assert "Document 5" in opened.locator("h1").inner_text()
    assert "chats.jsonl line 6" in opened.locator(".facts").inner_text()
    user, assistant = opened.locator("[data-role=user]"), opened.locator("[data-role=assistant]")
    assert "What is 5 + 5?" in user.inner_text()
    assert user.locator(".trained").count() == 0
    assert assistant.locator(".trained").all_inner_texts()[:2] == ["1", "0"]
    opened.get_by_role("link", name="Tokens").click()
    assert opened.locator(".token.control").first.inner_text() == "<|im_start|>"
    assert opened.locator(".token", has_text="W").first.get_attribute("title") == str(ord("W"))
    opened.go_back()
    opened.go_back()
    assert opened.locator("h1").inner_text().startswith("Documents")


def test_keys_move_through_documents(opened):
    opened.keyboard.press("/")
    opened.wait_for_url("**/documents*")
    assert opened.evaluate("document.activeElement.id") == "search"
    opened.keyboard.press("Escape")
    for _ in range(3):
        opened.keyboard.press("j")
    opened.keyboard.press("k")
    opened.keyboard.press("Enter")
    opened.wait_for_url("**/document/1*")
    opened.keyboard.press("ArrowRight")
    opened.wait_for_url("**/document/2*")
    opened.keyboard.press("ArrowLeft")
    opened.wait_for_url("**/document/1*")
    opened.keyboard.press("?")
    assert opened.locator("dialog[open]").count() == 1


@pytest.mark.parametrize(
    ("mode", "text", "numbers"),
    [
        ("text", "IS 17 +", [18]),
        ("regex", r"is (21|35) \+", [22, 36]),
        ("line", "chats.jsonl:13", [12]),
        ("text", "nobody wrote this", []),
    ],
)
def test_search_finds_documents(address, mode, text, numbers):
    with open_client(address) as client:
        answer = client.get("/documents", params={"text": text, "mode": mode}).text
    assert [int(number) for number in re.findall(r"data-row.*?<a [^>]*>(\d+)</a>", answer, re.DOTALL)] == numbers


def test_the_form_of_a_search_is_in_the_address(opened, address):
    mode, text, numbers = "regex", r"is (21|35) \+", [22, 36]
    opened.goto(f"{address}/documents")
    opened.get_by_label("Search").fill(text)
    opened.locator("select[name=mode]").select_option(mode)
    opened.get_by_label("Search").press("Enter")
    opened.wait_for_url("**text=*")
    assert [int(cell) for cell in opened.locator("[data-row] a").all_inner_texts()] == numbers
    assert opened.get_by_label("Search").input_value() == text


@pytest.fixture
def long_search(tmp_path, monkeypatch):
    """A store whose search takes three requests; its last document holds "Needle", far from its beginning."""
    search = "batchloom.view.documents.document_search.search_documents"
    monkeypatch.setattr(f"{search}.__kwdefaults__", {"most": 50, "seconds": 0})
    texts = ["some words"] * 600 + ["some words " * 1_000 + "one Needle " + "some words " * 1_000]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    batchloom.prepare(tmp_path / "rows.jsonl", out=tmp_path / "store", tokenizer="bytes", dedup="none", val_fraction=0)
    return tmp_path / "store"


def test_a_search_goes_on_to_the_match_and_back(page, long_search):
    with serving(long_search) as address:
        page.goto(f"{address}/documents?text=needle&token={TOKEN}")
        page.locator("[data-row] a").click()
        page.wait_for_url("**/document/600?*")
        assert page.evaluate("getSelection().toString()") == "Needle"
        page.go_back()
        row = page.locator("[data-row]")
        row.wait_for()
        assert row.locator("mark").inner_text() == "Needle"
        assert "some words one Needle some words" in row.inner_text()


@pytest.mark.slow
def test_back_from_a_document_of_a_long_list_shows_it_again(page, tmp_path):
    store = write_store(tmp_path / "store", [[104, 105]] * 120)
    with serving(store.path) as address:
        page.goto(f"{address}/documents?token={TOKEN}")
        page.locator("[data-row]").nth(49).scroll_into_view_if_needed()
        page.locator("[data-row]").nth(60).wait_for()
        page.locator("[data-row] a").nth(48).click()
        page.wait_for_url("**/document/48*")
        page.go_back()
        page.get_by_role("link", name="48", exact=True).wait_for()


@pytest.mark.slow
def test_a_search_is_stopped(page, long_search):
    with serving(long_search) as address:
        page.goto(f"{address}/?token={TOKEN}")
        page.route("**/documents/more*", lambda _: None)
        page.goto(f"{address}/documents?text=needle")
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Stop").wait_for(state="hidden")
        page.unroute("**/documents/more*")
        page.get_by_text("Continue").click()
        page.locator("[data-row]").wait_for()
        # htmx logs its abort as an error.
        page.problems.clear()


def test_an_error_of_a_search_stays_beside_its_form(address):
    with open_client(address) as client:
        for text, mode, expected in (
            ("(open", "regex", "The expression is invalid"),
            ("chats.jsonl:999", "line", "(line or row 999): 123 records of it were read"),
            ("chats.jsonl:122", "line", "preparation left it out"),
            ("/some/folder/chats.jsonl:13", "line", "chats.jsonl line 13"),
        ):
            answer = client.get("/documents", params={"text": text, "mode": mode}).text
            assert f'value="{text}"' in answer
            assert expected in answer


def test_a_search_imports_no_pandas(chats):
    """It would take a quarter of a second and 20 MB."""
    code = (
        "import sys\nfrom starlette.applications import Starlette\n"
        "from starlette.testclient import TestClient\nfrom batchloom.view import ViewSpec, make_pages\n"
        f"pages = make_pages(ViewSpec(data=[{str(chats)!r}], browser=False))\n"
        "answer = TestClient(Starlette(routes=pages.list_routes())).get('/documents?text=is 17')\n"
        "print('<mark>is 17</mark>' in answer.text, 'pandas' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "False"]


def test_a_hash_leads_to_equal_documents(opened, address):
    opened.goto(f"{address}/document/9")
    opened.locator(".facts a").click()
    opened.wait_for_url("**mode=hash*")
    assert opened.locator("[data-row] a").all_inner_texts() == ["9"]


@pytest.mark.slow
def test_the_list_grows_while_it_is_scrolled(opened, address):
    opened.goto(f"{address}/documents")
    for count in (100, 121):
        opened.mouse.wheel(0, 20000)
        opened.locator("[data-row]").nth(count - 1).wait_for()
    assert opened.locator(".more").count() == 0


def test_filters_are_in_the_address(opened, address):
    opened.goto(f"{address}/documents")
    opened.get_by_label("Tokens from").fill("60")
    opened.get_by_role("button", name="Show").last.click()
    opened.wait_for_url("**least=60*")
    assert opened.locator("[data-row] a").all_inner_texts() == ["7"]


def test_markup_in_a_document_is_inert(opened, address):
    opened.goto(f"{address}/document/7")
    assert "<script>alert(1)</script>" in opened.locator("[data-role=user]").inner_text()
    opened.goto(f"{address}/documents?text=<script>")
    assert "<script>" in opened.locator(".begins").first.inner_text()
    assert opened.locator("main img, main script").count() == 0
    assert opened.problems == []


def test_a_span_of_a_step_opens_its_document(opened, address, chats):
    opened.goto(f"{address}/packing?seq_len=256&batch=4")
    loader = batchloom.Loader(batchloom.open_store(chats), seq_len=256, global_batch_size=4)
    first = batchloom.explain(loader.plan, 0)[0].spans[0]
    assert opened.locator(".row").count() == 4
    assert opened.locator(".row").first.locator("a").count() == len(batchloom.explain(loader.plan, 0)[0].spans)
    opened.locator(".row a .span").first.click()
    opened.wait_for_url(f"**/document/{first.document}*")
    for page in ("Text", "Tokens"):
        # What is read at once must not be that of the page before.
        with opened.expect_navigation():
            opened.get_by_role("link", name=page, exact=True).click()
        marked = "".join(opened.locator(".turn .inside").all_text_contents())
        assert marked == "".join(opened.locator(".turn .text").all_text_contents())
        assert f"{first.stop - 1}, are in the row" in opened.locator(".legend").first.inner_text()
    opened.goto(f"{address}/document/{first.document}?from=1&to=4&as=tokens")
    assert opened.locator(".turn .token").count() > opened.locator(".turn .inside").count() == 3
    opened.goto(f"{address}/packing?seq_len=256&batch=4")
    opened.wait_for_selector("table >> text=window_1000")
    assert opened.locator("tr.current").inner_text().startswith("best_fit")
    tokens = sum(span.stop - span.start for row in batchloom.explain(loader.plan, 0) for span in row.spans)
    facts = opened.locator("p.tools").first.inner_text()
    assert f"{tokens:,} tokens, {4 * 256 - tokens:,} of padding" in facts


def test_packing_and_plan_say_what_they_leave_out(opened, address, chats, capsys):
    run_command_line(["plan", str(chats), "--seq-len", "40", "--global-batch-size", "8"])
    printed = capsys.readouterr().out
    left_out = re.search(r"data: (\S+ documents of an epoch are too long; (\S+) tokens)( are left out)", printed)
    share = int(left_out[2].replace(",", "")) / batchloom.open_store(chats).tokens
    sentence = f"{left_out[1]} ({share:.1%}){left_out[3]}."
    opened.goto(f"{address}/packing?seq_len=40&batch=8")
    opened.wait_for_selector("table >> text=window_1000")
    assert opened.get_by_text(sentence, exact=True).count() == 1
    assert opened.locator("tr.current td").last.inner_text() == f"{share:.1%}"
    opened.goto(f"{address}/plan?seq_len=40&batch=8")
    assert opened.get_by_text(f"data: {sentence}", exact=True).count() == 1
    empty = re.search(r"\d+ sequences? without loss", printed)[0]
    assert opened.locator("#empty").inner_text() == f"Padding includes {empty}, added to fill the last step."


@pytest.mark.slow
def test_the_packing_and_the_plan_of_a_subset_lead_to_its_documents(page, tmp_path):
    store = write_store(tmp_path / "store", {"train": [[97] * 9] * 5, "val": [[118] * 7, [119] * 8]})
    with serving(store.path) as served:
        page.goto(f"{served}/documents?split=val&token={TOKEN}")
        page.get_by_role("link", name="Packing").click()
        page.wait_for_url("**/packing?split=val")
        assert page.locator("h1").inner_text().endswith("subset val")
        assert page.locator(".row a").count() == 2
        page.locator(".row a .span").first.click()
        page.wait_for_url("**split=val*")
        assert page.locator(".text").inner_text() in ("v" * 7, "w" * 8)
        page.get_by_role("link", name="Plan").click()
        page.wait_for_url("**/plan*")
        assert page.locator("h1").inner_text().endswith("subset val")
        assert page.locator("#ranks .row a").count() == 2
        page.get_by_label("Document or file:line").fill("1")
        page.get_by_role("button", name="Find").click()
        page.locator("#served td a").click()
        page.wait_for_url("**/document/1?split=val")


def test_the_loss_of_a_row_is_that_of_the_batch(opened, address, chats):
    opened.goto(f"{address}/packing?seq_len=256&batch=4&step=1")
    drawn = opened.locator(".row").nth(2).locator(".loss")
    marks = np.zeros(256, bool)
    for number in range(drawn.count()):
        start = int(drawn.nth(number).get_attribute("x"))
        marks[start : start + int(drawn.nth(number).get_attribute("width"))] = True
    loader = batchloom.Loader(batchloom.open_store(chats), seq_len=256, global_batch_size=4, output="numpy")
    assert (marks == (loader[1]["labels"][2] != -100)).all()


@pytest.mark.slow
def test_the_theme_can_be_switched_and_stays(opened, address):
    def get_background():
        return opened.evaluate("getComputedStyle(document.body).backgroundColor")

    light = get_background()
    opened.get_by_role("button", name="Switch between light and dark").click()
    dark = get_background()
    assert dark != light
    opened.goto(f"{address}/documents")
    assert get_background() == dark


def test_a_tool_call_is_shown_inside_its_turn_and_can_be_folded(page, tmp_path):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    write_chats(tmp_path, [{"messages": make_messages("Add.", f"I add. {call} Done.")}])
    with serving(tmp_path / "store") as served:
        page.goto(f"{served}/?token={TOKEN}")
        page.goto(f"{served}/document/0")
        shown = page.locator("[data-role=assistant] details.call")
        assert shown.locator(".text").inner_text() == call
        shown.locator("summary").click()
        assert shown.locator(".text").inner_text() == ""
        assert "I add." in page.locator("[data-role=assistant] > .text").first.inner_text()


def test_the_lengths_of_the_command_reach_every_page(tmp_path):
    write_store(tmp_path / "store", [[104, 105] * 20] * 30)
    with serving(tmp_path / "store", seq_len=64, global_batch_size=2) as served, open_client(served) as client:
        for path in ("/packing", "/plan", "/packing?step=1"):
            assert "2 rows of 64 tokens" in " ".join(re.sub(r"<[^>]+>", " ", client.get(path).text).split())
        assert "4 rows of 32 tokens" in " ".join(client.get("/packing?seq_len=32&batch=4").text.split())


def test_origins_show_enough_of_their_paths(tmp_path):
    for name in ("a/one.txt", "b/one.txt", "b/two.txt"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    batchloom.prepare(tmp_path / "in", out=tmp_path / "s", tokenizer="bytes", val_fraction=0)
    with serving(tmp_path / "s") as served, open_client(served) as client:
        origins = re.findall(r'class="origin" title="([^"]*)">(\S+)', client.get("/documents").text)
    assert sorted(origins) == [
        ("in/a/one.txt", "a/one.txt"),
        ("in/b/one.txt", "b/one.txt"),
        ("in/b/two.txt", "two.txt"),
    ]
