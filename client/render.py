"""How things look in a terminal and as JSON. Values in, text or rich renderables out; nothing here prints or connects."""

import dataclasses
import enum
import json
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from client.completion import Completion, Part, ServiceInfo
from shared.config import Setting

_KEPT_CONTROLS = "\n\t"


def printable(text: str) -> str:
    """Text of a model for a terminal: without control characters, which could move the cursor or worse."""
    return "".join(character for character in text if character in _KEPT_CONTROLS or unicodedata.category(character) != "Cc")


def summarise(completion: Completion) -> str:
    """One line about a completion: tokens, speed, time to first token, and how the drafts did."""
    usage, timings = completion.usage, completion.timings
    parts = [f"{timings.received_tokens} tokens ({completion.reason})", f"{timings.tokens_per_s:.1f} tok/s"]
    if timings.ttft_s is not None:
        parts.append(f"TTFT {timings.ttft_s * 1e3:.0f} ms")
    if usage.acceptance_rate is None or usage.mean_accepted_length is None:
        parts.append("no drafts")
    else:
        parts.append(f"acceptance {usage.acceptance_rate:.2f} ({usage.accepted_tokens}/{usage.drafted_tokens})")
        parts.append(f"mean accepted length {usage.mean_accepted_length:.2f}")
    return " · ".join(parts)


def part_to_json(part: Part) -> str:
    """A part as one line of JSON."""
    return json.dumps({"type": "part", **_plain(part)}, ensure_ascii=False)


def completion_to_json(completion: Completion) -> str:
    """The final record as one line of JSON, derived figures included."""
    record = _plain(completion)
    record["usage"] |= {"acceptance_rate": completion.usage.acceptance_rate, "mean_accepted_length": completion.usage.mean_accepted_length}
    record["timings"] |= {"tokens_per_s": completion.timings.tokens_per_s}
    return json.dumps({"type": "result", **record}, ensure_ascii=False)


def info_to_json(info: ServiceInfo) -> str:
    """A service's info as indented JSON."""
    return json.dumps(_plain(info), indent=2, ensure_ascii=False)


def info_table(info: ServiceInfo, address: str) -> RenderableType:
    """A service's info for people."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    model = info.model
    table.add_row("service", f"{address}, outrider {info.version}, link protocol {info.protocol_revision}")
    table.add_row("model", f"{model.name} ({model.dtype} on {model.device})")
    table.add_row("tokens", f"up to {model.max_model_len} per sequence, vocabulary {model.vocab_size}")
    table.add_row("tokenizer", model.tokenizer_fingerprint[:16] or "unknown")
    table.add_row("modes", ", ".join(mode.value for mode in info.modes))
    table.add_row("limits", ", ".join(f"{name} {limit}" for name, limit in info.limits.items()))
    if (draft := info.draft_service) is not None:
        state = "attached" if draft.attached else f"not attached: {draft.detached_reason}"
        table.add_row("this drafter", f"{draft.name} ({draft.instance_id}), {draft.proposer}, {state} at {draft.link_address}")
    for drafter in info.drafters:
        suspended = ", suspended: it does not answer" if drafter.suspended else ""
        table.add_row("drafter", f"{drafter.name} ({drafter.instance_id}), {drafter.sequences} of {drafter.capacity} sequences{suspended}")
    if not info.drafters:
        table.add_row("drafter", "none attached: decoding is plain")
    for refused in info.refused_drafters:
        table.add_row("refused", f"{refused.name} ({refused.instance_id}): {refused.reason}")
    return table


def settings_help(usage: str, purpose: str, settings: Sequence[Setting]) -> RenderableType:
    """The help of a service: every setting with flag, values, default, variable and meaning, by group.

    Args:
        usage: the command, e.g. `outrider verifier`.
        purpose: what the command does, in a sentence.
        settings: as `shared.config.settings` gives them: those of a group together.
    """
    blocks: list[RenderableType] = [
        Text.assemble(("Usage: ", "bold"), f"{usage} [FLAGS]"),
        Text(f"\n{purpose}\nEach setting is a flag or an environment variable; the flag wins."),
    ]
    for group, rows in groupby(settings, key=lambda row: row.group):
        blocks.append(Text(f"\n{group}", style="bold"))
        for row in rows:
            blocks.append(Text.assemble("  ", (row.flag, "bold cyan"), f"  {row.accepts}"))
            blocks.append(Padding(Text(row.description), (0, 0, 0, 6)))
            blocks.append(Padding(Text(f"default: {row.default}; variable: {row.variable}", style="dim"), (0, 0, 0, 6)))
    return Group(*blocks)


def _plain(value: Any) -> Any:
    """A value of ours as what JSON knows."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
