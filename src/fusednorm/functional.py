"""The public functions: torch.nn.functional's signatures, with the fused parts as keyword-only arguments.

Each checks its arguments, calls :func:`fusednorm.autograd.normalize`, and updates running statistics once that has
succeeded. x̂ = (x - mean) rstd with rstd = (var + eps)^(-1/2), biased variance, and

    y = phi(z + post_add)        z = x̂ weight (1 + scale) + bias (1 + scale) + shift

where phi is the activation and x is s = input + pre_gate · pre_add, rounded to the input's dtype; an absent operand is
left out. The input is float64, float32, float16 or bfloat16, and so are all other operands, each in a dtype of its own.
Statistics and accumulation are float32, float64 for float64 input. The output has the input's dtype, under autocast
too, and its memory order.

On the CPU the sums are fused where what is added has the input's dtype and order of memory: by layer_norm and rms_norm
over trailing dimensions, by norms of (N, C) and of channels_last images, by norms of contiguous images of more than a
few dozen positions in training, and by evaluations that need no gradient. On a GPU they are fused on the same terms, by
norms of images of any size, and by layer_norm and rms_norm over trailing dimensions with a scale and shift too. torch's
operators form all others (``fusednorm.explain`` says which); then z, and in eager mode z + post_add, are rounded to the
input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import handle_torch_function, has_torch_function_variadic

from fusednorm import arguments
from fusednorm.activations import Activation, resolve
from fusednorm.autograd import normalize
from fusednorm.dtypes import compute_dtype
from fusednorm.modulation import in_samples, in_shape, sums_in_samples
from fusednorm.norm import Family, Norm, norm_of, traced_norm
from fusednorm.operands import Operands, Results, Sums
from fusednorm.private.torch_names import jagged_torch_function, no_torch_function
from fusednorm.quantization import quantized_outputs
from fusednorm.repeats import keep, repeated
from fusednorm.running import update_running
from fusednorm.signatures import Parts
from fusednorm.sum_repeats import keep_sums, repeated_sums
from fusednorm.sums import around, fused, normalize_sums, straight

TwoTensors = tuple[Tensor, Tensor]
ThreeTensors = tuple[Tensor, Tensor, Tensor]
_PLAIN = (None, no_torch_function, jagged_torch_function)
hand_over: Callable[..., Any] = handle_torch_function  # whose types know no overloads
#: While Dynamo traces no call is kept or looked for: each instruction that it follows costs some 20 us.
_is_compiling = torch.compiler.is_dynamo_compiling


def _overloaded(*tensors: object) -> bool:
    """True where an argument has a ``__torch_function__`` of its own; a function mode alone does not count.

    A mode sees the op instead of the function. A mode is inactive while it handles a call: a tracer's mode, such as
    torch.export's, that was handed the function would run it straight to the backend and trace nothing. A jagged tensor
    takes our rms_norm for torch's, by its name, and gets the words of our checks instead.
    """
    return any(
        type(tensor) is not Tensor
        and type(tensor) is not Parameter
        and getattr(type(tensor), "__torch_function__", None) not in _PLAIN
        for tensor in tensors
    )


def call_norm(
    family: Family,
    groups_or_dims: int,
    channel_dim: int,
    eps: float,
    activation: str | Activation | None,
    training: bool = True,
) -> Norm:
    """The Norm of a public call whose arguments are checked; the activation is checked here."""
    if _is_compiling():
        return traced_norm(family, int(groups_or_dims), channel_dim, float(eps), resolve(activation), training)
    groups_or_dims = groups_or_dims if type(groups_or_dims) is int else int(groups_or_dims)  # a tracer's has no hash
    return norm_of(family, groups_or_dims, channel_dim, eps if type(eps) is float else float(eps), activation, training)


def _types(normalized_shape: Sequence[int]) -> tuple[type, ...]:
    """The types of several sizes, for the key of a call: 4.0 is equal to 4, and is no size."""
    return tuple(map(type, normalized_shape)) if type(normalized_shape) is tuple else ()


def _returned(results: Results, sums: Sums | None) -> Any:
    """What a public function returns: the output, or (output, s) where the caller asked for s."""
    return results.output if sums is None or not sums.return_sum else (results.output, results.sum)


def _with_sums(
    function: str,
    call: tuple[object, ...] | None,
    activation: str | Activation | None,
    norm: Norm,
    operands: Operands,
    sums: Sums,
) -> Any:
    """What a public function returns for checked operands and sums that were not known; ``call`` is None where the
    call is not to be."""
    results = normalize_sums(function, norm, operands, sums)
    if call is not None:
        keep_sums(call, activation, norm, sums, operands)
    return _returned(results, sums)


@overload
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    return_sum: Literal[False] = False, **parts: Unpack[Parts],
) -> Tensor: ...  # fmt: skip
@overload
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    return_sum: Literal[True], **parts: Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    return_sum: bool, **parts: Unpack[Parts],
) -> Any: ...  # fmt: skip
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    pre_add: Tensor | None = None,
    pre_gate: Tensor | None = None,
    return_sum: bool = False,
    post_add: Tensor | None = None,
) -> Any:
    """Group normalization: statistics over the channels of a group and all positions, for each sample.

    Args:
        input: (N, C, *), or (N, *, C) with ``channel_dim=-1``; any strides, channels_last without a copy.
        num_groups: a divisor of C.
        weight, bias: (C,) or None.
        eps: added to the variance; any number, as in torch: rstd is NaN where the sum is negative.
        activation: a name such as "silu", an :class:`fusednorm.Activation`, or None.
        channel_dim: 1 or -1.
        scale, shift: (N, C) or None; z = x̂ weight (1 + scale) + bias (1 + scale) + shift.
        pre_add: of the input's shape, or (N, C): s = input + pre_add, rounded to the input's dtype, is normalized.
        pre_gate: s = input + pre_gate · pre_add; (N, C), a scalar tensor, or what broadcasts against the input.
        return_sum: whether (output, s) is returned; s is a new tensor.
        post_add: of the input's shape: y = phi(z + post_add).

    Raises:
        ValueError: a shape, device, num_groups or activation that does not fit; one sample with one element per group;
            a gate, or ``return_sum``, without ``pre_add``.
        TypeError: an argument or a dtype of the wrong kind.

    Source: Wu and He, Group Normalization, 2018 (arXiv:1803.08494).

    >>> x = torch.randn(2, 8, 4, 4)
    >>> y = group_norm(x, 4, activation="silu")
    >>> torch.allclose(y, torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4)), atol=1e-5)
    True
    >>> y, s = group_norm(x, 4, activation="silu", pre_add=torch.ones(2, 8), return_sum=True)
    >>> torch.equal(s, x + 1)
    True
    """
    sums = None
    if pre_add is not None or pre_gate is not None or post_add is not None or return_sum:
        sums = Sums(pre_add, pre_gate, post_add, return_sum)
    unusual = sums is not None or type(input) is not Tensor or type(weight) is not Parameter
    if unusual and has_torch_function_variadic(input, weight, bias, scale, shift, pre_add, pre_gate, post_add):
        tensors = (input, weight, bias, scale, shift, pre_add, pre_gate, post_add)
        if _overloaded(*tensors):
            return hand_over(
                group_norm, tensors, input, num_groups, weight, bias, eps, activation=activation,
                channel_dim=channel_dim, scale=scale, shift=shift,
                **({} if sums is None else sums.keywords()),
            )  # fmt: skip
    call = None
    if not _is_compiling():
        # The types too: True is equal to 1, and is no number of groups.
        call = ("group_norm", num_groups, type(num_groups), channel_dim, type(channel_dim), eps)
        if sums is not None:
            results = repeated_sums(call, activation, sums, Operands(input, weight, bias, scale, shift))
            if results is not None:
                return _returned(results, sums)
        else:
            output = repeated(call, activation, input, weight, bias, scale, shift)
            if output is not None:
                return output
    operands = Operands(input, weight, bias, scale, shift)
    channels = arguments.check_channels("group_norm", operands, eps, channel_dim)
    arguments.check_groups("group_norm", input, channels, num_groups)
    norm = call_norm("group_norm", num_groups, channel_dim, eps, activation)
    if sums is not None:
        return _with_sums("group_norm", call, activation, norm, operands, sums)
    output = normalize(norm, operands, False).output
    if call is not None:
        keep(call, activation, norm, operands)
    return output


@overload
def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None =
    None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *,
    return_sum: Literal[False] = False, **parts: Unpack[Parts],
) -> Tensor: ...  # fmt: skip
@overload
def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None =
    None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *,
    return_sum: Literal[True], **parts: Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None =
    None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *,
    return_sum: bool, **parts: Unpack[Parts],
) -> Any: ...  # fmt: skip
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    pre_add: Tensor | None = None,
    pre_gate: Tensor | None = None,
    return_sum: bool = False,
    post_add: Tensor | None = None,
) -> Any:
    """Instance normalization: statistics over the positions, for each sample and channel.

    Args:
        input: (N, C, *), or (N, *, C) with ``channel_dim=-1``.
        running_mean, running_var: (C,) buffers or None. With ``use_input_stats`` they are updated after the call has
            succeeded, by the samples' average mean and unbiased variance; without it the call normalizes by them.
        weight, bias: (C,) or None.
        momentum: the share of the new statistics in the running ones.
        eps, activation, channel_dim, scale, shift, pre_add, pre_gate, return_sum, post_add: as in :func:`group_norm`.

    Raises:
        ValueError: as in :func:`group_norm`; one position with ``use_input_stats``; running statistics that are missing
            without it.
        TypeError: an argument or a dtype of the wrong kind.

    Source: Ulyanov et al., Instance Normalization, 2016 (arXiv:1607.08022).

    >>> x = torch.randn(2, 8, 4, 4)
    >>> torch.allclose(instance_norm(x), torch.nn.functional.instance_norm(x), atol=1e-5)
    True
    """
    sums = None
    if pre_add is not None or pre_gate is not None or post_add is not None or return_sum:
        sums = Sums(pre_add, pre_gate, post_add, return_sum)
    unusual = sums is not None or type(input) is not Tensor or type(weight) is not Parameter
    if unusual and has_torch_function_variadic(
        input, running_mean, running_var, weight, bias, scale, shift, pre_add, pre_gate, post_add
    ):
        tensors = (input, running_mean, running_var, weight, bias, scale, shift, pre_add, pre_gate, post_add)
        if _overloaded(*tensors):
            return hand_over(
                instance_norm, tensors, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps,
                activation=activation, channel_dim=channel_dim, scale=scale, shift=shift,
                **({} if sums is None else sums.keywords()),
            )  # fmt: skip
    given = not use_input_stats
    updates = not given and (running_mean is not None or running_var is not None)
    call = None
    if not updates and not _is_compiling():
        call = ("instance_norm", given, momentum, channel_dim, type(channel_dim), eps)
        mean, var = (running_mean, running_var) if given else (None, None)
        if sums is not None:
            results = repeated_sums(call, activation, sums, Operands(input, weight, bias, scale, shift, mean, var))
            if results is not None:
                return _returned(results, sums)
        else:
            output = repeated(call, activation, input, weight, bias, scale, shift, mean, var)
            if output is not None:
                return output
    operands = Operands(input, weight, bias, scale, shift)
    channels = arguments.check_channels("instance_norm", operands, eps, channel_dim)
    arguments.check_running("instance_norm", input, running_mean, running_var, channels, use_input_stats)
    arguments.check_momentum("instance_norm", momentum)
    if given:
        operands.mean, operands.var = running_mean, running_var
        norm = call_norm("batch_norm", 0, channel_dim, eps, activation, False)
        if sums is not None:
            return _with_sums("instance_norm", call, activation, norm, operands, sums)
        output = normalize(norm, operands, False).output
        if call is not None:
            keep(call, activation, norm, operands)
        return output
    positions = arguments.check_positions("instance_norm", input, channel_dim)
    moves = updates and input.numel() > 0
    norm = call_norm("instance_norm", 0, channel_dim, eps, activation)
    if sums is None:
        results = normalize(norm, operands, moves)
    else:
        results = normalize_sums("instance_norm", norm, operands, sums, moves)
    if moves:
        assert running_mean is not None and running_var is not None
        assert results.mean is not None and results.var is not None
        update_running(running_mean, running_var, results.mean.mean(0), results.var.mean(0), positions, momentum)
    if call is not None and sums is not None:
        keep_sums(call, activation, norm, sums, operands)
    elif call is not None:
        keep(call, activation, norm, operands)
    return _returned(results, sums)


@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps:
    float = 1e-5, *, return_sum: Literal[False] = False, out_dtype: None = None, out_scale: None = None, **parts:
    Unpack[Parts],
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps:
    float = 1e-5, *, return_sum: Literal[True], out_dtype: None = None, out_scale: None = None, **parts:
    Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps:
    float = 1e-5, *, return_sum: Literal[False] = False, out_dtype: torch.dtype, out_scale: Tensor, **parts:
    Unpack[Parts],
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps:
    float = 1e-5, *, return_sum: Literal[True], out_dtype: torch.dtype, out_scale: Tensor, **parts: Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps:
    float = 1e-5, *, return_sum: Literal[False] = False, out_dtype: torch.dtype, out_scale: Literal["row"] | None =
    None, **parts: Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps:
    float = 1e-5, *, return_sum: Literal[True], out_dtype: torch.dtype, out_scale: Literal["row"] | None = None,
    **parts: Unpack[Parts],
) -> ThreeTensors: ...  # fmt: skip
@overload
def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps:
    float = 1e-5, *, return_sum: bool = False, out_dtype: torch.dtype | None = None, out_scale: Tensor | str | None
    = None, **parts: Unpack[Parts],
) -> Any: ...  # fmt: skip
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = -1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    pre_add: Tensor | None = None,
    pre_gate: Tensor | None = None,
    return_sum: bool = False,
    post_add: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | str | None = None,
) -> Any:
    """Layer normalization: statistics over the trailing dimensions, y = phi(x̂ weight + bias).

    With ``channel_dim=1`` the statistics run over the channels of (N, C, *), for each sample and position: the
    LayerNorm2d of ConvNeXt and SAM.

    Args:
        input: (*, *normalized_shape), or (N, C, *) with ``channel_dim=1``.
        normalized_shape: the sizes of the trailing dimensions, as a tuple; (C,) with ``channel_dim=1``.
        weight, bias: of shape ``normalized_shape``, or None.
        eps, activation: as in :func:`group_norm`.
        channel_dim: -1 for the trailing dimensions, or 1; contiguous and channels_last without a copy.
        scale, shift: None, or the modulation of adaLN: z = x̂ weight (1 + scale) + bias (1 + scale) + shift. Both
            broadcast against the input, (B, K) meaning (B, 1, ..., K); they are (N, C) with ``channel_dim=1``.
        pre_add, post_add: of the input's shape, or None; with ``channel_dim=1`` a pre_add may be (N, C). What is
            normalized is s = input + pre_add, rounded to the input's dtype, and y = phi(z + post_add).
        pre_gate: s = input + pre_gate · pre_add; a scalar tensor or what broadcasts against the input, where (B, K)
            means (B, 1, ..., K), or (N, C) with ``channel_dim=1``.
        return_sum: whether (output, s) is returned; s is a new tensor.
        out_dtype: None for the input's dtype, or torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8: the output is
            q = saturate(round(y (1 / scale))), ties to even, of the y that float32 has, forward only. A float8
            saturates at ±448 and ±57344 and keeps NaN; int8 saturates at -128 and 127, and NaN becomes 0.
        out_scale: a tensor of one element, the scale of the whole output. Or "row", as None with an ``out_dtype``: each
            row's scale is max(amax(|y|), 1e-12) / largest, with the largest 448, 57344 or 127; NaN for a row that
            has a NaN. (q, scale) is returned then, scale in float32 and of the input's shape with 1 for each
            normalized dimension; with ``return_sum`` s comes last: (q, s) or (q, scale, s).

    Raises:
        ValueError: a shape, device, dtype or activation that does not fit; an ``out_dtype`` with ``post_add`` or
            ``channel_dim=1``; an ``out_scale`` without an ``out_dtype``.
        TypeError: an argument or a dtype of the wrong kind.
        RuntimeError: an ``out_dtype`` where a tensor requires grad and gradients are enabled.

    Source: Ba et al., Layer Normalization, 2016 (arXiv:1607.06450).

    >>> x = torch.randn(2, 5, 8)
    >>> torch.allclose(layer_norm(x, (8,)), torch.nn.functional.layer_norm(x, (8,)), atol=1e-5)
    True
    >>> scale, shift = torch.randn(2, 8), torch.randn(2, 8)
    >>> y = torch.nn.functional.layer_norm(x, (8,)) * (1 + scale[:, None]) + shift[:, None]
    >>> torch.allclose(layer_norm(x, (8,), scale=scale, shift=shift), y, atol=1e-5)
    True
    >>> y, s = layer_norm(x, (8,), pre_add=torch.ones(2, 5, 8), return_sum=True)
    >>> torch.equal(s, x + 1)
    True
    >>> q, scale = layer_norm(x, (8,), out_dtype=torch.int8)
    >>> q.dtype, scale.shape
    (torch.int8, torch.Size([2, 5, 1]))
    >>> bool(((q * scale - layer_norm(x, (8,))).abs() <= 0.51 * scale).all())
    True
    """
    sums = None
    if pre_add is not None or pre_gate is not None or post_add is not None or return_sum:
        sums = Sums(pre_add, pre_gate, post_add, return_sum)
    quantizes = out_dtype is not None or out_scale is not None
    unusual = sums is not None or type(input) is not Tensor or type(weight) is not Parameter
    if unusual and has_torch_function_variadic(input, weight, bias, scale, shift, pre_add, pre_gate, post_add):
        tensors = (input, weight, bias, scale, shift, pre_add, pre_gate, post_add)
        if _overloaded(*tensors):
            return hand_over(
                layer_norm, tensors, input, normalized_shape, weight, bias, eps, activation=activation,
                channel_dim=channel_dim, scale=scale, shift=shift,
                **({} if sums is None else sums.keywords()), **_quantizing(out_dtype, out_scale),
            )  # fmt: skip
    if quantizes:
        operands = Operands(input, weight, bias, scale, shift)
        num_dims = arguments.check_normalized("layer_norm", operands, normalized_shape, eps, channel_dim)
        norm = call_norm("layer_norm", num_dims, 1, eps, activation)
        return quantized_outputs("layer_norm", norm, operands, sums, out_dtype, out_scale)
    if scale is not None or shift is not None:
        operands = Operands(input, weight, bias, scale, shift)
        return _modulated("layer_norm", operands, normalized_shape, eps, activation, channel_dim, sums)
    call = None
    if not _is_compiling():
        # One size apart, as the rows of most models: its type costs a third of what a tuple of one type does.
        one = type(normalized_shape) is tuple and len(normalized_shape) == 1
        kind = type(normalized_shape[0]) if one else _types(normalized_shape)
        call = ("layer_norm", normalized_shape, kind, channel_dim, type(channel_dim), eps)
        if sums is not None:
            results = repeated_sums(call, activation, sums, Operands(input, weight, bias))
            if results is not None:
                return _returned(results, sums)
        else:
            output = repeated(call, activation, input, weight, bias)
            if output is not None:
                return output
    operands = Operands(input, weight, bias)
    num_dims = arguments.check_normalized("layer_norm", operands, normalized_shape, eps, channel_dim)
    norm = call_norm("layer_norm", num_dims, 1, eps, activation)
    if sums is not None:
        return _with_sums("layer_norm", call, activation, norm, operands, sums)
    output = normalize(norm, operands, False).output
    if call is not None:
        keep(call, activation, norm, operands)
    return output


@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    return_sum: Literal[False] = False, out_dtype: None = None, out_scale: None = None, **parts: Unpack[Parts],
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    return_sum: Literal[True], out_dtype: None = None, out_scale: None = None, **parts: Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    return_sum: Literal[False] = False, out_dtype: torch.dtype, out_scale: Tensor, **parts: Unpack[Parts],
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    return_sum: Literal[True], out_dtype: torch.dtype, out_scale: Tensor, **parts: Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    return_sum: Literal[False] = False, out_dtype: torch.dtype, out_scale: Literal["row"] | None = None, **parts:
    Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    return_sum: Literal[True], out_dtype: torch.dtype, out_scale: Literal["row"] | None = None, **parts:
    Unpack[Parts],
) -> ThreeTensors: ...  # fmt: skip
@overload
def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    return_sum: bool = False, out_dtype: torch.dtype | None = None, out_scale: Tensor | str | None = None, **parts:
    Unpack[Parts],
) -> Any: ...  # fmt: skip
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = -1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    pre_add: Tensor | None = None,
    pre_gate: Tensor | None = None,
    return_sum: bool = False,
    post_add: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | str | None = None,
) -> Any:
    """Root-mean-square normalization over the trailing dimensions, or over the channels of (N, C, *).

    y = phi(x rstd weight), rstd = (mean(x²) + eps)^(-1/2).

    Args:
        input: (*, *normalized_shape), or (N, C, *) with ``channel_dim=1``.
        normalized_shape: the sizes of the trailing dimensions, as a tuple; (C,) with ``channel_dim=1``.
        weight: of shape ``normalized_shape``, or None.
        eps: None means the machine epsilon of the compute dtype: of float32, and of float64 for float64 input.
        activation: as in :func:`group_norm`.
        channel_dim, scale, shift, pre_add, pre_gate, return_sum, post_add, out_dtype, out_scale: as in
            :func:`layer_norm`.

    Raises:
        ValueError, TypeError, RuntimeError: as in :func:`layer_norm`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).

    >>> x = torch.randn(2, 5, 8)
    >>> torch.allclose(rms_norm(x, (8,)), torch.nn.functional.rms_norm(x, (8,)), atol=1e-5)
    True
    >>> rms_norm(x, (8,), out_dtype=torch.float8_e4m3fn, out_scale=torch.tensor(0.02)).dtype
    torch.float8_e4m3fn
    """
    sums = None
    if pre_add is not None or pre_gate is not None or post_add is not None or return_sum:
        sums = Sums(pre_add, pre_gate, post_add, return_sum)
    quantizes = out_dtype is not None or out_scale is not None
    unusual = sums is not None or type(input) is not Tensor or type(weight) is not Parameter
    if unusual and has_torch_function_variadic(input, weight, scale, shift, pre_add, pre_gate, post_add):
        tensors = (input, weight, scale, shift, pre_add, pre_gate, post_add)
        if _overloaded(*tensors):
            return hand_over(
                rms_norm, tensors, input, normalized_shape, weight, eps, activation=activation, channel_dim=channel_dim,
                scale=scale, shift=shift, **({} if sums is None else sums.keywords()),
                **_quantizing(out_dtype, out_scale),
            )  # fmt: skip
    if quantizes:
        eps, operands = arguments.rms_eps("rms_norm", input, eps), Operands(input, weight, None, scale, shift)
        num_dims = arguments.check_normalized("rms_norm", operands, normalized_shape, eps, channel_dim)
        norm = call_norm("rms_norm", num_dims, 1, eps, activation)
        return quantized_outputs("rms_norm", norm, operands, sums, out_dtype, out_scale)
    if scale is not None or shift is not None:
        eps, operands = arguments.rms_eps("rms_norm", input, eps), Operands(input, weight, None, scale, shift)
        return _modulated("rms_norm", operands, normalized_shape, eps, activation, channel_dim, sums)
    call = None
    if not _is_compiling():
        # One size apart, as the rows of most models: its type costs a third of what a tuple of one type does.
        one = type(normalized_shape) is tuple and len(normalized_shape) == 1
        kind = type(normalized_shape[0]) if one else _types(normalized_shape)
        call = ("rms_norm", normalized_shape, kind, channel_dim, type(channel_dim), eps)
        if sums is not None:
            results = repeated_sums(call, activation, sums, Operands(input, weight))
            if results is not None:
                return _returned(results, sums)
        else:
            output = repeated(call, activation, input, weight)
            if output is not None:
                return output
    operands = Operands(input, weight)
    eps = arguments.rms_eps("rms_norm", input, eps)
    num_dims = arguments.check_normalized("rms_norm", operands, normalized_shape, eps, channel_dim)
    norm = call_norm("rms_norm", num_dims, 1, eps, activation)
    if sums is not None:
        return _with_sums("rms_norm", call, activation, norm, operands, sums)
    output = normalize(norm, operands, False).output
    if call is not None:
        keep(call, activation, norm, operands)
    return output


def _modulated(
    family: Family,
    operands: Operands,
    normalized_shape: Sequence[int],
    eps: float,
    activation: str | Activation | None,
    channel_dim: int,
    sums: Sums | None,
) -> Any:
    """layer_norm or rms_norm with a scale or a shift, as a norm over the channels of samples and positions."""
    call = None
    if sums is None and not _is_compiling():
        o, sizes = operands, _types(normalized_shape)
        call = (family, "modulated", normalized_shape, sizes, channel_dim, type(channel_dim), eps)
        output = repeated(call, activation, o.input, o.weight, o.bias, o.scale, o.shift)
        if output is not None:
            return output
    num_dims = arguments.check_normalized(family, operands, normalized_shape, eps, channel_dim)
    if not num_dims:
        arguments.check_modulation_of_samples(family, operands, normalized_shape[0])
    norm = call_norm(family, 0, channel_dim, eps, activation)
    if sums is not None:
        return _returned(_modulated_sums(norm, operands, num_dims, eps, sums), sums)
    seen = _in_samples(family, operands, num_dims)
    output = normalize(norm, seen, False).output
    if seen is not operands:
        return in_shape(family, output, operands.input, num_dims)
    if call is not None:
        keep(call, activation, norm, operands)
    return output


def _quantizing(out_dtype: torch.dtype | None, out_scale: Tensor | str | None) -> dict[str, Any]:
    """The keyword arguments of a quantized output that were given."""
    given = {"out_dtype": out_dtype, "out_scale": out_scale}
    return {name: value for name, value in given.items() if value is not None}


def _modulated_sums(norm: Norm, operands: Operands, num_dims: int, eps: float, sums: Sums) -> Results:
    """The results of a norm of samples with sums around it, in the shape of the call's input."""
    family, channel_dim, input = norm.family, norm.channel_dim, operands.input
    called = call_norm(family, num_dims, 1, eps, norm.activation)
    arguments.check_sums(family, called, input, sums)

    def shaped(tensor: Tensor) -> Tensor:
        return in_shape(family, tensor, input, num_dims) if num_dims else tensor

    def run(norm: Norm, s: Tensor) -> Results:
        seen = _in_samples(family, replace(operands, input=s), num_dims)
        results = normalize(call_norm(family, 0, channel_dim, eps, norm.activation), seen, False)
        return Results(shaped(results.output))

    if straight(operands, sums):
        seen = _in_samples(family, operands, num_dims)
        if num_dims and seen is not operands:
            seen_sums = sums_in_samples(sums, input.shape, num_dims, seen.input.shape)
        else:
            seen_sums = sums
        results = fused(norm, seen, seen_sums)
        if results is not None:
            return Results(shaped(results.output), sum=results.sum if results.sum is None else shaped(results.sum))
    return around(called, input, sums, run)


