"""A harvest with a real engine: killed in the middle and gone on with, its rows are those of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headgate.consumers.datasets import open_dataset
from headgate.consumers.harvest import HarvestRoot, LiveRows, PromptSet, VllmEngine, Wanted, harvest, open_prompts
from headgate.consumers.harvest.wanted import parse_site_names
from tests.conftest import OneEngine
from tests.engine.tiny_models import HIDDEN, VOCABULARY, tiny_model

SITES = ("0.post_mlp", "2.post_mlp")
SETTINGS: dict[str, Any] = {
    "block_size": 32,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_batched_tokens": 128,
    "skip_tokenizer_init": True,
}
NUM_PROMPTS, BATCH = 120, 4
COMMAND = "from headgate.capture.cli import main; main()"
Rows = dict[tuple[str, str, int, int], np.ndarray[Any, Any]]


def make_prompts(path: Path) -> PromptSet:
    """Tokenized prompts, the first of them empty."""
    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCABULARY, length).tolist() for length in np.arange(NUM_PROMPTS) % 40]
    path.write_bytes(b"".join(msgspec.json.encode(prompt) + b"\n" for prompt in prompts))
    return open_prompts(str(path))


def start_and_kill(root: Path, prompts: PromptSet, rows: int) -> str:
    """Run ``headgate harvest`` until its first batch is durable, and kill it; return what it said until then."""
    flags = [
        word
        for name, value in SETTINGS.items()
        for word in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]
    options = ["--prompts", prompts.name, "--sites", ",".join(SITES), "--rows", str(rows), "--to", str(root)]
    command = [sys.executable, "-c", COMMAND, "harvest", str(tiny_model("llama")), *options, "--batch", str(BATCH)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    said = []
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if "s left" in line:
                process.send_signal(signal.SIGKILL)
                break
        process.stderr.read()
    assert process.returncode == -signal.SIGKILL, "".join(said)
    return "".join(said)


def rows_of(root: Path) -> Rows:
    """All rows of a root, none of which is there twice."""
    data = open_dataset(root, tags="harvest", index=False)
    found: Rows = {}
    for site in data.sites:
        for batch in data.batches(site):
            columns = zip(batch.request_ids, batch.positions.tolist(), batch.token_ids.tolist(), strict=True)
            keys = [(site, *column) for column in columns]
            assert not found.keys() & set(keys)
            assert len(set(keys)) == len(keys)
            found.update(zip(keys, batch.float32(), strict=True))
    data.close()
    return found


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "killed", tmp_path / "whole"


def test_a_killed_harvest_ends_with_the_rows_of_one_that_was_not(
    roots: tuple[Path, Path], tmp_path: Path, one_engine: OneEngine
) -> None:
    killed, whole = roots
    prompts, wanted = make_prompts(tmp_path / "prompts.jsonl"), Wanted(sites=parse_site_names(SITES))
    rows = 2000
    said = start_and_kill(killed, prompts, rows)
    files = [
        {"name": "filesystem", "instance_name": root.name, "location": "driver", "params": {"root": str(root)}}
        for root in roots
    ]
    capture = {"consumers": [*files, {"name": "memory"}], "sites": wanted.hooks}
    llm = one_engine.get(
        in_process=True, model=tiny_model("llama"), additional_config={"headgate": {"capture": capture}}, **SETTINGS
    )
    engine = VllmEngine(llm)
    with HarvestRoot(killed) as root:
        left = root.finished()
        assert 0 < sum(left.values()) < rows, said
        resumed = harvest(engine, prompts, root, wanted, rows=rows, batch=BATCH, consumer="killed")
    with HarvestRoot(whole) as root:
        undisturbed = harvest(engine, prompts, root, wanted, rows=rows, batch=64, consumer="whole")

    found, expected = rows_of(killed), rows_of(whole)
    assert resumed["harvest"] == undisturbed["harvest"]
    assert resumed["harvest"]["rows"] == len(found) // len(SITES) >= rows
    assert found.keys() == expected.keys()
    for key, row in found.items():
        np.testing.assert_allclose(row, expected[key], rtol=1e-4, atol=1e-5)  # other prompts were in its batch

    max_bytes = 400 * (len(SITES) * HIDDEN * 4 + 16)
    with LiveRows(llm, prompts, SITES, batch_size=100, max_bytes=max_bytes, drop_first=1) as live:
        batches = list(live)
    assert {tuple(batch[site].shape) for batch in batches[:-1] for site in SITES} == {(100, HIDDEN)}
    tokens = [prompt for prompt in prompts if len(prompt) > 1]
    assert sum(len(batch[SITES[0]]) for batch in batches) == sum(len(prompt) - 1 for prompt in tokens)
    harvested = Counter(row.round(3).tobytes() for (site, _, at, _), row in expected.items() if site == SITES[0] and at)
    streamed = Counter(row.round(3).tobytes() for batch in batches for row in batch[SITES[0]].numpy())
    assert sum((harvested & streamed).values()) > 0.9 * sum(harvested.values())
