"""Faults in what kernels do with a function on scores, and with dropout: data for `mutants.py`."""

from __future__ import annotations

from fault import fault

V1, V2, SPARSE = (f"flashzoo/{version}/kernels.py" for version in ("v1", "v2", "blocksparse"))
SCORES = "flashzoo/_triton/scores.py"
DROPOUT = "flashzoo/_triton/dropout.py"

ON_SCORES = (
    fault(
        "v1/score_function_told_kv_heads",
        "a function on scores is told the key/value head",
        V1,
        "SCORE_MOD(s * score_scale, b, h, row",
        "SCORE_MOD(s * score_scale, b, h_kv, row",
        "test_forward[v1-score_alibi_causal_gqa-",
    ),
    fault(
        "v1/score_function_of_scores_not_scaled",
        "P is recomputed from what a function on scores makes of products, not of scaled ones",
        V1,
        "given = s * score_scale",
        "given = s",
        "test_gradients[v1-score_mod-",
    ),
    fault(
        "v1/score_of_minus_infinity_not_masked",
        "P is -inf - -inf, no number, in a row whose scores a function has all masked",
        V1,
        'lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i)',
        "lse_i = lse_i",
        "test_minus_infinity_is_as_masked[v1",
    ),
    fault(
        "v2/score_function_told_the_wrong_sequence",
        "a function on scores is told the number of the sequence behind its own",
        *(V2, "* 8 + 6) - 1", "* 8 + 6)", "test_places_are_those_of_a_packed_sequence[v2]"),
    ),
    fault(
        "v2/score_gradient_not_in_dq",
        "dQ is made of the gradient of new scores, as if the function had changed nothing",
        V2,
        "dq = tl.dot(ds.to(k_j.dtype), k_j, dq",
        "dq = tl.dot((p * (dp - delta_i[:, None])).to(k_j.dtype), k_j, dq",
        "test_gradients[v2-score_table_packed-fp16]",
    ),
    fault(
        "v2/score_function_reads_from_the_end",
        "an index below 0 does not count from a tensor's end, as torch's does",
        SCORES,
        "{mine} = tl.where({index} < 0, {index} + {size}, {index})",
        "{mine} = {index}",
        "test_places_are_those_of_a_packed_sequence[v2]",
    ),
    fault(
        "v2/score_gradient_of_what_has_no_part",
        "0 times no number is summed where a key is not seen, or not there",
        SCORES,
        'return value if value == "ds" else f"tl.where(ds == 0, 0.0, {value})"',
        "return value",
        "test_places_that_are_not_there[v2]",
    ),
    fault(
        "v2/score_gradient_of_what_a_function_masks",
        "0 times no number gets into dQ and dK where the function itself masks",
        SCORES,
        'ds = _of_a_part(gradient.score) if "ds"',
        'ds = gradient.score if "ds"',
        "test_what_a_function_masks_has_no_gradient[v2]",
    ),
    fault(
        "v2/score_gradient_not_summed_over_queries",
        "of a number that all queries read, those of every other one are left out of its gradient",
        SCORES,
        'lines.append(f"{name}_sum = tl.sum(tl.sum({value}, 1), 0)")',
        'lines.append(f"{name}_sum = tl.sum(tl.where(q % 2 == 0, {value}, 0.0))")',
        "test_the_backward_pass_alone or test_gradients[v2-score_alibi",
    ),
    fault(
        "v2/bias_gradient_of_the_first_of_the_batch",
        "where a bias is shared by all of the batch its gradient is the first one's, as often as there are others",
        *(V2, "b = first_b + sharer // shared_h", "b = first_b", "test_gradients_of_a_shared_bias[v2"),
    ),
    fault(
        "v2/bias_gradient_of_one_share",
        "where programs share the sum of a bias's gradient each sums the first one's share",
        *(V2, "first = nth * share", "first = 0 * share", "test_gradients_of_a_shared_bias[v2"),
    ),
    fault(
        "v2/bias_gradient_of_whole_blocks_beyond_the_window",
        "a block that the window's left edge cuts counts as whole when a bias's gradient is summed",
        V2,
        "whole &= start_kv - (start_q + BLOCK_Q - 1) - shift >= -window_left",
        "whole &= start_kv - start_q - shift >= -window_left",
        "test_gradients_of_a_shared_bias[v2",
    ),
    fault(
        "v2/what_masks_has_a_gradient_of_its_own",
        "the gradient is that of what a function masks with, not of the score that it leaves",
        "flashzoo/scores/program.py",
        "for name in either if not _is_minus_infinity(program, name)]",
        "for name in either if _is_minus_infinity(program, name)]",
        "test_gradients_of_a_shared_bias[v2",
    ),
    fault(
        "v2/what_masks_with_a_number_is_no_part_of_a_gradient",
        "the gradient is that of the score wherever a function masks, not only where it does with -inf",
        "flashzoo/scores/program.py",
        "for name in either if not _is_minus_infinity(program, name)]",
        "for name in either if is_value(name) and not _is_minus_infinity(program, name)]",
        "test_what_is_a_number_has_no_gradient[v2",
    ),
    fault(
        "blocksparse/score_function_told_places_in_the_list",
        "a function on scores is told where a key stands in the list of blocks, not in the sequence",
        SPARSE,
        "at = start + tl.arange(0, BLOCK_KV)",
        "at = nth * BLOCK_KV + tl.arange(0, BLOCK_KV)",
        "blocksparse-score_table_blocks-",
        within="attend",
    ),
    fault(
        "blocksparse/score_function_told_the_first_head_of_a_group",
        "for dK and dV a function on scores is told the group's first head",
        SPARSE,
        "scored = (b, h, score_scale, score_tensors)",
        "scored = (b, h_kv * group, score_scale, score_tensors)",
        "test_gradients[blocksparse-score_alibi_causal_gqa-",
        within="dkdv_kernel",
    ),
    fault(
        "blocksparse/no_number_past_the_last_query",
        "what a function on scores makes of rows that are not there gets into dK and dV",
        SPARSE,
        """            if SCORE_MOD is not None:  # past the last query the score may be no number
                p =""",
        """            if SCORE_MOD is not None and False:
                p =""",
        "test_places_that_are_not_there[blocksparse]",
        within="accumulate_dkdv",
    ),
    fault(
        "v1/dropout_of_dv_not_divided",
        "dV is the sum of what dropout keeps, not divided by its share",
        *(V1, "dv_j /= 1.0 - dropped", "dv_j /= 1.0", "test_gradients[v1-dropout-fp16"),
    ),
    fault(
        "v2/dropout_by_a_tiles_own_rows",
        "forward, dropout's mask is that of the first queries in every block of them",
        V2,
        "(seed, dropped, sequence, h, start_q)",
        "(seed, dropped, sequence, h, 0)",
        "test_gradients[v2-dropout-fp16",
        within="forward_kernel",
    ),
    fault(
        "v2/dropout_in_forward_and_dv_alone",
        "dQ is made of a dP of which nothing is dropped",
        V2,
        "dp / (1.0 - dropout[1]), 0.0)",
        "dp / (1.0 - dropout[1]), dp)",
        "test_gradients[v2-dropout-fp16",
        within="accumulate_dq",
    ),
    fault(
        "v2/dropout_of_the_batch_where_packed",
        "every packed sequence drops what the first one drops",
        V2,
        "(SCORE_MOD is not None or KEPT is not None)",
        "SCORE_MOD is not None",
        "test_forward[v2-dropout_packed",
    ),
    fault(
        "v2/dropout_transposed_in_part",
        "where keys are along the rows, two of four random numbers are swapped",
        DROPOUT,
        "here, below, right, across = tl.philox(tl.load(seed), row",
        "here, right, below, across = tl.philox(tl.load(seed), row",
        "test_gradients[v2-dropout-fp16",
    ),
)
