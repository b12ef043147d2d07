"""Configuration: one frozen, typed schema per service, filled from flags, then `OUTRIDER_*` variables, then defaults.

It owns what both services share and how a schema is read, checked and explained; it knows the settings of neither service.
Every flag, variable, range and sentence of help comes from the same field.
"""

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.address import split_address
from shared.errors import OutriderError
from shared.simulation import parse as parse_simulation

PREFIX = "OUTRIDER_"

SERVING = "Serving"
MODEL = "Model and memory"
PROCESS = "Process and logs"


@dataclass(frozen=True, slots=True)
class Accepts:
    """Marks a type with the words that say which values it takes, for help, documentation and errors."""

    words: str


def setting(default: Any, description: str, group: str, default_words: str = "", **rest: Any) -> Any:
    """A field of a schema.

    Args:
        default: value where neither flag nor variable is given; a callable is called once in each process.
        description: one or two sentences for help and documentation.
        group: heading it is listed under.
        default_words: what to show as the default where the value itself would not do.
        rest: constraints, as for `pydantic.Field` (`ge`, `le`, `validate_default`).
    """
    extra: dict[str, Any] = {"group": group, "default_words": default_words}
    if callable(default):
        return Field(default_factory=default, description=description, json_schema_extra=extra, **rest)
    return Field(default, description=description, json_schema_extra=extra, **rest)


def _check_address(address: str) -> str:
    split_address(address)
    return address


def _check_file(path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    return path


def _check_simulation(text: str) -> str:
    parse_simulation(text)
    return text


Address = Annotated[str, AfterValidator(_check_address), Accepts("host:port")]
OptionalAddress = Annotated[str, AfterValidator(lambda address: address and _check_address(address)), Accepts("host:port, or empty for off")]
OptionalFile = Annotated[Path | None, BeforeValidator(lambda path: path or None), AfterValidator(_check_file), Accepts("the path of a file")]
Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d{1,2})?)$"), Accepts("auto, cpu, cuda or cuda:N")]
ModelName = Annotated[str, StringConstraints(min_length=1), Accepts("a hub id, directory or alias")]
SimulationText = Annotated[str, AfterValidator(_check_simulation), Accepts("NAME=VALUE,..., or empty for off")]
DisplayName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._:-]{1,64}$"), Accepts("1 to 64 of A-Z a-z 0-9 . _ : -")]


class ServiceConfig(BaseSettings):
    """What both services are told."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    drain_grace_s: float = setting(30.0, "Seconds that running requests get to finish after SIGTERM.", SERVING, ge=0, le=3600)

    device: Device = setting("auto", "Where the model runs. `auto` is `cuda:0` where there is one, else `cpu`.", MODEL)
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = setting(
        "auto", "Number type of the weights. `auto` is what they were saved in.", MODEL
    )
    block_size: int = setting(16, "Tokens per KV block.", MODEL, ge=1, le=256)
    kv_blocks: int = setting(0, "KV blocks in the pool; 0 takes what `kv_memory_fraction` allows.", MODEL, ge=0, le=100_000_000)
    threads: int = setting(0, "CPU threads of the engine; 0 uses every core.", MODEL, ge=0, le=1024)

    loop: Literal["uvloop", "asyncio"] = setting("uvloop", "Event loop.", PROCESS)
    simulate: SimulationText = setting(
        "",
        "For benchmarks: no model, but a stand-in that takes the time that it is told, e.g. `target-ms=30,row-ms=0.1,draft-ms=2,"
        "draft-seq-ms=0.02,acceptance=0.5:0.9`. Its text means nothing.",
        PROCESS,
        "off",
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe log lines to write.", PROCESS)
    log_format: Literal["console", "json"] = setting("console", "Log lines for people or for machines. Never prompt text in either.", PROCESS)


class ConfigError(OutriderError):
    """The configuration is wrong.

    Args:
        problems: everything that is wrong, one sentence each.
    """

    reason = "INVALID_CONFIGURATION"

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a schema, in words."""

    name: str
    flag: str
    variable: str
    default: str
    accepts: str
    description: str
    group: str


def settings(schema: type[ServiceConfig]) -> list[Setting]:
    """All settings of a schema, those of a group together, its own before those that both services have."""
    own = [name for name in schema.__annotations__ if name in schema.model_fields]
    rows = [_explain(name, schema.model_fields[name]) for name in dict.fromkeys([*own, *schema.model_fields])]
    order = list(dict.fromkeys(row.group for row in rows))
    return sorted(rows, key=lambda row: order.index(row.group))


