"""A model's own norms become fusednorm's, in place and back, with activations and sums around them fused in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fusednorm.activations import Activation
from fusednorm.convert import rewriting
from fusednorm.convert.classes import Target, become, is_norm, is_ours, original_of, restore, target_of
from fusednorm.convert.folding import Fold, Folding
from fusednorm.convert.pairs import check_whole, forget, remember
from fusednorm.convert.report import Entry, Report
from fusednorm.convert.source import Edit
from fusednorm.convert.tree import Tree, check_model
from fusednorm.equivalents import qualified_name

__all__ = ["Entry", "Report", "convert_", "revert_"]

Filter = Callable[[str, nn.Module], bool]


def convert_(model: nn.Module, *, activations: bool = True, filter_fn: Filter | None = None) -> Report:
    """Make a model's norms fusednorm's, in place, and fuse the activations behind them and the sums around them.

    torch's GroupNorm, LayerNorm, RMSNorm, BatchNorm and InstanceNorm change their class, and so do subclasses that only
    rename or cast. Modules, parameters, buffers and hooks stay the same objects, so that optimizers, tied weights and
    the keys of the state_dict stay. Other subclasses are left alone.

    An activation is fused where nothing else can see the norm's own result: the next module of an ``nn.Sequential``,
    a call in the code of a class (:mod:`fusednorm.convert.code`), the only user in a trace of torch.fx. An Identity
    then stands in for its module, or, where others share the module or there is none, the block gets a class of the
    same name whose code leaves that call out. So do sums before a norm, and between a norm and its activation, where
    the code of a class shows them (:mod:`fusednorm.convert.sum_code`). Norms with hooks on their output, activations
    with hooks, and norms used at several places, or called by other code of the model's forward
    (:mod:`fusednorm.convert.reach`), stay apart. What is not seen is code outside of it: a call of
    ``model.block.norm``, a method that no forward calls, or a hook that is registered later, gets the activated result;
    exclude such a norm by ``filter_fn`` or use ``activations=False``.

    Args:
        model: a module, before it is compiled or wrapped for distributed training.
        activations: False converts the norms only, and fuses neither activations nor sums.
        filter_fn: ``filter_fn(path, norm)`` says for each path to a norm whether it is to be converted; a norm with
            several paths is converted if all of them are.

    Returns:
        A :class:`Report` of what was converted, fused and left, with the reasons; ``print`` shows a table. For what is
        fusednorm's already nothing is done.

    Raises:
        TypeError: ``model`` is no module, or ``filter_fn`` no function.
        ValueError: it was compiled, scripted or wrapped (DistributedDataParallel, FSDP). Nothing is changed then.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU())
    >>> print(convert_(model))  # doctest: +NORMALIZE_WHITESPACE
    1 norms converted, 1 activations fused, 0 left
               module  what, or why not
    ---------  ------  -----------------------------------------------------
    converted  1       torch.nn.modules.normalization.GroupNorm to GroupNorm
    fused      1       silu, the next module
    """
    check_model("convert_", model)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"convert_: filter_fn is a {type(filter_fn).__name__}; expected None or a function of a path and a norm"
        )
    tree = Tree(model)
    targets: dict[int, tuple[nn.Module, Target]] = {}
    left: list[Entry] = []
    for module in tree.modules():
        if not is_norm(module) or is_ours(module):
            continue
        wanted = filter_fn is None or all(filter_fn(path, module) for path in tree.every_path[id(module)])
        target = target_of(module, activations) if wanted else "filter_fn says no"
        if isinstance(target, str):
            left.append(Entry(tree.path(module), target))
        else:
            targets[id(module)] = module, target
    folding = Folding(tree, {key: norm for key, (norm, target) in targets.items() if not target.acted})
    if activations:
        folding.find()
    converted = [
        Entry(tree.path(norm), f"{qualified_name(type(norm))} to {target.becomes.__name__}")
        for norm, target in targets.values()
    ]
    own = [(norm, target.activation) for norm, target in targets.values() if target.activation is not None]
    fused = [Entry(tree.path(norm), f"{_shown(activation)}, in the class itself") for norm, activation in own]
    fused += [Entry(tree.path(fold.norm), f"{_shown(fold.activation)}, {fold.seen}") for fold in folding.folds]
    for norm, target in targets.values():
        _convert(norm, target)
    for fold in folding.folds:
        _fold(fold)
    for sum_fold in folding.sums:
        _edit(sum_fold.block, sum_fold.edits)
        remember(sum_fold.norm, sum_fold.block)
    summed = [
        Entry(tree.path(fold.norm), f"{text}, before the activation, {fold.seen}")
        for fold in folding.folds
        for text in fold.sums
    ]
    summed += [
        Entry(tree.path(each.norm), f"{each.text}, before the norm, the code of {type(each.block).__name__}")
        for each in folding.sums
    ]
    return Report(tuple(converted), tuple(fused), tuple(left + folding.left), tuple(summed))


def revert_(model: nn.Module) -> None:
    """Undo :func:`convert_`: every module has its class back and stands where it stood, with what it learned since.

    Norms that were fusednorm's from the start stay.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: it was compiled or wrapped meanwhile, a module in it has changed its class, or it is a part of the
            converted model in which a norm stands and the place of its activation does not, or the other way round.
            Nothing is changed then.

    >>> model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    >>> report = convert_(model)
    >>> type(model[0]).__module__, type(model[1]).__name__
    ('fusednorm.nn', 'Identity')
    >>> revert_(model)
    >>> type(model[0]).__module__, type(model[1]).__name__
    ('torch.nn.modules.normalization', 'SiLU')
    """
    check_model("revert_", model)
    tree = Tree(model)
    _check_classes(tree)
    check_whole(tree)
    for module in list(tree.modules()):
        forget(module)
        kind, edits = rewriting.origin(type(module))
        if edits:
            module.__class__ = kind
        original = original_of(module)
        if isinstance(original, nn.Module):
            original.train(module.training)
            for parent, key in tree.places(module):
                setattr(parent, key, original)
        elif original is not None:
            restore(module, original)


def _check_classes(tree: Tree) -> None:
    """Refuse modules that got a class of their own since they were converted, as a parametrization gives them one."""
    for module in tree.modules():
        changed = original_of(module) is not None and not (is_ours(module) or type(module) is nn.Identity)
        if changed or any(rewriting.is_made(base) for base in type(module).__mro__[1:]):
            raise ValueError(
                f"revert_: {tree.path(module) or 'the model'!r} has become a {type(module).__name__} since convert_; "
                "undo that first, e.g. by torch.nn.utils.parametrize.remove_parametrizations"
            )


def _shown(activation: Activation) -> str:
    plain = activation == Activation(activation.name)
    return activation.name if plain else f"{activation.name}({activation.parameter:g})"


def _convert(norm: nn.Module, target: Target) -> None:
    become(norm, target.becomes)
    norm.eps = norm.eps  # where our forward looks first
    norm.channel_dim = target.channel_dim  # type: ignore[assignment]
    norm.activation = target.activation  # type: ignore[assignment]


def _fold(fold: Fold) -> None:
    fold.norm.activation = fold.activation  # type: ignore[assignment]
    partner = fold.block
    if fold.place is not None:
        parent, key = fold.place
        act = getattr(parent, key)
        partner = torch.nn.Identity().train(act.training)
        become(partner, nn.Identity, act)
        setattr(parent, key, partner)
    elif fold.block is not None:
        _edit(fold.block, fold.edits)
    assert partner is not None
    remember(fold.norm, partner)


def _edit(block: nn.Module, edits: frozenset[Edit]) -> None:
    kind, before = rewriting.origin(type(block))
    block.__class__ = rewriting.edited(kind, before | edits)
