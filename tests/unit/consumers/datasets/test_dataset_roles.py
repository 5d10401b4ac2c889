"""Messages of chats in files: written in every layout, read back, and selected by role."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headgate.consumers.datasets import index, open_dataset
from headgate.consumers.datasets.index import index_path
from headgate.consumers.feed import ExampleRequest
from headgate.consumers.filesystem.formats.layout import MessagePlace
from headgate.consumers.reader import open_captures
from tests.fakes.captured_roots import SITE, Facts, Places, expected_facts, facts_of, write_root
from tests.fakes.capturing import capturing

NAMES = [f"r{number}" for number in range(12)]
PROMPT = 11


def places(*spans: tuple[str, int, int]) -> Places:
    return [{"role": role, "start": start, "stop": stop} for role, start, stop in spans]


def chat_of(number: int) -> Places | None:
    """Chats of several shapes; every fourth request does not tell."""
    return [
        places(("system", 1, 3), ("user", 3, 6), ("assistant", 6, 8), ("user", 8, 10)),
        places(("user", 0, 5)),
        places(("user", 2, 4), ("tool", 4, 9)),
        None,
    ][number % 4]


def expected(requests: list[ExampleRequest], *roles: str) -> Facts:
    """Rows of the messages of `roles`, one by one."""
    found: Facts = Counter()
    for request in requests:
        inside = {
            position
            for place in request.info.spec.options.get("messages", ())
            for position in range(place["start"], place["stop"])
            if place["role"] in roles
        }
        found += Counter({fact: n for fact, n in expected_facts([request]).items() if fact[1] in inside})
    return found


@pytest.mark.parametrize("captured", ["all", [0, 2, 3, 4, 9, -1], {"start": 1, "step": 3}, "all_generated"])
def test_roles_select_the_rows_of_their_messages(tmp_path: Path, captured: Any) -> None:
    requests = write_root(tmp_path, NAMES, raw={"positions": captured}, messages=chat_of, prompt=PROMPT)

    for roles in (("user",), ("assistant", "tool"), ("user", "system", "tool", "assistant")):
        for _ in ("files", "index"):
            data = open_dataset(tmp_path, sites=SITE, roles=roles)
            assert facts_of(data.batches(batch_size=3)) == expected(requests, *roles)
        assert facts_of(data.mixed(batch_size=3)) == expected(requests, *roles)


def test_roles_narrow_what_other_selectors_select(tmp_path: Path) -> None:
    requests = write_root(tmp_path, NAMES, messages=chat_of, prompt=PROMPT)
    users = expected(requests, "user")

    def found(**selectors: Any) -> Facts:
        return facts_of(open_dataset(tmp_path, sites=SITE, roles="user", **selectors).batches())

    assert found(phases="decode") == Counter()
    assert found(drop_bos=True) == {fact: 1 for fact in users if fact[1] > 0}
    assert found(positions=[3, 9, 0]) == {fact: 1 for fact in users if fact[1] in (0, 3, 9)}
    assert found(positions={"start": 4}, phases="prefill") == {fact: 1 for fact in users if fact[1] >= 4}


def test_roots_that_met_roles_in_another_order_are_one(tmp_path: Path) -> None:
    requests = write_root(tmp_path / "a", NAMES[:6], messages=chat_of, prompt=PROMPT)
    requests += write_root(tmp_path / "b", ["late"], messages=lambda _: places(("tool", 0, 4), ("user", 4, 5)))
    requests += write_root(tmp_path / "a", ["more"], messages=lambda _: places(("tool", 1, 2), ("user", 2, 3)))

    data = open_dataset([tmp_path / "b", tmp_path / "a"], sites=SITE, roles="tool", tags=["even", "odd"])

    assert facts_of(data.batches()) == expected(requests, "tool")


def test_stages_and_readers_agree_on_messages(tmp_path: Path) -> None:
    layouts = ("request", "raw", "shards")
    for stage in (0, 1):
        with capturing(tmp_path, stage=(stage, 2)) as files:
            for layout in layouts:
                request = files.request({"layout": layout}, client_id=layout, prompt=PROMPT)
                options: Any = request.info.spec.options
                options["messages"] = chat_of(0)
                files.feed.whole(request)

    folder = open_captures(tmp_path)
    for layout in layouts:
        capture = folder[layout]
        assert capture.messages is not None
        assert capture.messages[1] == MessagePlace("user", 3, 6)
        assert capture.metadata["messages"] == chat_of(0)
        assert capture.positions[capture.in_role("user")].tolist() == [3, 4, 5, 8, 9]
        with pytest.raises(ValueError, match=r"tool: .* it has: system, user, assistant"):
            capture.in_role("tool")


def test_files_without_messages_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    requests = write_root(tmp_path, NAMES, messages=chat_of, prompt=PROMPT)
    untold = next(capture for capture in open_captures(tmp_path) if capture.messages is None)

    with caplog.at_level(logging.WARNING):
        data = open_dataset(tmp_path, sites=SITE, roles="user", tags="odd")

    assert data.num_rows == {SITE: expected(requests[1::2], "user").total()}
    assert "3 requests were captured without capture_messages" in caplog.text
    with pytest.raises(ValueError, match="set capture_messages when capturing"):
        untold.in_role("user")
    with pytest.raises(ValueError, match="no message has the role users; there are assistant, system, tool, user"):
        open_dataset(tmp_path, roles="users")


def test_a_root_without_messages_cannot_be_selected_by_role(tmp_path: Path) -> None:
    write_root(tmp_path, NAMES[:3])

    with pytest.raises(ValueError, match="none was captured with capture_messages"):
        open_dataset(tmp_path, roles=["user"])


def test_files_and_indexes_of_before_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_root(tmp_path, ["r0"], raw={"layout": "raw"}, messages=chat_of, prompt=PROMPT)
    for sidecar in tmp_path.glob("*/*/*.json"):
        document = json.loads(sidecar.read_text())
        assert document.pop("messages") == chat_of(0)
        sidecar.write_text(json.dumps(document))
    monkeypatch.setattr(index, "ONE_SHAPE", 1)
    open_dataset(tmp_path)
    monkeypatch.undo()

    data = open_dataset(tmp_path, sites=SITE)

    assert data.roots[0].num_opened == 1  # the index was made anew
    assert open_dataset(tmp_path).roots[0].num_opened == 0
    assert np.frombuffer(Path(index_path(str(tmp_path))).read_bytes()[16:20], "<u4") == index.ONE_SHAPE
    assert next(iter(open_captures(tmp_path))).messages is None
    assert data.num_rows == {SITE: PROMPT + 3}
