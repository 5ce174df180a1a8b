"""How a graph is written down: its tensors, and one method for each kind of node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from fusednorm.dtypes import dtype_name
from fusednorm.graph.errors import InvalidGraphError, Mistake
from fusednorm.graph.nodes import KINDS, POINTWISE, Kind, Node
from fusednorm.graph.tensors import TensorAttributes

Phase = Literal["training", "inference"]
Handle = TensorAttributes


class GraphBuilder:
    """Tensors and nodes; :class:`fusednorm.graph.Graph` adds the stages.

    Every tensor is a :class:`TensorAttributes`. A node's results are virtual until ``set_output()``. Dims are (N, C, *)
    whatever the memory order, which the strides give. xhat = (x - mean) inv_variance, with
    inv_variance = (variance + epsilon)^(-1/2), and y = xhat scale + bias; scale and bias are optional everywhere.
    """

    name: str

    def __init__(self) -> None:
        self.tensors: list[TensorAttributes] = []
        self.nodes: list[Node] = []

    def _changed(self) -> None:
        """Called after each declaration: :class:`fusednorm.graph.Graph` then drops what it inferred."""

    # --- tensors ---

    def tensor(
        self,
        dims: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        dtype: torch.dtype | str | None = None,
        *,
        uid: int | None = None,
        name: str | None = None,
        is_virtual: bool = False,
        value: float | None = None,
    ) -> Handle:
        """A tensor of the graph; without strides it is packed, without a dtype it has io_data_type.

        A statistic (mean, inverse variance, running statistics) is float32 by default, float64 in a float64 graph. With
        a ``value`` it is that number, of dims (1, 1, ...) or none, and no tensor of the variant pack: what cuDNN passes
        by value.
        """
        declared = {"dims": dims, "strides": strides, "dtype": dtype, "uid": uid, "name": name, "value": value}
        tensor = TensorAttributes(self._changed, **declared, is_virtual=is_virtual)  # type: ignore[arg-type]
        self.tensors.append(tensor)
        self._changed()
        return tensor

    def tensor_like(self, tensor: torch.Tensor, *, uid: int | None = None, name: str | None = None) -> Handle:
        """A tensor with the dims, strides and dtype of a torch tensor, whose device becomes the graph's."""
        if not isinstance(tensor, torch.Tensor):
            value = f"it is a {type(tensor).__name__}"
            mistake = Mistake("tensor_like", value, "a torch.Tensor", "use graph.tensor(dims, ...)")
            raise InvalidGraphError(self.name, [mistake])
        self._seen_device(tensor.device)
        return self.tensor(tuple(tensor.shape), tensor.stride(), tensor.dtype, uid=uid, name=name)

    def _seen_device(self, device: torch.device) -> None:
        raise NotImplementedError

    # --- nodes ---

    def add_node(
        self,
        kind: str,
        inputs: Mapping[str, Handle | None],
        outputs: Mapping[str, Handle] | None = None,
        *,
        name: str | None = None,
        **attributes: Any,
    ) -> Node:
        """A node of any kind of ``fusednorm.graph.KINDS``; results that are not given are made.

        Raises:
            InvalidGraphError: a kind, port or attribute that does not exist.
        """
        found = KINDS.get(kind) if isinstance(kind, str) else None
        where = f"node {name or kind}"
        if found is None:
            raise self._mistake(where, f"the kind {kind!r} does not exist", ", ".join(KINDS), "use one of these")
        present = {port: tensor for port, tensor in inputs.items() if tensor is not None}
        for given, ports, what in ((present, found.inputs, "input"), (outputs or {}, found.outputs, "output")):
            known = [port.name for port in ports]
            for port, tensor in given.items():
                if port not in known:
                    value = f"there is no {what} {port!r}"
                    raise self._mistake(where, value, f"one of {', '.join(known)}", "rename it or leave it out")
                if not isinstance(tensor, TensorAttributes):
                    value = f"it is a {type(tensor).__name__}"
                    raise self._mistake(
                        f"{where}, port {port}", value, "a tensor of the graph", "use graph.tensor(...)"
                    )
        known = [attribute.name for attribute in found.attributes]
        for attribute in attributes:
            if attribute not in known:
                expected = f"one of {', '.join(known)}" if known else "none"
                raise self._mistake(where, f"there is no attribute {attribute!r}", expected, "leave it out")
        values = {attribute.name: attributes.get(attribute.name, attribute.default) for attribute in found.attributes}
        node = Node(found, self._node_name(found, name), present, dict(outputs or {}), values)
        if outputs is None:
            self._make_outputs(node)
        self.nodes.append(node)
        self._changed()
        return node

    def _make_outputs(self, node: Node) -> None:
        for port in node.kind.outputs:
            inference = port.training and node.attributes.get("phase", "training") != "training"
            if inference or (port.along is not None and port.along not in node.inputs):
                continue
            node.outputs[port.name] = self.tensor(name=f"{node.name}.{port.name}", is_virtual=True)

    def _node_name(self, kind: Kind, name: str | None) -> str:
        if name is not None:
            if not isinstance(name, str) or not name:
                raise self._mistake(f"node {kind.name}", f"name is {name!r}", "words", "give a name, or none")
            return name
        taken = {node.name for node in self.nodes}
        count = sum(node.kind is kind for node in self.nodes)
        while (made := f"{kind.name}_{count}" if count else kind.name) in taken:
            count += 1
        return made

    def _mistake(self, where: str, value: str, expected: str, remedy: str) -> InvalidGraphError:
        return InvalidGraphError(self.name, [Mistake(where, value, expected, remedy)])

    def _results(self, kind: str, inputs: Mapping[str, Handle | None], name: str | None, **attributes: Any) -> Any:
        node = self.add_node(kind, inputs, name=name, **attributes)
        return tuple(node.outputs.get(port.name) for port in node.kind.outputs)

    def batchnorm_inference(
        self,
        x: Handle,
        mean: Handle,
        inv_variance: Handle | None = None,
        scale: Handle | None = None,
        bias: Handle | None = None,
        *,
        variance: Handle | None = None,
        epsilon: float = 1e-5,
        name: str | None = None,
    ) -> Handle:
        """y = xhat scale + bias from given statistics: mean with inv_variance, or with variance and epsilon."""
        inputs = {"x": x, "mean": mean, "inv_variance": inv_variance, "variance": variance, "scale": scale}
        y: Handle = self._results("batchnorm_inference", inputs | {"bias": bias}, name, epsilon=epsilon)[0]
        return y

    def batchnorm(
        self,
        x: Handle,
        scale: Handle | None = None,
        bias: Handle | None = None,
        prev_running_mean: Handle | None = None,
        prev_running_variance: Handle | None = None,
        *,
        epsilon: float = 1e-5,
        momentum: float = 0.1,
        name: str | None = None,
    ) -> tuple[Handle, Handle, Handle, Any, Any]:
        """(y, mean, inv_variance, next_running_mean, next_running_variance) in training, over samples and positions.

        next = (1 - momentum) prev + momentum batch, with the unbiased variance of the batch; None without prev.
        """
        inputs = {"x": x, "scale": scale, "bias": bias, "prev_running_mean": prev_running_mean}
        inputs |= {"prev_running_variance": prev_running_variance}
        results: tuple[Handle, Handle, Handle, Any, Any] = self._results(
            "batchnorm", inputs, name, epsilon=epsilon, momentum=momentum
        )
        return results

    def batchnorm_backward(
        self,
        dy: Handle,
        x: Handle,
        scale: Handle | None,
        mean: Handle,
        inv_variance: Handle,
        *,
        name: str | None = None,
    ) -> tuple[Handle, Any, Any]:
        """(dx, dscale, dbias) of batchnorm in training, from its saved statistics; dscale and dbias need scale."""
        return self._backward("batchnorm_backward", dy, x, scale, mean, inv_variance, name)

    def groupnorm(
        self,
        x: Handle,
        scale: Handle | None = None,
        bias: Handle | None = None,
        *,
        num_groups: int,
        epsilon: float = 1e-5,
        phase: Phase = "training",
        mean: Handle | None = None,
        inv_variance: Handle | None = None,
        name: str | None = None,
    ) -> tuple[Handle, Any, Any]:
        """(y, mean, inv_variance), statistics over a group's channels and positions for each sample.

        In the inference phase mean and inv_variance are None among the results, and are applied where they are given.
        """
        inputs = {"x": x, "scale": scale, "bias": bias, "mean": mean, "inv_variance": inv_variance}
        return self._forward("groupnorm", inputs, phase, name, num_groups=num_groups, epsilon=epsilon)

    def groupnorm_backward(
        self,
        dy: Handle,
        x: Handle,
        scale: Handle | None,
        mean: Handle,
        inv_variance: Handle,
        *,
        num_groups: int,
        name: str | None = None,
    ) -> tuple[Handle, Any, Any]:
        """(dx, dscale, dbias) of groupnorm; a result that is neither an output nor read is not computed."""
        return self._backward("groupnorm_backward", dy, x, scale, mean, inv_variance, name, num_groups=num_groups)

    def instancenorm(
        self,
        x: Handle,
        scale: Handle | None = None,
        bias: Handle | None = None,
        *,
        epsilon: float = 1e-5,
        phase: Phase = "training",
        mean: Handle | None = None,
        inv_variance: Handle | None = None,
        name: str | None = None,
    ) -> tuple[Handle, Any, Any]:
        """(y, mean, inv_variance), statistics over the positions of a sample and channel; else as :meth:`groupnorm`."""
        inputs = {"x": x, "scale": scale, "bias": bias, "mean": mean, "inv_variance": inv_variance}
        return self._forward("instancenorm", inputs, phase, name, epsilon=epsilon)

    def instancenorm_backward(
        self,
        dy: Handle,
        x: Handle,
        scale: Handle | None,
        mean: Handle,
        inv_variance: Handle,
        *,
        name: str | None = None,
    ) -> tuple[Handle, Any, Any]:
        """(dx, dscale, dbias) of instancenorm."""
        return self._backward("instancenorm_backward", dy, x, scale, mean, inv_variance, name)

    def layernorm(
        self,
        x: Handle,
        scale: Handle | None = None,
        bias: Handle | None = None,
        *,
        normalized_shape: Sequence[int] | None = None,
        epsilon: float = 1e-5,
        phase: Phase = "training",
        mean: Handle | None = None,
        inv_variance: Handle | None = None,
        name: str | None = None,
    ) -> tuple[Handle, Any, Any]:
        """(y, mean, inv_variance), statistics over the trailing dims that scale has, or ``normalized_shape``."""
        inputs = {"x": x, "scale": scale, "bias": bias, "mean": mean, "inv_variance": inv_variance}
        return self._forward("layernorm", inputs, phase, name, normalized_shape=normalized_shape, epsilon=epsilon)

    def layernorm_backward(
        self,
        dy: Handle,
        x: Handle,
        scale: Handle | None,
        mean: Handle,
        inv_variance: Handle,
        *,
        normalized_shape: Sequence[int] | None = None,
        name: str | None = None,
    ) -> tuple[Handle, Any, Any]:
        """(dx, dscale, dbias) of layernorm."""
        given = {"normalized_shape": normalized_shape}
        return self._backward("layernorm_backward", dy, x, scale, mean, inv_variance, name, **given)

    def rmsnorm(
        self,
        x: Handle,
        scale: Handle | None = None,
        *,
        normalized_shape: Sequence[int] | None = None,
        epsilon: float = 1e-5,
        phase: Phase = "training",
        inv_variance: Handle | None = None,
        name: str | None = None,
    ) -> tuple[Handle, Any]:
        """(y, inv_variance): y = x inv_variance scale, inv_variance = (mean(x²) + epsilon)^(-1/2)."""
        inputs = {"x": x, "scale": scale, "inv_variance": inv_variance}
        results: tuple[Handle, Any] = self._forward(
            "rmsnorm", inputs, phase, name, normalized_shape=normalized_shape, epsilon=epsilon
        )
        return results

    def rmsnorm_backward(
        self,
        dy: Handle,
        x: Handle,
        scale: Handle | None,
        inv_variance: Handle,
        *,
        normalized_shape: Sequence[int] | None = None,
        name: str | None = None,
    ) -> tuple[Handle, Any]:
        """(dx, dscale) of rmsnorm."""
        inputs = {"dy": dy, "x": x, "scale": scale, "inv_variance": inv_variance}
        results: tuple[Handle, Any] = self._results("rmsnorm_backward", inputs, name, normalized_shape=normalized_shape)
        return results

    def pointwise(
        self, mode: str, *operands: Handle, parameter: float | None = None, name: str | None = None
    ) -> Handle:
        """One pointwise operation: ``silu``, ``relu``, ... of x; ``silu_backward``, ... of (dy, x); ``add``, ``mul``.

        ``parameter`` is silu's beta or leaky_relu's negative_slope. The operands of add and mul are broadcast.
        """
        if mode not in POINTWISE:
            raise self._mistake("pointwise", f"the mode {mode!r} does not exist", ", ".join(POINTWISE), "use one")
        ports = KINDS[mode].inputs
        if len(operands) != len(ports):
            expected = ", ".join(port.name for port in ports)
            value = f"{len(operands)} operands are given"
            raise self._mistake(f"pointwise {mode}", value, f"{len(ports)}: {expected}", "give each of them")
        given = {} if parameter is None else {"parameter": parameter}
        inputs = {port.name: tensor for port, tensor in zip(ports, operands, strict=True)}
        result: Handle = self._results(mode, inputs, name, **given)[0]
        return result

    def quantize(self, x: Handle, scale: Handle, *, dtype: torch.dtype | str, name: str | None = None) -> Handle:
        """saturate(round(x / scale)), ties to even, in int8, float8_e4m3fn or float8_e5m2; scale has one element."""
        y: Handle = self._results("quantize", {"x": x, "scale": scale}, name, dtype=_format_name(dtype))[0]
        return y

    def block_scale_quantize(
        self, x: Handle, *, dtype: torch.dtype | str, name: str | None = None
    ) -> tuple[Handle, Handle]:
        """(y, scale): :meth:`quantize` with a scale for each block, the elements of x along its last dim; a scale is
        amax |x| over the dtype's largest number, in float32."""
        results: tuple[Handle, Handle] = self._results(
            "block_scale_quantize", {"x": x}, name, dtype=_format_name(dtype)
        )
        return results

    def _forward(
        self, kind: str, inputs: dict[str, Handle | None], phase: Phase, name: str | None, **attributes: Any
    ) -> Any:
        if inputs.get("inv_variance") is not None:
            phase = "inference"
        return self._results(kind, inputs, name, phase=phase, **attributes)

    def _backward(
        self,
        kind: str,
        dy: Handle,
        x: Handle,
        scale: Handle | None,
        mean: Handle,
        inv_variance: Handle,
        name: str | None,
        **attributes: Any,
    ) -> tuple[Handle, Any, Any]:
        inputs = {"dy": dy, "x": x, "scale": scale, "mean": mean, "inv_variance": inv_variance}
        results: tuple[Handle, Any, Any] = self._results(kind, inputs, name, **attributes)
        return results


def _format_name(dtype: Any) -> Any:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
