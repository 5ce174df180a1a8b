"""Logging as the environment asks for it: FUSEDNORM_LOG_LEVEL and FUSEDNORM_LOG_FILE.

Without FUSEDNORM_LOG_LEVEL nothing is touched, and the program's own logging decides.
"""

from __future__ import annotations

import logging
import os
import warnings

from fusednorm.text import printable

LEVELS = {
    "off": logging.CRITICAL + 1,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}


def _printable(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage(), keep=""), ()
    return True


def logger_of(name: str) -> logging.Logger:
    """The logger of a module, whose messages are one printable line each, whatever the names in them."""
    logger = logging.getLogger(name)
    logger.addFilter(_printable)
    return logger


def configure() -> None:
    """Give the logger "fusednorm" the level and the file, or stderr, that the environment names."""
    level = os.environ.get("FUSEDNORM_LOG_LEVEL", "").strip().lower()
    if not level:
        return
    if level not in LEVELS:
        message = f"FUSEDNORM_LOG_LEVEL is {level!r}; expected one of {', '.join(LEVELS)}; it is ignored"
        warnings.warn(message, stacklevel=2)
        return
    logger = logging.getLogger("fusednorm")
    handler: logging.Handler = logging.StreamHandler()
    path = os.environ.get("FUSEDNORM_LOG_FILE")
    if path and level != "off":
        try:
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            warnings.warn(f"FUSEDNORM_LOG_FILE cannot be written ({error}); logging to stderr", stacklevel=2)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(LEVELS[level])
    logger.propagate = False
