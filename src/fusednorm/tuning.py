"""Tuned choices: for a problem and a device the instance and configuration that ``fusednorm tune`` found fastest.

They are kept in one JSON file, with a section for each device, which names the versions of fusednorm and of the
compiler of the kernels. A section of other versions or of another device, and a file that is damaged or that somebody
else can have written, is ignored with a warning. A choice only selects among the configurations that an instance lists
itself, so that no content of a file reaches a kernel.

A program opts in by the environment variable FUSEDNORM_TUNED, which is read when fusednorm is imported, or by
``fusednorm.use_tuned``. The file is read when the first plan is made, and not again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, fields, is_dataclass
from functools import cached_property, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fusednorm.instance import Instance
from fusednorm.machine.description import name_of
from fusednorm.problem import Problem
from fusednorm.storage import absolute, cache_root, read_file, reason_of, update_file
from fusednorm.text import printable

logger = logging.getLogger(__name__)

FORMAT = 1
#: The compiler of each kind of device's kernels, under the names of the packages that bring it.
COMPILERS = {"cpu": ("numba",), "cuda": ("triton", "pytorch-triton-rocm", "triton-rocm")}
#: What a Norm has that no kernel's speed depends on.
_WITHOUT = ("eps", "activation")


class UnusableError(ValueError):
    """The file, or its section for a device, cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """The fastest instance of a problem, its configuration as a dictionary, and its time beside the default's."""

    instance: str
    config: dict[str, Any] | None
    ms: float
    default_ms: float


Choices = dict[str, TunedChoice]


@dataclass(frozen=True, slots=True)
class _Section:
    """The choices for one device, and the versions with which they were measured."""

    kind: str
    device: str
    fusednorm: str
    compiler: str
    choices: Choices


def described(config: Any) -> dict[str, Any] | None:
    """A configuration as JSON has it."""
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else None


def key_of(problem: Problem) -> str:
    """The canonical text of a problem without eps and without the number of an activation."""

    def text(value: Any) -> str:
        parts = astuple(value) if is_dataclass(value) and not isinstance(value, type) else value
        return ",".join(map(str, parts)) if isinstance(parts, tuple) else str(value)

    norm, activation = problem.norm, problem.norm.activation
    facts = {one.name: getattr(norm, one.name) for one in fields(norm) if one.name not in _WITHOUT}
    facts["activation"] = None if activation is None else activation.name
    facts |= {one.name: getattr(problem, one.name) for one in fields(problem) if one.name not in ("norm", "made_of")}
    return " ".join(f"{name}={text(value)}" for name, value in facts.items())


# --- where the file is ---


def default_path() -> Path:
    """The file that ``fusednorm tune`` writes where no other is named."""
    return cache_root() / "tuned.json"


def file_of_environment() -> TunedFile | None:
    """The file that FUSEDNORM_TUNED names: a path, or 1 for the default one; None where it is unset, empty or 0."""
    given = os.environ.get("FUSEDNORM_TUNED", "").strip()
    if given in ("", "0"):
        return None
    return TunedFile(default_path() if given == "1" else absolute(given))


def opened(path: str | Path | None) -> TunedFile:
    """The file at a path, None for the default one: the same object as long as the file is the same."""
    place = default_path() if path is None else absolute(str(path))
    try:
        status = os.stat(place)
    except (OSError, ValueError):
        return _opened(place, None)
    return _opened(place, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=64)
def _opened(path: Path, signature: tuple[int, ...] | None) -> TunedFile:
    return TunedFile(path)


# --- reading ---


