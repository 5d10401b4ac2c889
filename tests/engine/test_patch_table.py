"""Everything that headgate replaces in other packages is listed: the tables against what is really there at run time.

Code is told by the file that it comes from, so a replacement is found whatever it calls itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pytest

from headgate.capture.engine.other_changes import CHANGES
from tests.deadlines import patience
from tests.engine.tiny_models import tiny_model

NOT_SEEN_HERE = {
    "{Scheduler}.has_requests": "set for a moment, where steps are in flight while what acts on requests changes",
    "InputProcessor._headgate_chat": "set by a chat alone",
    "{model}.load_weights": "set for a lens with tensor parallelism",
    "{Worker}.reload_weights": "set for a lens with tensor parallelism",
    "{Worker}.start_weight_update": "set for a lens with tensor parallelism",
    "CompletionOutput.hidden_states": "set where the consumer hidden_states is configured",
    "{Response}.capture_results": "set by a server",
    "{Response}.hidden_states": "set by a server",
    "{Choice}.hidden_states": "set by a server",
    "{Response}.steering_trace": "set by a server",
    "{Choice}.steering_trace": "set by a server",
    "ModelRunnerOutput.headgate_readings": "set where a part reads steps",
    "{Async}._headgate_step": "set where a part reads steps that are scheduled ahead",
    "{Async}.__class__": "the same",
    "OutputProcessor._headgate_is_noted": "set where a request asks for its trace",
    "RequestState.__class__": "set where a request asks for its trace",
    "RequestOutputCollector.__class__": "set where a request asks for its trace",
    "RequestState._headgate_notes": "set where a request asks for its trace",
    "CompletionOutput._headgate_notes": "set where a request asks for its trace",
    "CompletionOutput.steering_trace": "set where a request asks for its trace",
    "GraphLowering.headgate_excluded": "set while a kernel for a GPU is compiled",
    "TritonKernel.headgate_excluded": "set while a kernel for a GPU is compiled",
}
"""Entries that an engine without a server, a chat and a GPU does not reach, with the reason."""

SCRIPT = """
import builtins, functools, json, sys, types, warnings
from pathlib import Path

warnings.simplefilter("ignore")
model, root = sys.argv[1:]
from headgate.capture.engine import plugin
from headgate.capture.engine.compiler.inductor_heuristics import register_exclusion
from headgate.capture.engine.patch_table import PATCHES
from headgate.capture.engine.server.bodies.middleware import READ_AHEAD, read_ahead
from headgate.steering import verify

OTHERS = ("vllm", "torch", "uvicorn", "starlette", "fastapi", "transformers")
CAPTURE, STEERING = Path(plugin.__file__).resolve().parents[1], Path(verify.__file__).resolve().parent
OURS = (f"{CAPTURE}/", f"{STEERING}/")


def is_ours(value, depth=0):
    if depth > 3:
        return False
    if isinstance(value, property):
        return any(is_ours(function, depth + 1) for function in (value.fget, value.fset))
    for holder, name in ((staticmethod, "__func__"), (classmethod, "__func__"), (types.MethodType, "__func__")):
        if isinstance(value, holder):
            return is_ours(getattr(value, name), depth + 1)
    if isinstance(value, functools.partial):
        return is_ours(value.func, depth + 1)
    return isinstance(value, types.FunctionType) and str(Path(value.__code__.co_filename).resolve()).startswith(OURS)


def package(name):
    return str(name).partition(".")[0]


def replaced():
    for name, module in list(sys.modules.items()):
        if package(name) not in OTHERS or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if is_ours(value):
                yield f"{name}.{attribute}"
            if isinstance(value, type) and package(value.__module__) in OTHERS:
                for inner, held in list(vars(value).items()):
                    if is_ours(held):
                        yield f"{value.__module__}.{value.__qualname__}.{inner}"


def holds_ours(value):
    values = list(value.values())[:2000] if isinstance(value, dict) else [value]
    kinds = [type(each) for each in values if type(each).__module__.startswith("headgate")]
    return any(not any(package(base.__module__) in OTHERS for base in kind.__mro__) for kind in kinds)


assigned, plain_setattr = set(), setattr


def noting_setattr(owner, name, value):
    if package(type(owner).__module__) in OTHERS and not isinstance(getattr(type(owner), name, None), property):
        if str(Path(sys._getframe(1).f_code.co_filename).resolve()).startswith(OURS):
            assigned.add(f"{type(owner).__qualname__}.{name}")
    plain_setattr(owner, name, value)


def on_instances(start, attributes):
    seen, waiting = set(), [start]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen.add(id(found))
        kind, shown = type(found), type(found).__qualname__
        if kind.__module__.startswith("headgate"):
            base = next((base for base in kind.__mro__[1:] if package(base.__module__) in OTHERS), None)
            if base is None:
                continue
            shown = base.__qualname__
            yield f"{shown}.__class__"
        if isinstance(found, dict):
            waiting += list(found.values())[:2000]
        elif isinstance(found, (list, tuple)):
            waiting += list(found)[:2000]
        elif isinstance(getattr(found, "__dict__", None), dict):
            for name, value in list(vars(found).items()):
                if is_ours(value):
                    yield f"{shown}.{name}"
                elif str(name).startswith(("_headgate", "headgate")) or holds_ours(value):
                    attributes.add(f"{shown}.{name}")
                waiting.append(value)


