from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from shared.tokenizer import Tokenizer
from tests.support.scrapes import MAX_DRAFT_TOKENS, Clock, verifier
from tests.support.tiny_tokenizers import byte_level_backend, pretrained
from verifier_service.ledger import RequestLedger, Usage
from verifier_service.request import Emission, FinishReason
from verifier_service.text import TextStream

TOKENIZER = Tokenizer(pretrained(byte_level_backend()))
LETTERS = {letter: TOKENIZER.encode(letter)[-1] for letter in "abs"}


# --- Invariant 9: counters equal a replay of the recorded rounds ---


@dataclass(frozen=True)
class Round:
    """One verification as recorded: where it began in the output, and the guesses that were scored."""

    start: int
    guesses: tuple[int, ...]


def _play(target: list[int], guesses: list[list[int]], stop: list[str], max_tokens: int, ledger: RequestLedger) -> list[Round]:
    """Serves one request the way engine and servicer do, and records its rounds."""
    stream, start, rounds = TextStream(TOKENIZER, stop), 0, []
    for guess in guesses:
        rounds.append(Round(start, tuple(guess)))
        num_accepted = next((i for i, token_id in enumerate(guess) if token_id != target[start + i]), len(guess))
        room = max_tokens - start
        ends = num_accepted + 1 >= room
        num_emitted = room if ends else num_accepted + 1
        drafted = min(len(guess), num_emitted) if ends else len(guess)
        emission = Emission(
            "r",
            tuple(target[start : start + num_emitted]),
            accepted=min(num_accepted, num_emitted),
            drafted=drafted,
            discarded=len(guess) - drafted,
            finish=FinishReason.LENGTH if ends else None,
        )
        delta = stream.push(emission.token_ids)
        ledger.record(emission, delta.num_tokens_kept, delta.matched_stop is not None)
        start += delta.num_tokens_kept
        if delta.matched_stop is not None:
            ledger.finish(FinishReason.STOP_STRING)
            break
        if ends:
            ledger.finish(FinishReason.LENGTH)
            break
    return rounds


class Replay:
    """The same counts from the definitions: position by position, knowing only where the request ended."""

    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = self.discarded = self.generated = 0
        self.drafted_at: Counter[int] = Counter()
        self.accepted_at: Counter[int] = Counter()

    def add(self, target: list[int], rounds: list[Round], stop: list[str], max_tokens: int) -> None:
        last = rounds[-1]
        matching = next((i for i, token_id in enumerate(last.guesses) if token_id != target[last.start + i]), len(last.guesses))
        num_output = last.start + matching + 1
        texts = (TOKENIZER.decode(target[:count]) for count in range(1, num_output + 1))
        stopped_after = next((count for count, text in enumerate(texts, start=1) if any(string in text for string in stop)), None)
        ended_after = min(stopped_after or max_tokens, max_tokens)
        self.generated += min(num_output, ended_after)
        for verified in rounds:
            counted = [i for i in range(len(verified.guesses)) if verified.start + i < ended_after]
            accepted = [i for i in counted if list(verified.guesses[: i + 1]) == target[verified.start : verified.start + i + 1]]
            self.rounds += bool(counted)
            self.drafted += len(counted)
            self.accepted += len(accepted)
            self.discarded += len(verified.guesses) - len(counted)
            self.drafted_at.update(counted)
            self.accepted_at.update(accepted)


_letters = st.sampled_from(sorted(LETTERS.values()))


@st.composite
def _requests(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[str], int]:
    target = draw(st.lists(_letters, min_size=60, max_size=60))
    right = st.integers(0, MAX_DRAFT_TOKENS)
    guesses, start = [], 0
    for _ in range(draw(st.integers(1, 10))):
        guess = target[start : start + draw(right)] + draw(st.lists(_letters, max_size=2))
        guess = guess[:MAX_DRAFT_TOKENS]
        guesses.append(guess)
        start += next((i for i, token_id in enumerate(guess) if token_id != target[start + i]), len(guess)) + 1
    stop = draw(st.lists(st.text("abs", min_size=1, max_size=4), max_size=2))
    return target, guesses, stop, draw(st.integers(1, 50))


