"""How sure a draft is of a guess that it is about to send. It does not know what is done about it.

What is asked is whether the target picks the same token *with the same noise*. The draft's probability of the token is not the best answer at
T > 0: an unlikely token that wins by far, thanks to its noise, wins with slightly other scores too. So the noise belongs to the scores.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.noise import gumbel, key_tensor
from shared.sampling import Pick

_NUM_RIVALS = 64


def confidence(scores: Tensor, picks: Sequence[Pick], token_ids: Tensor) -> Tensor:
    """The weight of each row's pick in the softmax of score + noise, over it and its best-scored rivals; without noise where greedy.

    Args:
        scores: [R, V] from `shared.picking.process`.
        picks: one per row.
        token_ids: [R], what the rows have picked; rows with a negative one get a value without meaning.

    Returns:
        [R] float64 in 0..1.
    """
    rivals = scores.topk(min(_NUM_RIVALS, scores.shape[-1])).indices
    ids = torch.cat([token_ids.clamp_min(0)[:, None], rivals], 1)
    keys, positions = key_tensor((pick.key for pick in picks), scores.device), torch.tensor([pick.position for pick in picks], device=scores.device)
    is_noisy = torch.tensor([not pick.rules.sampling.is_greedy for pick in picks], device=scores.device)
    noise = gumbel(keys[:, None], positions[:, None], ids) * is_noisy[:, None]
    totals = scores.gather(1, ids) + noise
    totals[:, 1:].masked_fill_(rivals == ids[:, :1], float("-inf"))  # the pick is not its own rival
    return totals.softmax(-1, dtype=torch.float64)[:, 0]
