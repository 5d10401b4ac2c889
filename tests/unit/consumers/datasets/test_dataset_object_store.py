"""Data sets in S3: exactly the rows of the files, with few requests, in forked processes, and errors with names."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from headgate.capture.schema.errors import CaptureFileError
from headgate.consumers.datasets import open_dataset
from headgate.consumers.feed import TIMEOUT_S
from tests.fakes.captured_roots import SITE, expected_facts, facts_of, write_root
from tests.fakes.capturing import capturing
from tests.fakes.remote_roots import root_of, write
from tests.fakes.s3_server import S3Server


def test_a_root_opens_with_few_requests(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        requests = write(files, [f"r{n}" for n in range(20)], layout="request")

    store.requests.clear()
    data = open_dataset(root_of(store), sites=SITE)
    opened = len(store.requests)
    store.requests.clear()
    again = open_dataset(root_of(store), sites=SITE)

    assert opened <= len(requests) + 10  # one for each file
    assert len(store.requests) <= 10
    assert again.roots[0].num_opened == 0
    assert facts_of(again.batches()) == facts_of(data.batches()) == expected_facts(requests)


def test_local_roots_and_stores_are_one_data_set(store: S3Server, tmp_path: Path) -> None:
    local = write_root(tmp_path / "local", ["l0", "l1", "l2"])
    with capturing(root_of(store), spool=str(tmp_path / "spool")) as files:
        requests = write(files, ["r0", "r1", "r2"])

    data = open_dataset([tmp_path / "local", root_of(store)], sites=SITE)

    assert facts_of(data.batches()) == expected_facts([*local, *requests])
    mixed = data.mixed(batch_size=8, seed=3, min_rows=20, min_requests=2)
    assert facts_of(mixed) == expected_facts([*local, *requests])


def test_rows_of_many_files_are_fetched_side_by_side(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        requests = write(files, [f"r{n}" for n in range(4)], layout="request")
    data = open_dataset(root_of(store), sites=SITE)
    together = threading.Barrier(len(requests), timeout=TIMEOUT_S)

    def wait(method: str, path: str) -> None:
        if method == "GET" and path.endswith(".safetensors?"):
            together.wait()

    store.refuses = wait
    (batch,) = data.batches(batch_size=1000)
    store.refuses = lambda method, path: None

    assert facts_of([batch]) == expected_facts(requests)


def test_a_file_that_is_gone_or_was_cut_is_named(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        write(files, ["a"], layout="request")
    data = open_dataset(root_of(store), sites=SITE)
    whole = store.objects()["run/default/a.safetensors"]

    for cut, found in ((300, 212), (600, 0)):
        store.put("run/default/a.safetensors", whole[:-cut])
        with pytest.raises(CaptureFileError, match=rf"run/default/a.safetensors: torn: 256 .* {found} found"):
            list(data.batches())
    store.files().rm(f"{store.bucket}/run/default/a.safetensors")
    with pytest.raises(CaptureFileError, match=r"run/default/a.safetensors: missing"):
        list(data.batches())


def test_a_forked_process_reads_by_itself(store: S3Server, tmp_path: Path) -> None:
    with capturing(root_of(store), spool=str(tmp_path)) as files:
        requests = write(files, ["r0", "r1", "r2"])
    view = open_dataset(root_of(store), sites=SITE).rows()
    view.read(0, 1)  # the parent's connections are open

    with multiprocessing.get_context("fork").Pool(1) as pool:
        rows = pool.apply(view.read, (0, len(view)))

    assert rows[SITE].tobytes() == view.read(0, len(view))[SITE].tobytes()
    assert len(view) == expected_facts(requests).total()
