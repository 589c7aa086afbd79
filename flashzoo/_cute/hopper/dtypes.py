"""Our dtypes as CuTe DSL's."""

from __future__ import annotations

from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int8, Int16, Int32, Int64, Uint8, Uint32

DTYPES = {"fp16": Float16, "bf16": BFloat16, "e4m3": Float8E4M3FN, "fp32": Float32, "i32": Int32, "u32": Uint32}
DTYPES |= {"u8": Uint8, "i8": Int8, "i16": Int16, "i64": Int64}
