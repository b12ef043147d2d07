"""A conversation in the terminal: the history, and the loop around it. It knows nothing of templates; the verifier applies the model's."""

import asyncio
import sys
from typing import Any

from rich.console import Console

from client.client import Client
from client.render import summarise
from client.streaming import stream_text
from shared.errors import InvalidRequest

_COMMANDS = "/clear forgets the conversation, /exit ends it"


class Chat:
    """A conversation with one server.

    Args:
        client: open.
        options: as for `Client.generate`.
        system: first message, if any.
        console: for all that is not the model's text.
    """

    def __init__(self, client: Client, options: dict[str, Any], system: str | None, console: Console) -> None:
        self._client = client
        self._options = options
        self._opening: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)
        self._console = console

    async def take(self, line: str) -> bool:
        """Answer one line of the user's; False ends the conversation. A turn that is refused leaves no trace in the history."""
        match line.strip():
            case "":
                return True
            case "/exit":
                return False
            case "/clear":
                self._messages = list(self._opening)
            case command if command.startswith("/"):
                self._console.print(f"unknown command {command}: {_COMMANDS}", style="yellow", markup=False)
            case text:
                await self._answer([*self._messages, {"role": "user", "content": text}])
        return True

    async def _answer(self, messages: list[dict[str, str]]) -> None:
        try:
            completion = await stream_text(self._client, messages, self._options)
        except InvalidRequest as error:
            self._console.print(f"error: {error}", style="red", markup=False)
            return
        if not sys.stdout.isatty():
            sys.stdout.write("\n")
        self._messages = [*messages, {"role": "assistant", "content": completion.text}]
        self._console.print(summarise(completion), style="dim", markup=False)


def run_chat(address: str, options: dict[str, Any], system: str | None, console: Console) -> None:
    """Read lines until `/exit` or the end of the input. Ctrl-C stops an answer, or ends the conversation where there is none."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # gives `input` line editing and a history

        console.print(_COMMANDS, style="dim")
    with asyncio.Runner() as runner:
        client = Client(address)
        runner.run(client.open())
        chat = Chat(client, options, system, console)
        try:
            while (line := _read_line("> " if is_terminal else "")) is not None:
                try:
                    if not runner.run(chat.take(line)):
                        break
                except KeyboardInterrupt:
                    console.print("\n(stopped)", style="dim")
        finally:
            runner.run(client.close())


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None
