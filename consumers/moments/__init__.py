"""The moments consumer: mean, variance, covariance and norms of captured rows, over all requests; and their reader."""

from headgate.consumers.moments.consumer import MomentsConsumer
from headgate.consumers.moments.reader import Moments, SiteMoments, open_moments

__all__ = ["Moments", "MomentsConsumer", "SiteMoments", "open_moments"]
