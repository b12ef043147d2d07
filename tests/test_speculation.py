"""The verifier's dealings with drafters, message by message: what they are told, and what a useless one may cost."""

from shared.digest import extend
from shared.link import Begin, Commit, Decline, End, EndReason, Hello, Proposal, ProposalBatch, Resync, StepBatch
from shared.sampling import Mode, SamplingParams
from tests.support.tiny_models import tiny_llama
from tests.support.virtual_pair import Clock, VirtualPair, delay
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Request, Stopping
from verifier_service.speculation import Speculation

TARGET = tiny_llama()


def request(name: str = "r", max_tokens: int = 50) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(), Stopping(max_tokens), seed=1, max_draft_tokens=4)


class Desk:
    """A Speculation with one drafter on link 1 and the batches it was told."""

    def __init__(self, window: int = 8) -> None:
        self.live: dict[int, Generation] = {}
        self.told: list[StepBatch] = []
        self.speculation = Speculation(self.live, lambda link, batch: self.told.append(batch), window, 4)
        self.speculation.attach(1, Hello(1, "i", "n", "", (Mode.COUPLED,), 4), 0.0)

    def add(self, number: int, now: float) -> Generation:
        made = self.live[number] = new_generation(number, request(), 64, 0, now)
        self.speculation.assign(now)
        return made

    def end(self, number: int, now: float) -> None:
        self.speculation.ended(self.live.pop(number), EndReason.CANCELLED)
        self.speculation.flush(now)


def test_a_new_request_is_told_at_once():
    desk = Desk()
    desk.add(1, 0.0)
    desk.speculation.flush(0.0)
    [batch] = desk.told
    assert [begin.token_ids for begin in batch.begins] == [(1, 2, 3)]


def test_where_drafters_stand_still_during_a_step_a_prompt_is_read_by_the_target_first():
    """They share its cores: a draft that read the prompt beside it would hold up the first token."""
    desk = Desk(window=4)
    added = desk.add(1, 0.0)
    desk.speculation.flush(0.0)
    assert desk.told == []
    added.committed.append(4)
    added.sequence.kv_len = 3
    desk.speculation.assign(1.0)
    desk.speculation.flush(1.0)
    [batch] = desk.told
    assert [begin.token_ids for begin in batch.begins] == [(1, 2, 3, 4)]


def test_the_end_of_a_sequence_that_asked_to_be_told_again_is_told():
    desk = Desk()
    desk.add(1, 0.0)
    desk.speculation.flush(0.0)
    desk.speculation.receive(1, Resync(1), 2.0, overlapped=False)
    desk.end(1, 2.1)
    assert desk.told[-1].ends == (End(1, EndReason.CANCELLED),)
    assert desk.told[-1].begins == ()


def test_the_end_of_a_sequence_that_was_taken_away_and_given_back_is_told():
    desk = Desk()
    desk.add(2, 3.0)
    desk.speculation.flush(3.0)
    desk.speculation.assign(9.0)  # it has owed an answer for six seconds
    desk.speculation.receive(1, ProposalBatch(99, 0.0, (), False), 9.1, overlapped=False)
    desk.speculation.assign(9.2)
    desk.end(2, 9.3)
    assert End(2, EndReason.CANCELLED) in [end for batch in desk.told for end in batch.ends]


def test_resyncs_are_answered_at_most_once_a_second():
    desk = Desk()
    desk.add(1, 0.0)
    desk.speculation.flush(0.0)
    for now in (1.0, 1.1, 1.2, 2.5):
        desk.speculation.receive(1, Resync(1), now, overlapped=False)
        desk.speculation.flush(now)
    assert len([begin for batch in desk.told for begin in batch.begins]) == 3


def test_a_lost_piece_makes_the_next_commit_a_rewind_and_a_piece_of_a_tail_that_is_gone_does_not():
    desk = Desk()
    made = desk.add(1, 0.0)
    desk.speculation.flush(0.0)

    def propose(step: int, start: int) -> None:
        beyond = Proposal(1, start, extend(0, [1, 2, 3]), (7,))
        desk.speculation.receive(1, ProposalBatch(step, 0.0, (beyond,), False), 0.1, overlapped=False)

    made.committed.append(9)
    desk.speculation.committed(made, 3, 0, (9,), 0.05)
    desk.speculation.flush(0.05)
    propose(step=1, start=6)  # made before the commit of step 2 was heard of
    made.committed.append(9)
    desk.speculation.committed(made, 4, 0, (9,), 0.1)
    desk.speculation.flush(0.1)
    propose(step=3, start=8)
    made.committed.append(9)
    desk.speculation.committed(made, 5, 0, (9,), 0.2)
    desk.speculation.flush(0.2)
    commits = [commit for batch in desk.told for commit in batch.commits]
    assert [commit.rewind for commit in commits] == [False, False, True]


