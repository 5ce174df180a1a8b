"""Plans of the channels_last order, around kernels/slabs.py."""

from __future__ import annotations

from dataclasses import replace

from fusednorm.backends.cpu.geometry import (
    COEFFICIENTS,
    DTYPE_CODES,
    POINT_SCALE_DTYPE,
    POINT_SHIFT_DTYPE,
    REPEAT,
    SCRATCH,
    SLOTS,
    TOGETHER,
    VECTOR,
)
from fusednorm.backends.cpu.plans.base import MOST_KEPT, BackwardPlan, ForwardPlan, Plan, in_lines
from fusednorm.backends.cpu.plans.sums import NumbersOfPlanes, SumBackward, SumForward, makes_twice
from fusednorm.backends.cpu.threads import SERIAL_BYTES, Loop
from fusednorm.problem import DTYPE_BYTES, Problem

#: A step of the whole-sample order takes samples of about this many bytes together, so that calls cost little; but a
#: loop that threads share has so many steps if it can.
STEP_BYTES, STEPS = 1 << 16, 8
#: Positions of a sample that share a scale and shift, at most, where rows make A and B as they need them.
FEW_POSITIONS = 64


def _steps(plan: Plan, stages: list[tuple[int, int]], work_bytes: int) -> Loop:
    """The loop that takes a few samples at a time through all stages."""
    share = min(plan.samples, STEP_BYTES * plan.samples // max(1, plan.tensor_bytes))
    if work_bytes >= SERIAL_BYTES:
        share = min(share, plan.samples // STEPS)
    return Loop(stages, plan.samples, work_bytes, max(1, share))


def _place_coefficients(plan: Plan, steps: Loop | None = None, keeps: bool = False) -> None:
    """Room for the coefficients of all samples, with ``keeps`` for dz too; or, where a loop takes a few samples through
    all stages, for those of its share, behind all else: each worker has its own, which stay in its cache."""
    number = DTYPE_BYTES[plan.problem.compute_dtype]
    size = COEFFICIENTS * plan.channels * int(plan.geometry[REPEAT]) * number
    kept = plan.problem.view.spatial * plan.channels * number if keeps else 0
    if steps is None or plan.problem.added is not None:
        plan.reserve(coefficients=-(-plan.samples * size // 8), kept=-(-plan.samples * kept // 8))
        return
    room = in_lines(steps.share * size)
    plan.keep_for_workers((room + steps.share * kept) // number)
    plan.geometry[SLOTS] = steps.share
    plan.reserve(coefficients=0)
    plan.workspace["kept"] = plan.room + room


class SlabsForward(ForwardPlan):
    """Statistics, coefficients and output: each of all samples, or ``whole`` all of a few samples at a time."""

    module = "slabs"

    def __init__(self, problem: Problem, pieces: int, piece: int, whole: bool, made_for: Problem | None = None) -> None:
        self.pieces, self.whole = pieces, whole
        super().__init__(problem, pieces, piece, made_for)

    def loops(self) -> list[Loop]:
        channels, count = self.channels, self.samples * self.channels * int(self.geometry[REPEAT])
        coefficients = self.kernel("coefficients", activated=False)
        apply = self.apply()
        finish = [
            self.loop(coefficients, self.samples, 32 * count),
            self.loop(apply, self.tasks, self.work_bytes),
        ]
        if self.given:
            _place_coefficients(self)
            return finish
        self.reserve(partials=2 * self.tasks * channels, stats=2 * self.num_statistics)
        moments = self.moments()
        statistics = self.kernel("statistics", activated=False)
        if self.whole:
            units = self.num_statistics // max(1, self.samples)
            stages = [(moments, self.pieces), (statistics, units), (coefficients, 1), (apply, self.pieces)]
            loop = _steps(self, stages, self.work_bytes)
            _place_coefficients(self, loop)
            return [loop]
        _place_coefficients(self)
        return [
            self.loop(moments, self.tasks, self.work_bytes),
            self.loop(statistics, self.num_statistics, 16 * self.tasks * channels),
            *finish,
        ]

    def moments(self) -> int:
        return self.kernel("moments", activated=False)

    def apply(self) -> int:
        return self.kernel("apply")


def of_points(problem: Problem) -> bool:
    """Whether a problem is batch_norm of points with a scale or shift of their own, or of samples with few positions,
    whose coefficients would be many beside their elements; of few channels repeated rows would have several samples."""
    if not (problem.norm.per_batch and problem.modulated and problem.added is None):
        return False
    few = problem.view.spatial <= FEW_POSITIONS and problem.view.channels > VECTOR
    return problem.view.spatial == 1 or (few and as_positions(problem).view.samples == 1)


def as_positions(problem: Problem) -> Problem:
    """A problem of points as one sample, whose positions have no modulation that the kernels of slabs know of."""
    return replace(problem, scale_dtype=None, shift_dtype=None).folded


class PointsForward(SlabsForward):
    """The same of batch_norm's points with a scale or shift of their own."""

    def __init__(self, problem: Problem, pieces: int, piece: int) -> None:
        super().__init__(as_positions(problem), pieces, piece, False, problem)
        _tell_modulation(self, problem)

    def apply(self) -> int:
        return self.kernel("apply", module="points")


def _tell_modulation(plan: Plan, problem: Problem) -> None:
    plan.geometry[POINT_SCALE_DTYPE] = DTYPE_CODES[problem.scale_dtype]
    plan.geometry[POINT_SHIFT_DTYPE] = DTYPE_CODES[problem.shift_dtype]
    plan.geometry[TOGETHER] = problem.view.spatial


class SlabsSumForward(NumbersOfPlanes, SumForward, SlabsForward):
    """The same with sums; s that is not made twice goes to memory with its statistics, or with the output where these
    are given."""

    def always_keeps(self, problem: Problem) -> bool:
        return not _makes_at_once(problem)

    def loops(self) -> list[Loop]:
        self.place_total(0)
        return super().loops()

    def moments(self) -> int:
        if not self.adds_before:
            return super().moments()
        variant, made = self.variant().removesuffix("_behind"), _makes_at_once(self.problem)
        name = "moments_made" + variant + self.kept() if made else "moments" + variant
        return self.kernel(name, activated=False, module="slab_sums")

    def apply(self) -> int:
        if self.given and self.adds_before:
            return self.kernel("given" + self.variant(), module="slab_sums")
        if self.adds_before and not self.keeps_sum:
            return self.kernel("apply_made" + self.variant(), module="slab_sums")
        return self.kernel("apply" + self.variant().replace("by_channel", "before"), module="slab_sums")


def _makes_at_once(problem: Problem) -> bool:
    """Whether the statistics are read from s while it is made, of tensors in one order and no more channels than are
    summed at a time. On an AMD processor group_norm of (4, 320, 64, 64) in float32 with a number for each channel of a
    sample and silu takes 1.6 ms so, and 3.0 from s in memory, with s that is kept 2.1 and 3.0."""
    added, layout = problem.added, problem.layout
    assert added is not None
    one_order = added.pre_layout in (None, layout) and (problem.output_layout == layout or not added.keeps_sum)
    plain = added.pre_layout is None or added.gate is None
    few = problem.view.channels <= SCRATCH
    return makes_twice(problem) and problem.direction == "forward" and one_order and plain and few


class SlabsBackward(BackwardPlan):
    """p and q, coefficients and grad_input: each of all samples, or ``whole`` all of a few samples at a time."""

    module = "slabs_backward"

    def __init__(self, problem: Problem, pieces: int, piece: int, whole: bool, made_for: Problem | None = None) -> None:
        self.pieces, self.whole = pieces, whole
        super().__init__(problem, pieces, piece, made_for)

    def loops(self) -> list[Loop]:
        channels, count, units = self.channels, self.samples * self.channels, self.num_statistics
        self.reserve(partials=2 * self.tasks * channels, stats=2 * units)
        if self.pieces > 1:
            self.reserve(sums=2 * count)
        else:  # the partials of a sample's only slab are its sums
            self.workspace["sums"] = self.workspace["partials"]
        recall = self.kernel("recall", activated=False)
        coefficients = self.kernel("coefficients", activated=False, module="slabs")
        keeps = self.wants_input and self.keeps_dz()
        reduce, combine = self.reduce(keeps), self.kernel("combine", activated=False) if self.pieces > 1 else 0
        prepare = self.kernel("gradient_coefficients", activated=False) if self.wants_input else 0
        if self.whole:
            of_sample = units // max(1, self.samples)
            stages = [(recall, of_sample), (coefficients, 1), (reduce, self.pieces)]
            if self.pieces > 1:
                stages.append((combine, 1))
            if self.wants_input:
                stages += [(prepare, of_sample), (self.input_gradient(keeps), self.pieces)]
            loop = _steps(self, stages, 2 * self.work_bytes)
            _place_coefficients(self, loop, keeps)
            return [loop, *self.parameter_loops()]
        _place_coefficients(self, None, keeps)
        loops = [
            self.loop(recall, units, 16 * units),
            self.loop(coefficients, self.samples, 32 * count),
            self.loop(reduce, self.tasks, 2 * self.work_bytes),
        ]
        if self.pieces > 1:
            loops.append(self.loop(combine, self.samples, 16 * self.tasks * channels))
        if self.wants_input:
            loops.append(self.loop(prepare, units, 16 * count))
            loops.append(self.loop(self.input_gradient(keeps), self.tasks, 2 * self.work_bytes))
        return [*loops, *self.parameter_loops()]

    def keeps_dz(self) -> bool:
        """Whether dz of an activation with an exponential is kept between the two passes, in the compute dtype."""
        view = self.problem.view
        elements = view.numel // max(1, view.samples) if self.whole else view.numel
        return self.keeps(elements, MOST_KEPT[DTYPE_BYTES[self.problem.dtype]])

    def reduce(self, keeps: bool) -> int:
        return self.kernel("reduce" + self.variant(keeps))

    def input_gradient(self, keeps: bool) -> int:
        return self.kernel("input_gradient" + self.variant(keeps), activated=not keeps)


class PointsBackward(SlabsBackward):
    """The same of batch_norm's points, whose first pass makes the gradients of scale and shift."""

    def __init__(self, problem: Problem, pieces: int, piece: int) -> None:
        super().__init__(as_positions(problem), pieces, piece, False, problem)
        _tell_modulation(self, problem)
        self.sums_parameters = problem.direction != "backward_data"

    def keeps_dz(self) -> bool:
        return False

    def reduce(self, keeps: bool) -> int:
        return self.kernel("reduce", module="points")

    def input_gradient(self, keeps: bool) -> int:
        return self.kernel("input_gradient", module="points")

    def parameter_loops(self) -> list[Loop]:
        return self.unit_loops() if self.sums_parameters else []


class SlabsSumBackward(SumBackward, SlabsBackward):
    """The same where an activation meets z + post_add: dz goes to memory as its gradient, and is read from there; and
    with the gradient of s."""

    def keeps_dz(self) -> bool:
        return False

    def reduce(self, keeps: bool) -> int:
        return self.kernel("reduce", module="slabs_backward" if self.added.post_layout is None else "slab_sums")

    def input_gradient(self, keeps: bool) -> int:
        name = "input_gradient_total" if self.added.grad_sum else "input_gradient"
        if self.added.post_layout is None:
            return self.kernel(name)
        return self.kernel(name, activated=False, module="slab_sums")