def _in_samples(family: Family, operands: Operands, num_dims: int) -> Operands:
    return in_samples(family, operands, num_dims) if num_dims else operands


@overload
def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None, bias:
    Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, return_sum:
    Literal[False] = False, **parts: Unpack[Parts],
) -> Tensor: ...  # fmt: skip
@overload
def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None, bias:
    Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, return_sum:
    Literal[True], **parts: Unpack[Parts],
) -> TwoTensors: ...  # fmt: skip
@overload
def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None, bias:
    Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *, return_sum: bool,
    **parts: Unpack[Parts],
) -> Any: ...  # fmt: skip
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    pre_add: Tensor | None = None,
    pre_gate: Tensor | None = None,
    return_sum: bool = False,
    post_add: Tensor | None = None,
) -> Any:
    """Batch normalization: statistics over the samples and positions, for each channel.

    Args:
        input: (N, C, *), or (N, *, C) with ``channel_dim=-1``.
        running_mean, running_var: (C,) buffers or None. In training they are updated after the call has succeeded,
            by the mean and the unbiased variance; otherwise the call normalizes by them.
        weight, bias: (C,) or None.
        training: whether the input's own statistics are used.
        momentum: the share of the new statistics in the running ones.
        eps: positive in training, at least 0 otherwise.
        activation, channel_dim, scale, shift, pre_add, pre_gate, return_sum, post_add: as in :func:`group_norm`.

    Raises:
        ValueError: as in :func:`group_norm`; one element for each channel in training; an eps out of range; running
            statistics that are missing in evaluation.
        TypeError: an argument or a dtype of the wrong kind.

    Source: Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167).

    >>> x = torch.randn(2, 8, 4, 4)
    >>> y = batch_norm(x, None, None, training=True)
    >>> torch.allclose(y, torch.nn.functional.batch_norm(x, None, None, training=True), atol=1e-5)
    True
    """
    sums = None
    if pre_add is not None or pre_gate is not None or post_add is not None or return_sum:
        sums = Sums(pre_add, pre_gate, post_add, return_sum)
    unusual = sums is not None or type(input) is not Tensor or type(weight) is not Parameter
    if unusual and has_torch_function_variadic(
        input, running_mean, running_var, weight, bias, scale, shift, pre_add, pre_gate, post_add
    ):
        tensors = (input, running_mean, running_var, weight, bias, scale, shift, pre_add, pre_gate, post_add)
        if _overloaded(*tensors):
            return hand_over(
                batch_norm, tensors, input, running_mean, running_var, weight, bias, training, momentum, eps,
                activation=activation, channel_dim=channel_dim, scale=scale, shift=shift,
                **({} if sums is None else sums.keywords()),
            )  # fmt: skip
    results = batch_norm_results(
        Operands(input, weight, bias, scale, shift), running_mean, running_var, training, momentum, eps, activation,
        channel_dim, False, sums,
    )  # fmt: skip
    return _returned(results, sums)


