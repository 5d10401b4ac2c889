"""Engines on several hosts: when keys are needed, and whether all hosts were started alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headgate.capture.engine.setup.hosts import (
    check_agreement,
    has_far_engines,
    listening,
    network_keys,
    setup_of,
    spans_hosts,
    worker_setup,
)
from headgate.capture.links.network import ENVIRONMENT, NetworkKeys, write_keys
from headgate.capture.schema.errors import ConfigError, UnsupportedError

KEYS = NetworkKeys.make()
CAPTURE = {"consumers": [{"name": "inline"}], "sites": {"post_mlp": "all"}}
ALONE = {"nnodes": 1, "data_parallel_size": 2, "data_parallel_size_local": 2}
NODES = {**ALONE, "nnodes": 2}
FAR = {**ALONE, "data_parallel_size_local": 1}


class Config(SimpleNamespace):
    """A `VllmConfig` as far as it is looked at here; the findings in one are kept as long as it lives."""

    __hash__ = object.__hash__


def config(parallel: dict[str, Any], **sections: Any) -> Any:
    whole = {"local_engines_only": False, "data_parallel_rank_local": None, "use_ray": False, **parallel}
    return Config(parallel_config=SimpleNamespace(**whole), additional_config={"headgate": sections})


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.mark.parametrize(
    ("parallel", "spans", "far"),
    [
        (ALONE, False, False),
        (NODES, True, False),
        (FAR, True, True),
        ({**ALONE, "use_ray": True}, True, False),
        ({**FAR, "local_engines_only": True}, False, False),
        ({**FAR, "data_parallel_rank_local": 0}, False, False),
    ],
    ids=["one host", "nodes", "far engines", "ray", "own balancer", "offline rank"],
)
def test_which_engines_span_hosts(parallel: dict[str, Any], spans: bool, far: bool) -> None:
    assert (spans_hosts(config(parallel)), has_far_engines(config(parallel))) == (spans, far)


@pytest.mark.parametrize("parallel", [NODES, FAR])
def test_captures_of_several_hosts_need_keys_and_a_place_to_listen(parallel: dict[str, Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    write_keys(keys, KEYS)
    network = {"keys_file": str(keys), "listen": "10.0.0.1:46000-46001"}

    with pytest.raises(ConfigError, match="headgate keys new FILE"):
        network_keys(config(parallel, capture=CAPTURE))
    with pytest.raises(ConfigError, match="--headgate-listen IP"):
        listening(config(parallel, capture=CAPTURE, network={"keys_file": str(keys)}))

    assert network_keys(config(parallel, capture=CAPTURE, network=network)) == KEYS
    found = listening(config(parallel, capture=CAPTURE, network=network))
    assert found is not None
    assert (found.host, found.ports, found.keys) == ("10.0.0.1", range(46000, 46002), KEYS)
    assert network_keys(config(parallel, steering={})) is None
    assert listening(config(parallel, steering={})) is None


def test_engines_of_one_host_listen_nowhere_and_have_the_keys_that_are_configured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, KEYS.text)

    assert listening(config(ALONE, capture=CAPTURE, network={"listen": "10.0.0.1"})) is None
    assert network_keys(config(ALONE, capture=CAPTURE)) == KEYS  # a remote engine core looks like one by itself


def test_hosts_that_were_started_alike_agree_wherever_they_listen() -> None:
    here = config(NODES, capture=CAPTURE, steering={"saes": {"a": 1}}, network={"listen": "10.0.0.1"})
    there = config(NODES, steering={"saes": {"a": 1}}, capture=CAPTURE, network={"listen": "10.0.0.2"})

    check_agreement(here, [worker_setup(here, 0), worker_setup(there, 1)])


@pytest.mark.parametrize(
    ("sections", "differing"),
    [
        ({"capture": {**CAPTURE, "sites": {"post_mlp": [1]}}, "steering": {}}, "section capture"),
        ({"capture": CAPTURE}, "section steering"),
        ({"capture": CAPTURE, "steering": {}, "compiler": {"rewrites": False}}, "section compiler"),
    ],
)
def test_a_host_that_was_started_otherwise_is_named_with_the_difference(
    sections: dict[str, Any], differing: str
) -> None:
    here = config(NODES, capture=CAPTURE, steering={})

    with pytest.raises(UnsupportedError, match=rf"worker of rank 1 on host .* differs .* in: {differing}; start every"):
        check_agreement(here, [worker_setup(here, 0), worker_setup(config(NODES, **sections), 1)])


def test_another_release_is_named() -> None:
    here = config(NODES, capture=CAPTURE)
    there = {**worker_setup(here, 1), "release of headgate": "0.0.1"}

    with pytest.raises(UnsupportedError, match="in: release of headgate;"):
        check_agreement(here, [there])
    assert {"release of headgate", "release of vllm", "release of torch"} <= set(setup_of(here))
