"""From a step's plan to its verdicts: expand, one forward, contract, verify. It knows no links and commits nothing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.model_runner import ModelRunner
from shared.errors import EngineFailure
from shared.picking import finite_rows, pick_tokens, probabilities, process
from shared.sampling import Pick
from verifier_service.coupled import verify_coupled
from verifier_service.expansion import ABSENT_ID, ABSENT_PROBABILITY, Expansion, Scored, Scorer, contract, expand
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
            Per part of the plan: its verdict; None for a chunk that does not reach the last committed token; a failure if its
            logits are not finite.
        """
        expansion = expand([_scored(part) for part in plan], self._vocab_size, self._scorer)
        logits = self._runner.forward(expansion.spans)
        verdicts: list[Scores] = [None] * len(plan)
        if not expansion.places:
            return verdicts
        picks = [pick for part in plan if part.is_terminal for pick in part.generation.picks(part.num_guesses)]
        by_ratio = {index for index, part in enumerate(plan) if part.generation.rejection_keys is not None}
        for indices, verify in ((set(range(len(plan))) - by_ratio, self._verify_coupled), (by_ratio, self._verify_rejection)):
            rows = [row for row, (index, _) in enumerate(expansion.places) if index in indices]
            if rows:
                some = _narrow(expansion, rows)
                part_logits = logits if len(rows) == len(picks) else logits[rows]
                for index, verdict in enumerate(verify(part_logits, [picks[row] for row in rows], some, plan)):
                    if index in indices and verdict.token_ids:
                        verdicts[index] = verdict
        for (index, _), is_finite in zip(expansion.places, finite_rows(logits).tolist(), strict=True):
            if not is_finite:
                verdicts[index] = EngineFailure("the model's output is not finite")
        return verdicts

    @staticmethod
    def _verify_coupled(logits: Tensor, picks: Sequence[Pick], expansion: Expansion, plan: Sequence[Scheduled]) -> list[Verdict]:
        target_ids = contract(pick_tokens(logits, picks), expansion, ABSENT_ID)
        return verify_coupled(target_ids, [part.generation.guesses.token_ids[: part.num_guesses] for part in plan])

    @staticmethod
    def _verify_rejection(logits: Tensor, picks: Sequence[Pick], expansion: Expansion, plan: Sequence[Scheduled]) -> list[Verdict]:
        target_probs = contract(probabilities(process(logits, picks), picks), expansion, ABSENT_PROBABILITY)
        indices = sorted({index for index, _ in expansion.places})
        verdicts = verify_rejection(target_probs[indices], [_tested(plan[index]) for index in indices])
        found = dict(zip(indices, verdicts, strict=True))
        return [found.get(index, Verdict(0, ())) for index in range(len(plan))]


def _scored(part: Scheduled) -> Scored:
    sequence = part.generation.sequence
    guesses = part.generation.guesses.token_ids[: part.num_guesses]
    return Scored(sequence.token_ids, sequence.kv_len, sequence.block_table, guesses, part.num_tokens)


def _tested(part: Scheduled) -> Tested:
    generation = part.generation
    assert generation.rejection_keys is not None, "only requests in rejection mode are tested by ratio"
    guesses = tuple(generation.guesses.token_ids[: part.num_guesses])
    return Tested(len(generation.committed), generation.rejection_keys, guesses, generation.guesses.drawn_from(part.num_guesses))


def _narrow(expansion: Expansion, rows: Sequence[int]) -> Expansion:
    # The same map with fewer rows: sequences of the other mode have no row here.
    return Expansion((), tuple(expansion.places[row] for row in rows), expansion.num_sequences, expansion.width)
