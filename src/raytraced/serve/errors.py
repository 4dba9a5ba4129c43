"""Mistakes in requests as one line each: what is wrong, its value, the rule and the remedy."""

from collections.abc import Sequence
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


def describe_errors(errors: Sequence[dict[str, Any]]) -> RefusedError:
    """The first field that pydantic refuses, in one line; of a union, what each of its members expects."""
    first = errors[0]
    field, kind = first["loc"][1:2], first["type"]
    name = str(field[0]) if field else "body"
    if kind == "json_invalid":
        return RefusedError(422, kind, f"body: must be JSON ({first['ctx']['error']})")
    if kind == "value_error":  # of a validator in schemas.py, which states all of it
        return RefusedError(422, kind, str(first["ctx"]["error"]))
    if kind == "missing":
        return RefusedError(422, kind, f"{name}: is missing, must be stated")
    if kind == "extra_forbidden":
        rule = "is not a field of this request, must be left out; /openapi.json lists the fields"
        return RefusedError(422, kind, f"{shorten(name)}: {rule}")
    same = [error for error in errors if error["loc"][1:2] == field]
    deepest = max(len(error["loc"]) for error in same)
    index = next((part for part in first["loc"][2:] if isinstance(part, int)), None)
    name += "" if index is None else f"[{index}]"
    if index is not None:
        same = [error for error in same if len(error["loc"]) == deepest]
    rules = " or ".join(dict.fromkeys(error["msg"].removeprefix(SHOULD_BE) for error in same))
    return RefusedError(422, kind, f"{name}={shorten(first['input'])}: must be {lowered(rules)}")


def check_fields(schema: type[ModelT], fields: dict[str, Any]) -> ModelT:
    """Fields that did not arrive as a whole body, as an object of a schema."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        errors = [dict(one) | {"loc": ("body", *one["loc"])} for one in error.errors()]
        raise describe_errors(errors) from None


def lowered(text: str) -> str:
    """A sentence's first letter small, so that it continues another."""
    return text[:1].lower() + text[1:]


async def refuse_invalid(request: Request, error: RequestValidationError) -> Response:
    """The response to a body that does not fit its schema."""
    return error_response(request.url.path, describe_errors(error.errors()))


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
