"""The cache of compiled kernels: found by the next process, never stale, never damaged, never in the way."""

from __future__ import annotations

import grp
import hashlib
import json
import logging
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_support import fresh_process, process_environment

import fusednorm
from fusednorm import dispatch, storage
from fusednorm.backends.cpu import compiler
from fusednorm.backends.cpu.compiler import Kernel, cache_directory, load

KERNEL = Kernel("slabs_backward", "recall", "float32")  # the quickest to compile

NORMALIZE = """
    import json, sys, time, torch, fusednorm
    x = torch.linspace(-1, 1, 360).reshape(2, 6, 30)
    start = time.perf_counter()
    y = fusednorm.group_norm(x, 3)
    first = time.perf_counter() - start
    start = time.perf_counter()
    fusednorm.group_norm(x, 3)
    warm = time.perf_counter() - start
    right = torch.allclose(y, torch.nn.functional.group_norm(x, 3), atol=1e-5)
    imported = sorted({"numba", "sympy"} & set(sys.modules))
    print(json.dumps({"right": right, "imported": imported, "seconds": first - warm}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a process that has loaded no kernel."""
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path))
    forget_kernels(monkeypatch)
    return tmp_path


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_failed", {})


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """A warning that comes once comes in each test anew."""
    storage._warn_once.cache_clear()
    dispatch._warn_once.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that get compiled."""
    kernels: list[Kernel] = []
    compile_kernel = compiler._compile

    def spy(kernel: Kernel) -> Any:
        kernels.append(kernel)
        return compile_kernel(kernel)

    monkeypatch.setattr(compiler, "_compile", spy)
    return kernels


def files(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# --- kept and found ---


def test_a_kernel_is_kept_under_its_name(folder: Path) -> None:
    load(KERNEL)
    assert files(folder) == [KERNEL.name] == ["slabs_backward-recall-float32-identity"]
    assert (cache_directory() / KERNEL.name).is_file()


def test_a_kept_kernel_is_not_compiled_again(
    folder: Path, compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(KERNEL)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]


def test_fusednorm_cache_dir_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "one"))
    assert cache_directory().parent == tmp_path / "one"
    monkeypatch.delenv("FUSEDNORM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    if sys.platform.startswith("linux"):
        assert cache_directory().parent == tmp_path / "two" / "fusednorm"


def test_the_second_process_does_not_import_numba(tmp_path: Path) -> None:
    """Nor sympy, which the first operator on a meta tensor imports: each takes 0.3 s."""
    first = fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)
    second = fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)
    assert "numba" in first["imported"]
    assert second["imported"] == []
    assert first["right"]
    assert second["right"]


def test_processes_that_compile_the_same_kernel_at_once(tmp_path: Path) -> None:
    environment = process_environment(FUSEDNORM_CACHE_DIR=tmp_path / "cache")
    code = f"""
import json, time
from pathlib import Path
from fusednorm.backends.cpu import compiler
Path({str(tmp_path)!r}, str(__import__("os").getpid())).touch()
while len([path for path in Path({str(tmp_path)!r}).iterdir() if path.name.isdigit()]) < 3:
    time.sleep(0.01)
