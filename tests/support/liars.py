"""Drafters that misbehave: they lie on some tokens, guess at random, or send frames that fit nothing."""

import random
from collections.abc import Sequence

from draft_service.proposer import Guess, Proposer
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.link import Distribution, FromDrafter, Proposal, ProposalBatch, StepBatch, Welcome
from shared.sampling import Mode


class LyingProposer:
    """Changes a share of another proposer's guesses at random, and goes on as if they were its own."""

    def __init__(self, inner: Proposer, rate: float, vocab_size: int, seed: int) -> None:
        self._inner = inner
        self._rate = rate
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self.lies: set[tuple[int, int]] = set()  # (sequence, position); a token drawn by chance may still be the right one

    @property
    def name(self) -> str:
        return f"lying-{self._inner.name}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return self._inner.kinds

    @property
    def modes(self) -> tuple[Mode, ...]:
        return self._inner.modes

    @property
    def stats(self) -> ProposerStats:
        return self._inner.stats

    def open(self, sequence: DraftSequence) -> None:
        self._inner.open(sequence)

    def close(self, sequence: DraftSequence) -> None:
        self._inner.close(sequence)

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess] | None]:
        answers = self._inner.propose(requests)
        return [
            None if guesses is None else [self._lie(guess, sequence.number, sequence.length + index) for index, guess in enumerate(guesses)]
            for (sequence, _), guesses in zip(requests, answers, strict=True)
        ]

    def _lie(self, guess: Guess, number: int, position: int) -> Guess:
        if self._random.random() >= self._rate:
            self.lies.discard((number, position))
            return guess
        self.lies.add((number, position))
        token_id = self._random.randrange(self._vocab_size)
        return Guess(token_id, None if guess.distribution is None else Distribution((token_id,), (1.0,)))


class GarbageDrafter:
    """Answers every step with well-formed proposals that fit nothing: wrong digests, wrong places, ids far outside the vocabulary."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._known: set[int] = set()
        self._step = 0
        self._pending = False

    @property
    def has_work(self) -> bool:
        return self._pending

    def attach(self, welcome: Welcome) -> None:
        self.reset()

    def reset(self) -> None:
        self._known, self._pending = set(), False

    def apply(self, batch: StepBatch) -> None:
        self._step = batch.step
        self._known |= {begin.sequence for begin in batch.begins}
        self._pending = True

    def step(self) -> Sequence[FromDrafter]:
        self._pending = False
        draw = self._random
        proposals = [
            Proposal(
                draw.choice([number, number + 1000]),
                draw.choice([0, 1, 5, 20, 2**31]),
                draw.getrandbits(64),
                tuple(draw.choice([0, 7, 63, 64, 2**32 - 1]) for _ in range(draw.randint(1, 8))),
            )
            for number in self._known
        ]
        return [ProposalBatch(draw.choice([self._step, 2**50, 0]), 0.001, tuple(proposals), draw.random() < 0.5)]
