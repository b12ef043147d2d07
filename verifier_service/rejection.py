"""Verification by rejection sampling: the output has the target's distribution if the guesses have the one they came with.

Speculative sampling (Leviathan, Kalman, Matias 2023; Chen et al. 2023). It does not know who guessed, and cannot tell a distribution that
lies: drafters are trusted in this mode. Nothing here may look at a guess and then not test it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.drawing import invert, pad
from shared.link import Distribution
from shared.noise import key_tensor, uniforms
from verifier_service.expansion import ABSENT_ID
from verifier_service.verdict import Verdict

# A residual this small is rounding noise between equal distributions; to be rejected from those has about this probability.
_NO_MASS = 1e-12
_NOTHING = Distribution((), ())


@dataclass(frozen=True, slots=True)
class RejectionKeys:
    """Noise keys of one attempt at a request, private to the verifier: a stream per purpose, each uniform used once.

    Args:
        accept: tests the guess at a position.
        residual: draws the token at a position whose guess was rejected.
        plain: draws the token at a position that had no guess.
    """

    accept: int
    residual: int
    plain: int


@dataclass(frozen=True, slots=True)
class Tested:
    """One sequence's guesses, as they are to be tested.

    Args:
        length: committed tokens; guess i (from 0) is for position length + i.
        keys: of the attempt.
        guesses: scored guesses; any integers.
        distributions: what each guess was drawn from; empty: each was certain.
    """

    length: int
    keys: RejectionKeys
    guesses: tuple[int, ...] = ()
    distributions: tuple[Distribution, ...] = ()


@dataclass(frozen=True, slots=True)
class Guesses:
    """The guesses of a batch as tensors, K the most of any sequence and N the most tokens of any distribution.

    Args:
        token_ids: [B, K] int64; -1 behind the shorter ones. An id outside the vocabulary is tested and rejected like any other.
        counts: [B] int64 guesses of each sequence.
        support: [B, K, N] int64 ids of the distributions that the guesses were drawn from.
        weights: [B, K, N] float64 in proportion to their probabilities; 0 behind the shorter ones.
    """

    token_ids: Tensor
    counts: Tensor
    support: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Uniforms:
    """Independent uniforms in (0, 1), float64, [B, K + 1] each: column i is for the position of guess i; see `RejectionKeys`."""

    accept: Tensor
    residual: Tensor
    plain: Tensor


def verify_rejection(target_probs: Tensor, tested: Sequence[Tested], is_usable: Tensor | None = None) -> list[Verdict]:
    """Accepts a prefix of each sequence's guesses and draws the token after it.

    Args:
        target_probs: [B, K_max + 1, V] float64 as contracted: row i of a sequence is the target's distribution after guess i, 0 where it has no row.
        tested: B sequences.
        is_usable: [B, K_max + 1] bool as contracted: which rows are distributions; without it, those that are not 0.

    Returns:
        One verdict per sequence; empty where the sequence has no first row. A guess whose own row is unusable is as if it had not come.
    """
    num_rows, device = target_probs.shape[1], target_probs.device
    # Found and applied on the device: one transfer tells the host all.
    num_usable = (target_probs.amax(-1) > 0 if is_usable is None else is_usable).long().cumprod(-1).sum(-1)
    lengths = torch.tensor([scored.length for scored in tested], dtype=torch.int64, device=device)
    streams = ([scored.keys.accept for scored in tested], [scored.keys.residual for scored in tested], [scored.keys.plain for scored in tested])
    draws = Uniforms(*(uniforms_from(lengths, key_tensor(keys, device), num_rows) for keys in streams))
    guesses = _to_tensors(tested, num_rows - 1, device)
    guesses = replace(guesses, counts=guesses.counts.minimum(num_usable - 1).clamp_min_(0))
    found = torch.stack((num_usable, *verify_batch(target_probs, guesses, draws)), 1).tolist()
    return [
        Verdict(num_accepted, (*scored.guesses[:num_accepted], next_id)) if rows else Verdict(0, ())
        for scored, (rows, num_accepted, next_id) in zip(tested, found, strict=True)
    ]


def verify_batch(target_probs: Tensor, guesses: Guesses, draws: Uniforms) -> tuple[Tensor, Tensor]:
    """The ratio test and the draw after it, on tensors.

    Guess i is accepted if and only if `uniform * draft_prob < target_prob`: no division, so no epsilon. After the first rejection the next token
    comes from the normalised positive part of target - draft, after full acceptance from the target's row behind the last guess.

    Args:
        target_probs: [B, K + 1, V] float64.
        guesses: of B sequences.
        draws: randomness for every position.

    Returns:
        Accepted guesses [B] and next tokens [B], int64.
    """
    num_ids = target_probs.shape[-1]
    is_token = (guesses.token_ids >= 0) & (guesses.token_ids < num_ids)
    column = torch.where(is_token, guesses.token_ids, 0)[..., None]
    target = torch.where(is_token, target_probs[:, :-1].gather(-1, column)[..., 0], 0.0)
    draft_probs = guesses.weights / guesses.weights.sum(-1, keepdim=True).clamp_min(_NO_MASS)
    draft = (draft_probs * (guesses.support == guesses.token_ids[..., None])).sum(-1)
    is_guess = torch.arange(guesses.token_ids.shape[1], device=target.device) < guesses.counts[:, None]
    passes = is_guess & (draws.accept[:, :-1] * draft < target)
    accepted = passes.long().cumprod(-1).sum(-1)
    rejects = accepted < guesses.counts
    weights = target_probs[torch.arange(len(accepted), device=accepted.device), accepted]
    if guesses.token_ids.shape[1]:
        tested = torch.arange(len(accepted), device=accepted.device), accepted.clamp(max=guesses.token_ids.shape[1] - 1)
        weights = torch.where(rejects[:, None], _residual(weights, guesses.support[tested], draft_probs[tested]), weights)
    draw = torch.where(rejects[:, None], draws.residual, draws.plain).gather(1, accepted[:, None])[:, 0]
    return accepted, invert(weights, draw).clamp_(max=num_ids - 1)


def uniforms_from(lengths: Tensor, keys: Tensor, num_rows: int) -> Tensor:
    """A stream's uniforms for `num_rows` positions from each length on: [B] int64 and [B] keys to [B, num_rows] float64."""
    return uniforms(keys[:, None], lengths[:, None] + torch.arange(num_rows, device=lengths.device))


