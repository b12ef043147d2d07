"""From logits to tokens: one pure path for both services, so that a drafter with the target's noise foresees sampled tokens too.

It does not know which model the logits come from, nor whether a row follows committed tokens or guesses.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from shared.noise import gumbel, key_tensor
from shared.penalties import penalise
from shared.race import UNUSABLE_ID, find_best, find_winners
from shared.sampling import Pick, TokenRules
from shared.truncation import truncate

__all__ = ["UNUSABLE_ID", "finite_rows", "pick_best", "pick_tokens", "pick_usable", "probabilities", "process", "search_all"]

_EXCLUDED = float("-inf")
# Where there is no faster way, noise is made in tiles of so many tokens.
_TILE_ELEMENTS = 1 << 20


def process(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Turns logits into scores whose softmax is the distribution to pick from.

    In this order: penalties, logit bias, masks, temperature, top-k, top-p, min-p. Every row counts its own hypothetical history. Rows do
    not influence each other. Greedy rows keep their scale and are not truncated: their best token is the same.

    Args:
        logits: [R, V], not changed. Rows that `finite_rows` rejects give scores without meaning, and harm no other row.
        picks: one per row.

    Returns:
        [R, N]: ids that no row's vocabulary has are cut off. -inf where a token is excluded. Suppression that would leave a row no token
        at all is lifted. Float32 or wider; but where no row asks for anything, the logits themselves, as they are.
    """
    if not picks:
        return logits
    all_rules = _all_rules(picks)
    num_ids = min(logits.shape[-1], max(rules.vocab_size for rules in all_rules))
    logits = logits[:, :num_ids]
    suppresses = any(rules.suppressed_ids for rules in all_rules) and any(map(_suppressed_ids, picks))
    if not suppresses and not any(_is_asking(rules, num_ids) for rules in all_rules):
        return logits
    scores = torch.empty(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device).copy_(logits)
    if any(rules.sampling.has_penalties for rules in all_rules):
        penalise(scores, picks)
    if any(rules.sampling.logit_bias for rules in all_rules):
        _add_bias(scores, picks)
    _mask(scores, picks, all_rules)
    if any(_divisor(rules) != 1.0 for rules in all_rules):
        scores.div_(torch.tensor([_divisor(pick.rules) for pick in picks], dtype=scores.dtype, device=scores.device)[:, None])
    rows = [row for row, pick in enumerate(picks) if _is_truncating(pick.rules)] if any(map(_is_truncating, all_rules)) else []
    if rows:
        samplings = [picks[row].rules.sampling for row in rows]
        limits = [s.top_k for s in samplings], [s.top_p for s in samplings], [s.min_p for s in samplings]
        chosen = scores if len(rows) == len(picks) else scores[rows]
        truncate(chosen, *limits)
        if chosen is not scores:
            scores[rows] = chosen
    return scores


