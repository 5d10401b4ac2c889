"""Scores of probes for each captured row, in place of the rows."""

from headgate.consumers.probe.consumer import ProbeConsumer

__all__ = ["ProbeConsumer"]
