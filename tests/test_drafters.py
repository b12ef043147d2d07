"""Who drafts for whom, and when a drafter is no longer asked."""

import pytest

from shared.link import Begin, Commit, Hello
from shared.sampling import Mode, SamplingParams
from verifier_service.drafters import Drafters, Pace


def hello(name: str, capacity: int = 4, modes: tuple[Mode, ...] = (Mode.COUPLED,)) -> Hello:
    return Hello(1, name, name, "", modes, capacity)


def told(drafter, step: int, now: float) -> None:
    drafter.commits[1] = Commit(1, 1, 0, (1,), 8)
    drafter.take_batch(step, now)


def test_the_drafter_with_most_room_is_chosen():
    drafters = Drafters()
    drafters.attach(1, hello("small", 1))
    drafters.attach(2, hello("large", 9))
    assert drafters.choose(Mode.COUPLED, None, set(), 0.0).link == 2


def test_the_preferred_one_is_chosen_while_it_has_room():
    drafters = Drafters()
    small = drafters.attach(1, hello("small", 1))
    drafters.attach(2, hello("large", 9))
    assert drafters.choose(Mode.COUPLED, "small", set(), 0.0) is small
    small.sequences.add(7)
    assert drafters.choose(Mode.COUPLED, "small", set(), 0.0).link == 2


def test_one_that_cannot_do_the_mode_or_declined_is_not_chosen():
    drafters = Drafters()
    drafters.attach(1, hello("a"))
    assert drafters.choose(Mode.REJECTION, None, set(), 0.0) is None
    assert drafters.choose(Mode.COUPLED, None, {1}, 0.0) is None


def test_one_that_owes_an_answer_for_too_long_is_suspended_and_tried_again_with_one_sequence():
    drafters = Drafters()
    drafter = drafters.attach(1, hello("a"))
    told(drafter, 1, 0.0)
    assert drafters.suspend_hung(1.0) == []
    assert drafters.suspend_hung(5.1) == [drafter]
    assert drafters.choose(Mode.COUPLED, None, set(), 5.2) is None
    assert drafters.choose(Mode.COUPLED, None, set(), 6.2) is drafter
    drafter.sequences.add(1)
    assert drafters.choose(Mode.COUPLED, None, set(), 6.3) is None


def test_each_failed_probe_doubles_the_time_to_the_next():
    drafters = Drafters()
    drafter = drafters.attach(1, hello("a"))
    told(drafter, 1, 0.0)
    drafters.suspend_hung(10.0)
    drafter.sequences.add(1)
    told(drafter, 2, 12.0)
    drafters.suspend_hung(20.0)
    assert drafter.suspended_until == 22.0


def test_waits_in_vain_open_the_circuit_early():
    drafters = Drafters()
    drafter = drafters.attach(1, hello("a"))
    told(drafter, 1, 0.0)
    drafter.vain_waits = 3
    assert drafters.suspend_hung(0.1) == [drafter]


def test_an_answer_closes_the_circuit():
    drafters = Drafters()
    drafter = drafters.attach(1, hello("a"))
    told(drafter, 1, 0.0)
    drafters.suspend_hung(10.0)
    drafter.answer(1, idle=False, has_guesses=True, now=10.5)
    assert drafters.choose(Mode.COUPLED, None, set(), 10.6) is drafter


def test_an_answer_to_a_step_never_told_counts_for_the_last_told_one():
    drafter = Drafters().attach(1, hello("a"))
    told(drafter, 3, 1.0)
    drafter.answer(2**60, idle=True, has_guesses=False, now=1.5)
    assert not drafter.owes_answer
    told(drafter, 4, 2.0)
    assert drafter.owes_answer


