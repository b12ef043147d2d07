"""A request while it lives in the engine: its sequence, its guesses, its keys. It does not know the model or the link."""

from dataclasses import dataclass, field

from shared.engine.sequence import Sequence
from shared.link import HiddenState
from shared.noise import derive_key, noise_key
from shared.sampling import Mode, Pick, TokenRules
from verifier_service.acceptance import Acceptance
from verifier_service.guesses import GuessBuffer
from verifier_service.rejection import RejectionKeys
from verifier_service.request import Request


@dataclass(slots=True, eq=False)
class Generation:
    """One live request.

    Args:
        number: its sequence number on the links, never reused.
        request: what was asked.
        rules: how its tokens are picked.
        key: of its noise.
        draft_seed: what its drafter draws with.
        rejection_keys: set in rejection mode unless greedy, which needs no ratio test.
        arrived_at: when it was submitted, on the engine's clock, in seconds.
        sequence: committed tokens and their KV.
        guesses: what its drafter has proposed.
        drafter: the link that drafts for it, if any.
        declined: links that will not.
        scheduled_before: whether it has ever been run.
        overtaken: how many others have gone before it in all the times that it waited.
        num_cached: tokens of the prompt that were not computed, because their KV was there.
        num_sound: positions below it were read by a row that a token could be picked from: the KV that may be shown to other requests.
        num_charged: length of the text that its tenant has been charged for.
        acceptance: running estimate of the chance that a guess is accepted, from committed rounds only.
        cut_step: the link's step that told of tokens the buffer had not foreseen: the drafter may have cut its tail then.
        lost: a piece is missing; the drafter has to be told to start over.
        told_step: the link's step that told its drafter of it last, or will.
        is_resting: its drafter knows that step and has nothing more for it before the next.
        joined_at: when guesses last joined.
        committed_at: when tokens were last committed.
        expected_at: when the next guess is due.
        granted: the window that its drafter was granted last.
        tried_at: number of the step that last scored a guess of it.
        hidden: what the target's head read in the row that chose the last committed token; None where that is not known.
    """

    number: int
    request: Request
    rules: TokenRules
    key: int
    draft_seed: int
    rejection_keys: RejectionKeys | None
    arrived_at: float
    sequence: Sequence
    guesses: GuessBuffer
    drafter: int | None = None
    declined: set[int] = field(default_factory=set)
    scheduled_before: bool = False
    overtaken: int = 0
    num_cached: int = 0
    num_sound: int = 0
    num_charged: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    cut_step: int = 0
    lost: bool = False
    told_step: int = 0
    is_resting: bool = False
    joined_at: float | None = None
    committed_at: float = 0.0
    expected_at: float = 0.0
    granted: int = 0
    tried_at: int = 0
    hidden: HiddenState | None = None

    @property
    def committed(self) -> list[int]:
        """Prompt and output so far."""
        return self.sequence.token_ids

    @property
    def num_generated(self) -> int:
        """Output tokens so far, resumed ones included."""
        return len(self.committed) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Committed tokens without KV: 1 when it decodes, more while it prefills."""
        return len(self.committed) - self.sequence.kv_len

    @property
    def room(self) -> int:
        """Guesses that could still be of use: the target's own token comes after them."""
        return max(0, self.request.stopping.max_tokens - self.num_generated - 1)

    @property
    def num_usable(self) -> int:
        """Guesses that are there and that a step could score."""
        return min(len(self.guesses), self.request.max_draft_tokens, self.room)

    @property
    def wants_drafter(self) -> bool:
        """Whether guesses may be used at all."""
        return self.request.max_draft_tokens > 0

    def picks(self, num_guesses: int) -> list[Pick]:
        """What each of the rows 0..num_guesses picks from its logits."""
        rules, key, committed, guesses = self.rules, self.key, self.committed, self.guesses.token_ids
        return [Pick(rules, key, committed, guesses[:row]) for row in range(num_guesses + 1)]


def new_generation(number: int, request: Request, vocab_size: int, nonce: int, now: float) -> Generation:
    """Builds a live request.

    Args:
        number: its sequence number.
        request: a validated request.
        vocab_size: ids of the target's tokenizer.
        nonce: private randomness of this attempt, uint64: a repeated request must not repeat its rejection draws.
        now: engine clock, seconds.
    """
    committed = [*request.prompt_ids, *request.resume_ids]
    stopping = request.stopping
    suppressed = tuple(sorted(stopping.eos_ids | stopping.stop_ids)) if stopping.min_tokens else ()
    prompt_length = len(request.prompt_ids)
    rules = TokenRules(request.sampling, prompt_length, vocab_size, suppressed, prompt_length + stopping.min_tokens)
    by_ratio = request.mode is Mode.REJECTION and not request.sampling.is_greedy
    keys = RejectionKeys(*(derive_key(request.seed, stream, nonce) for stream in ("accept", "residual", "plain"))) if by_ratio else None
    # In rejection mode the seed itself never leaves the verifier, not even for a greedy request, whose drafter needs none.
    draft_seed = request.seed if request.mode is Mode.COUPLED else derive_key(request.seed, "draft", nonce)
    sequence, guesses = Sequence(committed, salt=request.tenant.encode()), GuessBuffer(committed)
    return Generation(number, request, rules, noise_key(request.seed), draft_seed, keys, now, sequence, guesses)
