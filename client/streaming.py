"""A completion shown in the terminal while it comes. It knows how to write, not what to ask for."""

import sys
from typing import Any, TextIO

from client.client import Client
from client.completion import Completion, Prompt
from client.render import completion_to_json, part_to_json, printable


async def stream_text(client: Client, prompt: Prompt, options: dict[str, Any], out: TextIO | None = None) -> Completion:
    """Generate and write the text as it comes; ends on a new line where `out` is a terminal."""
    out = out or sys.stdout
    is_terminal = out.isatty()
    async with client.generate(prompt, **options) as generation:
        async for part in generation:
            out.write(printable(part.text) if is_terminal else part.text)
            out.flush()
        completion = generation.result
    if is_terminal and not completion.text.endswith("\n"):
        out.write("\n")
    return completion


async def stream_json(client: Client, prompt: Prompt, options: dict[str, Any], out: TextIO | None = None) -> Completion:
    """Generate and write one line of JSON for each part and one for the whole."""
    out = out or sys.stdout
    async with client.generate(prompt, **options) as generation:
        async for part in generation:
            out.write(part_to_json(part) + "\n")
            out.flush()
        completion = generation.result
    out.write(completion_to_json(completion) + "\n")
    out.flush()
    return completion
