import asyncio
import re
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from draft_service.stats import DrafterStats
from tests.support.scrapes import COMMON, MAX_DRAFT_TOKENS, Clock, Scrape, drafter, serving, verifier
from verifier_service.ledger import RequestLedger
from verifier_service.metrics import LINK_KINDS
from verifier_service.request import Emission
from verifier_service.stats import WAIT_OUTCOMES, Calibration, Decisions, LinkCounters, StepStats

DOCUMENT = Path(__file__).parent.parent / "docs" / "metrics.md"


# --- Steps and links ---


def _step(**changes: float | tuple[float, ...] | Decisions) -> StepStats:
    plain = {"seconds": 0.02, "waited_seconds": 0.0, "decode_rows": 5, "prefill_tokens": 0, "running": 2, "waiting": 1, "preempted": 0}
    return StepStats(**(plain | {"free_blocks": 7, "used_blocks": 3} | changes))  # type: ignore[arg-type]


def test_steps_are_counted_and_their_state_shown() -> None:
    metrics, scrape = verifier()
    metrics.observe_step(_step(prefill_tokens=11, preempted=2, waited_seconds=0.004, queue_seconds=(0.5, 1.5)))
    metrics.observe_step(_step(seconds=0.04, running=1, waiting=0, free_blocks=8, used_blocks=2))
    assert scrape("verify_step_seconds_count") == 2
    assert scrape("verify_step_seconds_sum") == pytest.approx(0.06)
    assert scrape("draft_wait_seconds_sum") == pytest.approx(0.004)
    assert scrape("request_queue_time_seconds_sum") == pytest.approx(2.0)
    assert scrape("step_tokens_total", kind="prefill") == 11
    assert scrape("step_tokens_total", kind="decode") == 10
    assert scrape("num_preemptions_total") == 2
    assert (scrape("num_requests_running"), scrape("num_requests_waiting")) == (1, 0)
    assert [scrape("kv_blocks", state=state) for state in ("free", "used", "cached")] == [8, 2, 0]


def test_prompt_tokens_found_in_the_prefix_cache_are_counted() -> None:
    metrics, scrape = verifier()
    metrics.observe_step(_step(queried_tokens=40, cached_tokens=32, cached_blocks=4))
    metrics.observe_step(_step(queried_tokens=10))
    assert (scrape("prefix_cache_queries_total"), scrape("prefix_cache_hits_total")) == (50, 32)
    metrics.observe_step(_step(cached_blocks=4))
    assert scrape("kv_blocks", state="cached") == 4


def test_every_decision_about_guesses_is_shown() -> None:
    metrics, scrape = verifier()
    decided = Decisions((0, 2, 2), (32, 0, 5), (0.5, 0.9), predicted_seconds=0.03, wait=("in_vain", 0.004))
    metrics.observe_step(_step(seconds=0.04, decisions=decided))
    metrics.observe_step(_step(decisions=Decisions(wait=("served", 0.001))))
    assert (scrape("allotted_draft_tokens_count"), scrape("allotted_draft_tokens_sum")) == (3, 4)
    assert (scrape("granted_window_tokens_count"), scrape("granted_window_tokens_sum")) == (3, 37)
    assert scrape("acceptance_lower_bound_sum") == pytest.approx(1.4)
    assert scrape("predicted_step_seconds_total") == pytest.approx(0.03)
    assert scrape("predicted_step_actual_seconds_total") == pytest.approx(0.04)
    waits = {outcome: scrape("draft_waits_total", outcome=outcome) for outcome in WAIT_OUTCOMES}
    assert waits == {"served": 1, "overdue": 0, "in_vain": 1, "cut_short": 0}
    assert scrape("draft_waits_seconds_total", outcome="in_vain") == pytest.approx(0.004)


def test_what_was_measured_at_the_start_is_shown() -> None:
    metrics, scrape = verifier()
    metrics.set_calibration(Calibration("multi_query", {"expanded": 0.3, "multi_query": 0.2}, {1: 0.1, 8: 0.2}))
    assert scrape("scorer_info", scorer="multi_query") == 1
    assert scrape("calibrated_step_seconds", tokens="8") == pytest.approx(0.2)
    assert scrape("calibrated_scorer_seconds", scorer="expanded") == pytest.approx(0.3)


def test_a_step_that_ran_nothing_is_no_step() -> None:
    metrics, scrape = verifier()
    metrics.observe_step(_step(decode_rows=0, running=0))
    assert scrape("verify_step_seconds_count") == 0
    assert scrape("num_requests_running") == 0


def test_age_of_the_engine_is_read_at_each_scrape() -> None:
    metrics, scrape = verifier()
    clock = Clock(0.0)
    metrics.watch_engine(clock)
    clock.now = 12.5
    assert scrape("engine_step_age_seconds") == 12.5


