"""Actions of consumers: how they reach the controllers of the engine."""
