"""Readouts: functions of a site's rows that are computed where the rows are, so that their outputs travel in place of
the rows.

A consumer's class declares them (`CaptureConsumer.readouts`). Each worker makes them at its start and computes them on
its own device, after the forward and outside of its graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headgate.capture.schema.sites import Site

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_OUTPUTS = 1 << 16
"""Outputs of a readout, at most."""
OUTPUT_BYTES = 4
"""Each output travels as a float32."""


class Readout(ABC):
    """A function of single rows: ``[hidden] -> [num_outputs]``."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Numbers that each row becomes, 1 to `MAX_OUTPUTS`."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Names the function with its weights: equal for equal ones alone, such as a checksum.

        A consumer finds the key of the function that the worker really computes in `RequestInfo.readouts`.
        """

    @abstractmethod
    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Bring the weights to a device and return the function there.

        The function takes rows, float64 ``[n, hidden]`` on that device, which it must not keep or change, and returns
        floats ``[n, num_outputs]`` there; they travel as float32. It is called on the engine's step thread, with the
        stream of the forward current: torch operations that only launch work, no copy to the host, nothing that waits
        for the device. Each row's outputs depend on that row alone. `n` is at most some thousand, and what the
        function allocates is freed before the next call.
        """


class ReadoutFacts(NamedTuple):
    """The readout whose outputs a request's rows of a site are.

    Attributes:
        num_outputs: Numbers in each row, float32.
        key: See `Readout.key`; of the function that the worker computes.
    """

    num_outputs: int
    key: str


class ReadoutSite(NamedTuple):
    """A site as one consumer gets it: read out by a function.

    Attributes:
        bit: The consumer's.
        site: Whose rows are read.
        facts: Of the function.
    """

    bit: int
    site: Site
    facts: ReadoutFacts


def position_bytes(sites: Sequence[Site], readouts: Mapping[Site, ReadoutFacts], row_bytes: int) -> int:
    """Bytes of one position at some sites: of a row at each, or of the outputs of its readout."""
    if not readouts:
        return row_bytes * len(sites)
    return sum(OUTPUT_BYTES * readouts[site].num_outputs if site in readouts else row_bytes for site in sites)


def by_consumer(readouts: Iterable[ReadoutSite]) -> dict[int, dict[Site, ReadoutFacts]]:
    """The readouts of each consumer that has any, by its bit, then by site."""
    found: dict[int, dict[Site, ReadoutFacts]] = {}
    for each in readouts:
        found.setdefault(each.bit, {})[each.site] = each.facts
    return found
