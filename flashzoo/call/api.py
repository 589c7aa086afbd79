"""The public calls: `attention`, `explain`, `quantize`, `sdpa`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from flashzoo.autograd import as_rows
from flashzoo.call.check import check_data, check_tensors, described_call, fields_of
from flashzoo.call.forms import Window, check_flags
from flashzoo.call.operands import Operands, taken
from flashzoo.call.packed import as_batch, batch_of_one, of_nested, on_caches
from flashzoo.call.plan import Plan, plan, problem_of
from flashzoo.call.problem import OPTIONS, Problem
from flashzoo.call.signs import negated, resolved
from flashzoo.masks.block_mask import BlockMask
from flashzoo.registry import Explanation, current, explain_problem, requested
from flashzoo.scores.mod import ScoreMod
from flashzoo.transforms import check_transforms, refuse_transforms, transforming

if TYPE_CHECKING:
    from typing_extensions import Unpack

Call = TypeVar("Call", bound=Callable)


class Options(TypedDict, total=False):
    """The keyword arguments of `attention` that say what is computed; `explain` and `compare` take them too."""

    causal: bool
    softmax_scale: float | None
    window_size: Window | None
    deterministic: bool
    precision: Literal["fp8"] | None
    fast_accum: bool
    out_dtype: torch.dtype | None
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    block_mask: BlockMask | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None
    sinks: Tensor | None
    score_mod: ScoreMod | Callable[..., Tensor] | None
    dropout_p: float
    dropout_seed: Tensor | int | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None


def takes_options(call: Call) -> Call:
    """A function of `**options: Unpack[Options]` that tells each of them by its name,
    in help() and to who inspects it."""
    signature = inspect.signature(call)
    named = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    defaults = {name: option.not_given for name, option in OPTIONS.items()}
    for name, annotation in Options.__annotations__.items():
        annotation = getattr(annotation, "__forward_arg__", annotation)
        named.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        )
    call.__signature__ = signature.replace(parameters=named)  # pyright: ignore[reportFunctionMemberAccess]
    return call


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., version: str = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], version: str = ..., **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@takes_options
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, version: str = "auto", **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, `softmax(q k^T * softmax_scale) v`, by the version that is asked for or the best that can.

    Packed sequences lie behind one another in tensors of three dimensions, and `cu_seqlens_q` says where each begins:
    all that is said below of `seqlen` then holds of each sequence. A sequence's bits don't depend on what else is
    packed with it, in versions that promise it (`Spec.batch_invariant`). Rows of no sequence give 0, -inf (or their
    sink) in lse and gradients of 0. Queries may be packed alone, on caches or pages, one for each sequence: a server's
    batch of prompts and of single new tokens; the bits of one then depend on how many sequences and queries there are
    in all, and on nothing else of them.

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, fp16, bf16, fp32, fp64 or e4m3 (`torch.float8_e4m3fn`); any strides
            with a contiguous last dimension, so a transposed view of a `(batch, heads, seqlen, head_dim)` tensor passes
            with no copy. Lazily negated numbers (`torch.Tensor.is_neg`) cost one, here and in k, v, descales and
            gradients.
            Packed: `(total_q, heads, head_dim)`, that as a batch of one, or a nested tensor of layout `torch.jagged`,
            `(batch, seqlen, heads, head_dim)` with one length for each of the batch. On caches: `(total_q, heads,
            head_dim)`, beside k and v `(sequences, seqlen_k, heads_kv, head_dim)` or in pages; without gradients.
        k: `(batch, seqlen_k, heads_kv, head_dim)`, dtype and device of q. `heads` is a multiple of `heads_kv`; query
            head h reads key/value head `h // (heads // heads_kv)`. Beside fp16 or bf16 q both k and v may be e4m3, as
            an FP8 cache is: products are then in q's dtype, which holds every e4m3 number, and nothing has gradients.
        v: `(batch, seqlen_k, heads_kv, head_dim_v)`, dtype and device of k. `head_dim_v` is mostly `head_dim`. A view
            of k's first columns, `v = k[..., :head_dim_v]`, is seen as such: that is the latent cache of DeepSeek's
            MLA, 576 wide of which 512 are the values, and `decode` reads it once.
        causal: query i sees key j only where `j <= i + seqlen_k - seqlen_q`: the last query sees the last key.
        softmax_scale: finite float of at most 1e30, `1 / sqrt(head_dim)` where None. A negative one costs a copy of q.
            DeepSeek's MLA has another: that of the head dim before keys are absorbed, `1 / sqrt(192)`.
        window_size: `(left, right)`: query i sees the keys from `i + seqlen_k - seqlen_q - left` to
            `i + seqlen_k - seqlen_q + right`; None or -1 on a side means no bound there.
        deterministic: the same bits in every run, gradients included; a version that can't promise it is not taken.
        return_lse: return the log-sum-exp of each row of scores too.
        version: a name from `flashzoo.versions()`, or "auto" for the newest that can take the call, of those that
            don't leave it to others (`Spec.leaves`) if there are any. A name never falls back. Overridden, where
            "auto", by `flashzoo.use(...)` and then by the environment variable FLASHZOO_VERSION.
        precision: "fp8" quantises fp16 or bf16 inputs to e4m3 for the forward pass; the backward pass runs in 16 bits,
            on the inputs as they are. Nothing is quantised where it is None.
        fast_accum: with e4m3 inputs or `precision="fp8"`, P V may be summed in the tensor core's accumulators alone,
            which is faster at some head dims: they cut each term off 13 bits below the sum, and what is lost grows with
            the keys. False promotes sums to float32 on the way. A ValueError with anything else.
        out_dtype: of out. That of the inputs where None; with 16-bit ones `torch.float32` leaves out as it was summed,
            for partial results (`flashzoo.merge`), with no gradients. With e4m3 inputs `torch.bfloat16`, which None
            means there, or `torch.float16`.
        q_descale: with e4m3 inputs, what q is multiplied by to be the real one: float32, on q's device, any strides,
            `(batch, heads_kv)` or one for each 128 rows of a head, `(batch, heads, ceil(seqlen_q / 128))`; None is 1.
            Positive and finite, which is not looked at: it lies on the device. Packed: `(sequences, heads_kv)`.
        k_descale, v_descale: the same for e4m3 k and v, `(batch, heads_kv)` or
            `(batch, heads_kv, ceil(seqlen_k / 128))`, of a sequence's rows in pages too; packed: as q's, but of caches
            `(sequences, heads_kv, ceil(seqlen_k / 128))` too.
        block_mask: a `flashzoo.BlockMask` on q's device, of these lengths, its batch and heads q's or 1. A key is seen
            where it, causal and window_size all say so; these are put into it by some hundreds of small operations at
            the first such call, and kept with it (`BlockMask.banded`). `v3` and `blocksparse` skip what the mask skips;
            `sdpa` and `standard` make a dense mask of it.
        cu_seqlens_q: of packed sequences, int32 `(sequences + 1,)` on q's device: sequence i has the rows from
            `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` of q. Its values are not read by the host: what lies outside of q
            is cut off, and where they fall no row is of any sequence; `flashzoo.validate` looks at them.
        cu_seqlens_k: the same for k and v; None where they are q's, and k has as many rows, and where k and v are
            caches.
        seqused_k: int32 `(sequences,)`, or without cu_seqlens_q `(batch,)`: of each sequence's keys only so many, from
            its first on, are used, as of a cache that is not full yet. They are seqlen_k for all that is said here, so
            that the last query sees the last of them; what lies behind them is not read, and gets gradients of 0.
        page_table: int32 `(batch or sequences, pages of a sequence)`: k and v are pages
            `(pages, page_size, heads_kv, head_dim)` in any order, and row i has the numbers of those that are sequence
            i's, whose keys they hold one behind another; `seqused_k` says how many. Numbers are not read by the host:
            what is used of no page reads as zeros, and those behind what is used are not looked at.
        sinks: of each query head the logit of one more key, which every row of it sees and whose value is 0: it takes
            part in the softmax and so in LSE, and brings nothing to out. `(heads,)` on q's device, float32, bf16 or
            fp16 (with float64 inputs float64 too), any stride; as scores are after softmax_scale. -inf is as no sink,
            inf leaves keys nothing and has NaN for its gradient. It is computed with in float32, in which its gradient
            is summed, in a fixed order, and then rounded to its dtype.
        score_mod: a function `(score, batch, head, q_idx, kv_idx) -> score` on each score, scaled and in float32,
            before anything is masked, FlexAttention's: torch operations on tensors of no dimensions, traced once (see
            `flashzoo.ScoreMod`, and `flashzoo.score_mods` for those that have names). q_idx and kv_idx count from a
            sequence's first query and key, head is the query's, batch of packed sequences the sequence's number. -inf,
            and what is less than -2.36e38, is as masked, and a row of nothing else as one that sees no key. Tensors
            that it captured are read where they lie, on q's device, past their ends as 0; those that require grad have
            gradients, summed in float32.
        dropout_p: the share of the probabilities, at least 0 and less than 1, that is dropped on their way to v; the
            others are divided by `1 - dropout_p`. LSE is that without. It is taken to the nearest multiple of 2^-24
            below 1. 0.0 is as none, to the bit.
        dropout_seed: which are dropped is a function of it, of the query's batch, or of packed sequences the sequence's
            number, of its head, and of q_idx and kv_idx as a score_mod has them, and of nothing else: the same in every
            version, whatever else is in the call, and in the backward pass. An int, from -2^63 to 2^63 - 1, or an int64
            tensor of one element on q's device, which the host does not read, so that a CUDA graph may be replayed with
            another; None draws one from torch's generator of that device. Nothing depends on it where dropout_p is 0.
        max_seqlen_q, max_seqlen_k: no sequence is longer. Nothing depends on them but `explain`.

    Returns:
        out `(batch, seqlen_q, heads, head_dim_v)`, q's dtype (see out_dtype) and device, under autocast too; with
        `return_lse` the pair `(out, lse)`, lse in natural log, float32 (float64 for float64 inputs),
        `(batch, heads, seqlen_q)`. Both are differentiable, once, but for e4m3 inputs, which have no gradients. A row
        that sees no key gives 0, and -inf in lse, or its sink. Packed: `(total_q, heads, head_dim_v)` and
        `(heads, total_q)`; of nested tensors out is nested, with q's lengths.

    Raises:
        TypeError, ValueError: an argument is malformed; the text names it, what was expected and what was got.
        flashzoo.UnsupportedError: the named version, or under "auto" every version, has a reason against the call; or
            the version that answers is not right under what the call is under (`Spec.transforms`): forward-mode AD, or
            a transform of torch.func. `sdpa` is under vmap, grad and vjp, `standard` under vmap and jvp.
    """
    nested = getattr(q, "is_nested", False)
    if is_dynamo_compiling() and (nested or not isinstance(options.get("score_mod"), (ScoreMod, NoneType))):
        from flashzoo.untraced import untraced

        return untraced(attention, q, k, v, return_lse=return_lse, version=version, **options)
    if nested:
        return of_nested(attention, q, k, v, return_lse=return_lse, version=version, **options)
    rows = options.get("cu_seqlens_q") is not None and getattr(q, "ndim", 4) == 3
    if is_compiling():
        from flashzoo.call.traced import traced

        packed = rows and not on_caches(k)
        out, lse = traced(*(as_batch(q, k, v) if packed else (q, k, v)), return_lse, version, options)
        if packed:
            out, lse = as_rows(out, lse if return_lse else None)
    else:
        out, lse = called(q, k, v, return_lse, version, options, rows)
    return (out, lse) if return_lse else out


