"""Whose files a process runs: the user's own, which nobody else can have written, and what a folder's name means."""

from __future__ import annotations

import grp
import hashlib
import logging
import os
import pwd
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_support import KERNEL, compiled, compiled_once, files, folder, forget_kernels, nothing_said
from cpu_support import fresh_process

from fusednorm import choice, storage
from fusednorm.backends.cpu.compiler import Kernel, cache_directory, load

__all__ = ["compiled", "compiled_once", "folder", "nothing_said"]  # fixtures

OTHER = 54321  # a user that is neither root nor the one who runs the tests
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")


def detail(name: str = "kernel cache") -> str:
    """What ``fusednorm doctor`` says of a cache."""
    (found,) = [one.details[name] for one in choice.backends() if one.name == "cpu"]
    return found


def poison(path: Path) -> None:
    """A file whose digest is right and whose code would not run."""
    content = b"\n".join((b"", b"symbol", b"code"))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    path.chmod(0o600)


def give_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER)


def opened(mode: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.chmod(path.stat().st_mode | mode)

    return change


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.rename(path.with_name("elsewhere"))
        make(path)

    return change


def link_to_what_was(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def listen(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


CHANGES = [
    pytest.param(give_away, "belongs to the user 54321", marks=needs_root, id="another's"),
    pytest.param(opened(0o020), "can be written by other users", id="group may write"),
    pytest.param(opened(0o002), "can be written by other users", id="others may write"),
]
FILE_CHANGES = [
    *CHANGES,
    pytest.param(replaced(os.mkfifo), "is no plain file", id="FIFO"),
    pytest.param(replaced(link_to_what_was), "is no plain file", id="symbolic link"),
    pytest.param(replaced(Path.mkdir), "is no plain file", id="folder"),
    pytest.param(replaced(listen), "is no plain file", id="socket"),
    pytest.param(
        replaced(lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))),
        "is no plain file", marks=needs_root, id="endless device",
    ),
]  # fmt: skip
FOLDER_CHANGES = [
    *CHANGES,
    pytest.param(replaced(Path.touch), "is no folder", id="file"),
    pytest.param(replaced(os.mkfifo), "is no folder", id="FIFO"),
]


@pytest.mark.parametrize(("change", "word"), FILE_CHANGES)
def test_a_file_that_others_can_have_written_is_not_run(
    change: Callable[[Path], None], word: str, folder: Path, compiled: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    path = cache_directory() / KERNEL.name
    poison(path)
    change(path)
    load(KERNEL)
    assert compiled == [KERNEL]
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert word in record.message
    assert str(path) in record.message


@pytest.mark.parametrize("changes_root", [False, True], ids=["folder", "root"])
@pytest.mark.parametrize(("change", "word"), FOLDER_CHANGES)
def test_a_folder_that_others_can_have_written_is_not_used(
    change: Callable[[Path], None],
    word: str,
    changes_root: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[Kernel],
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path / "root"
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(root))
    forget_kernels(monkeypatch)
    path = cache_directory() / KERNEL.name
    poison(path)
    changed = root if changes_root else path.parent
    before = files(tmp_path)
    change(changed)
    load(KERNEL)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL, KERNEL]
    assert [name for name in files(tmp_path) if name not in (root.name, path.parent.name)] == before
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    for said in (record.message, detail()):
        assert word in said
        assert str(changed) in said
    assert "not used" in detail()


def test_a_symbolic_link_in_the_place_of_the_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = cache_directory() / KERNEL.name
    poison(path)
    replaced(link_to_what_was)(path.parent)
    load(KERNEL)
    assert f"{path.parent} is no folder" in caplog.text


def test_folders_and_files_are_made_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Kernel]
) -> None:
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "above" / "root"))
    forget_kernels(monkeypatch)
    before = os.umask(0)
    try:
        load(KERNEL)
    finally:
        os.umask(before)
    path = cache_directory() / KERNEL.name
    for made in (path.parent, path.parent.parent, path.parent.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]


def make_above(tmp_path: Path, mode: int) -> Path:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    return above


