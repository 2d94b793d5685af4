"""Comparisons of a case: what the peer makes of its records, and what batchloom makes of them."""

import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from peers.cases import Case
from peers.gpt2_folder import write_peer_tokenizer
from peers.known_differences import Row, find_problem
from peers.prepared_rows import prepare_rows
from peers.record_expected import EXPECTED, PEERS


class Comparison(NamedTuple):
    """A case with a tokenizer.

    Attributes:
        peer: name and version of the peer.
        tokenizer: name of the tokenizer and template; "" if the case names the template.
        case: the case.
        find_problem: compares in an empty folder, and returns how the rows differ; "" if they are as expected.
        slow: whether the slow tier runs it.
    """

    peer: str
    tokenizer: str
    case: Case
    find_problem: Callable[[Path], str]
    slow: bool = False

    @property
    def name(self) -> str:
        """Name for people."""
        return ": ".join(filter(None, (self.peer, self.tokenizer, self.case.name)))


def list_recorded() -> list[Comparison]:
    """List the comparisons with recorded values."""
    return [comparison for peer in PEERS for comparison in _list_recorded(peer)]


def _list_recorded(peer: str) -> list[Comparison]:
    (path,) = EXPECTED.glob(f"{peer}-*.json")
    rows = json.loads(path.read_text())
    cases: list[Case] = import_module(f"peers.{peer}_cases").CASES
    # The fast tier has a sample of each peer's cases.
    return [
        Comparison(path.stem.replace("-", " "), "", case, _compare_recorded(case, rows[case.name]), number % 3 > 0)
        for number, case in enumerate(cases)
    ]


def _compare_recorded(case: Case, expected: list[Row]) -> Callable[[Path], str]:
    def compare(folder: Path) -> str:
        tokenizer = write_peer_tokenizer(folder / "tokenizer")
        return find_problem(case, expected, prepare_rows(case, tokenizer, folder / "batchloom"))

    return compare


def list_trl() -> list[Comparison]:
    """List the comparisons with TRL; none if it is not installed."""
    if find_spec("trl") is None:
        return []
    from peers.trl_cases import CASES
    from peers.trl_runner import prepare_with_trl
    from peers.trl_templates import TEMPLATES, TemplateChoice

    def make_compare(template: TemplateChoice, case: Case) -> Callable[[Path], str]:
        def compare(folder: Path) -> str:
            tokenizer = template.write(folder / "tokenizer")
            expected = prepare_with_trl(case, tokenizer, folder / "trl")
            return find_problem(
                case, expected, prepare_rows(case, tokenizer, folder / "batchloom", **template.get_settings(case))
            )

        return compare

    return [
        Comparison(
            f"trl {version('trl')}",
            name,
            case,
            make_compare(template, case),
            not template.is_fast(case),
        )
        for name, template in TEMPLATES.items()
        for case in CASES
        if template.holds(case)
    ]
