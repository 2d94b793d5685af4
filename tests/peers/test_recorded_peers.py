"""Agreement with LLaMA-Factory, ms-swift and axolotl on records in the formats that they document.

``record_expected.py`` wrote the expected rows with these libraries.
"""

import json
from importlib import import_module

import pytest

from peers.gpt2_folder import write_peer_tokenizer
from peers.known_differences import check_rows
from peers.prepared_rows import prepare_rows
from peers.record_expected import EXPECTED

FILES = {path.name.rpartition("-")[0]: path for path in sorted(EXPECTED.glob("*.json"))}
CASES = {peer: import_module(f"peers.{peer}_cases").CASES for peer in FILES}
EXPECTED_ROWS = {peer: json.loads(path.read_text()) for peer, path in FILES.items()}


@pytest.fixture(scope="session")
def peer_tokenizer(tmp_path_factory):
    return write_peer_tokenizer(tmp_path_factory.mktemp("peers") / "tokenizer")


def make_parameter(peer, case):
    marks = [pytest.mark.xfail(reason=case.pending, strict=True)] if case.pending else []
    return pytest.param(peer, case, marks=marks, id=f"{peer}: {case.name}")


@pytest.mark.parametrize(("peer", "case"), [make_parameter(peer, case) for peer in CASES for case in CASES[peer]])
def test_rows_are_those_of_the_peer(peer, case, peer_tokenizer, tmp_path):
    expected = EXPECTED_ROWS[peer][case.name]
    check_rows(case, expected, prepare_rows(case, peer_tokenizer, tmp_path))


@pytest.mark.parametrize("peer", CASES)
def test_each_case_has_been_recorded(peer):
    assert [case.name for case in CASES[peer]] == list(EXPECTED_ROWS[peer])
