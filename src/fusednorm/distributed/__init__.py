"""Normalizations whose statistics are those of an input that is spread over the processes of a group.

The transport is torch.distributed's (gloo, NCCL). Every process merges the same values in the order of the ranks, so
the statistics have the same bits on every rank and in every run.
"""

from fusednorm.distributed import dtensor as dtensor
from fusednorm.distributed.conversion import convert_sync_batchnorm_
from fusednorm.distributed.functional import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from fusednorm.distributed.modules import SyncBatchNorm

__all__ = [
    "SyncBatchNorm",
    "batch_norm",
    "convert_sync_batchnorm_",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
]
