"""The Python client and the command line."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from client.client import DEFAULT_ADDRESS, DEFAULT_DEADLINE_S, Client
    from client.completion import Completion, Part, Prompt, ServiceInfo, Timings, Usage
    from client.generation import Generation

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_DEADLINE_S",
    "Client",
    "Completion",
    "Generation",
    "Part",
    "Prompt",
    "ServiceInfo",
    "Timings",
    "Usage",
]

_MODULES = ("client.client", "client.completion", "client.generation")


def __getattr__(name: str) -> object:
    """Import on first use: the command line sets gRPC's verbosity first, which gRPC reads when it is imported."""
    if name in __all__:
        return next(getattr(module, name) for module in map(importlib.import_module, _MODULES) if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
