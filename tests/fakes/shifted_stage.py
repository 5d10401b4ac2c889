"""A ``worker_extension_cls`` of vLLM with which a worker mistakes the layout of its steps, as a bug of ours would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headgate.capture.schema.batch import BatchView


class _Shifted:
    """A layout in which each row stands for the position after its own."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.method = layout.method

    def view(self, args: Sequence[object], result: object) -> BatchView:
        view: BatchView = self.layout.view(args, result)
        return replace(view, num_computed=view.num_computed + 1)

    def token_ids(self, result: object) -> object:
        return self.layout.token_ids(result)


class ShiftedStage:
    """Mixed into vLLM's worker class."""

    def shift_stage(self, pp_rank: int, is_shifted: bool) -> None:
        """Shift the positions of one pipeline stage by one, or no longer."""
        installed = self.headgate_worker  # type: ignore[attr-defined]
        if installed.facts.pp_rank == pp_rank:
            adapter = installed._runner
            adapter._layout = _Shifted(adapter._layout) if is_shifted else adapter._layout.layout