@pytest.mark.parametrize(
    ("mode", "used"), [(0o777, False), (0o1777, True), (0o755, True), (0o2755, True), (0o707, False)], ids=oct
)
def test_a_folder_above_in_which_others_can_exchange_the_cache(
    mode: int,
    used: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[Kernel],
    caplog: pytest.LogCaptureFixture,
) -> None:
    above = make_above(tmp_path, mode)
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(above / "root"))
    for _ in range(2):
        forget_kernels(monkeypatch)
        load(KERNEL)
    assert compiled == [KERNEL] * (1 if used else 2)
    assert ("other users can exchange" in caplog.text) is not used
    assert ("not used" in detail()) is not used
    assert (above / "root").exists() is used


@pytest.mark.parametrize(
    ("user", "group", "members", "used"),
    [
        ("ann", "ann", [], True),
        ("ann", "ann", ["ann"], True),
        ("ann", "ann", ["bob"], False),
        ("ann", "lab", [], False),
    ],
)
def test_a_folder_above_may_be_written_by_a_group_of_the_user_alone(
    user: str, group: str, members: list[str], used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each user has such a group, the umask lets it write."""
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(make_above(tmp_path, 0o775) / "root"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name=user))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    assert ("not used" in detail()) is not used


@needs_root
def test_a_folder_above_that_belongs_to_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the home of the user who ran sudo, in which root then leaves nothing that the user cannot remove."""
    home = make_above(tmp_path, 0o700)
    give_away(home)
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(home / ".cache" / "fusednorm"))
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert list(home.iterdir()) == []
    assert f"{home} belongs to the user {OTHER}" in detail()


@needs_root
@pytest.mark.parametrize(("outsider", "used"), [(OTHER, True), (OTHER + 1, False)])
def test_a_folder_above_that_belongs_to_root_outside_of_a_user_namespace(
    outsider: int, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where root itself is shown as another user, the folders above a home are root's all the same."""
    above = make_above(tmp_path, 0o755)
    give_away(above)
    monkeypatch.setattr(storage, "_hidden_root", lambda: {outsider})
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(above / "root"))
    assert ("not used" in detail()) is not used
    storage._make(str(above / "root"))
    give_away(above / "root")
    assert "not used" in detail()


@pytest.mark.parametrize("owner", [pytest.param(OTHER, marks=needs_root), None], ids=["another's", "the user's"])
def test_a_symbolic_link_on_the_way_to_the_cache(
    owner: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, compiled: list[Kernel]
) -> None:
    """The user's own is followed; another's, as in /tmp, could lead to any folder of the user's."""
    load(KERNEL)
    link = make_above(tmp_path, 0o1777) / "link"
    link.symlink_to(f"../../{folder.name}/./../{folder.name}")
    if owner is not None:
        os.lchown(link, owner, owner)
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(link))
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert len(compiled) == (1 if owner is None else 2)
    assert ("belongs to the user" in detail()) is (owner is not None)


def test_links_in_a_circle_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "one" / "root"))
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert "too many symbolic links" in detail()


def test_tuning_files_are_judged_in_the_same_way(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / "graph-plans" / "one.json"
    storage.replace_file(path, b"{}")
    assert list(storage.contents(path)) == [(path, b"{}")]
    path.chmod(0o666)
    assert list(storage.contents(path)) == []
    assert "can be written by other users" in caplog.text


# --- a cache in a container's image ---


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Kernel]) -> Path:
    """A cache that was filled and opened to readers as docs/index.md says, and an empty one of the user's own."""
    root = tmp_path / "image"
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(root))
    forget_kernels(monkeypatch)
    load(KERNEL)
    subprocess.run(["chmod", "-R", "a+rX,go-w", str(root)], check=True)
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("FUSEDNORM_CACHE_READONLY_DIR", str(root))
    forget_kernels(monkeypatch)
    compiled.clear()
    return root


def test_a_cache_that_is_only_read(image: Path, compiled: list[Kernel]) -> None:
    load(KERNEL)
    assert compiled == []
    assert not (image.parent / "own").exists()
    assert detail("read-only kernel cache") == str(image / cache_directory().name)


