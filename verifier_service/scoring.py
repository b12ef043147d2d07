"""From a step's plan to its verdicts: expand, one forward, contract, verify. It knows no links and commits nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shared.engine.forward_batch import Span
from shared.engine.head_input import head_input
from shared.engine.model_runner import ModelRunner
from shared.errors import CorruptOutput, EngineFailure
from shared.hidden import to_wire
from shared.picking import finite_rows, pick_usable, probabilities, process
from shared.sampling import Pick
from verifier_service.coupled import verify_coupled
from verifier_service.expansion import ABSENT_HIDDEN, ABSENT_ID, ABSENT_PROBABILITY, Expansion, Scored, Scorer, contract, expand
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
        on_forward: called when the model is about to run, and the interpreter has nothing else to do.
    """

    def __init__(self, runner: ModelRunner, vocab_size: int, scorer: Scorer, on_forward: Callable[[], None] = lambda: None) -> None:
        self._on_forward = on_forward
        self._runner = runner
        self._vocab_size = vocab_size
        self._scorer = scorer

    @torch.inference_mode()
    def score(self, plan: Sequence[Scheduled], with_hidden: bool = False) -> list[Scores]:
        """Runs a step's tokens in one forward pass.

        Args:
            plan: at least one part.
            with_hidden: verdicts are to have hidden states, if the model has any to give.

        Returns:
            Per part of the plan: its verdict; None for a chunk that does not reach the last committed token; a failure if there is nothing
            to pick the next token from.
        """
        expansion = expand([_scored(part) for part in plan], self._vocab_size, self._scorer)
        picks = [pick for part in plan if part.is_terminal for pick in part.generation.picks(part.num_guesses)]
        self._on_forward()
        logits, hidden = self._forward(expansion.spans, with_hidden)
        verdicts: list[Scores] = [None] * len(plan)
        if not expansion.places:
            return verdicts
        scores = process(logits, picks)
        for indices, verify in zip(_by_mode(plan), (_verify_coupled, _verify_rejection), strict=True):
            if indices:
                some, rows = _narrow(expansion, indices)
                if len(rows) == len(picks):
                    found = verify(scores, picks, some, [plan[index] for index in indices])
                else:
                    found = verify(scores[rows], [picks[row] for row in rows], some, [plan[index] for index in indices])
                for index, verdict in zip(indices, found, strict=True):
                    verdicts[index] = verdict if verdict.token_ids else CorruptOutput("the model's output is not finite")
        return verdicts if hidden is None else _with_hidden(verdicts, hidden, expansion)

    def _forward(self, spans: Sequence[Span], with_hidden: bool) -> tuple[Tensor, Tensor | None]:
        """Logits, and what the head has read for them."""
        if not with_hidden or not self._runner.model.hidden_size:
            return self._runner.forward(spans), None
        with head_input(self._runner.model.model) as read:
            logits = self._runner.forward(spans)
        return logits, read[0]


def _by_mode(plan: Sequence[Scheduled]) -> tuple[list[int], list[int]]:
    """Indices of the parts to verify by equality, and of those by ratio. A chunk of a prompt has nothing to verify."""
    terminal = [index for index, part in enumerate(plan) if part.is_terminal]
    by_ratio = [index for index in terminal if plan[index].generation.rejection_keys is not None]
    return ([index for index in terminal if plan[index].generation.rejection_keys is None] if by_ratio else terminal), by_ratio


def _narrow(expansion: Expansion, indices: Sequence[int]) -> tuple[Expansion, list[int]]:
    """The same map for some of the sequences, numbered anew, and their rows."""
    if len(indices) == expansion.num_sequences:
        return expansion, list(range(len(expansion.places)))
    renumbered = {index: place for place, index in enumerate(indices)}
    rows = [row for row, (index, _) in enumerate(expansion.places) if index in renumbered]
    places = ((renumbered[index], row) for index, row in (expansion.places[row] for row in rows))
    return Expansion((), tuple(places), len(indices), expansion.width), rows


def _verify_coupled(scores: Tensor, picks: Sequence[Pick], expansion: Expansion, parts: Sequence[Scheduled]) -> list[Verdict]:
    target_ids = contract(pick_usable(scores, picks), expansion, ABSENT_ID)
    return verify_coupled(target_ids, [_guesses(part) for part in parts])


def _verify_rejection(scores: Tensor, picks: Sequence[Pick], expansion: Expansion, parts: Sequence[Scheduled]) -> list[Verdict]:
    target_probs = contract(probabilities(scores, picks), expansion, ABSENT_PROBABILITY)
    tested = []
    for part in parts:
        generation, guesses = part.generation, _guesses(part)
        assert generation.rejection_keys is not None, "only requests with keys of their own are tested by ratio"
        drawn_from = generation.guesses.drawn_from(len(guesses))
        tested.append(Tested(len(generation.committed), generation.rejection_keys, guesses, drawn_from))
    return verify_rejection(target_probs, tested, contract(finite_rows(scores), expansion, False))


def _with_hidden(verdicts: Sequence[Scores], rows: Tensor, expansion: Expansion) -> list[Scores]:
    """Verdicts with the hidden state of the row that chose their last token: the one numbered by the accepted count."""
    chosen = [(index, verdict.accepted) for index, verdict in enumerate(verdicts) if isinstance(verdict, Verdict)]
    indices, accepted = (list(column) for column in zip(*chosen, strict=True)) if chosen else ([], [])
    found = iter(to_wire(contract(rows, expansion, ABSENT_HIDDEN)[indices, accepted]))
    return [replace(verdict, hidden=next(found)) if isinstance(verdict, Verdict) else verdict for verdict in verdicts]


def _guesses(part: Scheduled) -> tuple[int, ...]:
    return tuple(part.generation.guesses.token_ids[: part.num_guesses])


def _scored(part: Scheduled) -> Scored:
    sequence = part.generation.sequence
    return Scored(sequence.token_ids, sequence.kv_len, sequence.block_table, _guesses(part), part.num_tokens)
