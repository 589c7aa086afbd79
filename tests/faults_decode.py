"""Faults of decode's kernels, and of FP8 caches; see `faults.py`."""

from __future__ import annotations

from fault import Fault, fault

DECODE, HOPPER, OUTPUT, ITEMS, E4M3, LATENT = (
    f"flashzoo/decode/{name}.py"
    for name in ("kernels", "hopper", "hopper_output", "hopper_items", "hopper_e4m3", "hopper_latent")
)
PACKED, V2 = "flashzoo/_triton/packed_kernels.py", "flashzoo/v2/kernels.py"

DECODE_IN_TRITON: tuple[Fault, ...] = (
    fault(
        "decode/empty_split_counts",
        "a split that saw nothing is merged all the same, with whatever its part of memory holds",
        DECODE,
        "mask=(weight > 0)[:, :, None] &",
        "mask=(weight >= 0)[:, :, None] &",
        "test_what_is_not_used_is_not_read[decode-full",
    ),
    fault(
        "decode/diagonal_of_the_whole_cache",
        "the last query is aligned with the cache's end, and not with the last key that is used",
        DECODE,
        "diagonal = position + used - rows_q",
        "diagonal = position + seqlen_k - rows_q",
        "test_each_is_as_a_batch_of_that_length[decode-causal_gqa",
    ),
    fault(
        "decode/heads_of_another_group",
        "a row's head is that of another key/value head's group",
        DECODE,
        "h = h_kv * group + row - position * group",
        "h = h_kv + (row - position * group) * heads_kv",
        "test_forward[decode-cache_causal_gqa",
    ),
    fault(
        "decode/mla_first_columns_twice",
        "the columns of a key behind its value are taken to be its first",
        DECODE,
        "load_keys(k_head + HEAD_DIM, k_strides",
        "load_keys(k_head, k_strides",
        "test_forward[decode-mla_causal",
    ),
    fault(
        "decode/packed_queries_on_the_next_cache",
        "packed queries read the cache of the sequence behind theirs",
        *(DECODE, "tl.load(entry + 6) - 1", "tl.load(entry + 6)", "test_forward[decode-packed_q_causal_gqa"),
    ),
    fault(
        "decode/packed_rows_of_one_head",
        "a packed sequence has as many rows as queries, though a query has one for each head of its group",
        PACKED,
        "first_q, rows_q = first_q * GROUP, rows_q * GROUP",
        "first_q, rows_q = first_q * GROUP, rows_q",
        "test_forward[decode-packed_q_causal_gqa",
    ),
    fault(
        "decode/queries_of_no_sequence_see_a_cache",
        "rows before the first sequence and behind the last see the keys of a cache",
        PACKED,
        "rows_k = tl.where(around, 0, rows_k)",
        "rows_k = tl.where(around & (cu_k is not None), 0, rows_k)",
        "test_forward[decode-packed_q_fp8",
    ),
    fault(
        "decode/pages_past_the_last_are_read",
        "a number of no page reads the last page, another user's memory; seen in FA #2709",
        DECODE,
        "return tl.where(page < pages, page, -1).to(tl.int64)",
        "return tl.minimum(page, pages - 1).to(tl.int64)",
        "test_numbers_of_no_page_read_zeros[decode-of_16_causal_gqa",
    ),
    fault(
        "decode/append_wraps_to_the_first_page",
        "new rows that there is no page for are written into another: a length that lies overwrites another's keys",
        "flashzoo/_triton/append_kernels.py",
        "there = there & (page >= 0) & (page < pages)",
        "page = tl.minimum(tl.maximum(page, 0), pages - 1)",
        "test_numbers_that_lie_write_nothing or test_pages",
    ),
    fault(
        "decode/append_launches_what_another_dtype_compiled",
        "a kernel for numbers of two bytes copies those of four; a launch was found by shapes alone",
        "flashzoo/_triton/append.py",
        "append_launch(tensors[2].dtype,",
        "append_launch(torch.int16,",
        "test_new_rows_follow_what_is_used",
        gpu=True,
    ),
    fault(
        "v2/gradients_of_what_is_not_used",
        "keys that are not used get gradients where all queries of a block see all that are",
        V2,
        "if PACKED or CACHE:  # of the rows",
        "if PACKED:  # of the rows",
        "test_what_is_not_used_is_not_read[v2-whole_blocks",
    ),
)

FP8_CACHES: tuple[Fault, ...] = (
    fault(
        "decode/descale_of_the_first_block",
        "all keys have the descale of their head's first 128",
        DECODE,
        "start // DESCALE_BLOCK * descale[1]",
        "0 * descale[1]",
        "test_forward[decode-fp8_cache_causal_gqa-fp16-by_block",
    ),
    fault(
        "decode/append_cuts_to_e4m3",
        "new rows are cut to e4m3, and not rounded: e4m3 errs twice as much",
        "flashzoo/_triton/e4m3.py",
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
    fault(
        "decode/e4m3_descale_of_the_first_block",
        "all keys have the descale of their head's first 128",
        ITEMS,
        "key // DESCALE_BLOCK * self.block",
        "0 * self.block",
        "test_forward[decode-fp8_cache_causal_gqa-fp16-by_block",
        gpu=True,
    ),
    fault(
        "decode/e4m3_one_value_behind_what_is_used",
        "of two neighbouring keys of which one is used both are multiplied with P, and the other holds NaN",
        E4M3,
        "if keys < 2:",
        "if keys < 1:",
        "test_what_is_not_used_is_not_read[decode-fp8",
        gpu=True,
    ),
    fault(
        "decode/e4m3_sums_of_one_warp",
        "rows are divided by the sum of their P over one warp's keys",
        E4M3,
        "row_max[r], row_sum[r] = top, row_sum[r] * mine[r] + added",
        "row_max[r], row_sum[r] = top, row_sum[r] * mine[r]",
        "test_forward[decode-fp8_cache_causal_gqa",
        gpu=True,
    ),
    fault(
        "decode/e4m3_power_of_a_quarter_of_a_row",
        "each lane multiplies its quarter of a row of Q by a power of its own",
        E4M3,
        "            top = cute.arch.warp_reduction_max(top, threads_in_group=4)\n",
        "",
        "test_forward[decode-fp8_cache_causal_gqa",
        gpu=True,
    ),
    fault(
        "decode/mla_half_of_o_keeps_its_scale",
        "the second warpgroup's half of O is not scaled to a block's new maxima",
        LATENT,
        "alpha[r] = cute.math.exp2(row_max[r] - top, fastmath=True)",
        "alpha[r] = Float32(1.0)",
        "test_forward[decode-mla_ramp",
        gpu=True,
    ),
    fault(
        "decode/mla_values_behind_what_is_used",
        "rows behind what is used are multiplied with P's zeros, and hold NaN",
        LATENT,
        "if first_key + kernel.block_kv > item.used:",
        "if first_key > item.used:",
        "test_what_is_not_used_is_not_read[None",
        gpu=True,
    ),
)
