"""How the consumers join headgate; see `headgate.capture.engine.contracts.parts`.

Consumers themselves are entry points of the group ``vllm.capture_consumers``; this brings their commands alone, and
opens the folders that `filesystem` writes for commands of other parts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headgate.capture.engine.contracts.parts import Part

if TYPE_CHECKING:
    from headgate.capture.monitoring.verify_checks import CheckPart
    from headgate.consumers.reader import CaptureFolder


class ConsumersAsPart(Part):
    """The consumers' commands and folders, as the engine sees them."""

    def commands(self) -> dict[str, tuple[str, str]]:
        """``headgate dump``, ``harvest`` and ``moments``."""
        return {
            "dump": ("headgate.consumers.dump:app", "Look into folders of captured rows."),
            "harvest": (
                "headgate.consumers.harvest.command:app",
                "Run prompts through MODEL and write their rows to ROOT.",
            ),
            "moments": ("headgate.consumers.moments.commands:app", "Look at moments of captured rows."),
        }

    def checks(self) -> CheckPart:
        """Lenses, attention patterns and features agree with the model, and with themselves."""
        from headgate.consumers.verify import ReadingChecks

        return ReadingChecks()

    def captures(self, root: str) -> CaptureFolder:
        """Requests in a root of ``filesystem``."""
        from headgate.consumers.reader import open_captures

        return open_captures(root)
