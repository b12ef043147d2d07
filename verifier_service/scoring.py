"""From a step's plan to its verdicts: expand, one forward, contract, verify. It knows no links and commits nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.engine.model_runner import ModelRunner
from shared.errors import EngineFailure
from shared.picking import finite_rows, pick_best, probabilities, process
from shared.sampling import Pick
from verifier_service.coupled import verify_coupled
from verifier_service.expansion import ABSENT_ID, ABSENT_PROBABILITY, Expansion, Scored, Scorer, contract, expand
from verifier_service.generation import Generation
from verifier_service.rejection import Tested, verify_rejection
from verifier_service.scheduler import Scheduled
from verifier_service.verdict import Verdict

Scores = Verdict | EngineFailure | None


class Scoring:
    """The target model and the rules of both modes.

    Args:
        runner: the target model.
        vocab_size: ids of the target's tokenizer.
        scorer: how guesses become rows.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, scorer: Scorer) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._scorer = scorer

    @torch.inference_mode()
    def score(self, plan: Sequence[Scheduled]) -> list[Scores]:
        """Runs a step's tokens in one forward pass.

        Returns:
            Per part of the plan: its verdict; None for a chunk that does not reach the last committed token; a failure if there is nothing
            to pick the next token from.
        """
        expansion = expand([_scored(part) for part in plan], self._vocab_size, self._scorer)
        logits = self._runner.forward(expansion.spans)
        verdicts: list[Scores] = [None] * len(plan)
        if not expansion.places:
            return verdicts
        picks = [pick for part in plan if part.is_terminal for pick in part.generation.picks(part.num_guesses)]
        scores = process(logits, picks)
        num_usable = _count_usable_rows(scores, expansion)
        for indices, verify in zip(_by_mode(plan, num_usable), (_verify_coupled, _verify_rejection), strict=True):
            rows = [row for row, (index, _) in enumerate(expansion.places) if index in indices]
            if rows:
                some = _narrow(expansion, rows, indices)
                tested = [_tested(plan[index], num_usable[index] - 1) for index in indices]
                found = verify(scores if len(rows) == len(picks) else scores[rows], [picks[row] for row in rows], some, tested)
                for index, verdict in zip(indices, found, strict=True):
                    verdicts[index] = verdict
        for index, part in enumerate(plan):
            if part.is_terminal and num_usable[index] == 0:
                verdicts[index] = EngineFailure("the model's output is not finite")
        return verdicts


@dataclass(frozen=True, slots=True)
class _Guessed:
    """A sequence with the guesses that its rows can test."""

    generation: Generation
    guesses: tuple[int, ...]


def _count_usable_rows(scores: Tensor, expansion: Expansion) -> list[int]:
    """Leading rows of each sequence that can be picked from. A guess whose own row cannot is as if it had not come: it fails no request."""
    counts = [0] * expansion.num_sequences
    for (index, row), is_finite in zip(expansion.places, finite_rows(scores).tolist(), strict=True):
        if is_finite and counts[index] == row:
            counts[index] += 1
    return counts


def _by_mode(plan: Sequence[Scheduled], num_usable: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices of the parts to verify by equality, and of those by ratio."""
    usable = [index for index in range(len(plan)) if num_usable[index]]
    by_ratio = [index for index in usable if plan[index].generation.rejection_keys is not None]
    return [index for index in usable if index not in by_ratio], by_ratio


def _narrow(expansion: Expansion, rows: Sequence[int], indices: Sequence[int]) -> Expansion:
    """The same map for some of the rows, with their sequences numbered anew."""
    renumbered = {index: place for place, index in enumerate(indices)}
    places = ((renumbered[index], row) for index, row in (expansion.places[row] for row in rows))
    return Expansion((), tuple(places), len(indices), expansion.width)


def _verify_coupled(scores: Tensor, picks: Sequence[Pick], expansion: Expansion, guessed: Sequence[_Guessed]) -> list[Verdict]:
    target_ids = contract(pick_best(scores, picks), expansion, ABSENT_ID)
    return verify_coupled(target_ids, [each.guesses for each in guessed])


def _verify_rejection(scores: Tensor, picks: Sequence[Pick], expansion: Expansion, guessed: Sequence[_Guessed]) -> list[Verdict]:
    target_probs = contract(probabilities(scores, picks), expansion, ABSENT_PROBABILITY)
    tested = []
    for generation, guesses in ((each.generation, each.guesses) for each in guessed):
        assert generation.rejection_keys is not None, "only requests with keys of their own are tested by ratio"
        drawn_from = generation.guesses.drawn_from(len(guesses))
        tested.append(Tested(len(generation.committed), generation.rejection_keys, guesses, drawn_from))
    return verify_rejection(target_probs, tested)


def _scored(part: Scheduled) -> Scored:
    sequence = part.generation.sequence
    guesses = part.generation.guesses.token_ids[: part.num_guesses]
    return Scored(sequence.token_ids, sequence.kv_len, sequence.block_table, guesses, part.num_tokens)


def _tested(part: Scheduled, num_guesses: int) -> _Guessed:
    return _Guessed(part.generation, tuple(part.generation.guesses.token_ids[: min(part.num_guesses, num_guesses)]))
