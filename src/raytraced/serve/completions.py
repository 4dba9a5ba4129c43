"""OpenAI's completions: `/v1/completions` and `/v1/models`, for language models."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from time import time
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import torch
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator
from starlette.responses import Response, StreamingResponse
from torch import Tensor

from raytraced.serve.answering import AnswerFields
from raytraced.serve.engine import EVENTS, Engine, json_response, to_json
from raytraced.serve.generation import Sampling
from raytraced.serve.inputs import choose_model, encode_text, is_whole_number
from raytraced.serve.limits import RefusedError, shorten
from raytraced.serve.models import Served
from raytraced.serve.schemas import MAX_CHARACTERS, MAX_TOKENS, RequestBody

MAX_CHOICES = 64
ResultT = TypeVar("ResultT")

TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
STRINGS = {"type": "array", "items": {"type": "string"}}
TOKEN_LISTS = {"type": "array", "items": TOKENS}
Prompt = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, STRINGS, TOKENS, TOKEN_LISTS]})]
StopString = Annotated[str, Field(min_length=1, max_length=100)]


def allow_null(schema: dict[str, Any]) -> None:
    """State in a JSON schema that all fields may be null."""
    for name, field_schema in schema["properties"].items():
        kinds = field_schema.get("anyOf", [{}])
        if {"type": "null"} in kinds:
            continue
        about = {key: field_schema[key] for key in ("title", "description", "default") if key in field_schema}
        rules = {key: value for key, value in field_schema.items() if key not in about}
        kinds = kinds if "anyOf" in rules else [rules]
        schema["properties"][name] = {"anyOf": [*kinds, {"type": "null"}]} | about


class NullableFields(BaseModel):
    """Fields for which null stands for the default, as in OpenAI's schema; types are exact, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=allow_null)

    @model_validator(mode="before")
    @classmethod
    def leave_out_nulls(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None or name not in cls.model_fields}


class StreamOptions(NullableFields):
    """Options of a stream."""

    include_usage: bool = Field(False, description="whether a last event states the number of tokens")
    include_obfuscation: bool = Field(False, description="not used: events are not padded")


class CompletionRequest(NullableFields, RequestBody):
    """The fields of OpenAI's completions, and of ours: `max_experts`, `experts`, `effort` and `max_ms`."""

    prompt: Prompt = Field("", description="a text, several texts, a text's tokens, or those of several texts")
    max_tokens: int = Field(16, ge=0, le=MAX_TOKENS)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="choices per prompt")
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = Field(None, ge=0, le=20, description="likeliest tokens that are stated with each token")
    echo: bool = Field(False, description="whether the prompt is part of the text")
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="strings at which a text ends"
    )
    seed: int | None = Field(None, ge=0, le=2**53 - 1, description="default: a random one")  # type: ignore[assignment]
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="at most `n`: no choices are discarded")
    frequency_penalty: float = Field(0, ge=0, le=0, description="only 0")
    presence_penalty: float = Field(0, ge=0, le=0, description="only 0")
    suffix: Annotated[str, WithJsonSchema({"type": "string", "maxLength": 0})] | None = Field(
        None, description="only an empty one: texts are continued, not filled in"
    )
    logit_bias: Annotated[dict[str, Any], WithJsonSchema({"type": "object", "maxProperties": 0})] | None = Field(
        None, description="only an empty one: logits are those of the model"
    )
    user: str | None = Field(None, max_length=1000, description="not used")

    @field_validator("suffix", "logit_bias")
    @classmethod
    def check_empty(cls, value: Any, info: ValidationInfo) -> Any:
        if value:
            raise ValueError(f"{info.field_name}={shorten(value)}: is not supported, must be empty or left out")
        return value

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of > self.n:
            rule = f"must be at most n={self.n}: no choices are discarded"
            raise ValueError(f"best_of={self.best_of}: {rule}")
        return self


