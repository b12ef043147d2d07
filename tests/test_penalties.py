"""Penalties on what the text already holds: whose tokens they count, and what they cost. Their formula is in test_picking.py."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared.penalties import penalise
from shared.picking import process
from shared.sampling import SamplingParams
from tests.support.picks import make_pick


def test_each_row_counts_its_own_guesses():
    logits = torch.zeros(3, 10)
    sampling = SamplingParams(frequency_penalty=1.0)
    picks = [make_pick(sampling, committed=(9, 9, 5), guesses=guesses) for guesses in ((), (5,), (5, 7))]
    scores = process(logits, picks)
    assert scores[:, 5].tolist() == [-1, -2, -2]
    assert scores[:, 7].tolist() == [0, 0, -1]
    assert scores[:, 9].tolist() == [0, 0, 0], "the prompt is no output"


def test_repetition_penalty_counts_the_prompt_and_is_applied_once():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    scores = process(logits, [make_pick(SamplingParams(repetition_penalty=2.0), committed=(0, 0, 1), prompt_length=3)])
    assert scores[0].tolist() == [1.0, -4.0, 2.0, -2.0]


def test_a_guess_outside_the_vocabulary_reaches_no_index():
    logits = torch.zeros(1, 4)
    sampling = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, temperature=0.0)
    pick = make_pick(sampling, committed=(0,), guesses=(4, 2**31 - 1, -1, 2), prompt_length=0)
    assert process(logits, [pick])[0].tolist() == [-1, 0, -1, 0]


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that is made, not counting one that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and all(tensor is not given for given in args):
                self.numel = max(self.numel, tensor.numel())
        return made


def test_penalties_take_memory_by_the_length_of_the_histories_not_by_the_size_of_the_vocabulary():
    scores = torch.ones(4, 100_000)
    committed = [1, 2, 3]
    picks = [make_pick(SamplingParams(frequency_penalty=1.0), committed=committed, guesses=range(row)) for row in range(4)]
    with LargestTensor() as largest:
        torch.bincount(torch.zeros(1, dtype=torch.int64), minlength=scores.numel())
    assert largest.numel == scores.numel(), "control"
    with LargestTensor() as largest:
        penalise(scores, picks)
    assert 0 < largest.numel < 100
    assert scores[:, :5].tolist() == [[1, 1, 1, 0, 1], [0, 1, 1, 0, 1], [0, 0, 1, 0, 1], [0, 0, 0, 0, 1]]
