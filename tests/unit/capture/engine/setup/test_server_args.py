from argparse import Namespace

import pytest

from headgate.capture.engine.setup.cli_flags import ServerArgs, read_server_args, take_flag
from headgate.capture.schema.errors import ConfigError


def test_what_was_given_is_read() -> None:
    config = {"headgate": {"steering": {}}}
    args = Namespace(additional_config=config, host="[::1]", uds="/run/vllm.sock", api_server_count=4)

    assert read_server_args(args) == ServerArgs(
        additional_config=config, host="::1", uds="/run/vllm.sock", num_api_servers=4, has_api_key=False
    )


@pytest.mark.parametrize(
    ("given", "variable", "expected"), [(["k"], "", True), (None, "k", True), (None, "", False), ([""], "", False)]
)
def test_the_servers_own_key_is_known_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, given: list[str] | None, variable: str, expected: bool
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)

    assert read_server_args(Namespace(api_key=given)).has_api_key is expected


@pytest.mark.parametrize(
    "args", [Namespace(), Namespace(additional_config=None, host=None, uds=None, api_server_count=None)]
)
def test_what_was_not_given_has_the_servers_own_defaults(args: Namespace) -> None:
    assert read_server_args(args) == ServerArgs(
        additional_config={}, host="", uds=None, num_api_servers=1, has_api_key=False
    )


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"additional_config: expected an object, got \['headgate'\]"):
        read_server_args(Namespace(additional_config=["headgate"]))


def test_a_flag_is_taken_once() -> None:
    args = Namespace(limit=0, other=None)

    assert [take_flag(args, "limit"), take_flag(args, "limit"), take_flag(args, "missing")] == [0, None, None]
    assert vars(args) == {"limit": None, "other": None}
