"""Data sets: which rows they have, from several roots, with selectors, without doubles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.errors import CaptureFileError, RequestError
from headgate.capture.schema.positions import parse_positions
from headgate.consumers.datasets import open_dataset
from tests.fakes.captured_roots import LAYOUTS, SITE, expected_facts, facts_of, write_root
from tests.fakes.capturing import capturing

NAMES = [f"r{number}" for number in range(12)]


def test_several_roots_of_any_layout_are_one(tmp_path: Path) -> None:
    requests = write_root(tmp_path / "a", NAMES) + write_root(tmp_path / "b", [f"b{n}" for n in NAMES])

    data = open_dataset([tmp_path / "a", str(tmp_path / "b")])

    assert data.sites == ("1.post_mlp", SITE, "final_norm")
    for site in data.sites:
        assert facts_of(data.batches(site, batch_size=7), site) == expected_facts(requests, site)
    assert data.num_rows == dict.fromkeys(data.sites, sum(expected_facts(requests).values()))
    assert data.duplicates() == 0


def test_data_sets_views_and_batches_show_themselves_in_a_line_and_in_a_notebook(tmp_path: Path) -> None:
    write_root(tmp_path / "a", NAMES)
    data = open_dataset(tmp_path / "a", sites=[SITE, "final_norm"])
    batch = next(data.batches(SITE, batch_size=7))

    assert repr(data) == f"<Dataset of {tmp_path / 'a'}: {SITE}, final_norm>"
    assert repr(batch) == f"<RowBatch: 7 rows of {SITE}, bfloat16 [16]>"
    assert repr(batch.view) == f"DatasetView(sites=('{SITE}',), dtype='bfloat16', hidden_size=16)"
    html = data._repr_html_()
    assert str(tmp_path / "a") in html
    assert f"<td>{SITE}</td><td>{data.num_rows[SITE]}</td><td>0</td>" in re.sub(r"<td[^>]*>", "<td>", html)

    for shard in (tmp_path / "a").rglob("*.safetensors"):
        shard.write_bytes(b"torn")
    torn = open_dataset(tmp_path / "a", sites=SITE, strict=False, index=False)
    assert repr(torn) == f"<Dataset of {tmp_path / 'a'}: {SITE}; {len(torn.problems)} problems>"


def test_an_object_store_is_read_by_ranges(tmp_path: Path) -> None:
    root = f"memory://{tmp_path}"
    requests = []
    with capturing(root, spool=str(tmp_path)) as files:
        for number, layout in enumerate(LAYOUTS * 2):
            requests.append(files.request({"layout": layout}, client_id=f"r{number}", prompt=3 + number))
            files.feed.whole(requests[-1])

    for opened in (0, 1):
        data = open_dataset(root, sites=SITE)
        assert facts_of(data.batches(batch_size=5)) == expected_facts(requests)
        assert (data.roots[0].num_opened == 0) == bool(opened)


def test_rows_of_several_sites_are_of_the_same_tokens(tmp_path: Path) -> None:
    requests = write_root(tmp_path, NAMES)
    data = open_dataset(tmp_path, sites=["final_norm", "3.resid_post"])

    (batch,) = data.batches(batch_size=1000)

    assert data.sites == batch.view.sites == (SITE, "final_norm")
    for site in data.sites:
        assert facts_of([batch], site) == expected_facts(requests, site)
    with pytest.raises(ValueError, match=r"several sites: name one of 3.post_mlp, final_norm"):
        batch.numpy()


@pytest.mark.parametrize(
    ("selectors", "wanted"),
    [
        ({"phases": "prefill"}, lambda p, n: p < n),
        ({"phases": ["decode"]}, lambda p, n: p >= n),
        ({"phases": ["decode", "prefill"]}, lambda p, n: True),
        ({"positions": "last_prompt"}, lambda p, n: p == n - 1),
        ({"positions": "all_generated", "drop_bos": True}, lambda p, n: p >= n),
        ({"positions": [0, -1]}, lambda p, n: p in (0, n - 1)),
        ({"positions": {"start": -2}}, lambda p, n: p >= n - 2),
        ({"positions": {"start": 1, "stop": 6, "step": 2}}, lambda p, n: p in (1, 3, 5)),
        ({"positions": {"start": 2}, "phases": "prefill"}, lambda p, n: 2 <= p < n),
        ({"drop_bos": True}, lambda p, n: p > 0),
    ],
)
@pytest.mark.parametrize("captured", ["all", [0, 2, 3, -1], {"start": 0, "step": 2}, "all_generated"])
def test_selectors_select_what_they_say(
    tmp_path: Path, selectors: dict[str, Any], wanted: Callable[[int, int], bool], captured: Any
) -> None:
    requests = write_root(tmp_path, NAMES[:6], raw={"positions": captured})
    num_prompt = {r.info.client_request_id: r.final.num_prompt_tokens for r in requests}

    found = facts_of(open_dataset(tmp_path, sites=SITE, **selectors).batches(batch_size=5))

    assert found == {
        fact: count for fact, count in expected_facts(requests).items() if wanted(fact[1], num_prompt[fact[0]])
    }


@given(start=st.integers(-9, 9), length=st.integers(1, 9), num_prompt=st.integers(1, 8), rows=st.integers(0, 12))
def test_spans_select_as_the_capture_does(start: int, length: int, num_prompt: int, rows: int) -> None:
    from headgate.consumers.datasets.index import COLUMNS, EntryTable
    from headgate.consumers.datasets.selection import Selection

    stop = start + length if (start < 0) == (start + length < 0) else None
    selector = parse_positions({"start": start, "stop": stop}, "positions")
    columns = {name: np.zeros(1, dtype=kind) for name, kind in COLUMNS.items()}
    for name, value in {"rows": rows, "step": 1, "num_prompt": num_prompt, "prefill": min(rows, num_prompt)}.items():
        columns[name][:] = value
    table = EntryTable(columns, np.empty(0, dtype=np.uint8), [], [], [])

    _, starts, stops = Selection(positions=selector).row_ranges(table, np.array([0]), lambda entry: np.arange(rows))

    positions = np.arange(rows)
    try:
        mask = selector.resolve(num_prompt, "p").mask(positions, np.full(rows, num_prompt))
    except RequestError:
        mask = np.zeros(rows, dtype=np.bool_)
    assert [p for a, b in zip(starts, stops, strict=True) for p in range(a, b)] == positions[mask].tolist()


def test_tags_and_times_select_requests(tmp_path: Path) -> None:
    requests = write_root(tmp_path, NAMES)

    odd = open_dataset(tmp_path, sites=SITE, tags="odd")

    assert facts_of(odd.batches()) == expected_facts(requests[1::2])
    assert open_dataset(tmp_path, since="2020-01-01", until="2100-01-01").num_rows == open_dataset(tmp_path).num_rows
    for nothing in ({"since": "2100-01-01T00:00"}, {"until": "2020-01-01"}, {"tags": ["no such"]}):
        assert list(open_dataset(tmp_path, **nothing).num_rows) == []


def test_a_request_in_two_roots_comes_once(tmp_path: Path) -> None:
    requests = write_root(tmp_path / "a", NAMES[:8], prompt=6)
    write_root(tmp_path / "b", [*NAMES[:4], "x", "y"], raw={"hooks": {"post_mlp": [1, 3]}}, prompt=6)
    new = write_root(tmp_path / "c", ["x", "y"], prompt=6)

    data = open_dataset([tmp_path / "a", tmp_path / "b"], sites=SITE)

    assert data.duplicates() == data.duplicates(SITE) == 4
    assert facts_of(data.batches()) == expected_facts(requests + new)
    assert open_dataset([tmp_path / "b", tmp_path / "b"], sites=SITE).duplicates() == 6


def test_a_site_that_only_the_second_root_has_is_kept(tmp_path: Path) -> None:
    write_root(tmp_path / "a", NAMES[:3], raw={"hooks": {"post_mlp": [1]}})
    requests = write_root(tmp_path / "b", NAMES[:3])

    data = open_dataset([tmp_path / "a", tmp_path / "b"])

    assert (data.duplicates("1.post_mlp"), data.duplicates(SITE)) == (3, 0)
    assert facts_of(data.batches([SITE, "1.post_mlp"])) == expected_facts(requests)


def test_an_id_used_twice_in_a_root_is_two_requests(tmp_path: Path) -> None:
    with capturing(tmp_path, layout="shards") as files:
        for engine_id in ("one", "two"):
            files.feed.whole(files.request(engine_id=engine_id))

    data = open_dataset(tmp_path, sites=SITE)

    assert (data.num_rows[SITE], data.duplicates()) == (16, 0)


def test_stages_of_a_pipeline_are_joined(tmp_path: Path) -> None:
    for rank, layer in ((0, 1), (1, 3)):
        with capturing(tmp_path, stage=(rank, 2)) as files:
            request = files.request({"hooks": {"post_mlp": [layer]}}, engine_id="same")
            files.feed.whole(request)

    data = open_dataset(tmp_path)
    (batch,) = data.batches(["1.post_mlp", SITE])

    assert len(batch) == 8
    assert facts_of([batch]) == expected_facts([request])


def test_requests_without_one_of_the_sites_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    both = write_root(tmp_path / "a", NAMES[:3])
    write_root(tmp_path / "b", ["one"], raw={"hooks": {"post_mlp": [1]}})
    data = open_dataset([tmp_path / "a", tmp_path / "b"])

    assert facts_of(data.batches()) == expected_facts(both)
    assert "1 requests have some of" in caplog.text
    with pytest.raises(ValueError, match=r"2.post_mlp: not in the data set, which has 1.post_mlp, 3.post_mlp"):
        data.rows("2.post_mlp")
    write_root(tmp_path / "c", ["two"], raw={"hooks": {"post_mlp": [3]}})
    with pytest.raises(ValueError, match="no request has all of"):
        open_dataset([tmp_path / "b", tmp_path / "c"]).rows()


def test_rows_of_two_models_are_not_mixed(tmp_path: Path) -> None:
    from dataclasses import replace

    from headgate.consumers.feed import EXAMPLE_MODEL

    write_root(tmp_path / "a", ["one"])
    with capturing(tmp_path / "b", model=replace(EXAMPLE_MODEL, name="other", hidden_size=8)) as files:
        files.feed.whole(files.request())

    with pytest.raises(CaptureFileError, match=r"width 16 \(example-model\); bfloat16, width 8 \(other\)"):
        open_dataset([tmp_path / "a", tmp_path / "b"]).rows(SITE)


@pytest.mark.parametrize(
    ("selectors", "message"),
    [
        ({"phases": "middle"}, "phases: expected any of prefill, decode, got 'middle'"),
        ({"positions": "some"}, "positions: unknown selector"),
        ({"positions": {"role": "user"}}, "use roles='user'"),
        ({"sites": "12.nothing"}, "not a site"),
        ({"sites": []}, "empty list"),
        ({"since": "tomorrow"}, "since: expected a time"),
    ],
)
def test_bad_selectors_are_refused_by_name(tmp_path: Path, selectors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path, **selectors)


def test_the_manifest_says_what_the_data_are_made_of(tmp_path: Path) -> None:
    write_root(tmp_path / "a", NAMES)
    write_root(tmp_path / "b", NAMES[:2])
    data = open_dataset([tmp_path / "a", tmp_path / "b"])

    data.write_manifest(tmp_path / "manifest.json", revision="abc", tokenizer="its-tokenizer")

    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["model"] == "example-model"
    assert (manifest["revision"], manifest["tokenizer"], manifest["dtype"]) == ("abc", "its-tokenizer", "bfloat16")
    assert manifest["captured_by"] == {"headgate": "0.0", "vllm": "0.32.0", "torch": None}
    assert {site: facts["rows"] for site, facts in manifest["sites"].items()} == data.num_rows
    assert [facts["duplicates"] for facts in manifest["sites"].values()] == [2, 2, 2]
    assert len(manifest["index_sha256"]) == 64
    again = open_dataset([tmp_path / "a", tmp_path / "b"]).manifest()
    assert again["index_sha256"] == manifest["index_sha256"]
    write_root(tmp_path / "b", ["more"])
    changed = open_dataset([tmp_path / "a", tmp_path / "b"]).manifest()
    assert changed["index_sha256"] != manifest["index_sha256"]


def test_batches_are_memory_of_their_own(tmp_path: Path) -> None:
    requests = write_root(tmp_path, NAMES)
    data = open_dataset(tmp_path, sites=SITE)

    for batch in (*data.batches(batch_size=8), *data.mixed(batch_size=8)):
        batch.torch().zero_()

    assert facts_of(data.batches()) == expected_facts(requests)
