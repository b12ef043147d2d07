"""The command line `outrider`. It parses and reports; the work of each command is elsewhere.

gRPC, torch and models are imported where they are needed: `--help` is quick, and gRPC can be told to be quiet before it is imported.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from typer.exceptions import TyperException

from client import options as flags
from client.bench.command import HELP as BENCH_HELP
from client.bench.command import BenchCommand, bench_command
from client.train_speculator import TRAIN_HELP, train_speculator_command
from shared import logs
from shared.errors import OutriderError, Unavailable

if TYPE_CHECKING:
    from client.client import Client
    from shared.config import Config

app = typer.Typer(
    name="outrider",
    help="Speculative decoding over gRPC: the target model's own tokens, sooner.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SERVICE = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_LOCAL = "127.0.0.1:50051"

_Result = TypeVar("_Result")


@app.command(
    "verifier", context_settings=_SERVICE, add_help_option=False, help="Run a verifier service: the target model. --help lists its settings."
)
def verifier_command(context: typer.Context) -> None:
    """Run a verifier service."""
    from verifier_service.config import VerifierConfig

    config = _configure(VerifierConfig, context.args, "outrider verifier", "Serves the target model. Draft services that attach make it faster.")

    from verifier_service.main import run

    run(config)


@app.command(
    "draft", context_settings=_SERVICE, add_help_option=False, help="Run a draft service: rides ahead of a verifier. --help lists its settings."
)
def draft_command(context: typer.Context) -> None:
    """Run a draft service."""
    from draft_service.config import DraftConfig

    config = _configure(DraftConfig, context.args, "outrider draft", "Attaches to a verifier service and streams guesses to it.")

    from draft_service.main import run

    run(config)


@app.command("up", help="Run both services on this machine, logs merged, until Ctrl-C.")
def up_command(
    target: Annotated[str | None, typer.Option(help="Target model: hub id, directory or alias.", show_default="SmolLM2-135M-Instruct")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: hub id or directory.", show_default="n-gram lookup")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Verifier's port for clients.", show_default="50051")] = None,
    link_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Verifier's port for draft services.", show_default="50052")] = None,
    draft_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Draft service's port for clients.", show_default="50061")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SETTING=VALUE", help="Any other setting: verifier.SETTING, draft.SETTING or, for both, SETTING. Repeatable."),
    ] = None,
) -> None:
    """Run both services on this machine."""
    from client.pair import plan
    from client.supervisor import Supervisor
    from client.up import check_addresses_are_free, children, line_writer, run_up

    to_verifier = [("--target", target), ("--listen", port and f"127.0.0.1:{port}"), ("--link", link_port and f"127.0.0.1:{link_port}")]
    to_draft = [("--draft", draft), ("--listen", draft_port and f"127.0.0.1:{draft_port}")]
    pair = plan([f"{name}={text}" for name, text in to_verifier if text], [f"{name}={text}" for name, text in to_draft if text], assignments or ())
    check_addresses_are_free(pair)
    console = Console(stderr=True, highlight=False)
    write = line_writer(console, plain=pair.verifier.log_format == "json")
    grace_s = max(pair.verifier.drain_grace_s, pair.draft.drain_grace_s) + 5.0
    address = "" if pair.verifier.listen == _LOCAL else f" --address {pair.verifier.listen}"
    hint = f'clients: {pair.verifier.listen}, or {pair.draft.listen} for the draft service. Try: outrider generate{address} "Once upon a time"'
    asyncio.run(run_up(Supervisor(children(pair), write, grace_s), console, hint))


@app.command("generate", help="Continue a prompt; the text streams to standard output, a summary goes to standard error.")
def generate_command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it, or with -, standard input less its last line end.")] = None,
    address: flags.Address = _LOCAL,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message: apply the model's chat template.")] = False,
    system: flags.System = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON for each part, and one for the whole.")] = False,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = 256,
    min_tokens: flags.MinTokens = None,
    stop: flags.Stop = None,
    stop_token_id: flags.StopTokenId = None,
    ignore_eos: flags.IgnoreEos = False,
    mode: flags.ModeName = None,
    no_speculation: flags.NoSpeculation = False,
    max_draft_tokens: flags.MaxDraftTokens = None,
    drafter: flags.Drafter = None,
    priority: flags.Priority = None,
    tenant: flags.Tenant = None,
    request_id: flags.RequestId = None,
    deadline_s: flags.Deadline = 600.0,
) -> None:
    """Continue a prompt."""
    given = dict(locals())
    options = flags.to_options({name: given[name] for name in given if name not in {"prompt", "address", "chat", "system", "as_json"}})
    text = _read_prompt(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})

    from client.render import summarise
    from client.streaming import stream_json, stream_text

    stream = stream_json if as_json else stream_text
    completion = _call(address, lambda client: stream(client, messages if chat or system is not None else text, options))
    if not as_json:
        Console(stderr=True, highlight=False).print(summarise(completion), style="dim", markup=False, soft_wrap=True)


@app.command("chat", help="Talk to the model; the history is kept. Reads lines from standard input.")
def chat_command(
    address: flags.Address = _LOCAL,
    system: flags.System = None,
    temperature: flags.Temperature = None,
    top_p: flags.TopP = None,
    seed: flags.Seed = None,
    max_tokens: flags.MaxTokens = 512,
    mode: flags.ModeName = None,
    no_speculation: flags.NoSpeculation = False,
    max_draft_tokens: flags.MaxDraftTokens = None,
    priority: flags.Priority = None,
    tenant: flags.Tenant = None,
    deadline_s: flags.Deadline = 600.0,
) -> None:
    """Talk to the model."""
    given = dict(locals())
    options = flags.to_options({name: given[name] for name in given if name not in {"address", "system"}})

    from client.chat import run_chat

    with _hint(address):
        run_chat(address, options, system, Console(stderr=True, highlight=False))


@app.command("info", help="What a service runs: model, limits, drafters.")
def info_command(address: flags.Address = _LOCAL, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show what a service runs."""
    from client.render import info_table, info_to_json

    info = _call(address, lambda client: client.info())
    if as_json:
        sys.stdout.write(info_to_json(info) + "\n")
    else:
        Console(highlight=False).print(info_table(info, address))


