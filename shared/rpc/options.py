"""Every channel argument that Outrider sets, by its exact name: gRPC ignores names that it does not know, so a slip would be silent.

It holds numbers, not servers or channels.
"""

from collections.abc import Mapping
from types import MappingProxyType

GENERATE_MAX_MESSAGE_BYTES = 4 << 20
LINK_MAX_MESSAGE_BYTES = 16 << 20

Options = list[tuple[str, int]]

_MESSAGE_LIMITS = ("grpc.max_receive_message_length", "grpc.max_send_message_length")

# A dead peer is noticed after time + timeout, by gRPC's own threads: that says nothing about the peer's event loop, hence the heartbeats.
SERVER_OPTIONS: Mapping[str, int] = MappingProxyType(
    {
        "grpc.so_reuseport": 0,  # a second server on the port must fail, not share it silently
        "grpc.keepalive_time_ms": 10_000,
        "grpc.keepalive_timeout_ms": 5_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.min_ping_interval_without_data_ms": 1_000,  # below the clients' keepalive time, or they are sent away
        "grpc.http2.max_ping_strikes": 0,  # a completion that computes for long writes nothing and would collect strikes
    }
)

CLIENT_OPTIONS: Mapping[str, int] = MappingProxyType(
    {
        "grpc.keepalive_time_ms": 5_000,
        "grpc.keepalive_timeout_ms": 3_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.min_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 2_000,
        "grpc.dns_min_time_between_resolutions_ms": 1_000,  # containers change their address on restart
        "grpc.enable_http_proxy": 0,  # the services are given each other's addresses; a web proxy breaks long streams
    }
)


def server_options(max_message_bytes: int) -> Options:
    """Options of a server whose messages have at most `max_message_bytes`."""
    return [*SERVER_OPTIONS.items(), *((name, max_message_bytes) for name in _MESSAGE_LIMITS)]


def client_options(max_message_bytes: int) -> Options:
    """Options of a channel whose messages have at most `max_message_bytes`."""
    return [*CLIENT_OPTIONS.items(), *((name, max_message_bytes) for name in _MESSAGE_LIMITS)]
