"""Files of harvested chats tell where the messages lie, as far as the chat template shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headgate.consumers.datasets import open_dataset
from headgate.consumers.harvest import HarvestRoot, PromptSet, VllmEngine, Wanted, harvest, open_prompts
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


class Tokenizer:
    """Renders a message as its role, its letters and an end; `merges` puts the last two messages into one."""

    bos_token_id = 1

    def __init__(self, *, merges: bool = False) -> None:
        self._merges = merges

    def apply_chat_template(
        self, chat: Sequence[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert tokenize
        assert not return_dict
        found = [1]
        for at, message in enumerate(chat):
            is_merged = self._merges and at == len(chat) - 1
            found += [2, len(message["role"]), *message["content"].encode(), *([] if is_merged else [3])]
        return [*found, 2, len("assistant")] if add_generation_prompt else found


def engine(tokenizer: Tokenizer) -> VllmEngine:
    config = SimpleNamespace(
        **dict.fromkeys(("model", "revision", "tokenizer", "quantization"), "m"),
        dtype="torch.float32",
        get_hidden_size=lambda: 4,
        max_model_len=64,
    )
    vllm_config = SimpleNamespace(model_config=config)
    return VllmEngine(
        SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=vllm_config), get_tokenizer=lambda: tokenizer)
    )


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_messages_of_an_engine_lie_where_its_template_puts_them(last: str) -> None:
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}, {"role": last, "content": "you"}]
    found = engine(Tokenizer())

    spans = found.messages(chat)

    assert spans is not None
    assert [(one.role, one.start, one.stop) for one in spans] == [("system", 1, 6), ("user", 6, 11), (last, 11, 17)]
    tokens = found.tokens(chat)
    assert [bytes(tokens[one.start + 2 : one.stop - 1]) for one in spans] == [b"be", b"hi", b"you"]
    assert len(tokens) == (17 if last == "assistant" else 19)


def test_messages_that_the_template_mixes_are_not_guessed() -> None:
    assert engine(Tokenizer(merges=True)).messages([{"role": "user", "content": "a"}] * 2) is None
