"""Rows in the forms of trainers, with nothing but torch; ``make test-producers`` has the trainers themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from headgate.consumers.datasets import Dataset, open_dataset
from headgate.consumers.datasets.feeds.dictionary_learning import RowBuffer
from headgate.consumers.datasets.feeds.scikit_learn import labelled
from headgate.consumers.datasets.feeds.torch_rows import TensorBatches, TensorsByHook, TorchRows
from tests.fakes.captured_roots import SITE, write_root

SMALL: dict[str, Any] = {"batch_size": 16, "min_rows": 60, "min_requests": 5}
OTHER = "1.post_mlp"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("feeds") / "root"
    write_root(root, [f"r{number}" for number in range(20)])
    return open_dataset(root, sites=[OTHER, SITE])


def counted(tensors: Iterable[torch.Tensor]) -> Counter[bytes]:
    return Counter(row.tobytes() for rows in tensors for row in rows.float().numpy())


def all_rows(data: Dataset, site: str = SITE) -> Counter[bytes]:
    return counted(batch.torch(site) for batch in data.batches())


def test_tensors_are_of_the_wanted_dtype_and_can_be_resumed(data: Dataset) -> None:
    stream = TensorBatches(data.mixed(SITE, **SMALL), dtype=torch.float32)
    begun = [next(stream), next(stream)]
    state = stream.state_dict()
    rest = list(stream)
    again = TensorBatches(data.mixed(SITE, **SMALL))
    again.load_state_dict(state)

    assert all(rows.dtype == torch.float32 and rows.is_contiguous() for rows in rest)
    assert counted([*begun, *rest]) == all_rows(data)
    assert all(torch.equal(a.float(), b) for a, b in zip(again, rest, strict=True))
    with pytest.raises(ValueError, match="see TensorsByHook"):
        TensorBatches(data.mixed(**SMALL))


def test_tensors_of_several_sites_are_of_the_same_tokens(data: Dataset) -> None:
    names = {SITE: "blocks.3.hook_resid_post", OTHER: "blocks.1.hook_resid_post"}
    items = list(TensorsByHook(data.mixed(**SMALL), names))

    pairs = Counter(
        (one.tobytes(), other.tobytes())
        for item in items
        for one, other in zip(*(item[names[site]].float().numpy() for site in (OTHER, SITE)), strict=True)
    )
    assert pairs == Counter(
        (one.tobytes(), other.tobytes())
        for batch in data.batches()
        for one, other in zip(batch.numpy(OTHER), batch.numpy(SITE), strict=True)
    )
    with pytest.raises(ValueError, match=r"names: of 3\.post_mlp; the rows are of"):
        TensorsByHook(data.mixed(**SMALL), {SITE: "x"})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_and_workers_share_the_rows(data: Dataset, workers: int, ranks: int) -> None:
    found = [
        rows
        for rank in range(ranks)
        for rows in DataLoader(
            TorchRows(data.rows(SITE), **SMALL, rank=rank, world_size=ranks), batch_size=None, num_workers=workers
        )
    ]

    assert counted(found) == all_rows(data)


def test_epochs_of_a_torch_data_set_are_chosen_and_resumed(data: Dataset) -> None:
    rows = TorchRows(data.rows(SITE), **SMALL)
    first, again = list(rows), list(rows)
    rows.set_epoch(1)
    second = list(rows)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert counted(second) == counted(first)
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    running = iter(rows)
    next(running)
    resumed = TorchRows(data.rows(SITE), **SMALL)
    resumed.load_state_dict(rows.state_dict())

    assert all(torch.equal(a, b) for a, b in zip(resumed, second[1:], strict=True))


def test_a_torch_data_set_of_several_sites_has_them_by_name(data: Dataset) -> None:
    items = list(TorchRows(data.rows(), **SMALL, dtype=torch.float16))

    assert {item[SITE].dtype for item in items} == {torch.float16}
    assert sum(len(item[OTHER]) for item in items) == len(data.rows())


def test_a_torch_data_set_that_did_not_run_has_no_state(data: Dataset) -> None:
    rows = TorchRows(data.rows(SITE), **SMALL)

    with pytest.raises(RuntimeError, match="no iteration has begun"):
        rows.state_dict()
    with pytest.raises(ValueError, match="rank and world_size: give both"):
        TorchRows(data.rows(SITE), **SMALL, rank=1)


def test_a_buffer_begins_anew_and_says_what_it_is(data: Dataset) -> None:
    buffer = RowBuffer(data.rows(SITE), **SMALL, epochs=1)
    for rows in buffer:
        rows.zero_()  # as the trainer scales them in place

    assert counted(buffer) == all_rows(data)
    assert torch.equal(next(buffer), next(iter(buffer)))
    assert buffer.config["ctx_len"] == max(int(b.positions.max()) for b in data.batches()) + 1
    assert (buffer.config["d_submodule"], buffer.config["layer"]) == (16, 3)
    with pytest.raises(ValueError, match="expected rows of one site"):
        RowBuffer(data.rows(), **SMALL)


def test_labels_go_by_request_and_tag(data: Dataset) -> None:
    labels = {"odd": 1, "even": 0, "r3": 5, "even/r4": 6}
    wanted = {"r3": 5, "r4": 6}

    for batch, part in zip(data.mixed(**SMALL), labelled(data.mixed(**SMALL), labels, SITE), strict=True):
        numbers = [int(name[1:]) for name in batch.request_ids]
        assert part.labels.tolist() == [wanted.get(f"r{n}", n % 2) for n in numbers]
        assert part.rows.dtype == np.float32
        assert np.array_equal(part.rows, batch.numpy(SITE))
        assert len(set(part.groups.tolist())) == len(set(batch.request_ids))
    with pytest.raises(KeyError, match="no label; give one"):
        list(labelled(data.batches(), {"odd": 1}, SITE))
