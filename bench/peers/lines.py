"""How the driver and a peer's worker talk: one JSON object a line. Standard library only, for it is imported in both environments.

Owns the words of that talk and the arithmetic of arrivals, which has to be the same for all engines. It knows no engine.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts to be completed together, each to its full length: the end of sequence is ignored.

    Args:
        prompts: token ids of each.
        max_tokens: tokens to generate for each.
        temperature: 0 is greedy.
        seed: of the first prompt; the next has the next.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a job.

    Args:
        token_ids: of each prompt, what was generated.
        wall_s: from the first call to the last token.
        decode_tokens: tokens that came after every prompt had its first.
        decode_s: the time in which they came.
        accepted_per_round: mean number of accepted guesses in a round; None without rounds, or where the engine does not say.
    """

    token_ids: tuple[tuple[int, ...], ...]
    wall_s: float
    decode_tokens: int
    decode_s: float
    accepted_per_round: float | None = None

    @property
    def num_tokens(self) -> int:
        """Of all prompts."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the whole time, prompts included."""
        return self.num_tokens / self.wall_s

    @property
    def decode_per_s(self) -> float:
        """Generated tokens over the time, both from the moment on at which every prompt has its first token."""
        return self.decode_tokens / self.decode_s


class Arrivals:
    """Notes when the tokens of a job come.

    Args:
        num_prompts: of the job.
        clock: monotonic seconds; read once now, as the job's beginning.
    """

    def __init__(self, num_prompts: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began_at = clock()
        self._events: list[tuple[float, int, int]] = []
        self._token_ids: list[list[int]] = [[] for _ in range(num_prompts)]

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """Tokens of a prompt have come, now."""
        if token_ids:
            self._events.append((self._clock(), index, len(token_ids)))
            self._token_ids[index].extend(token_ids)

    def to_answer(self, accepted_per_round: float | None = None) -> Answer:
        """The whole.

        Raises:
            ValueError: a prompt got no token, or nothing came after the first ones: there is no decoding to time.
        """
        firsts: dict[int, float] = {}
        for at, index, _ in self._events:
            firsts.setdefault(index, at)
        if len(firsts) < len(self._token_ids):
            raise ValueError(f"{len(self._token_ids) - len(firsts)} of {len(self._token_ids)} prompts got no token")
        all_began_at, ended_at = max(firsts.values()), self._events[-1][0]
        decode_tokens = sum(count for at, _, count in self._events if at > all_began_at)
        if not decode_tokens:
            raise ValueError("no token came after the first ones: ask for more")
        return Answer(tuple(map(tuple, self._token_ids)), ended_at - self._began_at, decode_tokens, ended_at - all_began_at, accepted_per_round)


def to_line(message: "Job | Answer | Mapping[str, Any]") -> str:
    """A message as a line."""
    return json.dumps(message if isinstance(message, Mapping) else asdict(message)) + "\n"


def to_job(message: Mapping[str, Any]) -> Job:
    """A job as it was sent."""
    return Job(**{**message, "prompts": tuple(map(tuple, message["prompts"]))})


def to_answer(message: Mapping[str, Any]) -> Answer:
    """An answer as it was sent.

    Raises:
        RuntimeError: the worker says why there is none.
    """
    if "error" in message:
        raise RuntimeError(f"the worker failed: {message['error']}")
    return Answer(**{**message, "token_ids": tuple(map(tuple, message["token_ids"]))})


def take_stdout() -> TextIO:
    """Standard output for our lines alone: whatever else the process prints goes to standard error from now on."""
    ours = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return ours


def serve(output: TextIO, ready: Mapping[str, Any], run: Callable[[Job], Answer]) -> None:
    """Say what is ready, then answer jobs from standard input until it ends; a job that fails is answered with the error."""
    output.write(to_line({"ready": dict(ready)}))
    for line in sys.stdin:
        try:
            answer = to_line(run(to_job(json.loads(line))))
        except Exception as error:  # whatever an engine raises is the driver's to read
            answer = to_line({"error": f"{type(error).__name__}: {error}"})
        output.write(answer)
