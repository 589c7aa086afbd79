"""Faults to put into the code one at a time, to see that the suite sees them: data for `mutants.py`.

They are of the kind that gets past a review; "seen in" names an attention kernel that had one like it. What makes every result wrong
is not here: any test would see it.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True)
class Change:
    """One replacement in one file.

    Attributes:
        file: its path in the repository.
        old: text that is there once, in the whole file or in what `within` names.
        new: what takes its place.
        within: a function or class, or a method as `Class.method`.
    """

    file: str
    old: str
    new: str
    within: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the replacement made. Raises ValueError where `old` is not there once."""
        begin, end = _extent(text, self.within) if self.within else (0, len(text))
        found = text.count(self.old, begin, end)
        if found != 1:
            raise ValueError(f"{self.file}: {self.old!r} must be {f'in {self.within}' if self.within else 'there'} once, is {found} times")
        at = text.index(self.old, begin)
        return text[:at] + self.new + text[at + len(self.old) :]


@lru_cache(maxsize=64)
def _extents(text: str) -> dict[str, tuple[int, int]]:
    """Where each function, class and method begins and ends."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inside = [(f"{node.name}.{x.name}", x) for x in node.body if isinstance(x, ast.FunctionDef)]
            found |= {name: (starts[x.lineno - 1], starts[x.end_lineno or 0]) for name, x in ((node.name, node), *inside)}
    return found


def _extent(text: str, within: str) -> tuple[int, int]:
    extents = _extents(text)
    if within not in extents:
        raise ValueError(f"{within!r} is not there")
    return extents[within]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: `version/what_it_does`.
        why: what it is, in a line.
        changes: what makes it.
        seen_by: tests that see it, as pytest's -k takes them; tried first, for speed, of those that `mutants.py` runs of the version.
        gpu: whether it needs a Hopper GPU. What does not is run by Triton's interpreter, or by torch, on the CPU.
        equivalent: why it changes no result, for one that is kept to show that.
    """

    name: str
    why: str
    changes: tuple[Change, ...]
    seen_by: str
    gpu: bool = False
    equivalent: str = ""

    @property
    def version(self) -> str:
        """What it is a fault of."""
        return self.name.partition("/")[0]

    def changed(self, root: Path) -> dict[str, str]:
        """The new text of each file that it changes. Raises ValueError where it does not apply, or leaves what is no Python."""
        texts: dict[str, str] = {}
        for change in self.changes:
            texts[change.file] = change.applied(texts.get(change.file) or (root / change.file).read_text())
        for file, text in texts.items():
            try:
                ast.parse(text)
            except SyntaxError as error:
                raise ValueError(f"{file}: {error}") from error
        return texts


V1, V2, SPARSE = (f"flashzoo/{version}/kernels.py" for version in ("v1", "v2", "blocksparse"))
REFERENCE = "flashzoo/reference.py"
FORWARD, BACKWARD, BY_GRADIENT = (f"flashzoo/v3/{name}.py" for name in ("forward", "backward", "backward_by_gradient"))
FP8, QUANTIZE, SOFTMAX, DELTA, V3_SPARSE = (f"flashzoo/v3/{name}.py" for name in ("fp8", "quantize_kernels", "softmax", "delta", "sparse"))
BOUNDS, MASK = (f"flashzoo/_cute/hopper/{name}.py" for name in ("bounds", "mask"))


def _fault(name: str, why: str, file: str, old: str, new: str, seen_by: str, within: str = "", **more) -> Fault:
    return Fault(name, why, (Change(file, old, new, within),), seen_by, **more)


