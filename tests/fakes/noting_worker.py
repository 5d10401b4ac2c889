"""The steering worker that also notes what arrived with each request, for tests that ask from another process."""

from __future__ import annotations

from typing import Any

from tests.fakes.steering_worker import SteeringWorker


class NotingWorker(SteeringWorker):
    """Answers `take_notes`."""

    def init_device(self) -> None:
        super().init_device()
        self._notes: list[dict[str, Any]] = []

    def take_notes(self) -> list[dict[str, Any]]:
        """What new requests brought along since the last call, in order."""
        notes, self._notes = self._notes, []
        return notes

    def take_owners(self) -> list[str | None]:
        """Whose the conversations are that new requests have brought along since the last call, in order."""
        return [note["wire"]["parts"]["steering"].get("owner") for note in self.take_notes()]

    def _add(self, new: Any) -> None:
        params = new.sampling_params
        extra = params.extra_args or {}
        self._notes.append(
            {
                "prompt": list(new.prompt_token_ids),
                "extra": sorted(extra),
                "wire": extra.get("headgate"),
                "skips_cache": params.skip_reading_prefix_cache,
            }
        )
        super()._add(new)
