"""The Open Inference Protocol, version 2: `/v2/…`, for image classifiers.

Tensors come and go as JSON or, as Triton's clients prefer, as bytes behind the JSON.

Legend: n images, C channels, H and W height and width, Y classes.
"""

from math import prod
from typing import Annotated, Any

import numpy as np
import torch
from fastapi import Depends, FastAPI, Request
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, WrapValidator
from pydantic.json_schema import models_json_schema
from starlette.responses import Response
from torch import Tensor

from raytraced import __version__
from raytraced.serve.answering import AnswerFields
from raytraced.serve.engine import Engine, json_response, to_json
from raytraced.serve.errors import check_fields
from raytraced.serve.inputs import choose_model, is_whole_number
from raytraced.serve.limits import RefusedError, shorten
from raytraced.serve.models import Served
from raytraced.serve.schemas import MAX_IMAGES, ClassifyOptions, accept_array

REFERENCE = "#/components/schemas/{model}"
VERSION = "1"  # of every model
VERSION_PATH = "/v2/models/{name}/versions/{version}"
HEADER_LENGTH = "Inference-Header-Content-Length"
DATATYPES: dict[str, Any] = {"FP32": np.float32, "INT64": np.int64, "BYTES": np.object_}
OUTPUT_TYPES = {"probabilities": "FP32", "labels": "BYTES", "experts": "INT64", "macs": "INT64", "effort": "FP32"}
# parameters of Triton's clients that concern servers of many kinds, and change nothing here
IGNORED_PARAMETERS = ("binary_data_output", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout")


class TensorInput(BaseModel):
    """One input tensor."""

    name: str = Field(max_length=100)
    datatype: str = Field(max_length=10)
    shape: list[int] = Field(min_length=1, max_length=8)
    data: Annotated[list[Any] | None, WrapValidator(accept_array)] = Field(
        None, description="None where the data is behind the JSON"
    )
    parameters: dict[str, Any] = {}


class RequestedOutput(BaseModel):
    """One output tensor that is asked for."""

    name: str = Field(max_length=100)
    parameters: dict[str, Any] = {}


class InferRequest(BaseModel):
    """A request of the protocol; `parameters` takes the options of /api/predict."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    id: str | None = Field(None, max_length=1000)
    inputs: list[TensorInput] = Field(min_length=1, max_length=1)
    outputs: list[RequestedOutput] | None = None
    parameters: dict[str, Any] = {}


def protocol_schemas() -> dict[str, Any]:
    """The schemas of requests that may have bytes behind their JSON, which FastAPI cannot read and so does not document."""
    _, found = models_json_schema([(InferRequest, "validation")], ref_template=REFERENCE)
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def check_version(name: str, version: str) -> None:
    """Refuse versions of models that there are not."""
    if version != VERSION:
        rule = f"{shorten(name)} has version {VERSION} only; leave the version out"
        raise RefusedError(404, "model_version", f"model_version={shorten(version)}: {rule}")


class InferenceProtocol:
    """The paths.

    Args:
        engine: What computes.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add_paths(self, api: FastAPI) -> None:
        """Connect paths with methods."""
        options: dict[str, Any] = {"response_model": None, "tags": ["Open Inference Protocol"]}
        schema = {"$ref": REFERENCE.format(model="InferRequest")}
        body = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
        api.add_api_route("/v2", self.show_server, summary="The server", **options)
        api.add_api_route("/v2/health/live", self.live, summary="Whether the process is alive", **options)
        api.add_api_route("/v2/health/ready", self.ready, summary="Whether requests are accepted", **options)
        for path, more in (("/v2/models/{name}", {}), (VERSION_PATH, {"dependencies": [Depends(check_version)]})):
            each = options | more
            api.add_api_route(path, self.show_model, summary="One classifier", **each)
            api.add_api_route(f"{path}/ready", self.model_ready, summary="Whether it is loaded", **each)
            api.add_api_route(
                f"{path}/infer",
                self.infer,
                methods=["POST"],
                summary="Answers to images",
                openapi_extra=body,
                **each,
            )

    async def show_server(self) -> Response:
        return json_response({"name": "raytraced", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def live(self) -> Response:
        return json_response({"live": True})

    async def ready(self) -> Response:
        if self.engine.traffic.shutting_down:
            raise RefusedError(503, "shutting_down", "the server is shutting down and accepts no new requests")
        return json_response({"ready": True})

    async def model_ready(self, name: str) -> Response:
        return json_response({"name": choose_model(name, False, self.engine.models).name, "ready": True})

    async def show_model(self, name: str) -> Response:
        served = choose_model(name, False, self.engine.models)
        shapes = {"probabilities": [-1, len(served.labels)]}
        outputs = [
            {"name": output, "datatype": datatype, "shape": shapes.get(output, [-1])}
            for output, datatype in OUTPUT_TYPES.items()
            if output != "effort" or served.model.card.dial
        ]
        inputs = [{"name": "images", "datatype": "UINT8", "shape": [-1, *served.image_shape]}]
        about = {"name": served.name, "versions": [VERSION], "platform": "raytraced"}
        return json_response(about | {"inputs": inputs, "outputs": outputs})

    async def infer(self, request: Request, name: str) -> Response:
        body, binary = await self.split_body(await request.body(), request.headers.get(HEADER_LENGTH))
        served = choose_model(name, False, self.engine.models)
        parameters = {key: value for key, value in body.parameters.items() if key not in IGNORED_PARAMETERS}
        options = self.engine.classify_options(check_fields(ClassifyOptions, parameters), served)
        images = list(read_tensor(body.inputs[0], binary, served).split(1))
        answers = dict[int, AnswerFields]()
        async for number, answer in self.engine.answers(request.scope["arrived"], images, **options):
            answers[number] = answer
        return write_response(body, served, [answers[number] for number in range(len(images))])

    async def split_body(self, body: bytes, header_length: str | None) -> tuple[InferRequest, bytes]:
        """The JSON of a body, and the bytes behind it."""
        length = len(body)
        if header_length is not None:
            if not header_length.isdigit() or int(header_length[:20]) > len(body):
                rule = f"must be a whole number, at most {len(body)}, the length of the body"
                raise RefusedError(422, "header", f"{HEADER_LENGTH}={shorten(header_length)}: {rule}")
            length = int(header_length)
        try:
            fields = await self.engine.parse_json(body[:length])
        except (ValueError, RecursionError) as error:
            raise RefusedError(422, "json_invalid", f"body: must be JSON ({shorten(str(error))})") from None
        if not isinstance(fields, dict):
            raise RefusedError(422, "json_invalid", f"body={shorten(fields)}: must be a JSON object")
        return check_fields(InferRequest, fields), body[length:]


def read_tensor(given: TensorInput, binary: bytes, served: Served) -> Tensor:
    """The images of a request, uint8 (n, C, H, W)."""
    shape, expected = tuple(given.shape), served.image_shape
    if given.name != "images" or given.datatype != "UINT8":
        message = f"inputs[0]: is {shorten(given.name)} of {shorten(given.datatype)}, must be images of UINT8"
        raise RefusedError(422, "input", message)
    if len(shape) != 4 or shape[1:] != expected or not 1 <= shape[0] <= MAX_IMAGES:
        rule = f"must be (n, {', '.join(map(str, expected))}) with n in 1 … {MAX_IMAGES}"
        raise RefusedError(422, "shape", f"inputs[0].shape={shorten(shape)}: {rule}")
    if given.data is None:
        size = given.parameters.get("binary_data_size")
        if size != len(binary) or len(binary) != prod(shape):
            rule = f"must be data, or binary_data_size={prod(shape)} and as many bytes behind the JSON"
            raise RefusedError(422, "data", f"inputs[0]: has {len(binary):,} bytes, {rule}")
        return torch.frombuffer(bytearray(binary), dtype=torch.uint8).reshape(shape)
    if isinstance(given.data, np.ndarray):
        if given.data.size != prod(shape):
            rule = f"must be {prod(shape):,} whole numbers in 0 … 255"
            raise RefusedError(422, "data", f"inputs[0].data: has {given.data.size:,} values, {rule}")
        return torch.from_numpy(given.data.reshape(shape).copy())
    flat = given.data
    while flat and isinstance(flat[0], list):
        flat = [one for row in flat for one in (row if isinstance(row, list) else [row])]
    fits = len(flat) == prod(shape) and all(is_whole_number(one) and 0 <= one <= 255 for one in flat)
    if not fits:
        rule = f"must be {prod(shape):,} whole numbers in 0 … 255"
        raise RefusedError(422, "data", f"inputs[0].data: has {len(flat):,} values, {rule}")
    return torch.from_numpy(np.array(flat, dtype=np.uint8).reshape(shape))


def write_response(body: InferRequest, served: Served, answers: list[AnswerFields]) -> Response:
    """The outputs that were asked for, by default all, as JSON or as bytes behind it."""
    has_budget = any(body.parameters.get(name) is not None for name in ("experts", "effort"))
    known = [name for name in OUTPUT_TYPES if name != "effort" or has_budget]
    answers = [{"effort": 0.0} | answer for answer in answers]  # 0: another limit ended the answer
    names = known if body.outputs is None else [output.name for output in body.outputs]
    for name in names:
        if name not in known:
            message = f"outputs: {shorten(name)} is not an output, must be one of {', '.join(known)}"
            raise RefusedError(422, "output", message)
    as_bytes = dict.fromkeys(names, bool(body.parameters.get("binary_data_output", False)))
    for output in body.outputs or ():
        as_bytes[output.name] = bool(output.parameters.get("binary_data", as_bytes[output.name]))
    outputs, contents = [], []
    for name in names:
        values = np.array(
            [answer["label" if name == "labels" else name] for answer in answers], dtype=DATATYPES[OUTPUT_TYPES[name]]
        )
        written: dict[str, Any] = {"name": name, "datatype": OUTPUT_TYPES[name], "shape": list(values.shape)}
        if as_bytes[name]:
            contents.append(tensor_bytes(values))
            written["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            written["data"] = values.ravel().tolist()
        outputs.append(written)
    fields = {"model_name": served.name, "model_version": VERSION, "outputs": outputs}
    text = to_json(fields if body.id is None else fields | {"id": body.id})
    if not contents:
        return Response(text, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(text))}
    return Response(b"".join((text, *contents)), headers=headers, media_type="application/octet-stream")


def tensor_bytes(values: NDArray[Any]) -> bytes:
    """A tensor as the protocol's bytes: numbers in little-endian order, texts each behind its length."""
    if values.dtype != np.object_:
        return values.astype(values.dtype.newbyteorder("<")).tobytes()
    texts = [text.encode() for text in values.ravel().tolist()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
