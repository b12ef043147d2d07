import pytest

from shared.rpc.options import CLIENT_OPTIONS, SERVER_OPTIONS, client_options, server_options

# Copied from gRPC's include/grpc/impl/channel_arg_names.h: gRPC ignores every other name without a word.
REAL_NAMES = frozenset(
    {
        "grpc.max_receive_message_length",
        "grpc.max_send_message_length",
        "grpc.max_metadata_size",
        "grpc.absolute_max_metadata_size",
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.keepalive_permit_without_calls",
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.http2.max_ping_strikes",
        "grpc.http2.max_pings_without_data",
        "grpc.max_connection_idle_ms",
        "grpc.max_connection_age_ms",
        "grpc.max_connection_age_grace_ms",
        "grpc.max_concurrent_streams",
        "grpc.so_reuseport",
        "grpc.initial_reconnect_backoff_ms",
        "grpc.min_reconnect_backoff_ms",
        "grpc.max_reconnect_backoff_ms",
        "grpc.dns_min_time_between_resolutions_ms",
        "grpc.enable_http_proxy",
        "grpc.enable_retries",
        "grpc.client_idle_timeout_ms",
    }
)


@pytest.mark.parametrize("options", [server_options(1), client_options(1)])
def test_every_option_has_a_name_that_grpc_knows(options: list[tuple[str, int]]) -> None:
    names = [name for name, _ in options]
    assert set(names) <= REAL_NAMES
    assert len(set(names)) == len(names)


def test_servers_permit_the_pings_that_our_clients_send() -> None:
    assert SERVER_OPTIONS["grpc.http2.min_ping_interval_without_data_ms"] <= CLIENT_OPTIONS["grpc.keepalive_time_ms"]
    assert SERVER_OPTIONS["grpc.keepalive_permit_without_calls"] == CLIENT_OPTIONS["grpc.keepalive_permit_without_calls"] == 1


def test_message_limits_are_set_both_ways() -> None:
    for options in (dict(server_options(77)), dict(client_options(77))):
        assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 77