@app.command("health", help="Whether a service is serving: exit code 0 if it is, 1 if not.")
def health_command(
    address: flags.Address = _LOCAL,
    service: Annotated[str, typer.Option(help="Full name of one gRPC service.", show_default="all of the process")] = "",
) -> None:
    """Tell whether a service is serving."""
    state = _call(address, lambda client: client.health(service))
    sys.stdout.write(state + "\n")
    if state != "SERVING":
        raise typer.Exit(1)


@app.command("demo", help="Start both services on free ports, rewrite a text, show what it took, stop.")
def demo_command(
    target: Annotated[str | None, typer.Option(help="Target model: hub id, directory or alias.", show_default="SmolLM2-135M-Instruct")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model: hub id or directory.", show_default="n-gram lookup")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 160,
) -> None:
    """Show that everything works."""
    from client.demo import run_demo

    asyncio.run(run_demo(target, draft, max_tokens, Console(stderr=True, highlight=False)))


app.command("bench", cls=BenchCommand, help=BENCH_HELP)(bench_command)
app.command("train-speculator", help=TRAIN_HELP)(train_speculator_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 done, 1 failed, 2 wrong arguments or configuration, 130 interrupted."""
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    from shared.config import ConfigError

    logs.quiet_grpc()
    try:
        return int(app(list(sys.argv[1:] if arguments is None else arguments) or ["--help"], prog_name="outrider", standalone_mode=False) or 0)
    except TyperException as error:
        return _complain(error.format_message(), code=error.exit_code)
    except ConfigError as error:
        return _complain(*error.problems, code=2)
    except OutriderError as error:
        return _complain(str(error) + (f" (request {error.request_id})" if error.request_id else ""))
    except TimeoutError:
        return _complain("the deadline passed before the answer was complete")


def _complain(*sentences: str, code: int = 1) -> int:
    for sentence in sentences:
        sys.stderr.write(f"outrider: {sentence}\n")
    return code


def _configure(schema: "type[Config]", arguments: Sequence[str], usage: str, purpose: str) -> "Config":
    """A service's configuration, or its help where that is asked for."""
    from client.pair import ALL_VARIABLES
    from shared.config import load, settings

    if "--help" in arguments or "-h" in arguments:
        from client.render import settings_help

        Console(highlight=False).print(settings_help(usage, purpose, settings(schema)))
        raise typer.Exit
    return load(schema, arguments, ALL_VARIABLES)


def _call(address: str, work: "Callable[[Client], Awaitable[_Result]]") -> _Result:
    """Do some work with a client."""
    from client.client import Client

    async def connected() -> _Result:
        async with Client(address) as client:
            return await work(client)

    with _hint(address):
        return asyncio.run(connected())


@contextmanager
def _hint(address: str) -> Iterator[None]:
    """Where nothing answers, say what to do about it instead of what gRPC says."""
    try:
        yield
    except Unavailable as error:
        if error.reason != "UNREACHABLE":
            raise
        raise OutriderError(f"nothing answers at {address}. Is a service running there? `outrider up` starts both on this machine.") from None


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("give a prompt, as an argument or on standard input")
    return sys.stdin.read().removesuffix("\n")


if __name__ == "__main__":
    main()
