"""A public set's arrays: from the cache, else from the first place that has them, always verified."""

import os
from pathlib import Path

from raytraced.data import cache
from raytraced.data.sources import Arrays, Files, PublicSet, Source, read_tar, say, show_bar


class UnavailableError(OSError):
    """No source could give a data set."""


def obtain(public_set: PublicSet, root: Path, *, hashed: bool = False) -> Arrays:
    """Return the arrays of a public set from the cache, fetching them first where they are missing or altered."""
    try:
        if (arrays := cache.read_entry(root, public_set, hashed=hashed)) is not None:
            return arrays
    except cache.DamagedError:
        pass  # looked at again under the lock: another process may be replacing it
    with cache.locked(root, public_set):
        try:
            if (arrays := cache.read_entry(root, public_set, hashed=hashed)) is not None:
                return arrays
        except cache.DamagedError as error:
            say(f"{public_set.name}: the cached copy is discarded and fetched again: {error}")
        cache.discard_entry(root, public_set)
        cache.write_entry(root, public_set, fetch(public_set, root))
        arrays = cache.read_entry(root, public_set)
    if arrays is None:
        raise FileNotFoundError(f"{root}: {public_set.name} was removed while it was being read")
    return arrays


def fetch(public_set: PublicSet, root: Path) -> Arrays:
    """Return the verified arrays from the first source that has them; if none has, tell why, source by source."""
    folders = [root]
    if named := os.environ.get("RAYTRACED_DATA"):
        folders.insert(0, Path(named).expanduser())
    failures = []
    sources: tuple[Path | Source, ...] = (*folders, *public_set.sources)
    for source in sources:
        try:
            if isinstance(source, Path):
                arrays = from_folder(source, public_set)
            else:
                say(f"{public_set.name}: trying {source}")
                arrays = from_source(source, public_set, root)
            say(f"{public_set.name}: taken from {source}, every checksum matches")
            return arrays
        except (ValueError, OSError) as error:
            if cache.is_out_of_space(error):
                raise
            failures.append(f"  - {source}: {error}")
            if not isinstance(source, Path):
                say(f"{public_set.name}: failed: {error}")
    place = f"{root / public_set.folders[0]} (or name the folder that has them with RAYTRACED_DATA)"
    again = f"raytraced data get {public_set.name}{'' if root == cache.cache_root() else f' --root {root}'}"
    remedy = f"Put its original files into {place}, then run:\n  {again}"
    raise UnavailableError("\n".join([f"data set {public_set.name}: no source could give it", *failures, remedy]))


def from_folder(folder: Path, public_set: PublicSet) -> Arrays:
    """Return the arrays of original files, or of an archive of them, that lie in one of the places in a folder."""
    problems = []
    for place in (folder / name for name in public_set.folders):
        try:
            archive = next((place / name for name in public_set.archives if (place / name).is_file()), None)
            if archive is not None:
                return _verified(public_set, read_tar(archive, public_set.wanted))
            files = [place / name for name in sorted(public_set.wanted) if (place / name).is_file()]
            if files:
                return _verified(public_set, {path.name: path.read_bytes() for path in files})
        except ValueError as error:
            problems.append(f"in {place.name}: {error}")
    raise ValueError("; ".join(problems) or f"no original files in {', '.join(public_set.folders)}")


def from_source(source: Source, public_set: PublicSet, root: Path) -> Arrays:
    """Return the verified arrays of one source; what it downloads goes into a temporary folder."""
    with cache.working_folder(root, public_set.name) as folder, show_bar(public_set.name) as tell:
        return _verified(public_set, source.fetch(public_set.wanted, folder, tell))


def _verified(public_set: PublicSet, files: Files) -> Arrays:
    try:
        arrays = public_set.decode(files)
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: not found") from None
    for key, info in public_set.arrays.items():
        cache.check_array(f"{public_set.name} {key}", arrays[key], info)
    return arrays
