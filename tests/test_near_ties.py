"""In bfloat16 and float32 a batch of another shape rounds differently, so a near-tie may fall the other way. Nothing but near-ties may.

Plain decoding and the pair are compared on weights of the number type; where their texts part, the same weights in float64 say how close the
two tokens' scores really were.
"""

import copy

import pytest
import torch

from draft_service.draft_model import DraftModel
from draft_service.drafter import Drafter
from shared.engine.block_allocator import BlockAllocator
from shared.engine.model_loader import LoadedModel
from shared.noise import gumbel, key_tensor, noise_key
from shared.sampling import SamplingParams
from tests.support.tiny_models import noisy_copy, tiny_llama
from tests.support.virtual_pair import Clock, TimedRunner, VirtualPair
from verifier_service.request import Request, Stopping

NUM_REQUESTS = 24
NUM_TOKENS = 40


def exact_logits(model: LoadedModel, text: list[int]) -> torch.Tensor:
    wide = copy.deepcopy(model.model).double()
    wide.set_attn_implementation("eager")
    with torch.inference_mode():
        logits: torch.Tensor = wide(torch.tensor([text]), use_cache=False).logits
    return logits[0, -1]


def texts(model: LoadedModel, temperature: float, with_drafter: bool) -> dict[str, list[int]]:
    pair = VirtualPair(model, num_blocks=512, max_running=8, max_draft_tokens=4, window=12)
    if with_drafter:
        clock = Clock()
        runner = TimedRunner(noisy_copy(model, 0.02, seed=3), 512, 4, clock, 0.002)
        pair.attach(Drafter(DraftModel(runner, BlockAllocator(512, 4)), 32, clock), clock, capacity=32)
    asked = [
        Request(f"{seed}", (seed % 60, 7, 9), SamplingParams(temperature=temperature), Stopping(NUM_TOKENS), seed=seed, max_draft_tokens=4)
        for seed in range(NUM_REQUESTS)
    ]
    return pair.run(*asked)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_texts_part_only_where_two_tokens_score_nearly_the_same(dtype: torch.dtype, temperature: float) -> None:
    model = tiny_llama(dtype=dtype)
    plain, paired = texts(model, temperature, with_drafter=False), texts(model, temperature, with_drafter=True)
    num_compared = num_parted = 0
    for name, text in plain.items():
        parted_at = next((index for index, pair in enumerate(zip(text, paired[name], strict=True)) if pair[0] != pair[1]), None)
        num_compared += len(text) if parted_at is None else parted_at + 1
        if parted_at is None:
            continue
        num_parted += 1
        prefix = [int(name) % 60, 7, 9, *text[:parted_at]]
        exact = exact_logits(model, prefix)
        with torch.inference_mode():
            narrow = copy.deepcopy(model.model)
            narrow.set_attn_implementation("eager")
            rounding = (narrow(torch.tensor([prefix]), use_cache=False).logits[0, -1].to(torch.float64) - exact).abs().max()
        candidates = torch.tensor([text[parted_at], paired[name][parted_at]])
        scores = exact[candidates]
        if temperature:
            scores = scores / temperature + gumbel(key_tensor([noise_key(int(name))]), torch.tensor([len(prefix)]), candidates)
        # Each of the two runs is off by about `rounding`, for each of the two tokens.
        assert (scores[0] - scores[1]).abs() <= 4 * rounding
    assert num_compared > NUM_REQUESTS * NUM_TOKENS / 2
    if dtype is torch.bfloat16:
        assert num_parted > 0, "no text parted, so nothing was checked"
    assert num_parted / num_compared < (0.05 if dtype is torch.bfloat16 else 0.001)