_V1 = (
    _fault(
        "v1/diagonal_unseen",
        "the diagonal itself is masked: an off-by-one of the causal mask",
        *(V1, "col <= row + shift", "col < row + shift", "test_counting[v1-causal-fp16]"),
    ),
    _fault(
        "v1/one_key_past_the_last",
        "keys are masked from the second one past the end: zeros count as a key",
        *(V1, "seen = col < seqlen_k", "seen = col <= seqlen_k", "test_counting[v1-full-fp16]"),
    ),
    _fault(
        "v1/o_not_rescaled",
        "O is not rescaled when the maximum grows, l is",
        *(V1, "acc * (alpha * l_i)[:, None]", "acc * l_i[:, None]", "test_forward[v1-ragged-fp16]"),
    ),
    _fault(
        "v1/maximum_of_the_last_block",
        "m is the maximum of the last block alone: right until a row sees none of it",
        *(V1, "m_new = tl.maximum(m_i, tl.max(s, 1))", "m_new = tl.max(s, 1)", "test_forward[v1-ragged_causal-fp16]"),
    ),
    _fault(
        "v1/block_on_the_diagonal_skipped",
        "the first block of queries that sees some of a block of keys is rounded up, past one that sees part of it",
        V1,
        "(start_kv - shift - first_row) // BLOCK_Q * BLOCK_Q",
        "(start_kv - shift - first_row + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q",
        "test_counting[v1-causal_more_keys-fp16]",
    ),
    _fault(
        "v1/heads_dealt_to_kv_heads_in_turn",
        "query head h reads key/value head h % heads_kv; seen in levanter #449, FA 4d9c722a",
        *(V1, "h_kv = h // group", "h_kv = h % (heads // group)", "test_needle[v1-fp16]"),
    ),
    _fault(
        "v1/lse_in_log2_units",
        "LSE leaves in the units of the inside",
        *(V1, "tl.where(l_i == 0.0, 1.0, l_i))) * LN2", "tl.where(l_i == 0.0, 1.0, l_i)))", "test_counting[v1-full-fp16]"),
    ),
    _fault(
        "v1/o_in_16_bits_between_blocks",
        "O is rounded to the inputs' dtype after every block of keys",
        V1,
        'input_precision="ieee") / l_safe[:, None]',
        'input_precision="ieee") / l_safe[:, None]\n            acc = acc.to(v_j.dtype).to(tl.float32)',
        "v1-one_query",
    ),
    _fault(
        "v1/gradient_of_lse_dropped",
        "the gradient through LSE is not in delta; seen in cudnn-frontend PR 554",
        *(V1, "if DLSE:", "if DLSE and SERIAL:", "test_gradient_through_lse_alone[v1]"),
    ),
    _fault(
        "v1/do_read_by_strides_of_o",
        "dO is read as if it lay as O does; seen in FA 9ee0ff1d",
        V1,
        "do_head = (do, stride_dob, stride_dos, stride_doh",
        "do_head = (do, stride_ob, stride_os, stride_oh",
        "test_layouts and v1-plain and packed",
    ),
    _fault(
        "v1/last_dv_zero_under_a_causal_mask",
        "the last key's dV is zero, under a causal mask alone",
        V1,
        "store_block(dv_head, dv_j,",
        "store_block(dv_head, tl.where(((col == seqlen_k - 1) & CAUSAL)[:, None], 0.0, dv_j),",
        "test_gradients[v1-square_causal-fp16] or test_gradients[v1-square_causal-fp32]",
    ),
    _fault(
        "v1/serial_dq_overwritten",
        "where one program walks all blocks of keys, dQ is what the last one adds",
        *(V1, "tl.load(rows, mask=mask, other=0.0) + dq_i", "dq_i", "test_gradients[v1-square-fp32-deterministic]"),
    ),
    _fault(
        "v1/rows_times_stride_in_32_bits",
        "a row's offset is 32 bits wide; seen in FA #1500, #2260",
        V1,
        "row[:, None].to(tl.int64)",
        "row[:, None]",
        "test_offsets_past_2_to_31_elements and v1-plain and seqlen",
        within="load_block",
    ),
    _fault(
        "v1/m_written_past_the_tail",
        "m is stored for rows past the last query, which are another head's, or nobody's",
        *(V1, "tl.store(m + at, m_new, mask=row < seqlen_q)", "tl.store(m + at, m_new)", "test_nothing_past_the_end_is_written[v1-plain]"),
    ),
)

