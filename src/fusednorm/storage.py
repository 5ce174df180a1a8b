"""Files on disk: where the caches are, who may have written a file, and how a file is written as a whole.

Kept kernels run as part of the process, so a file is used only where nobody but this user can have written it: the
folders and the file are the user's own, closed to the writes of others, and nobody else can exchange a folder on the
way to them. Any other file is refused with a warning, and the process works without it. Owner and mode are read from
the descriptor from which the content is then read, so nothing can be exchanged in between.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_NOWHERE = Path(os.devnull)  # below it nothing is found or kept
_MOST_LINKS = 40  # as many as Linux follows
_MOST_BYTES = 64 << 20  # of a file; no kernel and no list of tuned choices is longer
_LOCK_ATTEMPTS, _LOCK_SECONDS = 100, 0.1


class RefusedError(OSError):
    """Somebody else can have written the folder or file, or it is none; the message says how to mend it."""


def cache_root() -> Path:
    """FUSEDNORM_CACHE_DIR, or the user's cache folder; a relative path starts where the process first needed it."""
    given = os.environ.get("FUSEDNORM_CACHE_DIR")
    if given:
        return absolute(given)
    try:
        return absolute(_user_cache_dir())
    except RuntimeError:  # there is no home
        return _NOWHERE


def readonly_root() -> Path | None:
    """FUSEDNORM_CACHE_READONLY_DIR: a cache that somebody else prepared, as in a container's image."""
    given = os.environ.get("FUSEDNORM_CACHE_READONLY_DIR")
    return absolute(given) if given else None


def absolute(path: str) -> Path:
    """A path that a user gave: ``~`` is the home, and a relative path starts where the process first needed it."""
    path = os.path.expanduser(path)
    if path.startswith("~"):  # the home is unknown
        return _NOWHERE
    return Path(path) if os.path.isabs(path) else _from_here(path)


@cache
def _from_here(path: str) -> Path:
    try:
        return Path(os.getcwd(), path)
    except OSError:  # the working directory was removed
        return _NOWHERE


def contents(path: Path) -> Iterator[tuple[Path, bytes]]:
    """The files <root>/<folder>/<name>, each with its content: of the user's cache, then of the read-only cache."""
    yield from _trusted(path, readonly=False)
    root = readonly_root()
    if root is not None:
        yield from _trusted(root / path.parent.name / path.name, readonly=True)


