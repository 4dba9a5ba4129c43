"""Folders to share, on a disk or on the Hugging Face Hub: weights, a config and a page that describes the model."""

import json
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytraced.errors import install_extra, require
from raytraced.files import write_file
from raytraced.io.finding import find_weights
from raytraced.io.hub_page import run_figures, write_page
from raytraced.io.saving import known_card, load, save
from raytraced.io.tokenizer import tokenizer_files
from raytraced.models.card import ModelCard, translate_old_names
from raytraced.models.output import Model, num_parameters
from raytraced.models.registry import find_model
from raytraced.store.index import index_path, read_index
from raytraced.store.layout import STORE_FORMAT

WEIGHTS, CONFIG, PAGE = "model.safetensors", "config.json", "README.md"
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
REPO_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
# What transformers imports with trust_remote_code=True; without it the user imports the same classes.
CODE = "modeling_raytraced.py"
CODE_TEXT = """# The model is in the package raytraced: install raytraced from its repository, with its extra "transformers".
from raytraced.integrations.transformers import RaytracedConfig, RaytracedForCausalLM

__all__ = ["RaytracedConfig", "RaytracedForCausalLM"]
"""
AUTO_MAP = {
    "AutoConfig": "modeling_raytraced.RaytracedConfig",
    "AutoModelForCausalLM": "modeling_raytraced.RaytracedForCausalLM",
}
# The names that configurations of transformers have for entries of a card.
TRANSFORMERS_NAMES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "depth": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "context": "max_position_embeddings",
    "tokenizer": "tokenizer",
    "routing_input": "routing_input",
    "routing_dim": "routing_dim",
    "path_tokens": "path_tokens",
}


def save_pretrained(
    model: Model,
    folder: str | Path,
    *,
    run: str | Path | None = None,
    name: str | None = None,
    store: bool = False,
    max_shard_size: int | str | None = None,
) -> None:
    """Write a folder to share: model.safetensors, config.json and README.md, a page made of the model's card.

    The folder of a language model has its tokenizer, too, as transformers' AutoTokenizer reads it.

    Args:
        model: A model made by `raytraced.build` or `raytraced.load`.
        folder: The folder to write; it is created where there is none.
        run: A run folder; the page then shows its figures.
        name: The repository "owner/name" that the folder is for; the page's title and example. Without it the title is
            the folder's name, and the example loads the page's own folder.
        store: Whether model.safetensors is a store, from which each expert can be read by itself: see `raytraced.save`.
        max_shard_size: Of a store: the size above which it is written as several files and an index: see `raytraced.save`.
    """
    folder, card = Path(folder), known_card(model, "shared")
    size = num_parameters(model)
    figures = {} if run is None else run_figures(Path(run), card, size)
    page = write_page(name or folder.resolve().name, name or ".", card, size, figures)
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save(model, folder / WEIGHTS, store=store, max_shard_size=max_shard_size)
        write_file(folder / CONFIG, json.dumps(config_values(card), indent=2) + "\n")
        write_file(folder / PAGE, page)
        for file, content in transformers_files(card).items():
            write_file(folder / file, content)
    except (OSError, ValueError):
        if made:  # leave no incomplete folder
            shutil.rmtree(made[-1])
        raise


def from_pretrained(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    memory: int | str | None = None,
) -> Model:
    """Load a shared model, ready to evaluate. No pickle is read, so no file can run code.

    Args:
        source: A folder, a file, a run's name, a shipped model's name, or a repository "owner/name" of the Hub.
        revision: Branch, tag or commit of the repository.
        token: Access token of the Hub; True for the one that is stored, False for none.
        cache_dir: Folder that holds downloaded files.
        local_files_only: Whether to use downloaded files only.
        memory: Of a store: the most memory that its experts may take, such as "2 GB". Default: as much as all experts take.

    Returns:
        The model, in evaluation mode.
    """
    path = Path(source)
    if not path.exists() and REPO_ID.fullmatch(str(source)):
        where = {"revision": revision, "token": token, "cache_dir": cache_dir}
        return load(download(str(source), local_files_only=local_files_only, **where), memory=memory)
    if find_weights(path) is None:
        files = [file for file in (path, *path.glob("*")) if file.is_file()]
        if found := sorted(file.name for file in files if file.suffix in PICKLES):
            raise ValueError(f"{source}: {found[0]} is a pickle, which may run code when it is read; needs {WEIGHTS}")
    return load(source, memory=memory)


