"""Whether an engine takes actions of capture consumers, and where: all its processes find the same."""

from __future__ import annotations

from headgate.capture.engine.contracts.parts import core_part_names, load_part
from headgate.capture.engine.contracts.vllm_engine import VllmConfig
from headgate.capture.engine.setup.hosts import spans_hosts
from headgate.capture.engine.setup.settings import section, sections
from headgate.capture.schema.actions.action_sink import ActionTarget
from headgate.capture.transport.action_channel import actions_address


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
