"""A small model as the proposer: one batched forward gives every sequence its next guess.

It owns the draft's KV. It does not know what the verifier thinks of its guesses: it only sees that a text has changed, and computes
again what has changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_service.confidence import confidence
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
from shared.picking import finite_rows, pick_usable, process
from shared.sampling import Mode, Pick

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
        guesses = self._guess(logits, [requests[index][0] for index in caught_up])
        if len(able) > len(caught_up):
            for index in able:
                answers[index] = None
        for index, guess in zip(caught_up, guesses, strict=True):
            if guess is None:
                answers[index] = []
                self.stats.unusable_rows += 1
            else:
                answers[index] = [guess]
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

    def _guess(self, logits: Tensor, sequences: Sequence[DraftSequence]) -> list[Guess | None]:
        """One guess per row, None where what the request's rules make of the logits is not finite.

        Args:
            logits: [num_sequences, draft vocabulary], which may be narrower or wider than the target's.
            sequences: whose rows they are.
        """
        if not sequences:
            return []
        picks = [sequence.pick for sequence in sequences]
        scores = process(logits, picks)
        drawn = [row for row, sequence in enumerate(sequences) if sequence.is_drawn]
        if not drawn:
            return _pick(scores, picks, self._min_confidence)
        if len(drawn) == len(picks):
            return _draw(scores, picks)
        picked = [row for row, sequence in enumerate(sequences) if not sequence.is_drawn]
        guesses: list[Guess | None] = [None] * len(picks)
        for rows, made in (
            (picked, _pick(scores[picked], [picks[row] for row in picked], self._min_confidence)),
            (drawn, _draw(scores[drawn], [picks[row] for row in drawn])),
        ):
            for row, guess in zip(rows, made, strict=True):
                guesses[row] = guess
        return guesses

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


def _pick(scores: Tensor, picks: Sequence[Pick], min_confidence: float) -> list[Guess | None]:
    """The best token of every row with the noise of its pick; None where the scores are not finite."""
    # Everything crosses from the device at once: each crossing waits for all that was started before it.
    columns = [pick_usable(scores, picks)]
    if min_confidence > 0.0:
        columns.append(confidence(scores, picks, columns[0]) < min_confidence)
        ids, doubted = torch.stack(columns).tolist()
        return [Guess(token_id, is_doubted=bool(is_doubted)) if token_id >= 0 else None for token_id, is_doubted in zip(ids, doubted, strict=True)]
    return [Guess(token_id) if token_id >= 0 else None for token_id in columns[0].tolist()]


def _draw(scores: Tensor, picks: Sequence[Pick]) -> list[Guess | None]:
    """A draw from every row, with what it was drawn from; None where the scores are not finite."""
    guesses: list[Guess | None] = [None] * len(picks)
    usable = finite_rows(scores).nonzero()[:, 0].tolist()
    if not usable:
        return guesses
    # Rounded to its wire form first, then drawn from: the ratio test needs the distribution that was really sampled.
    distributions = to_wire(scores if len(usable) == len(picks) else scores[usable])
    _, weights = pad(distributions)
    drawn = [picks[row] for row in usable]
    places = invert(weights, uniforms(key_tensor(pick.key for pick in drawn), torch.tensor([pick.position for pick in drawn])))
    for row, distribution, place in zip(usable, distributions, places.tolist(), strict=True):
        guesses[row] = Guess(distribution.token_ids[place], distribution)
    return guesses
