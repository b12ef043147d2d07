"""What plain decoding says: the whole text through the unmodified model for every token, and the same rule for picking."""

import copy
from functools import lru_cache

import torch

from shared.engine.model_loader import LoadedModel
from shared.noise import noise_key
from shared.picking import pick_tokens
from shared.sampling import Pick, TokenRules
from verifier_service.request import Request
from verifier_service.stopping import find_stop


class PlainDecoder:
    """Decodes without paging, batching or guessing, with the attention of `transformers` itself."""

    def __init__(self, model: LoadedModel, vocab_size: int | None = None) -> None:
        self._model = copy.deepcopy(model.model)
        self._model.set_attn_implementation("eager")
        self._vocab_size = vocab_size or model.vocab_size
        self._logits = lru_cache(maxsize=100_000)(self._forward)

    def tokens(self, request: Request) -> list[int]:
        """The output of a request, resumed tokens excluded. Meant for coupled and greedy requests."""
        stopping = request.stopping
        text = [*request.prompt_ids, *request.resume_ids]
        suppressed = tuple(sorted(stopping.eos_ids | stopping.stop_ids))
        prompt_length = len(request.prompt_ids)
        rules = TokenRules(request.sampling, prompt_length, self._vocab_size, suppressed, prompt_length + stopping.min_tokens)
        output: list[int] = []
        while True:
            pick = Pick(rules, noise_key(request.seed), text)
            token_id = int(pick_tokens(self._logits(tuple(text))[None], [pick])[0])
            stop = find_stop([token_id], len(text) - prompt_length, stopping)
            text.append(token_id)
            output.append(token_id)
            if stop is not None:
                return output

    @torch.inference_mode()
    def _forward(self, text: tuple[int, ...]) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([text]), use_cache=False).logits
        return logits[0, -1]
