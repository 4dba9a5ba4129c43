"""Mistakes in requests as one line each: what is wrong, its value, the rule and the remedy."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from raytraced.serve.limits import RefusedError, shorten
from raytraced.serve.middleware import error_response

ModelT = TypeVar("ModelT", bound=BaseModel)
SHOULD_BE = "Input should be "
INTERNAL = (500, "internal", "the server failed to answer; its log says why")


def describe_errors(errors: Sequence[dict[str, Any]], body: Any) -> RefusedError:
    """The first field that pydantic refuses, in one line; of a union, what each of its members expects."""
    first = errors[0]
    name, kind = field_path(first, body), first["type"]
    if kind == "json_invalid":
        return RefusedError(422, kind, f"body: must be JSON ({first['ctx']['error']})")
    if kind == "value_error":  # of a validator of the schema, which states all of it
        return RefusedError(422, kind, str(first["ctx"]["error"]))
    if kind == "missing":
        return RefusedError(422, kind, f"{name}: is missing, must be stated")
    if kind == "extra_forbidden":
        rule = "is not a field of this request, must be left out; /openapi.json lists the fields"
        return RefusedError(422, kind, f"{shorten(name)}: {rule}")
    same = [error for error in errors if field_path(error, body) == name]
    rules = " or ".join(dict.fromkeys(error["msg"].removeprefix(SHOULD_BE) for error in same))
    return RefusedError(422, kind, f"{name}={shorten(first['input'])}: must be {lowered(rules)}")


def field_path(error: dict[str, Any], body: Any) -> str:
    """The place of an error in a body: `images[0]`, `stream_options.include_usage`.

    pydantic's place also names members of unions, which are no keys of the body: they are left out.
    """
    (_, *parts), path, value = error["loc"], "", body
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif not path or (isinstance(value, Mapping) and (part in value or error["type"] == "missing")):
            path += f".{part}" if path else part
            value = value.get(part) if isinstance(value, Mapping) else None
    return path or "body"


def check_fields(schema: type[ModelT], fields: dict[str, Any]) -> ModelT:
    """Fields that did not arrive as a whole body, as an object of a schema."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        errors = [dict(one) | {"loc": ("body", *one["loc"])} for one in error.errors()]
        raise describe_errors(errors, fields) from None


def lowered(text: str) -> str:
    """A sentence's first letter small, so that it continues another."""
    return text[:1].lower() + text[1:]


async def refuse_invalid(request: Request, error: RequestValidationError) -> Response:
    """The response to a body that does not fit its schema."""
    return error_response(request.url.path, describe_errors(error.errors(), error.body))


async def refuse_http(request: Request, error: HTTPException) -> Response:
    """The response to a request that is refused by its path, by its method, or by a rule of ours."""
    path, allowed = request.url.path, (error.headers or {}).get("Allow")
    if not isinstance(error, RefusedError):
        rule, message = "path", f"{shorten(path)}: there is no such path; /openapi.json lists all"
        if allowed:
            rule, message = "method", f"{request.method} {shorten(path)}: must be {allowed}"
        elif error.status_code == 400:  # FastAPI or Starlette could not read the body
            rule, message = "body", f"body: cannot be read ({shorten(error.detail)}); send valid JSON, or a valid form"
        status = 422 if error.status_code == 400 else error.status_code
        error = RefusedError(status, rule, message, error.headers)
    return error_response(path, error)


async def refuse_failed(request: Request, error: Exception) -> Response:
    """The response where the server itself failed."""
    return error_response(request.url.path, RefusedError(*INTERNAL))
