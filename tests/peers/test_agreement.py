"""Agreement with TRL, LLaMA-Factory, ms-swift and axolotl on the records of their tables of cases.

TRL is run, where it is installed (the extra ``bench-chat``). The others were run by ``record_expected.py``.
"""

import json
from importlib import import_module

import pytest

from peers.comparisons import list_recorded, list_trl
from peers.record_expected import EXPECTED, PEERS

pytestmark = pytest.mark.filterwarnings("ignore")


def make_parameter(comparison):
    marks = [pytest.mark.slow] if comparison.slow else []
    return pytest.param(comparison, marks=marks, id=comparison.name)


@pytest.mark.parametrize("comparison", [make_parameter(comparison) for comparison in (*list_recorded(), *list_trl())])
def test_rows_are_those_of_the_peer(comparison, tmp_path):
    assert comparison.find_problem(tmp_path) == ""


@pytest.mark.parametrize("peer", PEERS)
def test_each_case_has_been_recorded(peer):
    (path,) = EXPECTED.glob(f"{peer}-*.json")
    assert [case.name for case in import_module(f"peers.{peer}_cases").CASES] == list(json.loads(path.read_text()))


def test_trl_is_compared_where_it_is_installed():
    pytest.importorskip("trl")
    assert len(list_trl()) > 50
