"""What is asked: prompts from a file, or made up with lengths from a distribution. It knows no service."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from client.completion import Prompt
from shared.errors import OutriderError


class BadPrompts(OutriderError):
    """A prompt file that cannot be used; the text names the line."""

    reason = "BAD_PROMPTS"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: what is asked, how many tokens are wanted at most, and the seed of its noise."""

    prompt: Prompt
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts, at least 1.

    Args:
        kind: `fixed`, `uniform` (both ends included) or `lognormal`.
        first: the count; the lowest; the median.
        second: unused; the highest; the standard deviation of the logarithm.
    """

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """`128`, `64:256` or `lognormal:128:0.5`.

        Raises:
            ValueError: it is none of these.
        """
        words = text.split(":")
        try:
            if words[0] == "lognormal" and len(words) == 3:
                lengths = cls("lognormal", float(words[1]), float(words[2]))
            elif len(words) == 2:
                lengths = cls("uniform", int(words[0]), int(words[1]))
            else:
                lengths = cls("fixed", int(text))
        except ValueError:
            raise ValueError(f"must be N, LOW:HIGH or lognormal:MEDIAN:SIGMA; it is {text!r}") from None
        if not (1 <= lengths.first < math.inf and 0 <= lengths.second < math.inf) or (lengths.kind == "uniform" and lengths.second < lengths.first):
            raise ValueError(f"must be lengths from 1 on, the lower one first; it is {text!r}")
        return lengths

    def draw(self, random: Random) -> int:
        """One length."""
        if self.kind == "uniform":
            return random.randint(int(self.first), int(self.second))
        return max(1, round(random.lognormvariate(math.log(self.first), self.second))) if self.kind == "lognormal" else int(self.first)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Where prompts come from.

    Args:
        file: prompts of a file, in its order and again from the start; empty: random token ids.
        input_tokens: lengths of made-up prompts.
        output_tokens: tokens to generate.
        vocab_size: made-up prompts have ids below.
        seed: of everything drawn.
    """

    file: Sequence[Prompt]
    input_tokens: Lengths
    output_tokens: Lengths
    vocab_size: int
    seed: int

    def asks(self, num_requests: int, start: int) -> list[Ask]:
        """Requests number `start` on: the same for the same numbers, whoever asks. Seeds are consecutive."""
        prompts = islice(cycle(self.file), start % len(self.file), None) if self.file else None
        return [self._ask(number, next(prompts) if prompts else None) for number in range(start, start + num_requests)]

    def _ask(self, number: int, prompt: Prompt | None) -> Ask:
        random = Random(f"{self.seed}/{number}")
        if prompt is None:
            prompt = tuple(random.randrange(self.vocab_size) for _ in range(self.input_tokens.draw(random)))
        return Ask(prompt, self.output_tokens.draw(random), self.seed + number)


def read_prompts(path: Path, as_chat: bool) -> list[Prompt]:
    """Reads a file of prompts: a JSON object per line with `prompt` or `messages`, or a line of text each; empty lines are left out.

    Args:
        path: UTF-8; JSON if its name ends in .jsonl or .json.
        as_chat: what is text becomes a user's message.

    Raises:
        BadPrompts: it cannot be read, a line is not of that form, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadPrompts(f"{path}: {error}") from error
    read = _from_json if path.suffix in {".jsonl", ".json"} else str
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt: Any = read(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadPrompts(f'{path}, line {number}: needs {{"prompt": "..."}} or {{"messages": [...]}}: {error}') from None
        prompts.append([{"role": "user", "content": prompt}] if as_chat and isinstance(prompt, str) else prompt)
    if not prompts:
        raise BadPrompts(f"{path} has no prompts")
    return prompts


def _from_json(line: str) -> Prompt:
    record = json.loads(line)
    if isinstance(record.get("prompt"), str):
        return str(record["prompt"])
    return [{"role": str(message["role"]), "content": str(message["content"])} for message in record["messages"]]