_V2 = (
    _fault(
        "v2/window_right_one_short",
        "the last visible key on the right is masked, which under a causal mask is the diagonal",
        *(V2, "offset <= window_right", "offset < window_right", "test_counting[v2-window-fp16]"),
    ),
    _fault(
        "v2/window_left_one_long",
        "one key too many on the left; seen in FlexAttention, ROCm",
        *(V2, "offset >= -window_left", "offset >= -window_left - 1", "test_counting[v2-window-fp16]"),
    ),
    _fault(
        "v2/partial_block_unmasked",
        "the block on the diagonal counts as one that every row sees whole",
        V2,
        "tl.maximum(start_q + 1 + shift + window_right, 0)",
        "tl.maximum(start_q + BLOCK_Q + shift + window_right, 0)",
        "test_counting[v2-causal-fp16]",
        within="visible_keys",
    ),
    _fault(
        "v2/last_block_of_keys_skipped",
        "where the keys end for a block of queries leaves out what the window shows right of the diagonal",
        V2,
        "tl.maximum(start_q + BLOCK_Q + shift + window_right, 0)",
        "tl.maximum(start_q + BLOCK_Q + shift, 0)",
        "test_counting[v2-window-fp16]",
        within="visible_keys",
    ),
    _fault(
        "v2/tail_of_keys_unmasked",
        "the last block of keys is read and used whole, past the last key; seen in FA #1745, #1974",
        V2,
        "whole_last // BLOCK_KV * BLOCK_KV, whole_first)",
        "tl.cdiv(whole_last, BLOCK_KV) * BLOCK_KV, whole_first)",
        "test_nothing_past_the_end_is_read[v2-plain]",
        within="visible_keys",
    ),
    _fault(
        "v2/nan_where_a_row_sees_nothing",
        "-inf - -inf for rows that have seen no key; seen in PyTorch #103963, FA 26d7d92f",
        *(V2, "alpha = tl.exp2(m_i - m_safe)", "alpha = tl.exp2(m_i - m_new)", "test_rows_that_see_nothing[v2-causal]"),
    ),
    _fault(
        "v2/l_not_rescaled_behind_a_mask",
        "the sum of rows is not rescaled in masked blocks",
        V2,
        "l_i = l_i * alpha + tl.sum(p, 1)",
        "l_i = (l_i if MASKED else l_i * alpha) + tl.sum(p, 1)",
        "test_forward[v2-ragged_causal-fp16]",
    ),
    _fault(
        "v2/maximum_without_scale",
        "the maximum of unmasked blocks is of scores that are not scaled: harmless until they are large",
        V2,
        "tl.maximum(m_i, tl.max(s, 1) * scale_log2)",
        "tl.maximum(m_i, tl.max(s, 1))",
        "v2-low_scores-",
    ),
    _fault(
        "v2/dq_in_units_of_log2",
        "dQ has the factor of the scores inside, log2 e too large",
        V2,
        "store_block(dq_head, dq_i * scale,",
        "store_block(dq_head, dq_i * scale_log2,",
        "test_gradients[v2-square-fp32]",
    ),
    _fault(
        "v2/statistics_of_the_first_head_of_a_group",
        "LSE and delta are those of the group's first head; seen in FA c5f6ff49",
        V2,
        "delta, bh_kv * group + member, rows_padded)",
        "delta, bh_kv * group, rows_padded)",
        "test_gradients[v2-gqa3_causal-fp32]",
    ),
    _fault(
        "v2/gradient_of_lse_with_the_wrong_sign",
        "delta gains the gradient of LSE in place of losing it",
        *(V2, "delta_i -= tl.load(dlse", "delta_i += tl.load(dlse", "test_gradient_through_lse_alone[v2]"),
    ),
    _fault(
        "v2/lse_of_padding_finite",
        "LSE of rows that there are not stays -inf, so their P is inf, and inf times dO = 0 is NaN",
        *(V2, 'tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)', "lse_i * LOG2E", "test_gradients[v2-ragged_causal-fp32]"),
    ),
    _fault(
        "v2/delta_of_the_next_row_of_do",
        "delta is of O and the row of dO after it",
        V2,
        "do_i = load_block(do_head, start,",
        "do_i = load_block(do_head, start + 1,",
        "test_gradients[v2-square-fp32]",
        within="delta_kernel",
    ),
    _fault(
        "v2/last_dv_with_its_sign_turned",
        "the last key's dV has the wrong sign",
        V2,
        "store_block(dv_head, dv_j,",
        "store_block(dv_head, tl.where((col == seqlen_k - 1)[:, None], -dv_j, dv_j),",
        "test_gradients[v2-square-fp16]",
    ),
    _fault(
        "v2/dk_of_one_head_5_percent_off",
        "dK of one key/value head is 5 % too large",
        V2,
        "store_block(dk_head, dk_j * scale,",
        "store_block(dk_head, dk_j * (scale * tl.where(h_kv == 1, 1.05, 1.0)),",
        "test_gradients[v2-square-fp16]",
    ),
    _fault(
        "v2/last_two_dk_of_a_block_zero",
        "dK of the last 2 of 64 keys is zero",
        V2,
        "store_block(dk_head, dk_j * scale,",
        "store_block(dk_head, tl.where((col % BLOCK_KV >= BLOCK_KV - 2)[:, None], 0.0, dk_j) * scale,",
        "test_gradients[v2-square-fp16]",
    ),
    _fault(
        "v2/heads_times_stride_in_32_bits",
        "a head's offset is 32 bits wide; seen in PyTorch #190857, fla #1080",
        V2,
        "tl.cast(h, tl.int64) * stride_h",
        "h * stride_h",
        "test_offsets_past_2_to_31_elements and v2-plain and heads",
        within="load_block",
    ),
    _fault(
        "v2/stores_past_the_tail",
        "rows past the last are stored too, over another head's or nobody's memory",
        V2,
        "mask=(row < seqlen)[:, None] & (d < HEAD_DIM)[None, :])",
        "mask=(row < seqlen + ROWS)[:, None] & (d < HEAD_DIM)[None, :])",
        "test_nothing_past_the_end_is_written[v2-plain]",
        within="store_block",
    ),
)

