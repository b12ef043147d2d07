"""The verifier's step: schedule, expand, forward, contract, verify, commit. It knows no gRPC and no text; clocks are passed in."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_runner import ModelRunner
from shared.errors import EngineFailure
from shared.link import EndReason, StepBatch
from verifier_service.expansion import Scorer
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Emission, Request
from verifier_service.scheduler import Scheduled, Scheduler, SchedulerLimits
from verifier_service.scoring import Scores, Scoring
from verifier_service.speculation import Speculation
from verifier_service.stats import StepStats
from verifier_service.step_cost import StepCost
from verifier_service.stopping import find_stop
from verifier_service.verdict import Verdict

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine may do in a step, and how far a drafter may be ahead.

    Args:
        scheduler: running requests, tokens and guesses in a step.
        window: most tokens beyond the committed ones that a drafter may have sent.
    """

    scheduler: SchedulerLimits
    window: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step hands out, as one batch: what it gave each request, by sequence number, and numbers about it."""

    emissions: tuple[tuple[int, Emission], ...]
    stats: StepStats


class Engine:
    """All live requests and what moves them on. Touched by one thread.

    Args:
        runner: the target model and its KV.
        allocator: blocks of that KV.
        vocab_size: ids of the target's tokenizer.
        limits: see `EngineLimits`.
        scorer: name of the scorer, `expanded` or `multi_query`.
        tell: takes (link, batch) on its way to a drafter; must not block.
        clock: monotonic seconds.
        entropy: private uint64s, for rejection mode's noise.
        step_cost: what a step was found to cost; None learns it from the steps.
        on_forward: called when the model is about to run: the time for what others of this process have put off; must not block.
    """

    def __init__(
        self,
        runner: ModelRunner,
        allocator: BlockAllocator,
        vocab_size: int,
        limits: EngineLimits,
        scorer: Scorer,
        tell: Callable[[int, StepBatch], None],
        clock: Callable[[], float],
        entropy: Callable[[], int],
        step_cost: StepCost | None = None,
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        self._allocator = allocator
        self._vocab_size = vocab_size
        self._clock = clock
        self._entropy = entropy
        self._live: dict[int, Generation] = {}
        self.speculation = Speculation(self._live, tell, limits.window, limits.scheduler.max_draft_tokens, step_cost)
        self._scheduler = Scheduler(allocator, limits.scheduler, self.speculation.pacing.allot)
        self._scoring = Scoring(runner, vocab_size, scorer, on_forward)
        self._last_step_ended = clock()

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._live or self.speculation.has_news)

    @property
    def live(self) -> list[Generation]:
        """All requests that wait or run."""
        return list(self._live.values())

    @property
    def last_step_ended(self) -> float:
        """When the last step ended: a guess that arrived before that arrived while it was computed."""
        return self._last_step_ended

    def submit(self, number: int, request: Request) -> None:
        """Takes a request in. Its first tokens come with one of the next steps.

        Args:
            number: of its sequence, on the links too; never reused. Ids of requests are, so nothing here goes by them.
            request: validated; prompt and output together fit the model and the KV pool.
        """
        generation = new_generation(number, request, self._vocab_size, self._entropy(), self._clock())
        self._live[number] = generation
        self._scheduler.add(generation)
        self.speculation.assign(self._clock())

    def cancel(self, number: int) -> None:
        """Forgets a request, if it is still there, and frees its blocks."""
        generation = self._live.get(number)
        if generation is not None:
            self._end(generation, EndReason.CANCELLED)

    def wait_until(self, now: float) -> float:
        """Time until which the next step had better wait for guesses; in the past if it should not."""
        if self.speculation.has_news:
            return now
        decoding = self._decoding()
        num_others = self._scheduler.num_running - len(decoding) + self._scheduler.num_waiting
        return self.speculation.pacing.wait_until(decoding, num_others, self._last_step_ended, now)

    def step(self, now: float) -> StepOutput:
        """Runs one step: every scheduled request gets a chunk of its prompt done, or one to K+1 tokens."""
        pacing = self.speculation.pacing
        pacing.step_starts(now)
        self.speculation.assign(now)
        self.speculation.flush(now)
        num_preempted = self._scheduler.num_preempted
        num_queried, num_cached = self._scheduler.num_queried_tokens, self._scheduler.num_cached_tokens
        plan = self._scheduler.schedule()
        queue_s = tuple(now - part.generation.arrived_at for part in plan if not part.generation.scheduled_before)
        verdicts = self._score(plan)
        ended = self._clock()
        emissions = self._commit(plan, verdicts, ended)
        num_prefill = sum(part.num_tokens for part in plan if part.num_tokens > 1 or not part.is_terminal)
        num_rows = sum(part.num_tokens + part.num_guesses for part in plan)
        self.speculation.assign(ended)
        self.speculation.grant(self._decoding())
        self.speculation.flush(ended)  # nothing comes before it that need not: drafters stand still until they hear of the step
        pacing.step_ended(num_rows, num_prefill, ended - now)
        stats = StepStats(
            seconds=ended - now,
            waited_seconds=max(0.0, now - self._last_step_ended) if plan and not queue_s else 0.0,
            decode_rows=num_rows - num_prefill,
            prefill_tokens=num_prefill,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            preempted=self._scheduler.num_preempted - num_preempted,
            free_blocks=self._allocator.num_free - self._allocator.num_cached,
            used_blocks=self._allocator.num_used,
            cached_blocks=self._allocator.num_cached,
            queried_tokens=self._scheduler.num_queried_tokens - num_queried,
            cached_tokens=self._scheduler.num_cached_tokens - num_cached,
            queue_seconds=queue_s,
            decisions=pacing.take_decisions(),
        )
        self._last_step_ended = ended
        return StepOutput(tuple(emissions), stats)

    def _decoding(self) -> list[Generation]:
        return [generation for generation in self._scheduler.running if generation.num_pending == 1]

    def check_integrity(self) -> None:
        """Checks the books of the blocks and of the prefix cache against the live requests."""
        self._scheduler.check_integrity(self.live)

    def _score(self, plan: Sequence[Scheduled]) -> list[Scores]:
        """What the model says to each part. Where it fails, as for want of memory, each half is tried by itself: who has caused it fails alone."""
        if not plan:
            return []
        try:
            return self._scoring.score(plan, self.speculation.wants_hidden_states)
        except Exception:  # the step's boundary: a fault in the model fails who has caused it, never the engine
            _log.exception("step failed", request_ids=[part.generation.request.request_id for part in plan])
        if len(plan) == 1:
            return [EngineFailure("the step failed")]
        middle = len(plan) // 2  # beyond the handler: what it had allocated is kept alive by the exception
        return [*self._score(plan[:middle]), *self._score(plan[middle:])]

    def _commit(self, plan: Sequence[Scheduled], verdicts: Sequence[Scores], now: float) -> list[tuple[int, Emission]]:
        emissions = []
        for part, verdict in zip(plan, verdicts, strict=True):
            generation = part.generation
            generation.scheduled_before = True
            if isinstance(verdict, EngineFailure):
                emissions.append((generation.number, Emission(generation.request.request_id, error=verdict)))
                self._end(generation, EndReason.CANCELLED)
                continue
            generation.sequence.kv_len += part.num_tokens
            if verdict is not None:
                emissions.append((generation.number, self._append(part, verdict, now)))
        return emissions

    def _append(self, part: Scheduled, verdict: Verdict, now: float) -> Emission:
        generation = part.generation
        base_length = len(generation.committed)
        stop = find_stop(verdict.token_ids, generation.num_generated, generation.request.stopping)
        num_kept = stop.num_kept if stop is not None else len(verdict.token_ids)
        token_ids = verdict.token_ids[:num_kept]
        accepted = min(verdict.accepted, num_kept)
        drafted = min(part.num_guesses, num_kept) if stop is not None else part.num_guesses
        overlapped = any(generation.guesses.overlapped[: part.num_guesses])
        generation.committed.extend(token_ids)
        generation.hidden = verdict.hidden
        # Setting the length is the whole rollback: KV beyond it is overwritten before anything reads it.
        generation.sequence.kv_len = generation.num_sound = base_length + min(verdict.accepted, num_kept - 1)
        if part.num_guesses:
            self.speculation.verified(generation, accepted, drafted)
        if stop is None:
            self.speculation.committed(generation, base_length, accepted, token_ids, now)
        else:
            self._end(generation, EndReason.FINISHED)
        return Emission(
            request_id=generation.request.request_id,
            token_ids=token_ids,
            accepted=accepted,
            drafted=drafted,
            discarded=part.num_guesses - drafted,
            overlapped=overlapped,
            finish=stop.reason if stop is not None else None,
            matched_id=stop.matched_id if stop is not None else None,
            cached_prompt_tokens=generation.num_cached,
        )

    def _end(self, generation: Generation, reason: EndReason) -> None:
        self._scheduler.remove(generation)
        self.speculation.ended(generation, reason)
        del self._live[generation.number]
