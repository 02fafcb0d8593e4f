"""From packed values to weights, in Triton: `(value - zero) * scale` in float32, rounded once to the dtype.

Integers of so few bits, their differences, and these times a scale of a 16-bit dtype are exact in float32. So one
rounding is all there is, and packed arithmetic in the dtype, two weights an instruction, does the same: there the
differences are exact as well. A fp8 value times a float32 scale is not exact, and is rounded by float32 first.

PTX says what Triton has no words for: several values of a register taken apart at once. Integers become floats
without a conversion, which is slow: as the low bits of a float that is large enough for its last bit to be 1.
"""

# Kernels have no types that mypy knows.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

_PTX = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has none

# Four bytes to the weights of their low halves ($0, $1) and of their high ones ($2, $3). $5, $6 are
# -(zero + the float whose low bits they become), $7, $8 the scales. fma with 1 and with -0.0 are sum and product: for
# bfloat16, older cards have no others.
_FOURS = """{{
.reg .b32 a, b, c, d, one, nil;
mov.b32 one, {one};
mov.b32 nil, 0x80008000;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000F000F, {large}, 0xEA;
lop3.b32 b, b, 0x000F000F, {large}, 0xEA;
lop3.b32 c, c, 0x000F000F, {large}, 0xEA;
lop3.b32 d, d, 0x000F000F, {large}, 0xEA;
fma.rn.{type} a, a, one, $5;
fma.rn.{type} b, b, one, $6;
fma.rn.{type} c, c, one, $5;
fma.rn.{type} d, d, one, $6;
fma.rn.{type} $0, a, $7, nil;
fma.rn.{type} $1, b, $8, nil;
fma.rn.{type} $2, c, $7, nil;
fma.rn.{type} $3, d, $8, nil;
}}"""
_FOURS_OF_BFLOAT = tl.constexpr(
    _FOURS.format(one="0x3F803F80", large="0x43004300", type="bf16x2")  # 1.0 and 128.0
)
_FOURS_OF_HALF = tl.constexpr(
    _FOURS.format(one="0x3C003C00", large="0x64006400", type="f16x2")  # 1.0 and 1024.0
)
_FOURS_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")

_LARGE = tl.constexpr(8388608.0)  # 2**23, 0x4B000000
_EIGHTS = tl.constexpr(
    """{
.reg .b32 large;
mov.b32 large, 0x4B000000;
prmt.b32 $0, $4, large, 0x7540;
prmt.b32 $1, $4, large, 0x7541;
prmt.b32 $2, $4, large, 0x7542;
prmt.b32 $3, $4, large, 0x7543;
}"""
)
_EIGHTS_REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r")

# The low halves of four bytes, or their high ones, as the last bits of two pairs of floats.
_RAISED = """{{
.reg .b32 a;
shr.u32 a, $2, {place};
and.b32 a, a, 0x0F0F0F0F;
prmt.b32 $0, a, {large}, 0x4140;
prmt.b32 $1, a, {large}, 0x4342;
}}"""
_RAISED_BFLOATS = tl.constexpr(_RAISED.format(place=0, large="0x43"))  # 128.0
_RAISED_BFLOATS_HIGH = tl.constexpr(_RAISED.format(place=4, large="0x43"))
_RAISED_HALFS = tl.constexpr(_RAISED.format(place=0, large="0x64"))  # 1024.0
_RAISED_HALFS_HIGH = tl.constexpr(_RAISED.format(place=4, large="0x64"))

_FROM_FP8 = tl.constexpr(2.0**120)  # between what exponents mean in e4m3 and in float32


@triton.jit
def fours(values, zero, scale, DTYPE: tl.constexpr):
    """Two tensors of weights: of the low halves of the bytes, and of the high ones. `zero` is float32."""
    if _PTX and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _FOURS_OF_BFLOAT,
            _FOURS_REGISTERS,
            [values, (-128.0 - zero).to(tl.bfloat16), scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif _PTX and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            _FOURS_OF_HALF,
            _FOURS_REGISTERS,
            [values, (-1024.0 - zero).to(tl.float16), scale],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        scale = scale.to(tl.float32)
        low = (((values & 15).to(tl.float32) - zero) * scale).to(DTYPE)
        high = (((values >> 4).to(tl.float32) - zero) * scale).to(DTYPE)
        return low, high


@triton.jit
def eights(values, zero, scale, DTYPE: tl.constexpr):
    """The bytes' weights. `zero` is float32."""
    if _PTX:
        large = tl.inline_asm_elementwise(
            _EIGHTS, _EIGHTS_REGISTERS, [values], dtype=tl.float32, is_pure=True, pack=4
        )
        differences = large - (zero + _LARGE)
    else:
        differences = values.to(tl.float32) - zero
    return (differences * scale.to(tl.float32)).to(DTYPE)


@triton.jit
def floats(values, scale, DTYPE: tl.constexpr, FP8_UNIT: tl.constexpr):
    """The weights of e4m3 bytes. `scale` is float32; `FP8_UNIT`: the card converts them itself."""
    if FP8_UNIT:
        found = values.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        bits = values.to(tl.int32)
        size = bits & 0x7F
        moved = (size << 20) | ((bits & 0x80) << 24)
        found = moved.to(tl.float32, bitcast=True) * _FROM_FP8  # subnormal ones, too, are exact
        found = tl.where(size == 0x7F, float("nan"), found)
    return (found * scale).to(DTYPE)


@triton.jit
def raised(values, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """The low halves of the bytes, or their high ones, each plus `base`.

    Of one operand and with one result, this can be done to bytes that lie as tensor cores want the floats.
    """
    if _PTX and DTYPE == tl.bfloat16:
        OF_BFLOATS: tl.constexpr = _RAISED_BFLOATS_HIGH if HIGH else _RAISED_BFLOATS
        return tl.inline_asm_elementwise(
            OF_BFLOATS, "=&r,=&r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif _PTX:
        OF_HALFS: tl.constexpr = _RAISED_HALFS_HIGH if HIGH else _RAISED_HALFS
        return tl.inline_asm_elementwise(
            OF_HALFS, "=&r,=&r,r", [values], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        half = values >> 4 if HIGH else values & 15
        return (half.to(tl.float32) + base(DTYPE)).to(DTYPE)


@triton.jit
def base(DTYPE: tl.constexpr):
    """What `raised` adds: the float whose last bit is 1."""
    return 128.0 if DTYPE == tl.bfloat16 else 1024.0