def pick_tokens(logits: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Picks each row's token. Coupled verification and plain decoding are both this call.

    Args:
        logits: [R, V]
        picks: one per row.

    Returns:
        [R] int64 in 0..V-1; without meaning for a row whose scores `finite_rows` rejects.
    """
    return pick_best(process(logits, picks), picks)


def pick_best(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Argmax of score + noise(key, position, token), without noise where greedy; ties go to the lowest id.

    Adding Gumbel noise and taking the best is a draw from the softmax (Gumbel 1954).

    Args:
        scores: [R, V] from `process`.
        picks: one per row.

    Returns:
        As `pick_tokens`.
    """
    return pick_usable(scores, picks).clamp_min_(0)


def pick_usable(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """As `pick_best`, but `UNUSABLE_ID` where `finite_rows` is false: so one transfer from the device tells both."""
    all_rules = _all_rules(picks)
    num_greedy = sum(rules.sampling.is_greedy for rules in all_rules)
    if num_greedy == len(all_rules):
        return _best(scores)
    if not num_greedy:
        return _best_with_noise(scores, picks)
    rows: dict[bool, list[int]] = {True: [], False: []}
    for row, pick in enumerate(picks):
        rows[pick.rules.sampling.is_greedy].append(row)
    token_ids = torch.empty(len(picks), dtype=torch.int64, device=scores.device)
    token_ids[rows[True]] = _best(scores[rows[True]])
    token_ids[rows[False]] = _best_with_noise(scores[rows[False]], [picks[row] for row in rows[False]])
    return token_ids


def probabilities(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    """Distributions that `pick_tokens` picks from.

    Args:
        scores: [R, V] from `process`.
        picks: one per row.

    Returns:
        [R, V] float64; greedy rows are certain of their best token.
    """
    distributions = scores.softmax(-1, dtype=torch.float64)
    rows = [row for row, pick in enumerate(picks) if pick.rules.sampling.is_greedy]
    if rows:
        best_ids = scores[rows].max(-1).indices
        distributions[rows] = torch.nn.functional.one_hot(best_ids, scores.shape[-1]).to(torch.float64)
    return distributions


def finite_rows(rows: Tensor) -> Tensor:
    """Which rows, of logits or of scores, can be picked from: no NaN, no +inf, not all -inf. [R, V] to [R] bool."""
    return rows.amax(-1).isfinite()


def _add_bias(scores: Tensor, picks: Sequence[Pick]) -> None:
    num_ids = scores.shape[-1]
    addends = [(row, token_id, addend) for row, pick in enumerate(picks) for token_id, addend in pick.rules.sampling.logit_bias if token_id < num_ids]
    if addends:
        rows, ids, values = zip(*addends, strict=True)
        # An id given twice counts twice, in the order given.
        scores.index_put_(_index(rows, ids, scores), torch.tensor(values, dtype=scores.dtype, device=scores.device), accumulate=True)


def _all_rules(picks: Sequence[Pick]) -> Collection[TokenRules]:
    """Each once: the rows of a sequence share theirs."""
    return {id(pick.rules): pick.rules for pick in picks}.values()


def _is_asking(rules: TokenRules, num_ids: int) -> bool:
    """Whether these rules change logits of so many ids at all, but for suppression, which ends somewhere."""
    sampling = rules.sampling
    return bool(sampling.has_penalties or sampling.logit_bias or rules.vocab_size < num_ids or _divisor(rules) != 1.0 or _is_truncating(rules))


def _is_truncating(rules: TokenRules) -> bool:
    return rules.sampling.truncates and not rules.sampling.is_greedy


def _divisor(rules: TokenRules) -> float:
    return 1.0 if rules.sampling.is_greedy else rules.sampling.temperature


def _mask(scores: Tensor, picks: Sequence[Pick], all_rules: Collection[TokenRules]) -> None:
    num_ids = scores.shape[-1]
    for size in {rules.vocab_size for rules in all_rules}:
        if size < num_ids:
            scores[[row for row, pick in enumerate(picks) if pick.rules.vocab_size == size], size:] = _EXCLUDED
    if not any(rules.suppressed_ids for rules in all_rules):
        return
    suppressed = [(row, token_id) for row, pick in enumerate(picks) for token_id in _suppressed_ids(pick) if token_id < num_ids]
    if not suppressed:
        return
    rows, ids = zip(*suppressed, strict=True)
    index = _index(rows, ids, scores)
    kept = scores[index]
    scores[index] = _EXCLUDED
    # A row that has nothing else to say may say it: the alternative is no distribution at all.
    is_empty = scores.amax(-1)[index[0]] == _EXCLUDED
    scores[index] = torch.where(is_empty, kept, scores[index])


def _suppressed_ids(pick: Pick) -> tuple[int, ...]:
    return pick.rules.suppressed_ids if pick.position < pick.rules.suppressed_until else ()


def _best(scores: Tensor) -> Tensor:
    if scores.device.type == "cpu":
        return find_best(scores)
    # torch.max, unlike most of torch, promises the first of equal maxima: the lowest id.
    best = scores.max(-1)
    return torch.where(best.values.isfinite(), best.indices, UNUSABLE_ID)


def _best_with_noise(scores: Tensor, picks: Sequence[Pick]) -> Tensor:
    keys, positions = [pick.key for pick in picks], [pick.position for pick in picks]
    if scores.device.type == "cpu":
        return find_winners(scores, keys, positions)
    return search_all(scores, key_tensor(keys, scores.device), torch.tensor(positions, device=scores.device))


def search_all(scores: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """The plain definition, tile by tile, on any device: noise for every token, and the first of the best.

    Args:
        scores: [R, V]
        keys: [R] int64 with the bits of uint64 keys.
        positions: [R] int64

    Returns:
        [R] int64; `UNUSABLE_ID` where nothing can be picked.
    """
    winners = torch.zeros_like(positions)
    best = torch.full(positions.shape, _EXCLUDED, dtype=torch.float64, device=scores.device)
    for start, end in _tiles(*scores.shape):
        ids = torch.arange(start, end, device=scores.device)
        top = gumbel(keys[:, None], positions[:, None], ids).add_(scores[:, start:end]).max(-1)
        # Only a strictly better token of a later tile wins: ties go to the lowest id, and what is excluded never does.
        is_better = top.values > best
        best = torch.where(is_better, top.values, best)
        winners = torch.where(is_better, start + top.indices, winners)
    return torch.where(finite_rows(scores), winners, UNUSABLE_ID)


def _tiles(num_rows: int, num_ids: int) -> Iterator[tuple[int, int]]:
    width = max(_TILE_ELEMENTS // max(num_rows, 1), 256)
    for start in range(0, num_ids, width):
        yield start, min(start + width, num_ids)


def _index(rows: Sequence[int], ids: Sequence[int], scores: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor(rows, device=scores.device), torch.tensor(ids, device=scores.device)
