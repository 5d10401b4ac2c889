"""Fills the pages of the site that are made from the code: MkDocs calls `on_page_markdown` for every page.

Routes come from the OpenAPI description of the routers that headgate adds to vLLM's server, metrics from the families
that its parts declare. Neither needs vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from fastapi import FastAPI

from headgate.capture.engine.contracts.parts import PARTS, load_part
from headgate.capture.engine.server.metrics_page import front_end_families, refused
from headgate.capture.links.driver import DriverStats
from headgate.capture.links.hub import HubStats
from headgate.capture.monitoring.metrics import Family

ROUTES, METRICS = "<!-- routes -->", "<!-- metrics -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker of a page by what the code says."""
    if ROUTES in markdown:
        markdown = markdown.replace(ROUTES, "\n".join(routes()))
    if METRICS in markdown:
        markdown = markdown.replace(METRICS, "\n".join(metrics()))
    return markdown


class NoServer:
    """`RouteServices` of a server that answers nothing: routes are described and never called."""

    def engine(self) -> None:
        """No engine."""

    def handle(self) -> None:
        """No handle."""

    async def require_key(self) -> None:
        """No access keys."""

    async def require_admin(self) -> None:
        """No access keys."""

    async def read_object(self, request: Any) -> dict[str, Any]:
        """No bodies."""
        return {}

    def client_errors(self) -> Any:
        """No errors."""
        return nullcontext()


def routes() -> Iterator[str]:
    """Every route: its summary, body, answers and example."""
    app = FastAPI()
    for part in map(load_part, PARTS):
        if (router := part.routes(NoServer())) is not None:  # type: ignore[arg-type]
            app.include_router(router)
    for path, methods in app.openapi()["paths"].items():
        for method, about in methods.items():
            yield f"\n## `{method.upper()} {path}`\n\n{about.get('summary', '')}.\n\n{about.get('description', '')}\n"
            body = about.get("requestBody", {}).get("content", {}).get("application/json")
            if body:
                yield "\n**Body**\n"
                yield from fields(body["schema"])
                yield from example(body)
            yield "\n| status | |\n| --- | --- |"
            yield from (f"| {status} | {answer['description']} |" for status, answer in about["responses"].items())
            answer = about["responses"].get("200", {}).get("content", {}).get("application/json")
            if answer and answer.get("schema"):
                yield "\n**Answer**\n"
                yield from fields(answer["schema"])
                yield from example(answer)


def fields(schema: dict[str, Any]) -> Iterator[str]:
    """A table of the fields of an object."""
    required = schema.get("required", ())
    yield "\n| field | type | |\n| --- | --- | --- |"
    for name, about in schema.get("properties", {}).items():
        kinds = about.get("type") or [one.get("type", "object") for one in about.get("oneOf", [{}])]
        kind = kinds if isinstance(kinds, str) else " or ".join(one for one in kinds if one != "null")
        text = about.get("description", "") + ("" if name in required or not required else " Optional.")
        yield f"| `{name}` | {kind} | {text.strip()} |"


def example(content: dict[str, Any]) -> Iterator[str]:
    """The example of a body or an answer, long lists cut."""
    found = content.get("example") or next((e["value"] for e in content.get("examples", {}).values()), None)
    if found is not None:
        yield f"\n```json\n{json.dumps(found)}\n```\n"


def metrics() -> Iterator[str]:
    """A table of all families."""
    for name in PARTS:
        found = load_part(name).metrics()
        if found is not None:
            yield f"\n## {name}\n\n| metric | type | labels | |\n| --- | --- | --- | --- |"
            yield from (row(family) for family in found.families(()))
    yield "\n## capture, in the API server that is asked\n\n| metric | type | labels | |\n| --- | --- | --- | --- |"
    families = front_end_families(NoFrontEnd(), 0)  # type: ignore[arg-type]
    yield from (row(family) for family in (*families, refused(0)))


class NoFrontEnd:
    """The front end of a server before its first request."""

    def stats(self) -> tuple[HubStats, DriverStats]:
        """Nothing yet."""
        return HubStats(), DriverStats()


def row(family: Family) -> str:
    """One family as a row."""
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.about} |"
