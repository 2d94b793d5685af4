"""Record what a peer makes of the cases of its table.

Run it with an interpreter that has the peer, from the folder of the repository:

    PYTHONPATH=tests python tests/peers/record_expected.py llama_factory

It writes ``tests/peers/expected/PEER-VERSION.json``: the name of each case with its rows.
"""

import json
import sys
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from peers.cases import COLUMNS
from peers.gpt2_folder import write_peer_tokenizer

PEERS = ("llama_factory", "ms_swift", "axolotl")
EXPECTED = Path(__file__).parent / "expected"


def record(peer: str) -> Path:
    """Write the rows of every case of a peer; return the file."""
    cases, runner = import_module(f"peers.{peer}_cases"), import_module(f"peers.{peer}_runner")
    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_folder = write_peer_tokenizer(Path(folder, "tokenizer"))
        for case in cases.CASES:
            rows = runner.run_case(case, tokenizer_folder)
            expected[case.name] = [{name: row[name] for name in COLUMNS[case.objective]} for row in rows]
    path = EXPECTED / f"{peer}-{version(runner.PACKAGE)}.json"
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(rows)}" for name, rows in expected.items())
    path.write_text(f"{{\n{lines}\n}}\n")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PEERS:
        sys.exit(f"Name one peer: {', '.join(PEERS)}.")
    print(f"Wrote {record(sys.argv[1])}.")
