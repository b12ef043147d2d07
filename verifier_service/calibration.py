"""Measures at the start what a step costs and which scorer is the faster one, with made-up sequences in blocks that nobody holds yet.

It does not know what the figures are used for. Real steps are run, picking included, so a stand-in for a model is measured like a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import structlog

from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_runner import ModelRunner
from shared.sampling import SamplingParams
from verifier_service.expansion import Scorer
from verifier_service.generation import Generation, new_generation
from verifier_service.request import Request, Stopping
from verifier_service.scheduler import Scheduled
from verifier_service.scoring import Scoring
from verifier_service.stats import Calibration

_CONTEXT = 512  # tokens that the made-up sequences have behind them: whatever their KV holds, reading it takes the same time
_CLEARLY = 0.95  # the first scorer is kept unless another one takes less than this share of its time
_MAX_RUNS = 3  # of each shape, after the one that warms it up
_ENOUGH_S = 0.2  # a shape that has taken so long is not run again

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Space:
    """What may be measured.

    Args:
        max_draft_tokens: most guesses of a sequence, K.
        max_rows: largest step of interest, in tokens.
        max_model_len: longest sequence.
        budget_s: seconds after which no larger step is tried.
    """

    max_draft_tokens: int
    max_rows: int
    max_model_len: int
    budget_s: float = 8.0


def calibrate(
    runner: ModelRunner, allocator: BlockAllocator, vocab_size: int, scorers: Sequence[Scorer], space: Space, clock: Callable[[], float]
) -> Calibration:
    """Runs steps of 1, 2, 4, ... tokens. Takes seconds: call it off the event loop, and before anything else uses the runner.

    Args:
        runner: the target model.
        allocator: its blocks; those used are free again in the end.
        vocab_size: ids of the target's tokenizer.
        scorers: one, or those to choose from, the one to keep in doubt first.
        space: what may be measured.
        clock: monotonic seconds.
    """
    ends_at = clock() + space.budget_s
    width = space.max_draft_tokens + 1
    context = min(_CONTEXT, space.max_model_len - width, allocator.num_free * allocator.block_size - width)
    if context < 1:
        return Calibration(scorers[0], {}, {})
    blocks = allocator.allocate(allocator.blocks_for(context + width))
    try:
        made_up = _made_up(context, space.max_draft_tokens, blocks, vocab_size)

        def seconds(scorer: Scorer, num_rows: int) -> float:
            return _measure(Scoring(runner, vocab_size, scorer), _step(made_up, num_rows, width), clock, ends_at)

        made_up.sequence.kv_len = context - 1
        by_scorer: dict[str, float] = {scorer: seconds(scorer, width) for scorer in scorers} if len(scorers) > 1 else {}
        fastest = min(scorers, key=lambda scorer: by_scorer.get(scorer, 0.0))
        chosen = fastest if by_scorer and by_scorer[fastest] < _CLEARLY * by_scorer[scorers[0]] else scorers[0]
        points: dict[int, float] = {}
        num_rows = 1
        while num_rows <= max(space.max_rows, 2):
            points[num_rows] = seconds(chosen, num_rows)
            # The next one is warmed up and run at least once, and may cost twice as much.
            if clock() + 4 * points[num_rows] > ends_at:
                break
            num_rows *= 2
    finally:
        allocator.release(blocks)
    _log.info("calibrated", scorer=chosen, step_ms={rows: round(1e3 * taken, 1) for rows, taken in points.items()})
    return Calibration(chosen, by_scorer, points)


def _made_up(context: int, num_guesses: int, blocks: list[int], vocab_size: int) -> Generation:
    """A sequence of `context` tokens with guesses. Any number of them may share these blocks: they all say the same."""
    request = Request("calibration", (0,) * context, SamplingParams(), Stopping(context + num_guesses + 1), seed=0, max_draft_tokens=num_guesses)
    made_up = new_generation(0, request, vocab_size, 0, 0.0)
    made_up.sequence.block_table = blocks
    made_up.guesses.token_ids = [0] * num_guesses
    return made_up


def _step(made_up: Generation, num_rows: int, width: int) -> list[Scheduled]:
    """A step of so many tokens: as many whole rounds as fit, and a shorter one."""
    whole, rest = divmod(num_rows, width)
    counts = [width - 1] * whole + ([rest - 1] if rest else [])
    return [Scheduled(made_up, 1, count) for count in counts]


def _measure(scoring: Scoring, plan: Sequence[Scheduled], clock: Callable[[], float], ends_at: float) -> float:
    scoring.score(plan)
    taken: list[float] = []
    while not taken or (len(taken) < _MAX_RUNS and sum(taken) < _ENOUGH_S and clock() < ends_at):
        began = clock()
        scoring.score(plan)
        taken.append(clock() - began)
    return median(taken)
