"""Drop-ins for torch.nn's normalizations: the same constructors and state_dicts, and the fused parts as keywords.

Each is a subclass of torch's class, so ``isinstance`` checks, parameter names, initialization and checkpoints stay.
``activation`` is a name such as "silu", a :class:`fusednorm.Activation` or None; ``channel_dim=-1`` takes inputs of
shape (N, *, C). LayerNorm and RMSNorm with ``channel_dim=1``, and LayerNorm2d, normalize the channels of (N, C, *).
Keywords that torch's constructors gain (``bias=`` of some releases) pass through as ``options``.

A call takes the modulation and the sums around the norm as the functions' keywords: ``norm(x, scale=s, shift=t)``,
``norm(x, pre_add=residual, return_sum=True)``, which gives (output, s), and ``norm(x, post_add=shortcut)``, which adds
before the activation; SyncBatchNorm takes the sums alone. A sample without its batch dimension has all of these without
it. LayerNorm and RMSNorm take ``out_dtype`` and ``out_scale`` in the same way, for an 8-bit output. Their outputs are
contiguous where the numbers of a row of the input lie apart, as torch's are: what comes behind them, most often a
linear layer, would copy others.

torch's tools that take a batch norm apart (``torch.nn.utils.fusion``, ``SyncBatchNorm.convert_sync_batchnorm``) work on
these modules where nothing is fused, and raise RuntimeError where they would drop an activation. ``torch.fx`` records
each module as one call, as it does torch's; ``torch.ao.quantization.fuse_modules`` takes the batch norms, and keeps a
fused ReLU. :class:`SyncBatchNorm` and :func:`convert_sync_batchnorm_` are made in :mod:`fusednorm.distributed`.
"""

# Annotations are evaluated here: torch.fx cannot pickle the graph of a module whose forward has them as strings.

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm import functional, interop
from fusednorm.distributed import SyncBatchNorm as SyncBatchNorm
from fusednorm.distributed import convert_sync_batchnorm_ as convert_sync_batchnorm_
from fusednorm.fused_module import ActivationLike, FusedBatchNorm, FusedModule
from fusednorm.private.torch_names import InstanceNormBase, input_check, unbatched_rank
from fusednorm.refusal import refusal, sizes
from fusednorm.strides import contiguous, rows_lie_apart


def _check_channels_alone(module: Any) -> None:
    if module.channel_dim == 1 and len(module.normalized_shape) != 1:
        raise ValueError(
            f"{type(module).__name__}: normalized_shape is {module.normalized_shape} with channel_dim=1; expected the "
            "number of channels alone"
        )


class GroupNorm(FusedModule, torch.nn.GroupNorm):
    """:class:`torch.nn.GroupNorm` with a fused activation; see :func:`fusednorm.group_norm`.

    >>> norm = GroupNorm(4, 8, activation="silu")
    >>> norm(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    >>> norm(torch.randn(2, 8, 4, 4), scale=torch.randn(2, 8), shift=torch.randn(2, 8)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike = None,
        channel_dim: int = 1,
        **options: Any,
    ) -> None:
        if num_groups <= 0:
            raise ValueError(f"GroupNorm: num_groups is {num_groups}; expected a divisor of {num_channels} channels")
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **options)
        self._set_fused(activation, channel_dim)

    @interop.traced_alone
    def forward(
        self,
        input: Tensor,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        pre_add: Tensor | None = None,
        pre_gate: Tensor | None = None,
        return_sum: bool = False,
        post_add: Tensor | None = None,
    ) -> Any:
        if type(input) is not Tensor:
            call = interop.leaf(self, input, pre_add, pre_gate, return_sum, post_add, scale=scale, shift=shift)
            if call is not None:
                return call
        return functional.group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self._eps,
            activation=self.activation,
            channel_dim=self.channel_dim,
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
        )


class LayerNorm(FusedModule, torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` with a fused activation, and a scale and shift; see :func:`fusednorm.layer_norm`.

    >>> LayerNorm(8, activation="gelu")(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    >>> LayerNorm(8, channel_dim=1)(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    >>> LayerNorm(8)(torch.randn(2, 5, 8), scale=torch.randn(2, 8), shift=torch.randn(2, 8)).shape
    torch.Size([2, 5, 8])
    """

    channel_dim: int = -1

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike = None,
        channel_dim: int = -1,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_fused(activation, channel_dim)
        _check_channels_alone(self)

    @interop.traced_alone
    def forward(
        self,
        input: Tensor,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        pre_add: Tensor | None = None,
        pre_gate: Tensor | None = None,
        return_sum: bool = False,
        post_add: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out_scale: Tensor | str | None = None,
    ) -> Any:
        if type(input) is not Tensor:
            call = interop.leaf(
                self, input, pre_add, pre_gate, return_sum, post_add, scale=scale, shift=shift, out_dtype=out_dtype,
                out_scale=out_scale,
            )  # fmt: skip
            if call is not None:
                return call
        if self.channel_dim == -1 and type(input) is Tensor and rows_lie_apart(input):
            input, pre_add, post_add = map(contiguous, (input, pre_add, post_add))  # type: ignore[assignment]
        return functional.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self._eps,
            activation=self.activation,
            channel_dim=self.channel_dim,
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
            out_dtype=out_dtype,
            out_scale=out_scale,
        )


