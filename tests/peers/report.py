"""Print a table of the rows that are equal in batchloom and in each peer, by data set.

    PYTHONPATH=src:tests python tests/peers/report.py

The tests in ``test_agreement.py`` make the same comparisons.
"""

import contextlib
import io
import logging
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

from batchloom.core.errors import BatchloomError
from peers.comparisons import Comparison, list_recorded, list_trl
from peers.known_differences import DIFFERENCES


def describe_result(comparison: Comparison) -> str:
    """Return how the rows of a comparison relate."""
    case = comparison.case
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        try:
            problem = comparison.find_problem(Path(folder))
        except (BatchloomError, TypeError) as error:
            problem = str(error)
    if problem:
        return f"NOT EQUAL: {problem}"
    return f"known difference: {DIFFERENCES[case.differs].reason}" if case.differs else "equal"


def main() -> None:
    """Compare everything and print one line per data set and one per peer."""
    logging.disable()
    warnings.simplefilter("ignore")
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    tables: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    comparisons = [*list_trl(), *list_recorded()]
    for comparison in comparisons:
        result = describe_result(comparison)
        counts[comparison.peer][result.partition(":")[0]] += 1
        tables[comparison.peer, comparison.case.name, result].append(comparison.tokenizer)
    for (peer, name, result), tokenizers in tables.items():
        names = ", ".join(filter(None, tokenizers))
        print(" | ".join(filter(None, (peer, name, names, result))))
    print()
    for peer, results in counts.items():
        print(f"{peer}: {', '.join(f'{count} {result}' for result, count in sorted(results.items()))}")


if __name__ == "__main__":
    main()
