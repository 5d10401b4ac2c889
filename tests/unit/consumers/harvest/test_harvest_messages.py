"""Files of harvested chats tell where the messages lie, as far as the chat template shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.consumers.datasets import open_dataset
from headgate.consumers.harvest import HarvestRoot, PromptSet, Wanted, harvest, open_prompts
from headgate.consumers.harvest.wanted import parse_site_names
from tests.fakes.capturing import capturing
from tests.fakes.harvesting import FakeEngine

WANTED = Wanted(sites=parse_site_names("1.post_mlp"), messages=True)
TALK = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
TOOL = [{"role": "tool", "content": "x"}] * 4


def chats(path: Path, *given: Any) -> PromptSet:
    path.write_bytes(b"".join(msgspec.json.encode(chat) + b"\n" for chat in given))
    return open_prompts(str(path))


def positions(root: Path, **selected: Any) -> dict[str, list[int]]:
    """Positions of the selected rows, by request."""
    data = open_dataset(root, index=False, **selected)
    found: dict[str, list[int]] = {}
    for batch in data.batches("1.post_mlp"):
        for name, position in zip(batch.request_ids, batch.positions.tolist(), strict=True):
            found.setdefault(name, []).append(position)
    data.close()
    return found


def test_rows_of_harvested_chats_are_selected_by_role(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts, root = chats(tmp_path / "p.jsonl", TALK, TOOL, [1, 2], TALK), tmp_path / "root"
    with HarvestRoot(root) as opened, capturing(root) as files:
        manifest = harvest(FakeEngine(files), prompts, opened, WANTED, rows=100, context=3)

    assert manifest["harvest"]["messages"] is True
    assert manifest["harvest"]["chats_without_messages_in_this_run"] == 1
    assert positions(root).keys() == {"prompt-0", "prompt-1", "prompt-2", "prompt-3"}
    assert positions(root, roles="user") == {"prompt-0": [1], "prompt-3": [1]}
    assert "2 requests were captured without" in caplog.text
    assert positions(root, roles=["system", "assistant"]) == {"prompt-0": [0, 2], "prompt-3": [0, 2]}


def test_without_the_wish_files_tell_of_no_messages(tmp_path: Path) -> None:
    prompts, root = chats(tmp_path / "p.jsonl", TALK), tmp_path / "root"
    with HarvestRoot(root) as opened, capturing(root) as files:
        harvest(FakeEngine(files), prompts, opened, Wanted(sites=WANTED.sites), rows=100)

    with pytest.raises(ValueError, match="no message has the role user"):
        positions(root, roles="user")


def test_bad_records_are_named_and_counted_and_end_no_harvest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompts, root = chats(tmp_path / "p.jsonl", TALK, {"no": "prompt"}, TALK), tmp_path / "root"
    with HarvestRoot(root) as opened, capturing(root) as files:
        manifest = harvest(FakeEngine(files), prompts, opened, Wanted(sites=WANTED.sites), rows=100)

    assert manifest["harvest"]["records_refused_in_this_run"] == 1
    assert positions(root).keys() == {"prompt-0", "prompt-2"}
    assert f"left out: prompts: {tmp_path / 'p.jsonl'}, line 2: expected" in caplog.text
