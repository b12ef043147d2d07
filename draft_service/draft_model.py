"""A small model as the proposer: one batched forward gives every sequence its next guess.

It owns the draft's KV. It does not know what the verifier thinks of its guesses: it only sees that a text has changed, and computes
again what has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.proposer import CannotServe, Guess
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence, count_matching
from shared.drawing import invert, pad, to_wire
from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence as CachedSequence
from shared.errors import OutOfBlocks
from shared.noise import key_tensor, uniforms
from shared.picking import finite_rows, pick_best, process
from shared.sampling import Mode, Pick


@dataclass(slots=True)
class _Cache:
    """KV of one sequence; `kv.token_ids` are the tokens it was computed for, those below `settled` are committed and cannot change."""

    kv: CachedSequence
    settled: int = 0


class DraftModel:
    """Proposes with a language model, one guess per sequence and call.

    Args:
        runner: runs the draft model, over a KV pool that is this proposer's alone.
        allocator: hands out the blocks of that pool.
        max_step_tokens: most tokens fed in one forward, unless there are more sequences; long prompts are fed over several.
    """

    modes = (Mode.COUPLED, Mode.REJECTION)

    def __init__(self, runner: ModelRunner, allocator: BlockAllocator, max_step_tokens: int = 512) -> None:
        self.stats = ProposerStats(free_blocks=allocator.num_free)
        self._model = runner.model
        self._runner = runner
        self._allocator = allocator
        # What the pool cannot hold even alone is as hopeless as what the model was not made for.
        self._max_model_len = min(runner.model.max_model_len, allocator.num_blocks * allocator.block_size)
        self._max_step_tokens = max_step_tokens
        self._caches: dict[int, _Cache] = {}  # oldest first

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    def open(self, sequence: DraftSequence) -> None:
        """Gets to know a sequence; nothing is computed before it is asked about."""
        self._caches[sequence.number] = _Cache(CachedSequence([]))

    def close(self, sequence: DraftSequence) -> None:
        """Frees the sequence's blocks."""
        self._caches.pop(sequence.number).kv.release(self._allocator)
        self._count_blocks()

    def cached(self, sequence: DraftSequence) -> CachedSequence:
        """The KV of an open sequence: tokens it stands for, blocks and length. Not to be changed."""
        return self._caches[sequence.number].kv

    def propose(self, requests: Sequence[tuple[DraftSequence, int]]) -> list[list[Guess] | None]:
        """Feeds each sequence what its KV lacks, in one forward, and guesses one token for those that have caught up.

        Raises:
            CannotServe: no blocks are left (the youngest sequence has to go), a text is longer than the model or its pool can ever take, or
                it has a token that the model does not know.
        """
        able = [index for index, (sequence, _) in enumerate(requests) if self._align(sequence)]
        answers: list[list[Guess] | None] = [[] for _ in requests]
        if not able:
            return answers
        sequences = [requests[index][0] for index in able]
        caches = [self._caches[sequence.number] for sequence in sequences]
        self._reserve(caches)
        sizes = self._share_out([len(cache.kv.token_ids) - cache.kv.kv_len for cache in caches])
        spans = [_span(cache.kv, size) for cache, size in zip(caches, sizes, strict=True)]
        logits = self._runner.forward(spans)
        for cache, size in zip(caches, sizes, strict=True):
            cache.kv.kv_len += size
        self._count_forward(sizes)

        caught_up = [position for position, span in enumerate(spans) if span.num_logits]
        guesses = _guess(logits, [sequences[position] for position in caught_up])
        for index in able:
            answers[index] = None
        for position, guess in zip(caught_up, guesses, strict=True):
            answers[able[position]] = [] if guess is None else [guess]
            self.stats.unusable_rows += guess is None
        return answers

    def _align(self, sequence: DraftSequence) -> bool:
        """Rewinds the KV to the first token that is not the text's; False if the text leaves the model no position for a guess."""
        cache = self._caches[sequence.number]
        if len(sequence.committed) >= self._max_model_len:
            raise CannotServe(sequence.number, f"longer than the {self._max_model_len} tokens that the draft model and its KV can take")
        if sequence.length >= self._max_model_len:
            return False
        known = cache.kv.token_ids[cache.settled :]
        text = sequence.committed[cache.settled :] + sequence.tail
        num_kept = count_matching(known, text)
        added = text[num_kept:]
        if added and max(added) >= self._model.vocab_size:
            raise CannotServe(sequence.number, f"token {max(added)} is none of the draft model's {self._model.vocab_size}")
        cache.kv.token_ids[cache.settled + num_kept :] = added
        # The last token is fed in any case: its logits are what is wanted.
        cache.kv.rewind(min(cache.settled + num_kept, sequence.length - 1))
        cache.settled = len(sequence.committed)
        return True

    def _reserve(self, caches: Sequence[_Cache]) -> None:
        try:
            for cache in caches:
                cache.kv.reserve(len(cache.kv.token_ids), self._allocator)
        except OutOfBlocks:
            raise CannotServe(next(reversed(self._caches)), "no KV blocks left") from None

    def _share_out(self, missing: Sequence[int]) -> list[int]:
        """How many of its missing tokens each sequence is fed: at least one, and the shortest first, so that a long prompt delays nobody."""
        spare = max(0, self._max_step_tokens - len(missing))
        sizes = [1] * len(missing)
        for index in sorted(range(len(missing)), key=missing.__getitem__):
            more = min(missing[index] - 1, spare)
            sizes[index] += more
            spare -= more
        return sizes

    def _count_forward(self, sizes: Sequence[int]) -> None:
        self.stats.forwards += 1
        self.stats.fed_tokens += sum(sizes)
        self.stats.catch_up_tokens += sum(sizes) - len(sizes)
        self._count_blocks()

    def _count_blocks(self) -> None:
        self.stats.free_blocks, self.stats.used_blocks = self._allocator.num_free, self._allocator.num_used


