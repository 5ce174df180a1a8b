"""What the modules share beside torch's own class: the fused activation, the channel dimension, and a guarded eps."""

# Annotations are evaluated here: torch.fx cannot pickle the graph of a module whose forward has them as strings.

import sys
from typing import Any

import torch

from fusednorm import functional, interop
from fusednorm.activations import Activation, resolve
from fusednorm.arguments import check_channel_dim
from fusednorm.private.torch_names import SCRIPT_HOOK, BatchNormBase

ActivationLike = str | Activation | None


class GivenEps:
    """``_eps`` of a torch module whose class was replaced: it stored ``eps`` before its class had that property.

    Once the setter has put ``_eps`` into the module's ``__dict__``, Python finds it there first.
    """

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__["eps"]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute 'eps'") from None


class FusedModule(torch.nn.Module):
    """The fused parts of a module; the class attributes are what torch's module does, and serve one whose class was
    replaced by a subclass.

    ``forward`` first compares the exact type of its input, since that is cheap and tells a Proxy, and reads ``_eps``,
    which is faster than the property.
    """

    activation: Activation | None = None
    channel_dim: int = 1
    _eps = GivenEps()

    @property
    def eps(self) -> Any:
        """The number added to the variance; functions of torch that would drop the fused parts get a RuntimeError."""
        value = self._eps
        if (self.activation is None and self.channel_dim == type(self).channel_dim) or torch.compiler.is_compiling():
            return value
        return interop.eps_for(self, value, sys._getframe(1))

    @eps.setter
    def eps(self, value: Any) -> None:
        self.__dict__["eps"] = self.__dict__["_eps"] = value  # torch's extra_repr reads the first

    def _set_fused(self, activation: ActivationLike, channel_dim: int = 1) -> None:
        check_channel_dim(type(self).__name__, channel_dim)
        self.activation = resolve(activation)
        self.channel_dim = channel_dim

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if self.activation is not None:
            plain = self.activation == Activation(self.activation.name)
            parts.append(f"activation={self.activation.name if plain else self.activation}")
        if self.channel_dim != type(self).channel_dim:
            parts.append(f"channel_dim={self.channel_dim}")
        return ", ".join(parts)


class FusedBatchNorm(FusedModule, BatchNormBase):
    """What the batch norms share: the call by this process's own input."""

    def _normalize(
        self,
        input: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        pre_add: torch.Tensor | None = None,
        pre_gate: torch.Tensor | None = None,
        return_sum: bool = False,
        post_add: torch.Tensor | None = None,
    ) -> Any:
        update = self.training and self.track_running_stats
        given = update or not self.training  # running statistics that are not to be updated stay out of training
        return functional.counted_batch_norm(
            input,
            self.running_mean if given else None,
            self.running_var if given else None,
            self.num_batches_tracked if update else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            self.momentum,
            self._eps,
            self.activation,
            self.channel_dim,
            scale=scale,
            shift=shift,
            pre_add=pre_add,
            pre_gate=pre_gate,
            return_sum=return_sum,
            post_add=post_add,
        )


setattr(FusedModule, SCRIPT_HOOK, interop.refuse_script)
