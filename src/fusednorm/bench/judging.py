"""The judge of a workload's results: against fp64, with the errors of plain torch with fp32 statistics as measure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor

from fusednorm.backends import reference
from fusednorm.bench.workloads import Inputs, Workload
from fusednorm.operands import Gradients
from fusednorm.problem import Direction
from fusednorm.tolerance import OURS, Allowance, Verdict, judge, offset_of

Asked = Direction | Literal["forward_backward"]
Results = dict[str, Tensor]

# 8 MB of fp64 for each of the reference's intermediates: malloc keeps and reuses such blocks, while it maps larger ones
# afresh each time, and then most of the time goes into page faults.
_SLICE_ELEMENTS = 1 << 20
_SUMMED = ("grad_weight", "grad_bias")
_STATISTICS = ("mean", "rstd")


def _slices(workload: Workload) -> Iterator[slice]:
    """Ranges of the leading dimension that can be computed one by one; one range where statistics cross samples."""
    samples = workload.shape[0]
    whole = workload.row_family and workload.groups == len(workload.shape)
    if workload.family == "batch_norm" or samples == 0 or whole:
        yield slice(0, samples)
        return
    step = max(1, _SLICE_ELEMENTS // max(1, prod(workload.shape[1:])))
    for start in range(0, samples, step):
        yield slice(start, min(start + step, samples))


def _sliced(inputs: Inputs, part: slice) -> Inputs:
    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[part]

    return replace(
        inputs,
        input=inputs.input[part],
        grad_output=inputs.grad_output[part],
        scale=cut(inputs.scale),
        shift=cut(inputs.shift),
    )


def _part_results(
    workload: Workload,
    inputs: Inputs,
    asked: Asked,
    compute_dtype: torch.dtype,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> Results:
    """The reference on one range of samples; ``mean`` and ``rstd`` are given where only the backward is asked for."""
    results: Results = {}
    if asked in ("forward", "inference", "forward_backward"):
        found = reference.forward(workload.norm, inputs.operands, compute_dtype=compute_dtype)
        mean, rstd = found.mean, found.rstd
        assert rstd is not None
        results = {"output": found.output, "rstd": rstd} | ({} if mean is None else {"mean": mean})
    if asked not in ("forward", "inference"):
        assert rstd is not None  # computed above, or given
        operands = inputs.backward_operands(mean, rstd)
        gradients = gradients_by_name(reference.backward(workload.norm, operands, compute_dtype=compute_dtype))
        wanted = inputs.named_leaves()
        results |= {name: value for name, value in gradients.items() if name in wanted and value is not None}
    return results


def _cut_statistic(tensor: Tensor | None, workload: Workload, part: slice) -> Tensor | None:
    """The rows of a saved [N, G] (or [rows, 1]) statistic that belong to a range of the leading dimension."""
    if tensor is None or part == slice(0, workload.shape[0]):
        return tensor
    per_sample = tensor.shape[0] // workload.shape[0]
    return tensor[part.start * per_sample : part.stop * per_sample]


def _reference(
    workload: Workload,
    inputs: Inputs,
    asked: Asked,
    compute_dtype: torch.dtype,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> Results:
    with torch.no_grad():
        parts = [
            _part_results(
                workload,
                _sliced(inputs, part),
                asked,
                compute_dtype,
                _cut_statistic(mean, workload, part),
                _cut_statistic(rstd, workload, part),
            )
            for part in _slices(workload)
        ]
    if len(parts) == 1:
        return parts[0]
    return {
        name: torch.stack([part[name] for part in parts]).sum(0)
        if name in _SUMMED
        else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }


def compute_saved_statistics(workload: Workload, inputs: Inputs) -> tuple[Tensor | None, Tensor]:
    """The mean and rstd that a forward saves, from fp64, rounded to the compute dtype."""
    results = _reference(workload, inputs, "inference" if inputs.mean is not None else "forward", torch.float64)
    dtype = torch.float64 if workload.dtype == "float64" else torch.float32
    return results["mean"].to(dtype) if "mean" in results else None, results["rstd"].to(dtype)


def _root_mean_square(tensor: Tensor) -> float:
    """In the compute dtype: a copy in fp64 would be the largest tensor beside a large 16-bit one."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return float(torch.linalg.vector_norm(tensor, dtype=dtype)) / sqrt(max(1, tensor.numel()))


def gradients_by_name(gradients: Gradients) -> dict[str, Tensor | None]:
    return {f"grad_{name}": getattr(gradients, name) for name in ("input", "weight", "bias", "scale", "shift")}


class Judge:
    """Checks results of one workload and direction against fp64.

    ``mean`` and ``rstd`` are the saved statistics that a backward takes as inputs; without them the judge takes those
    of the fp64 forward. With ``wants_statistics`` it judges the forward's mean and rstd too, which a peer does not
    return.
    """

    def __init__(
        self,
        workload: Workload,
        inputs: Inputs,
        asked: Asked,
        mean: Tensor | None = None,
        rstd: Tensor | None = None,
        wants_statistics: bool = False,
    ) -> None:
        computed: Asked = "forward_backward" if asked == "backward" and rstd is None else asked
        self.expected = _reference(workload, inputs, computed, torch.float64, mean, rstd)
        self.plain = _reference(workload, inputs, computed, torch.float32, mean, rstd)
        self.offset = offset_of(self.expected.get("mean", mean), self.expected.get("rstd", rstd))
        self.elements = prod(workload.shape)
        self.input_dtype = inputs.input.dtype
        # The sums of terms of random signs have the size of one term times the square root of their number, and those
        # that are near zero by chance the same error.
        self.term = _root_mean_square(inputs.grad_output) if any(name in self.expected for name in _SUMMED) else 0.0
        deviations = self.expected.get("rstd")
        self.spread = 0.0 if deviations is None or not deviations.numel() else 1.0 / float(deviations.max())
        dropped = {
            "backward": ["output"],
            "backward_data": [name for name in self.expected if name != "grad_input"],
            "backward_gamma_beta": [name for name in self.expected if name not in _SUMMED],
        }.get(asked, [])
        dropped += [name for name in _STATISTICS if not wants_statistics or self.expected.get(name, mean) is None]
        self.names = [name for name, value in self.expected.items() if name not in dropped and value.numel() > 0]

    def verdicts(self, results: Mapping[str, Tensor], allowance: Allowance = OURS) -> dict[str, Verdict]:
        """The verdict on each wanted result; a missing result is wrong."""
        found = {}
        for name in self.names:
            if name not in results:
                found[name] = Verdict(float("inf"), 0.0, 0.0, f"{name} is missing")
                continue
            expected = self.expected[name]
            terms = 1 if name in ("output", "grad_input") else self.elements // expected.numel()
            spread = self.term * sqrt(terms) if name in _SUMMED else self.spread if name == "mean" else 0.0
            verdict = judge(
                results[name].detach(),
                expected,
                self.plain[name].double(),
                allowance,
                offset=self.offset,
                terms=terms,
                spread=spread,
                input_dtype=self.input_dtype,
            )
            found[name] = verdict if verdict.ok else replace(verdict, fault=f"{name}: {verdict.fault}")
        return found

    def check(self, results: Mapping[str, Tensor], allowance: Allowance = OURS) -> Verdict:
        """The worst of the verdicts."""
        return worst(self.verdicts(results, allowance).values())


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict with the largest share of its allowed error, faults first; a clean verdict where there is none."""
    return max(
        verdicts,
        key=lambda verdict: (not verdict.ok, verdict.error / max(verdict.allowed, 1e-300)),
        default=Verdict(0.0, 0.0, 0.0, None),
    )