def test_what_was_kept_back_while_nothing_was_asked_is_told_as_one_commit():
    desk = Desk()
    made = desk.add(1, 0.0)
    desk.speculation.flush(0.0)
    for position, (token_id, granted) in enumerate([(7, 0), (8, 0), (9, 0), (5, 3)], start=3):
        made.committed.append(token_id)
        made.granted = granted
        desk.speculation.committed(made, position, 0, (token_id,), 0.1 * position)
        desk.speculation.flush(0.1 * position)
    told = [(commit.base_length, commit.token_ids, commit.window) for batch in desk.told for commit in batch.commits]
    assert told == [(3, (7,), 0), (4, (8, 9, 5), 3)]


def test_a_sequence_that_is_declined_leaves_nothing_behind():
    desk = Desk()
    made = desk.add(1, 0.0)
    desk.speculation.flush(0.0)
    made.committed.append(7)
    made.granted = 0
    desk.speculation.committed(made, 3, 0, (7,), 0.1)
    desk.speculation.flush(0.1)
    [drafter] = desk.speculation.drafters
    assert drafter.unasked == {1}
    desk.speculation.receive(1, Decline(1, "enough"), 0.2, overlapped=False)
    assert (drafter.unasked, drafter.sequences, drafter.commits) == (set(), set(), {})


def test_a_drafter_tells_of_a_sequence_that_rests_until_the_next_commit_and_not_of_one_that_has_a_commit_under_way():
    desk = Desk()
    made = desk.add(1, 0.0)
    desk.speculation.flush(0.0)

    def rest(step: int) -> bool:
        desk.speculation.receive(1, ProposalBatch(step, 0.0, (), False, resting=(1, 99)), 0.1, overlapped=False)
        return bool(made.is_resting)

    assert rest(step=1)
    made.committed.append(9)
    desk.speculation.committed(made, 3, 0, (9,), 0.2)
    assert not made.is_resting
    assert not rest(step=1), "it does not know of the commit yet"
    desk.speculation.flush(0.2)
    assert not rest(step=1)
    assert rest(step=2)
    desk.speculation.receive(1, Resync(1), 2.0, overlapped=False)
    assert not made.is_resting


class JunkDrafter:
    """Guesses rightly at first, then answers every step with something that fits nothing."""

    def __init__(self, text: list[int], num_good: int) -> None:
        self._text = text
        self._num_good = num_good
        self._length = 0
        self._step = 0
        self.has_work = False

    def attach(self, welcome: object) -> None:
        self.reset()

    def reset(self) -> None:
        self.has_work = False

    def apply(self, batch: StepBatch) -> None:
        self._step, self.has_work = batch.step, True
        for message in (*batch.begins, *batch.commits):
            if isinstance(message, Begin):
                self._length = len(message.token_ids)
            elif isinstance(message, Commit):
                self._length = message.base_length + len(message.token_ids)

    def step(self) -> list[ProposalBatch]:
        self.has_work = False
        if self._length < self._num_good:
            right = Proposal(1, self._length, extend(0, self._text[: self._length]), tuple(self._text[self._length : self._length + 3]))
            return [ProposalBatch(self._step, 0.0, (right,), False)]
        return [ProposalBatch(self._step, 0.0, (Proposal(1, 2**31, 7, (1,)),), False)]


def test_a_drafter_that_answers_but_never_usefully_costs_next_to_nothing():
    """Virtual time, a window of K, where the verifier would wait for it: 3% at most, the same tokens."""
    plain = VirtualPair(TARGET, max_draft_tokens=4, window=4, step_s=0.030)
    text = [1, 2, 3, *plain.run(request(max_tokens=150))["r"]]
    pair = VirtualPair(TARGET, max_draft_tokens=4, window=4, step_s=0.030)
    pair.attach(JunkDrafter(text, num_good=20), Clock(), to_drafter=delay(0.004), to_verifier=delay(0.004))
    assert [1, 2, 3, *pair.run(request(max_tokens=150))["r"]] == text
    assert sum(emission.accepted for emission in pair.emissions) > 0
    assert pair.clock.now < plain.clock.now * 1.03
