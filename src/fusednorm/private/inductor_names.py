"""Every private or undocumented name of torch's Inductor that fusednorm uses; importing this imports no Inductor.

Inductor makes the code of ``torch.compile``'s default backend. All its names are private, and it has no other way for
an op to become kernels in its code. Each name says what it is for; 2.11.0, 2.12.0 and 2.13.0 were searched and tried.
Without one of the names of :class:`Nodes` a compiled graph calls the op, as any other backend does, and ``fusednorm
doctor`` says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from fusednorm.private.lookup import find

#: Inductor's configuration, a module, and its place for a pass over a graph that autograd is done with. Without: None,
#: and graphs keep the differentiable ops.
_CONFIG, PASS_SLOT = "torch._inductor.config", "post_grad_custom_pre_pass"

#: Its place for a pass over a graph of forward and backward together. Without: norms on a CPU are calls, and all
#: backwards on a GPU launches.
JOINT_SLOT = "joint_custom_pre_pass"

#: What holds a node's result as a fake tensor. Without: the same.
VALUE = "val"

#: What holds the sizes that a node makes of its numbers, as those of torch.nonzero are. Without: nothing.
NEW_SIZES = "unbacked_bindings"

#: The attribute of a kernel in generated code that holds what the kernel is compiled with. Without: products and sums
#: are fused where the compiler likes to, and the last bits of results differ from eager mode's.
COMPILED_WITH = "triton_meta"

#: The attribute of a kernel in generated code that says where its configurations come from: a user, or a template of
#: Inductor. In 2.11 to 2.13 neither's are tuned, but a template's kernel is started by Inductor's own launcher, for
#: which no C is compiled and which does less for each launch than Triton's. Without: Triton's launcher.
ORIGIN, ORIGINS = "heuristic_type", "torch._inductor.runtime.hints"

#: The setting by which launches keep the code of their kernels, which a graph in C++ needs. torch 2.11 and 2.12 forget
#: it where cpp_wrapper is an option of torch.compile, for a backward, which is compiled when it first runs: it can then
#: launch no Triton kernel, not even one of torch's own (pytorch/pytorch#178845, mended in 2.13). Without: launches.
KEPT_CODE = "triton.store_cubin"
FORGETS = TorchVersion(torch.__version__) < TorchVersion("2.13")

#: What the graph's pass finds in a node whose arguments Inductor gives the strides of the trace. Without: nothing to
#: leave out.
EXACT_ARGUMENTS = "eager_input_vals"

#: The dimensions of images in channels_last, from the one whose elements lie next to each other on.
LAST = (1, 3, 2, 0)

#: torch's rms_norm with its inverse deviation, its gradients, and its batch_norm with given statistics, as torch's
#: functions decompose into them. Without: None, and those norms are ours in every compiled graph; a decomposed program
#: has torch.batch_norm.
rms_norm_with_rstd: Any = find("torch", "ops.aten._fused_rms_norm.default", None)
rms_norm_backward: Any = find("torch", "ops.aten._fused_rms_norm_backward.default", None)
batch_norm_of_given: Any = find("torch", "ops.aten._native_batch_norm_legit_no_training.default", None)

#: The function with which autocast begins in a graph of torch's functions. Without: norms within a region of autocast
#: are rewritten, and are not promoted.
ENTER_AUTOCAST = "_enter_autocast"

#: The function with which forward-mode differentiation begins there. Without: a norm within fails to compile.
ENTER_DUAL = "_enter_dual_level"


def loaded_config() -> Any:
    """Inductor's configuration where the process has loaded it and it has a place for a pass; None otherwise."""
    config = sys.modules.get(_CONFIG)
    return config if hasattr(config, PASS_SLOT) else None


def keep_calls(op: Any) -> None:
    """Tell Inductor, where the process has loaded it, that an op which it has no code for is to be called.

    It would do so unasked, were the op's decomposition not known for torch's exporters: it takes such an op for a
    mistake of its own, and where the variable ``CI`` is set, refuses to compile. Without: it refuses there.
    """
    module = sys.modules.get("torch._inductor.lowering")
    make, known = getattr(module, "make_fallback", None), getattr(module, "lowerings", None)
    if make is not None and known is not None and op not in known:
        make(op, warn=False)