compiler.load(compiler.Kernel("slabs_backward", "recall", "float32"))
print(json.dumps(len(compiler._loaded)))
"""
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert [json.loads(out) for out, _ in outputs] == [1, 1, 1]
    assert files(tmp_path / "cache") == [KERNEL.name]


# --- damaged ---


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def overwritten(path: Path) -> None:
    path.write_bytes(os.urandom(4096))


def beheaded(path: Path) -> None:
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


DAMAGES = [truncated, flipped, emptied, overwritten, beheaded]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_a_warning_and_written_again(
    damage: Callable[[Path], None],
    folder: Path,
    compiled: list[Kernel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(KERNEL)
    path = cache_directory() / KERNEL.name
    damage(path)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL, KERNEL]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.message
    assert files(folder) == [KERNEL.name]
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL, KERNEL]


def test_a_directory_in_the_place_of_a_file_is_ignored_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache_directory() / KERNEL.name).mkdir(parents=True)
    load(KERNEL)
    assert any(record.levelno == logging.WARNING and KERNEL.name in record.message for record in caplog.records)
    assert files(folder) == []  # no temporary file stays behind


# --- nowhere to keep it ---


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Kernel]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "file"))
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]
    assert files(tmp_path) == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_no_error(folder: Path, compiled: list[Kernel]) -> None:
    folder.chmod(0o500)
    load(KERNEL)
    assert compiled == [KERNEL]


def test_a_full_disk_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    load(KERNEL)
    assert files(folder) == []


def test_a_user_without_a_home_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: list[Kernel]
) -> None:
    """Where neither HOME nor the password database names a home, "~" would be a folder of that name right here."""

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("FUSEDNORM_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]
    assert list(tmp_path.iterdir()) == []


def test_an_unset_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUSEDNORM_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory().is_absolute()


# --- nobody else's machine code ---

OTHER = 54321  # a user that is neither root nor the one who runs the tests
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")


def detail(name: str = "kernel cache") -> str:
    """What ``fusednorm doctor`` says of a cache."""
    (found,) = [one.details[name] for one in dispatch.backends() if one.name == "cpu"]
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
    """A cache that was filled and opened to readers as README.md says, and an empty one of the user's own."""
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
def test_another_user_does_not_take_roots_for_its_own(image: Path) -> None:
    found = as_another_user(image, own=image)
    assert found["found"]  # in the one that is only read
    assert "belongs to the user 0 " in "".join(found["warnings"])


def as_another_user(image: Path, own: Path | None = None) -> Any:
    """Loads the kernel as the user OTHER, who can reach the image's folder."""
    with tempfile.TemporaryDirectory() as place:  # below the sticky /tmp, where pytest's folders are root's alone
        Path(place).chmod(0o755)
        root = Path(place) / "image"
        shutil.copytree(image, root, copy_function=shutil.copy2)
        for path in [image, *image.rglob("*")]:
            status = path.stat()
            os.chown(root / path.relative_to(image), status.st_uid, status.st_gid)
        home = Path(place) / "home"
        home.mkdir(mode=0o700)
        give_away(home)
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
        own_root = home / "cache" if own is None else root
        return fresh_process(code, FUSEDNORM_CACHE_DIR=own_root, FUSEDNORM_CACHE_READONLY_DIR=root)


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


# --- Numba's settings ---

BITS = """
    import hashlib, json, torch, fusednorm
    x = torch.randn(2, 8, 1000, generator=torch.Generator().manual_seed(0)).half()
    before = {name: value for name, value in vars(__import__("numba").core.config).items() if name.isupper()}
    with fusednorm.use_instance("cpu.planes"):
        y = fusednorm.group_norm(x, 2)
    after = {name: vars(__import__("numba").core.config)[name] for name in before}
    assert before == after
    print(json.dumps(hashlib.sha256(y.view(torch.int16).numpy().tobytes()).hexdigest()))
"""
SETTINGS = {
    "NUMBA_BOUNDSCHECK": "1", "NUMBA_DEBUGINFO": "1", "NUMBA_ENABLE_AVX": "0", "NUMBA_CPU_NAME": "generic",
    "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_LLVM_REFPRUNE_PASS": "0", "NUMBA_EXTEND_VARIABLE_LIFETIMES": "1",
    "NUMBA_DEBUG": "1", "NUMBA_OPT": "max",
}  # fmt: skip


@pytest.fixture(scope="module")
def ordinary_bits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fresh_process(BITS, FUSEDNORM_CACHE_DIR=tmp_path_factory.mktemp("ordinary"))


@pytest.mark.parametrize(
    "settings", [{"NUMBA_OPT": "0"}, {"NUMBA_DISABLE_JIT": "1"}, SETTINGS], ids=["OPT", "DISABLE_JIT", "others"]
)
def test_numbas_settings_do_not_reach_the_kernels(settings: dict[str, str], ordinary_bits: Any, tmp_path: Path) -> None:
    """They are for the program's own functions, and what is kept serves processes without them."""
    assert fresh_process(BITS, FUSEDNORM_CACHE_DIR=tmp_path, **settings) == ordinary_bits


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Kernel]:
    """Nothing can be compiled; the kernels that were tried."""
    tried: list[Kernel] = []

    def fail(kernel: Kernel) -> None:
        tried.append(kernel)
        raise ImportError("Numba needs NumPy 1.0 or less\nand more")

    monkeypatch.setattr(compiler, "_compile", fail)
    monkeypatch.setattr(dispatch, "_plans", {})
    return tried


