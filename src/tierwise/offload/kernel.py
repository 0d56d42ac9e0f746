"""One pass of AdamW over host memory, the same bits as `torch.optim.AdamW(fused=True)`.

```
 gradient (fp32 | bf16) --x c--+
 p, m, v (fp32) ---------------+--> p', m', v' (fp32)  [+ weights (bf16)]
```

The clip coefficient, the moments, decay, and the cast to bf16 happen in one pass: 28 bytes of
traffic a parameter. Every operation is rounded on its own except the two fused multiply-adds
that torch's own kernel has, so the result depends neither on where a tensor is split (at
multiples of `ALIGNMENT`) nor on the number of threads or the width of the vector unit. torch
fuses another product in the last `numel % width` elements of a tensor (its scalar loop); that
tail is reproduced, and `torch_width` finds the width, and whether the bits agree at all, by
comparing with torch on this very machine.

The vector code is emitted through llvmlite, not left to the auto-vectoriser: output addresses may
equal input addresses (in place) or not (shadow, whose stores bypass the cache). Where torch's bits
are not reproduced (a processor without fused multiply-add), `torch_update` does the same through
`torch._fused_adamw_`, in more passes.

Left out: amsgrad, maximize, fp16 gradients (a scaled gradient is no gradient), threads (the
caller splits the table of pieces).

Source: Loshchilov & Hutter, Decoupled Weight Decay Regularization, algorithm 2,
https://arxiv.org/abs/1711.05101; rounding order: PyTorch 2.13, FusedAdamKernel.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64  # elements; a tensor may be split at multiples of it
# Lanes of the emitted vector code: more than a register has, so that each of the four streams is
# read two lines at a time, and the next loads are under way while this division runs.
LANES = 32
CACHE_LINE = 64  # bytes; stores that bypass the cache must begin at one

# columns of the address table (int64), one row a piece of one parameter
P_IN, M_IN, V_IN, GRAD, P_OUT, M_OUT, V_OUT, WEIGHTS_OUT, COUNT, STREAM = range(10)
NUM_ADDRESSES = 10

# columns of the number table (float64), one row a piece: first what the kernel reads, in fp32,
# then what the fallback reads
CLIP, DECAY, WEIGHT1, BETA2, WEIGHT2, CORRECTION2, EPS, STEP_SIZE, LR, BETA1, WD, STEP = range(12)
NUM_NUMBERS = 12

Addresses = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _shape(kind: ir.Type, lanes: int) -> ir.Type:
    return kind if lanes == 1 else ir.VectorType(kind, lanes)


def _splat(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    if lanes == 1:
        return value
    vector = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    vector = builder.insert_element(vector, value, _I32(0))
    mask = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return builder.shuffle_vector(vector, vector, mask)


def _integers(value: int, lanes: int) -> ir.Constant:
    return ir.Constant(_shape(_I32, lanes), value if lanes == 1 else [value] * lanes)


def _pointer(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, size: int, kind: ir.Type
) -> ir.Value:
    offset = builder.add(address, builder.mul(index, _I64(size)))
    return builder.inttoptr(offset, kind.as_pointer())


def _declare(builder: ir.IRBuilder, name: str, lanes: int, *, num_arguments: int) -> ir.Value:
    kind = _shape(_F32, lanes)
    signature = ir.FunctionType(kind, [kind] * num_arguments)
    suffix = "f32" if lanes == 1 else f"v{lanes}f32"
    return cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
        builder.module, signature, f"{name}.{suffix}"
    )


def _load_grad(
    builder: ir.IRBuilder, address: ir.Value, index: ir.Value, lanes: int, *, bf16: bool
) -> ir.Value:
    if not bf16:
        kind = _shape(_F32, lanes)
        return builder.load(_pointer(builder, address, index, 4, kind), align=4)
    raw = builder.load(_pointer(builder, address, index, 2, _shape(_I16, lanes)), align=2)
    wide = builder.zext(raw, _shape(_I32, lanes))
    return builder.bitcast(builder.shl(wide, _integers(16, lanes)), _shape(_F32, lanes))


def _store(
    builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, align: int, *, stream: bool
) -> None:
    instruction = builder.store(value, pointer, align=align)
    if stream:
        one = builder.module.add_metadata([ir.Constant(_I32, 1)])
        instruction.set_metadata("nontemporal", one)


def _round_bf16(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """Round to nearest, ties to even; NaN stays a (quiet) NaN."""
    bits = builder.bitcast(value, _shape(_I32, lanes))
    odd = builder.and_(builder.lshr(bits, _integers(16, lanes)), _integers(1, lanes))
    rounded = builder.add(builder.add(bits, _integers(0x7FFF, lanes)), odd)
    high = builder.lshr(rounded, _integers(16, lanes))
    is_nan = builder.fcmp_unordered("uno", value, value)
    high = builder.select(is_nan, _integers(0x7FC0, lanes), high)
    return builder.trunc(high, _shape(_I16, lanes))


def _make_block(lanes: int, *, bf16: bool, stream: bool = False, tail: bool = False) -> Any:
    """Return an intrinsic that updates `lanes` elements at `index` of one piece."""

    @intrinsic
    def block(  # noqa: PLR0917 - numba intrinsics take positions only
        typing: Any, p_in: Any, m_in: Any, v_in: Any, grad: Any, p_out: Any, m_out: Any,
        v_out: Any, weights: Any, index: Any, clip: Any, decay: Any, weight1: Any, beta2: Any,
        weight2: Any, correction2: Any, eps: Any, step_size: Any,
    ) -> Any:  # fmt: skip
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            addresses, i = args[:8], args[8]
            c, w, b1, b2, k2, s2, e, ss = (_splat(builder, x, lanes) for x in args[9:])
            kind = _shape(_F32, lanes)
            fma = _declare(builder, "llvm.fma", lanes, num_arguments=3)
            root = _declare(builder, "llvm.sqrt", lanes, num_arguments=1)
            p, m, v = (
                builder.load(_pointer(builder, a, i, 4, kind), align=4) for a in addresses[:3]
            )
            g = _load_grad(builder, addresses[3], i, lanes, bf16=bf16)
            g = builder.fmul(g, c)
            # torch's lerp: from m for a weight below one half, else back from g (weight - 1 <= 0)
            from_m = builder.fcmp_ordered(">", args[11], ir.Constant(_F32, 0.0))
            base = builder.select(from_m, m, g)
            m_new = builder.call(fma, [b1, builder.fsub(g, m), base])
            scaled = builder.fmul(k2, g)
            if tail:
                v_new = builder.call(fma, [v, b2, builder.fmul(scaled, g)])
            else:
                v_new = builder.call(fma, [scaled, g, builder.fmul(v, b2)])
            denominator = builder.fadd(builder.fdiv(builder.call(root, [v_new]), s2), e)
            change = builder.fdiv(builder.fmul(ss, m_new), denominator)
            p_new = builder.fsub(builder.fmul(p, w), change)
            align = CACHE_LINE if stream else 4
            for value, address in zip((p_new, m_new, v_new), addresses[4:7], strict=True):
                pointer = _pointer(builder, address, i, 4, kind)
                _store(builder, value, pointer, align, stream=stream)
            if bf16:
                pointer = _pointer(builder, addresses[7], i, 2, _shape(_I16, lanes))
                rounded = _round_bf16(builder, p_new, lanes)
                _store(builder, rounded, pointer, CACHE_LINE if stream else 2, stream=stream)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 9, *(types.float32,) * 8), codegen

    return block


@intrinsic
def _fence(typing: Any) -> Any:
    """Order cache-bypassing stores before whatever tells another thread of them."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _jit(function: Callable[..., None]) -> Any:
    """Compile without the interpreter lock; keep the result on disk where a folder can be had."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found no writable cache folder
        return numba.njit(nogil=True)(function)


_vector_f32 = _make_block(LANES, bf16=False)
_stream_f32 = _make_block(LANES, bf16=False, stream=True)
_body_f32 = _make_block(1, bf16=False)
_tail_f32 = _make_block(1, bf16=False, tail=True)
_vector_bf16 = _make_block(LANES, bf16=True)
_stream_bf16 = _make_block(LANES, bf16=True, stream=True)
_body_bf16 = _make_block(1, bf16=True)
_tail_bf16 = _make_block(1, bf16=True, tail=True)


def _run_f32(addresses: Any, numbers: Any, width: int) -> None:
    for row in range(addresses.shape[0]):
        a, h = addresses[row], numbers[row]
        c, w, b1, b2 = np.float32(h[0]), np.float32(h[1]), np.float32(h[2]), np.float32(h[3])
        k2, s2, e, ss = np.float32(h[4]), np.float32(h[5]), np.float32(h[6]), np.float32(h[7])
        x0, x1, x2, x3, x4, x5, x6, x7, n = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]
        bulk = n - n % width  # what torch's vector loop takes
        vectors = bulk - bulk % LANES
        if a[9] != 0:
            for i in range(0, vectors, LANES):
                _stream_f32(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
        else:
            for i in range(0, vectors, LANES):
                _vector_f32(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
        for i in range(vectors, bulk):
            _body_f32(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
        for i in range(bulk, n):
            _tail_f32(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
    _fence()  # type: ignore[call-arg]


def _run_bf16(addresses: Any, numbers: Any, width: int) -> None:
    for row in range(addresses.shape[0]):
        a, h = addresses[row], numbers[row]
        c, w, b1, b2 = np.float32(h[0]), np.float32(h[1]), np.float32(h[2]), np.float32(h[3])
        k2, s2, e, ss = np.float32(h[4]), np.float32(h[5]), np.float32(h[6]), np.float32(h[7])
        x0, x1, x2, x3, x4, x5, x6, x7, n = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]
        bulk = n - n % width
        vectors = bulk - bulk % LANES
        if a[9] != 0:
            for i in range(0, vectors, LANES):
                _stream_bf16(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
        else:
            for i in range(0, vectors, LANES):
                _vector_bf16(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
        for i in range(vectors, bulk):
            _body_bf16(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
        for i in range(bulk, n):
            _tail_bf16(x0, x1, x2, x3, x4, x5, x6, x7, i, c, w, b1, b2, k2, s2, e, ss)
    _fence()  # type: ignore[call-arg]


_update_f32, _update_bf16 = _jit(_run_f32), _jit(_run_bf16)


def numbers_of(
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> tuple[float, ...]:
    """Return one row of the number table, for the update that makes step number `step` (from 1).

    The clip coefficient is 1. Scalars are formed in double and rounded to fp32 once, as in torch.
    """
    return (
        1.0,
        1.0 - lr * weight_decay,
        _lerp_weight(1.0 - beta1),
        beta2,
        1.0 - beta2,
        math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
        lr,
        beta1,
        weight_decay,
        float(step),
    )


def _lerp_weight(weight: float) -> float:
    """Return torch's lerp coefficient: counted back from the end point from one half on."""
    rounded = np.float32(weight)
    return weight if rounded < np.float32(0.5) else float(rounded - np.float32(1.0))


