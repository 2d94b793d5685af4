"""The rules of axe-core, checked on a page of a browser."""

import importlib.resources

import pytest

# Passed rules are counted, and not described: that would take twice as long as the checks.
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "resultTypes": ["violations"],
}


def find_violations(page):
    """Return the rules that a page breaks, with the elements that break them."""
    package = pytest.importorskip("axe_playwright_python")
    # Evaluated by the debugger: the policy of the page admits no foreign script.
    page.evaluate((importlib.resources.files(package) / "axe.min.js").read_text())
    result = page.evaluate("rules => axe.run(rules)", RULES)
    assert len(result["passes"]) > 10
    return [(rule["id"], [node["html"][:120] for node in rule["nodes"]][:3]) for rule in result["violations"]]


def check_accessibility(page, url):
    """Open a page, wide and light, then narrow and dark: it must break no rule, and not be wider than the window."""
    for width, scheme in ((1280, "light"), (400, "dark")):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.goto(url)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not find_violations(page), (width, scheme)
