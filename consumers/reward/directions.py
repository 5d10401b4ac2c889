"""Directions from files, steering vectors as safetensors and arrays of numpy; and what rows are along them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headgate.capture.files.reading import refusing
from headgate.capture.files.tensors import open_npy, open_safetensors
from headgate.capture.schema.batch import Float64Array
from headgate.capture.schema.errors import CaptureFileError, ConfigError
from headgate.capture.schema.readouts.readout import Readout
from headgate.capture.schema.sites import Site

_TIERS = ("vectors", "decode_vectors")
"""Tiers of a file of steering vectors that act on generated tokens."""


class AlongDirections(Readout):
    """A row's dot product with each of some directions, then its length.

    Args:
        directions: ``[hidden, n]``.
    """

    def __init__(self, directions: Float64Array) -> None:
        self._directions = directions.astype(np.float64)

    @property
    def num_outputs(self) -> int:
        """Directions, and one more."""
        return int(self._directions.shape[1]) + 1

    @property
    def key(self) -> str:
        """SHA-256 of the directions."""
        return hashlib.sha256(np.ascontiguousarray(self._directions).tobytes()).hexdigest()

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """See `Readout.on`."""
        directions = torch.from_numpy(self._directions).to(device)
        return lambda rows: torch.cat([rows @ directions, torch.linalg.vector_norm(rows, dim=1, keepdim=True)], dim=1)


def read_direction(path: Path, site: Site, hidden_size: int) -> Float64Array:
    """Return the direction in a file at unit length: float64 ``[hidden]``.

    Of a file of steering vectors, it is the sum of what acts on generated tokens at `site`: the tensors
    ``vectors/SITE`` (or ``SITE`` alone) and ``decode_vectors/SITE``.

    Raises:
        ConfigError: Naming the file, if it cannot be read or holds no such direction.
    """
    try:
        with refusing(path, CaptureFileError):
            found = _of_array(path) if path.suffix == ".npy" else _of_vectors(path, site)
    except CaptureFileError as error:
        raise ConfigError(f"reward: direction {error}") from error
    except OSError as error:
        raise ConfigError(f"reward: direction {path}: {error}") from error
    if found.shape != (hidden_size,):
        raise ConfigError(
            f"reward: direction {path}: its shape is {list(found.shape)}, expected [{hidden_size}], the hidden size"
        )
    length = float(np.linalg.norm(found))
    if not np.isfinite(length) or length == 0.0:
        raise ConfigError(f"reward: direction {path}: its length is {length}; expected a finite one above 0")
    return found / length


def _of_array(path: Path) -> Float64Array:
    array = open_npy(path, CaptureFileError)
    if array.dtype.kind != "f":
        raise ValueError("expected an array of floats")
    return array.read()


def _of_vectors(path: Path, site: Site) -> Float64Array:
    if path.suffix != ".safetensors":
        raise ValueError(f"unknown suffix {path.suffix!r}; known: .npy, .safetensors")
    tensors = open_safetensors(path, CaptureFileError).tensors
    parts = [tensor.read() for name, tensor in tensors.items() if _acts_at(name, site)]
    if not parts:
        held = ", ".join(sorted(tensors)[:5])
        raise ValueError(f"there is no vector for generated tokens at {site.name}, but {held or 'nothing'}")
    return np.asarray(sum(parts), dtype=np.float64)


def _acts_at(name: str, site: Site) -> bool:
    tier, slash, place = name.rpartition("/")
    if slash and tier not in _TIERS:
        return False
    try:
        return Site.parse(place) == site
    except ValueError:
        return False
