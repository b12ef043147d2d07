"""How often a draft is right, exactly: on given texts, the chance of acceptance under each rule, from both models' distributions.

    python -m bench.coupling --target DIR --draft DIR --texts FILE    (FILE: what `outrider bench --temperature 1 --texts --json FILE` wrote)

Per position of the texts: sum of min(p, q), the best that any rule can reach (the ratio test reaches it), and the probability that two
Gumbel races with the same noise have the same winner, sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh 2024).
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.tokenizer import load_tokenizer


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Sum of the smaller probabilities: 1 - total variation. Both [N, V]; returns [N]."""
    return torch.minimum(target_probs, draft_probs).sum(-1)


def coupled(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Probability that both pick the same token with the same Gumbel noise. Both [N, V] float64, positive; returns [N].

    Sorted by the ratio target / draft the inner sum falls into two: where y's ratio is at least x's, target_y / target_x is the larger
    quotient, elsewhere draft_y / draft_x. So prefix sums do for V terms what would be V^2.
    """
    order = (target_probs / draft_probs).argsort(-1)
    target, draft = target_probs.gather(-1, order), draft_probs.gather(-1, order)
    target_from_here = target.flip(-1).cumsum(-1).flip(-1)
    draft_before = draft.cumsum(-1) - draft
    agreement: Tensor = 1.0 / (target_from_here / target + draft_before / draft)
    return agreement.sum(-1)


@torch.inference_mode()
def _probabilities(model: PreTrainedModel, token_ids: list[int], num_prompt: int, vocab_size: int, temperature: float) -> Tensor:
    logits = model(torch.tensor([token_ids])).logits[0, num_prompt - 1 : -1, :vocab_size].to(torch.float64)
    # A probability of zero has no ratio; this is far below anything that could be picked.
    probabilities: Tensor = (logits / temperature).softmax(-1).clamp_min(1e-300)
    return probabilities


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--texts", required=True)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.target)
    models = [AutoModelForCausalLM.from_pretrained(name, dtype="auto") for name in (arguments.target, arguments.draft)]
    record = json.loads(Path(arguments.texts).read_text())
    temperature = record["settings"]["request"]["temperature"]
    if temperature == 0:
        parser.error("at temperature 0 nothing is drawn: --texts needs a run with --temperature above 0")
    overlaps, couplings = [], []
    for run in record["cells"][0]["arms"]["draft"]["runs"]:
        for prompt_ids, generated_ids in zip(run["prompt_ids"], run["texts"], strict=True):
            if generated_ids:
                token_ids = [*prompt_ids, *generated_ids]
                target, draft = (_probabilities(model, token_ids, len(prompt_ids), tokenizer.vocab_size, temperature) for model in models)
                overlaps.append(overlap(target, draft))
                couplings.append(coupled(target, draft))
    positions = torch.cat(overlaps)
    best, with_noise = positions.mean(), torch.cat(couplings).mean()
    print(f"T={temperature:g}, {len(positions)} positions: mean sum min(p, q) {best:.4f}, mean coupled probability {with_noise:.4f}")


if __name__ == "__main__":
    main()
