"""What is compared: cases by name, their prompts, and the records of their pairs. Pure: it starts nothing and reads no clock."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.peers.lines import Answer
from bench.prompts import CODE_PROMPTS
from client.bench.ratio import Ratio, paired_ratio
from client.bench.summary import first_difference

Engine = Literal["vllm", "assisted"]

PROMPTS = (
    *CODE_PROMPTS,
    "Write a Python function that computes the n-th Fibonacci number with memoization.",
    "Write a Python function that flattens a nested list of any depth.",
    "Write a Python class for a thread-safe queue with a maximum size.",
    "Write a Python function that converts a Roman numeral to an integer.",
    "Write a Python function that multiplies two matrices given as lists of lists.",
    "Write a Python context manager that measures the time its block takes.",
    "Write a Python function that groups words that are anagrams of each other.",
    "Write a Python generator that yields all permutations of a list.",
    "Write a Python function that validates an IPv4 address without libraries.",
    "Write a Python class for a trie with insert, search and prefix search.",
)
"""More than the largest batch, so that no batch has a prompt twice."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Args:
        name: on the command line.
        engine: the peer.
        drafts: whether both have the draft model; plain decoding otherwise.
        num_requests: at the same time.
        temperature: 0 is greedy.
        max_tokens: of each request; seven pairs of runs are to take two to four minutes.
        k: the peer's draft tokens of a round: its best, see README.md.
        draft_sampling: how vLLM's draft model picks at T > 0: its best.
    """

    name: str
    engine: Engine
    drafts: bool
    num_requests: int
    temperature: float
    max_tokens: int
    k: int = 0
    draft_sampling: str = "greedy"


_MAX_TOKENS = {1: 128, 4: 128, 16: 64}
_BEST_K = {1: 3, 4: 2, 16: 2}
_PLAIN = [Case(f"plain-{count}", "vllm", False, count, 0.0, tokens) for count, tokens in _MAX_TOKENS.items()]
_PAIRS = [
    Case(f"pair-{count}-t{temperature}", "vllm", True, count, float(temperature), tokens, _BEST_K[count], draft_sampling)
    for temperature, draft_sampling in ((0, "greedy"), (1, "probabilistic"))
    for count, tokens in _MAX_TOKENS.items()
]
CASES = {case.name: case for case in (*_PLAIN, *_PAIRS, Case("assisted-1", "assisted", True, 1, 0.0, 128, 3))}


@dataclass(frozen=True, slots=True)
class Figures:
    """One side of a pair: what is kept of an answer.

    Args:
        tokens_per_s: output tokens over the whole batch's time.
        decode_per_s: the same from the moment on at which every request has its first token.
        accepted_per_round: None where nothing was drafted.
    """

    tokens_per_s: float
    decode_per_s: float
    accepted_per_round: float | None


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts on both, one right after the other.

    Args:
        index: of the pair; even ones ran ours first.
        others_cpu: share of the machine's CPU time that others used right before, 0 to 1.
        ours: figures.
        peer: figures.
        common: share of the output up to the first different token, mean over the prompts; at T = 0 only near-ties keep it below 1.
    """

    index: int
    others_cpu: float
    ours: Figures
    peer: Figures
    common: float


def pick_prompts(index: int, count: int) -> list[int]:
    """The prompts of a pair, by index into `PROMPTS`: the next `count`, around and around."""
    return [(index * count + offset) % len(PROMPTS) for offset in range(count)]


def to_figures(answer: Answer) -> Figures:
    """What is kept of an answer."""
    return Figures(answer.tokens_per_s, answer.decode_per_s, answer.accepted_per_round)


def common_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Mean length of what two lists of outputs have in common from the start, as a share of ours."""
    shares = []
    for left, right in zip(ours, theirs, strict=True):
        differs_at = first_difference(left, right)
        shares.append(1.0 if differs_at is None else differs_at / len(left))
    return sum(shares) / len(shares)


def to_record(pair: Pair) -> dict[str, Any]:
    """A pair as JSON takes it."""
    return asdict(pair)


def from_record(record: Mapping[str, Any]) -> Pair:
    """A pair as it was saved."""
    return Pair(**{**record, "ours": Figures(**record["ours"]), "peer": Figures(**record["peer"])})


def missing_pairs(done: Iterable[Pair], wanted: int) -> list[int]:
    """Indices of the pairs that are still to be measured."""
    have = {pair.index for pair in done}
    return [index for index in range(wanted) if index not in have]


def compare(pairs: Sequence[Pair], name: Literal["tokens_per_s", "decode_per_s"]) -> Ratio:
    """Ours over the peer's."""
    return paired_ratio([getattr(pair.ours, name) for pair in pairs], [getattr(pair.peer, name) for pair in pairs])