def test_the_turnaround_is_measured_from_the_step_that_the_guesses_know():
    drafter = Drafters().attach(1, hello("a"))
    told(drafter, 1, 1.0)
    told(drafter, 2, 1.1)
    drafter.answer(1, idle=False, has_guesses=True, now=1.2)
    assert abs(drafter.timing.turnaround_s - 0.2) < 1e-9
    assert drafter.owing_since == 1.1
    drafter.answer(2, idle=True, has_guesses=False, now=5.0)  # nothing to propose tells nothing about the time a guess takes
    assert abs(drafter.timing.turnaround_s - 0.2) < 1e-9


def test_what_a_hung_drafter_is_told_is_not_remembered_without_bound():
    drafter = Drafters().attach(1, hello("a"))
    for step in range(10_000):
        told(drafter, step, step * 0.001)
    assert len(drafter.told) < 1_000
    assert drafter.owing_since == 0.0


def test_times_measured_beside_a_step_count_for_half_and_only_until_there_is_a_better_one():
    pace = Pace()
    pace.observe(0.4, is_disturbed=True)
    assert pace.mean_s == 0.2
    pace.observe(0.1, is_disturbed=False)
    assert pace.mean_s == 0.1
    pace.observe(0.9, is_disturbed=True)
    assert pace.mean_s == 0.1
    pace.observe(0.2, is_disturbed=False)
    assert 0.1 < pace.mean_s < 0.2


def test_what_reading_a_new_text_takes_is_not_taken_for_the_turnaround():
    drafter = Drafters().attach(1, hello("a"))
    drafter.begins[1] = Begin(1, 3, (1, 2, 3), Mode.COUPLED, SamplingParams(), 0, 8)
    drafter.take_batch(1, 0.0)
    drafter.answer(1, False, True, 3.0)
    assert drafter.timing.turnaround_s == 1.5, "hopeful while nothing better is known"
    told(drafter, 2, 4.0)
    drafter.answer(2, False, True, 4.1)
    assert drafter.timing.turnaround_s == pytest.approx(0.1)
    drafter.begins[2] = Begin(2, 3, (1, 2, 3), Mode.COUPLED, SamplingParams(), 0, 8)
    drafter.take_batch(3, 5.0)
    told(drafter, 4, 5.1)
    drafter.answer(4, False, True, 9.0)
    assert drafter.timing.turnaround_s == pytest.approx(0.1)


def test_commits_of_a_sequence_that_nothing_is_asked_of_are_kept_back():
    drafter = Drafters().attach(1, hello("a"))

    def sent(*commits: Commit) -> tuple[Commit, ...] | None:
        drafter.commits |= {commit.sequence: commit for commit in commits}
        batch = drafter.take_batch(1, 0.0)
        return None if batch is None else batch.commits

    stop, more, other = Commit(1, 5, 0, (1,), 0), Commit(1, 6, 0, (2,), 0), Commit(2, 9, 0, (3,), 4)
    assert sent(stop) == (stop,), "it has to hear that nothing is asked of it"
    assert sent(more) is None
    assert not drafter.has_news
    assert sent(other) == (other,), "one that is asked goes without one that is not"
    assert sent(more.then(Commit(1, 7, 1, (8, 9), 3))) == (Commit(1, 6, 1, (2, 8, 9), 3),)
    assert sent(Commit(1, 9, 0, (4,), 0)) == (Commit(1, 9, 0, (4,), 0),), "it was asked in between"
    assert sent(Commit(1, 10, 0, (4,), 0, rewind=True)) == (Commit(1, 10, 0, (4,), 0, rewind=True),)


def test_a_sequence_that_is_told_of_anew_is_asked_anew():
    drafter = Drafters().attach(1, hello("a"))
    for window, is_kept_back in ((0, True), (4, False)):
        drafter.begins[1] = Begin(1, 3, (1, 2, 3), Mode.COUPLED, SamplingParams(), 0, window)
        drafter.take_batch(1, 0.0)
        drafter.commits[1] = Commit(1, 3, 0, (4,), 0)
        assert (drafter.take_batch(2, 0.0) is None) is is_kept_back
        drafter.commits.clear()