def variables(schema: type[ServiceConfig]) -> frozenset[str]:
    """Names of the environment variables that fill a schema."""
    return frozenset(row.variable for row in settings(schema))


Config = TypeVar("Config", bound=ServiceConfig)


def load(schema: type[Config], arguments: Sequence[str], also_known: Collection[str] = ()) -> Config:
    """Read a service's configuration from flags and the environment.

    Args:
        schema: what to read.
        arguments: the command line: `--flag value` or `--flag=value`.
        also_known: `OUTRIDER_*` variables that belong to other parts of Outrider and are no mistake here.

    Raises:
        ConfigError: anything is wrong; every problem at once, in sentences.
    """
    flags, problems = _read_flags(schema, arguments)
    problems += _find_unknown_variables(schema, os.environ, also_known)
    try:
        config = schema(**flags)
    except ValidationError as error:
        raise ConfigError([*problems, *(_tell(schema, flags, detail) for detail in error.errors())]) from None
    if problems:
        raise ConfigError(problems)
    return config


def describe(schema: type[ServiceConfig]) -> str:
    """A Markdown section per group with a table of its settings, for docs/configuration.md."""
    lines: list[str] = []
    group = ""
    for row in settings(schema):
        if row.group != group:
            group = row.group
            lines += ["", f"### {group}", "", "| Flag | Variable | Default | Takes | Meaning |", "| --- | --- | --- | --- | --- |"]
        lines.append(f"| `{row.flag}` | `{row.variable}` | {row.default} | {row.accepts} | {row.description} |")
    return "\n".join(lines[1:]) + "\n"


def _explain(name: str, field: FieldInfo) -> Setting:
    extra = field.json_schema_extra
    if not isinstance(extra, dict):
        raise TypeError(f"field {name} of a configuration schema is not made by setting()")
    default = str(extra["default_words"]) or str(field.default)
    return Setting(
        name=name,
        flag=_to_flag(name),
        variable=PREFIX + name.upper(),
        default=default or "empty",
        accepts=_accepts(field),
        description=field.description or "",
        group=str(extra["group"]),
    )


def _to_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _accepts(field: FieldInfo) -> str:
    for mark in field.metadata:
        if isinstance(mark, Accepts):
            return mark.words
    if get_origin(field.annotation) is Literal:
        *most, last = map(str, get_args(field.annotation))
        return f"{', '.join(most)} or {last}"
    kind = "a whole number" if field.annotation is int else "a number" if field.annotation is float else "text"
    least = next((mark.ge for mark in field.metadata if hasattr(mark, "ge")), None)
    most_ = next((mark.le for mark in field.metadata if hasattr(mark, "le")), None)
    return kind if least is None or most_ is None else f"{kind} from {least} to {most_}"


def _read_flags(schema: type[ServiceConfig], arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Values by field name, and what is wrong with the flags themselves. A repeated flag counts last."""
    names = {_to_flag(name): name for name in schema.model_fields}
    flags: dict[str, Any] = {}
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            problems.append(f"unexpected argument {flag!r}")
            continue
        if not has_value and rest and not rest[0].startswith("--"):
            has_value, value = "=", rest.pop(0)
        if flag not in names:
            problems.append(f"unknown flag {flag}{_suggest(flag, names)}")
        elif not has_value:
            problems.append(f"{flag} needs a value")
        else:
            flags[names[flag]] = value
    return flags, problems


def _find_unknown_variables(schema: type[ServiceConfig], environment: Mapping[str, str], also_known: Collection[str]) -> list[str]:
    known = variables(schema)
    given = sorted(name for name in environment if name.startswith(PREFIX) and name not in known and name not in also_known)
    return [f"unknown variable {name}{_suggest(name, [*known, *also_known])}" for name in given]


def _suggest(name: str, candidates: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(candidates), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _tell(schema: type[ServiceConfig], flags: Mapping[str, Any], detail: ErrorDetails) -> str:
    """One problem with one value as a sentence that names where the value came from."""
    name = str(detail["loc"][0]) if detail["loc"] else ""
    if name not in schema.model_fields:
        return detail["msg"]
    row = _explain(name, schema.model_fields[name])
    source = row.variable if name not in flags and row.variable in os.environ else row.flag
    if detail["type"] == "value_error":
        return f"{source}: {detail['ctx']['error']}"
    return f"{source} must be {row.accepts}; it is {detail['input']!r}"
