"""The configurations of a verifier and a draft service that share one machine, made to fit each other. It starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from draft_service.config import DraftConfig
from shared.address import dial_address, split_address
from shared.config import Config, ConfigError, ServiceConfig, load, settings, variables
from verifier_service.config import VerifierConfig

# Any of them may stand in an environment that several parts of Outrider share; only what is in none is a mistake.
ALL_VARIABLES = variables(VerifierConfig) | variables(DraftConfig) | {"OUTRIDER_ADDRESS", "OUTRIDER_CACHE"}

_SCHEMAS: dict[str, type[ServiceConfig]] = {"verifier": VerifierConfig, "draft": DraftConfig}


@dataclass(frozen=True, slots=True)
class Pair:
    """Both services' configurations, checked, and the flags that lead to them."""

    verifier: VerifierConfig
    verifier_flags: tuple[str, ...]
    draft: DraftConfig
    draft_flags: tuple[str, ...]


def plan(verifier_flags: Sequence[str] = (), draft_flags: Sequence[str] = (), assignments: Sequence[str] = ()) -> Pair:
    """Configure a pair for one machine.

    The drafter's window is the number of tokens scored in a step unless told otherwise: on shared cores a drafter that is further
    ahead only takes time away from the verifier.

    Args:
        verifier_flags: flags of the verifier service.
        draft_flags: flags of the draft service.
        assignments: `SETTING=VALUE` for whichever services have it, `verifier.SETTING=VALUE` or `draft.SETTING=VALUE`. They win over flags.

    Raises:
        ConfigError: anything is wrong with either service, or two addresses are the same.
    """
    assigned, problems = _share_out(assignments)
    to_verifier = [*verifier_flags, *assigned["verifier"]]
    verifier, verifier_problems = _try_load(VerifierConfig, to_verifier)
    if verifier is not None and "window" not in verifier.model_fields_set:
        to_verifier += ["--window", str(verifier.max_draft_tokens)]
        verifier = load(VerifierConfig, to_verifier, ALL_VARIABLES)
    meet = [] if verifier is None else ["--verifier", dial_address(verifier.listen), "--link", dial_address(verifier.link)]
    to_draft = [*meet, *draft_flags, *assigned["draft"]]
    draft, draft_problems = _try_load(DraftConfig, to_draft)
    problems += verifier_problems
    problems += [problem for problem in draft_problems if problem not in verifier_problems]
    if verifier is not None and draft is not None:
        problems += _compare_addresses(verifier, draft)
        if not problems:
            return Pair(verifier, tuple(to_verifier), draft, tuple(to_draft))
    raise ConfigError(problems)


def _share_out(assignments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Flags for each service by its name, and what is wrong with the assignments."""
    flags: dict[str, list[str]] = {service: [] for service in _SCHEMAS}
    problems: list[str] = []
    for assignment in assignments:
        key, equals, setting_value = assignment.partition("=")
        service, dot, name = key.rpartition(".")
        name = name.replace("-", "_")
        if not equals or (dot and service not in _SCHEMAS):
            problems.append(f"--set {assignment}: must be SETTING=VALUE, verifier.SETTING=VALUE or draft.SETTING=VALUE")
            continue
        takers = [each for each in ([service] if dot else _SCHEMAS) if name in {row.name for row in settings(_SCHEMAS[each])}]
        if not takers:
            problems.append(f"--set {assignment}: {service or 'neither service'} has {'no' if dot else 'a'} setting {name.replace('_', '-')}")
        for taker in takers:
            flags[taker].append(f"--{name.replace('_', '-')}={setting_value}")
    return flags, problems


def _try_load(schema: type[Config], flags: Sequence[str]) -> tuple[Config | None, list[str]]:
    try:
        return load(schema, flags, ALL_VARIABLES), []
    except ConfigError as error:
        return None, list(error.problems)


def _compare_addresses(verifier: VerifierConfig, draft: DraftConfig) -> list[str]:
    """What is wrong with the addresses of two services that share a machine."""
    named = {
        "verifier.listen": verifier.listen,
        "verifier.link": verifier.link,
        "verifier.metrics": verifier.metrics,
        "draft.listen": draft.listen,
        "draft.metrics": draft.metrics,
    }
    ports = {name: split_address(address)[1] for name, address in named.items() if address}
    problems = [f"{name} needs a port of its own, not 0: the other service and clients must find it" for name, port in ports.items() if port == 0]
    problems += [
        f"{first} and {second} are both on port {port}" for (first, port), (second, other) in combinations(ports.items(), 2) if port == other != 0
    ]
    return problems
