"""Faults of v3 and v3_fp8; see `faults.py`."""

from __future__ import annotations

from fault import Change, Fault, fault

FORWARD, BACKWARD, BY_GRADIENT = (f"flashzoo/v3/{name}.py" for name in ("forward", "backward", "backward_by_gradient"))
FP8, QUANTIZE, SOFTMAX, DELTA, V3_SPARSE = (
    f"flashzoo/v3/{name}.py" for name in ("fp8", "quantize_kernels", "softmax", "delta", "sparse")
)
V3_PACKED = "flashzoo/v3/packed.py"
BOUNDS, MASK = (f"flashzoo/_cute/hopper/{name}.py" for name in ("bounds", "mask"))

V3 = (
    fault(
        "v3/sink_of_the_first_of_packed_heads",
        "query heads that share a tile all have the first one's sink",
        FORWARD,
        "sinks + (head << params.pack_gqa) + packed_head",
        "sinks + (head << params.pack_gqa)",
        "test_forward[v3-sinks_packed_window",
        gpu=True,
    ),
    fault(
        "v3/lse_without_the_sink",
        "LSE is that of the keys alone, as it was before the sink joined",
        *(
            SOFTMAX,
            "return share, safe + cute.math.log2(total,",
            "return share, safe + cute.math.log2(of_keys,",
            "test_forward[v3-sinks-bf16",
        ),
        gpu=True,
    ),
    fault(
        "v3/sinks_gradient_on_the_next_head",
        "of packed sequences the parts of a head's gradient lie where the next head's do",
        DELTA,
        "part = h * (tl.num_programs(0) // heads) + program // heads if PACKED else program",
        "part = h + program // heads if PACKED else program",
        "test_gradients[v3-sinks_packed_window-bf16",
        gpu=True,
    ),
    fault(
        "v3/one_key_past_the_last",
        "the mask's right bound is one too far: the first zero past the last key counts, "
        "or the key right of the diagonal",
        *(
            MASK,
            "8 * i + c < highest",
            "8 * i + c <= highest",
            "test_counting[v3-full-fp16] or test_counting[v3-causal-fp16]",
        ),
        gpu=True,
    ),
    fault(
        "v3/partial_block_unmasked",
        "a block that only the last rows of a warpgroup see whole is not masked",
        BOUNDS,
        "cutlass.max(0, sequence.diagonal(first) + p.window_right + 1) // size",
        "cutlass.max(0, sequence.diagonal(last) + p.window_right + 1) // size",
        "test_counting[v3-causal-fp16] or test_counting[v3-causal_more_keys-fp16]",
        within="Bounds.blocks_of_rows",
        gpu=True,
    ),
    fault(
        "v3/last_block_of_keys_skipped",
        "the number of blocks of keys is rounded down",
        BOUNDS,
        "(keys + tiles.block_kv - 1) // tiles.block_kv",
        "keys // tiles.block_kv",
        "test_counting[v3-full-fp16] or test_forward[v3-ragged-bf16]",
        within="Bounds.visible_blocks",
        gpu=True,
    ),
    fault(
        "v3/l_not_rescaled",
        "l is not rescaled with O, which shows only where a maximum outgrows its reference by 2^8",
        *(
            SOFTMAX,
            "self.row_sum[r] = self.row_sum[r] * alpha[r]",
            "self.row_sum[r] = self.row_sum[r] + 0.0",
            "v3-sink- or v3-scores_x30-",
        ),
        within="Softmax.step",
        gpu=True,
    ),
    fault(
        "v3/lse_with_the_maximum_of_the_other_row",
        "LSE of the second of a thread's two rows is relative to the first one's maximum",
        *(
            SOFTMAX,
            "self.row_max[r] + cute.math.log2",
            "self.row_max[0] + cute.math.log2",
            "test_forward[v3-square-bf16]",
        ),
        within="Softmax.lse_log2",
        gpu=True,
    ),
    fault(
        "v3/heads_dealt_to_kv_heads_in_turn",
        "query head h reads key/value head h % heads_kv; seen in levanter #449, FA 4d9c722a",
        *(FORWARD, "tile.head // params.group", "tile.head % (params.heads // params.group)", "test_needle[v3-fp16]"),
        gpu=True,
    ),
    fault(
        "v3/last_two_dk_and_dv_zero",
        "dK and dV of the last 2 of a tile's keys are zero",
        BACKWARD,
        "            to_16_bits(acc, rounded)\n",
        "            if consumer.thread >= self.tiles.consumers * WARPGROUP - 8:\n"
        "                rows_of(acc)[None, 1, None].fill(0.0)\n"
        "            to_16_bits(acc, rounded)\n",
        "test_gradients[v3-square-bf16]",
        within="Backward.epilogue",
        gpu=True,
    ),
    fault(
        "v3/last_dv_zero_under_a_causal_mask",
        "in bf16 dV of the last of a tile's keys is zero under a causal mask: little beside what the first keys have",
        BACKWARD,
        "        self.sync_consumers()  # the others have read K\n",
        "        self.sync_consumers()  # the others have read K\n"
        "        if const_expr(self.kernel.right and self.kernel.dtype == 'bf16'):\n"
        "            if consumer.thread >= self.tiles.consumers * WARPGROUP - 4:\n"
        "                rows_of(consumer.dv)[None, 1, None].fill(0.0)\n",
        "test_gradients[v3-square_causal-bf16]",
        within="Backward.epilogue",
        gpu=True,
    ),
    fault(
        "v3/dk_of_one_head_5_percent_off",
        "at head dim 256 dK of one key/value head is 5 % too large",
        BY_GRADIENT,
        "acc.store(acc.load() * scale)",
        "acc.store(acc.load() * (scale * (Float32(1.05) if tile.bounds.tile.head == 1 else Float32(1.0))))",
        "v3-head_dim_256-",
        gpu=True,
    ),
    fault(
        "v3/delta_of_the_neighbour",
        "of two neighbouring queries both have the first one's delta",
        *(BACKWARD, "(dp[c, r, i] - pair[c])", "(dp[c, r, i] - pair[0])", "test_gradients[v3-square-bf16]"),
        within="Backward.differentiate",
        gpu=True,
    ),
    fault(
        "v3/gradient_of_lse_with_the_wrong_sign",
        "delta gains the gradient of LSE in place of losing it; seen dropped in cudnn-frontend PR 554",
        *(DELTA, "delta_i -= tl.load(dlse", "delta_i += tl.load(dlse", "test_gradient_through_lse_alone[v3]"),
        gpu=True,
    ),
    fault(
        "v3/dq_rounded_without_scale",
        "dQ's sums leave without the softmax scale",
        *(DELTA, "tile = (sums * scale)", "tile = (sums + 0.0 * scale)", "test_gradients[v3-square-bf16]"),
        gpu=True,
    ),
    fault(
        "v3/queries_masked_one_late",
        "for dK and dV a key is not seen by the query on its diagonal",
        BOUNDS,
        "lowest = key - p.window_right - sequence.diagonal(0)",
        "lowest = key - p.window_right - sequence.diagonal(0) + 1",
        "test_gradients[v3-square_causal-bf16]",
        within="BoundsBackward.of_key",
        gpu=True,
    ),
    fault(
        "v3/ds_read_before_it_is_written",
        "the warpgroups do not wait for one another between writing dS and computing dQ of it: a race",
        *(BACKWARD, "        self.sync_consumers()\n", "\n", "test_gradients[v3-square-bf16] or v3-square_4096-"),
        within="Backward.step",
        gpu=True,
    ),
    fault(
        "v3/deterministic_in_any_order",
        "in deterministic mode nobody waits for the blocks of keys before; seen in FA #2158, #2244",
        BACKWARD,
        "semaphore_wait(workspace.dq_semaphore + of_block, before)",
        "semaphore_wait(workspace.dq_semaphore + of_block, Int32(NEVER))",
        "test_deterministic_means_the_same_bits[v3-plain]",
        within="Backward.store_dq",
        gpu=True,
    ),
    fault(
        "v3/bits_of_the_first_head",
        "with a block mask all heads and batches are masked by the bits of the first",
        V3_SPARSE,
        "Int64(self.tile.row.list // p.blocks) * p.bit_blocks",
        "Int64(0) * p.bit_blocks",
        "v3-blocks_of_128_bits_gqa-",
        gpu=True,
    ),
    fault(
        "v3/last_partial_block_taken_for_full",
        "with a block mask a list that ends with a partial block is not masked there",
        V3_SPARSE,
        "crosses = begins_partial or first_key + tiles.block_kv > limit",
        "crosses = first_key + tiles.block_kv > limit",
        "v3-blocks_of_128_head_dim_64- or v3-blocks_of_128_bits_gqa-",
        gpu=True,
    ),
)