def recorded(q: Tensor, k: Tensor, v: Tensor, operands: Operands) -> bool:
    """Whether autograd records a call of these."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or operands.requires_grad)


def called(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool, version: str, options: dict[str, Any], rows: bool = False
) -> tuple[Tensor, Any]:
    """`attention` of tensors of four dimensions, or of three that are packed rows: out, and lse or None."""
    return run_planned(*planned_call(q, k, v, return_lse, version, options, rows), q, k, v)


def planned_call(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool, version: str, options: dict[str, Any], rows: bool = False
) -> tuple[Plan, Operands]:
    """What such a call's data don't decide, who answers it among that, and its operands, which are taken out of the
    options. Errors as `attention`."""
    asked = requested(version)
    operands, forms = taken(options)
    try:
        grad = recorded(q, k, v, operands)
        tensors = described_call(q, k, v)
    except (AttributeError, RuntimeError):  # no tensor, or one without strides
        check_tensors(q=q, k=k, v=v)
        raise
    try:
        return plan(asked, current(), return_lse, grad, rows, forms, *tensors, **options), operands
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        check_flags(return_lse=return_lse)
        fields_of(options)
        raise TypeError(f"expected ints as sizes, which torch.compile and torch.export trace; {error}") from error


def run_planned(planned: Plan, operands: Operands, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
    """The call that was planned: out, and lse or None."""
    problem = planned.problem
    if transforming():
        check_transforms({"q": q, "k": k, "v": v, **operands.tensors}, problem, planned.spec)
    if q.is_neg() or k.is_neg() or v.is_neg():
        q, k, v = resolved(q), resolved(k), resolved(v)
    if planned.negative:
        q = negated(q)
    if planned.as_batch:
        q, k, v = as_batch(q, k, v)
    result = planned.run(q, k, v, problem, operands.seeded(problem, q.device))
    if not planned.checked:
        lse_recorded = problem.grad and problem.lse and recorded(q, k, k, operands)
        planned.check(result, q, problem.lse or planned.joined, problem.grad, lse_recorded)
    return as_rows(*result) if planned.as_batch else result


@overload
def explain(q: Problem, *, version: str = ...) -> Explanation: ...
@overload
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = ...,
    version: str = ...,
    arch: int | None = ...,
    **options: Unpack[Options],
) -> Explanation: ...
@takes_options
def explain(
    q: Tensor | Problem,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: bool = False,
    version: str = "auto",
    arch: int | None = None,
    **options: Any,
) -> Explanation:
    """Who would answer a call of `attention` with these arguments, and every reason against the others.
    Runs none of them.

    Args:
        q, k, v: as in `attention`, on any device ("meta" too, which is asked about as the CPU where arch is None), or a
            `Problem` alone in place of all three.
        return_lse, version: as in `attention`.
        arch: ask about a GPU of this compute capability (90 for Hopper) in place of the tensors' own device.
        options: the other arguments of `attention`. A `Problem` says all that itself, and takes none but `version`.

    Returns:
        An `Explanation`; printing it gives a table.

    Raises:
        TypeError, ValueError: as `attention`; a `Problem` has other arguments than `version` beside it.
    """
    q, k, v, options = batch_of_one(q, k, v, options)
    if not isinstance(q, Problem):
        if k is None or v is None:
            raise TypeError(
                f"explain: k and v must be tensors where q is one, got {type(k).__name__} and {type(v).__name__}"
            )
        check_tensors(q=q, k=k, v=v)
        operands, forms = taken(options)
        grad = recorded(q, k, v, operands)
        return explain_problem(problem_of(described_call(q, k, v), return_lse, grad, forms, arch, options), version)
    given = {"k": k, "v": v, "arch": arch, "return_lse": return_lse or None}
    beside = [*(name for name, x in given.items() if x is not None), *options]
    if beside:
        raise TypeError(
            f"explain: expected a Problem alone, or with version=, got {', '.join(beside)} beside it; "
            "dataclasses.replace(problem, ...) changes what it asks for"
        )
    return explain_problem(q, version)


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotate: bool = True,
    smooth: bool = True,
    scales: Literal["block", "head"] = "block",
) -> Any:
    """fp16 or bf16 inputs of `attention` as e4m3 ones with descales:
    what `precision="fp8"` does, to be kept and used again.

    Args:
        q, k, v: as in `attention`, v as wide as q, head_dim a multiple of 16 up to 256.
        rotate: multiply q and k by one orthogonal matrix (signs and Hadamard), which leaves their products as they were
            and spreads an outlier over the whole head dim.
        smooth: subtract from k its mean, of 512 of its keys where there are more, which softmax does not see.
        scales: a scale for each 128 rows of a head ("block"), or one for each (batch, key/value head) ("head").

    Returns:
        `flashzoo.v3.quantize.Quantized`, a named tuple: q, k, v in e4m3; q_descale, k_descale, v_descale as `attention`
        takes them; lse_shift `(batch, heads, seqlen_q)`, float32, of which `softmax_scale` times is to be added to the
        LSE (None unless smooth). No gradients pass through it.

    Raises:
        TypeError, ValueError: an argument is malformed.
        NotImplementedError: it is being traced by torch.export. Under torch.compile the graph breaks here; with
            fullgraph=True, and in a strict export, that is torch's error.
    """
    if is_dynamo_compiling():
        from flashzoo.untraced import untraced

        return untraced(quantize, q, k, v, rotate=rotate, smooth=smooth, scales=scales)
    if is_compiling():
        raise NotImplementedError("flashzoo.quantize can't be traced: call it outside of what torch.export sees")
    check_tensors(q=q, k=k, v=v)
    check_data(q.device, k.device, v.device)
    check_flags(rotate=rotate, smooth=smooth)
    refuse_transforms("flashzoo.quantize", q=q, k=k, v=v)
    q, k, v = resolved(q), resolved(k), resolved(v)
    return import_module("flashzoo.v3.quantize").quantize(q, k, v, rotate=rotate, smooth=smooth, scales=scales)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    version: str = "auto",
) -> Tensor:
    """`attention` under the layout and names of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: `(batch, heads, seqlen_q, head_dim)`.
        key: `(batch, heads_kv, seqlen_k, head_dim)`.
        value: `(batch, heads_kv, seqlen_k, head_dim_v)`.
        is_causal: torch aligns it top-left and flashzoo bottom-right, so it is refused where seqlen_q != seqlen_k.
        scale, enable_gqa: as in torch.
        version: as in `attention`.

    Returns:
        out `(batch, heads, seqlen_q, head_dim_v)`.

    Dtypes, devices and strides are as in `attention`.

    Raises:
        ValueError: is_causal with seqlen_q != seqlen_k, or fewer key heads than query heads without enable_gqa.
        TypeError, ValueError, flashzoo.UnsupportedError: as `attention`.
    """
    check_tensors(query=query, key=key, value=value)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    if query.ndim == key.ndim == 4:
        if is_causal and query.shape[2] != key.shape[2]:
            raise ValueError(
                "is_causal: torch aligns it top-left, flashzoo.attention(causal=True) bottom-right; "
                f"expected equal lengths, got seqlen_q {query.shape[2]} and seqlen_k {key.shape[2]}"
            )
        if not enable_gqa and query.shape[1] != key.shape[1]:
            heads = f"{query.shape[1]} and {key.shape[1]}"
            raise ValueError(f"enable_gqa: expected True where head counts differ, got False with {heads} heads")
    inputs = (x.transpose(1, 2) if x.ndim == 4 else x for x in (query, key, value))
    return attention(*inputs, causal=is_causal, softmax_scale=scale, version=version).transpose(1, 2)
