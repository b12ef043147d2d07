"""The buffer against the obvious model: a list of tokens and the full text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.digest import extend
from shared.link import Proposal
from verifier_service.guesses import GuessBuffer, Settled


def piece(text: list[int], start: int, tokens: list[int]) -> Proposal:
    return Proposal(1, start, extend(0, text[:start]), tuple(tokens))


def test_a_piece_that_follows_the_committed_text_joins():
    buffer = GuessBuffer([1, 2, 3])
    assert buffer.join(piece([1, 2, 3], 3, [7, 8]), window=8, overlapped=False).num_joined == 2
    assert buffer.token_ids == [7, 8]


def test_a_piece_that_follows_earlier_guesses_joins():
    buffer = GuessBuffer([1, 2, 3])
    buffer.join(piece([1, 2, 3], 3, [7]), 8, False)
    buffer.join(piece([1, 2, 3, 7], 4, [8]), 8, False)
    assert buffer.token_ids == [7, 8]


def test_a_piece_made_for_another_text_is_stale():
    buffer = GuessBuffer([1, 2, 3])
    joined = buffer.join(piece([1, 2, 4], 3, [7]), 8, False)
    assert (joined.num_joined, joined.stale, joined.num_stale) == (0, "mismatch", 1)


def test_a_late_piece_whose_head_was_committed_meanwhile_gives_its_rest():
    buffer = GuessBuffer([1, 2, 3])
    buffer.commit([7])
    assert buffer.join(piece([1, 2, 3], 3, [7, 8, 9]), 8, True).num_joined == 2
    assert (buffer.token_ids, buffer.overlapped) == ([8, 9], [True, True])


def test_a_late_piece_that_was_wrong_is_stale():
    buffer = GuessBuffer([1, 2, 3])
    buffer.commit([6])
    assert buffer.join(piece([1, 2, 3], 3, [7, 8]), 8, False).stale == "late"
    assert len(buffer) == 0


def test_the_same_piece_twice_counts_once():
    buffer = GuessBuffer([1, 2])
    buffer.join(piece([1, 2], 2, [3, 4]), 8, False)
    assert buffer.join(piece([1, 2], 2, [3, 4]), 8, False).stale == "duplicate"
    assert buffer.token_ids == [3, 4]


def test_a_piece_beyond_a_gap_is_stale():
    buffer = GuessBuffer([1, 2])
    assert buffer.join(piece([1, 2, 3], 3, [4]), 8, False).stale == "gap"
    assert len(buffer) == 0


def test_no_more_than_the_window_is_held():
    buffer = GuessBuffer([1])
    joined = buffer.join(piece([1], 1, [2, 3, 4, 5]), window=3, overlapped=False)
    assert (joined.num_joined, joined.stale, joined.num_stale) == (3, "over_window", 1)


def test_a_contradicting_commit_drops_all():
    buffer = GuessBuffer([1])
    buffer.join(piece([1], 1, [2, 3, 4]), 8, False)
    assert buffer.commit([2, 9]) == Settled(foreseen=False, num_dropped=2)
    assert len(buffer) == 0
    assert buffer.join(piece([1, 2, 9], 3, [5]), 8, False).num_joined == 1


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_buffer_is_always_what_follows_the_text_and_agrees_with_it(data):
    """Model: a piece fits iff the text it was made for is a prefix of committed + buffered and it agrees where they overlap."""
    tokens = st.integers(0, 2)
    text = data.draw(st.lists(tokens, min_size=1, max_size=4))
    buffer, base, buffered = GuessBuffer(list(text)), len(text), []
    for _ in range(data.draw(st.integers(1, 15))):
        if data.draw(st.booleans()):
            chain = text + buffered
            start = data.draw(st.integers(0, len(chain) + 1))
            before = [*chain, 0][:start] if data.draw(st.booleans()) else data.draw(st.lists(tokens, min_size=start, max_size=start))
            guesses = data.draw(st.lists(tokens, min_size=1, max_size=4))
            buffer.join(piece(before, start, guesses), 8, False)
            size = max(0, len(chain) - start)
            if base <= start <= len(chain) and before == chain[:start] and guesses[:size] == chain[start : start + len(guesses)]:
                buffered = (buffered + guesses[size:])[:8]
        else:
            emitted = data.draw(st.lists(tokens, min_size=1, max_size=4))
            buffer.commit(emitted)
            agrees = buffered[: len(emitted)] == emitted[: len(buffered)]
            buffered = buffered[len(emitted) :] if agrees else []
            text = text + emitted
        assert buffer.token_ids == buffered
        assert buffer.committed_length == len(text)
        assert len(buffer.token_ids) == len(buffer.distributions) == len(buffer.overlapped)
