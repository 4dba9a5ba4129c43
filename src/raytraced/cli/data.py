"""The sub-commands of `raytraced data`; heavy imports are where they are used."""

from pathlib import Path

from raytraced.errors import did_you_mean, printable, require
from raytraced.tasks.registry import catalog


def list_data(data_root: str | None = None) -> None:
    """List the data sets: cached or not, size, source."""
    from raytraced.data.cache import cache_root, is_cached
    from raytraced.tables import make_table, print_table

    folder, known, rows = cache_root(data_root), catalog(), []
    for name, entry in known.items():
        state = "cached" if is_cached(folder, *entry.parts) else "not cached"
        size = f"{sum(part.num_bytes for part in entry.parts) / 1e6:.0f} MB" if entry.parts else ""
        state = state if entry.parts else "in the package"
        rows.append({"name": name, "contents": entry.contents, "size": size, "state": state})
    print_table(make_table(rows))
    print(f"Cache: {printable(folder)}")
    print("Sources, tried in this order after the cache and a folder named by RAYTRACED_DATA:")
    for name, entry in known.items():
        for source in entry.parts[0].sources if len(entry.parts) == 1 else ():
            print(f"  {name:<14} {source}")
    print("Your data: the path of a folder with one sub-folder per class, an .npz file, a text, or a folder of texts.")


def get(names: list[str], data_root: str | None = None) -> None:
    """Download data sets into the cache and verify every array.

    Args:
        names: One or more of mnist, fashion-mnist, cifar10, union (all three), enwik8, mix (five texts).
    """
    from raytraced.data.cache import cache_root, entry_folder, obtain

    known, folder = catalog(), cache_root(data_root)
    if not names:
        raise ValueError(f"names: none was named; the data sets are {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ValueError(f"data set {name!r}: unknown; {did_you_mean(name, known)}")
    for name in dict.fromkeys(names):
        if not known[name].parts:
            print(f"{name}: in the package, nothing to get")
    for part in {part.name: part for name in names for part in known[name].parts}.values():
        obtain(part, folder, hashed=True)
        size = f"{part.num_bytes / 1e6:.0f} MB in {printable(entry_folder(folder, part))}"
        print(f"{part.name}: {len(part.arrays)} arrays verified, {size}")


def show(name: str, output: str | None = None, data_root: str | None = None, skip_bad: bool = False) -> None:
    """Draw a contact sheet with labels as a PNG and count the images of each class.

    Args:
        name: A data set, or the path of an image folder or of an .npz file.
        output: The PNG file to write (default: NAME.png in the current folder).
    """
    path = Path(output) if output is not None else Path(f"{Path(name).stem}.png")
    require(path.suffix.lower() == ".png", "output", repr(str(path)), "must end in .png")
    require(path.parent.is_dir(), "output", repr(str(path)), f"folder {str(path.parent)!r} does not exist")

    from raytraced.tables import make_table, print_table
    from raytraced.tasks.images.loading import load
    from raytraced.tasks.images.sheet import MAX_ROWS, contact_sheet

    dataset = load(name, data_root, skip_bad=skip_bad)
    contact_sheet(dataset.train.images.numpy(), dataset.train.labels.numpy(), dataset.class_names).save(path)

    num, splits = dataset.num_classes, dataset.splits.items()
    counts = {title: split.labels.bincount(minlength=num).tolist() for title, split in splits}
    columns = {"class": dataset.class_names, **counts}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    table = make_table(rows)
    table.add_section()
    table.add_row("all", *(f"{sum(column):,}" for column in counts.values()))
    print_table(table)
    shape = "x".join(map(str, dataset.image_shape))
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in (dataset.mean, dataset.std))
    print(f"{printable(dataset.name)}: images {shape}, mean {mean}, deviation {std}")
    if dataset.num_classes > MAX_ROWS:
        print(f"The sheet shows the first {MAX_ROWS} of {dataset.num_classes} classes.")
    print(f"Contact sheet: {printable(path)}")
