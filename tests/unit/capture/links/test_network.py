"""Keys and addresses of engines on several hosts, and a hub that workers on other hosts reach."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from headgate.capture.links import peer
from headgate.capture.links.hub import ResultHub
from headgate.capture.links.messages import Result
from headgate.capture.links.network import (
    ENVIRONMENT,
    Listening,
    NetworkKeys,
    listening_of,
    parse_listen,
    read_keys,
    write_keys,
)
from headgate.capture.links.peer import FarAddress, endpoint_of, host_id, rows_address
from headgate.capture.links.sender import ResultSender
from headgate.capture.schema.config import NetworkConfig, parse_network
from headgate.capture.schema.errors import ConfigError, UnsupportedError
from headgate.capture.schema.results import CaptureResult
from tests.fakes.driver_consumers import WHOLE, Worker, assert_rows, expect, hosting, result, whole
from tests.fakes.pipeline import TIMEOUT_S

KEYS = NetworkKeys.make()
HERE = Listening(host="127.0.0.1", keys=KEYS)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders of this process find themselves on another host than its hubs."""
    monkeypatch.setattr(peer, "host_id", lambda: "another host")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[ResultHub]:
    made = ResultHub(folder=str(tmp_path), listening=HERE)
    yield made
    assert made.shutdown(TIMEOUT_S)


@pytest.fixture
def far_sender() -> Iterator[ResultSender]:
    made = ResultSender(keys=KEYS)
    yield made
    assert made.close(TIMEOUT_S) == 0


def send(sender: ResultSender, reply: str, key: str = "k") -> None:
    ok = CaptureResult(status="ok", payload=[1, 2])
    sender.send_result(reply, Result(key=key, req_id="r", instance="files", result=ok))


@pytest.mark.usefixtures("elsewhere")
def test_a_result_comes_from_another_host(hub: ResultHub, far_sender: ResultSender) -> None:
    hub.expect("k", instances=["files"])

    send(far_sender, hub.address)

    assert hub.wait("k", TIMEOUT_S).merged["files"].payload == [1, 2]


def test_a_worker_on_the_hubs_own_host_uses_its_socket_and_needs_no_keys(hub: ResultHub) -> None:
    sender = ResultSender()
    hub.expect("k", instances=["files"])

    send(sender, hub.address)

    assert hub.wait("k", TIMEOUT_S).merged["files"].payload == [1, 2]
    assert endpoint_of(hub.address, None).address.startswith("ipc://")
    assert sender.close(TIMEOUT_S) == 0


@pytest.mark.usefixtures("elsewhere")
def test_a_worker_without_keys_counts_what_it_cannot_send(hub: ResultHub, caplog: pytest.LogCaptureFixture) -> None:
    sender = ResultSender()

    for _ in range(2):
        send(sender, hub.address)

    assert sender.stats().lost_results == 2
    assert "is on another host, and this worker has no keys" in caplog.text
    assert sender.close(TIMEOUT_S) == 0


@pytest.mark.usefixtures("elsewhere", "driver_consumers")
def test_rows_for_a_driver_located_consumer_come_from_another_host(tmp_path: Path, far_sender: ResultSender) -> None:
    with hosting(tmp_path, WHOLE, listening=HERE) as (hub, host):
        worker = Worker(hub, far_sender, "whole")
        request = worker.request()
        expect(hub, "whole")

        worker.begin(request)
        worker.write((request, [0, 1, 2, 3]))
        worker.finish(request)

        assert result(hub, "whole").status == "ok"
        assert_rows(whole(host).captured[0], 1, [0, 1, 2, 3])
        assert far_sender.close(TIMEOUT_S) == 0  # while somebody is there to acknowledge the end


def test_an_address_tells_both_ways(tmp_path: Path) -> None:
    socket = tmp_path / "hub"
    socket.touch()
    far = FarAddress(host=host_id(), ipc=f"ipc://{socket}", tcp="tcp://10.0.0.1:5", rows={})

    assert endpoint_of(str(far), KEYS).address == f"ipc://{socket}"
    socket.unlink()  # a container on the same host, which has a folder of its own
    assert endpoint_of(str(far), KEYS).address == "tcp://10.0.0.1:5"
    assert endpoint_of(str(far), KEYS).keys == KEYS
    with pytest.raises(ValueError, match="does not take rows for the consumer reward"):
        rows_address(str(far), "reward")
    with pytest.raises(ValueError, match=r"'tcp://10.0.0.1:5' is no address of a front end"):
        endpoint_of("tcp://10.0.0.1:5", KEYS)


