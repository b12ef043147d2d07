from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import EngineFailure
from shared.link import Begin, Commit, End, EndReason, StepBatch
from shared.rpc.convert_step import to_speculate_responses
from shared.sampling import Mode, SamplingParams
from verifier_service.outbox import Outbox


def _begin(sequence: int, *token_ids: int) -> Begin:
    return Begin(sequence, 1, token_ids, Mode.COUPLED, SamplingParams(), 0, 4)


def _commit(sequence: int, base: int, *token_ids: int, accepted: int = 0, window: int = 4, rewind: bool = False) -> Commit:
    return Commit(sequence, base, accepted, token_ids, window, rewind)


def _end(sequence: int) -> End:
    return End(sequence, EndReason.FINISHED)


def _outbox(*batches: StepBatch, max_bytes: int = 1 << 20) -> Outbox:
    outbox = Outbox(max_bytes)
    for batch in batches:
        outbox.add(batch)
    return outbox


class ReferenceDrafter:
    """Committed text, window and number of accepted guesses of each sequence it knows; fails where a drafter would lose track."""

    def __init__(self) -> None:
        self.texts: dict[int, tuple[int, ...]] = {}
        self.windows: dict[int, int] = {}
        self.accepted: dict[int, int] = {}

    def apply(self, batches: Iterable[StepBatch | None]) -> "ReferenceDrafter":
        for batch in batches:
            if batch is not None:
                self._apply(batch)
        return self

    def _apply(self, batch: StepBatch) -> None:
        for begin in batch.begins:
            self.texts[begin.sequence], self.windows[begin.sequence], self.accepted[begin.sequence] = begin.token_ids, begin.window, 0
        for commit in batch.commits:
            assert len(self.texts[commit.sequence]) == commit.base_length
            self.texts[commit.sequence] += commit.token_ids
            self.windows[commit.sequence] = commit.window
            self.accepted[commit.sequence] += commit.accepted
        for end in batch.ends:
            for known in (self.texts, self.windows, self.accepted):
                del known[end.sequence]


@st.composite
def _histories(draw: st.DrawFn) -> list[StepBatch]:
    """What an engine may say of three sequences: begins (also of known ones), commits that follow, ends, sequences that come back."""
    lengths: dict[int, int] = {}
    batches = []
    for step in range(draw(st.integers(1, 12))):
        begins, commits, ends = [], [], []
        for sequence in range(3):
            action = draw(st.sampled_from(["begin", "commit", "end", "begin and commit", "nothing"]))
            if "begin" in action:
                token_ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
                begins.append(_begin(sequence, *token_ids))
                lengths[sequence] = len(token_ids)
            if "commit" in action and sequence in lengths:
                token_ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
                accepted, window = draw(st.integers(0, len(token_ids))), draw(st.integers(0, 8))
                commits.append(_commit(sequence, lengths[sequence], *token_ids, accepted=accepted, window=window))
                lengths[sequence] += len(token_ids)
            if action == "end" and sequence in lengths:
                ends.append(_end(sequence))
                del lengths[sequence]
        batches.append(StepBatch(step, tuple(begins), tuple(commits), tuple(ends)))
    return batches


@given(_histories(), st.sets(st.integers(0, 12)))
def test_a_drafter_that_gets_merged_steps_knows_what_one_knows_that_gets_them_all(history: list[StepBatch], taken_after: set[int]) -> None:
    outbox, sent = Outbox(1 << 20), []
    for batch in history:
        outbox.add(batch)
        if batch.step in taken_after:
            sent.append(outbox.take())
    sent.append(outbox.take())
    merged, plain = ReferenceDrafter().apply(sent), ReferenceDrafter().apply(history)
    assert (merged.texts, merged.windows) == (plain.texts, plain.windows)
    assert merged.accepted == plain.accepted
    assert outbox.is_empty
    assert outbox.pending_bytes == 0


@given(_histories())
def test_the_estimate_of_its_size_is_never_below_the_wire(history: list[StepBatch]) -> None:
    outbox = _outbox(*history)
    estimate, batch = outbox.pending_bytes, outbox.take()
    assert batch is not None
    (message,) = to_speculate_responses(batch)
    assert message.ByteSize() <= estimate + 64


def test_at_most_one_commit_of_a_sequence_is_pending() -> None:
    first = StepBatch(1, commits=(_commit(1, 5, 10, 11, accepted=1, window=4, rewind=True), _commit(2, 9, 1)))
    second = StepBatch(2, commits=(_commit(1, 7, 12, accepted=1, window=0),))
    batch = _outbox(first, second).take()
    assert batch == StepBatch(2, commits=(_commit(1, 5, 10, 11, 12, accepted=2, window=0, rewind=True), _commit(2, 9, 1)))


def test_a_begin_makes_what_was_pending_of_its_sequence_void() -> None:
    batch = _outbox(StepBatch(1, (_begin(1, 1),), (_commit(1, 1, 2),)), StepBatch(2, (_begin(1, 1, 2, 3),))).take()
    assert batch == StepBatch(2, (_begin(1, 1, 2, 3),))


def test_a_sequence_that_ended_before_it_was_told_of_is_never_mentioned() -> None:
    assert _outbox(StepBatch(1, (_begin(1, 1),), (_commit(1, 1, 2),)), StepBatch(2, ends=(_end(1),))).take() == StepBatch(2)


def test_a_known_sequence_that_comes_back_and_ends_again_is_ended() -> None:
    outbox = _outbox(StepBatch(1, (_begin(1, 1),)))
    outbox.take()
    outbox.add(StepBatch(2, ends=(_end(1),)))
    outbox.add(StepBatch(3, (_begin(1, 1, 2),)))
    outbox.add(StepBatch(4, ends=(_end(1),)))
    assert outbox.take() == StepBatch(4, ends=(_end(1),))


def test_nothing_is_taken_twice() -> None:
    outbox = _outbox(StepBatch(1, commits=(_commit(1, 5, 6),)))
    assert outbox.take() is not None
    assert outbox.take() is None


def test_beyond_its_bound_it_forgets_everything_and_stays_so() -> None:
    outbox = _outbox(StepBatch(1, commits=(_commit(1, 0, *range(400)),)), max_bytes=1000)
    assert outbox.overflowed
    outbox.add(StepBatch(2, (_begin(2, *range(400)),)))
    assert outbox.overflowed
    assert (outbox.pending_bytes, outbox.take()) == (0, None)


def test_merging_for_ever_overflows() -> None:
    outbox = Outbox(1000)
    for step in range(1000):
        outbox.add(StepBatch(step, commits=(_commit(1, step, 7),)))
        assert outbox.pending_bytes <= 1000
    assert outbox.overflowed


def test_a_commit_that_does_not_follow_is_our_own_fault() -> None:
    outbox = _outbox(StepBatch(1, commits=(_commit(1, 5, 6),)))
    with pytest.raises(EngineFailure):
        outbox.add(StepBatch(2, commits=(_commit(1, 9, 6),)))