_BLOCKSPARSE = (
    _fault(
        "blocksparse/list_one_short",
        "the last full block of every list is left out",
        SPARSE,
        "whole_last = kept * (ROWS // BLOCK)",
        "whole_last = tl.where(whole > 1, kept - 1, kept) * (ROWS // BLOCK)",
        "test_forward[blocksparse-blocks-fp16]",
    ),
    _fault(
        "blocksparse/partial_block_taken_for_full",
        "the last partial block of a list is not masked",
        SPARSE,
        "whole_first = (kept - whole) * (ROWS // BLOCK)",
        "whole_first = tl.maximum(kept - whole - 1, 0) * (ROWS // BLOCK)",
        "test_forward[blocksparse-blocks_bits-fp16]",
    ),
    _fault(
        "blocksparse/full_block_taken_for_partial",
        "the first full block of a list is masked by whatever bits come first",
        SPARSE,
        "whole_first = (kept - whole) * (ROWS // BLOCK)",
        "whole_first = tl.minimum(kept - whole + 1, kept) * (ROWS // BLOCK)",
        "blocksparse-blocks_bits_gqa-",
    ),
    _fault(
        "blocksparse/bits_of_the_first_head",
        "all heads are masked by the bits of the first",
        SPARSE,
        "bits += tl.cast(head, tl.int64) * n_bits * (MASK_Q * MASK_KV // 8)",
        "bits += tl.cast(head * 0, tl.int64) * n_bits * (MASK_Q * MASK_KV // 8)",
        "blocksparse-blocks_bits_gqa-",
    ),
    _fault(
        "blocksparse/bits_from_the_other_end",
        "the bits of a byte are taken from the highest down",
        SPARSE,
        "eight[:, :, None] >> tl.arange(0, 8)[None, None, :]",
        "eight[:, :, None] >> (7 - tl.arange(0, 8)[None, None, :])",
        "test_forward[blocksparse-blocks_bits-fp16]",
    ),
    _fault(
        "blocksparse/bits_not_transposed",
        "for dK and dV, whose scores are transposed, the bits are not",
        SPARSE,
        "visible_by_bits(row, start_kv, blocks, nth, BLOCK_Q, col.shape[0]).T",
        "visible_by_bits(row, start_kv, blocks, nth, BLOCK_Q, col.shape[0])",
        "test_gradients[blocksparse-blocks_bits-fp32]",
    ),
    _fault(
        "blocksparse/tail_skipped",
        "tiles of the last full block are rounded down, so the end of the keys, or of the queries, is left out",
        SPARSE,
        "last = whole_last + tl.cdiv(left, BLOCK)",
        "last = whole_last + left // BLOCK",
        "test_gradients[blocksparse-blocks-fp32]",
    ),
    _fault(
        "blocksparse/mask_of_the_first_batch",
        "for dQ every batch has the first one's mask",
        SPARSE,
        "mask_head = b * stride_mask_b + h * stride_mask_h",
        "mask_head = h * stride_mask_h",
        "blocksparse-blocks_window-",
        within="dq_kernel",
    ),
    _fault(
        "blocksparse/lists_of_the_first_head_of_a_group",
        "for dK and dV all heads of a group have the lists of its first",
        SPARSE,
        "mask, mask_head + member * stride_mask_h, mask_column",
        "mask, mask_head, mask_column",
        "blocksparse-blocks_bits_gqa-",
    ),
    _fault(
        "blocksparse/number_past_the_list_read",
        "whether the last full block reaches past the end is told from the entry behind it, which says nothing",
        SPARSE,
        "tl.load(indices + first + kept - 1,",
        "tl.load(indices + first + tl.minimum(kept, width - 1),",
        "test_forward[blocksparse-blocks-fp16] or test_nothing_past_the_end_is_read[blocksparse]",
    ),
    _fault(
        "blocksparse/nothing_divided_by_nothing",
        "a row whose list is empty is divided by its sum, 0",
        SPARSE,
        "o_i = acc / l_safe[:, None]",
        "o_i = acc / l_i[:, None]",
        "test_rows_and_columns_that_keep_nothing[blocksparse]",
    ),
    _fault(
        "blocksparse/tail_of_keys_unmasked",
        "for dQ keys past the end count: they are zeros and add nothing, until exp(-LSE) overflows",
        SPARSE,
        "ends = (shift, seqlen_k, seqlen_q",
        "ends = (shift, seqlen_k + BLOCK_KV, seqlen_q",
        "blocksparse-blocks_low_scores-",
        within="dq_kernel",
    ),
    _fault(
        "blocksparse/second_tile_of_a_block_is_the_first",
        "a block of more than one tile is walked as its first tile again and again",
        SPARSE,
        "* ROWS + nth % (ROWS // BLOCK) * BLOCK",
        "* ROWS",
        "test_forward[blocksparse-blocks_causal_gqa-fp16]",
    ),
    _fault(
        "blocksparse/band_from_the_top_left",
        "the band of partial blocks is aligned with the first key, not the last",
        SPARSE,
        "shift = seqlen_k - seqlen_q",
        "shift = 0",
        "test_gradients[blocksparse-blocks_causal_gqa-fp32]",
        within="dkdv_kernel",
    ),
    _fault(
        "blocksparse/order_of_the_first_head",
        "all heads take their rows in the order that the first head's lengths ask for",
        SPARSE,
        "tl.load(order + mask_head * rows + tile",
        "tl.load(order + tile",
        "test_forward[blocksparse-blocks_causal_gqa-fp16] or test_forward[blocksparse-blocks-fp16]",
        within="forward_kernel",
        equivalent="every head's order is a permutation of its rows, so each is taken once all the same; only when changes",
    ),
    Fault(
        "blocksparse/dv_off_as_the_yardstick_is",
        "dV of masks with bits is 1.3 times what it should be, and the yardstick's is too",
        (
            Change(SPARSE, "store_block(dv_head, dv_j,", "store_block(dv_head, dv_j * (1.3 if BITS else 1.0),"),
            Change(
                REFERENCE,
                "dv = _matmul(p.to(q.dtype).mT, do)",
                "dv = _matmul(p.to(q.dtype).mT, do) * (1.3 if block_mask is not None else 1.0)",
            ),
        ),
        "test_gradients[blocksparse-blocks_bits-fp32] or test_gradients[blocksparse-blocks_bits-fp16]",
    ),
)

