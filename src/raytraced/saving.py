"""Trained models as files: weights and all that is needed to use them, in one safetensors file that cannot run code."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from torch import Tensor, nn

from raytraced.models import build_model
from raytraced.training.checkpoint import DamagedCheckpointError, checksum, read_metadata
from raytraced.training.files import write_file

FORMAT = "raytraced-model-1"
PRETRAINED = Path(__file__).parent / "pretrained"


@dataclass(frozen=True)
class ModelCard:
    """How to build a model again, how its images are normalised, what its classes are, and how it came about."""

    model: str
    image_shape: tuple[int, int, int]
    num_classes: int
    options: dict[str, Any]
    data: str
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    training: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model with fresh weights."""
        return build_model(self.model, self.image_shape, self.num_classes, **self.options)


def save_model(path: Path, tensors: Mapping[str, Tensor], card: ModelCard) -> None:
    """Write a model's tensors and card to a file, whole or not at all."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(asdict(card))
    path.parent.mkdir(exist_ok=True)
    write_file(path, encode(tensors, {"format": FORMAT, "card": text, "sha256": checksum(tensors, text)}))


def load(source: str | Path) -> nn.Module:
    """The trained model of a run folder, a model.safetensors file or a shipped model's name, ready to evaluate."""
    return load_with_card(source)[0]


def load_with_card(source: str | Path) -> tuple[nn.Module, ModelCard]:
    """A trained model and how its images are to be prepared."""
    path = find_model(source)
    content = path.read_bytes()
    metadata = read_metadata(path, content)
    if metadata.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path}: foreign: has {metadata.get('format', 'no format')}, not {FORMAT}")
    try:
        tensors = decode(content)
    except SafetensorError as error:
        raise DamagedCheckpointError(f"{path}: cut or altered: {error}") from error
    if checksum(tensors, metadata["card"]) != metadata.get("sha256"):
        raise DamagedCheckpointError(f"{path}: altered: its content does not match its checksum")
    values: dict[str, Any] = json.loads(metadata["card"])
    card = ModelCard(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})  # type: ignore[arg-type]
    model = card.build()
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: its tensors do not fit model {card.model!r} of this version ({reason})") from error
    return model.eval(), card


def find_model(source: str | Path) -> Path:
    """The file that a run folder, a path or a shipped model's name leads to."""
    path = Path(source)
    if path.is_dir():
        if (path / "model.safetensors").exists():
            return path / "model.safetensors"
        unfinished = (path / "config.yaml").exists()
        remedy = f"; the run is not over: `raytraced resume {path}`" if unfinished else ""
        raise ValueError(f"{path}: holds no model.safetensors{remedy}")
    if path.is_file():
        return path
    shipped = PRETRAINED / f"{source}.safetensors"
    if shipped.is_file():
        return shipped
    names = ", ".join(sorted(file.stem for file in PRETRAINED.glob("*.safetensors")))
    raise ValueError(f"{source}: is neither a run folder, a file{f', nor a shipped model ({names})' if names else ''}")
