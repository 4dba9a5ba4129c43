"""What the paths share: the models, what computes, what decodes, and what is in progress."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope
from torch import Tensor

from raytraced.errors import require
from raytraced.serve.admission import Admission
from raytraced.serve.answering import AnswerFields, Delivery, Query, check_options
from raytraced.serve.batching import SENDING, Worker
from raytraced.serve.budgets import read_budget
from raytraced.serve.decoding import Decoders
from raytraced.serve.errors import INTERNAL
from raytraced.serve.generation import NotFiniteError
from raytraced.serve.limits import Limits, RefusedError
from raytraced.serve.middleware import UPLOADS, Traffic
from raytraced.serve.models import Served
from raytraced.serve.schemas import ClassifyOptions, RequestBody

LARGE_BODY = 65_536  # bytes
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}


def to_json(content: Any) -> bytes:
    """JSON in ASCII; NaN and infinity, which JSON does not have, raise."""
    return json.dumps(content, allow_nan=False).encode()


def json_response(content: Any) -> Response:
    """A response of status 200."""
    return Response(to_json(content), media_type="application/json")


class Engine:
    """Answers queries of all paths.

    Args:
        models: The models.
        limits: How much is accepted.
        adaptive: Whether efforts are lowered where deadlines would be missed.
    """

    def __init__(self, models: Sequence[Served], limits: Limits, adaptive: bool = False) -> None:
        self.models, self.limits, self.traffic = list(models), limits, Traffic()
        self.admission, self.decoders = Admission(), Decoders(limits)
        self.worker = Worker(self.traffic.metrics, self.admission, adaptive)

    def check_deadline(self, arrived: float, max_ms: float | None) -> None:
        """Refuse a request whose deadline would be missed before anything is decoded for it."""
        if max_ms is not None:
            self.admission.check(max_ms / 1000, self.traffic.in_progress - 1, perf_counter() - arrived)

    def check_body(self, scope: Scope, body: bytes) -> None:
        """Refuse a request whose deadline would be missed before its fields are checked, which takes several times as long."""
        if b'"max_ms"' not in body or len(body) > LARGE_BODY or scope["path"] in UPLOADS:
            return
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):  # refused by the caller, which checks the fields
            return
        scope["json"] = fields
        max_ms = fields.get("max_ms") if isinstance(fields, dict) else None
        if isinstance(max_ms, int | float) and max_ms is not True and 0 < max_ms < float("inf"):
            due, elapsed = scope["arrived"] + max_ms / 1000, perf_counter() - scope["arrived"]
            ahead = self.worker.seconds_before(due)
            self.admission.check(max_ms / 1000, self.traffic.in_progress, elapsed, ahead, scope["waited"])

    async def answers(
        self,
        arrived: float,
        inputs: Sequence[Tensor],
        max_ms: float | None = None,
        seeds: Sequence[int] | None = None,
        **options: Any,
    ) -> AsyncGenerator[tuple[int, AnswerFields], None]:
        """The answers to all inputs, as they come; when the caller stops, so does the work.

        Args:
            arrived: When the request arrived, in seconds of `perf_counter`.
            inputs: The inputs, (1, …) each.
            max_ms: Milliseconds after the arrival at which the last answer is due.
            seeds: A seed per input, where they differ.
            options: Further fields of `Query`.

        Yields:
            The number of an input, and an answer to it.
        """
        num_others = self.traffic.in_progress - 1
        if max_ms is not None:  # counted from the request's arrival; what sending takes is left
            reply = min(SENDING + self.admission.reply.value, max_ms / 2000)
            options["deadline"] = arrived + max_ms / 1000 - reply
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        numbers = {Query(inputs=one, deliver=queue.put_nowait, **options): n for n, one in enumerate(inputs)}
        for query, seed in zip(numbers, seeds or (), strict=seeds is not None):
            query.seed = seed
        checked, ahead, spared = perf_counter(), 0.0, self.worker.spared
        if max_ms is not None:
            ahead = self.worker.seconds_ahead(list(numbers))
            self.admission.check(max_ms / 1000 - SENDING, num_others, checked - arrived, ahead)
        self.worker.submit(list(numbers))
        left, started = len(numbers), set[Query]()
        try:
            while left:
                query, answer, last = await queue.get()
                if isinstance(answer, NotFiniteError):
                    raise RefusedError(500, "not_finite", str(answer))
                if isinstance(answer, Exception):
                    raise RefusedError(*INTERNAL)
                if last and max_ms is not None and query.first_answer is not None:
                    reply = perf_counter() - query.delivered
                    self.admission.reply.add(reply)
                    # Efforts above the least are for spare time: with more requests, they would have been lowered.
                    taken = query.first_answer + reply - checked - (self.worker.spared - spared)
                    self.admission.observe(taken, num_others, ahead)
                if "token" in answer and query not in started:
                    started.add(query)
                    self.traffic.metrics.count_first_token(perf_counter() - arrived)
                left -= last
                yield numbers[query], answer
        finally:
            for query in numbers:
                query.cancelled = True

    async def parse_json(self, body: bytes) -> Any:
        """The value of a JSON body; a large one is parsed in another process, since it would stop all answers meanwhile."""
        return await self.decoders.parse_json(body) if len(body) > LARGE_BODY else json.loads(body)

    def route_class(self) -> type[APIRoute]:
        """FastAPI's routes, whose requests parse their bodies by `parse_json`."""
        parse = self.parse_json

        class ParsingRequest(Request):
            async def json(self) -> Any:
                return self.scope["json"] if "json" in self.scope else await parse(await self.body())

        class ParsingRoute(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                handler = super().get_route_handler()

                async def handle(request: Request) -> Response:
                    return await handler(ParsingRequest(request.scope, request.receive))

                return handle

        return ParsingRoute

    def classify_options(self, body: ClassifyOptions, served: Served, **more: Any) -> dict[str, Any]:
        """The options of `answers` that a request stands for."""
        return self.query_options(body, served, **more) | {"select": body.select} | exit_options(body, served)

    def query_options(self, body: RequestBody, served: Served, **more: Any) -> dict[str, Any]:
        """Those options that all requests have."""
        try:
            check_options(served, body.model_dump(exclude={"image", "images", "files", "text"}) | more)
            budget = read_budget(served, body.experts, body.effort)
        except ValueError as error:
            raise RefusedError(422, "option", str(error)) from None
        options = {"served": served, "seed": body.seed, "max_experts": body.max_experts, "max_ms": body.max_ms}
        return options | {"budget": budget}


def exit_options(body: ClassifyOptions, served: Served) -> dict[str, Any]:
    """The confidence that ends a query, and where the model can exit."""
    if not isinstance(body.confidence, str):
        return {"confidence": body.confidence, "exit_every": served.exit_every}
    found = served.model.card.calibration
    try:
        rule = f"{served.name} is not calibrated; run raytraced calibrate, or state a number"
        require(bool(found), "confidence", body.confidence, rule)
    except ValueError as error:
        raise RefusedError(422, "option", str(error)) from None
    exit_every = served.exit_every if served.codec else found["exit_every"]
    return {"confidence": found["confidence"], "exit_every": exit_every}