def counted_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    counter: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    activation: str | Activation | None,
    channel_dim: int,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    pre_add: Tensor | None = None,
    pre_gate: Tensor | None = None,
    return_sum: bool = False,
    post_add: Tensor | None = None,
) -> Any:
    """A module's :func:`batch_norm`, which in training adds one to ``counter``; a momentum of None is a cumulative
    average.

    It is one function, since torch.fx records calls alone and would lose the change of a buffer.
    """
    sums = None
    if pre_add is not None or pre_gate is not None or post_add is not None or return_sum:
        sums = Sums(pre_add, pre_gate, post_add, return_sum)
    modulated = scale is not None or shift is not None
    unusual = sums is not None or modulated or type(input) is not Tensor or type(weight) is not Parameter
    if unusual and has_torch_function_variadic(
        input, running_mean, running_var, weight, bias, scale, shift, pre_add, pre_gate, post_add
    ):
        tensors = (input, running_mean, running_var, weight, bias, scale, shift, pre_add, pre_gate, post_add)
        if _overloaded(*tensors):
            return hand_over(
                counted_batch_norm, tensors, input, running_mean, running_var, counter, weight, bias, training,
                momentum, eps, activation, channel_dim,
                **({"scale": scale, "shift": shift} if modulated else {}),
                **({} if sums is None else sums.keywords()),
            )  # fmt: skip
    share: float | Tensor = 0.0 if momentum is None else momentum
    if counter is not None and momentum is None and running_mean is not None:
        # A tensor, since a number would wait for the device and break a compiled graph.
        share = (counter + 1).to(compute_dtype(running_mean.dtype)).reciprocal()
    operands = Operands(input, weight, bias, scale, shift)
    results = batch_norm_results(
        operands, running_mean, running_var, training, share, eps, activation, channel_dim, False, sums, counter
    )
    return _returned(results, sums)


