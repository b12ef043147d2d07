"""The draft service's Prometheus metrics, on a registry that is passed in. docs/metrics.md says what each one means.

Fed with plain numbers: `DrafterStats`, which only grow, now and then, what the drafter tells of each step, on its thread, and what the link's client
tells. Acceptance rates as users know them are not known here: what is scored is the verifier's choice, and only the verifier counts it. How often
each proposer is right is: matched / (matched + refuted).
"""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from draft_service.stats import DrafterStats

_PREFIX = "outrider_"
_OTHER = "other"

RECONNECT_REASONS = ("goodbye", "loading", "lost", "refused", "silent", "unreachable", _OTHER)
BLOCK_STATES = ("free", "used", "cached")

_STEP_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_FED_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LINK_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)

_GUESS_TOTALS = {  # of DrafterStats, by the proposer that made them
    "guesses_sent": "Guesses handed to the link.",
    "guesses_matched": "Of those, the ones that the target's tokens later equalled, scored or not.",
    "guesses_dropped": "Of those, the ones taken back: contradicted, rewound, or of a sequence that ended.",
    "guesses_refuted": "Of those, the ones that the target's token differed from, all guesses before them being right.",
    "guesses_doubted": "Of those sent, the ones after which drafting stopped, because the draft was not sure enough of them.",
}
_TOTALS = {  # of DrafterStats, then of its ProposerStats
    "rests": "Times that a sequence had nothing to add before its next commit: after a doubted guess, or because there was none to be made.",
    "resyncs": "Sequences asked for anew, because this side had lost track.",
    "declines": "Sequences refused.",
    "failures": "Calls of the proposer that failed by its own fault; the log says why.",
}
_PROPOSER_TOTALS = {
    "forwards": "Batched calls of the draft model.",
    "fed_tokens": "Tokens run through the draft model.",
    "catch_up_tokens": "Of those, the ones beyond one per sequence and call: prompts, and commits that had not been foreseen.",
    "unusable_rows": "Rows of logits that were not finite and gave no guess.",
}


class DraftMetrics:
    """All metrics of a draft service. Every label value that can occur exists from the start.

    Args:
        registry: where they are registered.
        makers: kinds of the proposers that make guesses here.
    """

    def __init__(self, registry: CollectorRegistry, makers: Sequence[str]) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"{_PREFIX}draft_{name}", text, registry=registry)

        self._registry = registry
        self._step = Histogram(
            f"{_PREFIX}draft_step_seconds", "Calls of the proposer: one guess more for every sequence.", buckets=_STEP_S, registry=registry
        )
        self._fed = Histogram(f"{_PREFIX}draft_forward_tokens", "Tokens of a call of the draft model.", buckets=_FED_TOKENS, registry=registry)
        self._totals = {name: counter(name, text) for name, text in (_TOTALS | _PROPOSER_TOTALS).items()}
        by_maker = {name: Counter(f"{_PREFIX}draft_{name}", text, ("proposer",), registry=registry) for name, text in _GUESS_TOTALS.items()}
        self._guesses = {(name, maker): total.labels(proposer=maker) for name, total in by_maker.items() for maker in makers}
        self._sequences = Gauge(f"{_PREFIX}draft_sequences", "Sequences drafted for.", registry=registry)
        blocks = Gauge(f"{_PREFIX}draft_kv_blocks", "KV blocks of the draft model, by state.", ("state",), registry=registry)
        self._blocks = {state: blocks.labels(state=state) for state in BLOCK_STATES}
        self._step_age = Gauge(f"{_PREFIX}draft_engine_step_age_seconds", "Seconds since the engine thread last showed itself.", registry=registry)
        self._attached = Gauge(f"{_PREFIX}draft_link_attached", "1 while attached to the verifier.", registry=registry)
        self._round_trip = Histogram(
            f"{_PREFIX}draft_link_round_trip_seconds", "Round trips of heartbeats to the verifier.", buckets=_LINK_S, registry=registry
        )
        reconnects = Counter(f"{_PREFIX}draft_reconnects", "Ends of the link that were followed by a new attempt.", ("reason",), registry=registry)
        self._reconnects = {reason: reconnects.labels(reason=reason) for reason in RECONNECT_REASONS}
        self._seen: dict[Counter, int] = {}

    def set_build_info(self, *, version: str, protocol_revision: str, proposer: str, tokenizer: str) -> None:
        """Tells what runs here, once; `tokenizer` is a fingerprint or its beginning."""
        labels = {"version": version, "protocol_revision": protocol_revision, "proposer": proposer, "tokenizer": tokenizer}
        Gauge(f"{_PREFIX}draft_build_info", "What runs here; always 1.", tuple(labels), registry=self._registry).labels(**labels).set(1)

    def watch_engine(self, age_s: Callable[[], float]) -> None:
        """Reads the engine's age in seconds at each scrape."""
        self._step_age.set_function(age_s)

    def observe(self, stats: DrafterStats) -> None:
        """Takes the numbers as they stand; what has been added since the last call is counted."""
        for name in _TOTALS:
            self._raise_to(self._totals[name], getattr(stats, name))
        for name in _PROPOSER_TOTALS:
            self._raise_to(self._totals[name], getattr(stats.proposer, name))
        for (name, maker), total in self._guesses.items():
            self._raise_to(total, getattr(stats, name)[maker])
        self._sequences.set(stats.sequences)
        self._blocks["free"].set(stats.proposer.free_blocks)
        self._blocks["used"].set(stats.proposer.used_blocks)

    def observe_step(self, seconds: float, num_fed: int) -> None:
        """Takes a call of the proposer: its time, and the tokens that its model was fed, 0 without one. Safe from any thread."""
        self._step.observe(seconds)
        if num_fed:
            self._fed.observe(num_fed)

    def set_attached(self, attached: bool) -> None:
        """Tells whether the link is up."""
        self._attached.set(attached)

    def count_reconnect(self, reason: str) -> None:
        """Tells that the link is tried again; an unknown reason is counted as `other`."""
        self._reconnects.get(reason, self._reconnects[_OTHER]).inc()

    def observe_round_trip(self, seconds: float) -> None:
        """Takes a heartbeat's round trip."""
        self._round_trip.observe(seconds)

    def _raise_to(self, counter: Counter, total: int) -> None:
        seen = self._seen.get(counter, 0)
        counter.inc(max(0, total - seen))
        self._seen[counter] = max(total, seen)
