"""The index beside a root: what is opened again, and what is said of files that cannot be read."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headgate.capture.schema.errors import CaptureFileError, NewerFormatError
from headgate.consumers.datasets import open_dataset
from headgate.consumers.datasets.index import index_path
from tests.deadlines import patience
from tests.fakes.captured_roots import SITE, expected_facts, facts_of, write_root
from tests.fakes.sparse_shards import make_sparse

NAMES = [f"r{number}" for number in range(9)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_the_second_opening_opens_no_file_of_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_root(root, NAMES)
    first = open_dataset(root)
    opened: list[str] = []
    plain_open = builtins.open

    def noting(path: object, *args: object, **kwargs: object) -> object:
        opened.append(str(path))
        return plain_open(path, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(builtins, "open", noting)
    again = open_dataset(root)

    assert first.roots[0].num_opened > 0
    assert again.roots[0].num_opened == 0
    assert [path for path in opened if path.startswith(f"{root}/")] == []
    assert again.manifest()["index_sha256"] == first.manifest()["index_sha256"]
    assert facts_of(again.batches(SITE)) == facts_of(first.batches(SITE))


def test_only_what_is_new_or_changed_is_opened(root: Path) -> None:
    requests = write_root(root, NAMES)
    whole = open_dataset(root).roots[0].num_opened
    requests += write_root(root, ["another"])
    touched = next((root / "even").glob("*.safetensors"))
    os.utime(touched, ns=(1, 1))

    data = open_dataset(root, sites=SITE)

    assert whole > data.roots[0].num_opened == 2
    assert facts_of(data.batches()) == expected_facts(requests)
    assert data.manifest()["index_sha256"] == open_dataset(root, index=False).manifest()["index_sha256"]


def test_a_file_that_went_is_not_in_the_data_any_more(root: Path) -> None:
    requests = write_root(root, NAMES)
    open_dataset(root)
    next((root / "even").glob("r0.safetensors")).unlink()

    assert facts_of(open_dataset(root, sites=SITE).batches()) == expected_facts(requests[1:])


def test_a_root_can_be_moved_with_its_index(root: Path, tmp_path: Path) -> None:
    requests = write_root(root, NAMES)
    (root / "notes.txt").write_text("mine")
    (root / "even" / "theirs.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    open_dataset(root)
    root.rename(tmp_path / "moved")
    Path(index_path(str(root))).rename(index_path(str(tmp_path / "moved")))

    data = open_dataset(tmp_path / "moved", sites=SITE)

    assert data.roots[0].num_opened == 0
    assert facts_of(data.batches()) == expected_facts(requests)
    assert {(p.kind, p.path) for p in data.problems} == {
        ("foreign", str(tmp_path / "moved" / "notes.txt")),
        ("foreign", str(tmp_path / "moved" / "even" / "theirs.safetensors")),
    }


def test_torn_newer_and_foreign_files_are_told_apart(root: Path) -> None:
    requests = write_root(root, NAMES)
    torn, newer = root / "even" / "torn.safetensors", root / "even" / "newer.safetensors"
    whole = (root / "even" / "r0.safetensors").read_bytes()
    torn.write_bytes(whole[:-1])
    newer.write_bytes(whole.replace(b'"format_version":"1"', b'"format_version":"7"'))
    (root / "even" / "folder").mkdir()

    for _ in range(2):  # from the files, then from the index
        data = open_dataset(root, sites=SITE, strict=False)
        kinds = {problem.path: problem.kind for problem in data.problems}
        assert kinds == {str(torn): "torn", str(newer): "newer", str(root / "even" / "folder"): "foreign"}
        assert facts_of(data.batches()) == expected_facts(requests)
    with pytest.raises(NewerFormatError, match=r"newer.safetensors.*version 7.*version 4.*1 more"):
        open_dataset(root)
    newer.unlink()
    with pytest.raises(CaptureFileError, match=r"torn.safetensors: partial"):
        open_dataset(root)
    assert data.manifest()["problems"] == {"torn": 1, "newer": 1, "foreign": 1}


def test_a_file_that_changes_while_it_is_read_is_an_error(root: Path) -> None:
    write_root(root, NAMES[:1])
    data = open_dataset(root, sites=SITE)
    path = root / "even" / "r0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CaptureFileError, match=r"r0.safetensors: changed since the data set was opened"):
        list(data.batches())
    path.unlink()
    with pytest.raises(CaptureFileError, match=r"r0.safetensors: missing since the data set was opened"):
        list(data.batches())


def test_a_shard_that_shrinks_is_torn(root: Path) -> None:
    write_root(root, NAMES[:1], raw={"layout": "shards"})
    data = open_dataset(root, sites=SITE)
    path = next(root.rglob("3_post_mlp.bin"))
    os.truncate(path, 10)

    with pytest.raises(CaptureFileError, match=r"3_post_mlp.bin: torn: ends 214 bytes early"):
        list(data.batches())


@pytest.mark.parametrize("keep", [0, 10, 40, 200, -1])
def test_a_torn_index_is_made_anew(root: Path, keep: int, caplog: pytest.LogCaptureFixture) -> None:
    requests = write_root(root, NAMES)
    open_dataset(root)
    path = Path(index_path(str(root)))
    path.write_bytes(path.read_bytes()[:keep])

    assert facts_of(open_dataset(root, sites=SITE).batches()) == expected_facts(requests)
    assert f"{path}: partial" in caplog.text
    assert open_dataset(root).roots[0].num_opened == 0


def test_a_damaged_index_is_made_anew(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_root(root, NAMES)
    open_dataset(root)
    path = Path(index_path(str(root)))
    data = bytearray(path.read_bytes())
    data[-70] ^= 1
    path.write_bytes(data)

    assert open_dataset(root).roots[0].num_opened > 0
    assert "its check does not agree" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"), [(b"a novel, by somebody", "no index of headgate"), (None, "index of version 9")]
)
def test_a_foreign_or_newer_index_is_left_alone(
    root: Path, content: bytes | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    requests = write_root(root, NAMES)
    open_dataset(root)
    path = Path(index_path(str(root)))
    content = content or path.read_bytes()[:16] + b"\x09" + path.read_bytes()[17:]
    path.write_bytes(content)

    assert facts_of(open_dataset(root, sites=SITE).batches()) == expected_facts(requests)
    assert message in caplog.text
    assert path.read_bytes() == content


def test_an_index_that_cannot_be_kept_is_said(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_root(root, NAMES)

    def full(self: Path, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    open_dataset(root)

    assert "the index could not be kept" in caplog.text
    assert [path.name for path in root.parent.iterdir()] == ["root"]


def test_without_an_index_nothing_is_written(root: Path) -> None:
    write_root(root, NAMES)

    open_dataset(root, index=False)

    assert [path.name for path in root.parent.iterdir()] == ["root"]


def test_a_root_that_is_not_there_is_an_error(root: Path) -> None:
    with pytest.raises(CaptureFileError, match="no such folder"):
        open_dataset(root)


def test_ten_million_rows_open_at_once_from_their_index(root: Path) -> None:
    make_sparse(str(root), num_shards=10, num_requests=1000, rows=1000, hidden_size=2)
    open_dataset(root)

    began = time.perf_counter()
    again = open_dataset(root)
    num_rows = again.num_rows

    assert time.perf_counter() - began < patience(2)  # it takes a hundredth of that
    assert num_rows == {"3.post_mlp": 10_000_000}
    assert again.roots[0].num_opened == 0


def test_a_hundred_gigabytes_are_gone_through_in_bounded_memory(root: Path) -> None:
    """100 GB of holes in shards: opened, then read here and there and in a row, within 2 GiB."""
    write_root(root, ["one"], raw={"layout": "shards", "hooks": {"post_mlp": [3]}})
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[4])!r})
from tests.fakes.sparse_shards import make_sparse
from headgate.consumers.datasets import open_dataset
make_sparse({str(root)!r}, num_shards=25, num_requests=40, rows=3125, hidden_size=16_384)
import resource
data = open_dataset({str(root)!r}, sites="3.post_mlp", tags="sparse")
view = data.rows()
assert len(view) * view.row_bytes >= 100e9, len(view)
for _, batch in zip(range(30), data.batches(batch_size=512)):
    assert batch.torch().shape == (512, 16_384)
for start in range(0, len(view), len(view) // 40):
    view.read(start, min(start + 128, len(view)))
mixed = data.mixed(batch_size=512, min_rows=4000, min_requests=50)
for _, batch in zip(range(10), mixed):
    assert len(batch) == 512
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2048