if __name__ == "__main__":
    from headgate.steering import LLM, SamplingParams

    llm = LLM(
        model, capture_consumers=[f"filesystem:root={root}"], capture_sites={"post_mlp": "all", "final_norm": "all"},
        steering=True, max_model_len=128, block_size=32, dtype="float32", enforce_eager=True, max_num_seqs=4,
        max_num_batched_tokens=128, skip_tokenizer_init=True,
    )
    capture = {"filesystem": {"hooks": {"post_mlp": "all"}}}
    prompt = {"prompt_token_ids": [1, 2, 3]}
    steering = {"steering_vectors": {"post_mlp": {0: [0.5] * 64}}}
    builtins.setattr = noting_setattr
    outputs = llm.generate(prompt, SamplingParams(max_tokens=2, detokenize=False, capture=capture, **steering))
    llm.llm_engine.engine_core.engine_core._headgate_core._services.fail("a test of what is replaced then")
    builtins.setattr = plain_setattr
    for patch in PATCHES:
        list(patch.target.imported())
    from uvicorn.protocols.http import flow_control, h11_impl

    register_exclusion()  # as a worker on a GPU does
    read_ahead(READ_AHEAD)  # as an API server does
    import torch
    from torch._inductor.lowering import lowerings

    attributes = set()
    told = {
        "replaced": sorted(set(replaced())),
        "patches": sorted(patch.name for patch in PATCHES),
        "instances": sorted(set(on_instances([llm.llm_engine, outputs], attributes))),
        "attributes": sorted(attributes | assigned),
        "lowerings": sorted({str(key) for key in lowerings if "headgate" in str(key)}),
        "operators": sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("headgate::")),
        "values": [flow_control.HIGH_WATER_LIMIT, h11_impl.HIGH_WATER_LIMIT, READ_AHEAD],
    }
    Path(root, "told.json").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is replaced in a process with an engine, its front end, and the parts of a server and of a GPU worker."""
    root = tmp_path_factory.mktemp("patches")
    (root / "program.py").write_text(SCRIPT)
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "program.py"), str(tiny_model("llama")), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(400), check=False, env=environment)
    assert (root / "told.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads((root / "told.json").read_text()))


def test_everything_that_is_replaced_is_in_a_table(told: dict[str, Any]) -> None:
    listed = set(told["patches"])
    patterns = [pattern(change.name) for change in CHANGES if change.kind in ("property", "method")]

    unlisted = [
        name for name in told["replaced"] if name not in listed and not any(one.fullmatch(name) for one in patterns)
    ]

    assert unlisted == []


def pattern(name: str) -> re.Pattern[str]:
    """The names that an entry stands for: ``{Word}`` is any name with that word in it, ``{word}`` any name at all."""
    parts = re.split(r"\{([^}]*)\}", name)
    words = [rf"\w*{part}\w*" if part[0].isupper() else r"\w+" for part in parts[1::2]]
    return re.compile("".join(re.escape(text) + word for text, word in zip_longest(parts[::2], words, fillvalue="")))


def unlisted_and_unseen(kind: str, found: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names that no entry of that kind stands for, and entries that stand for none."""
    patterns = {change.name: pattern(change.name) for change in CHANGES if change.kind == kind}
    unlisted = [name for name in found if not any(one.fullmatch(name) for one in patterns.values())]
    return unlisted, [name for name, one in patterns.items() if not any(map(one.fullmatch, found))]


def not_seen(kind: str) -> set[str]:
    """Entries of that kind that are not reached here."""
    return {change.name for change in CHANGES if change.kind == kind} & NOT_SEEN_HERE.keys()


def test_everything_in_the_tables_is_really_replaced(told: dict[str, Any]) -> None:
    missing = set(told["patches"]) - set(told["replaced"])
    classes = [change for change in CHANGES if change.kind in ("property", "method")]
    unused = [c.name for c in classes if not any(pattern(c.name).fullmatch(name) for name in told["replaced"])]

    assert missing == set()
    assert unused == []


def test_methods_and_classes_that_are_replaced_on_instances_are_in_the_table(told: dict[str, Any]) -> None:
    unlisted, unseen = unlisted_and_unseen("instance", told["instances"])

    assert unlisted == []
    assert set(unseen) == not_seen("instance")


def test_attributes_that_are_added_to_instances_are_in_the_table(told: dict[str, Any]) -> None:
    unlisted, unseen = unlisted_and_unseen("attribute", told["attributes"])

    assert unlisted == []
    assert set(unseen) == not_seen("attribute")


def test_operators_are_lowered_and_listed_where_they_are_registered(told: dict[str, Any]) -> None:
    assert {change.name for change in CHANGES if change.kind == "registration"} == {
        "torch._inductor.lowering.lowerings",
        "torch.ops.headgate",
    }
    assert "headgate.excluded.default" in told["lowerings"]
    assert {name.partition(".")[0] for name in told["lowerings"]} == {"headgate"}
    assert {name.removeprefix("headgate.").partition(".")[0] for name in told["lowerings"]} <= {
        name.removeprefix("headgate::").partition(".")[0] for name in told["operators"]
    }


def test_the_constants_are_those_of_the_table(told: dict[str, Any]) -> None:
    in_module, in_protocol, wanted = told["values"]

    assert in_module == in_protocol == wanted


def test_every_change_says_where_and_why() -> None:
    names = [change.name for change in CHANGES]

    assert len(set(names)) == len(names)
    assert all(change.where.startswith("headgate.") and change.why for change in CHANGES)
    assert [change.where for change in CHANGES if importlib.util.find_spec(change.where) is None] == []
