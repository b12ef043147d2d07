"""Completions over real gRPC: the engine's own `Request` asked of a service, and what came back compared with the oracle."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from client import Client, Completion, Part
from shared.tokenizer import load_tokenizer
from tests.support.model_dir import ModelDirs
from tests.support.processes import DEADLINE_S
from verifier_service.request import FinishReason, Request


def to_options(request: Request) -> dict[str, Any]:
    """A request in the client's terms; its eos_ids must be the model's, or none at all."""
    sampling, stopping = request.sampling, request.stopping
    return {
        "mode": request.mode,
        "request_id": request.request_id,
        "resume_token_ids": request.resume_ids,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias),
        "seed": request.seed,
        "max_tokens": stopping.max_tokens,
        "min_tokens": stopping.min_tokens,
        "stop_token_ids": sorted(stopping.stop_ids),
        "ignore_eos": not stopping.eos_ids,
        "max_draft_tokens": request.max_draft_tokens,
        "preferred_drafter": request.preferred_drafter,
    }


async def complete(client: Client, request: Request, on_part: Callable[[Part], None] = lambda _: None) -> Completion:
    """One completion, each part told as it comes."""
    async with client.generate(request.prompt_ids, deadline_s=2 * DEADLINE_S, **to_options(request)) as generation:
        async for part in generation:
            on_part(part)
        return generation.result


async def complete_all(address: str, requests: Sequence[Request], on_part: Callable[[Part], None] = lambda _: None) -> list[Completion]:
    """All at once."""
    async with Client(address) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(complete(client, request, on_part)) for request in requests]
    return [task.result() for task in tasks]


class AtToken:
    """Does something once the n-th token has been received, counted over all completions that report to it.

    Args:
        number: n.
        action: what to do.
    """

    def __init__(self, number: int, action: Callable[[], object]) -> None:
        self.received = 0
        self.accepted = 0  # draft tokens among them
        self.accepted_before: int | None = None  # the same when the action was done
        self._number = number
        self._action = action

    def __call__(self, part: Part) -> None:
        self.received += len(part.token_ids)
        self.accepted += part.accepted
        if self.accepted_before is None and self.received >= self._number:
            self.accepted_before = self.accepted
            self._action()


class Referee:
    """What the target says by itself, computed once per request whatever the drafter."""

    def __init__(self, models: ModelDirs) -> None:
        self._oracle = models.oracle()
        self._tokenizer = load_tokenizer(models.target)

    def check(self, request: Request, completion: Completion) -> None:
        """The tokens are the oracle's, the text is the tokenizer's, the usage counts what was delivered."""
        token_ids = self.tokens(request)
        assert list(completion.token_ids) == token_ids, request
        silent = completion.reason in (FinishReason.EOS.value, FinishReason.STOP_TOKEN.value)
        assert completion.text == self.decode(token_ids[:-1] if silent else token_ids)
        usage = completion.usage
        assert (usage.prompt_tokens, usage.generated_tokens) == (len(request.prompt_ids), len(request.resume_ids) + len(token_ids))
        assert usage.accepted_tokens <= usage.drafted_tokens
        # Every step gives one token that is the target's own, and the accepted ones.
        assert usage.accepted_tokens <= len(token_ids)

    def tokens(self, request: Request) -> list[int]:
        """What comes after the prompt and the resumed tokens."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the services need the cores, and threads gain nothing on a tiny model
        try:
            return self._oracle.tokens(request)
        finally:
            torch.set_num_threads(num_threads)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)
