"""The key of the client behind an HTTP call, asked what it may capture; without a key nothing is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headgate.capture.engine.access.access_key import AccessKey
from headgate.capture.engine.access.caller import current_caller
from headgate.capture.engine.contracts.wire_format import CAPTURE
from headgate.capture.schema.consumer import CaptureConsumer
from headgate.capture.schema.errors import ForbiddenError, RequestError
from headgate.capture.schema.limits import CaptureLimits, CaptureUse
from headgate.capture.schema.spec import CaptureSpec


def capturing_key() -> AccessKey | None:
    """Return the key that lets the client at hand capture; None if it needs none, and where no client is."""
    caller = current_caller()
    return None if caller is None else caller.key_with(CAPTURE)


def check_consumer(instance: str, field: str) -> None:
    """Refuse a consumer that the client's key does not allow.

    Raises:
        ForbiddenError: For `field`.
    """
    key = capturing_key()
    if key is not None and not key.allows_consumer(instance):
        known = ", ".join(key.consumers or ()) or "none"
        raise ForbiddenError(f"the key {key.name!r} may not use this consumer; it may use {known}", field)


def with_tag(consumer: type[CaptureConsumer], wanted: object) -> object:
    """Add the tag of the client's key to a spec, as the client wrote it, that names none."""
    key = capturing_key()
    if key is None or key.default_tag is None or not consumer.takes_tag or not isinstance(wanted, Mapping):
        return wanted
    return wanted if "tag" in wanted else {**wanted, "tag": key.default_tag}


def check_spec(consumer: type[CaptureConsumer], spec: CaptureSpec, field: str) -> None:
    """Refuse sites, and a tag, that the client's key does not allow.

    Raises:
        ForbiddenError: Naming the field.
    """
    key = capturing_key()
    if key is None:
        return
    key.check_sites(spec.sites, field)
    tag = str(spec.options.get("tag"))
    if consumer.takes_tag and not key.allows_tag(tag):
        known = ", ".join(key.tags or ()) or "none"
        message = f"the key {key.name!r} may not write under the tag {tag!r}, but under {known}"
        raise ForbiddenError(message, f"{field}.tag")


def check_use(use: CaptureUse, answered: Collection[str]) -> None:
    """Refuse a call that could capture more than the client's key allows at once.

    Args:
        use: Of the call so far.
        answered: Consumers whose rows are part of the answer.

    Raises:
        RequestError: Naming the consumer.
    """
    key = capturing_key()
    if key is None:
        return
    limits = key.limits
    CaptureLimits(max_rows=limits.max_request_rows, max_bytes=limits.max_request_bytes).check(use)
    if limits.max_inline_bytes is not None:
        inline = {instance: count for instance, count in use.num_bytes.items() if instance in answered}
        CaptureLimits(max_bytes=limits.max_inline_bytes).check(CaptureUse(num_bytes=inline))


def check_length(max_tokens: int | None) -> None:
    """Refuse a request whose length is not known, and so not what it could capture, if its key has limits.

    Raises:
        RequestError: If it is so.
    """
    key = capturing_key()
    if key is not None and max_tokens is None and key.limits.are_set:
        raise RequestError("max_tokens", f"the key {key.name!r} has limits: say how much may be generated")
