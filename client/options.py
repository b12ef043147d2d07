"""The flags of a request, declared once for every command that makes one. It knows no connection."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

_DECODING = "How tokens are picked"
_STOPPING = "When to stop"
_SPECULATION = "Speculation and call"

Address = Annotated[str, typer.Option(envvar="OUTRIDER_ADDRESS", help="Verifier service or draft service, host:port.")]
System = Annotated[str | None, typer.Option(help="System message of the conversation.")]
Deadline = Annotated[float, typer.Option(min=0.001, help="Seconds after which to give up.", rich_help_panel=_SPECULATION)]

Temperature = Annotated[float | None, typer.Option(help="0 to 100; 0 is greedy.", show_default="1", rich_help_panel=_DECODING)]
TopK = Annotated[int | None, typer.Option(help="Keep the k best tokens; 0 keeps all.", show_default="0", rich_help_panel=_DECODING)]
TopP = Annotated[float | None, typer.Option(help="Keep the best tokens with this mass, in (0, 1].", show_default="1", rich_help_panel=_DECODING)]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this likely beside the best.", show_default="0", rich_help_panel=_DECODING)]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 0, at most 10.", show_default="1", rich_help_panel=_DECODING)]
PresencePenalty = Annotated[float | None, typer.Option(help="-2 to 2.", show_default="0", rich_help_panel=_DECODING)]
FrequencyPenalty = Annotated[float | None, typer.Option(help="-2 to 2.", show_default="0", rich_help_panel=_DECODING)]
LogitBias = Annotated[list[str] | None, typer.Option(metavar="ID=VALUE", help="Added to a token's logit; repeatable.", rich_help_panel=_DECODING)]
Seed = Annotated[int | None, typer.Option(min=0, help="Same seed, same text.", show_default="random", rich_help_panel=_DECODING)]

MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate; 0 is whatever fits the model.", rich_help_panel=_STOPPING)]
MinTokens = Annotated[int | None, typer.Option(help="No end before this many tokens.", show_default="0", rich_help_panel=_STOPPING)]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends the text; repeatable.", rich_help_panel=_STOPPING)]
StopTokenId = Annotated[list[int] | None, typer.Option(help="Token id that ends the text; repeatable.", rich_help_panel=_STOPPING)]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.", rich_help_panel=_STOPPING)]

ModeName = Annotated[
    str | None, typer.Option(metavar="coupled|rejection", help="Verification mode.", show_default="the server's", rich_help_panel=_SPECULATION)
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Decode plainly.", rich_help_panel=_SPECULATION)]
MaxDraftTokens = Annotated[
    int | None, typer.Option(min=0, help="Most draft tokens in one step.", show_default="the server's", rich_help_panel=_SPECULATION)
]
Drafter = Annotated[str | None, typer.Option(help="Draft service to prefer, by name or instance id.", rich_help_panel=_SPECULATION)]
Priority = Annotated[int | None, typer.Option(help="-100 to 100; higher goes first.", show_default="0", rich_help_panel=_SPECULATION)]
Tenant = Annotated[str | None, typer.Option(help="Whose request it is: tenants share the model fairly.", rich_help_panel=_SPECULATION)]
RequestId = Annotated[str | None, typer.Option(help="Name in the server's logs.", show_default="random", rich_help_panel=_SPECULATION)]


def to_options(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Client.generate` out of a command's arguments.

    Args:
        given: the command's arguments by name, those that are no flag of a request left out.

    Raises:
        typer.BadParameter: a value is of the wrong form.
    """
    options = dict(given)
    options["max_tokens"] = options["max_tokens"] or None
    options["logit_bias"] = _parse_bias(options.get("logit_bias") or ())
    options["stop_token_ids"] = options.pop("stop_token_id", None)
    options["preferred_drafter"] = options.pop("drafter", None)
    options["ignore_eos"] = options.get("ignore_eos") or None
    if options.pop("no_speculation"):
        if options["max_draft_tokens"]:
            raise typer.BadParameter("--no-speculation and --max-draft-tokens contradict each other")
        options["max_draft_tokens"] = 0
    return options


def _parse_bias(pairs: Sequence[str]) -> dict[int, float] | None:
    bias: dict[int, float] = {}
    for pair in pairs:
        token_id, _, addend = pair.partition("=")
        try:
            bias[int(token_id)] = float(addend)
        except ValueError:
            raise typer.BadParameter(f"--logit-bias must be ID=VALUE, as in 42=-5; it is {pair!r}") from None
    return bias or None
