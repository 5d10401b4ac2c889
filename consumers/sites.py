"""Sites that a consumer's parameters name, against those that are captured."""

from __future__ import annotations

from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import Site

_SHOWN = 5


def check_captured(site: Site, model: ModelInfo, who: str) -> None:
    """Refuse a site that is not captured.

    Args:
        site: That a parameter names.
        model: Of the consumer's context.
        who: Consumer and parameter, for the error.

    Raises:
        ConfigError: Naming some that are captured.
    """
    if site in model.sites:
        return
    configured = ", ".join(one.name for one in model.sites[:_SHOWN]) or "none"
    more = ", ..." if len(model.sites) > _SHOWN else ""
    raise ConfigError(f"{who}: site {site.name} is not captured here, but {configured}{more}; add it to capture.sites")