def test_messages_and_bytes_of_links_are_counted_by_direction_and_kind() -> None:
    metrics, scrape = verifier()
    messages = [("received", "proposals", 70), ("received", "hello", 9), ("sent", "step", 40), ("sent", "step", 2), ("sent", "new", 1)]
    for direction, kind, size in messages:
        metrics.count_link_bytes(direction, kind, size)
    counted = {pair: scrape("link_bytes_total", direction=pair[0], kind=pair[1]) for pair in LINK_KINDS}
    assert counted == {("received", "proposals"): 70, ("received", "other"): 9, ("sent", "step"): 42, ("sent", "other"): 1}
    messages_seen = {pair: scrape("link_messages_total", direction=pair[0], kind=pair[1]) for pair in LINK_KINDS}
    assert messages_seen == {("received", "proposals"): 1, ("received", "other"): 1, ("sent", "step"): 2, ("sent", "other"): 1}


# --- Calls and the event loop ---


def test_calls_are_counted_by_method_and_status_and_no_caller_makes_label_values() -> None:
    metrics, scrape = serving()
    generate = {"grpc_service": "outrider.v1.VerifierService", "grpc_method": "Generate"}
    metrics.observe_call("/outrider.v1.VerifierService/Generate", grpc.StatusCode.OK, 2.0)
    metrics.observe_call("/outrider.v1.VerifierService/Generate", grpc.StatusCode.CANCELLED, 1.0)
    before = _num_samples(scrape)
    metrics.observe_call("/outrider.v1.VerifierService/Genrate", grpc.StatusCode.UNIMPLEMENTED, 1.0)
    metrics.observe_call("/grpc.health.v1.Health/Check", grpc.StatusCode.OK, 1.0)
    assert _num_samples(scrape) == before
    assert scrape("grpc_server_handled_total", **generate, grpc_code="OK") == 1
    assert scrape("grpc_server_handled_total", **generate, grpc_code="Canceled") == 1
    assert scrape("grpc_server_handled_total", **generate, grpc_code="DeadlineExceeded") == 0
    assert scrape("grpc_server_handling_seconds_sum", **generate) == 3


async def test_a_late_event_loop_is_seen() -> None:
    clock = Clock(0.0)
    metrics, scrape = serving(clock)
    task = asyncio.create_task(metrics.watch_loop())
    await asyncio.sleep(0)  # it has read the clock and sleeps
    clock.now = 3.0
    async with asyncio.timeout(30):
        while not scrape("event_loop_lag_seconds_count"):  # noqa: ASYNC110 - the task tells nobody
            await asyncio.sleep(0.01)
    task.cancel()
    assert scrape("event_loop_lag_seconds_sum") >= 2.9


def test_counters_of_links_survive_their_coming_and_going() -> None:
    metrics, scrape = verifier()
    gone, first, second = LinkCounters(), LinkCounters(received=10, dropped=2), LinkCounters(received=1)
    first.stale["late"] = 3
    first.rejected["too_long"] = 1
    metrics.observe_links([gone, first, second], attached=2, suspended=1)
    assert (scrape("received_guesses_total"), scrape("drafters"), scrape("drafters_suspended")) == (11, 2, 1)
    metrics.observe_links([gone, second], attached=1, suspended=0)  # read in the moment between leaving and being added up
    first.received += 5
    first.stale["gap"] = 1
    gone.add(first)
    metrics.observe_links([gone, second], attached=1, suspended=0)
    metrics.observe_links([gone, second], attached=1, suspended=0)
    assert scrape("received_guesses_total") == 16
    assert scrape("dropped_guesses_total") == 2
    assert scrape("draft_stale_total", reason="late") == 3
    assert scrape("draft_stale_total", reason="gap") == 1
    assert scrape("rejected_proposals_total", reason="too_long") == 1
    assert (scrape("drafters"), scrape("drafters_suspended")) == (1, 0)


def test_unknown_reasons_of_links_are_added_up_as_other() -> None:
    metrics, scrape = verifier()
    counters = LinkCounters()
    counters.stale.update({"new": 2, "newer": 3, "late": 1})
    metrics.observe_links([counters], 1, 0)
    metrics.observe_links([counters], 1, 0)
    assert scrape("draft_stale_total", reason="other") == 5
    assert scrape("draft_stale_total", reason="late") == 1


# --- The draft service ---


def test_totals_of_a_drafter_become_increments() -> None:
    metrics, scrape = drafter()
    stats = DrafterStats(sequences=3, steps=2, resyncs=1, declines=2, rests=3)
    for counter, total in ((stats.guesses_sent, 8), (stats.guesses_matched, 5), (stats.guesses_dropped, 2), (stats.guesses_doubted, 2)):
        counter["model"] = total
    stats.guesses_sent["ngram"] = 4
    stats.guesses_refuted["model"] = 1
    stats.proposer.catch_up_tokens = 40
    stats.proposer.free_blocks, stats.proposer.used_blocks = 6, 4
    metrics.observe(stats)
    metrics.observe(stats)
    stats.guesses_sent["model"] = 9
    metrics.observe(stats)
    of_model = [scrape(f"draft_guesses_{what}_total", proposer="model") for what in ("sent", "matched", "dropped", "refuted", "doubted")]
    assert of_model == [9, 5, 2, 1, 2]
    assert [scrape(f"draft_guesses_{what}_total", proposer="ngram") for what in ("sent", "matched")] == [4, 0]
    assert scrape("draft_rests_total") == 3
    assert (scrape("draft_resyncs_total"), scrape("draft_declines_total"), scrape("draft_catch_up_tokens_total")) == (1, 2, 40)
    assert (scrape("draft_sequences"), scrape("draft_kv_blocks", state="free"), scrape("draft_kv_blocks", state="used")) == (3, 6, 4)


