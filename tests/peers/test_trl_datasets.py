"""Agreement with TRL on records with the columns of its own test data sets.

These tests run only where TRL is installed (the extra ``bench-chat``).
"""

import pytest

from peers.known_differences import check_rows
from peers.prepared_rows import prepare_rows
from peers.trl_cases import CASES
from peers.trl_runner import prepare_with_trl

pytest.importorskip("trl")
from peers.trl_templates import FAST_TEMPLATES, TEMPLATES

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def write_tokenizer(tmp_path_factory):
    """Return the folder of the tokenizer of a template, written once."""
    folders = {}

    def write(name):
        if name not in folders:
            folders[name] = TEMPLATES[name].write(tmp_path_factory.mktemp("tokenizers") / "tokenizer")
        return folders[name]

    return write


def make_parameter(name, case):
    pending = TEMPLATES[name].find_pending(case)
    marks = [pytest.mark.xfail(reason=pending, strict=True)] if pending else []
    if name not in FAST_TEMPLATES:
        marks.append(pytest.mark.slow)
    return pytest.param(name, case, marks=marks, id=f"{name}: {case.name}")


PARAMETERS = [make_parameter(name, case) for name in TEMPLATES for case in CASES if TEMPLATES[name].holds(case)]


@pytest.mark.parametrize(("name", "case"), PARAMETERS)
def test_rows_are_those_of_the_trainer(name, case, write_tokenizer, tmp_path):
    folder = write_tokenizer(name)
    expected = prepare_with_trl(case, folder, tmp_path / "trl")
    actual = prepare_rows(case, folder, tmp_path / "batchloom", **TEMPLATES[name].get_settings(case))
    check_rows(case, expected, actual)
