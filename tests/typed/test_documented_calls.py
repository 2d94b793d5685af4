"""Type checkers accept the documented calls and refuse wrong ones."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from batchloom.batches.assembly import BATCH_KEYS, ArrayName

CALLS = Path(__file__).parent / "documented_calls.py"
CHECKERS = {
    "mypy": ["-m", "mypy", "--strict", "--no-incremental"],
    # It takes the first python on the PATH unless told.
    "pyright": ["-m", "basedpyright", "--pythonpath", sys.executable, "--level", "error"],
}
# Each of these calls must be an error.
WRONG_CALLS = """
from batchloom import Loader, Mixture, open_store, prepare

store = open_store("store")
Loader(store, seq_len="64", global_batch_size=4)
Loader(store, seq_len=64, global_batch_size=4, packing=True)
Mixture({"web": 1.0}, stores={"web": "stores/web"})
prepare("a.txt", out="s", val_fractoin=0.1)
prepare(5, out="s")
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_the_documented_calls_are_accepted_and_wrong_ones_refused(tmp_path, checker):
    module = CHECKERS[checker][1]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    (tmp_path / "wrong.py").write_text(WRONG_CALLS)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    (tmp_path / "right.py").write_text(CALLS.read_text())
    result = subprocess.run(
        [sys.executable, *CHECKERS[checker], "right.py", "wrong.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    errors = [line for line in result.stdout.splitlines() if "error:" in line or " - error" in line]
    assert not [line for line in errors if "right.py" in line], result.stdout
    wrong_lines = [
        n for n, line in enumerate(WRONG_CALLS.splitlines(), 1) if line.startswith(("Loader(", "Mixture", "prep"))
    ]
    assert all(any(f"wrong.py:{n}:" in line for line in errors) for n in wrong_lines), result.stdout


def test_all_keys_of_a_batch_are_typed():
    assert {*get_args(ArrayName), "max_length_q", "max_length_k"} == {key.name for key in BATCH_KEYS}