class LayerNorm2d(LayerNorm):
    """:class:`LayerNorm` over the channels of (N, C, *), with the arguments and the eps of ConvNeXt's, SAM's and timm's
    LayerNorm2d.

    >>> LayerNorm2d(8, activation="gelu")(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike = None,
    ) -> None:
        super().__init__(num_channels, eps, affine, bias, device, dtype, activation=activation, channel_dim=1)


class RMSNorm(FusedModule, torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` with a fused activation, and a scale and shift; see :func:`fusednorm.rms_norm`.

    >>> RMSNorm(8, eps=1e-6)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    >>> RMSNorm(8, channel_dim=1)(torch.randn(2, 8, 3, 4, 4)).shape
    torch.Size([2, 8, 3, 4, 4])
    """

    channel_dim: int = -1

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike = None,
        channel_dim: int = -1,
        **options: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype, **options)
        self._set_fused(activation, channel_dim)
        _check_channels_alone(self)

    @interop.traced_alone
    def forward(
        self,
        x: Tensor,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        pre_add: Tensor | None = None,
        pre_gate: Tensor | None = None,
        return_sum: bool = False,
        post_add: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        out_scale: Tensor | str | None = None,
    ) -> Any:
        if type(x) is not Tensor:
            call = interop.leaf(
                self, x, pre_add, pre_gate, return_sum, post_add, scale=scale, shift=shift, out_dtype=out_dtype,
                out_scale=out_scale,
            )  # fmt: skip
            if call is not None:
                return call
        if self.channel_dim == -1 and type(x) is Tensor and rows_lie_apart(x):
            x, pre_add, post_add = map(contiguous, (x, pre_add, post_add))  # type: ignore[assignment]
        return functional.rms_norm(
            x,
            self.normalized_shape,
            self.weight,
            self._eps,
            activation=self.activation,
            channel_dim=self.channel_dim,
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
            out_dtype=out_dtype,
            out_scale=out_scale,
        )


class _FusedBatchNorm(FusedBatchNorm):
    _check_input: Callable[[Tensor], None]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._check_input = input_check(cls)  # type: ignore[assignment]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike = None,
        channel_dim: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self._set_fused(activation, channel_dim)

    @interop.traced_alone
    def forward(
        self,
        input: Tensor,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        pre_add: Tensor | None = None,
        pre_gate: Tensor | None = None,
        return_sum: bool = False,
        post_add: Tensor | None = None,
    ) -> Any:
        if type(input) is not Tensor:
            call = interop.leaf(self, input, pre_add, pre_gate, return_sum, post_add, scale=scale, shift=shift)
            if call is not None:
                return call
        if type(input) is Tensor or not isinstance(input, torch.fx.Proxy):
            self._check_input(input)
        return self._normalize(
            input,
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
        )


