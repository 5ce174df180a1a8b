"""Which activations and sums go into which norms: in nn.Sequential, by the code of a class, and by a trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from fusednorm.activations import Activation
from fusednorm.convert import code, rewriting, tracing
from fusednorm.convert.adapters import branch_is_known, sum_runs
from fusednorm.convert.reach import Caller, reached
from fusednorm.convert.report import Entry
from fusednorm.convert.source import Edit, Facts, first_line
from fusednorm.convert.tree import Tree
from fusednorm.equivalents import is_activation, module_activation
from fusednorm.private.torch_names import has_hooks, has_own_hooks, watches_output


@dataclass(frozen=True)
class Fold:
    """An activation that a norm takes in, and where that is seen.

    An Identity stands in for the activation module at ``place``; where there is no such module, or others use it too,
    or ``sums`` stand between them, ``block`` gets a class whose code has the ``edits``.
    """

    norm: nn.Module
    activation: Activation
    seen: str
    place: tuple[nn.Module, str] | None = None
    block: nn.Module | None = None
    edits: frozenset[Edit] = frozenset()
    sums: tuple[str, ...] = ()


@dataclass(frozen=True)
class SumFold:
    """A sum before a norm that the norm takes in, by ``edits`` of the block's code."""

    norm: nn.Module
    text: str
    block: nn.Module
    edits: frozenset[Edit]


