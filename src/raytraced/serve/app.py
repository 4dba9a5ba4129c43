"""The server's paths: requests in, answers, events and refusals out."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from raytraced import __version__
from raytraced.explore.packing import why_unpackable
from raytraced.explore.page import make_page
from raytraced.serve.answering import Answer, Asked, Delivery, check_asked
from raytraced.serve.batching import SENDING, Worker
from raytraced.serve.guard import Guard, Traffic
from raytraced.serve.limits import Limits, RefusedError, send_json, shown
from raytraced.serve.models import Served
from raytraced.serve.reading import choose_model, read_body, read_inputs
from raytraced.serve.schema import document, request_schemas
from raytraced.words import require

SMALL_BODY = 1 << 16  # bytes of a body that are read where they arrive; reading more would keep others waiting


class Server:
    """The loaded models, what computes, and what is under way."""

    def __init__(self, models: Sequence[Served], limits: Limits | None = None, hosts: Sequence[str] = ()) -> None:
        self.models, self.limits, self.traffic = list(models), limits or Limits(), Traffic()
        self.schemas = request_schemas([served.name for served in models], self.limits)
        self.page: bytes | None = None
        self.worker = Worker(self.traffic.metrics)
        routes = [
            Route("/", self.show_page),
            Route("/healthz", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/api/models", self.list_models),
            Route("/api/predict", self.predict, methods=["POST"]),
            Route("/api/stream", self.stream, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = dict.fromkeys((RefusedError, HTTPException, Exception), refuse)
        starlette = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)
        self.app = Guard(starlette, self.traffic, self.limits, {str(route.path) for route in routes}, hosts)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        working = asyncio.create_task(self.worker.work())
        yield
        working.cancel()

    async def read(self, request: Request, **more: Any) -> tuple[dict[str, Any], list[Tensor], dict[str, Any]]:
        """The body of a request as it was given, its inputs, and the options of `Asked` that it stands for."""
        body, schema = await receive_body(request, self.limits), self.schemas[request.url.path]

        def understand() -> tuple[dict[str, Any], Served, list[Tensor]]:
            given = read_body(body, schema)
            served = choose_model(given, self.models)
            return given, served, read_inputs(given, served, self.limits)

        given, served, inputs = understand() if len(body) <= SMALL_BODY else await asyncio.to_thread(understand)
        try:
            check_asked(served, given | more)
            sure, look = find_sure(given.get("sure"), served)
        except ValueError as error:
            raise RefusedError(422, "option", str(error)) from None
        options: dict[str, Any] = {name: given[name] for name in ("select", "seed", "max_experts") if name in given}
        if "max_ms" in given:  # counted from the arrival
            options["deadline"] = request.scope["arrived"] + given["max_ms"] / 1000 - SENDING
        return given, inputs, options | {"served": served, "sure": sure, "look": look}

    async def answers(self, inputs: list[Tensor], **options: Any) -> AsyncIterator[tuple[int, Answer]]:
        """What is said of each input, with its number, as it comes; once nobody listens the work stops."""
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        numbers = {Asked(inputs=one, deliver=queue.put_nowait, **options): n for n, one in enumerate(inputs)}
        self.worker.submit(list(numbers))
        left = len(numbers)
        try:
            while left:
                asked, answer, last = await queue.get()
                if isinstance(answer, Exception):
                    raise RefusedError(*FAILED)
                left -= last
                yield numbers[asked], answer
        finally:
            for asked in numbers:
                asked.gone = True

    async def events(self, inputs: list[Tensor], **options: Any) -> AsyncIterator[bytes]:
        """Answers as server-sent events."""
        try:
            async for _, answer in self.answers(inputs, **options):
                yield b"data: " + json.dumps(answer).encode() + b"\n\n"
        except RefusedError as error:
            yield b"event: error\ndata: " + json.dumps(error.content).encode() + b"\n\n"

    async def predict(self, request: Request) -> Response:
        given, inputs, options = await self.read(request)
        trace, steps = given.get("trace", False), [list[Answer]() for _ in inputs]
        async for number, answer in self.answers(inputs, every=trace, **options):
            steps[number].append(answer)
        answers = [told[-1] for told in steps]
        if trace:
            for one, told in zip(answers, steps, strict=True):
                one["trace"] = [{name: value for name, value in step.items() if name != "stop"} for step in told]
        return send_json({"model": options["served"].name, "answers": answers})

    async def stream(self, request: Request) -> Response:
        _, inputs, options = await self.read(request, stream=True)
        return StreamingResponse(self.events(inputs, every=True, **options), headers=EVENTS)

    async def generate(self, request: Request) -> Response:
        given, inputs, options = await self.read(request, max_ms=None)  # every model can stop between tokens
        drawing = {name: given.get(name, value) for name, value in GENERATE.items()}
        drawing["length"] = min(drawing["length"], self.limits.tokens)
        return StreamingResponse(self.events(inputs, drawing=drawing, **options), headers=EVENTS)

    async def list_models(self, request: Request) -> Response:
        return send_json({"models": [served.told() for served in self.models]})

    async def health(self, request: Request) -> Response:
        return send_json({"status": "ok", "under_way": self.traffic.under_way})

    async def metrics(self, request: Request) -> Response:
        gauge = f"raytraced_under_way {self.traffic.under_way}\n"
        return Response(self.traffic.metrics.text() + gauge, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return send_json(document(self.schemas, __version__))

    async def show_page(self, request: Request) -> Response:
        if self.page is None:
            self.page = (await asyncio.to_thread(front_page, self.models)).encode()
        return HTMLResponse(self.page, headers={"Content-Security-Policy": POLICY})


FAILED = (500, "internal", "the server failed; its log says why")
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
GENERATE: dict[str, Any] = {"length": 500, "temperature": 0.8, "top_p": 1.0}
"""as `raytraced generate` has them"""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def receive_body(request: Request, limits: Limits) -> bytes:
    """The body, if it is JSON, of a size that is allowed, and comes in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, "content-type", "content-type: must be application/json")
    too_long = RefusedError(413, "body", f"body: must be at most {limits.body:,} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limits.body:  # nothing of it is read
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise too_long
    except ClientDisconnect:
        raise RefusedError(400, "client", "the client went away") from None
    except TimeoutError:
        raise RefusedError(408, "seconds", f"body: must arrive within {limits.seconds:g} seconds") from None
    return bytes(body)


def find_sure(sure: float | str | None, served: Served) -> tuple[float | None, str]:
    """How sure an answer must be, and after what one looks."""
    if not isinstance(sure, str):
        return sure, served.look
    found = served.model.card.calibration
    require(bool(found), "sure", sure, f"{served.name} is not calibrated; do that with raytraced calibrate")
    return found["sure"], served.look if served.codec else found["look"]


async def refuse(request: Request, error: Exception) -> Response:
    """Whatever went wrong, as a response."""
    if isinstance(error, HTTPException):
        path, allowed = request.url.path, (error.headers or {}).get("Allow")
        rule, message = "path", f"{shown(path)}: there is no such path; /openapi.json names them all"
        if allowed:
            rule, message = "method", f"{request.method} {path}: must be {allowed}"
        error = RefusedError(error.status_code, rule, message, error.headers)
    return (error if isinstance(error, RefusedError) else RefusedError(*FAILED)).response()


def front_page(models: Sequence[Served]) -> str:
    """The page to explore the models with, those that can run in it; where there is none, a list of what there is."""
    # rivals answer here, but do not run in a page
    runnable = [(served.name, served.model) for served in models if why_unpackable(served.model) is None]
    if runnable:
        return make_page(runnable)
    names = "".join(f"<li>{escape(served.name)}</li>" for served in models)
    paths = "".join(f'<li><a href="{path}">{path}</a></li>' for path in ("/api/models", "/openapi.json", "/metrics"))
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>raytraced</title><h1>raytraced</h1>'
    return f"{head}<p>Models:</p><ul>{names}</ul><p>Paths:</p><ul>{paths}</ul></html>"
