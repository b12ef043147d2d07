"""The check's own logic, on the CPU. No GPU is needed, and none is tested."""

import pytest
import torch

from tests.support.tiny_models import tiny_llama
from tools.gpu_check import Line, block_tables, check_model, compare_greedy, compare_logits, compare_sampled, tabulate, time_ms, time_steps

CPU = torch.device("cpu")
MODEL = tiny_llama(vocab=64, dtype=torch.float32)


def test_a_model_agrees_with_itself_in_all_checks() -> None:
    lines = check_model(MODEL, MODEL, range(1, 9), num_tokens=8, k=3)
    assert [line.what for line in lines] == [
        "greedy tokens, expanded",
        "logits, largest difference",
        "greedy tokens, multi_query",
        "sampled tokens from the same logits",
    ]
    assert all(line.passed for line in lines)


def test_another_model_fails_them() -> None:
    lines = check_model(MODEL, tiny_llama(vocab=64, seed=1, dtype=torch.float32), range(1, 9), num_tokens=8, k=3)
    assert [line.passed for line in lines] == [False, False, False, True]


@pytest.mark.parametrize(("error", "passed"), [(0.0005, True), (0.02, False)])
def test_logits_may_differ_by_a_thousandth_of_the_largest(error: float, passed: bool) -> None:
    expected = torch.tensor([[10.0, -2.0], [1.0, 3.0]])
    assert compare_logits(expected, expected + error).passed is passed


def test_a_greedy_token_may_differ_only_at_a_near_tie() -> None:
    expected = torch.tensor([[10.0, 9.999, 0.0], [5.0, 1.0, 0.0]])
    assert compare_greedy("x", expected, expected[:, [1, 0, 2]]).found == "1 of 2 differ, 1 more at near-ties"
    assert compare_greedy("x", expected[:1], expected[:1, [1, 0, 2]]).passed


def test_the_same_logits_give_the_same_sampled_tokens() -> None:
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    assert compare_sampled(logits, CPU) == Line("correctness", "sampled tokens from the same logits", "0 of 60 differ", True)


def test_steps_are_timed_for_both_scorers_and_every_size() -> None:
    lines = time_steps(MODEL, batches=[1, 3], queries=[1, 4], context=20, repeats=1)
    assert [line.what for line in lines] == [f"{batch} sequences, {scorer}" for batch in (1, 3) for scorer in ("expanded", "multi_query")]
    assert all(line.found.startswith("1: ") and "  4: " in line.found for line in lines)


def test_the_first_passes_are_not_counted() -> None:
    calls: list[int] = []
    assert time_ms(lambda: calls.append(1), CPU, 3) >= 0
    assert len(calls) == 5


def test_no_block_is_given_twice() -> None:
    tables = block_tables(3, 33)
    assert [len(table) for table in tables] == [3, 3, 3]
    assert len({block for table in tables for block in table}) == 9


def test_the_table_has_a_row_for_each_line() -> None:
    table = tabulate([Line("a", "b", "c", True), Line("d", "e", "f", False), Line("g", "h", "i")], "title")
    assert table.row_count == 3
