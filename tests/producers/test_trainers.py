"""Data sets against the real trainers and formats, which get exactly the rows of the files.

Run by ``make test-producers``, which installs the trainers; skipped where sae-lens is not installed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headgate.consumers.datasets import Dataset, open_dataset
from headgate.consumers.datasets.export import (
    arrow_batches,
    export,
    export_npy,
    export_parquet,
    export_saelens,
    export_webdataset,
)
from headgate.consumers.datasets.feeds.dictionary_learning import RowBuffer
from headgate.consumers.datasets.feeds.hugging_face import to_hugging_face
from headgate.consumers.datasets.feeds.scikit_learn import labelled
from headgate.consumers.datasets.feeds.torch_rows import TensorBatches, TensorsByHook, TorchRows
from tests.fakes.capturing import capturing

pytest.importorskip("sae_lens", reason="make test-producers has the trainers")

SITE, OTHER = "3.post_mlp", "1.post_mlp"
WIDTH, BATCH = 16, 32
pytestmark = pytest.mark.filterwarnings("ignore")  # other people's code, in versions that move


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """60 requests of 13 to 17 rows in all three layouts."""
    root = tmp_path_factory.mktemp("captures") / "root"
    with capturing(root) as files:
        for number in range(60):
            layout = ("request", "raw", "shards")[number % 3]
            tag = "odd" if number % 2 else "even"
            request = files.request(
                {"layout": layout, "tag": tag}, client_id=f"r{number}", prompt=9 + number % 5, output=5
            )
            files.feed.whole(request)
    return open_dataset(root)


def counted(tensors: Iterable[Any]) -> Counter[bytes]:
    """How often each row comes."""
    return Counter(row.tobytes() for rows in tensors for row in torch.as_tensor(rows).float().numpy())


def all_rows(data: Dataset, site: str = SITE) -> Counter[bytes]:
    """The same of the files."""
    return counted(batch.numpy(site) for batch in data.batches(site))


class Noting(Iterator[Any]):
    """Passes on what an iterator yields, and keeps copies."""

    def __init__(self, source: Any) -> None:
        self.source, self.seen = source, []

    def __next__(self) -> Any:
        item = next(self.source)
        copy = {name: rows.clone() for name, rows in item.items()} if isinstance(item, dict) else item.clone()
        self.seen.append(copy)
        return item


def saelens_config(steps: int) -> Any:
    from sae_lens.config import SAETrainerConfig

    return SAETrainerConfig(total_training_samples=steps * BATCH, train_batch_size_samples=BATCH, lr_end=3e-5)


def saelens_sae() -> Any:
    from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig

    return StandardTrainingSAE(StandardTrainingSAEConfig(d_in=WIDTH, d_sae=32))


def test_saelens_trains_on_an_epoch_of_the_files(data: Dataset) -> None:
    from sae_lens.training.sae_trainer import SAETrainer

    steps = data.num_rows[SITE] // BATCH
    provider = Noting(TensorBatches(data.mixed(SITE, batch_size=BATCH, epochs=None), dtype=torch.float32))

    trainer = SAETrainer(saelens_config(steps), saelens_sae(), provider)
    trainer.fit()

    assert trainer.n_training_steps == steps == len(provider.seen)
    provider.seen.append(next(provider.source))  # the rest of the epoch
    assert counted(provider.seen) == all_rows(data)


def test_saelens_trains_several_saes_on_the_same_tokens(data: Dataset) -> None:
    from sae_lens.training.multi_sae_trainer import MultiSAETrainer

    steps = data.num_rows[SITE] // BATCH
    names = {OTHER: "blocks.1.hook_resid_post", SITE: "blocks.3.hook_resid_post"}
    mixed = data.mixed([OTHER, SITE], batch_size=BATCH, epochs=None)
    provider = Noting(TensorsByHook(mixed, names, dtype=torch.float32))

    MultiSAETrainer(
        saelens_config(steps),
        {"a": saelens_sae(), "b": saelens_sae()},
        dict(zip("ab", names.values(), strict=True)),
        provider,
    ).fit()

    provider.seen.append(next(provider.source))
    pairs = Counter(
        (one.tobytes(), other.tobytes())
        for item in provider.seen
        for one, other in zip(*(item[name].numpy() for name in names.values()), strict=True)
    )
    assert pairs == Counter(
        (one.tobytes(), other.tobytes())
        for batch in data.batches([OTHER, SITE])
        for one, other in zip(batch.numpy(OTHER), batch.numpy(SITE), strict=True)
    )


@pytest.mark.parametrize("normalizes", [False, True])
def test_dictionary_learning_trains_and_notes_the_buffer(data: Dataset, tmp_path: Path, normalizes: bool) -> None:
    from dictionary_learning.trainers.standard import StandardTrainer
    from dictionary_learning.training import trainSAE

    before = all_rows(data)
    steps = -(-data.num_rows[SITE] // BATCH)
    buffer = RowBuffer(data.rows(SITE), batch_size=BATCH, epochs=1)
    rows = counted(iter(buffer))
    config = {
        "trainer": StandardTrainer,
        "steps": steps,
        "activation_dim": WIDTH,
        "dict_size": 32,
        "layer": 3,
        "lm_name": "example-model",
        "warmup_steps": 1,
        "sparsity_warmup_steps": 2,
        "device": "cpu",
    }

    trainSAE(buffer, [config], steps, save_dir=str(tmp_path), device="cpu", normalize_activations=normalizes)

    written = json.loads((tmp_path / "trainer_0" / "config.json").read_text())
    assert written["buffer"] | {"ctx_len": 17, "d_submodule": WIDTH, "io": "out"} == written["buffer"]
    assert (tmp_path / "trainer_0" / "ae.pt").is_file()
    assert rows == before == all_rows(data) == counted(iter(buffer))


def test_sparsify_codes_the_rows_in_a_loop(data: Dataset) -> None:
    from sparsify import SparseCoder
    from sparsify.config import SparseCoderConfig

    coder = SparseCoder(WIDTH, SparseCoderConfig(num_latents=32, k=4), dtype=torch.float32)
    optimizer = torch.optim.Adam(coder.parameters(), lr=1e-2)
    losses, seen = [], []

    for rows in TensorBatches(data.mixed(SITE, batch_size=BATCH, epochs=8), dtype=torch.float32):
        seen.append(rows.clone())
        loss = coder(rows).fvu
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert counted(seen) == Counter({row: 8 * count for row, count in all_rows(data).items()})
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_scikit_learn_fits_in_parts_and_splits_by_request(data: Dataset) -> None:
    from sklearn.linear_model import SGDClassifier
    from sklearn.model_selection import GroupKFold

    model = SGDClassifier(random_state=0)
    parts = list(labelled(data.mixed(SITE, batch_size=BATCH), {"odd": 1, "even": 0}))
    for part in parts:
        assert part.rows.dtype == np.float32
        assert part.rows.flags.c_contiguous
        model.partial_fit(part.rows, part.labels, classes=[0, 1])

    rows, labels, groups = (np.concatenate(column) for column in zip(*parts, strict=True))
    assert counted([rows]) == all_rows(data)
    assert len(np.unique(groups)) == 60
    for train, test in GroupKFold(5).split(rows, labels, groups):
        assert not set(groups[train]) & set(groups[test])


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_saves_and_resumes_where_workers_are(data: Dataset, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        rows = TorchRows(data.rows(SITE), batch_size=BATCH, seed=3, min_rows=200, min_requests=10)
        return StatefulDataLoader(rows, batch_size=None, num_workers=workers)

    whole = list(loader())
    assert counted(whole) == all_rows(data)
    first = loader()
    running = iter(first)
    begun = [next(running).clone() for _ in range(7)]
    state = first.state_dict()
    again = loader()
    again.load_state_dict(state)

    rest = list(again)

    assert all(torch.equal(a, b) for a, b in zip([*begun, *rest], whole, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_face_has_every_row_with_its_request(data: Dataset, workers: int) -> None:
    from torch.utils.data import DataLoader

    found = to_hugging_face(data.rows(SITE), num_shards=4)
    examples = [example for batch in DataLoader(found, batch_size=None, num_workers=workers) for example in [batch]]

    assert Counter(
        (e["request_id"], e["position"], e["token_id"], np.float32(e[SITE]).tobytes()) for e in examples
    ) == expected_facts(data)


def expected_facts(data: Dataset) -> Counter[Any]:
    """Request, position, token and row of all rows."""
    return Counter(
        fact
        for batch in data.batches(SITE)
        for fact in zip(
            batch.request_ids,
            batch.positions.tolist(),
            batch.token_ids.tolist(),
            [row.tobytes() for row in batch.numpy(SITE)],
            strict=True,
        )
    )


def test_parquet_is_read_by_hugging_face_and_arrow(data: Dataset, tmp_path: Path) -> None:
    from datasets import load_dataset
    from pyarrow import parquet

    selected = open_dataset([root.given for root in data.roots], sites=SITE)
    manifest = export(selected, str(tmp_path / "out"), export_parquet)

    found = load_dataset("parquet", data_files=str(tmp_path / "out" / "*.parquet"), cache_dir=str(tmp_path / "c"))
    rows = found["train"]
    assert Counter(
        (e["request_id"], e["position"], e["token_id"], np.float32(e[SITE]).tobytes()) for e in rows
    ) == expected_facts(data)
    table = parquet.read_table(tmp_path / "out")
    assert table.num_rows == manifest["export"]["rows"] == sum(b.num_rows for b in arrow_batches(selected.rows()))


def test_webdataset_reads_the_tars(data: Dataset, tmp_path: Path) -> None:
    import webdataset

    selected = open_dataset([root.given for root in data.roots], sites=SITE)
    export(selected, str(tmp_path / "out"), lambda view, folder: export_webdataset(view, folder, tar_bytes=20_000))
    tars = sorted(map(str, (tmp_path / "out").glob("*.tar")))

    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode())

    assert len(tars) > 1
    assert Counter(
        (sample["json"]["request_id"], *fact)
        for sample in samples
        for fact in zip(
            sample["positions.npy"].tolist(),
            sample["token_ids.npy"].tolist(),
            [row.tobytes() for row in sample["3_post_mlp.npy"]],
            strict=True,
        )
    ) == expected_facts(data)


def test_saelens_reads_the_cached_activations(data: Dataset, tmp_path: Path) -> None:
    from sae_lens.training.activations_store import ActivationsStore

    selected = open_dataset([root.given for root in data.roots], sites=SITE)
    manifest = export(selected, str(tmp_path / "out"), lambda view, to: export_saelens(view, to, context_size=8))
    store = ActivationsStore.__new__(ActivationsStore)  # its constructor wants a language model
    store.cached_activations_path = str(tmp_path / "out")
    store.hook_name, store.device, store.dtype = "blocks.3.hook_resid_post", torch.device("cpu"), torch.float32
    store.context_size, store.d_in = 8, WIDTH

    found = store.load_cached_activation_dataset()

    assert found is not None
    rows = found[:][store.hook_name].reshape(-1, WIDTH)
    expected = np.concatenate([batch.numpy(SITE) for batch in data.batches(SITE)])[: len(rows)]
    assert np.array_equal(rows.numpy(), expected)
    assert len(rows) == manifest["export"]["rows"] == data.num_rows[SITE] - manifest["export"]["left_out_rows"]
    tokens = np.concatenate([batch.token_ids for batch in data.batches(SITE)])[: len(rows)]
    assert np.array_equal(found[:]["token_ids"].reshape(-1).numpy(), tokens)


def test_numpy_maps_the_arrays(data: Dataset, tmp_path: Path) -> None:
    export(data, str(tmp_path / "out"), export_npy)

    rows = np.load(tmp_path / "out" / "3_post_mlp.npy", mmap_mode="r")

    assert counted([np.array(rows)]) == all_rows(data)
