"""What requests may hold: JSON schemas that the server checks by, and that its OpenAPI document is made of."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from raytraced.serve.limits import Limits, RefusedError, shown

Schema = dict[str, Any]
STOPS = ("sure", "end", "budget", "deadline", "length")
_TYPES = {"string": str, "boolean": bool, "array": list, "object": dict}


def check(value: Any, schema: Schema, name: str = "body") -> None:
    """Refuse what does not fit a schema, saying where and why; knows the words of JSON Schema that are used below."""
    if "oneOf" in schema and "type" not in schema:
        fitting = [part for part in schema["oneOf"] if _is(value, part["type"])]
        _require(bool(fitting), name, value, " or ".join(_told(part["type"]) for part in schema["oneOf"]))
        check(value, fitting[0], name)
        return
    kind = schema["type"]
    _require(_is(value, kind), name, value, _told(kind))
    if "enum" in schema:
        _require(value in schema["enum"], name, value, f"one of {', '.join(schema['enum'])}", "choice")
    elif kind == "object":
        _check_object(value, schema, name)
    elif kind == "array":
        _check_array(value, schema, name)
    elif kind == "string":
        most = schema.get("maxLength", len(value))
        _require(len(value) <= most, name, value, f"at most {most:,} characters, it has {len(value):,}", "length")
    elif kind in ("integer", "number"):
        low, high, above = schema.get("minimum"), schema.get("maximum"), schema.get("exclusiveMinimum")
        _require(low is None or value >= low, name, value, f"at least {low}", "range")
        _require(above is None or value > above, name, value, f"above {above}", "range")
        _require(high is None or value <= high, name, value, f"at most {high}", "range")


def _check_object(value: dict[str, Any], schema: Schema, name: str) -> None:
    known = schema["properties"]
    for key, one in value.items():
        _require(key in known, key, one, f"left out: there is no such entry; there are {', '.join(known)}", "entry")
        check(one, known[key], key)
    for key in schema.get("required", ()):
        _require(key in value, key, None, "given", "entry")
    ways = [part["required"][0] for part in schema.get("oneOf", ())]
    if ways and sum(key in value for key in ways) != 1:
        given = ", ".join(key for key in ways if key in value) or "none"
        raise RefusedError(422, "entry", f"{given} given: must be one of {', '.join(ways)}")


def _check_array(value: list[Any], schema: Schema, name: str) -> None:
    low, high, items = schema.get("minItems", 0), schema.get("maxItems", len(value)), schema["items"]
    _require(len(value) >= low, name, None, f"at least {low} long, it is {len(value)}", "length")
    rule = "batch" if name == "images" else "length"
    _require(len(value) <= high, name, None, f"at most {high} long, it is {len(value):,}", rule)
    leaf = items.get("oneOf", [items])[0]
    if leaf.get("type") == "integer" and {*map(type, value)} == {int}:
        # a row of pixels, there may be thousands
        if min(value) < leaf["minimum"] or max(value) > leaf["maximum"]:
            _require(False, name, value, f"numbers in {leaf['minimum']} … {leaf['maximum']}", "range")
        return
    for index, one in enumerate(value):
        check(one, items, f"{name}[{index}]")


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        if isinstance(value, float):
            return isfinite(value) and (kind == "number" or value.is_integer())
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind])


def _told(kind: str) -> str:
    article = "an" if kind[0] in "aeiou" else "a"
    return {"number": "a finite number", "boolean": "true or false"}.get(kind, f"{article} {kind}")


def _require(holds: bool, name: str, value: Any, what: str, rule: str = "type") -> None:
    if not holds:
        given = "" if value is None else f"={shown(value)}"
        raise RefusedError(422, rule, f"{name}{given}: must be {what}")


def one_of(*schemas: Schema, **more: Any) -> Schema:
    """Any of some schemas, told apart by their types."""
    return {"oneOf": list(schemas), **more}


def object_of(properties: dict[str, Schema], required: Sequence[str] = (), **more: Any) -> Schema:
    """An object of some entries and no others."""
    asked = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **asked, **more}


def array_of(items: Schema, least: int = 1, **more: Any) -> Schema:
    """A list."""
    return {"type": "array", "items": items, "minItems": least, **more}


def request_schemas(names: Sequence[str], limits: Limits) -> dict[str, Schema]:
    """The body of each POST, by its path."""
    integer: Schema = {"type": "integer"}
    number: Schema = {"type": "number"}
    value = integer | {"minimum": 0, "maximum": 255}
    # rows of pixels, or channels of rows: which of them a model takes is known only when the model is
    pixels = array_of(array_of(one_of(value, array_of(value))))
    file = {"type": "string", "contentEncoding": "base64", "description": "a PNG or JPEG file in base64"}
    image = one_of(file, pixels, description="a file, of any size; or the pixels of an image of the model's own size")
    inputs: dict[str, Schema] = {
        "image": image,
        "images": array_of(image, maxItems=limits.batch),
        "text": {"type": "string", "maxLength": limits.text, "description": "for a language model"},
    }
    common: dict[str, Schema] = {
        "model": {"type": "string", "enum": list(names), "description": "default: the first that takes such input"},
        "max_experts": integer
        | {"minimum": 0, "maximum": 1_000_000, "description": "of a language model: in each block"},
        "max_ms": number
        | {"exclusiveMinimum": 0, "maximum": 600_000, "description": "milliseconds until the best answer so far"},
        "seed": integer | {"minimum": 0, "maximum": 2**53 - 1, "description": "of the draws"},
    }
    choosing: dict[str, Schema] = {
        "select": {"type": "string", "enum": ["greedy", "sample"], "description": "how experts are chosen"},
        "sure": one_of(
            number | {"minimum": 0, "maximum": 1},
            {"type": "string", "enum": ["calibrated"]},
            description="stop at the first answer whose largest probability reaches this",
        ),
    }
    trace: dict[str, Schema] = {"trace": {"type": "boolean", "description": "the answers along the way too"}}
    drawing: dict[str, Schema] = {
        "length": integer | {"minimum": 1, "maximum": limits.tokens, "description": "tokens to add"},
        "temperature": number | {"minimum": 0, "maximum": 100},
        "top_p": number | {"exclusiveMinimum": 0, "maximum": 1},
    }
    single = {name: schema for name, schema in inputs.items() if name != "images"}

    def exactly_one(names: Sequence[str]) -> list[Schema]:
        return [{"required": [name]} for name in names]

    return {
        "/api/predict": object_of(inputs | common | choosing | trace, oneOf=exactly_one(list(inputs))),
        "/api/stream": object_of(single | common | choosing, oneOf=exactly_one(list(single))),
        "/api/generate": object_of({"text": inputs["text"]} | common | drawing, ["text"]),
    }


def answer_schema() -> Schema:
    """One answer."""
    number, integer = {"type": "number"}, {"type": "integer"}
    properties = {
        "label": {"type": "string"},
        "probability": number | {"description": "of the label"},
        "probabilities": array_of(number) | {"description": "of all classes, or tokens, in the model's order"},
        "experts": integer | {"description": "in the answer's set; of a text: of its last token"},
        "multiply_adds": integer | {"description": "all that ran for it, answers along the way included"},
        "stop": {"type": "string", "enum": list(STOPS), "description": "why it is the last one"},
        "nodes": array_of(array_of(integer, 2), 0)
        | {"description": "[layer, expert] of each, in order; of a text [block, layer, expert]"},
        "rates": array_of(array_of(number)) | {"description": "the firing rate of every node (layers, experts)"},
        "token_experts": array_of(integer, 0) | {"description": "of a text: the experts of every token"},
    }
    answer: Schema = {"type": "object", "properties": properties, "required": ["label", "probabilities", "experts"]}
    properties["trace"] = array_of({"type": "object", "properties": dict(properties)}, 0)
    return answer


def document(schemas: dict[str, Schema], version: str) -> Schema:
    """The OpenAPI document of the server."""

    def reference(name: str) -> Schema:
        return {"$ref": f"#/components/schemas/{name}"}

    def response(text: str, kind: str, schema: Schema) -> Schema:
        return {"description": text, "content": {kind: {"schema": schema}}}

    refused = {
        status: response(text, "application/json", reference("Error"))
        for status, text in {
            "403": "called by another host's name, or from another's page",
            "408": "the body took too long to arrive",
            "413": "the body is too large",
            "415": "the body is not said to be JSON",
            "422": "the body breaks a rule",
            "429": "too many requests under way",
            "503": "the server is about to end",
        }.items()
    }
    texts = {
        "/api/predict": ("Answer", "application/json", "Answers", "what the model says"),
        "/api/stream": ("Answer after 0, 1, 2, … experts", "text/event-stream", "Answer", "an event for each answer"),
        "/api/generate": ("Go on with a text", "text/event-stream", "Token", "an event for each token"),
    }
    paths: Schema = {
        path: {
            "post": {
                "operationId": path.rsplit("/", 1)[1],
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": reference(path.rsplit("/", 1)[1].capitalize())}},
                },
                "responses": {"200": response(told, kind, reference(name))} | refused,
            }
        }
        for path, (summary, kind, name, told) in texts.items()
    }
    anything: Schema = {"type": "object"}
    plain: dict[str, tuple[str, str, Schema]] = {
        "/api/models": ("The models, and what they take", "application/json", anything),
        "/healthz": ("Whether the server is well", "application/json", anything),
        "/metrics": ("Counts and times for Prometheus", "text/plain", {"type": "string"}),
        "/openapi.json": ("This document", "application/json", anything),
        "/": ("A page to look at", "text/html", {"type": "string"}),
    }
    for path, (summary, kind, schema) in plain.items():
        told = {"200": response(summary, kind, schema), "403": refused["403"], "503": refused["503"]}
        paths[path] = {"get": {"summary": summary, "responses": told}}
    error = {"rule": {"type": "string"}, "message": {"type": "string"}}
    answer = answer_schema()
    answers = object_of({"model": {"type": "string"}, "answers": array_of(reference("Answer"))}, ["model", "answers"])
    token: Schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "token": {"type": "integer"},
            "experts": {"type": "integer"},
            "stop": {"type": "string", "enum": ["length", "deadline"]},
        },
    }
    components = {path.rsplit("/", 1)[1].capitalize(): schema for path, schema in schemas.items()} | {
        "Answers": answers,
        "Answer": answer,
        "Token": token,
        "Error": object_of({"error": object_of(error, list(error))}, ["error"]),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "raytraced", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
