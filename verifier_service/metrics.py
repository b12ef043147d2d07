"""The verifier's Prometheus metrics, on a registry that is passed in. docs/metrics.md says what each one means.

Fed with plain numbers: `StepStats` after each step, `LinkCounters` now and then, and what a `RequestLedger` counts. It does not
know when or where they are scraped.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Gauge

from verifier_service.instruments import OTHER, PREFIX, Cumulative, Maker, raise_all
from verifier_service.request import FinishReason
from verifier_service.stats import WAIT_OUTCOMES, Calibration, Decisions, LinkCounters, StepStats

STALE_REASONS = ("late", "mismatch", "gap", "duplicate", "unknown_sequence", "over_window", OTHER)
REJECTED_REASONS = ("too_long", "bad_shape", "bad_probability", "bad_frame", OTHER)
FAILURE_REASONS = (
    "INVALID_REQUEST",
    "OVERLOADED",
    "LOADING",
    "DRAINING",
    "ENGINE_STALLED",
    "SLOW_READER",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    OTHER,
)
BLOCK_STATES = ("free", "used", "cached")
LINK_KINDS = (("received", "proposals"), ("received", OTHER), ("sent", "step"), ("sent", OTHER))  # direction, kind

# vLLM's bounds; those of the inter-token latency go on below its 10 ms, where accepted tokens lie.
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_INTER_TOKEN_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_QUEUE_S = (0.001, 0.01, 0.1, *_REQUEST_S)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_WINDOWS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHANCES = tuple(tenth / 10 for tenth in range(1, 11))
_LINK_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class VerifierMetrics:
    """All metrics of a verifier. Every label value that can occur exists from the start, so that rates see a zero.

    Args:
        registry: where they are registered.
        model_name: the target, as a label.
        max_draft_tokens: most draft tokens scored in one step for one request, K: positions are 0..K-1.
        engine: number of the engine, as a label.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str, max_draft_tokens: int, engine: str = "0") -> None:
        make = self._maker = Maker(registry, {"model_name": model_name, "engine": engine})
        positions = [str(position) for position in range(max_draft_tokens)]
        self._registry = registry
        self._drafts = make.counter("spec_decode_num_drafts", "Rounds: verifications of one sequence with at least one draft token.")
        self._drafted = make.counter("spec_decode_num_draft_tokens", "Draft tokens scored at positions up to the one that ended the request.")
        self._accepted = make.counter("spec_decode_num_accepted_tokens", "Of those, the emitted ones.")
        self._drafted_at = make.counters(
            "spec_decode_num_draft_tokens_per_pos", "Draft tokens scored, by position in the round.", "position", positions
        )
        self._accepted_at = make.counters(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position in the round.", "position", positions
        )
        self._discarded = make.counter("discarded_draft_tokens", "Draft tokens scored beyond the end of their request; part of no rate.")
        self._overlapped = make.counter("overlapped_drafts", "Rounds with guesses that arrived while the step before was being computed.")
        self._acceptance_length = make.histogram("acceptance_length", "1 + accepted tokens, per round.", range(1, max_draft_tokens + 2))

        self._first_token = make.histogram("time_to_first_token_seconds", "Arrival of a request to its first token.", _FIRST_TOKEN_S)
        self._inter_token = make.histogram(
            "inter_token_latency_seconds", "Gap between two outputs, shared out to the later one's tokens.", _INTER_TOKEN_S
        )
        self._latency = make.histogram("e2e_request_latency_seconds", "Arrival of a request to its regular end.", _REQUEST_S)
        self._queue = make.histogram("request_queue_time_seconds", "Arrival of a request to its first step.", _QUEUE_S)
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens of requests that have had output.")
        self._generation_tokens = make.counter("generation_tokens", "Tokens delivered; resumed ones are not delivered again.")
        reasons = [reason.value for reason in FinishReason]
        self._success = make.counters("request_success", "Requests that ended as they should, by reason.", "finished_reason", reasons)
        self._failed = make.counters("requests_failed", "Requests that ended otherwise, by reason.", "reason", FAILURE_REASONS)

        self._step = make.histogram("verify_step_seconds", "Engine steps, from schedule to commit.", _STEP_S)
        self._wait = make.histogram("draft_wait_seconds", "Time that a step waited for guesses.", _LINK_S)
        self._predicted = make.counter("predicted_step_seconds", "What the steps were expected to take, summed up.")
        self._predicted_actual = make.counter("predicted_step_actual_seconds", "What the same steps took.")
        self._allotted = make.histogram(
            "allotted_draft_tokens", "Draft tokens scored, per sequence and step of a decode, none included.", range(max_draft_tokens + 1)
        )
        self._windows = make.histogram("granted_window_tokens", "Windows granted to draft services, per sequence and step.", _WINDOWS)
        self._bounds = make.histogram("acceptance_lower_bound", "Chance of acceptance that guesses were scored by, per sequence and step.", _CHANCES)
        self._waits = make.counters("draft_waits", "Waits for guesses that were begun, by how they ended.", "outcome", WAIT_OUTCOMES)
        self._wait_seconds = make.counters("draft_waits_seconds", "What they took.", "outcome", WAIT_OUTCOMES)
        self._rows = make.counters(
            "step_tokens", "Tokens run through the target: of prompts, or of decoding with its guesses.", "kind", ("prefill", "decode")
        )
        self._running = make.gauge("num_requests_running", "Requests that hold KV blocks.")
        self._waiting = make.gauge("num_requests_waiting", "Requests that hold none yet.")
        self._preemptions = make.counter("num_preemptions", "Times that a request lost its KV blocks to others.")
        self._prefix_queries = make.counter("prefix_cache_queries", "Prompt tokens of requests that have begun to run.")
        self._prefix_hits = make.counter("prefix_cache_hits", "Of those, the tokens whose KV was there from an earlier request.")
        self._blocks = make.gauges("kv_blocks", "KV blocks, by state.", "state", BLOCK_STATES)
        self._step_age = make.gauge("engine_step_age_seconds", "Seconds since the engine thread last showed itself.")

        self._round_trip = make.histogram("link_round_trip_seconds", "Round trips of heartbeats to draft services.", _LINK_S)
        self._link_bytes = make.pairs("link_bytes", "Bytes of messages on links to draft services.", ("direction", "kind"), LINK_KINDS)
        self._link_messages = make.pairs("link_messages", "Messages on links to draft services.", ("direction", "kind"), LINK_KINDS)
        self._drafters = make.gauge("drafters", "Attached draft services.")
        self._suspended = make.gauge("drafters_suspended", "Of those, the ones that are not asked because they do not answer.")
        self._links: dict[str, Cumulative] = {
            "received": Cumulative(make.counter("received_guesses", "Guesses that arrived from draft services.")),
            "overlapped": Cumulative(make.counter("overlapped_guesses", "Of those, the ones that arrived while a step was being computed.")),
            "dropped": Cumulative(make.counter("dropped_guesses", "Guesses dropped because committed tokens contradicted them.")),
        }
        stale = make.counters("draft_stale", "Guesses that fitted nothing, by reason.", "reason", STALE_REASONS)
        rejected = make.counters("rejected_proposals", "Proposals refused as malformed, by reason.", "reason", REJECTED_REASONS)
        self._stale = {reason: Cumulative(child) for reason, child in stale.items()}
        self._rejected = {reason: Cumulative(child) for reason, child in rejected.items()}

    def set_build_info(self, *, version: str, protocol_revision: str, model: str, tokenizer: str, dtype: str, device: str) -> None:
        """Tells what runs here, once; `tokenizer` is a fingerprint or its beginning."""
        labels = {
            "version": version,
            "protocol_revision": protocol_revision,
            "model": model,
            "tokenizer": tokenizer,
            "dtype": dtype,
            "device": device,
        }
        Gauge(f"{PREFIX}build_info", "What runs here; always 1.", tuple(labels), registry=self._registry).labels(**labels).set(1)

    def set_calibration(self, calibration: Calibration) -> None:
        """Tells what was measured at the start, once."""
        scorer = self._maker.family("scorer_info", "The scorer in use; always 1.", "scorer")
        scorer(calibration.scorer).set(1)
        costs = self._maker.family("calibrated_step_seconds", "What a step of so many tokens took at the start.", "tokens")
        for rows, seconds in calibration.points.items():
            costs(str(rows)).set(seconds)
        compared = self._maker.family("calibrated_scorer_seconds", "What one sequence with K guesses took at the start.", "scorer")
        for name, seconds in calibration.scorer_seconds.items():
            compared(name).set(seconds)

    def watch_engine(self, age_s: Callable[[], float]) -> None:
        """Reads the engine's age in seconds at each scrape."""
        self._step_age.set_function(age_s)

    def observe_step(self, stats: StepStats) -> None:
        """Takes the numbers of one step."""
        if stats.decode_rows or stats.prefill_tokens:
            self._step.observe(stats.seconds)
            self._rows["prefill"].inc(stats.prefill_tokens)
            self._rows["decode"].inc(stats.decode_rows)
        if stats.decode_rows:
            self._wait.observe(stats.waited_seconds)
        self._observe_decisions(stats.decisions, stats.seconds)
        for seconds in stats.queue_seconds:
            self._queue.observe(seconds)
        self._preemptions.inc(stats.preempted)
        self._prefix_queries.inc(stats.queried_tokens)
        self._prefix_hits.inc(stats.cached_tokens)
        self.set_occupancy(stats.running, stats.waiting, stats.free_blocks, stats.used_blocks, stats.cached_blocks)

    def _observe_decisions(self, decisions: Decisions, seconds: float) -> None:
        for count in decisions.allotted:
            self._allotted.observe(count)
        for window in decisions.windows:
            self._windows.observe(window)
        for bound in decisions.acceptance_bounds:
            self._bounds.observe(bound)
        if decisions.predicted_seconds is not None:
            self._predicted.inc(decisions.predicted_seconds)
            self._predicted_actual.inc(seconds)
        if decisions.wait is not None:
            outcome, waited_seconds = decisions.wait
            self._waits[outcome].inc()
            self._wait_seconds[outcome].inc(waited_seconds)

    def set_occupancy(self, running: int, waiting: int, free_blocks: int, used_blocks: int, cached_blocks: int) -> None:
        """Tells how full the engine is, where no step does: before the first one, and after a cancellation that ends the work."""
        self._running.set(running)
        self._waiting.set(waiting)
        for state, num_blocks in zip(BLOCK_STATES, (free_blocks, used_blocks, cached_blocks), strict=True):
            self._blocks[state].set(num_blocks)

    def observe_links(self, counters: Iterable[LinkCounters], attached: int, suspended: int) -> None:
        """Takes the counters of all links.

        Args:
            counters: of every link there has ever been, in any grouping: their sum only grows, however links come and go.
            attached: draft services attached now.
            suspended: of those, the ones whose circuit is open.
        """
        total = LinkCounters()
        for link in counters:
            # The engine thread goes on counting: `dict` copies at one stroke, an iteration over the live counter might be disturbed.
            copied = LinkCounters(link.received, link.joined_while_computing, link.dropped)
            copied.stale.update(dict(link.stale))
            copied.rejected.update(dict(link.rejected))
            total.add(copied)
        self._links["received"].raise_to(total.received)
        self._links["overlapped"].raise_to(total.joined_while_computing)
        self._links["dropped"].raise_to(total.dropped)
        raise_all(self._stale, total.stale)
        raise_all(self._rejected, total.rejected)
        self._drafters.set(attached)
        self._suspended.set(suspended)

    def observe_round_trip(self, seconds: float) -> None:
        """Takes a heartbeat's round trip."""
        self._round_trip.observe(seconds)

    def count_link_bytes(self, direction: str, kind: str, size: int) -> None:
        """Takes the size of a message: `received` or `sent`, and which arm it is; those that are neither guesses nor steps are `other`."""
        arm = (direction, kind) if (direction, kind) in self._link_bytes else (direction, OTHER)
        self._link_bytes[arm].inc(size)
        self._link_messages[arm].inc()

    def count_prompt(self, num_tokens: int) -> None:
        """See `RequestObserver`."""
        self._prompt_tokens.inc(num_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """See `RequestObserver`."""
        self._first_token.observe(seconds)

    def observe_tokens(self, num_tokens: int, seconds_per_token: float | None) -> None:
        """See `RequestObserver`."""
        self._generation_tokens.inc(num_tokens)
        if seconds_per_token is not None:
            for _ in range(num_tokens):
                self._inter_token.observe(seconds_per_token)

    def observe_round(self, drafted: int, accepted: int, overlapped: bool) -> None:
        """See `RequestObserver`."""
        self._drafts.inc()
        self._drafted.inc(drafted)
        self._accepted.inc(accepted)
        for position in range(drafted):
            self._drafted_at[str(position)].inc()
        for position in range(accepted):
            self._accepted_at[str(position)].inc()
        self._acceptance_length.observe(1 + accepted)
        if overlapped:
            self._overlapped.inc()

    def count_discarded(self, num_tokens: int) -> None:
        """See `RequestObserver`."""
        self._discarded.inc(num_tokens)

    def observe_finish(self, reason: FinishReason, seconds: float) -> None:
        """See `RequestObserver`."""
        self._success[reason.value].inc()
        self._latency.observe(seconds)

    def count_failure(self, reason: str) -> None:
        """See `RequestObserver`; an unknown reason is counted as `other`, so that no peer can make label values."""
        self._failed.get(reason, self._failed[OTHER]).inc()
