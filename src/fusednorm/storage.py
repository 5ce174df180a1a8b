"""Where files that only save time are kept, and how one is written so that no reader ever sees half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_root() -> Path:
    """FUSEDNORM_CACHE_DIR, or the user's cache folder."""
    root = os.environ.get("FUSEDNORM_CACHE_DIR")
    if not root:
        try:
            root = _user_cache_dir()
        except RuntimeError:  # there is no home: nothing is found or kept below the null device
            root = os.devnull
    return Path(root)


def _user_cache_dir() -> str:
    """The folder of platformdirs; where that is not installed, the one that it gives on Linux."""
    try:
        from platformdirs import user_cache_dir
    except ImportError:
        base = os.environ.get("XDG_CACHE_HOME", "").strip()
        return str((Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fusednorm")
    return user_cache_dir("fusednorm", appauthor=False)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as a whole, with the folders above it; an OSError leaves the old one and nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