@settings(max_examples=150)
@given(requests=st.lists(_requests(), min_size=1, max_size=4))
def test_counters_equal_a_replay_of_the_recorded_rounds(requests: list[tuple[list[int], list[list[int]], list[str], int]]) -> None:
    metrics, scrape = verifier()
    replay, usages = Replay(), []
    for target, guesses, stop, max_tokens in requests:
        ledger = RequestLedger(metrics, Clock(), num_prompt_tokens=3)
        replay.add(target, _play(target, guesses, stop, max_tokens, ledger), stop, max_tokens)
        usages.append(ledger.usage)
    assert scrape("spec_decode_num_drafts_total") == replay.rounds == sum(usage.rounds for usage in usages)
    assert scrape("spec_decode_num_draft_tokens_total") == replay.drafted == sum(usage.drafted_tokens for usage in usages)
    assert scrape("spec_decode_num_accepted_tokens_total") == replay.accepted == sum(usage.accepted_tokens for usage in usages)
    assert scrape("discarded_draft_tokens_total") == replay.discarded
    assert scrape("generation_tokens_total") == replay.generated == sum(usage.generated_tokens for usage in usages)
    for position in range(MAX_DRAFT_TOKENS):
        assert scrape("spec_decode_num_draft_tokens_per_pos_total", position=str(position)) == replay.drafted_at[position]
        assert scrape("spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == replay.accepted_at[position]
    assert scrape("acceptance_length_count") == replay.rounds
    assert scrape("acceptance_length_sum") == replay.rounds + replay.accepted


# --- One request ---


def test_rejected_guesses_count_as_drafted_while_the_request_goes_on() -> None:
    metrics, scrape = verifier()
    RequestLedger(metrics, Clock(), 1).record(Emission("r", (7, 8), accepted=1, drafted=4), num_kept=2)
    assert scrape("spec_decode_num_draft_tokens_total") == 4
    assert scrape("discarded_draft_tokens_total") == 0


def test_a_stop_string_completed_by_the_last_token_discards_what_was_scored_after_it() -> None:
    metrics, scrape = verifier()
    ledger = RequestLedger(metrics, Clock(), 1)
    ledger.record(Emission("r", (7, 8), accepted=1, drafted=4), num_kept=2, stopped=True)
    assert scrape("spec_decode_num_draft_tokens_total") == 2
    assert scrape("discarded_draft_tokens_total") == 2
    assert ledger.usage == Usage(1, 2, rounds=1, drafted_tokens=2, accepted_tokens=1)


def test_tokens_that_come_after_the_end_are_no_round() -> None:
    metrics, scrape = verifier()
    ledger = RequestLedger(metrics, Clock(), 1)
    ledger.record(Emission("r", (7, 8, 9), accepted=2, drafted=3), num_kept=0)
    assert scrape("spec_decode_num_drafts_total") == 0
    assert scrape("discarded_draft_tokens_total") == 3
    assert ledger.usage == Usage(1, 0)


def test_times_of_a_request_are_shared_out_to_its_tokens() -> None:
    metrics, scrape = verifier()
    clock = Clock()
    ledger = RequestLedger(metrics, clock, num_prompt_tokens=5, num_resumed=2)
    clock.now += 0.5
    ledger.record(Emission("r", (7,)))
    clock.now += 0.3
    ledger.record(Emission("r", (7, 8, 9), accepted=2, drafted=2))
    clock.now += 0.1
    ledger.finish(FinishReason.LENGTH)
    assert scrape("time_to_first_token_seconds_sum") == pytest.approx(0.5)
    assert scrape("inter_token_latency_seconds_count") == 3
    assert scrape("inter_token_latency_seconds_sum") == pytest.approx(0.3)
    assert scrape("inter_token_latency_seconds_bucket", le="0.1") - scrape("inter_token_latency_seconds_bucket", le="0.075") == 3
    assert scrape("e2e_request_latency_seconds_sum") == pytest.approx(0.9)
    assert scrape("prompt_tokens_total") == 5
    assert scrape("generation_tokens_total") == 4  # those resumed were delivered by an earlier call
    assert ledger.usage.generated_tokens == 6


def test_tokens_that_come_with_the_first_have_no_gap() -> None:
    metrics, scrape = verifier()
    RequestLedger(metrics, Clock(), 1).record(Emission("r", (7, 8, 9)))
    assert scrape("time_to_first_token_seconds_count") == 1
    assert scrape("inter_token_latency_seconds_count") == 2
    assert scrape("inter_token_latency_seconds_sum") == 0


def test_a_request_ends_once() -> None:
    metrics, scrape = verifier()
    ledger = RequestLedger(metrics, Clock(), 1)
    ledger.finish(FinishReason.EOS)
    ledger.fail("CANCELLED")
    ledger.finish(FinishReason.EOS)
    assert scrape("request_success_total", finished_reason="eos") == 1
    assert scrape("requests_failed_total", reason="CANCELLED") == 0
    other = RequestLedger(metrics, Clock(), 1)
    other.fail("CANCELLED")
    other.finish(FinishReason.EOS)
    assert scrape("request_success_total", finished_reason="eos") == 1
    assert scrape("requests_failed_total", reason="CANCELLED") == 1
    assert scrape("e2e_request_latency_seconds_count") == 1


def test_a_reason_nobody_knows_makes_no_label() -> None:
    metrics, scrape = verifier()
    metrics.count_failure("WHATEVER A PEER SENDS")
    assert scrape("requests_failed_total", reason="other") == 1
    assert b"WHATEVER" not in generate_latest(scrape.registry)


def test_rounds_that_used_overlapped_guesses_are_counted() -> None:
    metrics, scrape = verifier()
    ledger = RequestLedger(metrics, Clock(), 1)
    ledger.record(Emission("r", (7, 8), accepted=1, drafted=1, overlapped=True))
    ledger.record(Emission("r", (7, 8), accepted=1, drafted=1))
    assert scrape("overlapped_drafts_total") == 1