def update(addresses: Addresses, numbers: Numbers, *, bf16: bool, width: int | None) -> None:
    """Update every piece of the table; safe beside other threads on other pieces.

    Args:
        addresses: [R, NUM_ADDRESSES]; rows with STREAM need outputs aligned to 64 bytes. All
            pieces of a parameter but the last count a multiple of `ALIGNMENT` elements.
        numbers: [R, NUM_NUMBERS].
        bf16: Gradients are bf16, and the new p is also written as bf16 to WEIGHTS_OUT; else
            gradients are fp32 and WEIGHTS_OUT is not touched.
        width: From `torch_width`; None takes the slower way through torch.
    """
    if width is None:
        torch_update(addresses, numbers, bf16=bf16)
    elif bf16:
        _update_bf16(addresses, numbers, width)
    else:
        _update_f32(addresses, numbers, width)


def warm_up(*, bf16: bool) -> None:
    """Compile the kernel, or load it from disk, before it is needed."""
    empty = np.zeros((0, NUM_ADDRESSES), np.int64), np.zeros((0, NUM_NUMBERS))
    (_update_bf16 if bf16 else _update_f32)(*empty, 8)


def torch_update(addresses: Addresses, numbers: Numbers, *, bf16: bool) -> None:
    """Do the same as `update` with torch's own kernel: the fallback, and the tests' reference."""
    import torch

    for row, h in zip(addresses.tolist(), numbers.tolist(), strict=True):
        count = row[COUNT]
        p, m, v = (_at(row[column], count) for column in (P_OUT, M_OUT, V_OUT))
        for out, column in ((p, P_IN), (m, M_IN), (v, V_IN)):
            if out.data_ptr() != row[column]:
                out.copy_(_at(row[column], count))
        grad = _at(row[GRAD], count, bf16=bf16).float() * torch.tensor(h[CLIP])
        torch._fused_adamw_(
            [p], [grad], [m], [v], [], [torch.tensor(h[STEP])],
            lr=h[LR], beta1=h[BETA1], beta2=h[BETA2], weight_decay=h[WD], eps=h[EPS],
            amsgrad=False, maximize=False,
        )  # fmt: skip
        if bf16:
            _at(row[WEIGHTS_OUT], count, bf16=True).copy_(p)


