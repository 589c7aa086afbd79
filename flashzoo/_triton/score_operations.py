"""Operations of score functions that Triton has no word for, as it and as torch mean them."""

import triton
import triton.language as tl


@triton.jit
def floor_div(a, b):
    """Of integers, towards minus infinity, where Triton's own goes towards 0."""
    toward_0 = a // b
    return tl.where((toward_0 * b != a) & ((a < 0) != (b < 0)), toward_0 - 1, toward_0)


@triton.jit
def remainder(a, b):
    """Of integers, with the sign of b."""
    return a - floor_div(a, b) * b


@triton.jit
def wide(x):
    """A float32, or a number that is to be one, in float64."""
    return (x + tl.full([], 0.0, tl.float32)).to(tl.float64)


@triton.jit
def floor_div_f32(a, b):
    """Of float32 in float64: a quotient that is a little less than a whole number would be rounded to it."""
    return tl.floor(wide(a) / wide(b)).to(tl.float32)


@triton.jit
def remainder_f32(a, b):
    """The same; what b fits 0 times into, infinity among it, is its own remainder."""
    times = tl.floor(wide(a) / wide(b))
    return tl.where(times == 0, wide(a), wide(a) - times * wide(b)).to(tl.float32)


@triton.jit
def tanh(x):
    """Off by some roundings: near 0, where the formula with an exponential cancels, by an odd polynomial. A softcap is
    near 0 where it is large, and multiplies what is off."""
    x2 = x * x
    p = -0.0088632355 * x2 + 0.021869488
    p = p * x2 - 0.053968254
    p = p * x2 + 0.13333333
    p = p * x2 - 0.33333333
    return tl.where(tl.abs(x) < 0.4, x + x * x2 * p, 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268)))
