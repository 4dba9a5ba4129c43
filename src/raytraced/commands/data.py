"""The sub-commands of `raytraced data`; whatever is heavy is imported where it is used."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raytraced.data.sources import Entry


def list_data(root: str | None = None) -> None:
    """List the data sets: cached or not, size, source.

    Args:
        root: Cache folder (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from raytraced.data.cache import cache_root, entry_folder

    folder, catalog = cache_root(root), _catalog()
    table = Table("name", "contents", "size", "state", box=SIMPLE_HEAD)
    for name, entry in catalog.items():
        files = [entry_folder(folder, part) / f"{key}.npy" for part in entry.parts for key in part.arrays]
        state = "cached" if all(file.is_file() for file in files) else "not cached"
        size = f"{sum(part.num_bytes for part in entry.parts) / 1e6:.0f} MB"
        table.add_row(name, entry.contents, *((size, state) if files else ("", "in the package")))
    Console().print(table)
    print(f"Cache: {folder}")
    print("Sources, tried in this order after the cache and a folder named by RAYTRACED_DATA:")
    for name, entry in catalog.items():
        for source in entry.parts[0].sources if len(entry.parts) == 1 else ():
            print(f"  {name:<14} {source}")
    print("Your own: the path of a folder with one sub-folder a class, or of an .npz file.")


def get(names: list[str], root: str | None = None) -> None:
    """Download data sets into the cache and verify every array.

    Args:
        names: One or more of mnist, fashion-mnist, cifar10 (digits needs no download, union gets all three).
        root: Cache folder (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).
    """
    from raytraced.data.cache import cache_root, entry_folder
    from raytraced.data.obtain import obtain
    from raytraced.words import did_you_mean

    catalog, folder = _catalog(), cache_root(root)
    if not names:
        raise ValueError(f"names: none given, the data sets are {', '.join(catalog)}")
    for name in names:
        if name not in catalog:
            raise ValueError(f"data set {name!r}: unknown; {did_you_mean(name, catalog)}")
    for name in dict.fromkeys(names):
        if not catalog[name].parts:
            print(f"{name}: in the package, nothing to get")
    for part in {part.name: part for name in names for part in catalog[name].parts}.values():
        obtain(part, folder, hashed=True)
        size = f"{part.num_bytes / 1e6:.0f} MB in {entry_folder(folder, part)}"
        print(f"{part.name}: {len(part.arrays)} arrays verified, {size}")


def show(name: str, root: str | None = None, output: str | None = None, skip_bad: bool = False) -> None:
    """Draw a contact sheet with labels as a PNG and count the images of each class.

    Args:
        name: A data set, or the path of an image folder or of an .npz file.
        root: Cache folder (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).
        output: The PNG file to write (default: NAME.png in the current folder).
        skip_bad: Leave out the files of a folder that cannot be read.
    """
    path = Path(output) if output is not None else Path(f"{Path(name).stem}.png")
    if path.suffix.lower() != ".png":
        raise ValueError(f"output={str(path)!r}: must end in .png")
    if not path.parent.is_dir():
        raise ValueError(f"output={str(path)!r}: folder {str(path.parent)!r} does not exist")

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from raytraced.tasks.images.loading import load
    from raytraced.tasks.images.sheet import MAX_ROWS, contact_sheet

    dataset = load(name, root, skip_bad=skip_bad)
    contact_sheet(dataset.train.images.numpy(), dataset.train.labels.numpy(), dataset.class_names).save(path)

    table, counts = Table("class", box=SIMPLE_HEAD), []
    for title in ("train", "validation", "test"):
        table.add_column(title, justify="right")
        counts.append(getattr(dataset, title).labels.bincount(minlength=dataset.num_classes).tolist())
    for class_name, *row in zip(dataset.class_names, *counts, strict=True):
        table.add_row(escape(class_name), *(f"{count:,}" for count in row))
    table.add_section()
    table.add_row("all", *(f"{sum(column):,}" for column in counts))
    console = Console()
    console.print(table)
    shape = "x".join(map(str, dataset.image_shape))
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (dataset.mean, dataset.std))
    console.print(f"{dataset.name}: images {shape}, mean {mean}, deviation {std}", markup=False, highlight=False)
    if dataset.num_classes > MAX_ROWS:
        console.print(f"The sheet shows the first {MAX_ROWS} of {dataset.num_classes} classes.")
    console.print(f"Contact sheet: {path}", markup=False, highlight=False, soft_wrap=True)


def _catalog() -> "dict[str, Entry]":
    """Every data set that a task lists."""
    from raytraced.tasks.table import TASKS

    modules = [import_module(f"raytraced.tasks.{info.names.partition(':')[0]}") for info in TASKS.values()]
    return {name: entry for module in modules for name, entry in module.CATALOG.items()}