class TunedFile:
    """A file of tuned choices, read at the first need. It is compared and hashed by identity."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._choices: dict[str, Choices] = {}
        self._warned: set[str] = set()

    @property
    def digest(self) -> str:
        """Of what the file holds now, for the keys of code that its choices went into."""
        try:
            return hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError:
            return ""

    def find(self, problem: Problem, instances: Iterable[Instance]) -> tuple[Instance, Any] | None:
        """The tuned instance and configuration of a problem, or None."""
        if problem.device not in COMPILERS:
            return None
        kept = self._usable(problem.device).get(key_of(problem))
        if kept is None:
            return None
        for instance in instances:
            if instance.name == kept.instance and instance.supports(problem) is None:
                for config in instance.configs(problem):
                    if described(config) == kept.config:
                        return instance, config
        self._warn(
            f"a choice of the tuned file {self.path}",
            f"{printable(kept.instance[:50], keep='')} has no such configuration for {key_of(problem)}",
        )
        return None

    def describe(self, kind: str) -> str:
        """How many choices there are for the device of a kind, or why none is used."""
        try:
            count = len(self._section(kind).choices)
        except UnusableError as error:
            return f"not used: {error}"
        return f"{count} choices for {name_of(kind)}"

    def _usable(self, kind: str) -> Choices:
        """The choices for the device of a kind; none, after a warning, where they cannot be used."""
        found = self._choices.get(kind)
        if found is None:
            try:
                found = self._section(kind).choices
            except UnusableError as error:
                self._warn(f"the tuned file {self.path}", str(error))
                found = {}
            self._choices[kind] = found
        return found

    def _warn(self, what: str, reason: str) -> None:
        """One warning for the file, and one for all of its choices."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s is not used: %s", printable(what), printable(reason))

    def _section(self, kind: str) -> _Section:
        """The section for the device of a kind. Raises UnusableError."""
        if isinstance(self._sections, UnusableError):
            raise self._sections
        wanted = _own_section(kind, {})
        found = next((one for one in self._sections if (one.kind, one.device) == (kind, wanted.device)), None)
        if found is None:
            others = ", ".join(one.device for one in self._sections) or "no device"
            raise UnusableError(f"it has choices for {printable(others, keep='')}, and none for {wanted.device}")
        if (found.fusednorm, found.compiler) != (wanted.fusednorm, wanted.compiler):
            raise UnusableError(
                f"it was tuned with fusednorm {printable(found.fusednorm, keep='')} and "
                f"{printable(found.compiler, keep='')}; this is fusednorm {wanted.fusednorm} and {wanted.compiler}; "
                "run fusednorm tune again"
            )
        return found

    @cached_property
    def _sections(self) -> list[_Section] | UnusableError:
        try:
            return parsed(read_file(self.path))
        except FileNotFoundError:
            return UnusableError("there is no such file; fusednorm tune writes it")
        except OSError as error:
            return UnusableError(reason_of(error))
        except UnusableError as error:
            return error
        except ValueError as error:  # a null byte, which no path has
            return UnusableError(str(error))


def parsed(content: bytes) -> list[_Section]:
    """The sections of a file. Raises UnusableError where it is damaged."""
    try:
        data = json.loads(content.decode(), parse_constant=_refuse_constant)
        if _as(dict, data)["format"] != FORMAT:
            raise UnusableError(f"it has the format {str(data['format'])[:20]!r}, and this version reads {FORMAT}")
        return [_section_of(_as(dict, one)) for one in _as(list, data["devices"])]
    except UnusableError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        words = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UnusableError(f"it is damaged ({type(error).__name__}: {printable(words, keep='')[:200]})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _as(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} is expected")
    return value


def _section_of(data: dict[str, Any]) -> _Section:
    kind, device, fusednorm, compiler = (_as(str, data[name]) for name in ("kind", "device", "fusednorm", "compiler"))
    choices = {key: _choice_of(_as(dict, one)) for key, one in _as(dict, data["choices"]).items()}
    return _Section(kind, device, fusednorm, compiler, choices)


def _choice_of(data: dict[str, Any]) -> TunedChoice:
    config = data["config"]
    ms, default_ms = (_as(float, data[name]) for name in ("ms", "default_ms"))
    if not (0 < ms < math.inf and 0 < default_ms < math.inf):
        raise ValueError(f"times of {ms} and {default_ms} ms")
    return TunedChoice(_as(str, data["instance"]), None if config is None else _as(dict, config), ms, default_ms)


# --- writing ---


def keep(path: Path, kind: str, choices: Mapping[str, TunedChoice]) -> None:
    """Add choices for this machine's device of a kind to a file, which is made where it is missing.

    Choices for other problems and devices stay. Raises OSError where the file cannot be written, or somebody else can
    have written it.
    """
    update_file(path, lambda content: _merged(path, content, _own_section(kind, dict(choices))))


def _merged(path: Path, content: bytes | None, own: _Section) -> bytes:
    sections: list[_Section] = []
    if content is not None:
        try:
            sections = parsed(content)
        except UnusableError as error:
            logger.warning("the tuned file %s is written anew: %s", printable(str(path)), printable(str(error)))
    kept = []
    for one in sections:
        if (one.kind, one.device) != (own.kind, own.device):
            kept.append(one)
        elif (one.fusednorm, one.compiler) == (own.fusednorm, own.compiler):
            own = _own_section(own.kind, one.choices | own.choices)
    data = {"format": FORMAT, "devices": [asdict(one) for one in (*kept, own)]}
    return (json.dumps(data, indent=1) + "\n").encode()


def _own_section(kind: str, choices: Choices) -> _Section:
    """A section for this machine's device of a kind."""
    from fusednorm import __version__

    return _Section(kind, name_of(kind), __version__, _compiler(kind), choices)


def _compiler(kind: str) -> str:
    for package in COMPILERS[kind]:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return "no compiler"
