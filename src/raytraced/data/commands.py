"""The sub-commands of `raytraced data`; whatever is heavy is imported where it is used."""

from pathlib import Path


def list_data(root: str | None = None) -> None:
    """List the data sets: cached or not, size, source.

    Args:
        root: Cache folder (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from .cache import cache_root, entry_folder
    from .catalog import PUBLIC_SETS

    folder = cache_root(root)
    table = Table("name", "images", "shape", "classes", "size", "state", box=SIMPLE_HEAD)
    table.add_row("digits", "1,797", "1x8x8", "10", "0.05 MB", "in the package")
    for name, public_set in PUBLIC_SETS.items():
        shapes = [public_set.arrays[key].shape for key in ("train_images", "test_images")]
        files = [entry_folder(folder, public_set) / f"{key}.npy" for key in public_set.arrays]
        table.add_row(
            name,
            f"{sum(shape[0] for shape in shapes):,}",
            "x".join(map(str, shapes[0][1:])),
            str(len(public_set.class_names)),
            f"{public_set.num_bytes / 1e6:.0f} MB",
            "cached" if all(file.is_file() for file in files) else "not cached",
        )
    table.add_row("union", "200,000", "1x28x28", "30", "", "made of the three above")
    console = Console()
    console.print(table)
    print(f"Cache: {folder}")
    print("Sources, tried in this order after the cache and a folder named by RAYTRACED_DATA:")
    for name, public_set in PUBLIC_SETS.items():
        for source in public_set.sources:
            print(f"  {name:<14} {source}")
    print("Your own: the path of a folder with one sub-folder a class, or of an .npz file.")


def get(names: list[str], root: str | None = None) -> None:
    """Download data sets into the cache and verify every array.

    Args:
        names: One or more of mnist, fashion-mnist, cifar10 (digits needs no download, union gets all three).
        root: Cache folder (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).
    """
    from .cache import cache_root, entry_folder
    from .catalog import NAMES, PUBLIC_SETS

    if not names:
        raise ValueError(f"names: none given, the data sets are {', '.join(NAMES)}")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"data set {name!r}: unknown, the names are {', '.join(NAMES)}")
    from .sources import obtain

    wanted = list(dict.fromkeys(part for name in names for part in (PUBLIC_SETS if name == "union" else [name])))
    for name in wanted:
        if name == "digits":
            print("digits: in the package, nothing to get")
            continue
        public_set, folder = PUBLIC_SETS[name], cache_root(root)
        obtain(public_set, folder, hashed=True)
        print(f"{name}: {len(public_set.arrays)} arrays verified, {public_set.num_bytes / 1e6:.0f} MB", end=" ")
        print(f"in {entry_folder(folder, public_set)}")


def show(name: str, root: str | None = None, output: str | None = None) -> None:
    """Draw a contact sheet with labels as a PNG and count the images of each class.

    Args:
        name: A data set, or the path of an image folder or of an .npz file.
        root: Cache folder (default: $RAYTRACED_HOME/data, else raytraced/data in the user's cache folder).
        output: The PNG file to write (default: NAME.png in the current folder).
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from .loading import load
    from .sheet import MAX_ROWS, contact_sheet

    path = Path(output) if output is not None else Path(f"{Path(name).stem}.png")
    if path.suffix.lower() != ".png":
        raise ValueError(f"output={str(path)!r}: must end in .png")
    if not path.parent.is_dir():
        raise ValueError(f"output={str(path)!r}: folder {str(path.parent)!r} does not exist")
    dataset = load(name, root)
    contact_sheet(dataset.train.images.numpy(), dataset.train.labels.numpy(), dataset.class_names).save(path)

    table = Table("class", box=SIMPLE_HEAD)
    splits = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    counts = [split.labels.bincount(minlength=dataset.num_classes).tolist() for split in splits.values()]
    for title in splits:
        table.add_column(title, justify="right")
    for label, class_name in enumerate(dataset.class_names):
        table.add_row(escape(class_name), *(f"{column[label]:,}" for column in counts))
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
