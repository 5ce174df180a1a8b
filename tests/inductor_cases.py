"""Calls that are compiled for the fake H200; run as a program it prints the generated code of each as JSON."""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

BF16 = "bfloat16"


@dataclass(frozen=True)
class Case:
    """A call of tensors of these shapes; ``last``: the first one, of 4 dimensions, is channels_last."""

    call: str
    shapes: tuple[tuple[int, ...], ...]
    last: bool = False
    train: bool = True
    dtype: str = BF16
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    instance: str | None = None
    ahead: bool = False  # by AOTInductor


IMAGE, CHANNELS, CONV = (8, 320, 64, 64), (320,), (320, 320, 3, 3)
SILU = "lambda x, w, b: fusednorm.group_norm(x, 32, w, b, activation='silu')"
BATCH = "lambda x, w, b, m, v: fusednorm.batch_norm(x, m.detach(), v.detach(), w, b, {}, activation='relu')"
CHAIN = (
    "lambda x, a, w, b, c: F.conv2d(fusednorm.group_norm(F.conv2d(x, a, padding=1), 32, w, b, activation='silu'),"
    " c, padding=1)"
)
JOINED = (
    "lambda x, y, a, q, d, w, b, c: F.conv2d(fusednorm.group_norm(torch.cat([F.conv2d(x, a, q, padding=1),"
    " F.conv2d(y, d, padding=1)], 1), 32, w, b, activation='silu'), c, padding=1)"
)
_JOINED = (*((2, 320, 64, 64),) * 2, (640, 320, 3, 3), (640,), CONV, (960,), (960,), (640, 960, 3, 3))
_ROWS, _ROW = ((4096, 1024), (4096, 1024)), ((1024,), (1024,))
#: Calls that torch's own formula serves better, each beside the call of torch's functions.
NATIVE: dict[str, tuple[Case, Case]] = {
    name: (Case(call, shapes, train=train, dtype=dtype), Case(torchs, shapes, train=train, dtype=dtype))
    for name, call, torchs, shapes, train, dtype in (
        (
            "layer_norm of a sum",
            "lambda x, r, w, b: (fusednorm.layer_norm(x + r, (1024,), w, b, activation='gelu'), x + r)",
            "lambda x, r, w, b: (F.gelu(F.layer_norm(x + r, (1024,), w, b)), x + r)",
            (*_ROWS, *_ROW), False, BF16,
        ),
        (
            "layer_norm in training",
            "lambda x, r, w, b: fusednorm.layer_norm(x + r, (1024,), w, b) * 2",
            "lambda x, r, w, b: F.layer_norm(x + r, (1024,), w, b) * 2",
            (*_ROWS, *_ROW), True, BF16,
        ),
        (
            "rms_norm and a product",
            "lambda x, r, w: fusednorm.rms_norm(x, (1024,), w, 1e-6) * r",
            "lambda x, r, w: F.rms_norm(x, (1024,), w, 1e-6) * r",
            (*_ROWS, _ROW[0]), False, "float32",
        ),
        (
            "layer_norm of transposed rows",
            "lambda x, w, b: fusednorm.layer_norm(x.transpose(1, 2), (320,), w, b)",
            "lambda x, w, b: F.layer_norm(x.transpose(1, 2), (320,), w, b)",
            ((8, 320, 64), CHANNELS, CHANNELS), False, BF16,
        ),
        (
            "batch_norm's evaluation and a sum",
            "lambda x, w, b, m, v: fusednorm.batch_norm(x, m, v, w, b, False, activation='relu') + 1",
            "lambda x, w, b, m, v: F.relu(F.batch_norm(x, m, v, w, b, False)) + 1",
            (IMAGE, *(CHANNELS,) * 4), False, BF16,
        ),
        (
            "group_norm and a residual",
            "lambda x, w, b: fusednorm.group_norm(x, 32, w, b, activation='silu') + x",
            "lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)) + x",
            (IMAGE, CHANNELS, CHANNELS), False, BF16,
        ),
        (
            "group_norm of channels_first before a convolution",  # in channels_last, in which Inductor's loops write
            "lambda x, w, b, c: F.conv2d(fusednorm.group_norm(x, 32, w, b, activation='silu'), c, padding=1)",
            "lambda x, w, b, c: F.conv2d(F.silu(F.group_norm(x, 32, w, b)), c, padding=1)",
            ((2, 320, 64, 64), CHANNELS, CHANNELS, CONV), False, BF16,
        ),
        (
            "layer_norm of transposed rows in training",  # transposed to the order that torch's function returns
            "lambda x, w, b: fusednorm.layer_norm(x[:, None].transpose(1, 2).squeeze(2), (320,), w, b).sin()",
            "lambda x, w, b: F.layer_norm(x[:, None].transpose(1, 2).squeeze(2), (320,), w, b).sin()",
            ((8, 64, 320), CHANNELS, CHANNELS), True, BF16,
        ),
        (
            "layer_norm without parameters in training",
            "lambda x, r: fusednorm.layer_norm(x + r, (1024,)) * r",
            "lambda x, r: F.layer_norm(x + r, (1024,)) * r",
            _ROWS, True, BF16,
        ),
        (
            "rms_norm without a weight in training",
            "lambda x, r: fusednorm.rms_norm(x + r, (1024,), eps=1e-6) * r",
            "lambda x, r: F.rms_norm(x + r, (1024,), eps=1e-6) * r",
            _ROWS, True, BF16,
        ),
    )
}  # fmt: skip
#: Those of which it also serves the backward better.
NATIVE_BACKWARD = [
    "layer_norm of transposed rows in training",
    "layer_norm without parameters in training",
    "rms_norm without a weight in training",
]
_CONVOLVED = "F.conv2d(x, a, q, padding=1)"
_GROUPS = "fusednorm.group_norm({}, 32, w, b, activation='silu')"
_IMAGE, _SMALL, _BIASED = (1, 128, 512, 512), (2, 320, 32, 32), ((320,) * 2 + (3, 3), CHANNELS)
#: Norms of what convolutions made, whose biases and sums become part of the norm.
SUMMED: dict[str, Case] = {
    "a bias": Case(
        f"lambda x, a, q, w, b: {_GROUPS.format(_CONVOLVED)}",
        (_IMAGE, (128, 128, 3, 3), (128,), (128,), (128,)), last=True, train=False,
    ),
    "a bias in training": Case(
        f"lambda x, a, q, w, b: {_GROUPS.format(_CONVOLVED)}",
        (_IMAGE, (128, 128, 3, 3), (128,), (128,), (128,)), last=True,
    ),
    "numbers of samples": Case(
        f"lambda x, a, q, t, w, b: {_GROUPS.format(_CONVOLVED + ' + t[:, :, None, None]')}",
        (_SMALL, *_BIASED, (2, 320), CHANNELS, CHANNELS), last=True, train=False,
    ),
    "a residual that goes on": Case(
        f"lambda x, a, q, w, b: (lambda s: ({_GROUPS.format('s')}, s.sin()))(x + {_CONVOLVED})",
        (IMAGE, *_BIASED, CHANNELS, CHANNELS), last=True, train=False,
    ),
    "a sum of the caller's": Case(
        f"lambda x, y, w, b: (lambda s: ({_GROUPS.format('s')}, s.sin()))(x + y)",
        (IMAGE, IMAGE, CHANNELS, CHANNELS), train=False,
    ),
    "norms of channels": Case(
        f"lambda x, a, q, w, b: fusednorm.instance_norm({_CONVOLVED}, weight=w, bias=b)",
        ((2, 64, 128, 128), (64, 64, 3, 3), (64,), (64,), (64,)), last=True,
    ),
    # What is computed with the sum stays Inductor's; its order in memory is foreseen, in which ours are the faster.
    "a product": Case(
        f"lambda x, a, q, w, b: {_GROUPS.format(f'x * {_CONVOLVED}')}",
        (_IMAGE, (128, 128, 3, 3), (128,), (128,), (128,)), last=True, train=False,
    ),
}  # fmt: skip
CASES: dict[str, Case] = {
    **SUMMED,
    "group_norm": Case(SILU, (IMAGE, CHANNELS, CHANNELS)),
    "group_norm channels_last": Case(SILU, (IMAGE, CHANNELS, CHANNELS), last=True),
    # So large that an eager call of it runs on hopper.resident.
    "group_norm inference": Case(SILU, ((16, 320, 64, 64), CHANNELS, CHANNELS), train=False),
    "group_norm small": Case(SILU, ((2, 320, 8, 8), CHANNELS, CHANNELS)),
    "batch_norm": Case(BATCH.format(True), ((32, 64, 56, 56), *((64,),) * 4)),
    "batch_norm channels_last": Case(BATCH.format(True), ((32, 64, 56, 56), *((64,),) * 4), last=True),
    "batch_norm inference": Case(BATCH.format(False), ((32, 64, 56, 56), *((64,),) * 4), train=False),
    "layer_norm": Case("lambda x, w, b: fusednorm.layer_norm(x, (1024,), w, b)", ((4096, 1024), (1024,), (1024,))),
    "rms_norm": Case("lambda x, w: fusednorm.rms_norm(x, (1024,), w)", ((4096, 1024), (1024,))),
    "layer_norm of channels": Case(
        "lambda x, w, b: fusednorm.layer_norm(x, (320,), w, b, activation='gelu', channel_dim=1)",
        (IMAGE, CHANNELS, CHANNELS),
    ),
    "adaLN": Case(
        "lambda x, w, b, s, t: fusednorm.layer_norm(x, (1024,), w, b, scale=s, shift=t)",
        ((4, 512, 1024), (1024,), (1024,), (4, 1024), (4, 1024)),
    ),
    "packed heads": Case(
        "lambda x, w: fusednorm.rms_norm(x[:, :, 0], (128,), w, activation='silu')", ((4, 512, 3, 16, 128), (128,))
    ),
    "layer_norm of channels_last": Case(
        "lambda x, w, b: fusednorm.layer_norm(x, (320,), w, b, activation='gelu', channel_dim=1)",
        (IMAGE, CHANNELS, CHANNELS),
        last=True,
    ),
    "instance_norm": Case(
        "lambda x, w, b: fusednorm.instance_norm(x, weight=w, bias=b, activation='leaky_relu')",
        ((2, 64, 32, 32, 32), (64,), (64,)),
    ),
    "float64": Case(SILU, ((2, 320, 16, 16), CHANNELS, CHANNELS), dtype="float64"),
    "convolutions": Case(CHAIN, (IMAGE, CONV, CHANNELS, CHANNELS, CONV)),
    "volumes": Case(
        "lambda x, a, b, w, c: F.conv3d(fusednorm.instance_norm(F.conv3d(x, a, padding=1), weight=b, bias=w,"
        " activation='leaky_relu'), c, padding=1)",
        ((2, 64, 16, 64, 64), (64, 64, 3, 3, 3), (64,), (64,), (64, 64, 3, 3, 3)),
    ),
    "a part of volumes of one channel": Case(
        "lambda x, a, c: F.conv3d(fusednorm.instance_norm(F.conv3d(x[1:], a, padding=1)), c, padding=1)",
        ((3, 1, 16, 64, 64), (64, 1, 3, 3, 3), (64, 64, 3, 3, 3)),
    ),
    "rows between convolutions": Case(
        "lambda x, a, r, w, b, c: F.conv2d(fusednorm.layer_norm(F.conv2d(x, a, padding=1).permute(0, 2, 3, 1) + r,"
        " (320,), w, b).permute(0, 3, 1, 2), c, padding=1)",
        ((2, 320, 64, 64), CONV, CHANNELS, CHANNELS, CHANNELS, CONV),
        train=False,
        instance="triton.rows",
    ),
    "a concatenation": Case(JOINED, _JOINED, train=False),
    "a concatenation in training": Case(JOINED, _JOINED),
    "gradient of a sum": Case(f"lambda *t: ({SILU})(*t).sum()", (IMAGE, CHANNELS, CHANNELS), last=True),
    "twice": Case(f"lambda x, w, b: ({SILU})(({SILU})(x, w, b), w, b)", (IMAGE, CHANNELS, CHANNELS), train=False),
    "dynamic": Case(SILU, (IMAGE, CHANNELS, CHANNELS), dynamic=True),
    "one element a statistic": Case("lambda x: fusednorm.layer_norm(x, (1,))", ((16, 1),)),
    "cpp_wrapper": Case(SILU, (IMAGE, CHANNELS, CHANNELS), options={"cpp_wrapper": True}),
    "cpp_wrapper as a setting": Case(SILU, (IMAGE, CHANNELS, CHANNELS), settings={"cpp_wrapper": True}),
    "AOTInductor": Case(SILU, (IMAGE, CHANNELS, CHANNELS), train=False, ahead=True),
    "max_autotune": Case(
        SILU, (IMAGE, CHANNELS, CHANNELS), options={"max_autotune": True, "coordinate_descent_tuning": True}
    ),
    "forced": Case(
        "lambda x, w, b: fusednorm.layer_norm(x, (1024,), w, b)",
        ((4096, 1024), (1024,), (1024,)),
        train=False,
        instance="triton.rows",
    ),
    **{name: ours for name, (ours, _) in NATIVE.items()},
    **{f"torch's {name}": torchs for name, (_, torchs) in NATIVE.items()},
}


