"""The list of mutants, its table in the docs and the code agree. Whether the tests notice the mutants is what `make mutants` finds out."""

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutants import PAGE, ROOT, DoesNotApply, Mutant, changed, read_list, table

MUTANTS = read_list()


def test_the_table_in_the_docs_is_that_of_the_list() -> None:
    """`python tools/mutants.py --write-table` writes it anew."""
    assert PAGE.read_text().endswith("\n\n" + table(MUTANTS))


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_still_applies_and_gives_another_program(mutant: Mutant) -> None:
    assert ast.dump(ast.parse(changed(mutant, ROOT))) != ast.dump(ast.parse((ROOT / mutant.path).read_text()))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_it_names_are_there(mutant: Mutant) -> None:
    for path, _, name in (test.partition("::") for test in mutant.tests):
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, functions)}


@pytest.mark.parametrize("old", ["no such line", "import"], ids=["nowhere", "more than once"])
def test_one_whose_text_is_not_there_exactly_once_is_an_error(old: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("import a\nimport b\n")
    with pytest.raises(DoesNotApply, match=r"broken: its text is [02] times in module\.py"):
        changed(replace(MUTANTS[0], name="broken", path="module.py", old=old), tmp_path)