def test_keys_survive_the_way_to_a_file_and_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"

    write_keys(path, KEYS)
    monkeypatch.setenv(ENVIRONMENT, f" {KEYS.text}\n")

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(NetworkConfig(keys_file=str(path))) == KEYS == read_keys(NetworkConfig())
    assert KEYS.text not in repr(KEYS)
    assert NetworkKeys.make() != KEYS
    with pytest.raises(ConfigError, match=r"keys exists; an engine whose hosts have different keys does not start"):
        write_keys(path, NetworkKeys.make())
    with pytest.raises(ConfigError, match="cannot be made"):
        write_keys(tmp_path / "no" / "keys", KEYS)


@pytest.mark.parametrize("text", ["", "secret", KEYS.text[:-1], KEYS.text + "A", KEYS.text.replace("1.", "2."), "ü"])
def test_what_is_no_key_is_refused_and_never_shown(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o400)

    with pytest.raises(ConfigError, match="these are no keys of headgate's network; make them with") as caught:
        read_keys(NetworkConfig(keys_file=str(path)))

    assert len(text) < 3 or text not in str(caught.value).replace(str(path), "")


def test_missing_keys_are_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    path = tmp_path / "keys"

    with pytest.raises(ConfigError, match=rf"neither --headgate-network-keys FILE nor .*{ENVIRONMENT}"):
        read_keys(NetworkConfig())
    with pytest.raises(ConfigError, match=r"network.keys_file .*: No such file .*headgate keys new"):
        read_keys(NetworkConfig(keys_file=str(path)))
    write_keys(path, KEYS)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"its mode 0644 lets other users read or change it; run chmod 600"):
        read_keys(NetworkConfig(keys_file=str(path)))
    path.chmod(0o440)
    with pytest.raises(ConfigError, match=r"network.listen: .*start it with --headgate-listen IP"):
        listening_of(NetworkConfig(keys_file=str(path)))


def test_a_zmq_without_encryption_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    monkeypatch.setenv(ENVIRONMENT, KEYS.text)

    with pytest.raises(UnsupportedError, match="built without CURVE"):
        read_keys(NetworkConfig())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("10.0.0.1", ("10.0.0.1", None)),
        ("10.0.0.1:80", ("10.0.0.1", range(80, 81))),
        ("10.0.0.1:46000-46031", ("10.0.0.1", range(46000, 46032))),
        ("fd00::1", ("fd00::1", None)),
        ("[fd00::1]:1-2", ("fd00::1", range(1, 3))),
    ],
)
def test_places_to_listen(text: str, wanted: tuple[str, range | None]) -> None:
    assert parse_listen(text) == wanted


@pytest.mark.parametrize("text", ["", "head", "10.0.0", "10.0.0.1:0", "10.0.0.1:9-8", "10.0.0.1:1-99999", "[::1]:a"])
def test_what_is_no_place_to_listen_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not IP, IP:PORT or IP:FIRST-LAST"):
        parse_listen(text)


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "0.0.0.0:46000"])
def test_all_addresses_are_no_place_to_connect_to(text: str) -> None:
    with pytest.raises(ConfigError, match="means every address; name the one that other hosts connect to"):
        parse_listen(text)


def test_the_section_is_strict() -> None:
    assert parse_network(None) == NetworkConfig()
    with pytest.raises(ConfigError, match=r"\['network'\]: Object contains unknown field `port`"):
        parse_network({"port": 1})


def test_where_nobody_checks_keys_nobody_is_let_in() -> None:
    """An authenticator that has ended, or never began, must not mean that everybody who can encrypt is let in."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listening, connecting = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    monitor = listening.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
    try:
        address = Listening(host="127.0.0.1", keys=KEYS).bind(listening)
        KEYS.secure_connecting(connecting)
        connecting.connect(address)

        assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    finally:
        monitor.close(0)
        context.destroy(linger=0)