def orders_convolutions() -> bool:
    """Whether Inductor may give convolutions another memory order than the program, by a setting that is on by default,
    and cuDNN runs them, which takes channels_last; AMD's MIOpen copies it. Without: no."""
    cudnn = torch.version.hip is None and torch.backends.cudnn.enabled
    return bool(cudnn and getattr(loaded_config(), "layout_optimization", False))


def own_origin() -> Any:
    """What :data:`ORIGIN` is for a kernel of one of Inductor's templates; None where it has no such name."""
    return find(ORIGINS, "HeuristicType.TEMPLATE", None)


def graph_pass() -> type:
    """The base class of a pass with an identity, which the keys of cached graphs hold:
    ``torch._inductor.custom_graph_pass.CustomGraphPass``. Without: ImportError, and no pass is put into place."""
    found: type = find("torch._inductor.custom_graph_pass", "CustomGraphPass")
    return found


def traced(function: Callable[..., Any], fakes: Sequence[Tensor], mode: Any) -> torch.fx.GraphModule:
    """What a function of fake tensors of this mode does, as a graph of what Inductor has code for."""
    from torch.fx.experimental.proxy_tensor import make_fx

    table = find("torch._inductor.decomposition", "select_decomp_table")()
    with mode:
        return make_fx(function, decomposition_table=table)(*fakes)


