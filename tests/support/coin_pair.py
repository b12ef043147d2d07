"""A pair whose models are coins on virtual time: the real engine and the real drafter, steps that cost what they are said to cost.

Sequence s says the token 2s for ever. A guess is right, by a coin keyed by (sequence, position), with the acceptance of its sequence, whatever K,
base or lateness; else it is 2s + 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from draft_service.drafter import Drafter
from draft_service.proposer import Guess
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence
from shared.digest import splitmix64
from shared.engine.forward_batch import Span
from shared.engine.model_runner import ModelRunner
from shared.sampling import Mode, SamplingParams
from tests.support.virtual_pair import Clock, VirtualPair, delay
from verifier_service.request import Request, Stopping
from verifier_service.step_cost import StepCost


class CoinRunner(ModelRunner):
    """Says the token of each sequence again; a pass takes `base_s` and `row_s` for each token."""

    def __init__(self, vocab_size: int, clock: Clock, base_s: float, row_s: float) -> None:
        self.model = SimpleNamespace(vocab_size=vocab_size, device=torch.device("cpu"))  # type: ignore[assignment]
        self.num_forwards = 0
        self._clock = clock
        self._base_s, self._row_s = base_s, row_s

    def forward(self, spans: Sequence[Span], *_: Any, **__: Any) -> Tensor:
        self._clock.now += self._base_s + self._row_s * sum(len(span.token_ids) for span in spans)
        self.num_forwards += 1
        said = [token_id & ~1 for span in spans for token_id in span.token_ids[len(span.token_ids) - span.num_logits :]]
        logits = torch.zeros(len(said), self.model.vocab_size)
        logits[torch.arange(len(said)), torch.tensor(said, dtype=torch.int64)] = 10.0
        return logits


class CoinProposer:
    """Guesses what the coin says; a call takes `base_s` and `row_s` for each sequence."""

    name = "coin"
    kinds = ("coin",)
    modes = (Mode.COUPLED, Mode.REJECTION)

    def __init__(self, clock: Clock, base_s: float, row_s: float, acceptance: Callable[[int], float]) -> None:
        self.stats = ProposerStats()
        self._clock = clock
        self._base_s, self._row_s = base_s, row_s
        self._acceptance = acceptance

    def open(self, sequence: DraftSequence) -> None: ...

    def close(self, sequence: DraftSequence) -> None: ...

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess]]:
        self._clock.now += self._base_s + self._row_s * len(requests)
        return [[Guess(self._guess(sequence.committed[0] & ~1, sequence.length))] for sequence, _ in requests]

    def _guess(self, said: int, position: int) -> int:
        coin = splitmix64(splitmix64(said) ^ position) / 2**64
        return said + (coin >= self._acceptance(said // 2 - 1))


@dataclass(frozen=True)
class Setting:
    """One cell of a table. Times in seconds; `acceptances` are dealt to the sequences in turn; `away_s` is the round trip."""

    num_sequences: int = 1
    acceptances: tuple[float, ...] = (0.8,)
    away_s: float = 0.001
    base_s: float = 0.030
    row_s: float = 0.0
    draft_s: float = 0.002
    draft_row_s: float = 0.0
    max_draft_tokens: int = 16
    window: int = 32
    num_tokens: int = 500
    is_calibrated: bool = True


def run(setting: Setting, prepare: Callable[[VirtualPair], None] = lambda pair: None) -> VirtualPair:
    """Runs all sequences to their end; `clock.now` is then what it took, `emissions` what came of it."""
    vocab_size = 2 * setting.num_sequences + 2
    model = SimpleNamespace(vocab_size=vocab_size, max_model_len=1 << 20, hidden_size=0)
    pair = VirtualPair(
        model,  # type: ignore[arg-type]
        num_blocks=setting.num_sequences * (setting.num_tokens // 16 + 4),
        block_size=16,
        max_running=setting.num_sequences,
        max_step_tokens=2048,
        max_draft_tokens=setting.max_draft_tokens,
        window=setting.window,
        scorer="multi_query",
        step_cost=StepCost({1 << i: setting.base_s + setting.row_s * (1 << i) for i in range(8)}) if setting.is_calibrated else None,
        make_runner=lambda clock: CoinRunner(vocab_size, clock, setting.base_s, setting.row_s),
    )
    clock = Clock()
    acceptances = [acceptance for acceptance, _ in zip(cycle(setting.acceptances), range(setting.num_sequences), strict=False)]
    proposer = CoinProposer(clock, setting.draft_s, setting.draft_row_s, acceptances.__getitem__)
    carrier = delay(setting.away_s / 2)
    pair.attach(Drafter(proposer, setting.num_sequences, clock), clock, capacity=setting.num_sequences, to_drafter=carrier, to_verifier=carrier)
    prepare(pair)
    greedy = SamplingParams(temperature=0.0)
    requests = [
        Request(f"r{i}", (2 * i + 2, 2 * i + 2), greedy, Stopping(setting.num_tokens), seed=1, max_draft_tokens=setting.max_draft_tokens)
        for i in range(setting.num_sequences)
    ]
    pair.run(*requests, max_events=100_000_000)
    return pair


def plain_rate(setting: Setting) -> float:
    """Tokens per second of all sequences without a drafter."""
    return setting.num_sequences / (setting.base_s + setting.row_s * setting.num_sequences)


def speedup(setting: Setting) -> float:
    """Tokens per second against plain decoding. Counted until the first sequence ends, so that the batch is whole."""
    seen = {"tokens": 0, "at": 0.0}

    def prepare(pair: VirtualPair) -> None:
        def look() -> None:
            if not pair.finished:
                seen["tokens"] = sum(map(len, pair.text.values()))
                seen["at"] = pair.clock.now

        pair.on_step = look

    run(setting, prepare)
    return seen["tokens"] / seen["at"] / plain_rate(setting)
