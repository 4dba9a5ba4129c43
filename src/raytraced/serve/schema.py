"""What requests may hold: JSON schemas that the server checks by, and that its OpenAPI document is made of."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

from raytraced.serve.limits import Limits, RefusedError, shown

Schema = dict[str, Any]
STOPS = ["sure", "end", "budget", "deadline", "length"]
JSON_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # the types of JSON: in words, and whether a value is one
    "string": ("a string", lambda value: type(value) is str),
    "boolean": ("true or false", lambda value: type(value) is bool),
    "array": ("an array", lambda value: type(value) is list),
    "object": ("an object", lambda value: type(value) is dict),
    "integer": ("an integer", lambda value: type(value) is int or (type(value) is float and value.is_integer())),
    "number": ("a finite number", lambda value: type(value) is int or (type(value) is float and isfinite(value))),
}


def check(value: Any, schema: Schema, name: str = "body") -> None:
    """Refuse what does not fit a schema, saying where and why; knows the words of JSON Schema that are used below."""
    kinds = [schema] if "type" in schema else schema["oneOf"]
    fitting = [one for one in kinds if JSON_TYPES[one["type"]][1](value)]
    _require(bool(fitting), name, value, " or ".join(JSON_TYPES[one["type"]][0] for one in kinds))
    schema, kind = fitting[0], fitting[0]["type"]
    if "enum" in schema:
        _require(value in schema["enum"], name, value, f"one of {', '.join(schema['enum'])}", "choice")
    elif kind == "object":
        _check_object(value, schema)
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


def _check_object(value: dict[str, Any], schema: Schema) -> None:
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
    low, high, items = schema["minItems"], schema.get("maxItems", len(value)), schema["items"]
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


def _require(holds: bool, name: str, value: Any, what: str, rule: str = "type") -> None:
    if not holds:
        given = "" if value is None else f"={shown(value)}"
        raise RefusedError(422, rule, f"{name}{given}: must be {what}")


def one_of(*schemas: Schema, **more: Any) -> Schema:
    """Any of some schemas, told apart by their types."""
    return {"oneOf": list(schemas), **more}


def of(kind: str, about: str | None = None, **more: Any) -> Schema:
    """A schema of one type, and what it is about."""
    return {"type": kind, **more} | ({"description": about} if about else {})


def array_of(items: Schema, about: str | None = None, least: int = 1, **more: Any) -> Schema:
    """A list."""
    return of("array", about, items=items, minItems=least, **more)


def object_of(properties: dict[str, Schema], **more: Any) -> Schema:
    """An object of some entries and no others."""
    return of("object", properties=properties, additionalProperties=False, **more)


def request_schemas(names: Sequence[str], limits: Limits) -> dict[str, Schema]:
    """The body of each POST, by its path."""
    value = of("integer", minimum=0, maximum=255)
    # rows of pixels, or channels of rows: which of them a model takes is known only when the model is
    pixels = array_of(array_of(one_of(value, array_of(value))))
    file = of("string", "a PNG or JPEG file in base64", contentEncoding="base64")
    image = one_of(file, pixels, description="a file, of any size; or the pixels of an image of the model's own size")
    text = of("string", "for a language model", maxLength=limits.text)
    common = {
        "model": of("string", "default: the first that takes such input", enum=list(names)),
        "max_experts": of("integer", "of a language model: in each block", minimum=0, maximum=1_000_000),
        "max_ms": of("number", "milliseconds until the best answer so far", exclusiveMinimum=0, maximum=600_000),
        "seed": of("integer", "of the draws", minimum=0, maximum=2**53 - 1),
    }
    choosing = {
        "select": of("string", "how experts are chosen", enum=["greedy", "sample"]),
        "sure": one_of(
            of("number", minimum=0, maximum=1),
            of("string", enum=["calibrated"]),
            description="stop at the first answer whose largest probability reaches this",
        ),
    }
    drawing = {
        "length": of("integer", "tokens to add", minimum=1, maximum=limits.tokens),
        "temperature": of("number", minimum=0, maximum=100),
        "top_p": of("number", exclusiveMinimum=0, maximum=1),
    }
    single = {"image": image, "text": text}
    several = {"image": image, "images": array_of(image, maxItems=limits.batch), "text": text}
    trace = {"trace": of("boolean", "the answers along the way too")}

    def exactly_one(inputs: dict[str, Schema], others: dict[str, Schema]) -> Schema:
        return object_of(inputs | others, oneOf=[{"required": [name]} for name in inputs])

    return {
        "/api/predict": exactly_one(several, common | choosing | trace),
        "/api/stream": exactly_one(single, common | choosing),
        "/api/generate": object_of({"text": text} | common | drawing, required=["text"]),
    }


def response_schemas() -> dict[str, Schema]:
    """What is sent, by the names that the document gives it."""
    integer, number, string = of("integer"), of("number"), of("string")
    answer = {
        "label": string,
        "probability": of("number", "of the label"),
        "probabilities": array_of(number, "of all classes, or tokens, in the model's order"),
        "experts": of("integer", "in the answer's set; of a text: of its last token"),
        "multiply_adds": of("integer", "all that ran for it, answers along the way included"),
        "stop": of("string", "why it is the last one", enum=STOPS),
        "nodes": array_of(array_of(integer, least=2), "[layer, expert], in order; of a text [block, layer, expert]", 0),
        "rates": array_of(array_of(number), "the firing rate of every node (layers, experts)"),
        "token_experts": array_of(integer, "of a text: the experts of every token", 0),
    }
    whole = answer | {"trace": array_of(of("object", properties=answer), least=0)}
    answers = {"model": string, "answers": array_of(reference("Answer"))}
    token = {"text": string, "token": integer, "experts": integer, "stop": of("string", enum=["length", "deadline"])}
    error = object_of({"rule": string, "message": string}, required=["rule", "message"])
    return {
        "Answers": object_of(answers, required=list(answers)),
        "Answer": of("object", properties=whole, required=["label", "probabilities", "experts"]),
        "Token": of("object", properties=token),
        "Error": object_of({"error": error}, required=["error"]),
    }


def reference(name: str) -> Schema:
    """A schema of the document by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


