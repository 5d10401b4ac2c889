"""Probes as readouts: the scores of several probes of one site, computed on the worker's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headgate.capture.probes.probe import Activation, HiddenLayer, Probe, ProbeError, ProbeKind
from headgate.capture.schema.readout import Readout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Function = Callable[["Tensor"], "Tensor"]


class ProbeReadout(Readout):
    """The scores of probes: one column for each class, probe after probe.

    They are `Probe.scores`, computed in float64 and rounded to float32; not finite where a row is not.

    Args:
        probes: At least one, all of one site and one width.

    Raises:
        ProbeError: If they are not.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        if len({(probe.site, probe.hidden_size) for probe in probes}) != 1:
            raise ProbeError("expected probes of one site and one width")
        self._probes = tuple(probes)

    @property
    def num_outputs(self) -> int:
        """Classes of all probes."""
        return sum(len(probe.classes) for probe in self._probes)

    @property
    def key(self) -> str:
        """The checksums of the probes, in their order, with spaces between; see `keys_of`."""
        return " ".join(probe.sha256 for probe in self._probes)

    def columns(self) -> list[slice]:
        """Where the scores of each probe are among the outputs."""
        stops = np.cumsum([len(probe.classes) for probe in self._probes]).tolist()
        return [slice(stop - len(probe.classes), stop) for stop, probe in zip(stops, self._probes, strict=True)]

    def on(self, device: torch.device) -> Function:
        """See `Readout.on`. Linear and cosine probes share one product of matrices."""
        import torch

        flat = [probe for probe in self._probes if probe.hidden is None]
        functions = [_products(flat, device)] if flat else []
        functions += [_network(probe, probe.hidden, device) for probe in self._probes if probe.hidden is not None]
        if len(functions) == 1:
            return functions[0]
        made = sorted(zip(self._probes, self.columns(), strict=True), key=lambda each: each[0].hidden is not None)
        places = np.concatenate([np.arange(columns.start, columns.stop) for _, columns in made])
        order = torch.from_numpy(np.argsort(places)).to(device)
        return lambda rows: torch.cat([function(rows) for function in functions], dim=1).index_select(1, order)


def keys_of(key: str) -> list[str]:
    """The checksums of the probes whose scores a `ProbeReadout` of that key computes, in their order."""
    return key.split()


def _products(probes: Sequence[Probe], device: torch.device) -> Function:
    """The scores of linear and cosine probes."""
    import torch

    weights = _wide(np.concatenate([probe.weight for probe in probes]), device)
    bias = _wide(np.concatenate([probe.biases for probe in probes]), device)
    kinds = [probe.kind is ProbeKind.COSINE for probe in probes for _ in probe.classes]
    if not any(kinds):
        return lambda rows: rows @ weights.T + bias
    is_cosine = torch.tensor(kinds, device=device)
    weight_lengths = torch.linalg.vector_norm(weights, dim=1)

    def scores(rows: Tensor) -> Tensor:
        products = rows @ weights.T
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True) * weight_lengths
        cosines = torch.where(lengths == 0, 0.0, products / lengths)
        return torch.where(is_cosine, cosines, products + bias)

    return scores


def _network(probe: Probe, hidden: HiddenLayer, device: torch.device) -> Function:
    """The scores of an MLP."""
    from torch.nn import functional

    activations: dict[Activation, Function] = {
        Activation.RELU: functional.relu,
        Activation.GELU: functional.gelu,
        Activation.SILU: functional.silu,
    }
    activate = activations[hidden.activation]
    first, shift = _wide(hidden.weight, device), _wide(hidden.bias, device)
    second, bias = _wide(probe.weight, device), _wide(probe.biases, device)

    def scores(rows: Tensor) -> Tensor:
        units = rows @ first.T + shift
        # A unit at minus infinity would be cut off to 0: the score of such a row must not be finite.
        return activate(units) @ second.T + bias + 0.0 * units.sum(dim=1, keepdim=True)

    return scores


def _wide(values: np.ndarray, device: torch.device) -> Tensor:
    """Float64 on the device."""
    import torch

    return torch.from_numpy(values.astype(np.float64)).to(device)