def generated(case: Case, codes: list[str]) -> list[str]:
    """The code of the case's graphs: the forward, and the backward where it is trained."""
    import fake_cuda
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fusednorm

    torch._dynamo.reset()
    codes.clear()
    call: Callable[..., Any] = eval(case.call, {"fusednorm": fusednorm, "F": F, "torch": torch})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        tensors = [torch.empty(shape, dtype=getattr(torch, case.dtype), device="cuda:0") for shape in case.shapes]
        if case.last:
            tensors[0] = tensors[0].to(memory_format=torch.channels_last)
        tensors = [tensor.requires_grad_(case.train) for tensor in tensors]
    forced = fusednorm.use_instance(case.instance) if case.instance else nullcontext()
    fake_cuda.SETTINGS.clear()
    fake_cuda.SETTINGS.update(case.settings)
    with forced, torch._inductor.config.patch(case.settings), suppress(fake_cuda.Captured):
        if case.ahead:
            module = torch.nn.Module()
            module.forward = call  # type: ignore[method-assign]
            program = torch.export.export(module, tuple(tensors)).module()
            torch._inductor.aot_compile(program, tuple(tensors), options=case.options)
        else:
            with mode:
                torch.compile(call, fullgraph=True, dynamic=case.dynamic, options=case.options or None)(*tensors)
    return list(codes)


def main(names: list[str]) -> None:
    import fake_cuda

    warnings.simplefilter("ignore")
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.name != "fusednorm.private.lookup")  # names that older releases have not
    logging.getLogger("fusednorm").addHandler(handler)
    logging.getLogger("fusednorm").setLevel(logging.INFO)
    codes, found = fake_cuda.install(), {}
    for name in names or CASES:
        words.clear()
        try:
            found[name] = {"codes": generated(CASES[name], codes), "words": list(words)}
        except Exception:
            found[name] = {"codes": [], "words": [traceback.format_exc()]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[2:])
