"""Draws one at a time, for tests that compare them with draws in batches."""

import torch

from shared.drawing import invert
from shared.link import Distribution
from shared.noise import key_tensor, uniforms


def uniform(key: int, position: int) -> float:
    """The uniform of a key at a position."""
    return float(uniforms(key_tensor([key]), torch.tensor([position])))


def draw(distribution: Distribution, key: int, position: int) -> int:
    """The token that this uniform draws."""
    weights = torch.tensor([distribution.probabilities], dtype=torch.float64)
    return distribution.token_ids[int(invert(weights, torch.tensor([uniform(key, position)], dtype=torch.float64)))]