class Nodes:
    """What a lowering needs of Inductor: its nodes, which stand for tensors, and the way from a graph to its code.

    Raises ImportError where a name is missing.
    """

    def __init__(self) -> None:
        ir, lowering = "torch._inductor.ir", "torch._inductor.lowering"
        #: A node that a lowering returns, one that lies in memory, and the layout of one whose strides are still free.
        self.tensor_box = find(ir, "TensorBox")
        self.storage_box = find(ir, "StorageBox")
        self.flexible = find(ir, "FlexibleLayout")
        #: What a node that is not in memory yet would be there.
        self.computed = find(ir, "ComputedBuffer")
        #: A node in memory, and in an order of its dimensions; the order of given strides; a node as a fake tensor.
        self.realized = find(ir, "ExternKernel.realize_input")
        self.with_order = find(ir, "ExternKernel.require_stride_order")
        self.stride_order = find(ir, "get_stride_order")
        self.to_fake = find(ir, "ir_node_to_tensor")
        #: What is being compiled: its graph, and the mode of its fake tensors.
        self.current = find("torch._inductor.virtualized", "V")
        self.register_lowering = find(lowering, "register_lowering")
        self.process = find("torch._inductor.codegen.subgraph", "inline_subgraph_to_ir_nodes")
        external = find(ir, "FallbackKernel")
        #: The Python function that is the kernel of each op.
        self.functions: dict[Any, Callable[..., Any]] = {}
        functions, current = self.functions, self.current

        class PythonCall(external):  # type: ignore[misc, valid-type]
            """A call of an op, in Python code a call of its kernel: torch's dispatcher would take 7 us more."""

            python_kernel_name: str | None
            own_name: str | None = None

            def codegen(self, wrapper: Any) -> None:
                # A graph in C++ may first be generated in Python, so the op's own name is kept.
                self.own_name = self.own_name or self.python_kernel_name
                self.python_kernel_name = self.own_name
                if not current.graph.cpp_wrapper:
                    function = functions[self.op_overload]
                    wrapper.add_import_once(f"import {function.__module__}")
                    self.python_kernel_name = f"{function.__module__}.{function.__name__}"
                super().codegen(wrapper)

        self.call_of = PythonCall

    def register(self, op: Any, function: Callable[..., Any], lowering: Callable[..., Any]) -> None:
        """An op, the Python function that is its kernel, and what makes nodes of its arguments."""
        self.functions[op] = function
        self.register_lowering(op, type_promotion_kind=None)(lowering)

    def device(self, node: Any) -> torch.device:
        device: torch.device = node.get_device()
        return device

    def is_static(self, node: Any) -> bool:
        """Whether the sizes are numbers, and no symbols."""
        return all(getattr(size, "is_number", True) for size in node.get_size())

    def can_launch(self) -> bool:
        """Whether the code of the graph can hold launches."""
        keeps = getattr(loaded_config(), KEPT_CODE, True)
        return bool(keeps or not self.current.graph.cpp_wrapper)

    def convolves_last(self) -> bool:
        """Whether the graph's convolutions of images take channels_last, whatever the program has. Without: no."""
        return bool(getattr(self.current.graph, "layout_opt", False))

    def wants_last(self, source: torch.fx.Node) -> bool:
        """Whether Inductor prefers a tensor of the graph in channels_last, as one of images around convolutions that
        take it so. Without: no, and the strides of what a tensor is computed from decide: 2.11 misreads those of
        ``torch.cat``."""
        value = source.meta.get(VALUE)
        preferred = getattr(self.current.graph, "nodes_prefer_channels_last", ())
        return source in preferred and isinstance(value, Tensor) and value.dim() == 4

    def settled(self, node: Any, like: Any = None, last: bool = False) -> Any:
        """The node in memory, in strides that stay as they are: its own, or where these are still free channels_last if
        it is to be ``last``, those of ``like``, if that has the same sizes, and else those that suit what it is
        computed from."""
        found = self.realized(node)
        if isinstance(found, self.storage_box) and isinstance(found.get_layout(), self.flexible):
            if last:
                found.data.freeze_layout_with_fill_order(LAST)
            elif like is not None and list(like.get_size()) == list(found.get_size()):
                shapes = self.current.graph.sizevars.shape_env  # which compares strides that are symbols
                found.data.freeze_layout_with_stride_order(self.stride_order(like.get_stride(), shapes))
            else:
                found.data.decide_layout()
        return self.tensor_box(found)

    def ordered(self, node: Any, order: Sequence[int]) -> Any:
        """The node with its dimensions in this order of memory, in a copy where it has another one."""
        return self.tensor_box(self.with_order(node, order))

    def fakes(self, nodes: Sequence[Any]) -> list[Tensor | None]:
        """Fake tensors of the nodes' sizes and strides."""
        with self.current.fake_mode:
            return [self.to_fake(node) for node in nodes]

    def foreseen(self, node: Any, last: bool = False) -> Tensor:
        """A fake tensor of a node's sizes, in the strides that :meth:`settled` would give it now."""
        box = getattr(node, "data", None)
        made = box.data if isinstance(box, self.storage_box) else None
        if made is not None and self.is_static(node) and not hasattr(made, "layout"):
            layout = self.flexible(node.get_device(), node.get_dtype(), node.get_size())
            made = self.computed(name=None, layout=layout, data=made)
        with self.current.fake_mode:
            if not isinstance(made, self.computed) or not isinstance(made.layout, self.flexible):
                fake: Tensor = self.to_fake(node)
                return fake
            order, size = LAST if last else made.get_fill_order(), [int(one) for one in node.get_size()]
            strides = self.flexible.fill_ordered(size, order) if order else self.flexible.contiguous_strides(size)
            found: Tensor = torch.empty_strided(size, strides, dtype=node.get_dtype(), device=node.get_device())
            return found

    def trace(self, function: Callable[..., Any], fakes: Sequence[Tensor]) -> torch.fx.GraphModule:
        """What a function of fake tensors does, as a graph."""
        return traced(function, fakes, self.current.fake_mode)

    def inline(self, graph: torch.fx.GraphModule, nodes: Sequence[Any]) -> Any:
        """The results of a graph of these nodes, computed by the code at hand."""
        current = self.current.graph
        around, current.module = current.module, graph  # the first releases that have the function do not do so
        try:
            return self.process(graph, list(nodes), "fusednorm")
        finally:
            current.module = around

    def call(self, op: Any, arguments: tuple[Any, ...]) -> list[Any]:
        """The results of one call of these arguments, in the strides that they have."""
        return [self.tensor_box.create(result) for result in self.call_of.create(op, *arguments)]
