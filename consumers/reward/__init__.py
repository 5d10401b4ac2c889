"""The reward consumer: one number for each request, from its activations along a direction."""

from headgate.consumers.reward.consumer import RewardConsumer

__all__ = ["RewardConsumer"]