def test_what_it_lacks_is_kept_in_the_users_own(image: Path, compiled: list[Kernel]) -> None:
    before = files(image)
    other = Kernel("slabs_backward", "recall", "float64")
    load(other)
    assert compiled == [other]
    assert files(image) == before
    assert files(image.parent / "own") == [other.name]


@needs_root
def test_another_user_reads_what_root_has_put_there(image: Path) -> None:
    """In a process that is not root's, with a home that is its own."""
    found = as_another_user(image)
    assert found == {"found": True, "warnings": []}


@needs_root
def test_another_user_does_not_read_what_a_third_has_put_there(image: Path) -> None:
    for path in [image, *image.rglob("*")]:
        os.chown(path, OTHER + 1, OTHER + 1)
    found = as_another_user(image)
    assert not found["found"]
    assert "belongs to the user 54322" in "".join(found["warnings"])


@needs_root
@pytest.mark.parametrize("own", ["image", "closed"])
def test_another_user_does_not_take_roots_for_its_own(own: str, image: Path) -> None:
    """Nor does it only say that a folder of root's cannot be opened."""
    found = as_another_user(image, own)
    assert found["found"]  # in the one that is only read
    assert "belongs to the user 0 " in "".join(found["warnings"])


def as_another_user(image: Path, own: str = "home/cache") -> Any:
    """Loads the kernel as the user OTHER, who can reach the image's folder."""
    with tempfile.TemporaryDirectory() as place:  # below the sticky /tmp, where pytest's folders are root's alone
        Path(place).chmod(0o755)
        root = Path(place) / "image"
        shutil.copytree(image, root, copy_function=shutil.copy2)
        for path in [image, *image.rglob("*")]:
            status = path.stat()
            os.chown(root / path.relative_to(image), status.st_uid, status.st_gid)
        for name in ("home", "closed"):
            (Path(place) / name).mkdir(mode=0o700)
        give_away(Path(place) / "home")
        code = f"""
            import json, logging, os
            from fusednorm.backends.cpu import compiler
            compiler.cache_directory()  # reads the sources, which may lie in root's home
            os.setgid({OTHER}); os.setuid({OTHER})
            said = []
            handler = logging.Handler()
            handler.emit = lambda record: said.append(record.getMessage())
            logging.getLogger("fusednorm").addHandler(handler)
            found = compiler._read(compiler.Kernel("slabs_backward", "recall", "float32"))
            print(json.dumps({{"found": found is not None, "warnings": said}}))
        """
        return fresh_process(code, FUSEDNORM_CACHE_DIR=Path(place) / own, FUSEDNORM_CACHE_READONLY_DIR=root)


@pytest.mark.parametrize(("change", "word"), FILE_CHANGES[1:])
def test_a_file_that_is_only_read_is_judged_too(
    change: Callable[[Path], None], word: str, image: Path, compiled: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    change(image / cache_directory().name / KERNEL.name)
    load(KERNEL)
    assert compiled == [KERNEL]
    assert word in caplog.text


def test_a_damaged_own_file_gives_way_to_the_one_that_is_only_read(
    image: Path, compiled: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    storage.replace_file(cache_directory() / KERNEL.name, b"damaged")
    load(KERNEL)
    assert compiled == []
    assert "damaged kernel cache file" in caplog.text


# --- FUSEDNORM_CACHE_DIR ---


def test_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", "~/kernels")
    assert cache_directory().parent == tmp_path / "kernels"


def test_a_tilde_that_names_nobody_makes_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: list[Kernel]
) -> None:
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", "~nobody-of-that-name/kernels")
    monkeypatch.chdir(tmp_path)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]
    assert list(tmp_path.iterdir()) == []
    assert "not used: no folder for it is known" in detail()


def test_a_relative_path_starts_where_it_was_first_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", f"kernels-{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    first = cache_directory()
    assert first.parent == tmp_path / f"kernels-{tmp_path.name}"
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cache_directory() == first


@pytest.mark.parametrize("name", ["file", "none/such"])
def test_doctor_says_why_nothing_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / name / "root"))
    assert ("not used" in detail()) is (name == "file")
    assert not (tmp_path / "none").exists()
