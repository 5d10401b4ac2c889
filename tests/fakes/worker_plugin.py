"""Plugin of every process of the tests' engines: headgate's worker half makes way for the fake worker."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Runs beside headgate's own plugin, before any model is loaded."""
    from headgate.capture.engine.worker import install

    install.install = _install_unless_fake  # type: ignore[assignment]


def _install_unless_fake(worker: Any) -> None:
    assert hasattr(worker, "headgate_stats"), "only the fake worker is known to do without"
