"""The server's paths: requests in, answers, events and refusals out."""

import asyncio
import json
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from html import escape
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from raytraced.explore.packing import pack_model
from raytraced.explore.page import make_page as page_of
from raytraced.serve.answering import Answer, Asked, Delivery, check_asked
from raytraced.serve.batching import Worker
from raytraced.serve.guard import Guard, State
from raytraced.serve.limits import Limits, RefusedError, shown
from raytraced.serve.models import Served
from raytraced.serve.reading import find_model, read_body, read_inputs
from raytraced.serve.schema import document, request_schemas

SMALL = 1 << 16  # bytes of a body that are read where they arrive; reading more would keep others waiting
SENDING = 0.001  # seconds before a deadline at which an answer should leave


class Server:
    """The loaded models, what computes, and what is under way."""

    def __init__(self, models: Sequence[Served], limits: Limits | None = None, hosts: Sequence[str] = ()) -> None:
        self.models, self.limits, self.state = list(models), limits or Limits(), State()
        self.schemas = request_schemas([served.name for served in models], self.limits)
        self.page: bytes | None = None
        metrics = self.state.metrics
        self.worker = Worker(self.hand_out, lambda rows: metrics.observe("raytraced_batch_rows", rows))
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
        handlers: dict[Any, Any] = {
            RefusedError: refused,
            HTTPException: not_found,
            ClientDisconnect: left,
            Exception: failed,
        }
        starlette = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)
        self.app = Guard(starlette, self.state, self.limits, {str(route.path) for route in routes}, hosts)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        working = asyncio.create_task(self.worker.work())
        yield
        working.cancel()

    def hand_out(self, delivered: list[Delivery]) -> None:
        """What a step gave, to those who asked."""
        metrics = self.state.metrics
        for asked, answer, last in delivered:
            if last and isinstance(answer, dict):
                name = asked.served.name
                metrics.add("raytraced_answers_total", model=name, stop=answer["stop"])
                metrics.add("raytraced_experts_total", answer["experts"], model=name)
                metrics.add("raytraced_multiply_adds_total", answer.get("multiply_adds", 0), model=name)
                if asked.deadline is not None:
                    late = max(0.0, perf_counter() - asked.deadline - SENDING)
                    metrics.observe("raytraced_overshoot_seconds", late)
            asked.deliver(answer, last)

    async def read(self, request: Request) -> tuple[dict[str, Any], Served, list[Any]]:
        """The body of a request as checked options, the model, and its inputs."""
        body, schema = await receive_body(request, self.limits), self.schemas[request.url.path]

        def understand() -> tuple[dict[str, Any], Served, list[Any]]:
            given = read_body(body, schema)
            served = find_model(given, self.models)
            return given, served, read_inputs(given, served, self.limits)

        return understand() if len(body) <= SMALL else await asyncio.to_thread(understand)

    def ask(self, given: dict[str, Any], served: Served, request: Request, **more: Any) -> dict[str, Any]:
        """The options of `Asked` that a request's options stand for."""
        try:
            check_asked(served, **given, **more)
            sure, look = find_sure(given.get("sure"), served)
        except ValueError as error:
            raise RefusedError(422, "option", str(error)) from None
        deadline = deadline_of(given, request)
        options = {name: given[name] for name in ("select", "seed", "max_experts") if name in given}
        return options | {"served": served, "deadline": deadline, "sure": sure, "look": look}

    async def predict(self, request: Request) -> Response:
        given, served, inputs = await self.read(request)
        options, trace = self.ask(given, served, request), given.get("trace", False)
        loop = asyncio.get_running_loop()
        answers: list[Answer] = [{} for _ in inputs]
        done: asyncio.Future[None] = loop.create_future()
        left = len(inputs)

        def taker(number: int) -> Callable[[Answer | Exception, bool], None]:
            steps: list[Answer] = []

            def take(answer: Answer | Exception, last: bool) -> None:
                nonlocal left
                if isinstance(answer, Exception):
                    if not done.done():
                        done.set_exception(RefusedError(500, "internal", FAILED))
                    return
                steps.append(answer)
                if last:
                    answers[number] = answer | ({"trace": [step_of(one) for one in steps]} if trace else {})
                    left -= 1
                    if not left and not done.done():
                        done.set_result(None)

            return take

        asked = [Asked(inputs=one, deliver=taker(n), every=trace, **options) for n, one in enumerate(inputs)]
        self.worker.submit(asked)
        try:
            await done
        finally:
            for one in asked:
                one.gone = True
        return send_json({"model": served.name, "answers": answers})

    async def stream(self, request: Request) -> ASGIApp:
        given, served, (inputs,) = await self.read(request)
        options = self.ask(given, served, request, stream=True)
        return Events(self.worker, lambda deliver: Asked(inputs=inputs, deliver=deliver, every=True, **options))

    async def generate(self, request: Request) -> ASGIApp:
        given, served, (inputs,) = await self.read(request)
        try:
            check_asked(served, max_experts=given.get("max_experts"))
        except ValueError as error:
            raise RefusedError(422, "option", str(error)) from None
        drawing = {name: given.get(name, value) for name, value in GENERATE.items()}
        drawing["length"] = min(drawing["length"], self.limits.tokens)
        deadline = deadline_of(given, request)
        options: dict[str, Any] = {name: given[name] for name in ("seed", "max_experts") if name in given}
        options |= {"served": served, "deadline": deadline, "drawing": drawing}
        assert served.codec is not None
        bytes_of, decoder = served.codec.bytes_of, getincrementaldecoder("utf-8")(errors="replace")

        def as_text(token: Answer) -> Answer:
            return {"text": decoder.decode(bytes_of[token["token"]], final="stop" in token)} | token

        return Events(self.worker, lambda deliver: Asked(inputs=inputs, deliver=deliver, **options), as_text)

    async def list_models(self, request: Request) -> Response:
        return send_json({"models": [served.told() for served in self.models]})

    async def health(self, request: Request) -> Response:
        return send_json({"status": "ok", "under_way": self.state.under_way})

    async def metrics(self, request: Request) -> Response:
        gauge = f"raytraced_under_way {self.state.under_way}\n"
        return Response(self.state.metrics.text() + gauge, media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return send_json(document(self.schemas, installed_version()))

    async def show_page(self, request: Request) -> Response:
        if self.page is None:
            self.page = (await asyncio.to_thread(make_page, self.models)).encode()
        return HTMLResponse(self.page, headers={"Content-Security-Policy": POLICY})


FAILED = "the server failed; its log says why"
GENERATE: dict[str, Any] = {"length": 500, "temperature": 0.8, "top_p": 1.0}
"""as `raytraced generate` has them"""
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Events:
    """Answers as server-sent events, one as soon as it is there; a client that goes away stops the work."""

    def __init__(
        self, worker: Worker, make: Callable[[Any], Asked], change: Callable[[Answer], Answer] = lambda answer: answer
    ) -> None:
        self.worker, self.make, self.change = worker, make, change

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        queue: asyncio.Queue[tuple[Answer | Exception | None, bool]] = asyncio.Queue()
        asked = self.make(lambda answer, last: queue.put_nowait((answer, last)))

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            queue.put_nowait((None, True))

        watching = asyncio.create_task(watch())
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self.worker.submit([asked])
            last = False
            while not last:
                answer, last = await queue.get()
                if answer is None:
                    return
                event = b"data: "
                if isinstance(answer, Exception):
                    event, answer = b"event: error\ndata: ", error_body("internal", FAILED)
                else:
                    answer = self.change(answer)
                content = event + json.dumps(answer).encode() + b"\n\n"
                await send({"type": "http.response.body", "body": content, "more_body": not last})
        finally:
            asked.gone = True
            watching.cancel()


async def receive_body(request: Request, limits: Limits) -> bytes:
    """The body, if it is JSON, of a size that is allowed, and comes in time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RefusedError(415, "content-type", "content-type: must be application/json")
    message = f"body: must be at most {limits.body:,} bytes"
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limits.body:
        raise RefusedError(413, "body", message)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.body:
                    raise RefusedError(413, "body", message)
    except TimeoutError:
        raise RefusedError(408, "seconds", f"body: must arrive within {limits.seconds:g} seconds") from None
    return bytes(body)


def deadline_of(given: dict[str, Any], request: Request) -> float | None:
    """When a request's answer should leave, counted from its arrival."""
    arrived: float = request.scope["arrived"]
    return arrived + given["max_ms"] / 1000 - SENDING if "max_ms" in given else None


def find_sure(sure: float | str | None, served: Served) -> tuple[tuple[float, ...] | None, str]:
    """How sure an answer must be at each look, and after what one looks."""
    look = "expert" if served.traced or served.codec else "layer"
    if sure != "calibrated":
        return (None if sure is None else (float(sure),)), look
    found = served.model.card.calibration
    if not found:
        raise ValueError(f"sure={sure}: {served.name} is not calibrated; do that with raytraced calibrate")
    levels = found["sure"] if isinstance(found["sure"], list | tuple) else [found["sure"]]
    return tuple(levels), look if served.codec else found["look"]


def step_of(answer: Answer) -> Answer:
    """An answer as a step of a trace."""
    return {name: value for name, value in answer.items() if name != "stop"}


def send_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # Only ASCII: a message may quote half a surrogate pair, which no encoding has.
    return Response(json.dumps(value).encode(), status, headers, "application/json")


def error_body(rule: str, message: str) -> dict[str, Any]:
    return {"error": {"rule": rule, "message": message}}


async def refused(request: Request, error: RefusedError) -> Response:
    # What is left of a body that is not wanted would have to be read: the connection ends instead.
    headers = {"Connection": "close"} if error.status in (408, 413) else None
    return send_json(error_body(error.rule, error.message), error.status, headers)


async def not_found(request: Request, error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    rule, message = {
        404: ("path", f"{shown(request.url.path)}: there is no such path; /openapi.json names them all"),
        405: ("method", f"{request.method} {request.url.path}: must be {headers.get('Allow')}"),
    }.get(error.status_code, ("request", error.detail))
    return send_json(error_body(rule, message), error.status_code, headers)


async def failed(request: Request, error: Exception) -> Response:
    return send_json(error_body("internal", FAILED), 500)


async def left(request: Request, error: ClientDisconnect) -> Response:
    return send_json(error_body("client", "the client went away"), 400)


def installed_version() -> str:
    """The version of the package, for the document."""
    try:
        return version("raytraced")
    except PackageNotFoundError:
        return "0"


def make_page(models: Sequence[Served]) -> str:
    """The page to explore the models with, those that can run in it; where there is none, a list of what there is."""
    shown = []
    for served in models:
        with suppress(ValueError):  # rivals answer here, but do not run in a page
            pack_model(served.name, served.model)
            shown.append((served.name, served.model))
    if shown:
        return page_of(shown)
    names = "".join(f"<li>{escape(served.name)}</li>" for served in models)
    paths = "".join(f'<li><a href="{path}">{path}</a></li>' for path in ("/api/models", "/openapi.json", "/metrics"))
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>raytraced</title><h1>raytraced</h1>'
    return f"{head}<p>Models:</p><ul>{names}</ul><p>Paths:</p><ul>{paths}</ul></html>"