def test_where_nothing_compiles_the_reference_runs_and_one_warning_says_why(
    broken: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    for size in (5, 6):
        x = torch.randn(2, 4, size, requires_grad=True)
        y = fusednorm.group_norm(x, 2)
        torch.testing.assert_close(y, torch.nn.functional.group_norm(x, 2))
        y.sum().backward()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(set(warnings)) == len(set(broken)) == len(broken)
    for word in ("cannot be compiled (ImportError: Numba needs NumPy 1.0 or less)", "numba ", "reference"):
        assert word in warnings[0]


def test_a_named_instance_that_cannot_be_compiled_is_an_error(broken: list[Kernel]) -> None:
    with (
        pytest.raises(RuntimeError, match=r"planes.*cannot be compiled \(ImportError: Numba needs"),
        fusednorm.use_instance("cpu.planes"),
    ):
        fusednorm.group_norm(torch.randn(2, 4, 5), 2)


# --- never stale ---


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources that the digest is taken of."""
    package = Path(compiler.__file__).parent
    copy = tmp_path / "cpu"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    activations = shutil.copy(compiler._ACTIVATIONS_FILE, tmp_path / "activations.py")
    monkeypatch.setattr(compiler, "__file__", str(copy / "compiler.py"))
    monkeypatch.setattr(compiler, "_ACTIVATIONS_FILE", str(activations))
    return tmp_path


def digest() -> str:
    return compiler._digest.__wrapped__()


def test_the_same_sources_elsewhere_have_the_same_digest(sources: Path) -> None:
    assert digest() == compiler._digest()


@pytest.mark.parametrize(
    "source",
    ["activations.py", "cpu/compiler.py", "cpu/geometry.py", "cpu/kernels/moments.py", "cpu/kernels/device.py"],
)
def test_a_changed_source_gives_another_digest(sources: Path, source: str) -> None:
    before = digest()
    path = sources / source
    path.write_text(path.read_text() + "\n# changed\n")
    assert digest() != before


def test_a_new_source_gives_another_digest(sources: Path) -> None:
    before = digest()
    (sources / "cpu" / "kernels" / "new.py").touch()
    assert digest() != before


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_another_version_of_the_compiler_gives_another_digest(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = digest(), compiler.version
    monkeypatch.setattr(compiler, "version", lambda name: "0.0" if name == package else version(name))
    assert digest() != before


@pytest.mark.parametrize("function", ["get_host_cpu_name", "get_host_cpu_features"])
def test_another_processor_gives_another_digest(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Features:
        def flatten(self) -> str:
            return "+none"

    before = digest()
    monkeypatch.setattr(compiler.llvm, function, lambda: "i486" if function.endswith("name") else Features())
    assert digest() != before


def test_each_kernel_has_its_own_name() -> None:
    kernels = [
        Kernel(module, function, dtype, activation)
        for module, function in [("planes", "forward"), ("planes", "backward"), ("rows", "forward")]
        for dtype in ("float32", "float16")
        for activation in (None, "silu")
    ]
    assert len({kernel.name for kernel in kernels}) == len(kernels)


# --- time ---


@pytest.mark.timing
def test_the_second_process_starts_a_kernel_in_a_fifth_of_a_second(tmp_path: Path) -> None:
    fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)
    seconds = [fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)["seconds"] for _ in range(3)]
    assert min(seconds) < 0.2


@pytest.mark.timing
@pytest.mark.parametrize(
    ("module", "function", "activation"),
    [("planes", "backward", "gelu"), ("slabs", "moments", None), ("slabs_backward", "reduce", "gelu_tanh")],
)
def test_a_kernel_compiles_in_two_seconds(module: str, function: str, activation: str | None, tmp_path: Path) -> None:
    """The largest kernels of each module, Numba imported before; the better of two, each with an empty cache."""
    code = f"""
        import json, time, torch, fusednorm
        from fusednorm.backends.cpu import compiler, kernels
        start = time.perf_counter()
        compiler.load(compiler.Kernel({module!r}, {function!r}, "float32", {activation!r}))
        print(json.dumps(time.perf_counter() - start))
    """
    seconds = min(fresh_process(code, FUSEDNORM_CACHE_DIR=tmp_path / str(attempt)) for attempt in range(2))
    assert seconds < 2
