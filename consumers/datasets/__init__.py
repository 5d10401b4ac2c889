"""Captured rows as data sets for training: several roots as one, in bounded memory, in the forms that trainers take.

::

    data = open_dataset("captures", sites="12.post_mlp", phases="decode")
    for batch in data.mixed(batch_size=4096, seed=0):
        step(batch.torch())

Needs no vLLM; torch where tensors are asked for.
"""

from headgate.consumers.datasets.dataset import Dataset, open_dataset
from headgate.consumers.datasets.index import Problem
from headgate.consumers.datasets.mixing import MixedBatches
from headgate.consumers.datasets.view import DatasetView, RowBatch

__all__ = ["Dataset", "DatasetView", "MixedBatches", "Problem", "RowBatch", "open_dataset"]
