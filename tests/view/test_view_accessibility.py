"""Accessibility of the pages: axe's rules, contrast in both themes, two widths, and the keyboard."""

import pytest

from batchloom.view import ViewSpec, write_view
from media.sample_media import make_messages
from view.axe import check_accessibility, find_violations
from view.conftest import serving, write_chats

PAGES = [
    "/",
    *(
        pytest.param(path, marks=pytest.mark.slow)
        for path in (
            "/plan?seq_len=256&batch=2&document=3&workers=2",
            *("/documents", "/documents?text=nothing", "/document/3", "/document/3?as=tokens", "/nothing"),
            *("/packing?seq_len=64&batch=8&row=4", "/packing?seq_len=256"),
        )
    ),
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A store of few conversations, as axe looks at each element of a page."""
    folder = tmp_path_factory.mktemp("chats")
    write_chats(folder, [{"messages": make_messages(f"What is {n} + {n}?", str(2 * n))} for n in (*range(12), 3)])
    return folder / "store"


@pytest.fixture(scope="module")
def address(chats):
    with serving(chats) as served:
        yield served


@pytest.mark.parametrize("path", PAGES)
def test_no_rule_of_axe_is_broken(opened, address, path):
    check_accessibility(opened, address + path)
    opened.problems[:] = [problem for problem in opened.problems if "status of 404" not in problem]


def test_a_page_file_breaks_no_rule_of_axe(page, chats, tmp_path):
    for choice in ({}, {"step": 0}, {"document": 3}):
        file = tmp_path / "page.html"
        write_view(ViewSpec(data=[str(chats)], **choice), file)
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


@pytest.mark.slow
def test_the_keys_end_at_a_dialog_that_escape_closes(opened):
    opened.keyboard.press("?")
    assert opened.locator("dialog[open]").count() == 1
    opened.keyboard.press("Escape")
    assert opened.locator("dialog[open]").count() == 0