def test_each_call_of_the_proposer_is_observed_and_one_without_a_model_feeds_nothing() -> None:
    metrics, scrape = drafter()
    for seconds, num_fed in ((0.3, 12), (0.1, 4), (0.1, 0)):
        metrics.observe_step(seconds, num_fed)
    assert (scrape("draft_step_seconds_count"), scrape("draft_forward_tokens_count")) == (3, 2)
    assert scrape("draft_step_seconds_sum") == pytest.approx(0.5)
    assert scrape("draft_forward_tokens_sum") == 16


def test_state_of_the_link_is_shown() -> None:
    metrics, scrape = drafter()
    assert scrape("draft_link_attached") == 0
    metrics.set_attached(True)
    assert scrape("draft_link_attached") == 1
    metrics.set_attached(False)
    metrics.count_reconnect("refused")
    metrics.count_reconnect("for the fun of it")
    metrics.observe_round_trip(0.02)
    assert scrape("draft_link_attached") == 0
    assert scrape("draft_reconnects_total", reason="refused") == 1
    assert scrape("draft_reconnects_total", reason="other") == 1
    assert scrape("draft_link_round_trip_seconds_count") == 1


# --- Names ---


def _num_samples(scrape: Scrape) -> int:
    return sum(len(family.samples) for family in scrape.registry.collect())


def _all_metrics() -> tuple[CollectorRegistry, CollectorRegistry, CollectorRegistry]:
    of_verifier, of_drafter, of_both = verifier(), drafter(), serving()
    of_verifier[0].set_build_info(version="1", protocol_revision="1", model="tiny", tokenizer="f", dtype="float64", device="cpu")
    of_verifier[0].set_calibration(Calibration("multi_query", {"expanded": 0.3, "multi_query": 0.2}, {1: 0.1}))
    of_drafter[0].set_build_info(version="1", protocol_revision="1", proposer="ngram", tokenizer="f")
    return of_verifier[1].registry, of_drafter[1].registry, of_both[1].registry


def _exported(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Own labels by metric name, as documented: counters with `_total`, histograms by their base name."""
    exported: dict[str, set[str]] = {}
    for family in registry.collect():
        name = family.name + "_total" * (family.type == "counter")
        assert family.samples, f"{name} has no child from the start"
        exported[name] = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
    return exported


def _documented(heading: str) -> dict[str, set[str]]:
    section = DOCUMENT.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(outrider_\w+)` \|([^|]*)\|", section, re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def test_every_metric_is_documented_with_its_labels_and_the_other_way_round() -> None:
    of_verifier, of_drafter, of_both = _all_metrics()
    assert _documented("Both services") == _exported(of_both)
    assert _documented("The verifier") == _exported(of_verifier)
    assert _documented("The draft service") == _exported(of_drafter)


def test_documented_queries_name_series_that_exist() -> None:
    samples = {sample.name for registry in _all_metrics() for family in registry.collect() for sample in family.samples}
    queried = [name for block in re.findall(r"```promql\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) for name in re.findall(r"outrider_\w+", block)]
    assert len(queried) >= 8
    assert set(queried) <= samples


def test_documented_label_values_are_the_exported_ones() -> None:
    rows = dict(re.findall(r"^\| `(outrider_\w+)` \|(.*)\|$", DOCUMENT.read_text(), re.MULTILINE))
    for registry in _all_metrics():
        for family in registry.collect():
            for sample in (sample for sample in family.samples if not sample.name.endswith("_created")):
                for label in {"reason", "state", "kind", "direction", "finished_reason"} & set(sample.labels):
                    value = sample.labels[label]
                    by_rule = value.isupper()  # reasons of errors are listed in protocol.md
                    assert by_rule or f"`{value}`" in rows[sample.name], f"{sample.name}: {value}"


def test_only_the_verifier_counts_acceptance_and_positions_exist_from_the_start() -> None:
    of_verifier, of_drafter, _ = _all_metrics()
    assert not [name for name in _exported(of_drafter) if not name.startswith("outrider_draft_")]
    scrape = Scrape(of_verifier, COMMON)
    for position in range(MAX_DRAFT_TOKENS):
        assert scrape("spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) == 0
    assert (
        of_verifier.get_sample_value("outrider_spec_decode_num_accepted_tokens_per_pos_total", COMMON | {"position": str(MAX_DRAFT_TOKENS)}) is None
    )


def test_a_verifier_without_speculation_has_metrics_too() -> None:
    metrics, scrape = verifier(max_draft_tokens=0)
    RequestLedger(metrics, Clock(), 1).record(Emission("r", (7,)))
    assert scrape("generation_tokens_total") == 1