class BatchNorm1d(_FusedBatchNorm, torch.nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` with a fused activation; see :func:`fusednorm.batch_norm`.

    >>> BatchNorm1d(8, activation="relu")(torch.randn(4, 8)).shape
    torch.Size([4, 8])
    """


class BatchNorm2d(_FusedBatchNorm, torch.nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` with a fused activation; see :func:`fusednorm.batch_norm`.

    >>> BatchNorm2d(8, activation="relu")(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """


class BatchNorm3d(_FusedBatchNorm, torch.nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` with a fused activation; see :func:`fusednorm.batch_norm`.

    >>> BatchNorm3d(8, activation="relu")(torch.randn(2, 8, 2, 4, 4)).shape
    torch.Size([2, 8, 2, 4, 4])
    """


def _as_batch(operand: Tensor | None) -> Tensor | None:
    """An operand of one sample as that of a batch of one; a scalar stays one."""
    return operand if not isinstance(operand, Tensor) or operand.dim() == 0 else operand.unsqueeze(0)


class _FusedInstanceNorm(FusedModule, InstanceNormBase):
    _check_input: Callable[[Tensor], None]
    _unbatched_rank: Callable[[], int]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._check_input = input_check(cls)  # type: ignore[assignment]
        cls._unbatched_rank = unbatched_rank(cls)  # type: ignore[assignment]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike = None,
        channel_dim: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self._set_fused(activation, channel_dim)

    @interop.traced_alone
    def forward(
        self,
        input: Tensor,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        pre_add: Tensor | None = None,
        pre_gate: Tensor | None = None,
        return_sum: bool = False,
        post_add: Tensor | None = None,
    ) -> Any:
        if type(input) is not Tensor:
            call = interop.leaf(self, input, pre_add, pre_gate, return_sum, post_add, scale=scale, shift=shift)
            if call is not None:
                return call
        self._check_input(input)
        unbatched = input.dim() == self._unbatched_rank()
        axis = -1 if self.channel_dim == -1 else int(not unbatched)
        if input.size(axis) != self.num_features:
            self._refuse_channels(input, axis)
        if not unbatched:
            return self._normalize(
                input,
                scale=scale,
                shift=shift,
                pre_add=pre_add,
                pre_gate=pre_gate,
                return_sum=return_sum,
                post_add=post_add,
            )
        scale, shift, pre_add, pre_gate, post_add = map(_as_batch, (scale, shift, pre_add, pre_gate, post_add))
        found = self._normalize(
            input.unsqueeze(0),
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
        )
        return tuple(tensor.squeeze(0) for tensor in found) if return_sum else found.squeeze(0)

    def _refuse_channels(self, input: Tensor, axis: int) -> None:
        wrong = self.affine or self.track_running_stats
        message = (
            f"{type(self).__name__}: input of shape {(sizes if wrong else tuple)(input.shape)} has {input.size(axis)} "
            f"channels in dimension {axis}; expected num_features={self.num_features}"
        )
        if wrong:
            raise refusal(f"{message}; build the module for {input.size(axis)} channels, or check channel_dim")
        warnings.warn(f"{message}, which is not used because affine=False", stacklevel=3)

    def _normalize(
        self,
        input: Tensor,
        *,
        scale: Tensor | None = None,
        shift: Tensor | None = None,
        pre_add: Tensor | None = None,
        pre_gate: Tensor | None = None,
        return_sum: bool = False,
        post_add: Tensor | None = None,
    ) -> Any:
        return functional.instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self._eps,
            activation=self.activation,
            channel_dim=self.channel_dim,
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
        )


class InstanceNorm1d(_FusedInstanceNorm, torch.nn.InstanceNorm1d):
    """:class:`torch.nn.InstanceNorm1d` with a fused activation; see :func:`fusednorm.instance_norm`.

    >>> InstanceNorm1d(8)(torch.randn(2, 8, 16)).shape
    torch.Size([2, 8, 16])
    """


class InstanceNorm2d(_FusedInstanceNorm, torch.nn.InstanceNorm2d):
    """:class:`torch.nn.InstanceNorm2d` with a fused activation; see :func:`fusednorm.instance_norm`.

    >>> InstanceNorm2d(8, activation="leaky_relu")(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """


class InstanceNorm3d(_FusedInstanceNorm, torch.nn.InstanceNorm3d):
    """:class:`torch.nn.InstanceNorm3d` with a fused activation; see :func:`fusednorm.instance_norm`.

    >>> InstanceNorm3d(8)(torch.randn(2, 8, 2, 4, 4)).shape
    torch.Size([2, 8, 2, 4, 4])
    """


interop.register_fusions(
    {
        torch.nn.BatchNorm1d: BatchNorm1d,
        torch.nn.BatchNorm2d: BatchNorm2d,
        torch.nn.BatchNorm3d: BatchNorm3d,
    }
)
