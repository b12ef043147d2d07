"""A small model as the proposer: one batched forward gives every sequence its next guess.

It owns the draft's KV. It does not know what the verifier thinks of its guesses: it only sees that a text has changed, and computes
again what has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.guessing import guess
from draft_service.proposer import CannotServe, Guess
from draft_service.stats import ProposerStats
from draft_service.tail import DraftSequence, count_matching
from shared.engine.block_allocator import BlockAllocator
from shared.engine.forward_batch import Span
from shared.engine.model_runner import ModelRunner
from shared.engine.sequence import Sequence as CachedSequence
from shared.errors import OutOfBlocks
from shared.sampling import Mode

_READY = 8  # tokens: about as many as a commit leaves to be fed


@dataclass(slots=True)
class _Cache:
    """KV of one sequence; `kv.token_ids` are the tokens it was computed for, those below `settled` are committed and cannot change.

    While `num_cuts` is the sequence's own, all of them are the beginning of its text.
    """

    kv: CachedSequence
    settled: int = 0
    num_cuts: int = 0


class DraftModel:
    """Proposes with a language model, one guess per sequence and call.

    Args:
        runner: runs the draft model, over a KV pool that is this proposer's alone.
        allocator: hands out the blocks of that pool.
        max_step_tokens: most tokens fed in one forward, unless there are more sequences; long prompts are fed over several.
        max_tokens_beside: of those, the most that catch up with long texts beside sequences that lack next to nothing.
        min_confidence: guesses that the model is less sure of (see `draft_service.confidence`) are marked as doubted; 0 marks none, and
            costs nothing. Drawn guesses are never doubted.
    """

    kinds = ("model",)
    modes = (Mode.COUPLED, Mode.REJECTION)

    def __init__(
        self,
        runner: ModelRunner,
        allocator: BlockAllocator,
        max_step_tokens: int = 512,
        max_tokens_beside: int = 32,
        min_confidence: float = 0.0,
    ) -> None:
        self.stats = ProposerStats(free_blocks=allocator.num_free)
        self._model = runner.model
        self._runner = runner
        self._allocator = allocator
        # What the pool cannot hold even alone is as hopeless as what the model was not made for.
        self._max_model_len = min(runner.model.max_model_len, allocator.num_blocks * allocator.block_size)
        self._max_step_tokens = max_step_tokens
        self._max_tokens_beside = max_tokens_beside
        self._min_confidence = min_confidence
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
        caches = [self._caches[requests[index][0].number] for index in able]
        self._reserve(caches)
        missing = [len(cache.kv.token_ids) - cache.kv.kv_len for cache in caches]
        sizes = self._share_out(missing)
        spans = [_span(cache.kv, size) for cache, size in zip(caches, sizes, strict=True)]
        logits = self._runner.forward(spans)
        for cache, size in zip(caches, sizes, strict=True):
            cache.kv.kv_len += size
        self._count_forward(sizes)

        caught_up = [index for index, size, lacking in zip(able, sizes, missing, strict=True) if size == lacking]
        found = [requests[index][0] for index in caught_up]
        guesses = guess(logits, [sequence.pick for sequence in found], [sequence.is_drawn for sequence in found], self._min_confidence)
        if len(able) > len(caught_up):
            for index in able:
                answers[index] = None
        for index, made in zip(caught_up, guesses, strict=True):
            answers[index] = [made] if made is not None else []
            self.stats.unusable_rows += made is None
        return answers

    def _align(self, sequence: DraftSequence) -> bool:
        """Rewinds the KV to the first token that is not the text's; False if the text leaves the model no position for a guess."""
        cache = self._caches[sequence.number]
        num_committed, length, known = len(sequence.committed), sequence.length, cache.kv.token_ids
        if num_committed >= self._max_model_len:
            raise CannotServe(sequence.number, f"longer than the {self._max_model_len} tokens that the draft model and its KV can take")
        if length >= self._max_model_len:
            return False
        if cache.num_cuts != sequence.num_cuts:
            num_kept = cache.settled + count_matching(known[cache.settled :], sequence.text_from(cache.settled))
            del known[num_kept:]
            cache.num_cuts = sequence.num_cuts
        num_kept = len(known)
        added = sequence.text_from(num_kept)
        if added and max(added) >= self._model.vocab_size:
            raise CannotServe(sequence.number, f"token {max(added)} is none of the draft model's {self._model.vocab_size}")
        known += added
        # The last token is fed in any case: its logits are what is wanted.
        cache.kv.rewind(min(num_kept, length - 1))
        cache.settled = num_committed
        return True

    def _reserve(self, caches: Sequence[_Cache]) -> None:
        try:
            for cache in caches:
                cache.kv.reserve(len(cache.kv.token_ids), self._allocator)
        except OutOfBlocks:
            raise CannotServe(next(reversed(self._caches)), "no KV blocks left") from None

    def _share_out(self, missing: Sequence[int]) -> list[int]:
        """How many of its missing tokens each sequence is fed: at least one, and the shortest first, so that a long prompt delays nobody."""
        ready = [count for count in missing if count <= _READY]
        limit = self._max_step_tokens
        if ready:  # guesses of these are waited for, and a pass takes as long as all that is in it
            limit = min(limit, sum(ready) + len(missing) - len(ready) + self._max_tokens_beside)
        if sum(missing) <= limit:
            return list(missing)
        spare = max(0, limit - len(missing))
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