def _residual(target: Tensor, support: Tensor, draft_probs: Tensor) -> Tensor:
    """Positive part of target [R, V] minus a sparse draft [R, N]; the target where nothing is left."""
    num_ids = target.shape[-1]
    is_token = (support >= 0) & (support < num_ids)
    residual = target.scatter_add(-1, torch.where(is_token, support, 0), torch.where(is_token, -draft_probs, 0.0)).clamp_min_(0.0)
    has_mass = residual.cumsum(-1)[:, -1:] > _NO_MASS
    return torch.where(has_mass, residual, target)


def _to_tensors(tested: Sequence[Tested], num_guesses: int, device: torch.device) -> Guesses:
    ids = [[*scored.guesses, *[ABSENT_ID] * (num_guesses - len(scored.guesses))] for scored in tested]
    counts = [len(scored.guesses) for scored in tested]
    drawn_from = [distribution for scored in tested for distribution in _distributions(scored, num_guesses)]
    support, weights = pad(drawn_from)
    shape = (len(tested), num_guesses, support.shape[-1])
    as_ids = torch.tensor(ids, dtype=torch.int64).view(len(tested), num_guesses)
    return Guesses(*(tensor.to(device) for tensor in (as_ids, torch.tensor(counts), support.view(shape), weights.view(shape))))


def _distributions(scored: Tested, num_guesses: int) -> list[Distribution]:
    given = scored.distributions or tuple(Distribution((token_id,), (1.0,)) for token_id in scored.guesses)
    return [*given, *[_NOTHING] * (num_guesses - len(given))]
