"""Hostile texts take linear time."""

import json
import subprocess
import sys

import pytest

from text.test_steps import REPAIR_STEPS

SCRIPT = """
import json, sys, time
from batchloom.text.registry import make_clean_function
from batchloom.text.steps import CleanStep

n = int(sys.argv[1])
texts = {repr(c): c * n for c in "a A 1 @ . : < > & + - ( \\n \\t".split(" ")}
texts |= {"blank": " " * n, "blanks and x": (" " * 1000 + "x") * 1000, "tabs": "x\\t \\t" * (n // 4)}
for piece in (
    "<div>", "</div>", "<b><i></b></i>", "<!--", "<!-", "<p>x", "<ul><li>", "<table><tr><td>", "<svg><td>", "<a href='",
    "<script>", "<textarea><", "<rt>", "<optgroup>", "<?xml ", "<html ", '<a b="<', "&lt;", "<font color=a><p>", "<option>",
    "a@", "a@b.", "a@a-", "a.a.", "@a.a.-", "a@1.1.", "1.", "1.1.1.1.", "8.8.8.8 ", "2001:", "2001::", ":2", "+1 ", "+11 22 ",
    "+1(1)", "1-", "415-", "415-555-2671-", "(415)", "4111 ", "41111111-", "4111-1111-", "4012888888881881 ",
    "3 likes\\n", "3 ", "Read more ", "cookie ", "cookie\\n", "javascript is ", "sign in to ", "\\n\\n\\n", " \\n", "\\n. ", "cart in ",
    "\\u200d", "\\u00e9\\u200d", "\\ufeff", "\\u00a0", "\\ud800", "\\r", "\\u00c3\\u00a9", "\\u00c3", "\\u00e2\\u20ac\\u2122\\n", "\\u4e2d", "ÿ ",
):
    texts[piece] = piece * (n // len(piece))
texts["attributes"] = "<div " + " ".join(f"a{i}='>'" for i in range(n // 12)) + ">x"
texts["page"] = "<html><body>" + "<div class='a b'><p>word word</p></div>" * (n // 40)
texts["menu"] = "<html><body>" + "<nav><a href=x>y</a></nav>" * (n // 26)
for step, options in json.loads(sys.argv[2]):
    clean = make_clean_function(CleanStep(step, options))
    clean("The first text loads what the step needs.")
    for name, text in texts.items():
        start = time.process_time()
        clean(text)
        print(json.dumps([f"{step} {options}: {name}", time.process_time() - start]), flush=True)
"""

# The rules and evaluation sets have hostile texts of their own.
STEPS = [*((name, {}) for name in REPAIR_STEPS), ("html", {"when": "anywhere"})]


@pytest.mark.parametrize(
    ("size", "limit_s", "steps"),
    [
        # Quadratic time would be as far above either limit, and linear time is at most a twentieth of it.
        (40_000, 1.5, STEPS),
        pytest.param(300_000, 30, [*STEPS, ("mojibake", {"width": True})], marks=pytest.mark.slow),
    ],
    ids=["small", "large"],
)
def test_time_is_linear_for_hostile_texts(size, limit_s, steps):
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(size), json.dumps(steps)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr + completed.stdout[-500:]
    seconds_by_text = dict(map(json.loads, completed.stdout.splitlines()))
    slow = {text: seconds for text, seconds in seconds_by_text.items() if seconds > limit_s}
    assert len(seconds_by_text) > 70 * len(steps)
    assert slow == {}
