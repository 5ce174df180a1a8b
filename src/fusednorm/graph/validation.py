"""Validation: it collects every mistake of a graph, and infers what its tensors do not declare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from math import prod
from typing import TYPE_CHECKING

import torch

from fusednorm.dtypes import compute_dtype, dtype_name
from fusednorm.formats import FORMATS
from fusednorm.graph.errors import Mistake
from fusednorm.graph.nodes import Node, Port, accepted_dims, groups_or_dims_of, trailing
from fusednorm.graph.tensors import (
    Dims,
    TensorAttributes,
    extent,
    overlaps_itself,
    same_strides,
)
from fusednorm.norm import ROW_FAMILIES, norm_of
from fusednorm.strides import MOST_DIMS, empty_output, packed_strides

if TYPE_CHECKING:
    from fusednorm.graph.graph import Graph

MOST_ELEMENTS = 1 << 62
STATISTIC_DTYPES = (torch.float32, torch.float64)


class Validator:
    """One validation. ``run`` fills ``mistakes``, empty for a right graph, and ``order``, the nodes sorted."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.mistakes: list[Mistake] = []
        self.order: list[Node] = []
        self.producers: dict[TensorAttributes, tuple[Node, str]] = {}
        self.readers: dict[TensorAttributes, list[tuple[Node, str]]] = {}
        self.unknown: set[TensorAttributes] = set()  # tensors whose dims follow from something that is wrong

    def run(self) -> None:
        self.identities()
        self.connections()
        for tensor in self.graph.tensors:
            if tensor not in self.producers:
                self.source(tensor)
        if self.sorted():
            for node in self.order:
                before = len(self.mistakes)
                self.node(node)
                if len(self.mistakes) > before:
                    self.unknown |= set(node.outputs.values())
            self.uses()
            self.eight_bits()

    def wrong(self, where: str, value: str, expected: str, remedy: str) -> None:
        self.mistakes.append(Mistake(where, value, expected, remedy))

    # --- names and connections ---

    def identities(self) -> None:
        """Infers uids and names that were not declared, and finds those declared twice."""
        tensors = self.graph.tensors
        taken = {tensor.declared["uid"] for tensor in tensors if "uid" in tensor.declared}
        free = (uid for uid in range(1, len(tensors) + len(taken) + 1) if uid not in taken)
        for tensor in tensors:
            if "uid" not in tensor.declared:
                tensor.infer(uid=next(free))
            if not tensor.name:
                tensor.infer(name=f"tensor_{tensor.uid}")
        for what, remedy in (("uid", "give each tensor its own uid, or none"), ("name", "set_name one of them")):
            seen: dict[object, TensorAttributes] = {}
            for tensor in tensors:
                first = seen.setdefault(getattr(tensor, what), tensor)
                if first is not tensor:
                    value = f"{what} {getattr(tensor, what)!r} is also that of tensor {first.name!r} (uid {first.uid})"
                    self.wrong(f"tensor {tensor.name!r}", value, f"a {what} of its own", remedy)
        names: set[str] = set()
        for node in self.graph.nodes:
            if node.name in names:
                self.wrong(f"node {node}", f"the name {node.name!r} is taken", "a name of its own", "rename one")
            names.add(node.name)

    def connections(self) -> None:
        known = set(self.graph.tensors)
        for node in self.graph.nodes:
            for port, tensor in [*node.inputs.items(), *node.outputs.items()]:
                if tensor not in known:
                    where = f"node {node}, port {port}"
                    self.wrong(where, "the tensor belongs to another graph", "one of this graph", "declare it here")
                    self.unknown.add(tensor)
            for port, tensor in node.inputs.items():
                self.readers.setdefault(tensor, []).append((node, port))
            for port, tensor in node.outputs.items():
                writer = self.producers.setdefault(tensor, (node, port))
                if writer != (node, port):
                    value = f"tensor {tensor.name!r} is already written by node {writer[0]}, port {writer[1]}"
                    where = f"node {node}, port {port}"
                    self.wrong(where, value, "one writer for each tensor", "give one of them a tensor of its own")
        if not self.graph.nodes:
            self.wrong("graph", "there is no node", "at least one", "add one, e.g. graph.groupnorm(...)")

    def sorted(self) -> bool:
        sorter: TopologicalSorter[Node] = TopologicalSorter()
        for node in self.graph.nodes:
            sorter.add(node, *(self.producers[t][0] for t in node.inputs.values() if t in self.producers))
        try:
            self.order = list(sorter.static_order())
        except CycleError as error:
            names = " -> ".join(node.name for node in error.args[1])
            self.wrong(
                "graph", f"the nodes {names} form a cycle", "no cycle", "let no node read what follows from its result"
            )
            return False
        return True

    # --- tensors ---

    def source(self, tensor: TensorAttributes) -> None:
        """A tensor that no node writes: an input, whose dims must be declared."""
        where = f"tensor {tensor.name!r}"
        uses = self.readers.get(tensor, [])
        if tensor.is_virtual:
            value = "it is virtual, and no node writes it"
            self.wrong(where, value, "a node that writes it", "declare it with is_virtual=False, as an input")
        elif not uses:
            self.wrong(where, "no node reads or writes it", "a use", "connect it to a node, or do not declare it")
        if tensor.value is not None:
            self.number(where, tensor)
        if tensor.dims is None:
            self.unknown.add(tensor)
            if not tensor.is_virtual and uses:
                value = f"it has no dims and is read by node {uses[0][0]}, port {uses[0][1]}"
                self.wrong(where, value, "dims", "give dims, or use graph.tensor_like(torch_tensor)")
            return
        tensor.infer(strides=packed_strides(tensor.dims))
        port = next((p for node, name in uses for p in node.kind.inputs if p.name == name), None)
        tensor.infer(dtype=self.default_dtype(tensor, port))
        if not self.shape(where, tensor):
            self.unknown.add(tensor)

    def number(self, where: str, tensor: TensorAttributes) -> None:
        """A tensor with a value, of one element: for pointwise nodes, whatever the number of their dims."""
        tensor.infer(dims=(1,))
        assert tensor.dims is not None
        if prod(tensor.dims) != 1:
            self.wrong(where, f"it has a value and dims {tensor.dims}", "one element", "leave dims out")
        for node, port in self.readers.get(tensor, []):
            if node.kind.operation not in ("arithmetic", "quantize") or (node.kind.family is None and port == "x"):
                value = f"it has a value and is read by node {node}, port {port}"
                self.wrong(where, value, "a reader add or mul", "give the node a tensor of the variant pack")

    def shape(self, where: str, tensor: TensorAttributes) -> bool:
        """Whether a tensor can have these dims and strides."""
        dims, strides = tensor.dims, tensor.strides
        assert dims is not None and strides is not None
        before = len(self.mistakes)
        if len(dims) > MOST_DIMS:
            self.wrong(
                where, f"there are {len(dims)} dims", f"at most {MOST_DIMS}, as torch's own", "join some of them"
            )
        elif not dims or not all(0 <= size <= MOST_ELEMENTS for size in dims) or prod(dims) > MOST_ELEMENTS:
            self.wrong(where, f"dims are {dims}", "one size or more, each of at least 0", "give the tensor's sizes")
        elif len(strides) != len(dims):
            value = f"strides {strides} for dims {dims}"
            self.wrong(where, value, f"{len(dims)} strides", "leave strides out for a packed tensor")
        elif not all(0 <= stride <= MOST_ELEMENTS for stride in strides) or extent(dims, strides) > MOST_ELEMENTS:
            self.wrong(
                where, f"strides are {strides}", "strides of at least 0", "leave strides out for a packed tensor"
            )
        return len(self.mistakes) == before

    def default_dtype(self, tensor: TensorAttributes, port: Port | None) -> torch.dtype:
        if port is not None and port.role == "statistic":
            return compute_dtype(self.graph.io_data_type)
        inside = tensor.is_virtual or tensor.value is not None
        return self.graph.intermediate_data_type if inside else self.graph.io_data_type

    # --- nodes ---

    def node(self, node: Node) -> None:
        where = f"node {node}"
        before = len(self.mistakes)
        for attribute in node.kind.attributes:
            value = node.attributes.get(attribute.name)
            expected = attribute.wrong(value)
            if expected is not None:
                remedy = f"give {attribute.name}={attribute.default if attribute.default is not None else '...'}"
                self.wrong(where, f"{attribute.name} is {value!r}", expected, remedy)
        for port in node.kind.inputs:
            if port.required and port.name not in node.inputs:
                place = f"{where}, port {port.name}"
                self.wrong(place, "it is not connected", f"a {port.role} tensor", f"give {port.name}=...")
        self.combinations(node)
        main = node.inputs.get(node.kind.main)
        failed = any(tensor in self.unknown for tensor in node.inputs.values())
        if len(self.mistakes) > before or failed or main is None or main.dims is None:
            self.unknown |= set(node.outputs.values())
            return
        if node.kind.operation == "quantize":
            self.quantize(node, main)
        elif node.kind.family is None:
            self.pointwise(node)
        elif self.norm(node, main.dims):
            for port in node.kind.inputs:
                if port.name in node.inputs:
                    self.port(node, port, node.inputs[port.name], main.dims)
            self.outputs(node, main)
        self.one_dtype(node)

    def combinations(self, node: Node) -> None:
        """Ports that only make sense together, or apart."""
        given = node.inputs
        where, kind = f"node {node}", node.kind
        if kind.name == "batchnorm_inference" and ("variance" in given) == ("inv_variance" in given):
            came = "both variance and inv_variance" if "variance" in given else "neither variance nor inv_variance"
            self.wrong(where, f"{came} are given", "one of the two", "variance goes with epsilon")
        if kind.name == "batchnorm" and ("prev_running_mean" in given) != ("prev_running_variance" in given):
            value = "one of prev_running_mean and prev_running_variance is given"
            self.wrong(where, value, "both or neither", "give the other")
        if kind.operation == "forward" and "inv_variance" in given:
            if kind.family != "rms_norm" and "mean" not in given:
                self.wrong(where, "inv_variance is given without mean", "both or neither", "give mean=...")
            if node.attributes.get("phase") != "inference":
                value = "mean and inv_variance are given in the training phase"
                self.wrong(where, value, "the inference phase", "leave them out, or set phase='inference'")
        elif kind.operation == "forward" and "mean" in given:
            self.wrong(where, "mean is given without inv_variance", "both or neither", "give inv_variance=...")

    def norm(self, node: Node, dims: Dims) -> bool:
        """Whether a family can take an x of these dims."""
        where, family = f"node {node}, port x", node.kind.family
        before = len(self.mistakes)
        computes = node.kind.operation == "forward" and "inv_variance" not in node.inputs
        if family in ROW_FAMILIES:
            shape = trailing(node, dims)
            if isinstance(shape, str):
                remedy = f"give normalized_shape={dims[-1:]}, or a scale of these dims"
                self.wrong(where, shape, "the last dims of x", remedy)
            return len(self.mistakes) == before
        if len(dims) < 2:
            self.wrong(where, f"dims {dims} have rank 1", "(N, C) or (N, C, *)", "add the missing dims")
            return False
        channels, elements = dims[1], prod(dims)
        num_statistics = channels if family == "batch_norm" else dims[0] * channels
        if family == "group_norm":
            num_groups = int(node.attributes["num_groups"])
            if channels % num_groups:
                value = f"the {channels} channels of {dims} cannot be divided into num_groups={num_groups}"
                self.wrong(where, value, f"a divisor of {channels}", "change num_groups; dims are (N, C, *)")
            num_statistics = num_groups  # torch, too, takes one element per group where there are several samples
        if computes and elements and elements == num_statistics:
            value = f"dims {dims} leave one element for each statistic"
            self.wrong(where, value, "more than one", "use more samples or positions, or given statistics")
        return len(self.mistakes) == before

    def port(self, node: Node, port: Port, tensor: TensorAttributes, main: Dims) -> None:
        """Checks the dims, strides and dtype of one connected port."""
        where = f"node {node}, port {port.name}"
        accepted = accepted_dims(node, port.role, main)
        dims, strides, dtype = tensor.dims, tensor.strides, tensor.dtype
        assert dims is not None and strides is not None and dtype is not None
        if dims not in accepted:
            expected = " or ".join(str(one) for one in dict.fromkeys(accepted))
            value = f"tensor {tensor.name!r} has dims {dims}"
            self.wrong(where, value, expected, f"x has dims {main}; reshape or declare it accordingly")
            return
        if port.role == "data":
            return
        if not same_strides(dims, strides, packed_strides(dims)):
            value = f"tensor {tensor.name!r} has strides {strides}"
            self.wrong(where, value, f"packed ones, {packed_strides(dims)}", "leave strides out, or copy it")
        if port.role == "statistic" and dtype not in STATISTIC_DTYPES:
            value = f"tensor {tensor.name!r} is {dtype_name(dtype)}"
            self.wrong(where, value, "float32 or float64", "statistics do not fit 16 bits; set_dtype(torch.float32)")

    def outputs(self, node: Node, main: TensorAttributes) -> None:
        ports = {port.name: port for port in node.kind.outputs}
        assert main.dims is not None and main.strides is not None
        for name, tensor in node.outputs.items():
            if tensor in self.unknown:
                continue
            port, source = ports[name], node.inputs.get(ports[name].along or "")
            dims = accepted_dims(node, port.role, main.dims)[0]
            if port.role == "data":
                dtype = self.data_dtype(node, tensor)
                family = node.kind.family
                assert family is not None
                meta = torch.empty_strided(main.dims, main.strides, dtype=dtype, device="meta")
                strides = empty_output(norm_of(family, groups_or_dims_of(node, main.dims)), meta).stride()
            else:
                source_dims = source.dims if source is not None and source.dims else dims
                dims, strides = source_dims, packed_strides(source_dims)
                if source is not None and source.dtype is not None:
                    dtype = source.dtype
                else:
                    dtype = compute_dtype(self.graph.io_data_type)
            self.output(node, port, tensor, dims, strides, dtype, main.dims)

    def output(
        self,
        node: Node,
        port: Port,
        tensor: TensorAttributes,
        dims: Dims,
        strides: Dims,
        dtype: torch.dtype,
        main: Dims,
    ) -> None:
        where = f"node {node}, port {port.name}"
        tensor.infer(dims=dims, dtype=dtype)
        assert tensor.dims is not None
        if tensor.dims != dims and port.role in ("parameter", "statistic"):
            strides = packed_strides(tensor.dims)
        tensor.infer(strides=strides)
        if not self.shape(where, tensor):
            return
        assert tensor.strides is not None
        if port.role in ("data", "operand", "codes", "block") and tensor.dims != dims:
            value = f"tensor {tensor.name!r} is declared with dims {tensor.dims}"
            self.wrong(where, value, str(dims), "leave the dims of a result out; they are inferred")
            return
        if port.role in ("data", "parameter", "statistic"):
            self.port(node, port, tensor, main)
        if overlaps_itself(tensor.dims, tensor.strides):
            value = f"tensor {tensor.name!r} has strides {tensor.strides}, so that elements share memory"
            self.wrong(where, value, "one place for each element", "leave strides out for a packed tensor")

    def data_dtype(self, node: Node, tensor: TensorAttributes) -> torch.dtype:
        """An undeclared result's dtype: intermediate_data_type if virtual, else that of the inputs from outside."""
        if tensor.is_virtual:
            return self.graph.intermediate_data_type
        roles = {port.name: port.role for port in node.kind.inputs}
        for name, source in node.inputs.items():
            outside = not source.is_virtual and source.value is None
            if roles[name] in ("data", "operand") and outside and source.dtype is not None:
                return source.dtype
        return self.graph.io_data_type

    def pointwise(self, node: Node) -> None:
        where = f"node {node}"
        operands = list(node.inputs.values())
        rank = max((len(tensor.dims or ()) for tensor in operands if tensor.value is None), default=1)
        shapes = [tensor.dims if tensor.value is None else (1,) * rank for tensor in operands if tensor.dims]
        if node.kind.operation == "activation_backward" and len(set(shapes)) > 1:
            value = f"dy has dims {shapes[0]} and x {shapes[1]}"
            self.wrong(where, value, "equal dims", "give dy the dims of what the activation took")
            return
        if len({len(shape) for shape in shapes}) > 1 or any(
            len({size for size in sizes if size != 1}) > 1 for sizes in zip(*shapes, strict=False)
        ):
            value = f"operands of dims {' and '.join(map(str, shapes))}"
            self.wrong(where, value, "equal dims, or 1 where one is repeated", "declare it with as many dims")
            return
        dims = tuple(broadcast_size(sizes) for sizes in zip(*shapes, strict=True))
        port = node.kind.outputs[0]
        if port.name not in node.outputs or node.outputs[port.name] in self.unknown:
            return
        result = node.outputs[port.name]
        like = next((tensor for tensor in operands if tensor.dims == dims), None)
        strides = packed_strides(dims)
        if like is not None and like.strides is not None:
            strides = torch.empty_like(torch.empty_strided(dims, like.strides, device="meta")).stride()
        self.output(node, port, result, dims, strides, self.data_dtype(node, result), dims)

    def quantize(self, node: Node, x: TensorAttributes) -> None:
        """The results of a quantizing node: codes in its format, and float32 scales of blocks."""
        given, dims = node.inputs.get("scale"), x.dims
        assert dims is not None and x.strides is not None
        if given is not None and prod(given.dims or ()) != 1:
            value = f"tensor {given.name!r} has dims {given.dims}"
            self.wrong(f"node {node}, port scale", value, "one element", "use block_scale_quantize for more")
        dense = torch.empty_like(torch.empty_strided(dims, x.strides, device="meta")).stride()
        codes: torch.dtype = getattr(torch, node.attributes["dtype"])
        blocks = (*dims[:-1], 1)
        for port in node.kind.outputs:
            tensor = node.outputs.get(port.name)
            if tensor is None or tensor in self.unknown:
                continue
            if port.role == "codes":
                self.output(node, port, tensor, dims, dense, codes, dims)
            else:
                self.output(node, port, tensor, blocks, packed_strides(blocks), torch.float32, dims)

    def eight_bits(self) -> None:
        """Only quantizing nodes write 8 bits, as outputs; nobody reads them."""
        for tensor in self.graph.tensors:
            if tensor.dtype is None:
                continue
            node, port = self.producers.get(tensor, (None, ""))
            role = next((one.role for one in node.kind.outputs if one.name == port), None) if node else None
            wanted = node.attributes["dtype"] if node is not None and role == "codes" else None
            where, name = f"tensor {tensor.name!r}", dtype_name(tensor.dtype)
            if wanted is None and name in FORMATS:
                self.wrong(where, f"it is {name}", "a floating dtype", "8 bits are results of quantize nodes alone")
            elif wanted is not None and name != wanted:
                self.wrong(where, f"it is {name}", wanted, f"leave its dtype out, or give dtype={name!r} to {node}")
            elif wanted is not None and (tensor.is_virtual or tensor in self.readers):
                self.wrong(where, "8 bits are virtual, or are read", "an output", "set_output() it, and read x")

    def one_dtype(self, node: Node) -> None:
        """Data from outside has one dtype at a node: the library never casts silently."""
        roles = {("in", port.name): port.role for port in node.kind.inputs}
        roles |= {("out", port.name): port.role for port in node.kind.outputs}
        found: dict[torch.dtype, str] = {}
        connected = [(("in", name), tensor) for name, tensor in node.inputs.items()]
        connected += [(("out", name), tensor) for name, tensor in node.outputs.items()]
        for key, tensor in connected:
            outside = not tensor.is_virtual and tensor.value is None
            if roles[key] in ("data", "operand") and outside and tensor.dtype is not None:
                found.setdefault(tensor.dtype, key[1])
        if len(found) > 1:
            value = ", ".join(f"{port} is {dtype_name(dtype)}" for dtype, port in found.items())
            self.wrong(f"node {node}", value, "one dtype among the tensors from outside", "set_dtype, or convert one")

    # --- uses ---

    def uses(self) -> None:
        if not any(not tensor.is_virtual for tensor in self.producers):
            if self.graph.nodes:
                self.wrong("graph", "no tensor is an output", "at least one", "set_output() what you want")
            return
        for node in self.order:
            results = node.outputs.values()
            if all(tensor.is_virtual and tensor not in self.readers for tensor in results):
                value = f"{listed(node.outputs)} are virtual and nothing reads them"
                self.wrong(f"node {node}", value, "a use", "set_output() one of them, or leave the node out")


def broadcast_size(sizes: Sequence[int]) -> int:
    return next((size for size in sizes if size != 1), 1)


def listed(names: Iterable[str]) -> str:
    return ", ".join(names)
