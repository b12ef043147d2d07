"""Client channels. It does not know what is called over them."""

import grpc

from shared.address import dial_address
from shared.rpc.options import GENERATE_MAX_MESSAGE_BYTES, client_options


def open_channel(
    address: str, max_message_bytes: int = GENERATE_MAX_MESSAGE_BYTES, credentials: grpc.ChannelCredentials | None = None
) -> grpc.aio.Channel:
    """A channel to a service; connects on first use and reconnects by itself. To be closed by the caller.

    Args:
        address: `host:port`; a wildcard host is dialled as loopback.
        max_message_bytes: of one message, either way.
        credentials: plain TCP without.

    Raises:
        ValueError: the address is none.
    """
    target, options = dial_address(address), client_options(max_message_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options)
    return grpc.aio.secure_channel(target, credentials, options)