@dataclass
class Folding:
    """The folds of a model and the activations that stay, for the norms of ``norms``, by id, that are converted."""

    tree: Tree
    norms: dict[int, nn.Module]
    folds: list[Fold] = field(default_factory=list)
    sums: list[SumFold] = field(default_factory=list)
    left: list[Entry] = field(default_factory=list)
    callers: dict[int, list[Caller]] = field(default_factory=dict)
    lookers: dict[int, Caller] = field(default_factory=dict)
    #: Why only a trace can show what becomes of a norm's result.
    doubted: dict[int, str] = field(default_factory=dict)
    #: The edits of a block for all its folds, by the block's id.
    edits: dict[int, frozenset[Edit]] = field(default_factory=dict)

    def find(self) -> None:
        acts = {id(module): module for module in self.tree.modules() if module_activation(module) is not None}
        self.callers, self.lookers = reached(self.tree, self.norms | acts)
        for block in self.tree.modules():
            if _runs_in_turn(block):
                self._in_sequential(block)
            elif not type(block).__module__.startswith("torch."):
                self._in_code(block)
        if not _watched_globally():  # which a trace would call
            self._in_traces()
        for key in self.doubted:
            if not self._is_settled(self.norms[key]):
                self._leave(self.norms[key], self.doubted[key])

    def _in_traces(self) -> None:
        remaining = {key: norm for key, norm in self.norms.items() if not self._is_settled(norm)}
        for key, follower in tracing.followers(
            self.tree, remaining, lambda act: module_activation(act) is not None
        ).items():
            callers = (*self.callers.get(key, ()), *self.callers.get(id(follower.activation), ()))
            if all(id(caller.module) in follower.traced for caller in callers):
                self._replace(self.norms[key], follower.activation, "the only user in a trace")
            else:
                self._is_doubted(self.norms[key], follower.activation)

    def _is_settled(self, norm: nn.Module) -> bool:
        path = self.tree.path(norm)
        return any(fold.norm is norm for fold in self.folds) or any(entry.path == path for entry in self.left)

    def _is_doubted(self, norm: nn.Module, act: nn.Module | None) -> bool:
        """Whether other code calls a norm too, or the activation module that an Identity is to stand in for, so that
        only a trace can show what becomes of their results."""
        for module, what in (norm, "norm"), (act, f"activation behind it, {type(act).__name__},"):
            if id(module) in self.callers:
                caller = self.callers[id(module)][0]
                name = f"{type(caller.module).__name__}.{caller.method}"
                self.doubted.setdefault(id(norm), f"{name} calls the {what} as well")
        return id(norm) in self.doubted

    def _in_sequential(self, block: nn.Module) -> None:
        children = list(self.tree.children(block).values())
        for place, norm in enumerate(children):
            if id(norm) not in self.norms:
                continue
            behind = [child for child in children[place + 1 :] if not _is_identity(child)]
            act = behind[0] if behind else None
            if act is not None and _may_act(act):
                if not self._is_doubted(norm, act):
                    self._replace(norm, act, "the next module")
            elif isinstance(act, nn.Dropout) and behind[1:] and _may_act(behind[1]):
                self._leave(norm, "a dropout stands between it and the activation")

    def _in_code(self, block: nn.Module) -> None:
        for key, norm in self.tree.children(block).items():
            if id(norm) in self.norms:
                self._activation_in_code(block, key, norm)
                self._sums_in_code(block, key, norm)

    def _activation_in_code(self, block: nn.Module, key: str, norm: nn.Module) -> None:
        children = self.tree.children(block)
        kind, _ = rewriting.origin(type(block))
        found = code.follower(kind, key, self._facts(block, key))
        if found is None:
            return
        if isinstance(found, str):
            self._leave(norm, found)
            return
        act = children.get(found.child) if found.child is not None else None
        if act is not None and not _may_act(act):
            return  # the norm goes into some other module
        if act is None and found.function is None:
            return  # the child is None, or no module
        if "forward" in vars(block):
            self._leave(norm, f"the forward of {kind.__name__} was replaced in the module itself")
            return
        if self._is_doubted(norm, act if found.alone else None):
            return
        seen = f"the code of {kind.__name__}"
        if act is not None and found.alone and len(self.tree.places(act)) == 1:
            self._replace(norm, act, seen)
            return
        activation = found.function if act is None else module_activation(act)
        reason = self._obstacle(norm, act) or self._is_changed(block, found.child)
        reason = reason or self._cannot_edit(block, found.edits)
        if reason is not None or activation is None:
            self._leave(norm, reason or "")
        else:
            self._edit(block, found.edits)
            self.folds.append(Fold(norm, activation, seen, block=block, edits=found.edits, sums=found.sums))

    def _sums_in_code(self, block: nn.Module, key: str, norm: nn.Module) -> None:
        if _watched_globally() or has_own_hooks(norm) or not sum_runs(block, key):
            return
        if any(fold.norm is norm and fold.sums for fold in self.folds):
            return
        for text, edits in code.sums_into(rewriting.origin(type(block))[0], key):
            if self._cannot_edit(block, edits) is None:
                self._edit(block, edits)
                self.sums.append(SumFold(norm, text, block, edits))

    def _cannot_edit(self, block: nn.Module, edits: frozenset[Edit]) -> str | None:
        """Why the code of a block cannot be edited, or not so beside the edits that it has."""
        kind, before = rewriting.origin(type(block))
        if "forward" in vars(block):
            return f"the forward of {kind.__name__} was replaced in the module itself"
        taken = before | self.edits.get(id(block), frozenset())
        places = {edit.place for edit in taken}
        twice = [edit.place for edit in edits if edit.place in places]
        if twice:
            place = min(twice, key=lambda place: len(place.text))
            return f"another norm takes {first_line(place.text)!r} of {kind.__name__}.{place.method}"
        try:
            rewriting.edited(kind, taken | edits)
        except rewriting.CannotRewriteError as error:
            return str(error)
        return None

    def _edit(self, block: nn.Module, edits: frozenset[Edit]) -> None:
        self.edits[id(block)] = self.edits.get(id(block), frozenset()) | edits

    def _is_changed(self, block: nn.Module, child: str | None) -> str | None:
        """Why the activation behind a norm may be another one, or have another parameter, when the block runs."""
        kind, _ = rewriting.origin(type(block))
        if child is None or not code.is_changed(kind, child):
            return None
        return f"{kind.__name__} changes the activation behind it, {type(getattr(block, child)).__name__}"

    def _facts(self, block: nn.Module, key: str) -> Facts:
        children = self.tree.children(block)
        return Facts(
            lambda name: name in children and _is_identity(children[name]),
            lambda name: getattr(block, name, block) is None,
            lambda name: name in children and _makes_new(children[name]),
            branch_is_known(block, key),
        )

    def _replace(self, norm: nn.Module, act: nn.Module, seen: str) -> None:
        """Fold an activation module, for which an Identity stands in."""
        places = self.tree.places(act)
        reason = self._obstacle(norm, act)
        if reason is None and len(places) > 1:
            reason = f"the activation behind it, {type(act).__name__}, is used at {len(places)} places"
        parent, key = places[0]
        reason = reason or self._is_changed(parent, key)
        if reason is None and code.is_looked_at(rewriting.origin(type(parent))[0], key):
            reason = f"{type(parent).__name__} looks at the activation behind it, {type(act).__name__}"
        if reason is None and id(act) in self.lookers:
            looker = self.lookers[id(act)]
            name = f"{type(looker.module).__name__}.{looker.method}"
            reason = f"{name} looks at the activation behind it, {type(act).__name__}"
        activation = module_activation(act)
        if reason is not None or activation is None:
            self._leave(norm, reason or "")
        else:
            self.folds.append(Fold(norm, activation, seen, place=places[0]))

    def _obstacle(self, norm: nn.Module, act: nn.Module | None) -> str | None:
        """Why an activation cannot go into a norm, wherever they stand."""
        places = len(self.tree.places(norm))
        if places > 1:
            return f"the norm is used at {places} places"
        if _watched_globally():
            return "hooks for all modules see the norm's output, which the activation would change"
        if watches_output(norm):
            return "hooks of the norm see its output, which the activation would change"
        if act is None:
            return None
        if has_own_hooks(act) or "forward" in vars(act):
            return f"the activation behind it, {type(act).__name__}, has hooks"
        if module_activation(act) is None:
            return f"the activation behind it, {type(act).__name__}, has no fused form"
        return None

    def _leave(self, norm: nn.Module, reason: str) -> None:
        self.left.append(Entry(self.tree.path(norm), f"not fused: {reason}"))


def _runs_in_turn(block: nn.Module) -> bool:
    """Whether a module calls its children one after the other, as nn.Sequential does."""
    kind = type(block)
    iterates = getattr(kind, "__iter__", None) is nn.Sequential.__iter__
    return iterates and kind.forward is nn.Sequential.forward and "forward" not in vars(block)


def _watched_globally() -> bool:
    """Whether torch runs hooks around every module: register_module_forward_hook and the like."""
    return has_hooks(nn.Identity())


def _makes_new(module: nn.Module) -> bool:
    """Whether a module's result is a tensor that nothing else holds."""
    if has_own_hooks(module):
        return False
    if type(module).forward is nn.Sequential.forward:
        children = [child for child in module.children() if not _is_identity(child)]
        return bool(children) and _makes_new(children[-1])
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear))


def _may_act(module: nn.Module) -> bool:
    return module_activation(module) is not None or is_activation(module)


def _is_identity(module: nn.Module) -> bool:
    return type(module) is nn.Identity and not has_own_hooks(module)
