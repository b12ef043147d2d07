"""Rows to be picked from, short to write."""

from shared.noise import noise_key
from shared.sampling import Pick, SamplingParams, TokenRules


def make_pick(sampling=None, *, seed=1, committed=(1, 2, 3), guesses=(), prompt_length=2, vocab_size=10**6, suppressed=(), until=0):
    rules = TokenRules(sampling or SamplingParams(), prompt_length, vocab_size, suppressed, until)
    return Pick(rules, noise_key(seed), committed, guesses)
