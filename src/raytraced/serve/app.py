"""The server: its paths, and what they share."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Form, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response, StreamingResponse
from torch import Tensor, tensor

from raytraced import __version__
from raytraced.serve.answering import AnswerFields
from raytraced.serve.completions import Completions
from raytraced.serve.connections import BACKLOG, Connections
from raytraced.serve.engine import EVENTS, Engine, json_response, to_json
from raytraced.serve.errors import refuse_failed, refuse_http, refuse_invalid
from raytraced.serve.front_page import FrontPage
from raytraced.serve.generation import Sampling
from raytraced.serve.inference_protocol import InferenceProtocol, protocol_schemas
from raytraced.serve.inputs import choose_model, encode_text, read_images
from raytraced.serve.limits import Limits, RefusedError
from raytraced.serve.middleware import LOOPBACK, Gate
from raytraced.serve.models import Served
from raytraced.serve.schemas import (
    Answer,
    AnswerList,
    GenerateRequest,
    PredictRequest,
    RefusalBody,
    StreamRequest,
    Token,
    UploadRequest,
)

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "font-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"model": RefusalBody, "description": "the API key is missing or wrong"},
    403: {"model": RefusalBody, "description": "called by a name, or from a page, of another server"},
    404: {"model": RefusalBody, "description": "there is no such model"},
    408: {"model": RefusalBody, "description": "the body takes too long to arrive"},
    413: {"model": RefusalBody, "description": "the body is too large"},
    415: {"model": RefusalBody, "description": "the body is not declared as what the path takes"},
    422: {"model": RefusalBody, "description": "the body breaks a rule"},
    429: {"model": RefusalBody, "description": "too many requests are in progress"},
    503: {"model": RefusalBody, "description": "the server is shutting down"},
}


class Server:
    """Loaded models behind HTTP.

    Args:
        models: The models.
        limits: How much is accepted.
        hosts: The names that the server may be called by.
        api_key: The key that requests must state; None for no key.
        max_files: The number of files that the process may open.
        adaptive: Whether efforts are lowered where deadlines would be missed.
    """

    def __init__(
        self,
        models: Sequence[Served],
        limits: Limits | None = None,
        hosts: Sequence[str] = LOOPBACK,
        api_key: bytes | None = None,
        max_files: int | None = None,
        adaptive: bool = False,
    ) -> None:
        self.engine = Engine(models, limits or Limits(), adaptive)
        self.models, self.limits, self.traffic = self.engine.models, self.engine.limits, self.engine.traffic
        self.page = FrontPage(models)
        self.connections = Connections(self.limits, max_files)
        self.api = FastAPI(
            title="raytraced",
            version=__version__,
            lifespan=self.lifespan,
            docs_url=None,  # their pages load scripts from elsewhere
            redoc_url=None,
            exception_handlers={
                RequestValidationError: refuse_invalid,
                HTTPException: refuse_http,
                Exception: refuse_failed,
            },
        )
        self.api.router.route_class = self.engine.route_class()
        self.add_paths()
        self.api.openapi = self.describe_api  # type: ignore[method-assign]  # FastAPI's way to change the document
        Completions(self.engine).add_paths(self.api)
        InferenceProtocol(self.engine).add_paths(self.api)
        paths = [getattr(route, "path", "") for route in self.api.routes]
        self.app = Gate(self.api, self.traffic, self.limits, paths, hosts, api_key, self.engine.check_body)

    def add_paths(self) -> None:
        """Connect paths with methods."""
        events: dict[str, Any] = {"text/event-stream": {}}

        def get(path: str, method: Any, summary: str, **options: Any) -> None:
            self.api.add_api_route(path, method, summary=summary, response_model=None, **options)

        def post(path: str, method: Any, summary: str, answer: dict[str, Any]) -> None:
            responses = REFUSALS | {200: answer}
            self.api.add_api_route(
                path, method, methods=["POST"], summary=summary, response_model=None, responses=responses
            )

        get("/", self.show_page, "A page in which the models run", response_class=FileResponse)
        get("/healthz", self.live, "Whether the process is alive")
        get("/readyz", self.ready, "Whether requests are accepted")
        get("/metrics", self.metrics, "Counts and times for Prometheus")
        get("/api/models", self.list_models, "The models, and what they take")
        post("/api/predict", self.predict, "AnswerList to images, or to a text", {"model": AnswerList})
        post("/api/upload", self.upload, "AnswerList to image files in a form", {"model": AnswerList})
        post("/api/stream", self.stream, "An event per exit", {"model": Answer, "content": events})
        post("/api/generate", self.generate, "An event per token", {"model": Token, "content": events})

    def describe_api(self) -> dict[str, Any]:
        """The OpenAPI document, in which the field `model` lists the models."""
        if self.api.openapi_schema is None:
            document = get_openapi(title=self.api.title, version=self.api.version, routes=self.api.routes)
            document["components"]["schemas"] |= protocol_schemas()
            for schema in document["components"]["schemas"].values():
                kinds = schema.get("properties", {}).get("model", {}).get("anyOf", ())
                for kind in kinds:
                    if kind["type"] == "string":
                        kind["enum"] = [served.name for served in self.models]
            self.api.openapi_schema = document
        return self.api.openapi_schema

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start what runs beside requests, and end it after the last."""
        asyncio.get_running_loop().set_exception_handler(self.connections.report)
        self.engine.decoders.start()
        self.engine.worker.warm_up(self.models)
        tasks = [asyncio.create_task(self.engine.worker.work()), asyncio.create_task(self.connections.watch())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            self.engine.decoders.end()
            self.page.end()

    def uvicorn_config(self, grace: int | None = None) -> uvicorn.Config:
        """The settings of the HTTP server; `grace` is how many seconds it waits for requests in progress at its end."""
        return uvicorn.Config(
            self.app,
            http=self.connections.protocol,  # type: ignore[arg-type]  # called as the class would be
            loop="raytraced.serve.clock:TimedLoop",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=grace,
        )

    async def read_inputs(self, body: StreamRequest) -> tuple[Served, list[Tensor]]:
        """The model of a request, and its inputs (1, …)."""
        served = choose_model(body.model, body.text is not None, self.models)
        if body.text is not None:
            return served, [tensor([encode_text("text", body.text, served)])]
        images = {"image": body.image} if body.image is not None else {}
        if isinstance(body, PredictRequest) and body.images is not None:
            images = {f"images[{number}]": image for number, image in enumerate(body.images)}
        return served, await read_images(images, served, self.engine.decoders)

    async def collect(self, arrived: float, inputs: list[Tensor], trace: bool, **options: Any) -> Response:
        """The last answer to each input, with those before it for a trace."""
        steps = [list[AnswerFields]() for _ in inputs]
        async for number, answer in self.engine.answers(arrived, inputs, all_exits=trace, **options):
            steps[number].append(answer)
        answers = [of_input[-1] for of_input in steps]
        if trace:
            for answer, of_input in zip(answers, steps, strict=True):
                answer["trace"] = [
                    {name: value for name, value in step.items() if name not in ("stop", "trace")} for step in of_input
                ]
        return json_response({"model": options["served"].name, "answers": answers})

    async def predict(self, request: Request, body: PredictRequest) -> Response:
        self.engine.check_deadline(request.scope["arrived"], body.max_ms)
        served, inputs = await self.read_inputs(body)
        options = self.engine.classify_options(body, served)
        return await self.collect(request.scope["arrived"], inputs, body.trace, **options)

    async def upload(self, request: Request, body: Annotated[UploadRequest, Form()]) -> Response:
        self.engine.check_deadline(request.scope["arrived"], body.max_ms)
        served = choose_model(body.model, False, self.models)
        options = self.engine.classify_options(body, served)
        files = {f"files[{number}]": await file.read() for number, file in enumerate(body.files)}
        inputs = await self.engine.decoders.decode(files, served.image_shape)
        return await self.collect(request.scope["arrived"], inputs, body.trace, **options)

    async def stream(self, request: Request, body: StreamRequest) -> Response:
        served, inputs = await self.read_inputs(body)
        options = self.engine.classify_options(body, served, stream=True)
        return await self.send_events(request.scope["arrived"], inputs, all_exits=True, **options)

    async def generate(self, request: Request, body: GenerateRequest) -> Response:
        served = choose_model(body.model, True, self.models)
        inputs = [tensor([encode_text("text", body.text, served)])]
        options = self.engine.query_options(body, served, max_ms=None)  # all models can stop between two tokens
        sampling = Sampling(min(body.length, self.limits.tokens), body.temperature, body.top_p)
        return await self.send_events(request.scope["arrived"], inputs, sampling=sampling, **options)

    async def send_events(self, arrived: float, inputs: list[Tensor], **options: Any) -> Response:
        """AnswerList as server-sent events; a refusal before the first one is an ordinary response."""
        answers = self.engine.answers(arrived, inputs, **options)
        first = await anext(answers)

        async def events() -> AsyncIterator[bytes]:
            yield b"data: " + to_json(first[1]) + b"\n\n"
            try:
                async for _, answer in answers:
                    yield b"data: " + to_json(answer) + b"\n\n"
            except RefusedError as error:
                content = {"error": {"rule": error.rule, "message": error.message}}
                yield b"event: error\ndata: " + to_json(content) + b"\n\n"
            finally:
                await answers.aclose()

        return StreamingResponse(events(), headers=EVENTS)

    async def list_models(self) -> Response:
        return json_response({"models": [served.description() for served in self.models]})

    async def live(self) -> Response:
        return json_response({"status": "alive", "in_progress": self.traffic.in_progress})

    async def ready(self) -> Response:
        if self.traffic.shutting_down:
            raise RefusedError(503, "shutting_down", "the server is shutting down and accepts no new requests")
        return json_response({"status": "ready"})

    async def metrics(self) -> Response:
        return Response(self.traffic.metrics.exposition(), media_type="text/plain; version=1.0.0")

    async def show_page(self, request: Request) -> Response:
        compressed = "gzip" in request.headers.get("accept-encoding", "").lower()
        headers = {"Content-Security-Policy": POLICY, "Vary": "Accept-Encoding"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return FileResponse(await self.page.file(compressed), headers=headers, media_type="text/html; charset=utf-8")
