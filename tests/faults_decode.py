"""Faults of decode's kernel for Hopper, and of FP8 caches; see `faults.py`."""

from __future__ import annotations

from fault import Fault, fault

HOPPER, OUTPUT = (f"flashzoo/decode/{name}.py" for name in ("hopper", "hopper_output"))

FP8_CACHES: tuple[Fault, ...] = (
    fault(
        "decode/descale_of_the_first_block",
        "all keys have the descale of their head's first 128",
        "flashzoo/decode/kernels.py",
        "start // DESCALE_BLOCK * descale[1]",
        "0 * descale[1]",
        "test_forward[decode-fp8_cache_causal_gqa-fp16-by_block",
    ),
    fault(
        "decode/append_cuts_to_e4m3",
        "new rows are cut to e4m3, and not rounded: e4m3 errs twice as much",
        "flashzoo/_triton/append_kernels.py",
        "bits + 0x7FFFF + ((bits >> 20) & 1)",
        "bits",
        "test_every_number_is_rounded_to_the_nearest_e4m3",
    ),
)

DECODE_ON_HOPPER: tuple[Fault, ...] = (
    fault(
        "decode/hopper_diagonal_one_late",
        "every query sees one key more than those up to its own",
        HOPPER,
        "diagonal = item.first_query + (row + 8 * r) // p.heads_of_tile + item.shift\n",
        "diagonal = item.first_query + (row + 8 * r) // p.heads_of_tile + item.shift + 1\n",
        "test_forward[decode-cache_causal_gqa",
        gpu=True,
    ),
    fault(
        "decode/hopper_values_behind_what_is_used",
        "rows of V behind what is used are multiplied with P's zeros, and hold NaN",
        HOPPER,
        "if last_key + kernel.block_kv > item.used:",
        "if last_key > item.used:",
        "test_what_is_not_used_is_not_read[decode-full",
        gpu=True,
    ),
    fault(
        "decode/hopper_last_part_left_out",
        "the last of a tile's parts is not merged",
        OUTPUT,
        "lses[j] = lse_log2 if part < item.parts else -Float32.inf",
        "lses[j] = lse_log2 if part < cutlass.max(item.parts - 1, 1) else -Float32.inf",
        "test_forward[decode-decode",
        gpu=True,
    ),
    fault(
        "decode/hopper_cluster_merges_its_first_rows",
        "all thread blocks of a cluster merge the rows of the first, and the others' are left as memory was",
        HOPPER,
        "cute.arch.warp_idx() * cluster + cute.arch.block_idx_in_cluster()",
        "cute.arch.warp_idx() * cluster",
        "test_forward[decode-cache_8192",
        gpu=True,
    ),
)
