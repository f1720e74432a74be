"""OpenAPI description of every path: requests, answers, and the refusals that each path has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ...models.generation import LIMITS, MAX_STOP_LENGTH, MAX_STOPS, NumberLimits
from .middleware import OPEN_PATHS

Json = dict[str, Any]

TEXT: Json = {"type": "string"}
NUMBER: Json = {"type": "integer"}
SHAPE: Json = {"type": "array", "items": NUMBER}
OBJECT: Json = {"type": "object"}


def _object(required: Mapping[str, Json], optional: Mapping[str, Json] | None = None, *, closed: bool = False) -> Json:
    schema: Json = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return {**schema, "additionalProperties": False} if closed else schema


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _number(limits: NumberLimits) -> Json:
    number_range: Json = {"minimum": limits.low, "maximum": limits.high}
    schema = {"anyOf": [number_range, {"enum": list(limits.others)}]} if limits.others else number_range
    return {"type": "integer" if limits.is_whole else "number", **schema}


STOP: Json = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
GENERATION: Mapping[str, Json] = {
    **{name: _number(limits) for name, limits in LIMITS.items()},
    "stop": {"anyOf": [STOP, {**_list(STOP), "maxItems": MAX_STOPS}]},
    "stream": {"type": "boolean"},
    "timeout": {**NUMBER, "minimum": 0},
}

SCHEMAS: Mapping[str, Json] = {
    # A model may have other outputs, and its own ``encode`` gives any fields.
    "Answer": _object({}, {"label": NUMBER, "name": TEXT, "probabilities": _list({"type": "number"}), "text": TEXT}),
    "Detail": _object({"detail": TEXT}, closed=True),
    "Error": _object({"error": TEXT}, closed=True),
    "Server": _object({"name": TEXT, "version": TEXT, "extensions": _list(TEXT)}),
    "TensorMetadata": _object({"name": TEXT, "datatype": TEXT, "shape": SHAPE}),
    "Model": _object(
        {
            "name": TEXT,
            "versions": _list(TEXT),
            "platform": TEXT,
            "inputs": _list(_ref("TensorMetadata")),
            "outputs": _list(_ref("TensorMetadata")),
            "parameters": OBJECT,
        }
    ),
    "Data": {
        "type": "array",
        "items": {"anyOf": [_ref("Data"), *({"type": t} for t in ("number", "string", "boolean"))]},
    },
    "RequestInput": _object(
        {"name": TEXT, "shape": SHAPE, "datatype": TEXT}, {"parameters": OBJECT, "data": _ref("Data")}, closed=True
    ),
    "RequestOutput": _object({"name": TEXT}, {"parameters": OBJECT}, closed=True),
    "InferRequest": _object(
        {"inputs": _list(_ref("RequestInput"))},
        {"id": TEXT, "model_name": TEXT, "parameters": OBJECT, "outputs": _list(_ref("RequestOutput"))},
        closed=True,
    ),
    "ResponseOutput": _object(
        {"name": TEXT, "shape": SHAPE, "datatype": TEXT}, {"parameters": OBJECT, "data": _ref("Data")}
    ),
    "InferResponse": _object(
        {"model_name": TEXT, "model_version": TEXT, "outputs": _list(_ref("ResponseOutput"))}, {"id": TEXT}
    ),
    "GenerateRequest": {
        "oneOf": [
            _object(prompt, {"id": TEXT, "parameters": _ref("GenerateParameters"), **GENERATION}, closed=True)
            for prompt in (
                {"text_input": TEXT},
                {"messages": {**_list(_object({"role": TEXT, "content": TEXT}, closed=True)), "minItems": 1}},
            )
        ]
    },
    "GenerateParameters": _object({}, GENERATION, closed=True),
    "GenerateResponse": _object(
        {"model_name": TEXT, "model_version": TEXT, "text_output": TEXT}, {"id": TEXT}, closed=True
    ),
    "Event": _object(
        {
            "data": {
                **TEXT,
                "contentMediaType": "application/json",
                "contentSchema": {"oneOf": [_ref("GenerateResponse"), _ref("Error")]},
            }
        }
    ),
    "IndexRequest": _object({}, {"ready": {"type": "boolean"}}, closed=True),
    "ControlRequest": _object({}, {"parameters": OBJECT}, closed=True),
    "Index": _list(_object({"name": TEXT, "version": TEXT, "state": TEXT, "reason": TEXT})),
    "Live": _object({"live": {"type": "boolean"}}),
    "Ready": _object({"ready": {"type": "boolean"}}, {"name": TEXT}),
    "Configuration": _object({"name": TEXT, "max_batch_size": NUMBER, "input": _list(OBJECT), "output": _list(OBJECT)}),
    "Statistics": _object({"model_stats": _list(OBJECT)}),
    "Nothing": _object({}, closed=True),
}

MEDIA_TYPES: Mapping[str, str] = {"Event": "text/event-stream"}
"""Media types of the schemas that are not JSON."""

REFUSALS: Mapping[int, str] = {
    400: "The request does not fit the model, or is damaged",
    401: "The token is missing or wrong",
    403: "A page of another origin asks, or the host has another name",
    404: "There is no such model or version, or it is not loaded",
    408: "The request took too long to arrive",
    413: "The request, or a text of it, is too large",
    415: "A compression that is not known",
    422: "The form does not hold one image or one text",
    500: "The model, or the service, failed",
    503: "Too many inputs wait, or the service is stopping",
    504: "The model took too long",
}

OPERATIONS: Mapping[tuple[str, str], tuple[str | None, str, str]] = {
    ("get", ""): (None, "Server", "Server metadata"),
    ("get", "/health/live"): (None, "Live", "Liveness"),
    ("get", "/health/ready"): (None, "Ready", "Readiness: every model is loaded"),
    ("get", "/models/stats"): (None, "Statistics", "Counts of all models"),
    ("get", "/models/{name}"): (None, "Model", "Inputs, outputs and weights of a model"),
    ("get", "/models/{name}/ready"): (None, "Ready", "Readiness of a model"),
    ("get", "/models/{name}/stats"): (None, "Statistics", "Counts of a model"),
    ("get", "/models/{name}/config"): (None, "Configuration", "Configuration of a model, in Triton's form"),
    ("post", "/models/{name}/infer"): ("InferRequest", "InferResponse", "Predictions of a model"),
    ("post", "/models/{name}/generate"): ("GenerateRequest", "GenerateResponse", "A text of a language model"),
    ("post", "/models/{name}/generate_stream"): ("GenerateRequest", "Event", "The same text in pieces, as it grows"),
    ("post", "/repository/index"): ("IndexRequest", "Index", "The models and their states"),
    ("post", "/repository/models/{name}/load"): ("ControlRequest", "Nothing", "Load or reload a model"),
    ("post", "/repository/models/{name}/unload"): ("ControlRequest", "Nothing", "Unload a model"),
}
"""Schemas of request and response, and summary, by method and path of the protocol."""

PLAIN_PATHS: Mapping[str, tuple[str, Json, str]] = {
    "/": ("text/html", TEXT, "Page for people"),
    "/healthz": ("application/json", _object({"status": TEXT}, closed=True), "Liveness"),
    "/metrics": ("text/plain", TEXT, "Metrics for Prometheus"),
    "/openapi.json": ("application/json", OBJECT, "This document"),
}
"""Media type and schema of the response, and summary, of the other paths."""

FORM_BODY: Json = {
    "content": {
        "multipart/form-data": {
            # One of the two, by what the model takes.
            "schema": _object({}, {"image": {"type": "string", "format": "binary"}, "text": TEXT}),
        }
    },
    "required": True,
}


def describe_paths(app: FastAPI) -> None:
    """Describe all paths in the app's ``/openapi.json``."""

    def openapi() -> Json:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=[])
            plain = {
                path: {
                    "get": {"summary": summary, "responses": _make_responses(path, "get", {media: {"schema": schema}})}
                }
                for path, (media, schema, summary) in PLAIN_PATHS.items()
            }
            document["paths"] = {**plain, "/predict": {"post": _describe_predict()}, **_describe_protocol_paths()}
            document["components"] = {"schemas": SCHEMAS}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_predict() -> Json:
    return {
        "summary": "Prediction for one image or text",
        "operationId": "predict",
        "parameters": [{"name": "model", "in": "query", "required": False, "schema": TEXT}],
        "requestBody": FORM_BODY,
        "responses": _make_responses("/predict", "post", _make_content("Answer")),
    }


