"""Addresses that requests carry, so that workers know where their front end takes results and rows.

A front end that only workers of its host reach has the address of a Unix socket, ``ipc://PATH``. One that others reach,
too, has a JSON object: each worker then takes the way that leads there from its own host.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from headgate.capture.transport.network import NetworkKeys, host_id

IPC = "ipc://"


class FarAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of an inbox that workers on other hosts reach; `str` gives the text that requests carry.

    Attributes:
        host: `host_id` of its own.
        ipc: For workers there.
        tcp: For workers elsewhere.
        rows: TCP addresses for the rows of driver-located consumers, by `suffix`; their Unix sockets are beside `ipc`.
    """

    host: str
    ipc: str
    tcp: str
    rows: dict[str, str] = {}

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One way to an inbox.

    Attributes:
        address: Of ZMQ.
        keys: To connect to another host; None for a Unix socket.
    """

    address: str
    keys: NetworkKeys | None = None

    @property
    def is_far(self) -> bool:
        """Whether it leads to another host, where a connection can break and be made anew."""
        return not self.address.startswith(IPC)


def suffix(instance: str) -> str:
    """Return what the addresses of a consumer's rows have in their names, by its instance name."""
    return hashlib.blake2b(instance.encode(), digest_size=6).hexdigest()


def rows_address(reply: str, instance: str) -> str:
    """Return the address of the rows for a driver-located consumer, so that `reply` is all that a request carries.

    Raises:
        ValueError: If `reply` is none, or does not tell of the consumer.
    """
    if reply.startswith(IPC):
        return f"{reply}.{suffix(instance)}"
    hub, name = _parsed(reply), suffix(instance)
    if name not in hub.rows:
        raise ValueError(f"the front end at {hub.tcp} does not take rows for the consumer {instance}")
    return str(FarAddress(host=hub.host, ipc=f"{hub.ipc}.{name}", tcp=hub.rows[name]))


def endpoint_of(address: str, keys: NetworkKeys | None) -> Endpoint:
    """Return the way to an inbox from here.

    Args:
        address: As a request carries it, or `rows_address` made it.
        keys: Of the engine; None if it is on one host.

    Raises:
        ValueError: If `address` is none, or is on another host and there are no keys.
    """
    if address.startswith(IPC):
        return Endpoint(address)
    far = _parsed(address)
    # Containers of one host may have folders of their own.
    if far.host == host_id() and os.path.exists(far.ipc.removeprefix(IPC)):
        return Endpoint(far.ipc)
    if keys is None:
        raise ValueError(f"the front end at {far.tcp} is on another host, and this worker has no keys")
    return Endpoint(far.tcp, keys)


@lru_cache(maxsize=1024)
def _parsed(address: str) -> FarAddress:
    try:
        return msgspec.json.decode(address, type=FarAddress)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{address!r} is no address of a front end: {error}") from error
