"""Which norm took in the activation of which module, kept in both, so that neither is reverted without the other.

Both hold the same token. Copies and pickles of a model have it too; a reference from one to the other would take the
norm along where the activation's part of a model is copied.
"""

from __future__ import annotations

import uuid

from torch import nn

from fusednorm.convert.classes import original_of
from fusednorm.convert.tree import Tree

_FOLDS = "_fusednorm_folds"


def remember(norm: nn.Module, partner: nn.Module) -> None:
    """Note a fold in the norm and in its partner: the Identity in the activation's place, or the block whose
    code leaves the activation, or a sum, to the norm."""
    token = uuid.uuid4().hex
    for module in (norm, partner):
        vars(module)[_FOLDS] = (*_folds(module), token)


def forget(module: nn.Module) -> None:
    vars(module).pop(_FOLDS, None)


def check_whole(tree: Tree) -> None:
    """Refuse a model that holds a norm without its partner, or a partner without its norm."""
    norms, partners = set[str](), set[str]()
    for module in tree.modules():
        (norms if isinstance(original_of(module), type) else partners).update(_folds(module))
    for module in tree.modules():
        if not norms.symmetric_difference(partners).isdisjoint(_folds(module)):
            raise ValueError(
                f"revert_: {tree.path(module) or 'the model'!r} shares what convert_ fused with a module outside of "
                "this model; revert the model that convert_ was called with"
            )


def _folds(module: nn.Module) -> tuple[str, ...]:
    found: tuple[str, ...] = vars(module).get(_FOLDS, ())
    return found
