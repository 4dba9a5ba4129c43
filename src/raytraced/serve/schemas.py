"""The bodies of requests and responses. FastAPI checks requests by them, and writes the OpenAPI document from them."""

from typing import Annotated, Any, Literal, Self

import numpy as np
from fastapi import UploadFile
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from raytraced.serve.limits import shorten

MAX_IMAGES = 256
MAX_CHARACTERS = 65_536
MAX_TOKENS = 4096

PIXELS = {"type": "array", "items": {"type": "array", "items": {"anyOf": [
    {"type": "integer", "minimum": 0, "maximum": 255},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
]}}}  # fmt: skip
FILE = {"type": "string", "contentEncoding": "base64"}


def accept_array(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """The pixels of a large body are arrays already."""
    return value if isinstance(value, np.ndarray) else check(value)


def split_array(value: Any) -> Any:
    """Images of a large body that have one size are one array."""
    return list(value) if isinstance(value, np.ndarray) else value


# Which numbers of rows and columns fit is known only when the model is: inputs.py checks them.
ImageData = Annotated[
    str | list[Any],
    WrapValidator(accept_array),
    WithJsonSchema({"anyOf": [FILE, PIXELS]}),
    Field(description="a PNG, JPEG, WebP or GIF file in base64, or the pixels of an image of the model's size"),
]
Probability = Annotated[float, Field(ge=0, le=1)]


def check_effort(value: Any) -> Any:
    """Refuse what is neither a number nor a range; one line says so, where pydantic would write about both."""
    ends = value if isinstance(value, list) and len(value) == 2 else [value]
    numbers = all(isinstance(end, int | float) and not isinstance(end, bool) and 0 < end < 1e6 for end in ends)
    if value is not None and not numbers:
        raise ValueError(f"effort={shorten(value)}: must be a number above 0, or two of them, [lowest, highest]")
    return [float(end) for end in ends] if ends is value else value


def read_form_effort(value: Any) -> Any:
    """A range in a form: a repeated field, or one whose ends are separated by a comma."""
    if not isinstance(value, list):
        return value
    try:
        ends = [float(part) for text in value for part in text.split(",")]
    except (AttributeError, ValueError):
        return check_effort(",".join(map(str, value)))
    return check_effort(ends if len(ends) > 1 else ends[0])


NUMBER = {"type": "number", "exclusiveMinimum": 0}
Effort = Annotated[
    float | list[float] | None,
    BeforeValidator(check_effort),
    WithJsonSchema({"anyOf": [NUMBER, {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}]}),
]


def exactly_one_of(*names: str) -> dict[str, Any]:
    """The part of a JSON schema that requires one of some fields, as `check_inputs` does."""
    return {"oneOf": [{"required": [name]} for name in names]}


class RequestBody(BaseModel):
    """What all requests have in common: types are exact, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = Field(None, description="default: the first model that takes such input", max_length=1000)
    max_experts: int | None = Field(
        None, ge=0, le=1_000_000, description="per token, all blocks together, for a language model"
    )
    experts: float | None = Field(
        None, gt=0, le=1_000_000, description="mean number of experts per image or token; for calibrated models"
    )
    effort: Effort = Field(
        None, description="share of a calibrated model's full cost, or [lowest, highest] from which the server chooses"
    )
    max_ms: float | None = Field(None, gt=0, le=600_000, description="milliseconds until the best answer so far")
    seed: int = Field(0, ge=0, le=2**53 - 1, description="seed of all draws")


class ClassifyOptions(RequestBody):
    """Options of answers that may exit early."""

    select: Literal["greedy", "sample"] | None = Field(None, description="how experts are chosen")
    confidence: Probability | Literal["calibrated"] | None = Field(
        None, description="exit at the first answer whose largest probability reaches this"
    )


class StreamRequest(ClassifyOptions):
    """One input, whose answers at all exits are sent."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("image", "text"))

    image: ImageData | None = None
    text: str | None = Field(None, max_length=MAX_CHARACTERS, description="for a language model")

    @model_validator(mode="after")
    def check_inputs(self) -> Self:
        names = [name for name in ("image", "images", "text") if name in type(self).model_fields]
        stated = [name for name in names if getattr(self, name) is not None]
        if len(stated) != 1:
            raise ValueError(f"{', '.join(stated) or 'no input'}: must be exactly one of {', '.join(names)}")
        return self


class PredictRequest(StreamRequest):
    """One or several inputs."""

    model_config = ConfigDict(json_schema_extra=exactly_one_of("image", "images", "text"))

    images: Annotated[list[ImageData] | None, BeforeValidator(split_array)] = Field(
        None, min_length=1, max_length=MAX_IMAGES
    )
    trace: bool = Field(False, description="whether the answers at all exits are returned, too")


class UploadRequest(ClassifyOptions):
    """Image files in a form. Its values arrive as text, so that types are converted."""

    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)

    effort: Annotated[float | list[float] | None, BeforeValidator(read_form_effort)] = Field(
        None, description="share of a calibrated model's full cost, or a range of two, separated by a comma"
    )
    files: list[UploadFile] = Field(min_length=1, max_length=MAX_IMAGES, description="PNG, JPEG, WebP or GIF files")
    trace: bool = Field(False, description="whether the answers at all exits are returned, too")


class GenerateRequest(RequestBody):
    """A text to continue."""

    text: str = Field(max_length=MAX_CHARACTERS)
    length: int = Field(500, ge=1, le=MAX_TOKENS, description="tokens to add")
    temperature: float = Field(0.8, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)


class Answer(BaseModel):
    """The answer to one input, at one exit or at the last."""

    label: str
    probability: float = Field(description="of the label")
    probabilities: list[float] = Field(description="of all classes, or tokens, in the model's order")
    experts: int = Field(description="experts of the answer; for a text, of its last token")
    macs: int = Field(description="multiply-accumulate operations, those of earlier exits included")
    effort: float | None = Field(
        None, description="the effort at which it was computed, where the request states a budget and stop is end"
    )
    stop: Literal["confidence", "end", "budget", "deadline"] | None = Field(None, description="why it is the last one")
    nodes: list[list[int]] | None = Field(
        None, description="[layer, expert] in order; for a text [block, expert] of its last token"
    )
    rates: list[list[float]] | None = Field(None, description="firing rate of every node (layers, experts)")
    token_experts: list[int] | None = Field(None, description="for a text: the experts of every token")


class TracedAnswer(Answer):
    """The last answer to an input, and those before it where they were asked for."""

    trace: list[Answer] | None = None


class AnswerList(BaseModel):
    """The answers to all inputs of a request."""

    model: str
    answers: list[TracedAnswer]


class Token(BaseModel):
    """One token of a generated text."""

    text: str
    token: int
    experts: int
    effort: float | None = Field(
        None, description="of the whole text, where the request states a budget, but no max_experts"
    )
    stop: Literal["length", "deadline"] | None = None


class Refusal(BaseModel):
    """The rule that a request breaks, and a line that says why."""

    rule: str
    message: str


class RefusalBody(BaseModel):
    """The body of every response that is not an answer."""

    error: Refusal