_STANDARD = (
    _fault(
        "standard/masked_dk_half_again",
        "the yardstick's dK is 1.5 times what it should be under a block mask",
        REFERENCE,
        "dk = _matmul(ds.mT, _heads_first(q, problem)) * problem.scale",
        "dk = _matmul(ds.mT, _heads_first(q, problem)) * (problem.scale if operands.block_mask is None else 1.5 * problem.scale)",
        "test_gradients[standard-blocks-fp32] or test_gradients[standard-blocks-fp16]",
    ),
    _fault(
        "standard/masked_dv_half_again",
        "the yardstick's dV is 1.5 times what it should be under a block mask",
        REFERENCE,
        "dv = _matmul(p.to(q.dtype).mT, do)",
        "dv = _matmul(p.to(q.dtype).mT, do) * (1.5 if block_mask is not None else 1.0)",
        "test_gradients[standard-blocks-fp32] or test_gradients[standard-blocks-fp16]",
    ),
    _fault(
        "standard/dk_5_percent_off",
        "the yardstick's dK is 5 % too large",
        REFERENCE,
        "dk = _matmul(ds.mT, _heads_first(q, problem)) * problem.scale",
        "dk = _matmul(ds.mT, _heads_first(q, problem)) * (1.05 * problem.scale)",
        "test_standard_is_close_to_the_oracle[bf16]",
    ),
    _fault(
        "standard/scores_in_16_bits",
        "the yardstick's scores are rounded to the inputs' dtype, so everybody may err as much",
        REFERENCE,
        "products = _matmul(_heads_first(q, problem), _heads_first(k, problem).mT)",
        "products = _matmul(_heads_first(q, problem), _heads_first(k, problem).mT).to(q.dtype).to(_wide(q))",
        "test_standard_is_close_to_the_oracle or test_gradients[standard-square-fp16] or test_forward[standard-square-bf16]",
    ),
    _fault(
        "standard/heads_dealt_to_kv_heads_in_turn",
        "key/value heads are repeated as a whole, not each for its group",
        REFERENCE,
        "x.repeat_interleave(problem.heads // problem.heads_kv, 1)\n    return x.reshape",
        "x.repeat(1, problem.heads // problem.heads_kv, 1, 1)\n    return x.reshape",
        "test_standard_in_float64_is_the_oracle",
    ),
    _fault(
        "standard/nan_where_a_mask_hides_all",
        "a row that a block mask hides altogether is NaN",
        REFERENCE,
        "p.masked_fill_((s == -math.inf).all(-1, keepdim=True), 0)",
        "pass",
        "standard-blocks_window-",
    ),
    _fault(
        "standard/sums_of_ten_bits",
        "the yardstick of FP8 cuts sums at 10 bits, not 13, so everybody may err as much",
        *(REFERENCE, "HOPPER_SUM_BITS = 13", "HOPPER_SUM_BITS = 10", "test_sums_keep_what_hoppers_tensor_core_keeps"),
    ),
)

