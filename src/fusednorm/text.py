"""Text from outside: read up to a limit, and shown so that no terminal takes it for commands."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_BYTES = 64 << 20  # no graph and no report is longer


def printable(text: str, keep: str = "\n") -> str:
    r"""The text with every unprintable character as its escape in Python, except for those in ``keep``.

    Escaped are control characters, which terminals take for commands; marks that turn the direction of writing, with
    which one name passes for another; and surrogates, which no encoding can write.

    >>> printable("a\x1b[2Jb\u202ec\nd", keep="")
    'a\\x1b[2Jb\\u202ec\\nd'
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii") for one in text
    )


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """At most ``most + 1`` bytes of a file: more than ``most`` tell that it is too long. Raises OSError as open does.

    A pipe without a writer reads as empty; a plain open would wait for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with os.fdopen(descriptor, "rb") as file:
        os.set_blocking(descriptor, True)
        return file.read(most + 1)
