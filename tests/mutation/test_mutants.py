import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from mutation.mutants import MUTANTS, apply_mutants, mutate_source

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src" / "batchloom"


@cache
def dump_file(file):
    return ast.dump(ast.parse((PACKAGE / file).read_text()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_what_its_file_does(mutant):
    faulty = mutate_source((PACKAGE / mutant.file).read_text(), [mutant])
    compile(faulty, mutant.file, "exec")
    # Comments and layout are no part of a syntax tree.
    assert ast.dump(ast.parse(faulty)) != dump_file(mutant.file)


def test_names_are_unique_and_hinted_tests_exist():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    missing = {hint for m in MUTANTS for hint in m.tests if not (TESTS / hint).exists()}
    assert not missing
    assert all(mutant.tests for mutant in MUTANTS)


def test_mutants_are_spread_over_the_packages():
    counts = {"plan": 13, "batches": 13, "store": 12, "preparation": 12, "chat": 22, "streaming": 5}
    assert Counter(mutant.package for mutant in MUTANTS) == counts


def test_mutants_of_one_file_are_applied_together(tmp_path):
    file = MUTANTS[0].file
    own = [mutant for mutant in MUTANTS if mutant.file == file]
    bytecode = tmp_path / Path(file).parent / "__pycache__" / f"{Path(file).stem}.x.pyc"
    bytecode.parent.mkdir(parents=True)
    bytecode.touch()
    (tmp_path / file).write_text((PACKAGE / file).read_text())
    apply_mutants(tmp_path, own)
    assert all(mutant.new in (tmp_path / file).read_text() for mutant in own)
    assert not bytecode.exists()
    for twice in ([MUTANTS[0], MUTANTS[0]], [MUTANTS[0], MUTANTS[1]]):
        with pytest.raises(ValueError, match="overlaps another mutant|occurs 0 times"):
            mutate_source((PACKAGE / file).read_text(), twice)
