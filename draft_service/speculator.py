"""An MLP speculator as the proposer: the target's hidden state in, a few tokens out, in as many small steps. It has no KV and no text."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from draft_service.guessing import guess
from draft_service.mlp_speculator import MlpSpeculator
from draft_service.proposer import CannotServe, Guess
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.hidden import to_rows
from shared.sampling import Mode, Pick


class SpeculatorProposer:
    """Proposes what follows a commit, as far as the speculator sees; then nothing until the next one.

    Head i foresees the (i + 1)-th token after the committed ones, so it guesses that one and no other: where guesses stand already, their
    tokens are fed and the heads behind them guess.

    Args:
        speculator: the layers.
        name: for metrics and `GetInfo`.
    """

    kinds = ("speculator",)
    modes = (Mode.COUPLED, Mode.REJECTION)

    def __init__(self, speculator: MlpSpeculator, name: str) -> None:
        self.stats = ProposerStats()
        self.name = name
        self._speculator = speculator
        self._config = speculator.config
        some = next(speculator.parameters())
        self._dtype, self._device = some.dtype, some.device

    def open(self, sequence: DraftSequence) -> None:
        """Nothing to remember: a hidden state says all."""

    def close(self, sequence: DraftSequence) -> None:
        """Nothing to forget."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess]]:
        """Up to `n_predict` guesses for each sequence whose hidden state is there, all sequences together.

        Raises:
            CannotServe: a hidden state is not of the size that the speculator reads, or a token is none that it knows.
        """
        made: list[list[Guess]] = [[] for _ in requests]
        able = [index for index, (sequence, _) in enumerate(requests) if self._can_go_on(sequence)]
        if not able:
            return made
        sequences, rooms = zip(*(requests[index] for index in able), strict=True)
        guesses = self._foresee(sequences, rooms)
        for index, found in zip(able, guesses, strict=True):
            made[index] = found
        self.stats.forwards += 1
        self.stats.fed_tokens += len(able)
        return made

    def _can_go_on(self, sequence: DraftSequence) -> bool:
        if sequence.hidden is None or len(sequence.tail) >= self._config.n_predict:
            return False
        if sequence.hidden.shape != (self._config.emb_dim,):
            what = f"hidden states of shape {list(sequence.hidden.shape)}, and the speculator reads {self._config.emb_dim} numbers"
            raise CannotServe(sequence.number, what)
        unknown = max(chain(sequence.committed[-1:], sequence.tail))
        if unknown >= self._config.vocab_size:
            raise CannotServe(sequence.number, f"token {unknown} is none of the speculator's {self._config.vocab_size}")
        return True

    def _foresee(self, sequences: Sequence[DraftSequence], rooms: Sequence[int]) -> list[list[Guess]]:
        # Only as far as somebody's guesses go; rows of sequences that are done run on, unread.
        depths = [min(self._config.n_predict, len(sequence.tail) + room) for sequence, room in zip(sequences, rooms, strict=True)]
        fed = [[sequence.committed[-1], *sequence.tail] for sequence in sequences]
        made: list[list[Guess]] = [[] for _ in sequences]
        hidden = to_rows([sequence.hidden for sequence in sequences if sequence.hidden is not None], self._dtype)
        state = self._speculator.begin(hidden.to(self._device))
        for index in range(max(depths)):
            token_ids = torch.tensor([tokens[min(index, len(tokens) - 1)] for tokens in fed], device=self._device)
            state = self._speculator.advance(index, state, token_ids)
            rows = [row for row, depth in enumerate(depths) if index < depth and len(fed[row]) == index + 1]
            if rows:
                self._guess(index, state, rows, sequences, fed, made)
        return made

    def _guess(
        self, index: int, state: Tensor, rows: list[int], sequences: Sequence[DraftSequence], fed: list[list[int]], made: list[list[Guess]]
    ) -> None:
        """Adds head `index`'s guess to those sequences; one that cannot be picked from ends there."""
        logits = self._speculator.logits(index, state if len(rows) == len(sequences) else state[rows])
        picks = [_after(sequences[row], fed[row]) for row in rows]
        for row, found in zip(rows, guess(logits, picks, [sequences[row].is_drawn for row in rows]), strict=True):
            if found is None:
                self.stats.unusable_rows += 1
            else:
                made[row].append(found)
                fed[row].append(found.token_id)


def _after(sequence: DraftSequence, fed: list[int]) -> Pick:
    """What picks the token after the last one fed."""
    return sequence.pick._replace(guesses=fed[1:])
