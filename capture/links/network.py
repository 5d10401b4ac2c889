"""Where a front end listens for workers on other hosts, and the keys with which both ends know each other.

Connections between hosts are encrypted and authenticated by CURVE, ZMQ's own mechanism: a front end accepts no peer
without the workers' key, and a worker no peer without the front ends' key. One file, or environment variable, holds
both key pairs; every host of an engine has the same.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.z85 as z85

from headgate.capture.files.reading import read_secret
from headgate.capture.schema.config import NetworkConfig
from headgate.capture.schema.errors import ConfigError, UnsupportedError

ENVIRONMENT = "HEADGATE_NETWORK_KEYS"
"""The variable that may hold the keys themselves, as `NetworkKeys.text`, in place of a file."""

_PREFIX, _KEY_BYTES = "headgate-network-1.", 32
_ADVICE = "make them with `headgate keys new FILE` and give every host the same"


@dataclass(frozen=True, slots=True)
class NetworkKeys:
    """The key pairs of one engine: that of its front ends, which listen, and that of its workers, which connect.

    Args:
        listening: Secret key of the front ends, 32 bytes.
        connecting: Secret key of the workers, 32 bytes.
    """

    listening: bytes = field(repr=False)
    connecting: bytes = field(repr=False)

    @classmethod
    def make(cls) -> NetworkKeys:
        """Return new ones."""
        return cls(secrets.token_bytes(_KEY_BYTES), secrets.token_bytes(_KEY_BYTES))

    @classmethod
    def parse(cls, text: str, source: str) -> NetworkKeys:
        """Read what `text` wrote.

        Raises:
            ConfigError: If it is anything else; the message names `source` and never shows the text.
        """
        body = text.strip()
        try:
            data = base64.b64decode(body.removeprefix(_PREFIX).encode(), altchars=b"-_", validate=True)
        except ValueError:
            data = b""
        if not body.startswith(_PREFIX) or len(data) != 2 * _KEY_BYTES:
            raise ConfigError(f"{source}: these are no keys of headgate's network; {_ADVICE}")
        return cls(data[:_KEY_BYTES], data[_KEY_BYTES:])

    @property
    def text(self) -> str:
        """All of it, as one line of letters, digits, dots, dashes and underscores."""
        return _PREFIX + base64.urlsafe_b64encode(self.listening + self.connecting).decode()

    def secure_listening(self, socket: zmq.Socket[bytes]) -> None:
        """Let only workers in that connect to addresses bound from now on."""
        socket.curve_server = True
        socket.curve_secretkey = z85.encode(self.listening)
        socket.zap_domain = DOMAIN
        socket.zap_enforce_domain = True  # without an authenticator, no peer is accepted

    def secure_connecting(self, socket: zmq.Socket[bytes]) -> None:
        """Talk only to front ends."""
        secret = z85.encode(self.connecting)
        socket.curve_secretkey, socket.curve_publickey = secret, zmq.curve_public(secret)
        socket.curve_serverkey = zmq.curve_public(z85.encode(self.listening))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the public key of a connecting peer is the workers': a credentials provider of `zmq.auth`."""
        return secrets.compare_digest(key, zmq.curve_public(z85.encode(self.connecting)))


