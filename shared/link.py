"""What crosses the link between the services, as values: the mirror of link.proto without protobuf.

`shared.rpc.convert_link` turns one into the other and refuses what is malformed. The engines and the in-memory link of
the tests speak these; nothing here knows gRPC or tensors.
"""

import enum
from dataclasses import dataclass, replace

from shared.sampling import Mode, SamplingParams

PROTOCOL_REVISION = 1
MAX_PROPOSAL_TOKENS = 64
MAX_DISTRIBUTION_PAIRS = 64
MAX_BATCH_PROPOSALS = 4096
BEGIN_PIECE_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class HiddenState:
    """What the target's head read in the row that chose the last committed token, position `length - 2`: see `HiddenState` in link.proto.

    Args:
        dtype: `float64`, `float32`, `bfloat16` or `float16`.
        shape: of the numbers; a single vector.
        data: the numbers, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """A draft service introduces itself. An empty fingerprint means that its proposer needs no tokenizer."""

    protocol_revision: int
    instance_id: str
    name: str
    tokenizer_fingerprint: str
    modes: tuple[Mode, ...]
    capacity: int
    wants_hidden_state: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The verifier accepts a draft service and tells its limits; a `hidden_size` of 0: it has no hidden states to give."""

    vocab_size: int
    max_proposal_tokens: int
    max_distribution_pairs: int
    max_model_len: int
    hidden_size: int = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """A sequence to draft for: see `Begin` in link.proto. Pieces are joined at the boundary; this one is always whole."""

    sequence: int
    prompt_length: int
    token_ids: tuple[int, ...]
    mode: Mode
    sampling: SamplingParams
    draft_seed: int
    window: int
    suppressed_ids: tuple[int, ...] = ()
    suppressed_until: int = 0
    hidden: HiddenState | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that the target has chosen; the drafter's guesses that match them leave the head of its tail."""

    sequence: int
    base_length: int
    accepted: int
    token_ids: tuple[int, ...]
    window: int
    rewind: bool = False
    hidden: HiddenState | None = None

    def then(self, following: "Commit") -> "Commit":
        """This one and the one right behind it, as one: tokens and accepted of both, window and hidden state of the last, rewind if either."""
        return replace(
            following,
            base_length=self.base_length,
            accepted=self.accepted + following.accepted,
            token_ids=self.token_ids + following.token_ids,
            rewind=self.rewind or following.rewind,
        )


class EndReason(enum.Enum):
    """Why a draft service is told to forget a sequence."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REASSIGNED = "reassigned"


@dataclass(frozen=True, slots=True)
class End:
    """A sequence to forget."""

    sequence: int
    reason: EndReason


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What changed in one engine step for one draft service. Order of meaning: begins, commits, ends."""

    step: int
    begins: tuple[Begin, ...] = ()
    commits: tuple[Commit, ...] = ()
    ends: tuple[End, ...] = ()


@dataclass(frozen=True, slots=True)
class Distribution:
    """The sparse distribution that a guess was really drawn from; probabilities are exact float32 values, > 0, sum about 1."""

    token_ids: tuple[int, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Consecutive guesses of one sequence; `distributions` is empty (each guess was certain) or has one entry per guess."""

    sequence: int
    start: int
    digest: int
    token_ids: tuple[int, ...]
    distributions: tuple[Distribution, ...] = ()


@dataclass(frozen=True, slots=True)
class ProposalBatch:
    """Guesses for any number of sequences, made after `step` was applied.

    Args:
        step: number of the last StepBatch that was.
        draft_seconds: what they took.
        proposals: the guesses.
        idle: nothing more follows for any sequence until the next StepBatch.
        resting: sequences for which nothing more follows until a commit names them, though others go on.
    """

    step: int
    draft_seconds: float
    proposals: tuple[Proposal, ...]
    idle: bool
    resting: tuple[int, ...] = ()

    @property
    def num_ids(self) -> int:
        """Ids in all: guesses, what they were drawn from, and resting sequences."""
        num_drawn = sum(len(each.token_ids) for proposal in self.proposals if proposal.distributions for each in proposal.distributions)
        return num_drawn + sum([len(proposal.token_ids) for proposal in self.proposals]) + len(self.resting)


@dataclass(frozen=True, slots=True)
class Decline:
    """A sequence that this draft service cannot serve; final for that sequence."""

    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many sequences this draft service can serve from now on."""

    sequences: int


@dataclass(frozen=True, slots=True)
class Resync:
    """A sequence that this draft service has lost track of."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, or the answer to one."""

    sent_ns: int
    reply: bool


@dataclass(frozen=True, slots=True)
class Goodbye:
    """An orderly end."""

    reason: str


FromDrafter = Hello | ProposalBatch | Decline | Capacity | Resync | Heartbeat | Goodbye
FromVerifier = Welcome | StepBatch | Heartbeat | Goodbye