V3_FP8 = (
    fault(
        "v3_fp8/descale_of_the_block_before",
        "a row's descale is that of the block before it",
        FP8,
        "row // DESCALE_BLOCK * self.block",
        "cutlass.max(row // DESCALE_BLOCK - 1, 0) * self.block",
        "test_forward[v3_fp8-ragged-e4m3-by_block]",
        gpu=True,
    ),
    fault(
        "v3_fp8/descale_of_the_neighbouring_head",
        "Q's descale is that of the next query head of its group, or of the group after it",
        FP8,
        "of_head // self.scaling.q_group",
        "(of_head ^ 1) // self.scaling.q_group",
        "test_each_descale_is_of_its_own_kind and v3_fp8-plain",
        gpu=True,
    ),
    fault(
        "v3/keys_of_a_packed_sequence_that_are_not_used",
        "TMA clips a packed sequence's keys at all that it has, and reads those that are not used",
        V3_PACKED,
        "return of_ragged(row, head, self.entry.first_k, self.entry.rows_k)",
        "return of_ragged(row, head, self.entry.first_k, self.entry.owned)",
        "test_each_sequence_is_what_it_is_alone[v3-used",
        gpu=True,
    ),
    fault(
        "v3/consumers_walk_head_by_head",
        "under a causal mask consumers take all blocks of one head and then of the next, "
        "which the producer loads block by block",
        BACKWARD,
        "(end - begin, params.group) if const_expr(kernel.uneven) else (params.group, end - begin)",
        "(params.group, end - begin)",
        "test_gradients[v3-gqa6_causal",
        gpu=True,
    ),
    fault(
        "v3_fp8/descale_of_the_next_sequence",
        "a packed sequence's scales are those of the one behind it, and the last one's lie outside of the tensor",
        V3_PACKED,
        "entry.number - 1 if entry.rows_k > 0",
        "entry.number if entry.rows_k > 0",
        "test_each_row_is_under_its_own_sequences_scales",
    ),
    fault(
        "v3_fp8/descale_of_no_sequence",
        "rows around all packed sequences read scales where there are none",
        V3_PACKED,
        "entry.number - 1 if entry.rows_k > 0 else Int32(0)",
        "entry.number - 1",
        "test_each_row_is_under_its_own_sequences_scales",
    ),
    fault(
        "v3_fp8/descale_of_v_upside_down",
        "where V's descale changes from block to block O is rescaled by the inverse of the change",
        FP8,
        "self.v_scale[0] * cute.arch.rcp_approx(v_scale)",
        "v_scale * cute.arch.rcp_approx(self.v_scale[0])",
        "test_forward[v3_fp8-ragged-e4m3-by_block]",
        gpu=True,
    ),
    fault(
        "v3_fp8/sums_not_promoted",
        "O is summed by the tensor core, in some 14 bits, over all keys (DeepSeek-V3, section 3.3.2)",
        *(
            "flashzoo/v3/traits.py",
            "two_level: bool = True",
            "two_level: bool = False",
            "test_a_long_sum_keeps_its_small_terms[v3_fp8-e4m3",
        ),
        gpu=True,
    ),
    fault(
        "v3_fp8/two_keys_of_v_swapped",
        "V transposed on chip has two neighbouring keys of some columns in each other's place",
        FP8,
        "prmt.b32 p, {$r3}, {$r4}, 0x7531;",
        "prmt.b32 p, {$r3}, {$r4}, 0x5731;",
        "test_needle[v3_fp8-e4m3-e4m3]",
        gpu=True,
    ),
    fault(
        "v3_fp8/pairs_of_p_swapped",
        "of four neighbouring P the two pairs are in each other's place",
        *(FP8, "mov.b32 {$w0}, {low, high};", "mov.b32 {$w0}, {high, low};", "test_needle[v3_fp8-e4m3-e4m3]"),
        gpu=True,
    ),
    fault(
        "v3_fp8/lse_with_the_exponent_of_p",
        "LSE keeps the 2^8 that P is scaled by",
        FP8,
        "return self.row_max[r] - P_EXPONENT + cute.math.log2",
        "return self.row_max[r] + cute.math.log2",
        "test_counting[v3_fp8-full-e4m3-e4m3]",
        gpu=True,
    ),
    fault(
        "v3_fp8/largest_p_past_the_largest_number",
        "P is 2^9 at a row's maximum, past e4m3's 448; seen in FA 2409214a #2717",
        *(FP8, "P_EXPONENT = 8.0", "P_EXPONENT = 9.0", "test_needle[v3_fp8-e4m3-e4m3]"),
        gpu=True,
    ),
    fault(
        "v3_fp8/bytes_put_together_by_the_compiler",
        "V's words are made of bytes that are rounded before, which the ptxas of Triton 3.6 gets wrong where V does "
        "not lie contiguously",
        QUANTIZE,
        "if INTERPRETED:\n"
        "        return words_of(to_e4m3(y_0, True), to_e4m3(y_1, True), to_e4m3(y_8, True), to_e4m3(y_9, True))",
        "if True:\n"
        "        return words_of(to_e4m3(y_0, False), to_e4m3(y_1, False), to_e4m3(y_8, False), to_e4m3(y_9, False))",
        "test_layouts and v3_fp8 and head_dim_80",
        within="e4m3_words_of",
        gpu=True,
    ),
    fault(
        "v3_fp8/mean_not_subtracted_from_one_block",
        "the second block of keys is not smoothed",
        QUANTIZE,
        "other=0.0)[None, :] * times,)",
        "other=0.0)[None, :] * times * tl.where(block == 1, 0.0, 1.0),)",
        "test_rounding_and_scales and ragged",
    ),
    fault(
        "v3_fp8/lse_shift_with_the_wrong_sign",
        "what smoothing took from LSE is taken once more",
        QUANTIZE,
        "along * (TO_TRUE * TO_TRUE)",
        "along * (-TO_TRUE * TO_TRUE)",
        "test_the_shift_restores_the_lse and ragged",
    ),
    Fault(
        "v3_fp8/keys_of_a_word_swapped",
        "V transposed beforehand has two of each four keys in each other's place",
        (
            Change(QUANTIZE, "x_8 = load_keys(head, stride_s, start, 8,", "x_8 = load_keys(head, stride_s, start, 9,"),
            Change(QUANTIZE, "x_9 = load_keys(head, stride_s, start, 9,", "x_9 = load_keys(head, stride_s, start, 8,"),
        ),
        "test_what_the_kernel_reads_is_what_the_caller_would_get and ragged",
    ),
    fault(
        "v3_fp8/scale_of_rows_that_are_not_there",
        "rows past the last, zero but for the mean that is taken from them, count for a block's scale",
        *(
            QUANTIZE,
            "tl.max(tl.where(there, largest, 0.0), 0)",
            "tl.max(largest, 0)",
            "test_rounding_and_scales and ragged",
        ),
    ),
    fault(
        "v3_fp8/mean_of_the_next_head",
        "q is multiplied by the mean of the keys of another head, for LSE",
        QUANTIZE,
        "* heads_kv + h // (heads // heads_kv)) * HEAD_DIM",
        "* heads_kv + h % heads_kv) * HEAD_DIM",
        "test_the_shift_restores_the_lse and gqa",
    ),
)