DOMAIN = b"headgate"
"""Answer ZMQ's authentication protocol: addresses bound without it, the Unix sockets, are not asked about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """Where a front end listens for workers on other hosts.

    Attributes:
        host: IP address, of this host.
        ports: One of these, the first that is free; any free one if None.
        keys: See `NetworkKeys`.
    """

    host: str
    keys: NetworkKeys
    ports: range | None = None

    def bind(self, socket: zmq.Socket[bytes]) -> str:
        """Listen, and return the address, ``tcp://IP:PORT``.

        Raises:
            UnsupportedError: If the address is not this host's, or no port is free.
        """
        self.keys.secure_listening(socket)
        socket.ipv6 = ":" in self.host
        host = f"[{self.host}]" if ":" in self.host else self.host
        last = None
        for port in self.ports or ("*",):
            try:
                socket.bind(f"tcp://{host}:{port}")
                return socket.get_string(zmq.LAST_ENDPOINT)
            except zmq.ZMQError as error:
                last = error
        ports = "" if self.ports is None else f" at any port from {self.ports.start} to {self.ports.stop - 1}"
        raise UnsupportedError(
            f"network.listen: cannot listen at {self.host}{ports} ({last}); expected an address of this host, and as "
            "many free ports as there are API servers, times one more than there are driver-located consumers"
        )


def listening_of(config: NetworkConfig) -> Listening:
    """Return where a front end listens for workers on other hosts.

    Raises:
        ConfigError: If the settings lack the address, or the keys are missing or wrong.
    """
    keys = read_keys(config)
    if config.listen is None:
        raise ConfigError(
            "network.listen: the workers of this engine may be on other hosts, and are not told how to reach the "
            "front end; start it with --headgate-listen IP, an address of its host that theirs can reach"
        )
    host, ports = parse_listen(config.listen)
    return Listening(host=host, ports=ports, keys=keys)


def parse_listen(text: str) -> tuple[str, range | None]:
    """Read ``IP``, ``IP:PORT``, ``IP:FIRST-LAST``, with an IPv6 address in brackets where a port follows.

    Raises:
        ConfigError: If it is none of these, or means all addresses of a host, to which no peer could connect.
    """
    host, ports = text.strip(), ""
    if host.startswith("["):
        host, _, ports = host[1:].partition("]")
        ports = ports.removeprefix(":")
    elif host.count(":") == 1:
        host, _, ports = host.partition(":")
    try:
        address = ipaddress.ip_address(host)
        first, _, last = ports.partition("-")
        found = range(int(first), int(last or first) + 1) if ports else None
    except ValueError:
        address, found = None, None
    if address is None or (found is not None and not (0 < found.start < found.stop <= 1 << 16)):
        raise ConfigError(f"network.listen: {text!r} is not IP, IP:PORT or IP:FIRST-LAST, such as 10.0.0.1:46000-46031")
    if address.is_unspecified:
        raise ConfigError(f"network.listen: {text!r} means every address; name the one that other hosts connect to")
    return host, found


def has_keys(config: NetworkConfig) -> bool:
    """Whether keys are configured, right or wrong."""
    return config.keys_file is not None or ENVIRONMENT in os.environ


def read_keys(config: NetworkConfig) -> NetworkKeys:
    """Return the keys, from the file that is configured, or else from the environment.

    Raises:
        ConfigError: If there are none, if they are wrong, or if others may read the file.
        UnsupportedError: If this ZMQ cannot use them.
    """
    if not zmq.has("curve"):
        raise UnsupportedError(
            "network: this ZMQ was built without CURVE, which connections between hosts need; install pyzmq from PyPI"
        )
    if config.keys_file is None:
        if (text := os.environ.get(ENVIRONMENT)) is None:
            raise ConfigError(
                "network.keys_file: workers on other hosts need keys, and neither --headgate-network-keys FILE nor "
                f"the environment variable {ENVIRONMENT} gives them; {_ADVICE}"
            )
        return NetworkKeys.parse(text, ENVIRONMENT)
    path = Path(config.keys_file)
    try:
        text = read_secret(path, "network.keys_file").decode("utf-8", "replace")
    except ConfigError as error:
        raise ConfigError(f"{error}; {_ADVICE}") from error
    return NetworkKeys.parse(text, str(path))


def write_keys(path: Path, keys: NetworkKeys) -> None:
    """Write a new file that only this user may read.

    Raises:
        ConfigError: If there is a file, or it cannot be made.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(keys.text + "\n")
    except FileExistsError as error:
        raise ConfigError(f"{path} exists; an engine whose hosts have different keys does not start") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error}") from error
