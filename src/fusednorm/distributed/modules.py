"""SyncBatchNorm as a module."""

# Annotations are evaluated here: torch.fx cannot pickle the graph of a module whose forward has them as strings.

import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusednorm import interop
from fusednorm.arguments import check_momentum, check_sums
from fusednorm.distributed.agreement import agree
from fusednorm.distributed.batch_norm import check, synchronized_batch_norm, take_part_in_vain
from fusednorm.distributed.collective import active_group
from fusednorm.distributed.repeats import Repeat
from fusednorm.distributed.synchronized import Running
from fusednorm.dtypes import compute_dtype, dtype_name
from fusednorm.functional import call_norm
from fusednorm.fused_module import ActivationLike, FusedBatchNorm
from fusednorm.gate import is_dtensor
from fusednorm.norm import Norm
from fusednorm.operands import Operands, Results, Sums
from fusednorm.sums import around

_REMEDY = (
    "give every rank a module of the same channels and an input of the same dtype that requires grad on all ranks or "
    "on none; an empty input is allowed"
)


class SyncBatchNorm(FusedBatchNorm, torch.nn.SyncBatchNorm):
    """:class:`torch.nn.SyncBatchNorm` with a fused activation, on CPUs too; see :func:`fusednorm.batch_norm`.

    y = phi(x̂ weight + bias) with the mean and variance of the inputs of all processes in ``process_group`` (None: all
    processes), whose sizes may differ and be 0. In evaluation, and with one process, it is BatchNorm. A ``scale`` and
    ``shift`` of this process's samples are those of :class:`fusednorm.nn.BatchNorm2d`.

    In training each process makes the same calls in the same order: one exchange forward, and one backward where the
    input requires grad. The first call over a group also exchanges what must agree: channels, dtype, and whether the
    input requires grad. The gradients of weight and bias are this process's own, as torch's: DistributedDataParallel
    averages them. There is no double backward.

    Shapes: (N, C, *), or (N, *, C) with ``channel_dim=-1``; contiguous and channels_last without a copy.

    Raises:
        ValueError, TypeError: as :func:`fusednorm.batch_norm`; a process that is no member of ``process_group``; one
            element for each channel in all inputs together.
        RuntimeError: another process refused its arguments (on GPUs only the first call over a group says so; later the
            outputs and running statistics here are NaN), does not agree, or made no call within the group's timeout.

    Source: Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167).

    >>> SyncBatchNorm(8, activation="relu")(torch.randn(2, 8, 4, 4)).shape
    torch.Size([2, 8, 4, 4])
    """

    #: A weak reference to the group whose ranks have agreed, since a group lives no longer for a module's sake, and the
    #: channels that they agreed on.
    _agreed: tuple[Any, int] | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: ActivationLike = None,
        channel_dim: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype, **options
        )
        self._set_fused(activation, channel_dim)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_agreed"}

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
        # A meta tensor has shapes alone to exchange; a DTensor's mesh says which processes have its other parts.
        alone = is_dtensor(input) or (isinstance(input, Tensor) and input.is_meta and self._is_meta())
        if self.training and not alone:
            group = active_group("SyncBatchNorm", self.process_group)
            if group is not None:
                operands = Operands(input, self.weight, self.bias, scale, shift)
                return self._synchronized(operands, group, Sums(pre_add, pre_gate, post_add, return_sum))
        return self._normalize(
            input,
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
        )

    def _is_meta(self) -> bool:
        return all(tensor is None or tensor.is_meta for tensor in (self.weight, self.running_mean))

    def named_modules(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        if not interop.looked_for_by_ddp(sys._getframe(1)):  # torch's class needs a GPU, this one does not
            yield from super().named_modules(*arguments, **keywords)

    def _synchronized(self, operands: Operands, group: Any, sums: Sums) -> Any:
        mean, var, counter, momentum = None, None, None, self.momentum
        if self.track_running_stats:
            mean, var, counter = self.running_mean, self.running_var, self.num_batches_tracked
        running = None
        if mean is not None and var is not None:
            running = Running(mean, var, 0.0 if momentum is None else momentum, counter)
        repeat = Repeat(
            group, ("SyncBatchNorm", self.num_features, self._eps, momentum, self.channel_dim), self.activation
        )
        alone = sums.pre_add is None and sums.pre_gate is None and sums.post_add is None and not sums.return_sum
        agreed = self._agreed is not None and self._agreed[0]() is group and self._agreed[1] == self.num_features
        if agreed and alone and momentum is not None and (mean is None) == (var is None):
            output = repeat.output(operands, running)
            if output is not None:
                if counter is not None and running is None:
                    counter.add_(1)
                return output
        self._check_together(operands, (mean, var), group, sums)
        if running is not None and momentum is None and counter is not None:
            # A tensor, since a number would wait for the device.
            running.share = (counter + 1).to(compute_dtype(running.mean.dtype)).reciprocal()

        def run(norm: Norm, s: Tensor) -> Results:
            output = synchronized_batch_norm(
                "SyncBatchNorm",
                replace(operands, input=s),
                running,
                self._eps,
                norm.activation,
                self.channel_dim,
                group,
                repeat,
            )
            return Results(output)

        results = around(self._norm(), operands.input, sums, run)
        if counter is not None and running is None:
            counter.add_(1)
        return (results.output, results.sum) if sums.return_sum else results.output

    def _norm(self) -> Norm:
        return call_norm("batch_norm", 0, self.channel_dim, self._eps, self.activation, False)

    def _check_together(
        self, operands: Operands, running: tuple[Tensor | None, Tensor | None], group: Any, sums: Sums
    ) -> None:
        """Check this rank's arguments; whatever is wrong with them, it takes part in the exchange, since the other
        ranks would wait for it."""
        refusal: Exception | None = None
        input, channels = operands.input, self.num_features
        agreed = self._agreed is not None and self._agreed[0]() is group
        if self._agreed is not None and agreed:
            channels = self._agreed[1]
        try:
            if channels != self.num_features:
                raise ValueError(
                    f"SyncBatchNorm: num_features is {self.num_features}, and the ranks of the group agreed on "
                    f"{channels} channels; build a new module on every rank"
                )
            check("SyncBatchNorm", self.num_features, operands, *running, self._eps, self.channel_dim)
            check_sums("SyncBatchNorm", self._norm(), input, sums)
            if self.momentum is not None:
                check_momentum("SyncBatchNorm", self.momentum)
        except Exception as error:
            refusal = error
        # The module's device, over which the others exchange too, whatever this rank was given.
        tensors = (self.weight, self.running_mean, input)
        device = next((tensor.device for tensor in tensors if isinstance(tensor, Tensor)), torch.device("cpu"))
        try:
            if not agreed:
                agree("SyncBatchNorm", None if refusal else self._facts(input), 0, device, group, _REMEDY)
            elif refusal is not None:
                take_part_in_vain("SyncBatchNorm", channels, device, group)
        except RuntimeError:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal
        if not agreed:
            self._agreed = weakref.ref(group), channels

    def _facts(self, input: Tensor) -> dict[str, Any]:
        differentiable = input.requires_grad and torch.is_grad_enabled()
        return {
            "channels": self.num_features,
            "dtype": dtype_name(input.dtype),
            "gradient for the input": "yes" if differentiable else "no",
        }

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """torch's way to name :func:`fusednorm.distributed.convert_sync_batchnorm_`."""
        from fusednorm.distributed.conversion import convert_sync_batchnorm_

        return convert_sync_batchnorm_(module, process_group)
