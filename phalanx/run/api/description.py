"""The OpenAPI description: bodies describe themselves, there is no second set of classes. Torch-free."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from phalanx.run.api import bodies

_WHAT = {
    401: "without the token",
    404: "there is none",
    408: "the request does not come to its end",
    409: "it does not fit the state of the job",
    413: "the request is too large",
    422: "the request is wrong",
    503: "not now",
}
_ALWAYS = (401, 408, 413, 422)

Answers = dict[int | str, dict[str, Any]]


def answers(body: type, *errors: int, open: bool = False) -> Answers:
    """What a route answers: a body as JSON, or one of these errors.

    Args:
        open: it needs no token.
    """
    found: Answers = {
        200: {"description": "OK", "content": {"application/json": {"schema": _reference(body.__name__)}}}
    }
    return {**found, **_errors(*errors, open=open)}


def stream(name: str, *errors: int) -> Answers:
    """A route that answers lines of JSON."""
    schema = {"type": "string", "description": f"one {name} as JSON on each line; empty lines keep it open"}
    return {200: {"description": "OK", "content": {"application/x-ndjson": {"schema": schema}}}, **_errors(*errors)}


def markdown() -> Answers:
    """A route that answers a page."""
    return {200: {"description": "OK", "content": {"text/markdown": {"schema": {"type": "string"}}}}, **_errors(404)}


def text() -> Answers:
    """A route that answers in the format of Prometheus."""
    return {200: {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}, **_errors()}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole description."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, summary=_SUMMARY, routes=app.routes)
        parts = found.setdefault("components", {})
        parts["schemas"] = {**parts.get("schemas", {}), **bodies.schemas()}
        parts["schemas"].pop("HTTPValidationError", None)
        parts["schemas"].pop("ValidationError", None)
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "description": _TOKEN}}
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path == "/health" else [{"token": []}]
        app.openapi_schema = found
    return app.openapi_schema


_SUMMARY = "One job that phalanx run keeps running."
_TOKEN = "The job's token, 64 hexadecimal digits, from its token file."


def _errors(*statuses: int, open: bool = False) -> Answers:
    body = {"application/json": {"schema": _reference("Wrong")}}
    always = () if open else _ALWAYS
    return {status: {"description": _WHAT[status], "content": body} for status in sorted({*statuses, *always})}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