@dataclass
class CompletionChoice:
    """One text, as far as it has been generated."""

    index: int
    prompt: str
    echo: bool
    top_logprobs: int | None
    served: Served
    text: str = ""
    num_tokens: int = 0
    experts: int = 0
    stop: str | None = None
    effort: dict[str, float] = field(default_factory=dict)
    offset: int = 0
    """characters of all tokens so far, for `text_offset`"""
    logprobs: dict[str, list[Any]] = field(default_factory=lambda: new_logprobs())

    def add(self, fields: AnswerFields) -> dict[str, Any]:
        """Take one answer of the engine in, and return the event of a stream for it."""
        text, logprobs = "", new_logprobs()
        if self.echo:  # the prompt comes with the first answer
            text, self.echo = self.prompt, False
        for token in fields.get("prompt", ()):
            self.add_logprob(logprobs, token)
        if "token" in fields:
            self.num_tokens += 1
            self.experts += fields["experts"]
            self.add_logprob(logprobs, fields)
        text += fields.get("text", "")
        self.stop = fields.get("stop")
        self.effort = {"effort": fields["effort"]} if "effort" in fields else {}
        self.text += text
        for name, values in logprobs.items():
            self.logprobs[name] += values
        return self.fields(text, logprobs)

    def add_logprob(self, logprobs: dict[str, list[Any]], token: AnswerFields) -> None:
        """Add one token to lists of log-probabilities."""
        assert self.served.codec is not None
        bytes_of = self.served.codec.bytes_of
        text = bytes_of[token["token"]].decode(errors="replace")
        top = token.get("top_logprobs")
        logprobs["tokens"].append(text)
        logprobs["token_logprobs"].append(token.get("logprob"))
        shown = None if top is None else {bytes_of[one].decode(errors="replace"): value for one, value in top.items()}
        logprobs["top_logprobs"].append(shown)
        logprobs["text_offset"].append(self.offset)
        self.offset += len(text)

    def fields(self, text: str, logprobs: dict[str, list[Any]]) -> dict[str, Any]:
        """The choice as it is sent; a deadline is a `length` to OpenAI's clients, `stop` states it."""
        reason = {None: None, "stop": "stop"}.get(self.stop, "length")
        choice: dict[str, Any] = {"index": self.index, "text": text, "finish_reason": reason}
        choice["logprobs"] = None if self.top_logprobs is None else logprobs
        return choice | ({"stop": self.stop, "experts": self.experts} | self.effort if self.stop else {})