REFUSED = {
    "403": "called by another host's name, or from another's page",
    "503": "the server is about to end",
    "408": "the body took too long to arrive",
    "413": "the body is too large",
    "415": "the body is not said to be JSON",
    "422": "the body breaks a rule",
    "429": "too many requests under way",
}
PATHS = {  # what one gets there, and as what
    "/api/predict": ("Answers to images, or to a text", "application/json", reference("Answers")),
    "/api/stream": ("An event for each answer: after 0, 1, 2, … experts", "text/event-stream", reference("Answer")),
    "/api/generate": ("An event for each token that goes on with a text", "text/event-stream", reference("Token")),
    "/api/models": ("The models, and what they take", "application/json", of("object")),
    "/healthz": ("Whether the server is well", "application/json", of("object")),
    "/metrics": ("Counts and times for Prometheus", "text/plain", of("string")),
    "/openapi.json": ("This document", "application/json", of("object")),
    "/": ("A page to look at", "text/html", of("string")),
}


def document(schemas: dict[str, Schema], version: str) -> Schema:
    """The OpenAPI document of the server."""

    def response(about: str, kind: str, schema: Schema) -> Schema:
        return {"description": about, "content": {kind: {"schema": schema}}}

    components, paths = response_schemas(), Schema()
    refused = {status: response(about, "application/json", reference("Error")) for status, about in REFUSED.items()}
    for path, (summary, kind, schema) in PATHS.items():
        operation: Schema = {"summary": summary, "responses": {"200": response(summary, kind, schema)}}
        if path not in schemas:
            operation["responses"] |= {status: refused[status] for status in ("403", "503")}
            paths[path] = {"get": operation}
            continue
        name = path.removeprefix("/api/")
        components[name.capitalize()] = schemas[path]
        body = {"application/json": {"schema": reference(name.capitalize())}}
        operation |= {"operationId": name, "requestBody": {"required": True, "content": body}}
        operation["responses"] |= refused
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "raytraced", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