def batch_norm_results(
    operands: Operands,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float | Tensor,
    eps: float,
    activation: str | Activation | None,
    channel_dim: int,
    wants_statistics: bool,
    sums: Sums | None = None,
    counter: Tensor | None = None,
) -> Results:
    """:func:`batch_norm`, which with ``wants_statistics`` returns the mean and rstd too, and in training adds one to
    ``counter``; ``momentum`` may be a tensor, for a cumulative average."""
    input, weight, bias, scale, shift = operands.input, operands.weight, operands.bias, operands.scale, operands.shift
    call = None
    if not wants_statistics and not _is_compiling():
        number = Tensor if isinstance(momentum, Tensor) else momentum
        call = ("batch_norm", bool(training), number, channel_dim, type(channel_dim), eps)
        if sums is not None:
            given = replace(operands, mean=running_mean, var=running_var)
            results = repeated_sums(call, activation, sums, given, counter, momentum)
            if results is not None:
                return results
        else:
            output = repeated(
                call, activation, input, weight, bias, scale, shift, running_mean, running_var, counter, momentum
            )
            if output is not None:
                return Results(output)
    channels = arguments.check_channels("batch_norm", operands, eps, channel_dim)
    arguments.check_running("batch_norm", input, running_mean, running_var, channels, training)
    arguments.check_momentum("batch_norm", momentum)
    eps = float(eps)
    if not eps > 0.0:
        arguments.check_batch_eps(eps, training)
    norm = call_norm("batch_norm", 0, channel_dim, eps, activation, bool(training))
    if not training:
        operands.mean, operands.var = running_mean, running_var
        if sums is not None:
            results = normalize_sums("batch_norm", norm, operands, sums, wants_statistics)
            if call is not None:
                keep_sums(call, activation, norm, sums, operands)
            return results
        results = normalize(norm, operands, wants_statistics)
        if call is not None:
            keep(call, activation, norm, operands)
        return results
    numel = input.numel()
    if numel and numel == channels:
        arguments.refuse_one_element("batch_norm", input, "channel")
    moves = running_mean is not None and running_var is not None and numel > 0
    if sums is None:
        results = normalize(norm, operands, wants_statistics or moves)
    else:
        results = normalize_sums("batch_norm", norm, operands, sums, wants_statistics or moves)
    if moves:
        assert running_mean is not None and running_var is not None
        assert results.mean is not None and results.var is not None
        update_running(running_mean, running_var, results.mean, results.var, numel // channels, momentum, counter)
    elif counter is not None:
        counter.add_(1)
    if call is not None and (moves or running_mean is None):
        moving = replace(operands, mean=running_mean, var=running_var)
        if sums is not None:
            keep_sums(call, activation, norm, sums, moving, counter, momentum)
        else:
            keep(call, activation, norm, moving, counter, momentum)
    return results
