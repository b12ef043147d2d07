"""How a token is picked from logits, as values. The maths is in `shared.picking`; nothing here knows a tensor."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_GREEDY_BELOW = 1e-5


class Mode(enum.Enum):
    """How draft tokens are verified. The two are never mixed inside a request."""

    COUPLED = "coupled"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """A request's sampling parameters; ranges are those of `Sampling` in generate.proto and are checked there, once.

    Args:
        temperature: below 1e-5 is greedy.
        top_k: 0 keeps all.
        top_p: in (0, 1].
        min_p: in [0, 1].
        repetition_penalty: over prompt and output.
        presence_penalty: over the output, once per token id.
        frequency_penalty: over the output, once per occurrence.
        logit_bias: (token id, addend) pairs, by id.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is taken without noise."""
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether the history changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p removes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class TokenRules:
    """All that turns a row of a request's logits into the distribution of its next token, apart from the history.

    Args:
        sampling: the request's parameters.
        prompt_length: tokens before this position are the prompt's.
        vocab_size: ids of the tokenizer; logits beyond are masked.
        suppressed_ids: ids that cannot be picked at positions below `suppressed_until`.
        suppressed_until: first position at which they can.
    """

    sampling: SamplingParams
    prompt_length: int
    vocab_size: int
    suppressed_ids: tuple[int, ...] = ()
    suppressed_until: int = 0


class Pick(NamedTuple):  # there is one for every row of a step: a frozen dataclass takes twice as long to make
    """One token to be picked: row i of a sequence with guesses d1..dK picks what follows committed + d1..di.

    Args:
        rules: the request's rules.
        key: noise key (`shared.noise.noise_key`), a uint64; ignored where the rules are greedy.
        committed: the committed tokens, prompt included; a reference, not a copy.
        guesses: the row's own hypothetical tokens after them.
    """

    rules: TokenRules
    key: int
    committed: Sequence[int]
    guesses: Sequence[int] = ()

    @property
    def position(self) -> int:
        """Index of the picked token in the whole sequence, prompt included: the noise is keyed by it."""
        return len(self.committed) + len(self.guesses)
