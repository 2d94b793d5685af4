"""Accessibility of the pages: axe's rules, contrast in both themes, two widths, and the keyboard."""

import importlib.resources

import pytest

from batchloom.view import ViewSpec, write_view
from view.conftest import TOKEN, serving
from view.test_view_pages import write_chats

PAGES = [
    *("/", "/documents", "/documents?text=nothing", "/document/3", "/document/3?as=tokens", "/packing?seq_len=256"),
    "/nothing",
]
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("accessible")
    write_chats(folder)
    with serving(folder / "store") as served:
        yield served


@pytest.fixture
def opened(page, address):
    page.goto(f"{address}/?token={TOKEN}")
    return page


def find_violations(page):
    """Return the rules that a page breaks, with the elements that break them."""
    package = pytest.importorskip("axe_playwright_python")
    # Evaluated by the debugger: the policy of the page admits no foreign script.
    page.evaluate((importlib.resources.files(package) / "axe.min.js").read_text())
    result = page.evaluate("rules => axe.run(rules)", RULES)
    assert len(result["passes"]) > 10
    return [(rule["id"], [node["html"][:120] for node in rule["nodes"]][:3]) for rule in result["violations"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("path", PAGES)
def test_no_rule_of_axe_is_broken(opened, address, path, width, scheme):
    opened.set_viewport_size({"width": width, "height": 800})
    opened.emulate_media(color_scheme=scheme)
    opened.goto(address + path)
    opened.wait_for_load_state("networkidle")
    assert find_violations(opened) == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.problems[:] = [problem for problem in opened.problems if "status of 404" not in problem]


def test_a_page_file_breaks_no_rule_of_axe(page, tmp_path):
    write_chats(tmp_path)
    for choice in ({}, {"step": 0}, {"document": 3}):
        file = write_view(ViewSpec(data=[str(tmp_path / "store")], out=str(tmp_path / "page.html"), **choice))
        page.goto(file.as_uri())
        assert find_violations(page) == []


def test_every_control_is_reached_by_the_keyboard(opened, address):
    opened.goto(f"{address}/documents")
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.textContent") == "Skip to content"
    reached = set()
    for _ in range(25):
        opened.keyboard.press("Tab")
        reached.add(opened.evaluate("document.activeElement.textContent.trim() || document.activeElement.name"))
        assert opened.evaluate("document.activeElement.matches(':focus-visible')")
    assert reached >= {"Overview", "Documents", "Packing", "◐", "?", "text", "least", "most", "start", "Show", "0"}


def test_the_keys_end_at_a_dialog_that_escape_closes(opened):
    opened.keyboard.press("?")
    assert opened.locator("dialog[open]").count() == 1
    opened.keyboard.press("Escape")
    assert opened.locator("dialog[open]").count() == 0
