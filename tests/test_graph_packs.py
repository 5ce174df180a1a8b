"""What execute checks before it writes anything, and what it leaves alone."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_support import DIMS, GRAPHS, described, run
from torch import Tensor

from fusednorm.graph import Graph, VariantPackError, draw

Pack = dict[Any, Any]


def _swap(name: str, change: Callable[[Tensor], Any]) -> Callable[[Pack], None]:
    def spoil(pack: Pack) -> None:
        pack[name] = change(pack[name])

    return spoil


def _twice(pack: Pack) -> None:
    pack[1] = pack["x"]


def _in_place(pack: Pack) -> None:
    pack["y"] = pack["x"]


def _overlap(pack: Pack) -> None:
    block = torch.zeros(pack["x"].numel() + 4)
    pack["x"], pack["y"] = block[:-4].view(DIMS), block[4:].view(DIMS)


def _nested(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's first form of them is a prototype
        return torch.nested.nested_tensor([x[0], x[1]])


SPOILED: dict[str, tuple[Callable[[Pack], Any], str]] = {
    "missing": (lambda pack: pack.pop("scale"), r"lacks scale \(uid 2\)"),
    "unknown name": (lambda pack: pack.update(gamma=pack["scale"]), r"has 'gamma'; expected x \(uid 1\), "),
    "unknown uid": (lambda pack: pack.update({99: pack["scale"]}), "has 99; expected"),
    "unhashable": (lambda pack: pack.update({("a", 1): 1}), "has "),
    "twice": (_twice, "names a tensor twice"),
    "no tensor": (_swap("x", lambda x: x.numpy()), "it is a ndarray; expected a plain torch.Tensor"),
    "none": (_swap("x", lambda x: None), r"lacks x \(uid 1\)"),
    "dims": (_swap("x", lambda x: x[:1]), r"tensor 'x' \(uid 1\): dims \(1, 8, 5, 6\); expected \(2, 8, 5, 6\)"),
    "rank": (_swap("scale", torch.flatten), r"dims \(8,\); expected \(1, 8, 1, 1\)"),
    "strides": (
        _swap("x", lambda x: x.to(memory_format=torch.channels_last)),
        r"strides \(240, 1, 48, 8\); expected \(240, 30, 6, 1\); declare the tensor with graph.tensor_like",
    ),
    "dtype": (_swap("bias", Tensor.double), "dtype float64; expected float32"),
    "device": (_swap("y", lambda y: y.to("meta")), "it is on meta; expected cpu"),
    "subclass": (_swap("x", lambda x: x.as_subclass(type("Mine", (Tensor,), {}))), "it is a Mine"),
    "sparse": (_swap("x", Tensor.to_sparse), "expected a dense torch.Tensor"),
    "nested": (_swap("x", _nested), "expected a dense torch.Tensor"),
    "negated": (_swap("x", torch._neg_view), "its values are negated lazily"),
    "in place": (_in_place, "'x' and 'y' share memory|'y' and 'x' share memory"),
    "overlap": (_overlap, "share memory; expected an output in memory of its own"),
}


@pytest.mark.parametrize("before", [0, 2], ids=["first", "repeated"])
@pytest.mark.parametrize("how", SPOILED)
def test_a_wrong_variant_pack_is_refused_before_anything_is_written(how: str, before: int) -> None:
    graph = described("norm_activation").build()
    pack = draw(graph)
    for _ in range(before):  # right ones, after which a pack like them takes a shorter way
        graph.execute(pack)
    written = {name: pack[name].fill_(7.0) for name in ("y", "mean", "inv_variance")}
    spoil, message = SPOILED[how]
    spoil(pack)
    with pytest.raises(VariantPackError, match=message):
        graph.execute(pack)
    for tensor in written.values():
        assert bool((tensor == 7.0).all())


def test_virtual_tensors_stay_out_of_the_pack() -> None:
    graph = described("norm_activation").build()
    pack = draw(graph)
    with pytest.raises(VariantPackError, match="virtual tensors are the graph's own"):
        graph.execute({**pack, "groupnorm.y": torch.empty(DIMS)})
    with pytest.raises(VariantPackError, match="the variant pack is a list; expected a dict"):
        graph.execute(list(pack.values()))  # type: ignore[arg-type]


def test_tensors_are_named_by_uid_name_or_graph_tensor() -> None:
    graph = described("norm_activation").build()
    pack = draw(graph)
    graph.execute(pack)
    first = pack["y"].clone()
    by_name = {tensor.name: tensor for tensor in graph.tensors}
    for key in (lambda tensor: tensor.uid, lambda tensor: tensor):
        pack["y"].zero_()
        graph.execute({key(by_name[name]): tensor for name, tensor in pack.items()})
        assert torch.equal(pack["y"], first)


def test_slices_of_one_tensor_with_holes_between_them_are_apart() -> None:
    both = torch.randn(2, 16, 5, 6)
    graph = Graph(torch.float32)
    z, _, _ = graph.groupnorm(graph.tensor_like(both[:, :8], name="x"), num_groups=4)
    y = graph.pointwise("silu", z).set_output().set_name("y").set_strides(both[:, 8:].stride())
    graph.build().execute({"x": both[:, :8], "y": both[:, 8:]})
    pack = {"x": both[:, :8].clone(memory_format=torch.preserve_format), "y": both[:, 8:]}
    assert y.strides == pack["y"].stride()
    assert graph.verify({"x": both[:, :8], "y": both[:, 8:]})


def test_inputs_are_never_written() -> None:
    for name in GRAPHS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            graph = described(name, dtype).build()
            pack = draw(graph)
            before = {tensor.name: pack[tensor.name].clone() for tensor in graph.inputs}
            graph.execute(pack)
            assert all(torch.equal(pack[one], tensor) for one, tensor in before.items()), (name, dtype)


def test_nothing_is_recorded_for_autograd() -> None:
    graph = described("norm_activation").build("unfused:reference")
    pack = draw(graph)
    pack["scale"] = torch.nn.Parameter(pack["scale"])
    pack["x"].requires_grad_()
    graph.execute(pack)
    assert torch.is_grad_enabled()
    assert not pack["y"].requires_grad


def test_the_grad_mode_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = described("add").build()
    step = graph._program.steps[0]  # type: ignore[union-attr]
    monkeypatch.setattr(type(step), "run", property(lambda self: 1 / 0), raising=False)
    with pytest.raises(ZeroDivisionError):
        graph.execute(draw(graph))
    assert torch.is_grad_enabled()


# --- workspace ---


def test_a_workspace_that_does_not_fit_is_refused() -> None:
    graph = described("norm_activation").build("unfused:cpu.planes")
    size = graph.get_workspace_size()
    assert size == torch.empty(DIMS).numel() * 4
    pack = draw(graph)
    wrong = [
        torch.empty(size - 1, dtype=torch.uint8),
        torch.empty(size, dtype=torch.float32),
        torch.empty(2 * size, dtype=torch.uint8)[::2],
        torch.empty(size, dtype=torch.uint8, device="meta"),
        torch.empty(size + 1, dtype=torch.uint8)[1:],
        b"0" * size,
    ]
    for workspace in wrong:
        with pytest.raises(VariantPackError, match=rf"at least {size} bytes|not aligned"):
            graph.execute(pack, workspace)  # type: ignore[arg-type]


def test_a_workspace_in_the_memory_of_a_tensor_is_refused() -> None:
    graph = described("norm_activation").build("unfused:cpu.planes")
    pack, size = draw(graph), graph.get_workspace_size()
    own = torch.empty(size, dtype=torch.uint8)
    graph.execute(pack, own)
    for name, tensor in pack.items():
        block = torch.empty(size + tensor.nbytes, dtype=torch.uint8)
        inside = block[size - 4 :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)  # the last bytes in use
        inside.copy_(tensor)
        for _ in range(2):
            with pytest.raises(VariantPackError, match=f"workspace and the tensor '{name}' share memory"):
                graph.execute({**pack, name: inside}, block)
        torch.testing.assert_close(inside, tensor, rtol=0, atol=0)
        graph.execute({**pack, name: block[size:].view(tensor.dtype).view(tensor.shape).copy_(tensor)}, block)
        graph.execute(pack, own)


def test_a_workspace_that_was_set_to_other_memory_leaves_the_first_alone() -> None:
    graph = described("norm_activation").build("unfused:cpu.planes")
    pack, size = draw(graph), graph.get_workspace_size()
    first, second = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    workspace = first.detach()
    graph.execute(pack, workspace)
    assert first.any()
    workspace.set_(second)
    graph.execute(pack, workspace)
    assert torch.equal(first, second)
    first.zero_()
    graph.execute(pack, workspace)
    assert not first.any()


def test_results_do_not_depend_on_the_workspace() -> None:
    for name in GRAPHS:
        graph = described(name, torch.bfloat16)
        graph.validate().build_operation_graph().create_execution_plans().check_support()
        graph.build_plans(next(plan.name for plan in graph.plans[::-1] if plan.reason is None))
        pack = draw(graph)
        size = graph.get_workspace_size()
        results = []
        for workspace in (None, torch.empty(size, dtype=torch.uint8), torch.full((size + 64,), 255, dtype=torch.uint8)):
            graph.execute(pack, workspace)
            graph.execute(pack, workspace)
            results.append({tensor.name: pack[tensor.name].clone() for tensor in graph.outputs})
        for other in results[1:]:
            assert all(torch.equal(results[0][one], other[one]) for one in other), name


def test_threads_with_a_workspace_each() -> None:
    graph = described("norm_add_activation").build()
    packs = [draw(graph, seed) for seed in range(4)]
    expected = [run(described("norm_add_activation"), seed=seed)["y"] for seed in range(4)]

    def work(index: int) -> None:
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
        for _ in range(50):
            graph.execute(packs[index], workspace)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(pack["y"], y) for pack, y in zip(packs, expected, strict=True))


# --- the judge ---


def test_verify_sees_one_wrong_value_in_any_output() -> None:
    graph = described("activation_backward_norm_backward")
    pack = run(graph)
    assert graph.verify(pack)
    for tensor in graph.outputs:
        spoiled = dict(pack)
        spoiled[tensor.name] = pack[tensor.name].clone()
        spoiled[tensor.name].flatten()[3] += 0.01
        found = graph.verify(spoiled)
        assert not found
        assert [name for name, one in found.verdicts.items() if not one.ok] == [tensor.name]


def test_the_reference_is_float64_and_needs_no_outputs() -> None:
    graph = described("norm_activation", torch.bfloat16)
    pack = run(graph)
    given = {tensor.name: pack[tensor.name] for tensor in graph.inputs}
    results = graph.reference(given)
    assert set(results) == {"y", "mean", "inv_variance"}
    x, scale, bias = (given[name].double() for name in ("x", "scale", "bias"))
    expected = torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4, scale.flatten(), bias.flatten()))
    assert results["y"].dtype == torch.float64
    torch.testing.assert_close(results["y"], expected, rtol=1e-12, atol=1e-12)


def test_a_mean_of_a_thousand_deviations_verifies() -> None:
    for name in ("norm_activation", "activation_backward_norm_backward", "batchnorm", "layernorm"):
        graph = described(name).build()
        pack = draw(graph)
        pack["x"] += 1000
        graph.execute(pack)
        assert graph.verify(pack), name


def relu_between(x: Tensor, y: Tensor) -> Graph:
    graph = Graph("float32")
    graph.pointwise("relu", graph.tensor_like(x, name="x")).set_output().set_name("y").set_strides(y.stride())
    return graph.build()


def test_tensors_with_holes_may_interleave_but_not_meet() -> None:
    base = torch.randn(2, 12, 5, 5)
    x, beside, over = base[:, :6], base[:, 6:], base[:, 4:10]
    expected = x.relu()
    with pytest.raises(VariantPackError, match="share memory"):
        relu_between(x, over).execute({"x": x, "y": over})
    relu_between(x, beside).execute({"x": x, "y": beside})
    assert torch.equal(beside, expected)


@pytest.mark.parametrize("before", [1, 2])
def test_memory_that_is_shared_later_is_refused_too(before: int) -> None:
    """After executions whose tensors lay apart, in new memory or in the memory of one of them; and again after that."""
    graph = described("norm_activation").build()
    pack = draw(graph)
    for _ in range(before):
        graph.execute(pack)
    for shared in ({"y": pack["x"]}, {"x": pack["y"]}):
        with pytest.raises(VariantPackError, match="share memory"):
            graph.execute(pack | shared)
    again = {name: tensor.clone() for name, tensor in pack.items()}
    graph.execute(again)
    with pytest.raises(VariantPackError, match="share memory"):
        graph.execute(again | {"y": again["x"]})
    graph.execute(again)
    assert torch.equal(again["y"], pack["y"])


def test_a_tensor_that_autograd_saved_does_not_change_unseen() -> None:
    x, y, leaf = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 8, requires_grad=True)
    graph = Graph("float32")  # a kernel of the library; torch's own operations say what they write
    graph.groupnorm(graph.tensor_like(x, name="x"), num_groups=2)[0].set_output().set_name("y")
    graph.build()
    loss = (leaf * y).sum()
    graph.execute({"x": x, "y": y})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(VariantPackError, match="requires gradients"):
        graph.execute({"x": x, "y": leaf})


def test_another_default_device_does_not_matter() -> None:
    x = torch.randn(2, 64, 64, 64)  # few large groups, whose plan needs memory beside its results
    y, expected = torch.empty_like(x), torch.nn.functional.group_norm(x, 2)
    graph = Graph("float32")
    graph.groupnorm(graph.tensor_like(x, name="x"), num_groups=2)[0].set_output().set_name("y")
    graph.build()
    with torch.device("meta"):
        graph.execute({"x": x, "y": y})
        assert graph.verify({"x": x, "y": y}).ok
    assert torch.allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_result_that_another_node_reads_is_judged_as_rounded(seed: int) -> None:
    graph = Graph("bfloat16")
    x, r = graph.tensor((64, 512), name="x"), graph.tensor((64, 512), name="r")
    h = graph.pointwise("add", x, r).set_output().set_name("h")
    graph.rmsnorm(h, graph.tensor((512,), name="scale"))[0].set_output().set_name("y")
    pack = draw(graph.build(), seed)
    graph.execute(pack)
    verification = graph.verify(pack)
    assert verification.ok, str(verification)
