"""Engines whose workers may be on other hosts than their front ends: what they need, and whether all hosts agree.

Each host reads a command line of its own, so nothing but a comparison at the start keeps them from differing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import cast

from headgate.capture.engine.contracts.parts import core_part_names, load_part
from headgate.capture.engine.setup.settings import (
    capture_config,
    compiler_config,
    network_config,
    section,
    sections,
)
from headgate.capture.engine.vllm_names import versions
from headgate.capture.engine.vllm_types import AsyncEngineClient, VllmConfig
from headgate.capture.links.actions import actions_address
from headgate.capture.links.network import Listening, NetworkKeys, has_keys, listening_of, read_keys
from headgate.capture.schema.batch import Document
from headgate.capture.schema.consumer import ActionTarget
from headgate.capture.schema.errors import UnsupportedError

SETUP_RPC = "headgate_setup"
"""Name of the worker RPC that returns `setup_of`."""

_PLACE = ("host", "rank")
"""The entries that distinguish workers; all others must be the same."""


def has_far_engines(config: VllmConfig) -> bool:
    """Whether the front end serves engine cores that other hosts start."""
    parallel = config.parallel_config
    # Offline, or behind a balancer of its own, a front end has the engines of its own host alone.
    is_alone = parallel.local_engines_only or parallel.data_parallel_rank_local is not None
    return not is_alone and parallel.data_parallel_size_local != parallel.data_parallel_size


def spans_hosts(config: VllmConfig) -> bool:
    """Whether workers may be on other hosts than the front ends of their engine: Ray places them as it likes."""
    parallel = config.parallel_config
    return parallel.use_ray or parallel.nnodes > 1 or has_far_engines(config)


def network_keys(config: VllmConfig) -> NetworkKeys | None:
    """Return the keys with which workers reach front ends on other hosts; None where there are none, and need not be.

    An engine core that another host's front end serves looks, to its workers, like one by itself: they have the keys
    that are configured.

    Raises:
        ConfigError: If they are missing or wrong.
    """
    if capture_config(config) is None:
        return None
    network = network_config(config)
    return read_keys(network) if spans_hosts(config) or has_keys(network) else None


def listening(config: VllmConfig) -> Listening | None:
    """Return where the engine's front ends listen for workers on other hosts; None where there are none.

    Raises:
        ConfigError: If the settings lack the address, or the keys are missing or wrong.
    """
    if not spans_hosts(config) or capture_config(config) is None:
        return None
    return listening_of(network_config(config))


def setup_of(config: VllmConfig) -> dict[str, str]:
    """Return what all processes of an engine must have alike: releases, and a digest of each section."""
    reported = {name: json.dumps(document, sort_keys=True, default=str) for name, document in sections(config).items()}
    reported["compiler"] = repr(compiler_config(config))
    digests = {f"section {name}": hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in reported.items()}
    releases = {f"release of {name}": version for name, version in versions().items()}
    return {**releases, **digests, "byte order": sys.byteorder}


def worker_setup(config: VllmConfig, rank: int) -> Document:
    """Return `setup_of` as a worker has it, and where that is."""
    return {**setup_of(config), "host": socket.gethostname(), "rank": rank}


async def worker_setups(client: AsyncEngineClient) -> list[object]:
    """Ask each worker of all engine cores for `worker_setup`."""
    found = await asyncio.gather(
        *(
            client._call_utility_async("collective_rpc", SETUP_RPC, None, (), None, engine=engine)
            for engine in client.core_engines
        )
    )
    return [setup for setups in found for setup in cast("list[object]", setups)]


def check_agreement(config: VllmConfig, workers: Iterable[object]) -> None:
    """Compare what workers have with what this process has.

    Args:
        config: This process's.
        workers: `worker_setup` of each.

    Raises:
        UnsupportedError: If one differs.
    """
    own = setup_of(config)
    for each in workers:
        found = cast("Mapping[str, object]", each)
        theirs = {name: value for name, value in found.items() if name not in _PLACE}
        differing = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        if differing:
            raise UnsupportedError(
                f"the worker of rank {found.get('rank')} on host {found.get('host')} differs from this process on "
                f"{socket.gethostname()} in: {', '.join(differing)}; start every host with the same releases, the same "
                "flags and the same files"
            )


def action_target(vllm_config: VllmConfig) -> ActionTarget:
    """Return where consumers of an engine submit actions, or why they cannot.

    Raises:
        ConfigError: If the section of a part is wrong.
    """
    parallel = vllm_config.parallel_config
    names = [name for name in sections(vllm_config) if name in core_part_names()]
    if not any(load_part(name).takes_actions(section(vllm_config, name)) for name in names):
        return ActionTarget(
            refusal="this engine takes no actions of consumers; the operator starts it with --steering-from-consumers, "
            "and with --steering-op-sites"
        )
    if parallel.data_parallel_size > 1 or parallel._api_process_count > 1:
        return ActionTarget(
            refusal="actions of consumers are not taken with data parallelism, nor with several API servers: start the "
            "engine with --data-parallel-size 1 and --api-server-count 1"
        )
    if spans_hosts(vllm_config):
        return ActionTarget(
            refusal="actions of consumers are not taken by an engine whose workers may be on other hosts: they go to "
            "its engine core over a Unix socket; start the engine on one host, or use gates and controllers"
        )
    return ActionTarget(address=actions_address(vllm_config.instance_id, parallel.data_parallel_index))