_V3 = (
    _fault(
        "v3/one_key_past_the_last",
        "the mask's right bound is one too far: the first zero past the last key counts, or the key right of the diagonal",
        *(MASK, "8 * i + c < highest", "8 * i + c <= highest", "test_counting[v3-full-fp16] or test_counting[v3-causal-fp16]"),
        gpu=True,
    ),
    _fault(
        "v3/partial_block_unmasked",
        "a block that only the last rows of a warpgroup see whole is not masked",
        BOUNDS,
        "cutlass.max(0, sequence.diagonal(first) + p.window_right + 1) // size",
        "cutlass.max(0, sequence.diagonal(last) + p.window_right + 1) // size",
        "test_counting[v3-causal-fp16] or test_counting[v3-causal_more_keys-fp16]",
        within="Bounds.blocks_of_rows",
        gpu=True,
    ),
    _fault(
        "v3/last_block_of_keys_skipped",
        "the number of blocks of keys is rounded down",
        BOUNDS,
        "(keys + tiles.block_kv - 1) // tiles.block_kv",
        "keys // tiles.block_kv",
        "test_counting[v3-full-fp16] or test_forward[v3-ragged-bf16]",
        within="Bounds.visible_blocks",
        gpu=True,
    ),
    _fault(
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
    _fault(
        "v3/lse_with_the_maximum_of_the_other_row",
        "LSE of the second of a thread's two rows is relative to the first one's maximum",
        *(SOFTMAX, "self.row_max[r] + cute.math.log2", "self.row_max[0] + cute.math.log2", "test_forward[v3-square-bf16]"),
        within="Softmax.lse_log2",
        gpu=True,
    ),
    _fault(
        "v3/heads_dealt_to_kv_heads_in_turn",
        "query head h reads key/value head h % heads_kv; seen in levanter #449, FA 4d9c722a",
        *(FORWARD, "tile.head // params.group", "tile.head % (params.heads // params.group)", "test_needle[v3-fp16]"),
        gpu=True,
    ),
    _fault(
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
    _fault(
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
    _fault(
        "v3/dk_of_one_head_5_percent_off",
        "at head dim 256 dK of one key/value head is 5 % too large",
        BY_GRADIENT,
        "acc.store(acc.load() * scale)",
        "acc.store(acc.load() * (scale * (Float32(1.05) if tile.bounds.tile.head == 1 else Float32(1.0))))",
        "v3-head_dim_256-",
        gpu=True,
    ),
    _fault(
        "v3/delta_of_the_neighbour",
        "of two neighbouring queries both have the first one's delta",
        *(BACKWARD, "(dp[c, r, i] - pair[c])", "(dp[c, r, i] - pair[0])", "test_gradients[v3-square-bf16]"),
        within="Backward.differentiate",
        gpu=True,
    ),
    _fault(
        "v3/gradient_of_lse_with_the_wrong_sign",
        "delta gains the gradient of LSE in place of losing it; seen dropped in cudnn-frontend PR 554",
        *(DELTA, "delta_i -= tl.load(dlse", "delta_i += tl.load(dlse", "test_gradient_through_lse_alone[v3]"),
        gpu=True,
    ),
    _fault(
        "v3/dq_rounded_without_scale",
        "dQ's sums leave without the softmax scale",
        *(DELTA, "tile = (sums * scale)", "tile = (sums + 0.0 * scale)", "test_gradients[v3-square-bf16]"),
        gpu=True,
    ),
    _fault(
        "v3/queries_masked_one_late",
        "for dK and dV a key is not seen by the query on its diagonal",
        BOUNDS,
        "lowest = key - p.window_right - sequence.diagonal(0)",
        "lowest = key - p.window_right - sequence.diagonal(0) + 1",
        "test_gradients[v3-square_causal-bf16]",
        within="BoundsBackward.of_key",
        gpu=True,
    ),
    _fault(
        "v3/ds_read_before_it_is_written",
        "the warpgroups do not wait for one another between writing dS and computing dQ of it: a race",
        *(BACKWARD, "        self.sync_consumers()\n", "\n", "test_gradients[v3-square-bf16] or v3-square_4096-"),
        within="Backward.step",
        gpu=True,
    ),
    _fault(
        "v3/deterministic_in_any_order",
        "in deterministic mode nobody waits for the blocks of keys before; seen in FA #2158, #2244",
        BACKWARD,
        "semaphore_wait(dq_semaphore + of_block, before)",
        "semaphore_wait(dq_semaphore + of_block, Int32(NEVER))",
        "test_deterministic_means_the_same_bits[v3-plain]",
        within="Backward.store_dq",
        gpu=True,
    ),
    _fault(
        "v3/bits_of_the_first_head",
        "with a block mask all heads and batches are masked by the bits of the first",
        V3_SPARSE,
        "Int64(self.tile.row.list // p.blocks) * p.bit_blocks",
        "Int64(0) * p.bit_blocks",
        "v3-blocks_of_128_bits_gqa-",
        gpu=True,
    ),
    _fault(
        "v3/last_partial_block_taken_for_full",
        "with a block mask a list that ends with a partial block is not masked there",
        V3_SPARSE,
        "crosses = begins_partial or first_key + tiles.block_kv > limit",
        "crosses = first_key + tiles.block_kv > limit",
        "v3-blocks_of_128_head_dim_64- or v3-blocks_of_128_bits_gqa-",
        gpu=True,
    ),
)

_V3_FP8 = (
    _fault(
        "v3_fp8/descale_of_the_block_before",
        "a row's descale is that of the block before it",
        FP8,
        "row // DESCALE_BLOCK * self.block",
        "cutlass.max(row // DESCALE_BLOCK - 1, 0) * self.block",
        "test_forward[v3_fp8-ragged-e4m3-by_block]",
        gpu=True,
    ),
    _fault(
        "v3_fp8/descale_of_the_neighbouring_head",
        "Q's descale is that of the next query head of its group, or of the group after it",
        FP8,
        "of_head // self.scaling.q_group",
        "(of_head ^ 1) // self.scaling.q_group",
        "test_each_descale_is_of_its_own_kind and v3_fp8-plain",
        gpu=True,
    ),
    _fault(
        "v3_fp8/descale_of_v_upside_down",
        "where V's descale changes from block to block O is rescaled by the inverse of the change",
        FP8,
        "self.v_scale[0] * cute.arch.rcp_approx(v_scale)",
        "v_scale * cute.arch.rcp_approx(self.v_scale[0])",
        "test_forward[v3_fp8-ragged-e4m3-by_block]",
        gpu=True,
    ),
    _fault(
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
    _fault(
        "v3_fp8/two_keys_of_v_swapped",
        "V transposed on chip has two neighbouring keys of some columns in each other's place",
        FP8,
        "prmt.b32 p, {$r3}, {$r4}, 0x7531;",
        "prmt.b32 p, {$r3}, {$r4}, 0x5731;",
        "test_needle[v3_fp8-e4m3-e4m3]",
        gpu=True,
    ),
    _fault(
        "v3_fp8/pairs_of_p_swapped",
        "of four neighbouring P the two pairs are in each other's place",
        *(FP8, "mov.b32 {$w0}, {low, high};", "mov.b32 {$w0}, {high, low};", "test_needle[v3_fp8-e4m3-e4m3]"),
        gpu=True,
    ),
    _fault(
        "v3_fp8/lse_with_the_exponent_of_p",
        "LSE keeps the 2^8 that P is scaled by",
        FP8,
        "return self.row_max[r] - P_EXPONENT + cute.math.log2",
        "return self.row_max[r] + cute.math.log2",
        "test_counting[v3_fp8-full-e4m3-e4m3]",
        gpu=True,
    ),
    _fault(
        "v3_fp8/largest_p_past_the_largest_number",
        "P is 2^9 at a row's maximum, past e4m3's 448; seen in FA 2409214a #2717",
        *(FP8, "P_EXPONENT = 8.0", "P_EXPONENT = 9.0", "test_needle[v3_fp8-e4m3-e4m3]"),
        gpu=True,
    ),
    _fault(
        "v3_fp8/bytes_put_together_by_the_compiler",
        "V's words are made of bytes that are rounded before, which the ptxas of Triton 3.6 gets wrong where V does not lie contiguously",
        QUANTIZE,
        "if INTERPRETED:\n        return words_of(to_e4m3(y_0, True), to_e4m3(y_1, True), to_e4m3(y_8, True), to_e4m3(y_9, True))",
        "if True:\n        return words_of(to_e4m3(y_0, False), to_e4m3(y_1, False), to_e4m3(y_8, False), to_e4m3(y_9, False))",
        "test_layouts and v3_fp8 and head_dim_80",
        within="e4m3_words_of",
        gpu=True,
    ),
    _fault(
        "v3_fp8/mean_not_subtracted_from_one_block",
        "the second block of keys is not smoothed",
        QUANTIZE,
        "other=0.0)[None, :] * times,)",
        "other=0.0)[None, :] * times * tl.where(block == 1, 0.0, 1.0),)",
        "test_rounding_and_scales and ragged",
    ),
    _fault(
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
    _fault(
        "v3_fp8/scale_of_rows_that_are_not_there",
        "rows past the last, zero but for the mean that is taken from them, count for a block's scale",
        *(QUANTIZE, "tl.max(tl.where(there, largest, 0.0), 0)", "tl.max(largest, 0)", "test_rounding_and_scales and ragged"),
    ),
    _fault(
        "v3_fp8/mean_of_the_next_head",
        "q is multiplied by the mean of the keys of another head, for LSE",
        QUANTIZE,
        "* heads_kv + h // (heads // heads_kv)) * HEAD_DIM",
        "* heads_kv + h % heads_kv) * HEAD_DIM",
        "test_the_shift_restores_the_lse and gqa",
    ),
)

FAULTS = (*_V1, *_V2, *_BLOCKSPARSE, *_STANDARD, *_V3, *_V3_FP8)
