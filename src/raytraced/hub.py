"""Models as folders that can be shared: weights, a config and a page that tells what the model is; here or on the Hub."""

import json
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from raytraced.files import write_file
from raytraced.models.card import ModelCard
from raytraced.models.output import Model, num_parameters
from raytraced.models.table import find_model
from raytraced.saving import known_card, load, save
from raytraced.words import markdown_table, require

WEIGHTS, CONFIG, PAGE = "model.safetensors", "config.json", "README.md"
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
REPO_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
# what transformers calls the parts of a card
THEIR_WORDS = {
    "vocabulary": "vocab_size",
    "dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "tokenizer": "tokenizer",
}


def save_pretrained(
    model: Model, folder: str | Path, *, run: str | Path | None = None, name: str | None = None
) -> None:
    """Write a model's weights, config and page into a folder; `run` is the run folder whose figures the page tells."""
    folder, card = Path(folder), known_card(model, "shared")
    size = num_parameters(model)
    figures = {} if run is None else figures_of_run(Path(run), card, size)
    page = write_page(name or folder.resolve().name, card, size, figures)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save(model, folder / WEIGHTS)
        write_file(folder / CONFIG, json.dumps(config_values(card), indent=2) + "\n")
        write_file(folder / PAGE, page)
    except (OSError, ValueError):
        if made:  # nothing rather than a half
            shutil.rmtree(made[-1])
        raise


def from_pretrained(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Model:
    """The model of a folder, a file, a shipped model's name or a repository "owner/name" of the Hub, ready to evaluate."""
    path = Path(source)
    if not path.exists() and REPO_ID.fullmatch(str(source)):
        where = {"revision": revision, "token": token, "cache_dir": cache_dir}
        return load(download(str(source), local_files_only=local_files_only, **where))
    if not (path / WEIGHTS).exists():
        files = [file for file in (path, *path.glob("*")) if file.is_file()]
        if found := sorted(file.name for file in files if file.suffix in PICKLES):
            raise ValueError(f"{source}: {found[0]} is a pickle, which may run code when it is read; needs {WEIGHTS}")
    return load(source)


def push_to_hub(
    model: Model,
    repo_id: str,
    *,
    run: str | Path | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "A model of raytraced",
    revision: str | None = None,
    create_pr: bool | None = None,
) -> str:
    """Upload what `save_pretrained` writes, in one commit, to a repository that is made if need be; returns its address."""
    require(bool(REPO_ID.fullmatch(repo_id)), "repo_id", repr(repo_id), 'must be "owner/name"')
    hub = import_hub("push_to_hub")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, run=run, name=repo_id)
        api = hub.HfApi(token=token)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit: Any = {"commit_message": commit_message, "revision": revision, "create_pr": create_pr}
            made = api.upload_folder(repo_id=repo_id, folder_path=folder, **commit)
        except OSError as error:
            raise ValueError(f"{repo_id}: could not be uploaded: {first_line(error)}") from error
    return str(made.commit_url)


def download(repo_id: str, **where: Any) -> Path:
    """The file of weights of a repository, from the Hub or from its cache; no other file is asked for."""
    hub = import_hub("from_pretrained")
    try:
        return Path(hub.hf_hub_download(repo_id, WEIGHTS, library_name="raytraced", **where))
    except hub.errors.LocalEntryNotFoundError as error:
        raise ValueError(f"{repo_id}: is no folder here, is not in the cache, and the Hub cannot be asked") from error
    except hub.errors.EntryNotFoundError as error:
        raise ValueError(f"{repo_id}: holds no {WEIGHTS}; nothing else is read: a pickle could run code") from error
    except OSError as error:
        told = "is no folder here, and no repository that can be read"
        raise ValueError(f"{repo_id}: {told}: {first_line(error)}") from error


