"""What a live request draws with, and who may know it."""

from shared.noise import noise_key
from shared.sampling import Mode, SamplingParams
from verifier_service.generation import new_generation
from verifier_service.request import Request, Stopping

SEED = 7


def generation(mode: Mode, temperature: float = 1.0, nonce: int = 0):
    request = Request("r", (1, 2, 3), SamplingParams(temperature=temperature), Stopping(8), SEED, mode=mode)
    return new_generation(1, request, vocab_size=64, nonce=nonce, now=0.0)


def test_in_coupled_mode_the_drafter_has_the_noise_of_the_target():
    coupled = generation(Mode.COUPLED)
    assert coupled.draft_seed == SEED
    assert coupled.picks(0)[0].key == noise_key(SEED)
    assert coupled.rejection_keys is None


def test_in_rejection_mode_the_drafter_learns_neither_the_seed_nor_a_key():
    by_ratio = generation(Mode.REJECTION)
    keys = by_ratio.rejection_keys
    assert keys is not None
    assert len({SEED, noise_key(SEED), by_ratio.draft_seed, keys.accept, keys.residual, keys.plain}) == 6


def test_a_second_attempt_in_rejection_mode_draws_anew():
    first, second = (generation(Mode.REJECTION, nonce=nonce) for nonce in (1, 2))
    assert first.draft_seed != second.draft_seed
    assert first.rejection_keys is not None
    assert second.rejection_keys is not None
    streams = [(keys.accept, keys.residual, keys.plain) for keys in (first.rejection_keys, second.rejection_keys)]
    assert not set(streams[0]) & set(streams[1])


def test_greedy_requests_of_rejection_mode_need_no_ratio():
    greedy = generation(Mode.REJECTION, temperature=0.0)
    assert greedy.rejection_keys is None
    assert greedy.draft_seed != SEED  # it never leaves the verifier in this mode
