"""Rows of many prompts, for training: harvested into a folder, or live from a running engine.

::

    with LiveRows(llm, "prompts.jsonl", "12.post_mlp") as rows:
        for batch in rows.of_one_site():
            step(batch)  # [4096, hidden]

Needs no vLLM until an engine runs.
"""

from headgate.consumers.harvest.engine import EngineFacts, HarvestEngine, VllmEngine
from headgate.consumers.harvest.live import LiveRows
from headgate.consumers.harvest.prompts import PromptSet, open_prompts
from headgate.consumers.harvest.root import HarvestRoot
from headgate.consumers.harvest.run import Progress, harvest, run_prompts
from headgate.consumers.harvest.wanted import Wanted, parse_site_names

__all__ = [
    "EngineFacts",
    "HarvestEngine",
    "HarvestRoot",
    "LiveRows",
    "Progress",
    "PromptSet",
    "VllmEngine",
    "Wanted",
    "harvest",
    "open_prompts",
    "parse_site_names",
    "run_prompts",
]