def import_hub(asked: str) -> Any:
    """huggingface_hub, which only a repository's name needs."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ImportError(f"{asked}: needs huggingface_hub for the Hub; pip install 'raytraced[hub]'") from error
    return huggingface_hub


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def config_values(card: ModelCard) -> dict[str, Any]:
    """A card as config.json has it: of a language model in the words of transformers, so that both read one folder."""
    values = {key: value for key, value in asdict(card).items() if value not in (None, {})}
    family, _ = find_model(card.model)
    if family != "gpt":
        return {"library_name": "raytraced", **values}
    parts = values.pop("spec") | values.pop("options")
    told = {theirs: parts.pop(ours) for ours, theirs in THEIR_WORDS.items() if ours in parts}
    layer = values.pop("model").removeprefix("gpt-")
    kind = {"model_type": "raytraced", "architectures": ["RaytracedForCausalLM"]}
    return {**kind, "layer": layer, **told, "layer_options": parts, **values}


def card_of(values: dict[str, Any]) -> ModelCard:
    """The card of a language model from what `config_values` made of it."""
    spec = {
        ours: values[theirs] for ours, theirs in THEIR_WORDS.items() if ours != "dim" and values.get(theirs) is not None
    }
    options = {"dim": values["hidden_size"], **values["layer_options"]}
    rest = {key: values[key] for key in ("task", "data", "training", "calibration") if values.get(key)}
    return ModelCard(model=f"gpt-{values['layer']}", spec=spec, options=options, **rest)


def figures_of_run(run: Path, card: ModelCard, size: int) -> dict[str, dict[str, float]]:
    """The figures of a run by split, from its summary; refused where they are another model's."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        splits = {split: summary[split] for split in ("validation", "test")}
        found = (summary["model"], summary["parameters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run}: is no finished run, its summary.json cannot be read: {first_line(error)}") from error
    if found != (card.model, size):
        raise ValueError(f"{run}: is a run of {found[0]} with {found[1]} parameters, not of this {card.model}")
    figures = {}
    for split, values in splits.items():
        plain = {name: value for name, value in values.items() if type(value) in (int, float)}
        figures[split] = plain | ({"multiply_adds": values["macs"]["total"]} if "macs" in values else {})
    return figures


def write_page(name: str, card: ModelCard, size: int, figures: dict[str, dict[str, float]]) -> str:
    """README.md: what the Hub reads in its head, then how to use the model, its figures, and how it came about."""
    is_text = find_model(card.model)[0] == "gpt"
    head = {
        "library_name": "raytraced",
        "pipeline_tag": "text-generation" if is_text else "image-classification",
        "tags": ["raytraced", "mixture-of-experts"],
    }
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    origin = f"trained on {card.data}" if card.data else "not trained by `raytraced train`"
    lines += [f"A mixture of experts, `{card.model}` of raytraced, {origin}; {size:,} parameters.", ""]
    lines += ["```python", "import raytraced as rt", "", f'model = rt.Model.from_pretrained("{name}")']
    if is_text:
        lines += ["", "import raytraced.transformers  # or so", "from transformers import AutoModelForCausalLM", ""]
        lines += [f'model = AutoModelForCausalLM.from_pretrained("{name}")']
    lines += ["```", ""]
    if figures:
        rows = [[key, *(in_short(figures[split].get(key, "")) for split in figures)] for key in figures["test"]]
        lines += ["## Figures", "", *markdown_table(["", *figures], rows), ""]
    if card.calibration:
        found = card.calibration
        lines += ["## When it stops", "", f"A sample may stop once its likeliest answer has {found['sure']:.3f}"]
        lines += [f'(`sure="calibrated"`), looked at after every {found["look"]}. On test data that gave:', ""]
        rows = [[how, *map(in_short, one.values())] for how, one in found.get("test", {}).items()]
        lines += [*markdown_table(["", *next(iter(found["test"].values()))], rows), ""] if rows else []
    parts = {"inputs and answers": card.spec, "layer": card.options, "training": card.training}
    lines += ["## How it came about", ""]
    for part, values in parts.items():
        told = {key: value for key, value in values.items() if value not in (None, {})}
        told.pop("tokenizer", None)  # a whole file, too long for a page
        rows = [[f"`{key}`", f"`{value}`"] for key, value in told.items()]
        lines += [*markdown_table([part, ""], rows), ""] if rows else []
    return "\n".join(lines)


def in_short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}" if value != "" else ""
