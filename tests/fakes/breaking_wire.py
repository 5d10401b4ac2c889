"""A TCP connection between two hosts that a test can break: everything passes through a relay of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class BreakingWire:
    """Relays connections to `target` from an address of its own.

    Args:
        target: Host and port.

    Attributes:
        address: Of ZMQ, to connect to.
        num_connections: Connections so far.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_connections = 0
        self._is_cut = False
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def reset(self) -> None:
        """Break every connection; new ones work."""
        with self._lock:
            broken, self._open = self._open, []
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        """Break every connection, and take no new ones until `mend`."""
        self._is_cut = True
        self.reset()

    def mend(self) -> None:
        """Take connections again."""
        self._is_cut = False

    def close(self) -> None:
        """End for good."""
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
        self._listening.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self.num_connections += 1
                if self._is_cut:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                with self._lock:
                    self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._relay, args=(source, sink), daemon=True))
                    self._threads[-1].start()

    def _relay(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def breaking_wire(address: str) -> Iterator[BreakingWire]:
    """Relay to a ZMQ address, ``tcp://IP:PORT``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    wire = BreakingWire((host, int(port)))
    try:
        yield wire
    finally:
        wire.close()
