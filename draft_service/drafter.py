"""The drafter: all sequences of one link, what they are told and what they propose.

It owns the sequences' state between a StepBatch and the guesses that follow from it. It does not know what makes the guesses, nor
how frames travel.
"""

from collections.abc import Callable, Iterable, Sequence

import structlog

from draft_service.proposer import CannotServe, Guess, Proposer
from draft_service.stats import DrafterStats
from draft_service.tail import DraftSequence, LostTrack
from shared.errors import ProtocolViolation
from shared.link import Begin, Commit, Decline, FromDrafter, Proposal, ProposalBatch, Resync, StepBatch, Welcome

_log = structlog.stdlib.get_logger(__name__)
_RESYNC_INTERVAL_S = 1.0
_SIGN_OF_LIFE_S = 0.5  # a long catch-up is not to look like a hang: the verifier gives up after about 2 s
_MAX_REMEMBERED = 4096  # lost or declined numbers whose End may never come
_FAILED = "the drafter has failed on it"


class Drafter:
    """Rides ahead of the verifier for many sequences at once. Used by one thread.

    Args:
        proposer: makes the guesses.
        capacity: most sequences served at once; a Begin beyond it is declined.
        clock: monotonic seconds.
        on_step: told of each call of the proposer: the seconds it took, and the tokens that its model was fed.
    """

    def __init__(
        self, proposer: Proposer, capacity: int, clock: Callable[[], float], on_step: Callable[[float, int], None] = lambda seconds, num_fed: None
    ) -> None:
        self.capacity = capacity
        self.stats = DrafterStats(proposer=proposer.stats)
        self._proposer = proposer
        self._clock = clock
        self._on_step = on_step
        self._welcome: Welcome | None = None
        self._sequences: dict[int, DraftSequence] = {}
        self._resynced_at: dict[int, float] = {}  # lost sequences: when a Begin was last asked for
        self._declined: dict[int, None] = {}  # an ordered set: commits for these may still be on their way
        self._notices: list[FromDrafter] = []
        self._resting: dict[int, None] = {}  # an ordered set: sequences of which the next ProposalBatch tells that nothing more comes
        self._step = 0
        self._seconds = 0.0  # drafting time that no ProposalBatch has told yet
        self._answered_at = 0.0  # when the last ProposalBatch went out, or when one came due
        self._has_told_idle = True

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._notices) or not self._has_told_idle

    def wait_until(self, now: float) -> float:
        """A drafter never waits: it has work or it has not."""
        return now

    def attach(self, welcome: Welcome) -> None:
        """A new link: forgets all of the last one and takes this verifier's limits."""
        self.reset()
        self._welcome = welcome

    def reset(self) -> None:
        """The link is gone: forgets everything and frees all KV. Counters stay."""
        for number in list(self._sequences):
            self._forget(number)
        self._welcome = None
        self._resynced_at.clear()
        self._declined.clear()
        self._notices.clear()
        self._resting.clear()
        self._step, self._seconds, self._has_told_idle = 0, 0.0, True

    def apply(self, batch: StepBatch) -> None:
        """Takes the verifier's word: begins, commits, ends. What it leads to is sent by the next `step`.

        Raises:
            ProtocolViolation: no Welcome yet.
        """
        if self._welcome is None:
            raise ProtocolViolation("a StepBatch came before Welcome")
        self._step = max(self._step, batch.step)
        ended = {end.sequence for end in batch.ends}
        # Ends have the last word on their sequences, but the room they leave counts for the begins beside them.
        for number in ended:
            self._forget(number)
            self._resynced_at.pop(number, None)
            self._declined.pop(number, None)
        for begin in batch.begins:
            if begin.sequence not in ended:
                self._begin(begin, self._welcome)
        for commit in batch.commits:
            if commit.sequence not in ended:
                self._commit(commit)
        if (batch.begins or batch.commits) and self._has_told_idle:
            self._has_told_idle = False
            self._answered_at = self._clock()

    def step(self, now: float | None = None) -> list[FromDrafter]:
        """Proposes once for all sequences that have room.

        Args:
            now: when the step starts, as an engine thread tells it; read from the clock if None.

        Returns:
            Declines and resyncs that are due, then at most one ProposalBatch with the new guesses of all sequences.
        """
        started = self._clock() if now is None else now
        num_steps, num_fed = self.stats.steps, self.stats.proposer.fed_tokens
        proposals = self._propose()
        finished = self._clock()
        self._seconds += finished - started
        if self.stats.steps > num_steps:
            self._on_step(finished - started, self.stats.proposer.fed_tokens - num_fed)
        frames, self._notices = self._notices, []
        is_idle = not self._limit or not any(sequence.room for sequence in self._sequences.values())
        is_news = self._resting or (is_idle and not self._has_told_idle)
        is_overdue = not is_idle and finished - self._answered_at >= _SIGN_OF_LIFE_S
        if proposals or is_news or is_overdue:
            frames.append(ProposalBatch(self._step, self._seconds, tuple(proposals), is_idle, tuple(self._resting)))
            self._resting.clear()
            self._seconds, self._answered_at, self._has_told_idle = 0.0, finished, is_idle
        return frames

    def _begin(self, begin: Begin, welcome: Welcome) -> None:
        self._forget(begin.sequence)
        self._resynced_at.pop(begin.sequence, None)
        self._declined.pop(begin.sequence, None)
        if not begin.token_ids:
            self._decline(begin.sequence, "a sequence without tokens")
        elif begin.mode not in self._proposer.modes:
            self._decline(begin.sequence, f"mode {begin.mode.value} is not offered")
        elif len(self._sequences) >= self.capacity:
            self._decline(begin.sequence, "at capacity")
        else:
            sequence = DraftSequence.of(begin, welcome.vocab_size, welcome.max_model_len)
            try:
                self._proposer.open(sequence)
            except CannotServe as refusal:
                self._decline(refusal.number, refusal.message)
            except Exception:  # the proposer's boundary: its faults cost the guesses of who was asked for, never the process
                self._note_failure("open")
                self._decline(begin.sequence, _FAILED)
            else:
                self._sequences[begin.sequence] = sequence
                self.stats.sequences = len(self._sequences)

    def _commit(self, commit: Commit) -> None:
        sequence = self._sequences.get(commit.sequence)
        if sequence is None:
            self._ask_again(commit.sequence)
            return
        try:
            settlement = sequence.settle(commit)
        except LostTrack:
            self._forget(commit.sequence)
            self._ask_again(commit.sequence)
            return
        self.stats.guesses_matched.update(settlement.matched)
        self.stats.guesses_dropped.update(settlement.dropped)
        self.stats.guesses_refuted.update(settlement.refuted)
        if sequence.has_nothing_to_add:  # the doubted guess is still there
            self._resting[sequence.number] = None
        else:
            self._resting.pop(sequence.number, None)

    def _propose(self) -> list[Proposal]:
        while requests := self._requests():
            try:
                answers = list(zip(requests, self._proposer.propose(requests), strict=True))
            except CannotServe as refusal:
                # Nothing was guessed yet; each turn closes a sequence, so this ends.
                self._forget(refusal.number)
                self._decline(refusal.number, refusal.message)
                continue
            except Exception:
                # Which of them it was cannot be told, and the next call would fail again.
                self._note_failure("propose")
                for sequence, _ in requests:
                    self._forget(sequence.number)
                    self._decline(sequence.number, _FAILED)
                continue
            self.stats.steps += 1
            return self._extend_all(answers)
        return []

    def _extend_all(self, answers: Iterable[tuple[tuple[DraftSequence, int], Sequence[Guess] | None]]) -> list[Proposal]:
        proposals = []
        for (sequence, _), guesses in answers:
            if guesses:
                maker = guesses[0].maker or self._proposer.kinds[0]
                proposals.append(_extend(sequence, guesses, maker))
                self.stats.guesses_sent[maker] += len(guesses)
                self.stats.guesses_doubted[maker] += guesses[-1].is_doubted
            sequence.is_resting = guesses is not None and not guesses
            if sequence.has_nothing_to_add:
                self._resting[sequence.number] = None
                self.stats.rests += 1
        return proposals

    @property
    def _limit(self) -> int:
        return self._welcome.max_proposal_tokens if self._welcome else 0

    def _requests(self) -> list[tuple[DraftSequence, int]]:
        """The sequences that can go on, each with the most guesses that it takes now."""
        limit = self._limit
        return [(sequence, room) for sequence in self._sequences.values() if (room := min(sequence.room, limit))]

    def _forget(self, number: int) -> None:
        sequence = self._sequences.pop(number, None)
        self._resting.pop(number, None)
        if sequence is not None:
            try:
                self._proposer.close(sequence)
            except Exception:
                self._note_failure("close")
            self.stats.guesses_dropped.update(sequence.makers)
            self.stats.sequences = len(self._sequences)

    def _note_failure(self, what: str) -> None:
        _log.exception("proposer failed", call=what, sequences=len(self._sequences))
        self.stats.failures += 1

    def _decline(self, number: int, reason: str) -> None:
        self._declined[number] = None
        _bound(self._declined)
        self._notices.append(Decline(number, reason))
        self.stats.declines += 1

    def _ask_again(self, number: int) -> None:
        now = self._clock()
        last = self._resynced_at.get(number)
        if number in self._declined or (last is not None and now - last < _RESYNC_INTERVAL_S):
            return
        self._resynced_at[number] = now
        _bound(self._resynced_at)
        self._notices.append(Resync(number))
        self.stats.resyncs += 1


def _extend(sequence: DraftSequence, guesses: Sequence[Guess], maker: str) -> Proposal:
    start, digest = sequence.length, sequence.digest
    token_ids = tuple(guess.token_id for guess in guesses)
    sequence.extend(token_ids, maker, guesses[-1].is_doubted)
    # Drawn guesses go with what they were drawn from, all or none: a proposer draws for a sequence or it does not.
    distributions = tuple(guess.distribution for guess in guesses if guess.distribution is not None)
    return Proposal(sequence.number, start, digest, token_ids, distributions)


def _bound(remembered: dict[int, None] | dict[int, float]) -> None:
    if len(remembered) > _MAX_REMEMBERED:
        del remembered[next(iter(remembered))]
