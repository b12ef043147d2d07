"""The stand-ins for both models: what they say and how long they take is what they were told, however the services use them."""

import itertools
from collections.abc import Iterator

import pytest

from draft_service.drafter import Drafter
from draft_service.stand_in import StandInProposer
from shared.config import ConfigError, load
from shared.engine.forward_batch import Span
from shared.engine.stand_in import StandInRunner, stand_in_pool
from shared.sampling import Mode, SamplingParams
from shared.simulation import VOCAB_SIZE, Simulation, next_id, parse, wrong_id
from shared.stand_in_tokenizer import stand_in_tokenizer
from tests.support.virtual_pair import Clock, VirtualPair, delay
from verifier_service.config import VerifierConfig
from verifier_service.request import Request, Stopping

SIMULATION = Simulation(target_ms=30.0, row_ms=0.1, draft_ms=2.0, draft_seq_ms=0.02, lowest_acceptance=0.7, highest_acceptance=0.9)
NUM_TOKENS = 150
PROMPT = (5, 6, 7)
SEEDS = (11, 12, 13)


class Sleeper:
    """Sleeps on a virtual clock, and remembers for how long."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.slept: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.now += seconds


def run_pair(max_draft_tokens: int, away_s: float, window: int = 32, mode: Mode = Mode.COUPLED, temperature: float = 0.0, simulation=SIMULATION):
    def runner(clock: Clock) -> StandInRunner:
        return StandInRunner(simulation, Sleeper(clock), clock)

    model = StandInRunner(simulation).model
    pair = VirtualPair(model, num_blocks=400, max_draft_tokens=max_draft_tokens, window=window, make_runner=runner)
    clock = Clock()
    proposer = StandInProposer(simulation, Sleeper(clock), clock)
    pair.attach(Drafter(proposer, 16, clock), clock, to_drafter=delay(away_s), to_verifier=delay(away_s))
    sampling = SamplingParams(temperature=temperature)
    requests = [
        Request(f"r{seed}", PROMPT, sampling, Stopping(NUM_TOKENS), seed=seed, mode=mode, max_draft_tokens=max_draft_tokens) for seed in SEEDS
    ]
    pair.run(*requests)
    return pair


def outcomes(pair: VirtualPair, seed: int) -> Iterator[tuple[int, bool]]:
    """(position, whether it was right) of every guess of a sequence that was tested: those up to the first wrong one."""
    position = len(PROMPT)
    for emission in pair.emissions:
        if emission.request_id == f"r{seed}":
            yield from ((position + index, True) for index in range(emission.accepted))
            if emission.accepted < emission.drafted:
                yield position + emission.accepted, False
            position += len(emission.token_ids)


@pytest.mark.parametrize(
    ("max_draft_tokens", "away_s", "window"), [(1, 0.0005, 32), (4, 0.0005, 4), (8, 0.0005, 32), (8, 0.01, 32), (16, 0.025, 32), (4, 0.1, 8)]
)
def test_a_guess_is_right_by_its_coin_whatever_the_number_of_guesses_and_their_lateness(max_draft_tokens, away_s, window):
    pair = run_pair(max_draft_tokens, away_s, window)
    for seed in SEEDS:
        tested = list(outcomes(pair, seed))
        assert tested
        assert [right for _, right in tested] == [SIMULATION.is_right(seed, position) for position, _ in tested]


def test_the_comparison_with_the_coin_would_notice_another_coin():
    """Negative control: the outcomes of one sequence are not the coins of another."""
    tested = list(outcomes(run_pair(8, 0.01), SEEDS[0]))
    assert [right for _, right in tested] != [SIMULATION.is_right(SEEDS[1], position) for position, _ in tested]


@pytest.mark.parametrize(("mode", "temperature"), [(Mode.COUPLED, 0.0), (Mode.COUPLED, 1.0), (Mode.REJECTION, 1.0)])
def test_the_text_is_the_target_stand_ins_own_in_every_mode(mode, temperature):
    pair = run_pair(8, 0.01, mode=mode, temperature=temperature)
    said = list(PROMPT)
    for _ in range(NUM_TOKENS):
        said.append(next_id(said[-1], len(said)))
    assert set(map(tuple, pair.text.values())) == {tuple(said[len(PROMPT) :])}
    assert sum(emission.accepted for emission in pair.emissions) > 100


def test_coins_fall_as_often_as_they_are_said_to():
    """20,000 coins at 0.8: within five standard errors, a false alarm has p < 1e-6. Neighbours are independent: so is their product."""
    simulation = parse("acceptance=0.8")
    coins = [simulation.is_right(seed, position) for seed in range(100) for position in range(200)]
    count = len(coins)
    assert abs(sum(coins) / count - 0.8) < 5 * (0.16 / count) ** 0.5
    both = sum(a and b for a, b in itertools.pairwise(coins)) / (count - 1)
    assert abs(both - 0.64) < 10 * (0.64 * 0.36 / count) ** 0.5


def test_sequences_with_consecutive_seeds_are_spread_evenly():
    simulation = parse("acceptance=0.5:0.9")
    for first in (0, 1000):
        acceptances = sorted(simulation.acceptance(seed) for seed in range(first, first + 16))
        assert 0.5 <= acceptances[0] < 0.56
        assert 0.84 < acceptances[-1] <= 0.9
        assert max(later - earlier for earlier, later in itertools.pairwise(acceptances)) < 0.07  # evenly: 0.027


def test_passes_take_the_time_that_they_are_told():
    clock = Clock()
    sleeper = Sleeper(clock)
    runner = StandInRunner(SIMULATION, sleeper, clock)
    logits = runner.forward([Span((4, 5, 6), 0, (0,), 1), Span((7,), 9, (1,), 1), Span((8, 9), 3, (2,), 2)])
    assert sleeper.slept == pytest.approx([0.030 + 6 * 0.0001])
    assert logits.argmax(-1).tolist() == [next_id(6, 3), next_id(7, 10), next_id(8, 4), next_id(9, 5)]
    assert logits.shape == (4, VOCAB_SIZE)
    assert runner.num_forwards == 1


def test_a_wrong_guess_is_never_the_right_one_and_both_are_letters():
    tokenizer = stand_in_tokenizer()
    for token_id in range(VOCAB_SIZE):
        right, wrong = next_id(token_id, 77), wrong_id(token_id, 77)
        assert right != wrong
        assert tokenizer.decode([right, wrong]).islower()


def test_every_text_has_tokens_and_comes_back():
    tokenizer = stand_in_tokenizer()
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界 🙂")) == "Grüße, 世界 🙂"
    assert len(tokenizer.encode("hello")) == 5
    assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant: "


def test_a_pool_of_the_stand_in_holds_what_it_is_told():
    assert stand_in_pool(SIMULATION, 10, 16, 0).max_model_len == 160
    assert stand_in_pool(SIMULATION, 0, 16, 500).max_model_len == 500
    assert stand_in_pool(SIMULATION, 0, 16, 500).allocator.num_free > 1000


def test_a_setting_that_is_no_simulation_stops_a_service_before_it_starts():
    assert parse("") == Simulation()
    assert load(VerifierConfig, ["--simulate", "target-ms=5,acceptance=0.5:0.9"]).simulate
    for text in ("target-ms", "rtt-ms=5", "acceptance=2", "target-ms=-1", "draft-ms=nan"):
        with pytest.raises(ConfigError, match="--simulate: "):
            load(VerifierConfig, ["--simulate", text])
