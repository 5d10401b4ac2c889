"""A harvest that is killed at any moment ends with the rows of one that was not; a root of another one is refused."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError
from headgate.consumers.datasets import open_dataset
from headgate.consumers.filesystem.formats.shard_layout import INDEX
from headgate.consumers.harvest import HarvestRoot, Progress, PromptSet, Wanted, harvest, parse_site_names
from headgate.consumers.harvest.root import SETTINGS, TAG
from tests.fakes.captured_roots import Facts, facts_of
from tests.fakes.capturing import capturing
from tests.fakes.harvesting import FACTS, FakeEngine, Killed, prompt_file

SITES = parse_site_names("1.post_mlp,3.post_mlp")
PROMPT = Wanted(sites=SITES)
ALL = Wanted(sites=SITES, tokens="all", max_tokens=6)
GENERATED = Wanted(sites=SITES, tokens="generated", max_tokens=6)


def run(root: Path, prompts: PromptSet, wanted: Wanted = PROMPT, *, rows: int = 40, **settings: Any) -> dict[str, Any]:
    """One run of a harvest; with `kill_after` or `aborts`, one that is killed."""
    kill = {name: settings.pop(name) for name in ("kill_after", "aborts") if name in settings}
    with HarvestRoot(root) as opened, capturing(root) as files:
        return harvest(FakeEngine(files, **kill), prompts, opened, wanted, rows=rows, **settings)


def rows_of(root: Path) -> Facts:
    """All rows that a root has, of both sites."""
    data = open_dataset(root, tags=TAG, index=False)
    found: Facts = Counter()
    for site in data.sites:
        found += Counter(
            {(f"{site} {fact[0]}", *fact[1:]): n for fact, n in facts_of(data.batches(site), site).items()}
        )
    data.close()
    return found


def shards(root: Path) -> list[Path]:
    return sorted((root / TAG / "_shards").glob("*"))


def tear(root: Path, number: int, lost: int) -> None:
    """Leave a shard as a kill in the middle of a write does: `lost` bytes of the index are not there, rows are."""
    found = shards(root)
    if not found:
        return
    shard = found[number % len(found)]
    text = (shard / INDEX).read_bytes()
    (shard / INDEX).write_bytes(text[: max(len(text) - lost, 0)])
    with (shard / "1_post_mlp.bin").open("ab") as file:
        file.write(b"rows of a request that the index does not know")


kills = st.tuples(st.integers(0, 9), st.booleans(), st.integers(0, 700), st.integers(0, 3))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=16),
    wanted=st.sampled_from([PROMPT, replace(PROMPT, drop_first=2), ALL, GENERATED]),
    rows=st.integers(1, 80),
    batch=st.integers(1, 5),
    killed=st.lists(kills, max_size=3),
)
def test_kills_leave_no_gaps_and_no_doubles(
    lengths: list[int], wanted: Wanted, rows: int, batch: int, killed: list[tuple[int, bool, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, whole = Path(folder) / "killed", Path(folder) / "whole"
        prompts = prompt_file(Path(folder) / "prompts.jsonl", lengths)
        expected = run(whole, prompts, wanted, rows=rows, batch=batch)

        for kill_after, aborts, lost, number in killed:
            try:
                run(root, prompts, wanted, rows=rows, batch=batch, kill_after=kill_after, aborts=aborts)
            except Killed:
                tear(root, number, lost)
        manifest = run(root, prompts, wanted, rows=rows, batch=batch)

        assert rows_of(root) == rows_of(whole)
        assert max(rows_of(root).values(), default=1) == 1
        assert manifest["harvest"] == expected["harvest"]
        assert {site: facts["rows"] for site, facts in manifest["sites"].items()} == {
            site: facts["rows"] for site, facts in expected["sites"].items()
        }


def test_a_harvest_ends_with_the_prompt_that_brings_the_rows(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [10] * 9)

    manifest = run(tmp_path / "root", prompts, rows=35)

    assert sorted({name for name, *_ in rows_of(tmp_path / "root")}) == [
        f"{site} prompt-{index}" for site in ("1.post_mlp", "3.post_mlp") for index in range(4)
    ]
    facts = manifest["harvest"]
    assert (facts["rows"], facts["prompts_with_rows"], facts["has_all_rows"]) == (40, 4, True)
    assert (manifest["model"], manifest["revision"], facts["dtype"]) == ("example-model", "abc123", "bfloat16")
    assert facts["prompts_sha256"] == prompts.sha256
    assert msgspec.json.decode((tmp_path / "root" / "_headgate_manifest.json").read_bytes()) == manifest


def test_more_rows_of_a_finished_harvest_are_those_of_a_larger_one(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", range(12))

    for rows in (10, 10, 30):
        run(tmp_path / "grown", prompts, rows=rows)
    run(tmp_path / "whole", prompts, rows=30)

    assert rows_of(tmp_path / "grown") == rows_of(tmp_path / "whole")


def test_prompts_that_are_done_do_not_run_again(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [5] * 8)
    with pytest.raises(Killed):
        run(tmp_path, prompts, batch=2, kill_after=5)

    with HarvestRoot(tmp_path) as root, capturing(tmp_path) as files:
        engine = FakeEngine(files)
        harvest(engine, prompts, root, PROMPT, rows=40)

    assert engine.ran == [5, 6, 7]


def test_a_harvest_that_goes_on_has_no_manifest_until_it_ends(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [5] * 8)
    run(tmp_path, prompts, rows=5)
    with pytest.raises(Killed):
        run(tmp_path, prompts, rows=40, kill_after=1)

    assert not (tmp_path / "_headgate_manifest.json").exists()


def test_progress_counts_durable_rows_those_of_earlier_runs_too(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [5] * 8)
    with pytest.raises(Killed):
        run(tmp_path, prompts, batch=2, kill_after=4)
    told: list[Progress] = []

    run(tmp_path, prompts, batch=2, rows=40, report=told.append)

    assert [progress.rows for progress in told] == [20, 30, 40]
    row_bytes = 2 * FACTS.hidden_size * 2 + 16
    assert told[-1] == Progress(rows=40, wanted_rows=40, num_bytes=40 * row_bytes, prompts=8)


def test_prompts_longer_than_the_context_are_cut_and_counted(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [3, 9, 20])

    manifest = run(tmp_path / "root", prompts, rows=999, context=8)

    assert manifest["sites"]["1.post_mlp"]["rows"] == 3 + 8 + 8
    assert manifest["harvest"]["prompts_cut_in_this_run"] == 2
    assert not manifest["harvest"]["has_all_rows"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"wanted": Wanted(sites=SITES[:1])}, "sites"),
        ({"wanted": replace(PROMPT, drop_first=1)}, "drop_first"),
        ({"wanted": ALL}, "tokens 'prompt' (now 'all')"),
        ({"context": 20}, "context 63 (now 20)"),
        ({"lengths": [5, 4]}, "prompts_sha256"),
        ({"dtype": "float16"}, "dtype 'bfloat16' (now 'float16')"),
        ({"model": "other"}, "model 'example-model' (now 'other')"),
        ({"revision": "def456"}, "revision 'abc123' (now 'def456')"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_root_of_other_settings_is_refused_by_name(tmp_path: Path, change: dict[str, Any], name: str) -> None:
    run(tmp_path / "root", prompt_file(tmp_path / "prompts.jsonl", [5, 5]), rows=5)
    before = rows_of(tmp_path / "root")
    given = prompt_file(tmp_path / "prompts.jsonl", change.pop("lengths", [5, 5]))
    wanted, context = change.pop("wanted", PROMPT), change.pop("context", None)

    with HarvestRoot(tmp_path / "root") as root, capturing(tmp_path / "root") as files:
        engine = FakeEngine(files)
        engine.facts = FACTS._replace(**change)
        with pytest.raises(ConfigError, match=r"begun with other settings") as refused:
            harvest(engine, given, root, wanted, rows=10, context=context)

    assert name in str(refused.value)
    assert engine.ran == []
    assert rows_of(tmp_path / "root") == before


def test_a_file_of_prompts_may_move(tmp_path: Path) -> None:
    run(tmp_path / "root", prompt_file(tmp_path / "prompts.jsonl", [5, 5]), rows=5)

    manifest = run(tmp_path / "root", prompt_file(tmp_path / "moved.jsonl", [5, 5]), rows=10)

    assert manifest["harvest"]["rows"] == 10


def test_the_batch_may_change_unless_it_decides_where_a_harvest_ends(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [5] * 4)
    run(tmp_path / "prompt", prompts, rows=5, batch=1)
    run(tmp_path / "all", prompts, ALL, rows=5, batch=1)

    assert run(tmp_path / "prompt", prompts, rows=10, batch=3)["harvest"]["rows"] == 10
    with pytest.raises(ConfigError, match=r"batch 1 \(now 3\)"):
        run(tmp_path / "all", prompts, ALL, rows=10, batch=3)


def edit(root: Path, change: Callable[[bytes], bytes]) -> None:
    index = next(path for shard in shards(root) if (path := shard / INDEX).stat().st_size)
    index.write_bytes(change(index.read_bytes()))


def test_a_prompt_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [5])
    run(tmp_path, prompts, rows=5)
    edit(tmp_path, lambda text: text * 2)

    with pytest.raises(CaptureFileError, match=r"prompt-0 is in .* twice"):
        run(tmp_path, prompts, rows=10)


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [5])
    run(tmp_path, prompts, rows=5)
    edit(tmp_path, lambda text: b"x" + text + text)

    with pytest.raises(CaptureFileError, match="line 1 is damaged"):
        run(tmp_path, prompts, rows=10)


def test_rows_without_settings_are_refused(tmp_path: Path) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl", [5])
    run(tmp_path, prompts, rows=5)
    (tmp_path / SETTINGS).unlink()

    with pytest.raises(ConfigError, match=f"no {SETTINGS}"):
        run(tmp_path, prompts, rows=10)


def test_damaged_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).write_text("{")

    with pytest.raises(ConfigError, match="damaged"):
        run(tmp_path, prompt_file(tmp_path / "prompts.jsonl", [5]), rows=5)


def test_a_result_that_is_not_there_ends_the_harvest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FakeEngine.run

    def failing(self: FakeEngine, *args: Any) -> Any:
        results = original(self, *args)
        results[1].status, results[1].error = "error", "the disk is full"
        return results

    monkeypatch.setattr(FakeEngine, "run", failing)

    with pytest.raises(ConsumerError, match="prompt-1: the disk is full"):
        run(tmp_path / "root", prompt_file(tmp_path / "prompts.jsonl", [5, 5]), rows=10)


LOCKING = """
import sys
from headgate.consumers.harvest import HarvestRoot
with HarvestRoot(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_harvest_in_a_root_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ConfigError, match="another harvest runs in it"):
            HarvestRoot(tmp_path)
        other.kill()
        other.wait()

    with HarvestRoot(tmp_path) as root:
        assert root.finished() == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sites": ()}, "sites"),
        ({"tokens": "answers"}, "tokens: expected one of prompt, generated, all"),
        ({"tokens": "all"}, "give at least 2"),
        ({"max_tokens": 5}, "rows are not wanted"),
        ({"drop_first": -1}, "drop_first"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Wanted(**{"sites": SITES, **fields})


@pytest.mark.parametrize("context", [0, 64, 100])
def test_a_context_that_does_not_fit_is_refused(context: int) -> None:
    with pytest.raises(ConfigError, match="context"):
        PROMPT.context(context, 64)


def test_sites_are_read_with_commas_and_aliases() -> None:
    assert [site.name for site in parse_site_names(["3.resid_post, 1.post_mlp", "final_norm", "3.post_mlp"])] == [
        "1.post_mlp",
        "3.post_mlp",
        "final_norm",
    ]
    with pytest.raises(ConfigError, match="not a site: 'post_mlp'"):
        parse_site_names("post_mlp")