def push_to_hub(
    model: Model,
    repo_id: str,
    *,
    run: str | Path | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str = "Upload a raytraced model",
    revision: str | None = None,
    create_pr: bool | None = None,
) -> str:
    """Upload what `save_pretrained` writes to the Hub, in one commit.

    Args:
        model: A model made by `raytraced.build` or `raytraced.load`.
        repo_id: The repository, "owner/name"; it is created where there is none.
        run: A run folder; the page then shows its figures.
        private: Whether a new repository is private.
        token: Access token of the Hub; True for the one that is stored, False for none.
        commit_message: Message of the commit.
        revision: Branch to commit to.
        create_pr: Whether to open a pull request instead.

    Returns:
        The address of the commit.
    """
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
    """The path of a repository's weights, or of their index, from the Hub or from the cache; nothing else is downloaded."""
    hub = import_hub("from_pretrained")

    def fetch(file: str) -> Path:
        return Path(hub.hf_hub_download(repo_id, file, library_name="raytraced", **where))

    try:
        try:
            return fetch(WEIGHTS)
        except hub.errors.EntryNotFoundError as missing:
            try:
                index = fetch(index_path(Path(WEIGHTS)).name)
            except hub.errors.EntryNotFoundError:
                raise missing from None
        for file in read_index(index, STORE_FORMAT).tensors:
            with suppress(hub.errors.EntryNotFoundError):  # who opens the store says which file is missing
                fetch(file)
        return index
    except hub.errors.LocalEntryNotFoundError as error:
        raise ValueError(
            f"{repo_id}: is not a folder here and not in the cache, and the Hub cannot be reached"
        ) from error
    except hub.errors.EntryNotFoundError as error:
        raise ValueError(f"{repo_id}: holds no {WEIGHTS}; nothing else is read: a pickle could run code") from error
    except OSError as error:
        problem = "is not a folder here, and not a repository that can be read"
        raise ValueError(f"{repo_id}: {problem}: {first_line(error)}") from error


def import_hub(asked: str) -> Any:
    """The package huggingface_hub, which folders on the disk do not need."""
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise ImportError(f"{asked}: needs huggingface_hub for the Hub; {install_extra('hub')}") from error
    return huggingface_hub


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def config_values(card: ModelCard) -> dict[str, Any]:
    """A card as the values of config.json; a language model's have the names of transformers, which reads the folder too."""
    values = {key: value for key, value in asdict(card).items() if value not in (None, {}, [])}
    family, _ = find_model(card.model)
    if family != "gpt":
        return {"library_name": "raytraced", **values}
    parts = values.pop("spec") | values.pop("options")
    sizes = {theirs: parts.pop(ours) for ours, theirs in TRANSFORMERS_NAMES.items() if ours in parts}
    layer = values.pop("model").removeprefix("gpt-")
    kind = {"model_type": "raytraced", "architectures": ["RaytracedForCausalLM"], "auto_map": AUTO_MAP}
    return {**kind, "layer": layer, **sizes, "layer_options": parts, **values}


def transformers_files(card: ModelCard) -> dict[str, str]:
    """What transformers reads beside config.json and the weights, by name: the tokenizer and where the code is."""
    if find_model(card.model)[0] != "gpt":
        return {}
    return {**tokenizer_files(card), CODE: CODE_TEXT}


def card_of(values: dict[str, Any]) -> ModelCard:
    """The card of a language model from the values of its config.json; options may have their old names."""
    values = translate_old_names(values)
    spec = {
        ours: values[theirs]
        for ours, theirs in TRANSFORMERS_NAMES.items()
        if ours != "dim" and values.get(theirs) is not None
    }
    options = {"dim": values["hidden_size"], **values["layer_options"]}
    rest = {
        key: values[key] for key in ("task", "data", "training", "calibration", "plugins", "dial") if values.get(key)
    }
    return ModelCard(model=f"gpt-{values['layer']}", spec=spec, options=options, **rest)
