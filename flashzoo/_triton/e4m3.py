"""Rounding to e4m3 by arithmetic on bits."""

import triton
import triton.language as tl


@triton.jit
def e4m3_bits(x):
    """float32 to the bits of the nearest e4m3, ties to even; beyond 448 to 448, and NaN to NaN. By arithmetic that
    every GPU has, and Triton's interpreter."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # float32's exponent is 120 more
    # a sum of which a unit of the last place is e4m3's smallest, 2^-9
    small = (size + 16384.0).to(tl.int32, bitcast=True) & 15
    found = tl.where(size < 0.015625, small, normal)
    return tl.where(x == x, found | ((x.to(tl.int32, bitcast=True) >> 24) & 128), 127).to(tl.uint8)
