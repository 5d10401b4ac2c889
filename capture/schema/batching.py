"""Bounds of the stages at which rows of several steps are put together before they go on.

Every stage saves Python calls in the process that also runs the engine's steps. The window of the first stage,
``linger_s``, decides how long a row waits: it belongs to the consumers (`CaptureConsumer.linger_s`) or the operator
(``capture.linger_s``). The bounds here only end a wait early, except `END_LINGER_S`, which adds to it.
"""

from __future__ import annotations

from headgate.capture.schema.config import MIB

RING_BYTES = 64 * MIB
"""Rows left in the ring on the device: with more in one device copy there is nothing to save."""
RING_SHARE = 1 / 4
"""Part of the ring's slots that may be left full: the next rows must not wait for the copies of the last."""

HELD_STEPS = 32
"""Device copies that the dispatch thread holds in the staging memory; more would save little."""
HELD_SHARE = 1 / 4
"""Part of the staging memory that held rows may take."""
END_LINGER_S = 0.004
"""Seconds that the end of a request may wait for rows of other requests, so that both are dispatched together.

With 64 requests in flight whose clients wait for results, dispatching each end at once costs the step thread 4 %.
"""
