"""The moments consumer: which rows count, what outlives a process, and what is refused."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import CaptureFileError, ConfigError
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.moments import MomentsConsumer, SiteMoments, open_moments
from headgate.consumers.moments.consumer import HOLD_ROWS
from headgate.consumers.moments.state_file import OwnedFile

CONTEXT = ConsumerContext(instance_name="moments", model=EXAMPLE_MODEL)
HOOKS = {"post_mlp": [1, 2]}
SITE = EXAMPLE_MODEL.sites[3]
assert SITE.name == "1.post_mlp"


@contextmanager
def feeding(root: Path, **params: Any) -> Iterator[Feed]:
    feed = Feed(MomentsConsumer({"root": str(root), "flush_s": 0, **params}, CONTEXT))
    try:
        yield feed
    finally:
        feed.consumer.close(TIMEOUT_S)


def request(name: str, spec: Mapping[str, Any] | None = None, *, params: Any = None, **shape: Any) -> ExampleRequest:
    context = SpecContext(
        instance_name="moments", model=EXAMPLE_MODEL, params={"root": "x", **(params or {})}, client_request_id=name
    )
    return ExampleRequest(MomentsConsumer.validate_client_spec(spec or {"hooks": HOOKS}, context), name, **shape)


def rows_of(asked: ExampleRequest) -> np.ndarray[Any, Any]:
    return asked.expected().rows[SITE].double().numpy()


def check(found: SiteMoments, rows: np.ndarray[Any, Any]) -> None:
    assert found.num_rows == len(rows)
    np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, rows.var(axis=0, ddof=1), rtol=1e-12)
    np.testing.assert_allclose(found.covariance(), np.cov(rows.T), rtol=1e-9, atol=1e-12)
    assert found.mean_norm == pytest.approx(np.linalg.norm(rows, axis=1).mean())
    assert found.norm_quantile(0.5) == pytest.approx(
        np.quantile(np.linalg.norm(rows, axis=1), 0.5, method="lower"), rel=0.01
    )


def test_moments_are_those_of_all_rows_by_phase_and_tag(tmp_path: Path) -> None:
    params = {"tags": ["mine"]}
    asked = [request(f"r{index}", prompt=5 + index, output=30, params=params) for index in range(4)]
    mine = request("mine", {"hooks": HOOKS, "tag": "mine"}, params=params, prompt=40, output=3)
    with feeding(tmp_path, **params) as feed:
        feed.begin(*asked)
        for start in range(0, 40, 7):
            feed.step({one: (start, min(start + 7, one.final.num_rows)) for one in asked}, sites_per_block=1)
        for one in asked:
            feed.finish(one)
        feed.whole(mine)

    moments = open_moments(tmp_path)
    check(moments.select("1.post_mlp", tag="default"), np.concatenate([rows_of(one) for one in asked]))
    check(moments.select(SITE, tag="mine"), rows_of(mine))
    prompts = [rows_of(one)[: one.info.num_prompt_tokens] for one in asked]
    check(moments.select(SITE, tag="default", phase="prefill"), np.concatenate(prompts))
    check(moments["1.resid_post"], np.concatenate([rows_of(one) for one in [*asked, mine]]))
    assert [key.site for key in moments][:4] == ["1.post_mlp"] * 2 + ["2.post_mlp"] * 2
    for missing in ({"site": "3.post_mlp"}, {"site": SITE, "tag": "nobody"}):
        with pytest.raises(KeyError, match=r"no such moments; there is default 1\.post_mlp prefill"):
            moments.select(**missing)


def test_a_restart_goes_on_where_the_last_process_was(tmp_path: Path) -> None:
    asked = [request(f"r{index}", prompt=6, output=4) for index in range(3)]
    for one in asked:
        with feeding(tmp_path) as feed:
            feed.whole(one)

    check(open_moments(tmp_path)[SITE], np.concatenate([rows_of(one) for one in asked]))
    assert [path.name for path in tmp_path.glob("moments-*")] == ["moments-0.safetensors"]


@pytest.mark.parametrize("kind", ["sketch", "none"])
def test_other_kinds_of_covariance_outlive_a_restart(tmp_path: Path, kind: str) -> None:
    asked = [request(f"r{index}", prompt=30, output=1) for index in range(3)]
    for one in asked:
        with feeding(tmp_path, covariance=kind, rank=4) as feed:
            feed.whole(one)

    rows, found = np.concatenate([rows_of(one) for one in asked]), open_moments(tmp_path)[SITE]
    np.testing.assert_allclose(found.variance, rows.var(axis=0, ddof=1), rtol=1e-12)
    if kind == "none":
        with pytest.raises(ValueError, match="covariance was 'none'"):
            found.covariance()
        return
    missing = np.linalg.eigvalsh(np.cov(rows.T) - found.covariance())
    assert missing[0] >= -1e-9
    assert missing[-1] <= found.covariance_error * (1 + 1e-9)
    assert found.spectrum().shape == (4,)
    with pytest.raises(ValueError, match="expected 2 or more, full"):
        found.whitening()


def test_processes_at_the_same_time_have_files_of_their_own(tmp_path: Path) -> None:
    first, second, third = (request(name, prompt=6, output=4) for name in "abc")
    with feeding(tmp_path) as one, feeding(tmp_path) as other:
        one.whole(first)
        other.whole(second)
    with feeding(tmp_path) as again:
        again.whole(third)

    assert len(list(tmp_path.glob("moments-*"))) == 2
    check(open_moments(tmp_path)[SITE], np.concatenate([rows_of(one) for one in (first, second, third)]))


KILLED = """
import os, signal, sys
from pathlib import Path
from headgate.consumers.moments import open_moments
from tests.unit.consumers.moments.test_moments_consumer import SITE, feeding, request

