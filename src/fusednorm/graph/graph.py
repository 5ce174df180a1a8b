"""Graph: the stages from a description to its execution."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusednorm.graph import fusion, tuning
from fusednorm.graph.building import GraphBuilder
from fusednorm.graph.diagrams import Explanation, mermaid
from fusednorm.graph.errors import InvalidGraphError, StageError, UnknownPlanError, UnsupportedGraphError
from fusednorm.graph.logs import logger_of
from fusednorm.graph.lowering import Program
from fusednorm.graph.nodes import Node
from fusednorm.graph.packs import PackReader, VariantPack
from fusednorm.graph.plans import ExecutionPlan, create_plans, why_not
from fusednorm.graph.tensors import TensorAttributes, as_dtype
from fusednorm.graph.validation import Validator
from fusednorm.graph.verification import Verification, constants, evaluate, verify
from fusednorm.graph.workspace import Workspace
from fusednorm.private.torch_names import set_grad_enabled

logger = logger_of(__name__)

STAGES = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
DEBUG = logging.DEBUG
_grad_enabled = torch.is_grad_enabled
_increment_version = torch.autograd.graph.increment_version


class Graph(GraphBuilder):
    """Normalizations and the operations around them, described once, planned, and executed many times.

    The stages are those of hipDNN and cuDNN's frontend: validate, build_operation_graph, create_execution_plans,
    check_support, build_plans (``build`` runs all), then execute.

    Args:
        io_data_type: the dtype of tensors from outside that declare none; a torch dtype or its name.
        intermediate_data_type: the dtype of virtual tensors that declare none. A fused plan keeps them in registers, in
            the accumulation dtype, and rounds them to nothing narrower; a tensor declared wider than that dtype is not
            fused. Node by node they lie in the workspace in this dtype.
        compute_data_type: the least precise dtype for statistics and sums. The kernels accumulate in float32, and in
            float64 for float64 data; a plan that would accumulate in less cannot run, and check_support says why.
        name: for messages, logs and saved graphs.
        device: where the graph runs; by default the device of the first ``tensor_like``, else the CPU.

    Raises:
        GraphError: every error of a graph is a subclass: InvalidGraphError, StageError, UnsupportedGraphError,
            UnknownPlanError, VariantPackError, GraphFormatError.

    >>> import torch, fusednorm
    >>> x = torch.randn(2, 8, 4, 4)
    >>> graph = fusednorm.graph.Graph(torch.float32, name="norm_silu")
    >>> z, _, _ = graph.groupnorm(graph.tensor_like(x, name="x"), num_groups=4, phase="inference")
    >>> y = graph.pointwise("silu", z).set_output().set_name("y")
    >>> result = torch.empty_like(x)
    >>> graph.build().execute({"x": x, "y": result})
    >>> torch.equal(result, fusednorm.group_norm(x, 4, activation="silu"))
    True
    """

    def __init__(
        self,
        io_data_type: torch.dtype | str,
        intermediate_data_type: torch.dtype | str = torch.float32,
        compute_data_type: torch.dtype | str = torch.float32,
        *,
        name: str = "graph",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.name = str(name)
        self.io_data_type = as_dtype(io_data_type, "io_data_type")
        self.intermediate_data_type = as_dtype(intermediate_data_type, "intermediate_data_type")
        self.compute_data_type = as_dtype(compute_data_type, "compute_data_type")
        try:
            self._given_device = None if device is None else torch.device(device)
        except (RuntimeError, TypeError):
            raise self._mistake("graph", f"device is {device!r}", "one of torch's", "give 'cpu' or 'cuda'") from None
        self._devices: list[torch.device] = []
        #: The plan that a loaded graph was saved with; ``build`` takes it by default.
        self.saved_plan: str | None = None
        self._reset()

    # --- what is known at each stage ---

    def _reset(self) -> None:
        self._stage = 0
        self._plans: list[ExecutionPlan] = []
        self._plan: ExecutionPlan | None = None
        self._program: Program | None = None
        self._order: list[Node] = []
        self._operations: list[tuple[str, fusion.OperationGraph]] = []
        self._reader: PackReader | None = None

    def _changed(self) -> None:
        if getattr(self, "_stage", 0):
            for tensor in self.tensors:
                tensor.forget("uid", "name")
            self._reset()

    def _seen_device(self, device: torch.device) -> None:
        self._devices.append(device)

    def _needs(self, what: str, stage: str) -> None:
        if self._stage <= STAGES.index(stage):
            done = STAGES[self._stage - 1] if self._stage else "none"
            raise StageError(
                f"graph {self.name!r}: {what} needs the stage {stage}, and the last one that ran is {done}; "
                f"call {STAGES[self._stage]}() next, or build() for all; a change to the graph starts over"
            )

    def _done(self, stage: str, message: str, *values: object) -> None:
        self._stage = STAGES.index(stage) + 1
        logger.info("graph %s: %s: " + message, self.name, stage, *values)

    @property
    def declared_device(self) -> torch.device:
        """The device that was given, or seen first, or the CPU."""
        return self._given_device or (self._devices[0] if self._devices else torch.device("cpu"))

    @property
    def device(self) -> torch.device:
        """Where the graph runs; UnsupportedGraphError where torch has no such device."""
        device = self.declared_device
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UnsupportedGraphError(
                f"graph {self.name!r}: its device is {device} and torch finds no GPU; give device='cpu'"
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return device

    @property
    def inputs(self) -> tuple[TensorAttributes, ...]:
        """The tensors that a variant pack must hold and the graph reads."""
        made = {tensor for node in self.nodes for tensor in node.outputs.values()}
        given = (tensor for tensor in self.tensors if not tensor.is_virtual and tensor.value is None)
        return tuple(tensor for tensor in given if tensor not in made)

    @property
    def outputs(self) -> tuple[TensorAttributes, ...]:
        """The tensors that a variant pack must hold and the graph writes."""
        made = {tensor for node in self.nodes for tensor in node.outputs.values()}
        return tuple(tensor for tensor in self.tensors if not tensor.is_virtual and tensor in made)

    @property
    def plans(self) -> tuple[ExecutionPlan, ...]:
        """Every plan, those that can run first, in heuristic order; after create_execution_plans."""
        self._needs("plans", "create_execution_plans")
        return tuple(self._plans)

    @property
    def plan(self) -> ExecutionPlan:
        """The plan that execute runs; after build_plans."""
        self._needs("plan", "build_plans")
        assert self._plan is not None
        return self._plan

    # --- stages ---

    def validate(self) -> Graph:
        """Infers dims, strides, dtypes and uids that were not declared.

        Raises:
            InvalidGraphError: every mistake, each with node and port, value, what was expected, and the remedy.
        """
        for tensor in self.tensors:
            tensor.forget("uid", "name")
        self._reset()
        validator = Validator(self)
        validator.run()
        if len(set(self._devices)) > 1 and self._given_device is None:
            names = " and ".join(sorted({str(device) for device in self._devices}))
            validator.wrong("graph", f"tensor_like saw tensors on {names}", "one device", "move one of them")
        if validator.mistakes:
            logger.error("graph %s: validate: %d mistakes", self.name, len(validator.mistakes))
            raise InvalidGraphError(self.name, validator.mistakes)
        self._order = validator.order
        self._done("validate", "%d nodes, %d tensors", len(self.nodes), len(self.tensors))
        return self

    def build_operation_graph(self) -> Graph:
        """Finds the nodes that the library runs as one kernel."""
        self._needs("build_operation_graph", "validate")
        self._reset_after("validate")
        fused, alone = fusion.fuse(self._order, partial(why_not, device=self.device)), fusion.node_by_node(self._order)
        self._operations = [("fused:", fused), ("unfused:", alone)] if fused.fused else [("", fused)]
        if fused.added:
            self._operations.insert(1, ("composed:", fusion.fuse(self._order, fusion.composed)))
        self._reader = PackReader(self.name, (*self.inputs, *self.outputs), len(self.outputs), self.device)
        labels = ", ".join(operation.label for operation in fused.operations)
        self._done("build_operation_graph", "%s", labels)
        return self

    def create_execution_plans(self, mode: str = "heuristic") -> Graph:
        """One plan for each combination of instances, by default in heuristic order.

        ``mode="tuned"`` puts the ranking of an earlier ``autotune`` first, where the tuning cache has one. Where the
        graph has something to fuse, a plan's name starts with ``fused:`` or, for node by node, ``unfused:``; where
        sums are fused there is ``composed:`` too, in which torch forms the sums and norms have their activations.
        """
        self._needs("create_execution_plans", "build_operation_graph")
        if mode not in ("heuristic", "tuned"):
            raise UnknownPlanError(f"graph {self.name!r}: the mode {mode!r} does not exist; use heuristic or tuned")
        self._reset_after("build_operation_graph")
        self._plans = create_plans(self._operations, self.device, self.compute_data_type)
        if mode == "tuned":
            self._rank(tuning.read(self) or {})
        self._done("create_execution_plans", "%s", ", ".join(plan.name for plan in self._plans))
        return self

    def check_support(self) -> dict[str, str | None]:
        """For every plan None, or why it cannot run here.

        Raises:
            UnsupportedGraphError: no plan can.
        """
        self._needs("check_support", "create_execution_plans")
        self._reset_after("create_execution_plans")
        reasons = {plan.name: plan.reason for plan in self._plans}
        if all(reason is not None for reason in reasons.values()):
            summary = f"graph {self.name!r}: no plan can run it on {self.device}:"
            raise UnsupportedGraphError(summary, *map(str, self._plans))
        supported = sum(reason is None for reason in reasons.values())
        self._done("check_support", "%d of %d plans can run", supported, len(reasons))
        return reasons

    def build_plans(self, plan: str | None = None) -> Graph:
        """Builds the named plan for execute to run; by default the saved graph's plan, else the first that can run.

        Raises:
            UnknownPlanError: there is no plan of this name.
            UnsupportedGraphError: the named plan cannot run; nothing falls back.
        """
        self._needs("build_plans", "check_support")
        name = self.saved_plan if plan is None else plan
        chosen = self._find(name) if name is not None else next(one for one in self._plans if one.reason is None)
        self._select(chosen)
        self._done("build_plans", "plan %s", chosen.name)
        return self

    def build(self, plan: str | None = None) -> Graph:
        """Every stage from validate to build_plans."""
        self.validate().build_operation_graph().create_execution_plans().check_support()
        return self.build_plans(plan)

    def _reset_after(self, stage: str) -> None:
        self._stage = STAGES.index(stage) + 1
        self._plan = self._program = None

    def _find(self, name: str) -> ExecutionPlan:
        for plan in self._plans:
            if plan.name == name:
                if plan.reason is not None:
                    raise UnsupportedGraphError(f"graph {self.name!r}: the plan {name!r} cannot run: {plan.reason}")
                return plan
        known = ", ".join(plan.name for plan in self._plans)
        raise UnknownPlanError(f"graph {self.name!r}: the plan {name!r} does not exist; expected one of {known}")

    def _select(self, plan: ExecutionPlan) -> None:
        assert self._reader is not None
        program = plan.build(self._reader.tensors, self.device)
        self._plan, self._program = plan, program
        self._workspace = Workspace(self.name, program.scratch, program.workspace_bytes, self.device, program.constants)

    def _rank(self, seconds: dict[str, float]) -> None:
        """Put timed plans first, from the fastest; plans without a time keep their order behind them."""
        ranked = [name for name in seconds if any(plan.name == name for plan in self._plans)]
        place = {name: index for index, name in enumerate(ranked)}
        self._plans.sort(key=lambda plan: (plan.reason is not None, place.get(plan.name, len(place))))

    # --- execution ---

    def get_workspace_size(self) -> int:
        """The bytes of workspace that the chosen plan needs; 0 where everything virtual stays in registers."""
        self._needs("get_workspace_size", "build_plans")
        assert self._program is not None
        return self._program.workspace_bytes

    def execute(self, variant_pack: VariantPack, workspace: Tensor | None = None) -> None:
        """Runs the chosen plan on tensors, by uid, name or graph tensor; the outputs among them are written.

        Every tensor is checked for dims, strides, dtype and device before anything is written. ``workspace`` is a
        packed uint8 tensor of at least ``get_workspace_size()`` bytes; without one it is allocated for this call. No
        gradient is recorded. Calls from several threads need a workspace each.

        Raises:
            VariantPackError: a tensor is missing, unknown or not what was declared; an output, or the workspace, shares
                memory.
            StageError: the plans have not been built.
        """
        program = self._program
        if program is None:
            self._needs("execute", "build_plans")
        assert program is not None and self._reader is not None
        values = self._reader.read(variant_pack)
        views = self._workspace.views(workspace)
        if workspace is not None and program.workspace_bytes:
            self._reader.check_workspace(values, workspace, program.workspace_bytes)
        values += views
        recording = _grad_enabled()
        set_grad_enabled(False)
        try:
            if logger.isEnabledFor(DEBUG):
                self._execute_logged(program, values)
            else:
                for step in program.steps:
                    step.run(values)
            # Autograd does not see the kernels write: the counters tell it where a tensor that it saved has changed.
            written = [values[slot] for slot in self._reader.outputs]
            _increment_version([tensor for tensor in written if not tensor.is_inference()])
        finally:
            set_grad_enabled(recording)

    def _execute_logged(self, program: Program, values: list[Any]) -> None:
        for index, step in enumerate(program.steps):
            logger.debug("graph %s: launch %d of %d: %s", self.name, index + 1, len(program.steps), step.label)
            step.run(values)

    def autotune(
        self, variant_pack: VariantPack, workspace: Tensor | None = None, *, refresh: bool = False
    ) -> dict[str, float]:
        """Seconds of every plan that can run, the fastest first, which execute then runs; outputs are written.

        The ranking is kept in the tuning cache on disk, for this graph, device, number of threads and version, and a
        later call takes it from there unless ``refresh``. ``workspace`` serves the plans that it is large enough for.

        Raises:
            VariantPackError, StageError: as :meth:`execute`; check_support must have run.
        """
        self._needs("autotune", "check_support")
        assert self._reader is not None
        self._reader.read(variant_pack)
        seconds = None if refresh else tuning.read(self)
        if seconds is None:
            seconds = tuning.measure(self, variant_pack, workspace)
            tuning.write(self, seconds)
        self._rank(seconds)
        self._select(self._find(next(iter(seconds))))
        self._done("build_plans", "autotune chose plan %s", self.plan.name)
        return seconds

    # --- judging, explaining, saving ---

    def reference(self, variant_pack: VariantPack) -> dict[str, Tensor]:
        """Every output by name, from the whole graph in float64 on the CPU, node by node through the reference.

        Outputs in the variant pack are not looked at and may be absent.
        """
        self._needs("reference", "build_operation_graph")
        assert self._reader is not None
        results = evaluate(self._order, self._given(variant_pack), torch.float64)
        return {tensor.name: results[tensor] for tensor in self.outputs}

    def verify(self, variant_pack: VariantPack) -> Verification:
        """Compares the outputs in the variant pack, as execute left them, with the reference in float64.

        The tolerance follows from the dtype and the data: twice the error that the same graph has in plain torch with
        float32 statistics and with virtual tensors rounded to their dtype, and the roundings that nothing avoids.
        """
        self._needs("verify", "build_operation_graph")
        assert self._reader is not None
        values = self._reader.read(variant_pack)
        made = dict(zip(self._reader.tensors, values, strict=True))
        found = verify(self._order, self._given(variant_pack), {tensor: made[tensor] for tensor in self.outputs})
        logger.log(logging.INFO if found.ok else logging.ERROR, "graph %s: %s", self.name, found)
        return found

    def _given(self, variant_pack: VariantPack) -> dict[TensorAttributes, Tensor]:
        assert self._reader is not None
        values = self._reader.read(variant_pack, outputs=False)
        return dict(zip(self.inputs, values, strict=False)) | constants(self.tensors)

    def explain(self) -> Explanation:
        """Each fusion made or not made, with its reason; the plans; the chosen plan's numerics. ``print`` it."""
        self._needs("explain", "build_operation_graph")
        operations = self._operations[0][1] if self._plan is None else self._plan.operations
        return Explanation(self.name, operations.operations, operations.remarks, tuple(self._plans), self._plan)

    def to_mermaid(self) -> str:
        """The graph as text for Mermaid: nodes, tensors, and which are virtual."""
        return mermaid(self.name, self.nodes, self.tensors)

    def to_json(self) -> str:
        """The graph as JSON, without inferred values, with the chosen plan's name where there is one."""
        from fusednorm.graph.serialization import to_json

        return to_json(self)

    @classmethod
    def from_json(cls, text: str, *, device: torch.device | str | None = None) -> Graph:
        """A graph from :meth:`to_json`; ``device`` takes the place of the saved one.

        Raises:
            GraphFormatError: the text is damaged or from a newer version. Nothing in it is ever executed as code.
        """
        from fusednorm.graph.serialization import from_json

        return from_json(text, device)

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str | None = None) -> Graph:
        """Reads a file of :meth:`save`; raises as :meth:`from_json`, and OSError."""
        from fusednorm.graph.serialization import read

        return cls.from_json(read(path), device=device)
