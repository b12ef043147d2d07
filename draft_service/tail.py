"""One sequence as the drafter sees it: the committed tokens and the tail of guesses beyond them.

It owns what is known of the text and its digest; it does not know how guesses are made or sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shared.digest import extend
from shared.errors import OutriderError
from shared.link import Begin, Commit, HiddenState
from shared.noise import derive_key, noise_key
from shared.sampling import Mode, Pick, TokenRules


class LostTrack(OutriderError):
    """A commit leaves a gap after what is known, or contradicts it: only a new Begin helps. Nothing was changed."""

    reason = "LOST_TRACK"


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a commit did to the tail. Guesses are told by the kind of proposer that made them, in their order.

    Args:
        matched: of guesses that became committed.
        dropped: of guesses that are gone.
        refuted: of the one among those that the target's own token differs from; what came after it was never put to the test.
    """

    matched: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refuted: tuple[str, ...] = ()


def count_matching(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next((index for index in range(limit) if left[index] != right[index]), limit)


@dataclass(slots=True)
class DraftSequence:
    """Committed tokens, tail, and what is needed to guess the next token.

    Invariants: `digest` is that of committed + tail; `committed` only grows (a Begin makes a new object); the tail is within the
    window whenever it grows (a commit may shrink the window below it: what was sent stays sent).

    Args:
        number: the verifier's number of the sequence.
        mode: how its guesses are verified.
        rules: what turns logits into the distribution of the next token.
        draft_seed: uint64 from the Begin.
        max_length: no guess stands at this position or later.
        window: most tokens in the tail.
        committed: the target's tokens, prompt included.
        tail: guesses after them.
        makers: of each of those, the kind of proposer that made it.
        hidden: what the target's head read in the row that chose the last committed token, if the verifier has told.
        is_resting: the proposer has nothing to add until the next commit.
        is_drawn: its guesses are draws of their own, so what they were drawn from goes with them. Coupled guesses share the verifier's noise,
            greedy ones have none: both are functions of the text.
        pick: how the next guess is picked. It follows the text by itself.
        digest: of committed + tail.
        num_cuts: how often guesses were taken out of the text; between two cuts the text only grows.
    """

    number: int
    mode: Mode
    rules: TokenRules
    draft_seed: int
    max_length: int
    window: int
    committed: list[int]
    tail: list[int] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    hidden: HiddenState | None = None
    is_resting: bool = False
    is_drawn: bool = field(init=False)
    pick: Pick = field(init=False)
    digest: int = field(init=False)
    num_cuts: int = field(init=False, default=0)
    _committed_digest: int = field(init=False)
    _num_rewinds: int = field(init=False, default=0)
    _is_last_doubted: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        """Walks the digest over what is known."""
        self.is_drawn = self.mode is Mode.REJECTION and not self.rules.sampling.is_greedy
        self.pick = self._new_pick()
        self.digest = self._committed_digest = extend(extend(0, self.committed), self.tail)

    @classmethod
    def of(cls, begin: Begin, vocab_size: int, max_length: int) -> "DraftSequence":
        """A sequence with an empty tail.

        Args:
            begin: the verifier's word.
            vocab_size: ids of the target's tokenizer.
            max_length: no guess stands at this position or later.
        """
        rules = TokenRules(begin.sampling, begin.prompt_length, vocab_size, begin.suppressed_ids, begin.suppressed_until)
        committed = list(begin.token_ids)
        return cls(begin.sequence, begin.mode, rules, begin.draft_seed, max_length, begin.window, committed, hidden=begin.hidden)

    @property
    def length(self) -> int:
        """Committed tokens and guesses together: the position of the next guess."""
        return len(self.committed) + len(self.tail)

    @property
    def room(self) -> int:
        """How many guesses may be added now."""
        if self.has_nothing_to_add:
            return 0
        num_guesses = len(self.tail)
        return max(0, min(self.window - num_guesses, self.max_length - len(self.committed) - num_guesses))

    @property
    def has_nothing_to_add(self) -> bool:
        """Whether no guess will follow before the next commit, however wide the window."""
        return self.is_resting or (self._is_last_doubted and bool(self.tail))

    def text_from(self, position: int) -> list[int]:
        """Committed tokens and guesses from `position` on."""
        num_committed = len(self.committed)
        return self.tail[position - num_committed :] if position >= num_committed else self.committed[position:] + self.tail

    def extend(self, token_ids: Iterable[int], maker: str = "", is_doubted: bool = False) -> None:
        """Adds guesses that are about to be sent.

        Args:
            token_ids: the guesses.
            maker: kind of the proposer that made them.
            is_doubted: the last of them is so unlikely that none is added after it, until it is committed or gone.
        """
        added = list(token_ids)
        self.tail += added
        self.makers += [maker] * len(added)
        self.digest = extend(self.digest, added)
        # In rejection mode a stop that depends on a drawn token makes what comes after it, or comes late, depend on it too. That is biased.
        self._is_last_doubted = is_doubted and self.mode is Mode.COUPLED

    def settle(self, commit: Commit) -> Settlement:
        """Takes the target's tokens; what the tail foresaw leaves its head, at the first difference all of it goes.

        A commit that overlaps what is known (a duplicate, or one merged on the way) gives its new part; one that ends before the known
        length is old news and changes nothing, its window and rewind included.

        Raises:
            LostTrack: a gap or a contradiction.
        """
        known = len(self.committed)
        overlap = known - commit.base_length
        if overlap < 0:
            raise LostTrack(f"sequence {self.number}: a commit starts at {commit.base_length}, known are {known} tokens")
        if tuple(self.committed[commit.base_length : commit.base_length + len(commit.token_ids)]) != commit.token_ids[:overlap]:
            raise LostTrack(f"sequence {self.number}: a commit at {commit.base_length} contradicts earlier ones")
        if len(commit.token_ids) < overlap:
            return Settlement()
        self.window, self.is_resting = commit.window, False
        self.hidden = commit.hidden  # that of the length that the text has now
        settlement = self._append(list(commit.token_ids[overlap:]))
        if not commit.rewind:
            return settlement
        return replace(settlement, dropped=settlement.dropped + self._rewind())

    def _append(self, added: list[int]) -> Settlement:
        num_matched = count_matching(self.tail, added)
        matched = tuple(self.makers[:num_matched])
        self.committed += added
        self._committed_digest = extend(self._committed_digest, added)
        if num_matched == len(added):
            # The text has not changed, nor has the digest of its end.
            del self.tail[:num_matched], self.makers[:num_matched]
            return Settlement(matched)
        # A tail that was shorter than the commit and agreed with it has been used up, not contradicted.
        dropped = self._cut(num_matched)
        return Settlement(matched, dropped, dropped[:1])

    def _rewind(self) -> tuple[str, ...]:
        self._num_rewinds += 1
        self.pick = self._new_pick()
        return self._cut(0)

    def _cut(self, num_settled: int) -> tuple[str, ...]:
        """Empties the tail, whose first `num_settled` guesses are committed by now; returns the makers of those that are lost."""
        dropped = tuple(self.makers[num_settled:])
        self.num_cuts += bool(dropped)
        self.tail.clear()
        self.makers.clear()
        self.digest = self._committed_digest
        return dropped

    def _new_pick(self) -> Pick:
        # Coupled: the verifier's own noise, whatever happens to the tail. Rejection: a draw that was lost is made anew with fresh noise.
        is_coupled = self.mode is Mode.COUPLED
        key = noise_key(self.draft_seed) if is_coupled else derive_key(self.draft_seed, "guess", self._num_rewinds)
        return Pick(self.rules, key, self.committed, self.tail)