def _describe_protocol_paths() -> Json:
    """Each path, and for a model's path its variant with a version."""
    paths: Json = {}
    model = "/models/{name}"
    for (method, path), (request, answer, summary) in OPERATIONS.items():
        versioned = [path.replace(model, f"{model}/versions/{{version}}")] if path.startswith(model) else []
        for full_path in (f"/v2{each}" for each in (path, *versioned)):
            paths[full_path] = {method: _describe_operation(full_path, method, summary, answer, request)}
    return paths


def _describe_operation(path: str, method: str, summary: str, answer: str, request: str | None) -> Json:
    operation: Json = {
        "summary": summary,
        "operationId": "_".join([method, *(part.strip("{}") for part in path.split("/") if part)]),
        "responses": _make_responses(path, method, _make_content(answer)),
    }
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": TEXT} for name in names]
    if request:
        is_required = request in {"InferRequest", "GenerateRequest"}
        operation["requestBody"] = {"content": _make_content(request), "required": is_required}
    return operation


def _make_responses(path: str, method: str, content: Json) -> Json:
    """The answer, and each refusal that this path has."""
    is_form = path == "/predict"
    applies = {
        401: path not in OPEN_PATHS,
        **dict.fromkeys((400, 408), method == "post"),
        404: is_form or "{name}" in path,
        415: method == "post" and not is_form,
        422: is_form,
        504: is_form or path.endswith(("/infer", "/generate", "/generate_stream")),
    }
    schema = "Error" if path.startswith("/v2") else "Detail"
    refusals = {
        str(code): {"description": text, "content": _make_content(schema)}
        for code, text in REFUSALS.items()
        if applies.get(code, True)
    }
    return {"200": {"description": "The answer", "content": content}, **refusals}


def _make_content(schema: str) -> Json:
    return {MEDIA_TYPES.get(schema, "application/json"): {"schema": _ref(schema)}}