def _user_cache_dir() -> str:
    """The folder that platformdirs gives; where it is not installed, the folder that it gives on Linux."""
    try:
        from platformdirs import user_cache_dir
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        return str((Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fusednorm")
    return user_cache_dir("fusednorm", appauthor=False)


def replace_file(path: Path, content: bytes) -> None:
    """Write <root>/<folder>/<name> as a whole, with its folders; an OSError leaves the old file and nothing else.

    No reader ever sees half a file. Raises RefusedError where others could write.
    """
    folder = _open_folder(path.parent, create=True)
    try:
        _replace(path.name, content, folder)
    finally:
        os.close(folder)


def _replace(name: str, content: bytes, folder: int) -> None:
    temporary = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(temporary, dir_fd=folder)
        raise


def read_file(path: Path) -> bytes:
    """The content of a file at any path, of the user's or of root's, that nobody else can have written.

    Raises RefusedError for another file, and OSError as open does.
    """
    with _folder_of(path) as folder:
        return _read(path, folder, readonly=True)


def update_file(path: Path, change: Callable[[bytes | None], bytes]) -> None:
    """Replace a file at any path by what ``change`` makes of its content, None where there is no file.

    Processes that update one file take turns, so that none loses what another one added. Raises RefusedError where
    somebody else can have written the file, and OSError; the old file then stays.
    """
    with _folder_of(path, create=True) as folder:
        _lock(folder)
        try:
            content = _read(path, folder, readonly=False)
        except FileNotFoundError:
            content = None
        _replace(path.name, change(content), folder)


@contextmanager
def _folder_of(path: Path, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder that holds a file, after a check of all folders above the file."""
    _require_owners(path)
    place = _resolve(path.parent, create)
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_above(os.fstat(descriptor), place)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(folder: int) -> None:
    """Wait until no other process updates a file of the folder; the lock ends with the descriptor.

    Where the system has no such lock, or somebody holds it for ever, the update goes on without.
    """
    import fcntl

    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_SECONDS)
        except OSError:
            return
        else:
            return


def problem(folder: Path, readonly: bool = False) -> str | None:
    """Why nothing is found or kept in <root>/<folder>, None where it can be."""
    try:
        descriptor = _open_folder(folder, readonly=readonly)
    except FileNotFoundError as error:
        if readonly or error.filename is None:
            return reason_of(error)
        if os.access(os.path.dirname(error.filename), os.W_OK | os.X_OK):
            return None  # the first kernel makes it
        return f"{os.path.dirname(error.filename)} cannot be written"
    except OSError as error:
        return reason_of(error)
    os.close(descriptor)
    return None if readonly or os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def reason_of(error: OSError) -> str:
    """Why a file or folder is not used, in words."""
    if isinstance(error, RefusedError) or error.filename is None:
        return error.strerror or str(error)
    return f"{error.filename}: {error.strerror}"


def _trusted(path: Path, readonly: bool) -> Iterator[tuple[Path, bytes]]:
    """The path and its content, or nothing."""
    try:
        folder = _open_folder(path.parent, readonly=readonly)
        try:
            content = _read(path, folder, readonly)
        finally:
            os.close(folder)
    except RefusedError as error:
        _warn_once(error.strerror)
    except OSError:
        pass
    else:
        yield path, content


@cache
def _warn_once(message: str) -> None:
    logger.warning("a cache is not used: %s", message)


def _read(path: Path, folder: int, readonly: bool) -> bytes:
    # A FIFO that is opened without O_NONBLOCK waits for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(path.name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENODEV):  # a symbolic link, a socket, a device
            raise RefusedError(error.errno, f"{path} is no plain file; remove it") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RefusedError(errno.EINVAL, f"{path} is no plain file; remove it")
        _check_own(status, path, readonly)
        if status.st_size > _MOST_BYTES:
            raise RefusedError(errno.EFBIG, f"{path} has more than {_MOST_BYTES} bytes; remove it")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


# --- folders ---


def _open_folder(folder: Path, create: bool = False, readonly: bool = False) -> int:
    """A descriptor of <root>/<folder>, after a check of both and of every folder above them."""
    root = folder.parent
    if root == _NOWHERE:
        raise FileNotFoundError(errno.ENOENT, "no folder for it is known; FUSEDNORM_CACHE_DIR can name one")
    _require_owners(root)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    place = _resolve(root, create)
    _check_own(os.lstat(place), root, readonly)  # its error says more than os.open's
    parent = os.open(place, flags)
    try:
        _check_own(os.fstat(parent), root, readonly)
        if create:
            _make(folder.name, parent)
        try:
            descriptor = os.open(folder.name, flags, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise RefusedError(error.errno, f"{folder} is no folder; remove it") from None
            raise type(error)(error.errno, error.strerror, str(folder)) from None
    finally:
        os.close(parent)
    try:
        _check_own(os.fstat(descriptor), folder, readonly)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_owners(path: Path) -> None:
    if not hasattr(os, "geteuid"):
        raise RefusedError(errno.ENOSYS, f"{path}: on this system a file's owner cannot be checked")


def _make(name: str, parent: int | None = None) -> None:
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)


def _resolve(path: Path, create: bool) -> str:
    """The path without symbolic links, every folder above its last one checked; ``create`` makes missing folders."""
    place, links = os.sep, 0
    pending = _parts(str(path))
    while pending:
        _check_above(os.lstat(place), place)
        name = pending.pop()
        if name == os.pardir:
            place = os.path.dirname(place)
            continue
        step = os.path.join(place, name)
        if create and not os.path.lexists(step):
            _make(step)
        status = os.lstat(step)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise RefusedError(errno.ELOOP, f"{path} goes through too many symbolic links")
            _check_owner(status, step, _superiors())
            target = os.readlink(step)
            place = os.sep if os.path.isabs(target) else place
            pending += _parts(target)
        elif stat.S_ISDIR(status.st_mode):
            place = step
        else:
            raise RefusedError(errno.ENOTDIR, f"{step} is no folder; FUSEDNORM_CACHE_DIR can name one")
    return place


def _parts(path: str) -> list[str]:
    """The names in a path, the last first."""
    return [name for name in reversed(path.split(os.sep)) if name not in ("", os.curdir)]


# --- who can have written ---


def _check_own(status: os.stat_result, path: Path, readonly: bool) -> None:
    """Refuses a path that is not the user's own (or root's, where it is only read), or that others can write."""
    owners = {os.geteuid(), 0} if readonly else {os.geteuid()}
    _check_owner(status, path, owners)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RefusedError(
            errno.EPERM, f"{path} can be written by other users; remove it, or chmod go-w it if you trust it"
        )


def _check_above(status: os.stat_result, path: str) -> None:
    """Refuses a folder whose entries others could exchange."""
    _check_owner(status, path, _superiors())
    mode = status.st_mode
    if mode & stat.S_ISVTX:  # only its owner renames or removes an entry
        return
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(status.st_gid)):
        raise RefusedError(
            errno.EPERM,
            f"other users can exchange what lies in {path}; chmod go-w it, or name another folder by "
            "FUSEDNORM_CACHE_DIR",
        )


def _check_owner(status: os.stat_result, path: Path | str, owners: set[int]) -> None:
    if status.st_uid not in owners:
        raise RefusedError(
            errno.EPERM,
            f"{path} belongs to the user {status.st_uid} and this process runs as {os.geteuid()}; FUSEDNORM_CACHE_DIR "
            "can name a folder of its own, FUSEDNORM_CACHE_READONLY_DIR one of root's to read from",
        )


def _superiors() -> set[int]:
    """The ids that may own a folder above a cache: the user's, root's, and root's as a user namespace shows it."""
    return {os.geteuid(), 0} | _hidden_root()


@cache
def _hidden_root() -> set[int]:
    """The id by which this process's user namespace shows all users outside of it, root among them."""
    try:
        inside, outside, count = Path("/proc/self/uid_map").read_text().split()
        if (inside, outside, count) == ("0", "0", str(2**32 - 1)):
            return set()
    except OSError:
        return set()
    except ValueError:  # several ranges
        pass
    try:
        return {int(Path("/proc/sys/kernel/overflowuid").read_text())}
    except (OSError, ValueError):
        return set()


def _is_private(group: int) -> bool:
    """Whether a group has this user alone, as the groups that many systems make for each user."""
    import grp
    import pwd

    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}