def _at(address: int, count: int, *, bf16: bool = False) -> torch.Tensor:
    """Return the `count` numbers that start at an address, as a tensor over that memory."""
    import torch

    kind = torch.bfloat16 if bf16 else torch.float32
    size = count * (2 if bf16 else 4)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind)


@functools.cache
def torch_width() -> int | None:
    """Return the width of torch's vector loop here, or None if its bits are not reproduced.

    Found by updating 1007 random elements, three steps, both ways.
    """
    warm_up(bf16=False)
    return next((width for width in (8, 16, 4) if _agrees(width)), None)


def _agrees(width: int) -> bool:
    import torch

    count, generator = 1007, torch.Generator().manual_seed(7)
    ours = [torch.randn(count, generator=generator), torch.zeros(count), torch.zeros(count)]
    theirs = [tensor.clone() for tensor in ours]
    for step in range(1, 4):
        scale = 10 ** torch.randn(count, generator=generator)
        grad = torch.randn(count, generator=generator) * scale
        row = numbers_of(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        for tensors, chosen in ((ours, width), (theirs, None)):
            pointers = [tensor.data_ptr() for tensor in tensors]
            addresses = np.array([[*pointers, grad.data_ptr(), *pointers, 0, count, 0]], np.int64)
            update(addresses, np.array([row]), bf16=False, width=chosen)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