for _ in range(4):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with feeding(Path(sys.argv[1])) as feed:
            for index in range(10_000):
                feed.whole(request(f"r{index}", prompt=6, output=4))
                os.write(writing, b".")
    os.close(writing)
    told = sum(len(os.read(reading, 1)) for _ in range(5))
    os.kill(child, signal.SIGKILL)
    while found := os.read(reading, 4096):
        told += len(found)
    os.waitpid(child, 0)
    print(told, open_moments(sys.argv[1])[SITE].num_rows)
"""


def test_a_killed_process_loses_only_what_was_not_written(tmp_path: Path) -> None:
    """Killed at any moment, again and again: the state is whole, and holds every request whose result was there."""
    program = [sys.executable, "-c", KILLED, str(tmp_path)]

    done = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[4], check=False)

    assert done.returncode == 0, done.stderr
    before = 0
    for told, num_rows in (map(int, line.split()) for line in done.stdout.splitlines()):
        assert told >= 5
        assert num_rows % 9 == 0
        assert told <= num_rows // 9 - before <= told + 1
        before = num_rows // 9
    with feeding(tmp_path) as feed:
        feed.whole(request("last", prompt=6, output=4))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".moments-0.lock", "moments-0.safetensors"]
    assert open_moments(tmp_path)[SITE].num_rows == (before + 1) * 9


def test_first_tokens_and_sinks_are_left_out_and_counted(tmp_path: Path) -> None:
    asked = [request(f"r{index}", prompt=5, output=6) for index in range(4)]
    every = np.concatenate([rows_of(one)[2:] for one in asked])
    limit = float(np.median(np.linalg.norm(every, axis=1)))
    with feeding(tmp_path, skip_positions=2, max_norm={"1.resid_post": limit}) as feed:
        for one in asked:
            feed.whole(one)

    found = open_moments(tmp_path)[SITE]
    check(found, every[np.linalg.norm(every, axis=1) <= limit])
    assert (found.num_skipped, found.num_sinks) == (8, len(every) - found.num_rows)
    assert found.num_sinks > 0
    assert open_moments(tmp_path)["2.post_mlp"].num_sinks == 0


def test_rows_that_are_not_finite_are_left_out_and_counted(tmp_path: Path) -> None:
    class Broken(ExampleRequest):
        def rows(self, site: Any, positions: Any) -> torch.Tensor:
            rows = super().rows(site, positions)
            rows[positions == 1, 3] = torch.inf
            return rows

    whole = request("whole", prompt=6, output=3)
    broken = Broken(whole.info.spec, "broken", prompt=6, output=3)
    with feeding(tmp_path) as feed:
        feed.whole(whole)
        feed.whole(broken)

    found = open_moments(tmp_path)[SITE]
    check(found, np.concatenate([rows_of(whole), np.delete(rows_of(broken), 1, axis=0)]))
    assert found.num_not_finite == 1


def test_rows_past_the_end_are_held_back_and_beyond_that_told(tmp_path: Path) -> None:
    near, far = (request(name, prompt=4, output=60) for name in ("near", "far"))
    with feeding(tmp_path) as feed:
        for asked, past in ((near, HOLD_ROWS), (far, 3 * HOLD_ROWS)):
            feed.begin(asked)
            feed.step({asked: (0, 4)})
            for position in range(4, asked.final.num_rows + past):
                feed.step({asked: (position, position + 1)})
        told = {name: feed.finish(asked) for name, asked in (("near", near), ("far", far))}

    assert told["near"]["num_past_end"] == 0
    assert told["near"]["num_rows"] == near.final.num_rows * 2
    assert 0 < told["far"]["num_past_end"] <= 2 * HOLD_ROWS * 2
    assert told["far"]["num_rows"] == far.final.num_rows * 2 + told["far"]["num_past_end"]


def test_held_rows_are_few(tmp_path: Path) -> None:
    """However long an answer is, no more of it waits than twice what is held back."""
    asked = request("long", prompt=2, output=400)
    with feeding(tmp_path, flush_s=3600) as feed:
        feed.begin(asked)
        for position in range(asked.final.num_rows):
            feed.step({asked: (position, position + 1)})
        running = feed.consumer._requests["long"]
        assert max(held.num_rows for held in running._held.values()) <= 2 * HOLD_ROWS
        feed.finish(asked)

    check(open_moments(tmp_path)[SITE], rows_of(asked))


def test_the_state_is_written_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request("r", prompt=6, output=3)
    written = threading.Semaphore(0)
    replace = OwnedFile.replace

    def noted(self: OwnedFile, content: bytes) -> None:
        replace(self, content)
        written.release()

    with feeding(tmp_path, flush_s=0.01) as feed:
        monkeypatch.setattr(OwnedFile, "replace", noted)
        feed.whole(asked)  # in two parts, between which the state may be written, too
        for _ in range(2):
            assert written.acquire(timeout=TIMEOUT_S)
            if open_moments(tmp_path)[SITE].num_rows == len(rows_of(asked)):
                break

        check(open_moments(tmp_path)[SITE], rows_of(asked))


def test_a_full_disk_is_told_and_costs_nothing_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [request(f"r{index}", prompt=6, output=3) for index in range(3)]

    def full(*args: Any, **options: Any) -> int:
        raise OSError(28, "No space left on device")

    with feeding(tmp_path) as feed:
        feed.whole(asked[0])
        with monkeypatch.context() as patch:
            patch.setattr("headgate.consumers.moments.state_file.write_file", full)
            told = feed.whole(asked[1])
        assert "No space left on device" in told["problem"]
        assert "No space left on device" in caplog.text
        assert open_moments(tmp_path)[SITE].num_rows == 8
        assert feed.whole(asked[2])["problem"] is None

    check(open_moments(tmp_path)[SITE], np.concatenate([rows_of(one) for one in asked]))


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"skip_positions": 1}, "skip_positions 0, expected 1"), ({"covariance": "none"}, "covariance 'full'")],
)
def test_moments_of_other_settings_are_refused(tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    with feeding(tmp_path) as feed:
        feed.whole(request("r"))

    with pytest.raises(ConfigError, match=named), feeding(tmp_path, **changed):
        pass
    with feeding(tmp_path):
        pass  # the lock was given back


def test_no_other_user_can_hold_a_lock_of_moments(tmp_path: Path) -> None:
    lock = tmp_path / ".moments-0.lock"
    lock.touch(0o644)  # as earlier versions made it
    lock.chmod(0o644)

    with feeding(tmp_path) as feed:
        feed.whole(request("r"))

    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    assert sorted(tmp_path.glob("*.safetensors")) == [tmp_path / "moments-0.safetensors"]


def test_two_consumers_of_one_root_would_count_twice_and_are_refused(tmp_path: Path) -> None:
    other = ConsumerContext(instance_name="other", model=EXAMPLE_MODEL)

    with feeding(tmp_path), pytest.raises(ConfigError, match="consumer 'moments', expected 'other'"):
        MomentsConsumer({"root": str(tmp_path)}, other)


def test_a_damaged_file_is_refused_and_stays(tmp_path: Path) -> None:
    with feeding(tmp_path) as feed:
        feed.whole(request("r"))
    path = tmp_path / "moments-0.safetensors"
    content = path.read_bytes()
    for damaged in (content[:-5], b"", b"nonsense" * 9):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"moments-0\.safetensors: not a (safetensors file|file of moments), or"):
            MomentsConsumer({"root": str(tmp_path)}, CONTEXT)
        assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("found", "damaged"),
    [(b"1.post_mlp", b"1.postnull"), (b'"phase\\":\\"prefill', b'"phase\\":\\"prefiXX'), (b"0/mean", b"0/meaX")],
    ids=["site", "phase", "tensor"],
)
def test_an_entry_that_cannot_be_is_refused(tmp_path: Path, found: bytes, damaged: bytes) -> None:
    with feeding(tmp_path) as feed:
        feed.whole(request("r"))
    path = tmp_path / "moments-0.safetensors"
    content = path.read_bytes()
    assert found in content
    path.write_bytes(content.replace(found, damaged))

    with pytest.raises(CaptureFileError, match="not a file of moments, or damaged"):
        open_moments(tmp_path)


@pytest.mark.parametrize("hidden_size", [0, 3, 10**9])
def test_tensors_of_another_width_than_the_settings_are_refused(tmp_path: Path, hidden_size: int) -> None:
    with feeding(tmp_path) as feed:
        feed.whole(request("r"))
    path = tmp_path / "moments-0.safetensors"
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "np") as file:
        texts = dict(file.metadata())
    header = json.loads(texts["header"])
    header["settings"]["hidden_size"] = hidden_size
    safetensors.numpy.save_file(tensors, path, metadata={**texts, "header": json.dumps(header)})

    with pytest.raises(CaptureFileError, match=rf"0/mean: float64 .*, expected float64 \({hidden_size},\)"):
        open_moments(tmp_path)


def test_a_root_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="cannot be used"):
        MomentsConsumer({"root": str(tmp_path / "file")}, CONTEXT)


def test_a_state_that_could_be_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"9 sites, 2 phases and 1 tags could take .* and max_bytes is 1000"):
        MomentsConsumer({"root": str(tmp_path), "max_bytes": 1000}, CONTEXT)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"root": ""}, {"root": "s3://bucket"}, {"skip_positions": -1}, {"max_norm": 0}, {"max_norm": {"x": 1.0}}),
        *({"covariance": "half"}, {"rank": 0}, {"quantile_error": 0}, {"flush_s": -1}, {"tags": ["../x"]}),
        *({"hooks": {"nowhere": "all"}}, {"positions": "some"}, {"max_bytes": 0}),
    ],
    ids=str,
)
def test_wrong_parameters_are_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong

    with pytest.raises(ConfigError, match=name):
        MomentsConsumer.check_params({"root": "x", **wrong})


def test_with_hooks_every_request_is_looked_at() -> None:
    params = {"root": "x", "hooks": HOOKS, "positions": "all_generated"}
    context = SpecContext(instance_name="m", model=EXAMPLE_MODEL, params=params, client_request_id="r")

    spec = MomentsConsumer.global_capture_spec(context)

    assert spec is not None
    assert [site.name for site in spec.sites] == ["1.post_mlp", "2.post_mlp"]
    assert (spec.positions.described(), spec.options) == ("all_generated", {"tag": "default"})
    context = SpecContext(instance_name="m", model=EXAMPLE_MODEL, params={"root": "x"}, client_request_id="r")
    assert MomentsConsumer.global_capture_spec(context) is None


def test_another_user_of_the_root_can_not_take_a_file_that_is_owned(tmp_path: Path) -> None:
    first, second = OwnedFile(tmp_path), OwnedFile(tmp_path)
    assert first.path != second.path
    first.close()
    first.close()
    third = OwnedFile(tmp_path)
    assert third.path == first.path
    for owned in (second, third):
        owned.close()
    assert os.listdir(tmp_path)
