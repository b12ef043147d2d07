"""Network addresses as text: `host:port`, or `[v6]:port`. Nothing here opens a socket or resolves a name."""

import ipaddress

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address; the brackets of an IPv6 host are taken off.

    Raises:
        ValueError: it is not `host:port` with a port from 0 to 65535; the text is a sentence.
    """
    host, separator, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 host is written in brackets, as in [::1]:50051")
    if not separator or not host or any(character.isspace() for character in host):
        raise ValueError("must be host:port, as in 127.0.0.1:50051")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"the port must be a whole number from 0 to 65535; it is {port!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address. A name other than `localhost` counts as reachable."""
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def dial_address(address: str) -> str:
    """Where a client on the same machine reaches a service that listens on `address`: loopback for the wildcard hosts."""
    host, port = split_address(address)
    return join_address(_WILDCARDS.get(host, host), port)
