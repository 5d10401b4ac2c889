"""Which files of headgate's run for a request: five requests to a traced server, less what a plain request runs.

``python -m tests.walks.walk`` prints the lists.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from examples.model import ensure_model
from headgate.capture import probe as probe_files
from headgate.capture.probe import Probe
from headgate.capture.schema.sites import Site
from tests.environment import set_environment
from tests.fakes.server import Server, serving

PROCESSES = ("front end", "engine", "capture", "controllers")
HIDDEN = 576
_PLAIN = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
_PAUSE = {**_PLAIN, "max_tokens": 64, "ignore_eos": True}
"""Runs for longer than the quarter of a second after which the capture process reports what has ended; for no walk."""
_MESSAGES = [{"role": "user", "content": "Name a fruit."}]
_VECTOR = np.random.default_rng(7).normal(0, 1, HIDDEN).round(3).tolist()
_FILES = {"filesystem": {"hooks": {"post_mlp": [3]}, "positions": "all"}}

Walk = Mapping[str, tuple[str, ...]]
"""Files by process, each a path in the repository."""


def _requests() -> dict[str, tuple[str, dict[str, Any]]]:
    """The route and the body of each walk's request; the plain ones are what the others are compared with."""
    gate = {
        "when": {"probe": {"at": "3.post_mlp", "weight": _VECTOR, "bias": 0.0}, "above": -1e9},
        "then": {"vectors": {"post_mlp": {"3": _VECTOR}}},
    }
    chat = {"messages": _MESSAGES, "max_tokens": 4, "temperature": 0}
    return {
        "plain": ("completions", {**_PLAIN}),
        "plain chat": ("chat/completions", {**chat}),
        "capture to a file": ("completions", {**_PLAIN, "capture": _FILES, "capture_wait": True}),
        "steering vectors": (
            "completions",
            {**_PLAIN, "steering_vectors": {"post_mlp": {"3": _VECTOR}}},
        ),
        "chat with capture": (
            "chat/completions",
            {**chat, "capture": _FILES, "capture_wait": True},
        ),
        "gate": ("completions", {**_PLAIN, "steering_gates": [gate]}),
        "controller": ("completions", {**_PLAIN, "max_tokens": 16, "steering_rules": ["pid"]}),
    }


def trace(rounds: int = 3) -> dict[str, Walk]:
    """Start a traced server, send each request `rounds` times, and return its files.

    Files that ran for a plain request of the same route, or while the server started and nothing else, are left out.
    """
    with tempfile.TemporaryDirectory() as name, _traced_server(Path(name)) as server:
        requests = _requests()
        for _ in range(rounds):
            for number, (route, body) in enumerate(requests.values(), 1):
                _begin(Path(name), number)
                answer = server.post(f"/v1/{route}", model="smol", **body)
                assert answer.status_code == 200, answer.text
                results = answer.json().get("capture_results") or {}
                assert all(result["status"] == "ok" for result in results.values()), results
                if results:
                    _begin(Path(name), 0)
                    assert server.post("/v1/completions", model="smol", **_PAUSE).status_code == 200
        return _walks((Path(name) / "seen").read_text(), list(requests))


def _begin(folder: Path, number: int) -> None:
    """Let what runs from now on count for a walk; 0 for none."""
    with (folder / "board").open("r+b") as file:  # never truncated: all processes map it
        file.write(bytes([number]))


@contextmanager
def _traced_server(folder: Path) -> Iterator[Server]:
    probe_files.save(
        folder / "probe.safetensors",
        Probe(site=Site.parse("3.post_mlp"), weight=np.array([_VECTOR], np.float32), bias=np.zeros(1, np.float32)),
    )
    (folder / "module.json").write_text(json.dumps({"vectors": {"post_mlp": {"3": _VECTOR}}}))
    (folder / "board").write_bytes(b"\0")
    (folder / "seen").touch()
    flags = [
        *("--served-model-name", "smol", "--enforce-eager", "--block-size", "32", "--max-model-len", "512"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--enable-steering"),
        *("--steering-op-sites", '{"post_mlp": [3]}', "--capture-sites", '{"post_mlp": [3]}'),
        *("--capture-consumers", f"filesystem:root={folder}/captures"),
        *("--steering-modules", f"module={folder}/module.json"),
        "--steering-controllers",
        f"pid:probe={folder}/probe.safetensors,module=module,setpoint=0.5,applies_to=opt_in",
    ]
    command = ["-c", "from headgate.capture.cli import main; main()", "serve", str(ensure_model()), *flags]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    with serving(command, may_fork=False, VLLM_PLUGINS="headgate", WALKS_FOLDER=str(folder), PYTHONPATH=path) as server:
        yield server


def _walks(seen: str, names: list[str]) -> dict[str, Walk]:
    ran: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for line in seen.splitlines():
        process, number, file = line.split("\t")
        if int(number):
            ran[names[int(number) - 1]][process].add(file)
    plain = {process: ran["plain"][process] | ran["plain chat"][process] for process in PROCESSES}
    return {
        name: {process: tuple(sorted(ran[name][process] - plain[process])) for process in PROCESSES}
        for name in names
        if not name.startswith("plain")
    }


def main() -> int:
    """Print the files of each walk by process."""
    set_environment()
    for name, walk in trace().items():
        total = len({file for files in walk.values() for file in files})
        print(f"{name}: {total} files; " + ", ".join(f"{len(files)} in {process}" for process, files in walk.items()))
        for process, files in walk.items():
            print(*(f"  {process:10s} {file}" for file in files), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