def new_logprobs() -> dict[str, list[Any]]:
    """OpenAI's lists of log-probabilities, empty."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


class Completions:
    """The paths.

    Args:
        engine: What computes.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add_paths(self, api: FastAPI) -> None:
        """Connect paths with methods."""
        options: dict[str, Any] = {"response_model": None, "tags": ["OpenAI"]}
        api.add_api_route("/v1/completions", self.complete, methods=["POST"], summary="Texts continued", **options)
        api.add_api_route("/v1/models", self.list_models, summary="The language models", **options)
        api.add_api_route("/v1/models/{name}", self.show_model, summary="One language model", **options)

    async def list_models(self) -> Response:
        found = [describe_model(served) for served in self.engine.models if served.codec is not None]
        return json_response({"object": "list", "data": found})

    async def show_model(self, name: str) -> Response:
        return json_response(describe_model(choose_model(name, True, self.engine.models)))

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        served = choose_model(body.model, True, self.engine.models)
        prompts = read_prompts(body.prompt, served)
        if len(prompts) * body.n > MAX_CHOICES:
            message = (
                f"n={body.n}: {len(prompts)} prompts make {len(prompts) * body.n} texts, must be at most {MAX_CHOICES}"
            )
            raise RefusedError(422, "n", message)
        answers, choices = self.start(request, body, served, prompts)
        head = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time())}
        head["model"] = served.name
        num_prompt_tokens = sum(tokens.shape[1] for _, tokens in prompts)

        def usage() -> dict[str, int]:
            num = sum(choice.num_tokens for choice in choices)
            total = num_prompt_tokens + num
            return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num, "total_tokens": total}

        async def collect() -> Response:
            async for number, fields in answers:
                choices[number].add(fields)
            found = [choice.fields(choice.text, choice.logprobs) for choice in choices]
            return json_response(head | {"choices": found, "usage": usage()})

        async def events() -> AsyncIterator[bytes]:
            try:
                yield event(head | {"choices": [choices[first[0]].add(first[1])]})
                async for number, fields in answers:
                    yield event(head | {"choices": [choices[number].add(fields)]})
                if body.stream_options is not None and body.stream_options.include_usage:
                    yield event(head | {"choices": [], "usage": usage()})
                yield b"data: [DONE]\n\n"
            except RefusedError as error:
                yield event({"error": {"message": error.message, "type": "server_error", "code": error.rule}})
            finally:
                await answers.aclose()

        if not body.stream:
            return await run_while_connected(request, collect())
        first = await anext(answers)  # a refusal before the first event is an ordinary response
        return StreamingResponse(events(), headers=EVENTS)

    def start(
        self, request: Request, body: CompletionRequest, served: Served, prompts: list[tuple[str, Tensor]]
    ) -> tuple[Any, list[CompletionChoice]]:
        """The answers of the engine, and the choices that they belong to."""
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        sampling = Sampling(
            min(body.max_tokens, self.engine.limits.tokens),
            body.temperature,
            body.top_p,
            tuple(one.encode() for one in stop),
            body.logprobs,
            score_prompt=body.echo and body.logprobs is not None,
        )
        seed = secrets.randbits(32) if body.seed is None else body.seed
        inputs = [tokens for _, tokens in prompts for _ in range(body.n)]
        seeds = [seed + number for _ in prompts for number in range(body.n)]
        choices = [
            CompletionChoice(number, prompts[number // body.n][0], body.echo, body.logprobs, served)
            for number in range(len(inputs))
        ]
        # all models can send tokens as they come, and stop between two of them
        options = self.engine.query_options(body, served, max_ms=None, stream=None) | {"seed": 0, "sampling": sampling}
        return self.engine.answers(request.scope["arrived"], inputs, seeds=seeds, **options), choices


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


def describe_model(served: Served) -> dict[str, Any]:
    """A model as OpenAI's clients expect it."""
    return {"id": served.name, "object": "model", "created": 0, "owned_by": "raytraced"}


def read_prompts(prompt: Any, served: Served) -> list[tuple[str, Tensor]]:
    """The prompts of a request: their texts, and their tokens (1, T)."""
    if isinstance(prompt, np.ndarray):  # tokens below 256 of a large body
        prompt = prompt.tolist()
    is_list = isinstance(prompt, list)
    is_tokens = is_list and bool(prompt) and all(is_whole_number(one) for one in prompt)
    prompts = [prompt] if is_tokens or not is_list else prompt
    if not 1 <= len(prompts) <= MAX_CHOICES:
        raise RefusedError(422, "prompt", f"prompt: has {len(prompts)} texts, must be 1 … {MAX_CHOICES}")
    names = ["prompt"] if is_tokens or not is_list else [f"prompt[{number}]" for number in range(len(prompts))]
    return [read_prompt(name, one, served) for name, one in zip(names, prompts, strict=True)]


def read_prompt(name: str, prompt: Any, served: Served) -> tuple[str, Tensor]:
    """One prompt: its text, and its tokens (1, T)."""
    assert served.codec is not None
    if isinstance(prompt, str):
        if len(prompt) > MAX_CHARACTERS:
            raise RefusedError(422, "prompt", f"{name}: must be at most {MAX_CHARACTERS:,} characters")
        return prompt, torch.tensor([encode_text(name, prompt, served)])
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    num, context = len(served.codec.bytes_of), served.codec.model.context
    if not isinstance(prompt, list) or not all(is_whole_number(one) and 0 <= one < num for one in prompt):
        rule = f"must be a text, or whole numbers in 0 … {num - 1}, the vocabulary"
        raise RefusedError(422, "prompt", f"{name}={shorten(prompt)}: {rule}")
    if not 1 <= len(prompt) <= context:
        raise RefusedError(422, "length", f"{name}: has {len(prompt):,} tokens, must have 1 … {context:,}")
    text = b"".join(served.codec.bytes_of[one] for one in prompt).decode(errors="replace")
    return text, torch.tensor([prompt])


async def run_while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of some work, which is cancelled when the client closes the connection."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RefusedError(400, "client", "the client closed the connection before its answer")
    finally:
        for one in (task, gone):
            one.cancel()
