"""What is decided about windows, guesses and waits, by counts and times alone."""

import pytest

from shared.digest import extend
from shared.link import Hello, Proposal
from shared.sampling import Mode, SamplingParams
from verifier_service.drafters import Drafter, Drafters
from verifier_service.generation import Generation, new_generation
from verifier_service.pacing import Pacing
from verifier_service.request import Request, Stopping
from verifier_service.step_cost import StepCost

FLAT = {1: 0.03, 2: 0.03}
STEEP = {1: 0.03, 2: 0.04, 4: 0.06}


class Desk:
    """A Pacing with one drafter, measured: 3 ms to the first guess, 2 ms between two."""

    def __init__(self, cost: dict[int, float], window: int = 16) -> None:
        self.drafters = Drafters()
        self.drafter: Drafter = self.drafters.attach(1, Hello(1, "i", "n", "", (Mode.REJECTION,), 64))
        self.drafter.timing.turnaround.observe(0.003, is_disturbed=False)
        self.drafter.timing.gap.observe(0.002, is_disturbed=False)
        self.pacing = Pacing(self.drafters, window, 8, StepCost(cost))

    def generation(self, number: int, rounds: int, accepted: int, guesses: tuple[int, ...] = ()) -> Generation:
        request = Request("r", (1, 2, 3), SamplingParams(), Stopping(500), seed=1, max_draft_tokens=8, mode=Mode.REJECTION)
        made = new_generation(number, request, 64, 0, 0.0)
        made.drafter = 1
        for _ in range(rounds):
            made.acceptance.observe(accepted, 8)
        made.guesses.join(Proposal(number, 3, extend(0, [1, 2, 3]), guesses), 32, overlapped=False)
        return made

    def starve(self) -> None:
        """Spends what is saved for probes; where rows cost nothing there is no end to that."""
        useless = self.generation(99, 50, 0, (7,))
        while sum(self.pacing.allot([useless], 64, 1)):
            pass


@pytest.mark.parametrize("cost", [FLAT, STEEP])
def test_what_is_decided_does_not_depend_on_what_the_guesses_are(cost):
    """In rejection mode it would bias the output."""

    def decisions(guesses: tuple[int, ...]) -> tuple[object, ...]:
        desk = Desk(cost)
        batch = [desk.generation(1, 6, 6, guesses), desk.generation(2, 3, 1, guesses[:3])]
        allotted = tuple(desk.pacing.allot(batch, 64, 2))
        desk.pacing.grant(batch)
        until = desk.pacing.wait_until(batch[:1], 0, 0.0, 0.0)
        return allotted, tuple(each.granted for each in batch), until

    assert decisions((7, 7, 7, 7, 7)) == decisions((8, 9, 10, 11, 12)) == decisions((1, 2, 40, 63, 5))


def test_a_budget_is_kept_whatever_pays():
    desk = Desk(FLAT)
    batch = [desk.generation(number, 9, 8, (5,) * 8) for number in range(4)]
    assert sum(desk.pacing.allot(batch, 5, 4)) == 5
    assert sum(Pacing(Drafters(), 16, 8, StepCost()).allot(batch, 5, 4)) <= 5


def test_guesses_that_do_not_pay_are_not_scored_but_tried_now_and_then():
    desk = Desk(STEEP)
    desk.starve()
    useless, steps = desk.generation(1, 50, 0, (7, 7)), 2000
    num_tried = 0
    for _ in range(steps):
        num_tried += sum(desk.pacing.allot([useless], 64, 1))
        desk.pacing.step_ended(1, 0, 0.03)
    assert 0 < num_tried < 0.05 * steps  # each costs a third of a step


def test_probes_go_round():
    desk = Desk(STEEP)
    desk.starve()
    batch = [desk.generation(number, 50, 0, (7,)) for number in range(4)]
    tried = [0] * 4
    for _ in range(4000):
        tried = [count + amount for count, amount in zip(tried, desk.pacing.allot(batch, 64, 4), strict=True)]
        desk.pacing.step_ended(4, 0, 0.06)
    assert min(tried) > 0
    assert max(tried) - min(tried) <= 1


def test_the_window_of_a_hopeless_sequence_is_small_and_that_of_a_good_one_is_not():
    desk = Desk(FLAT)
    hopeless, good = desk.generation(1, 50, 0), desk.generation(2, 20, 8)
    desk.pacing.allot([hopeless, good], 64, 2)
    desk.pacing.grant([hopeless, good])
    assert hopeless.granted <= 2
    assert good.granted == 16


def test_a_drafter_that_would_always_be_too_late_is_granted_nothing():
    desk = Desk(FLAT)
    for _ in range(50):
        desk.drafter.timing.turnaround.observe(0.5, is_disturbed=False)
    late = desk.generation(1, 20, 1)
    desk.pacing.allot([late], 64, 1)
    desk.pacing.grant([late])
    assert late.granted <= 1


def begun(desk: Desk) -> Generation:
    """A lone sequence that waits for its first guess."""
    made = desk.generation(1, 8, 4)
    desk.pacing.allot([made], 64, 1)
    desk.pacing.committed(made, desk.drafter, contradicted=True, now=1.0)
    assert desk.pacing.wait_until([made], 0, 1.0, 1.0) > 1.0
    return made


def test_a_wait_that_nothing_ends_is_in_vain_and_not_repeated():
    desk = Desk(FLAT)
    made = begun(desk)
    until = desk.pacing.wait_until([made], 0, 1.0, 1.0)
    assert desk.pacing.wait_until([made], 0, 1.0, until) <= until
    desk.pacing.step_starts(until)
    assert desk.pacing.take_decisions().wait == ("in_vain", pytest.approx(until - 1.0))
    desk.pacing.committed(made, desk.drafter, contradicted=True, now=2.0)
    assert desk.pacing.wait_until([made], 0, 2.0, 2.0) <= 2.0


def test_a_wait_that_guesses_end_is_served():
    desk = Desk(FLAT)
    made = begun(desk)
    made.guesses.join(Proposal(1, 3, extend(0, [1, 2, 3]), (5,) * 8), 32, overlapped=False)
    desk.pacing.guesses_came(made, desk.drafter, 8, 1.004, overlapped=False)
    assert desk.pacing.wait_until([made], 0, 1.0, 1.004) <= 1.004
    desk.pacing.step_starts(1.004)
    assert desk.pacing.take_decisions().wait == ("served", pytest.approx(0.004))


def test_a_wait_that_other_work_ends_is_cut_short_and_held_against_nobody():
    desk = Desk(FLAT)
    made = begun(desk)
    assert desk.pacing.wait_until([made], 1, 1.0, 1.001) <= 1.001
    desk.pacing.step_starts(1.001)
    assert desk.pacing.take_decisions().wait == ("cut_short", pytest.approx(0.001))
    assert desk.drafter.vain_waits == 0