def _span(kv: CachedSequence, size: int) -> Span:
    end = kv.kv_len + size
    return Span(kv.token_ids[kv.kv_len : end], kv.kv_len, kv.block_table, num_logits=int(end == len(kv.token_ids)))


def _guess(logits: Tensor, sequences: Sequence[DraftSequence]) -> list[Guess | None]:
    """One guess per row, None where what the request's rules make of the logits is not finite.

    Args:
        logits: [num_sequences, draft vocabulary], which may be narrower or wider than the target's.
        sequences: whose rows they are.
    """
    picks = [Pick(sequence.rules, sequence.key, sequence.committed, sequence.tail) for sequence in sequences]
    is_drawn = [_is_drawn(sequence) for sequence in sequences]
    scores = process(logits, picks)
    usable = [row for row, is_finite in enumerate(finite_rows(scores).tolist()) if is_finite]
    guesses: list[Guess | None] = [None] * len(sequences)
    for choose, rows in ((_pick, [row for row in usable if not is_drawn[row]]), (_draw, [row for row in usable if is_drawn[row]])):
        if rows:
            chosen = scores if len(rows) == len(sequences) else scores[rows]  # [num_rows, draft vocabulary]
            for row, guess in zip(rows, choose(chosen, [picks[row] for row in rows]), strict=True):
                guesses[row] = guess
    return guesses


def _is_drawn(sequence: DraftSequence) -> bool:
    # Coupled guesses share the verifier's noise, greedy ones have none: both are functions of the text.
    return sequence.mode is Mode.REJECTION and not sequence.rules.sampling.is_greedy


def _pick(scores: Tensor, picks: Sequence[Pick]) -> list[Guess]:
    return [Guess(token_id) for token_id in pick_best(scores, picks).tolist()]


def _draw(scores: Tensor, picks: Sequence[Pick]) -> list[Guess]:
    # Rounded to its wire form first, then drawn from: the ratio test needs the distribution that was really sampled.
    distributions = to_wire(scores)
    _, weights = pad(distributions)
    positions = torch.tensor([pick.position for pick in picks])
    places = invert(weights, uniforms(key_tensor(pick.key for pick in picks), positions)).tolist()
    return [Guess(distribution.token_ids[place], distribution) for distribution, place in zip(distributions, places, strict=True)]
