"""The kernels that one builder makes: what stands behind their names, and what that says to the builder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

Builders = dict[str, Callable[..., Any]]


def summed(name: str, build: Callable[..., Any], by_channel: bool = True) -> Builders:
    """The forwards with sums around the norm: before it, behind it, or both; before it a number ``by_channel`` too."""
    before = ["", "_before", "_by_channel"] if by_channel else ["", "_before"]
    return {
        name + first + second: partial(
            build, adds_before=bool(first), adds_behind=bool(second),
            **({"by_channel": True} if first == "_by_channel" else {}),
        )
        for first in before
        for second in ("", "_behind")
        if first or second
    }  # fmt: skip


def keeping(builders: Builders) -> Builders:
    """These, and with each that has a sum before the norm one that writes it, to ``total``."""
    sums = {name: build for name, build in builders.items() if "_before" in name or "_by_channel" in name}
    return builders | {name + "_kept": partial(build, keeps=True) for name, build in sums.items()}


def backwards(build: Callable[..., Any], name: str = "backward", gates: bool = False) -> Builders:
    """Those that keep dz between two passes, also as the gradient of z + post_add, those that add the gradient of s to
    dx, and those that make the gradients of a product before the norm where ``gates`` says so."""
    return {
        name + kept + total + gated: partial(
            build, keeps=bool(kept), adds_behind=kept == "_behind", adds_gradient=bool(total),
            **({"gated": True} if gated else {}),
        )
        for kept in ("", "_kept", "_behind")
        for total in ("", "_total")
        for gated in (("", "_gated") if gates else ("",))
    }  # fmt: skip
