"""Readouts for tests of the pipeline: their outputs say which row they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headgate.capture.planning.step_plan import PackGroup
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import Readout, ReadoutFacts, ReadoutSite, RowArguments
from headgate.capture.schema.sites import Site
from headgate.capture.staging.readouts import BoundReadout, bind
from tests.fakes.pipeline import HIDDEN, SITES, row_values


class Multiples(Readout):
    """Multiples of the first values of a row: output i is the row's value i, modulo the width, times `factor`."""

    def __init__(self, num_outputs: int, factor: float = 0.5) -> None:
        self._num_outputs, self.factor = num_outputs, factor

    @property
    def num_outputs(self) -> int:
        return self._num_outputs

    @property
    def key(self) -> str:
        return f"{self._num_outputs} times {self.factor}"

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        def function(rows: Tensor) -> Tensor:
            assert rows.dtype == torch.float64
            return rows[:, torch.arange(self._num_outputs, device=device) % rows.shape[1]] * self.factor

        return function

    def expected(self, rows: Tensor) -> Tensor:
        """Float32 ``[..., num_outputs]``."""
        return rows[..., torch.arange(self._num_outputs) % rows.shape[-1]].double().mul(self.factor).float()


class Failing(Multiples):
    """Fails once it was tried."""

    def on(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        function, calls = super().on(device), []

        def failing(rows: Tensor) -> Tensor:
            calls.append(rows)
            if len(calls) > 1:
                raise RuntimeError("no such weight")
            return function(rows)

        return failing


class Shifted(Multiples):
    """Multiples with the arguments of the row added, to as many outputs; -1 for each that its request did not give."""

    @property
    def num_arguments(self) -> int:
        return self.num_outputs

    def on(self, device: torch.device) -> Callable[..., Tensor]:
        function = super().on(device)

        def shifted(rows: Tensor, arguments: RowArguments) -> Tensor:
            assert arguments.device.dtype == torch.int64
            assert arguments.host.tolist() == arguments.device.tolist()
            return function(rows) + arguments.device

        return shifted

    def expected(self, rows: Tensor, arguments: Sequence[int] = ()) -> Tensor:
        given = [*arguments, *([-1] * (self.num_outputs - len(arguments)))]
        return (super().expected(rows).double() + torch.tensor(given)).float()


Declared = tuple[int, Site, Multiples]
"""A consumer's bit, the site, and what it is read out by."""


def sites_of(declared: Sequence[Declared]) -> tuple[ReadoutSite, ...]:
    """The readouts as a planner knows them."""
    return tuple(
        ReadoutSite(bit, site, ReadoutFacts(each.num_outputs, each.key, each.num_arguments))
        for bit, site, each in declared
    )


def bound(
    declared: Sequence[Declared], sites: Sequence[Site] = SITES, hidden_size: int = HIDDEN, device: str = "cpu"
) -> list[BoundReadout]:
    """The readouts as a ring knows them."""
    place = torch.device(device)
    return [
        bind(each, sites.index(site), width=hidden_size, device=place, name=site.name, bit=bit)
        for bit, site, each in declared
    ]


def expected_rows(
    group: PackGroup, declared: Sequence[Declared], number: int, positions: Int64Array, *, place: int
) -> Tensor:
    """The rows of the site at `place` of a group, or their outputs."""
    site_id = int(group.site_ids[place])
    rows = row_values(number, positions, SITES.index(group.sites[place]))
    return declared[site_id - len(SITES)][2].expected(rows) if group.site_set.is_read_out else rows
