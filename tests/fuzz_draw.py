"""Which calls the fuzzer makes: a configuration, then calls of it, drawn by a seed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

from fuzz_call import (
    ALIGNED,
    LAYOUTS,
    MASKS,
    MASKS_BY_HEAD,
    UNALIGNED,
    Call,
)
from fuzz_oracle import SCORES
from fuzz_scores import KINDS as SCORE_MODS

import flashzoo
from flashzoo import Spec
from flashzoo.call.problem import FEATURES, QUANTIZABLE
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.inputs import VALUES

LARGEST = {"cuda": 1 << 23, "cpu": 1 << 15}
"""Scores of a call, all heads together."""
INTERPRETED = 1 << 11
"""The same where Triton's interpreter runs the kernels."""
EDGES = (
    1,
    2,
    3,
    8,
    15,
    16,
    17,
    31,
    33,
    63,
    64,
    65,
    79,
    81,
    100,
    113,
    127,
    128,
    129,
    144,
    176,
    177,
    191,
    192,
    193,
    255,
    256,
    257,
    383,
    385,
)
"""Lengths at and beside the edges of tiles."""
HEAD_DIMS = (64,) * 4 + (128,) * 4 + (16, 24, 32, 40, 80, 96, 96, 256, 256) + (8, 72, 112, 192, 1, 5, 59)
PAIRS = ((192, 128), (192, 128), (64, 128), (128, 64), (40, 96), (256, 64), (96, 256))
"""Head dims of q and v where those differ."""
WEIGHTS = {"v3": 4, "v3_fp8": 4, "v2": 3, "blocksparse": 3, "v1": 2}
"""How often a version is drawn; 1.5 for others. Those whose kernels depend on more are drawn more often."""
REFUSED = 0.04
"""The share of configurations that may ask for what nobody declared."""
CAN_EXPLODE = ("x30", "large_scores", "low_scores", "ramp", "sink")
"""Values of which nothing is left to check once q and k are quantised: an e4m3 unit of a score of 20 is more than 1."""


# Drawing.


@dataclass(frozen=True)
class Configuration:
    """What kernels are specialised for.

    Attributes:
        call: its fields but sizes, windows, scale, values, layouts and seed.
        sides: which sides of the window are bounded.
        layouts: what each of q, k, v and dout may lie in.
        wild: it may be refused.
    """

    call: Call
    sides: tuple[bool, bool]
    layouts: tuple[tuple[str, ...], ...]
    wild: bool


def taken(versions: list[str], device: str) -> list[str]:
    """Of these versions, and "auto", those that take anything here."""
    known = flashzoo.versions()
    plain = {
        name: Call(name, (_dtypes(known[name], device) or ("none",))[0], 1, 64, 64, 1, 1, 64, 64)
        for name in versions
        if name != "auto"
    }
    here = [
        name
        for name, call in plain.items()
        if call.dtype != "none" and not known[name].unsupported(call.problem(device))
    ]
    return here + (["auto"] if "auto" in versions else [])


def spec_of(version: str) -> Spec:
    """What a version declares; "auto" takes what `standard` does."""
    return flashzoo.versions()["standard" if version == "auto" else version]


def _dtypes(spec: Spec, device: str) -> tuple[str, ...]:
    return spec.cpu_dtypes if device == "cpu" else spec.dtypes


def configuration(random: Random, versions: list[str], device: str) -> Configuration:
    """One that some of these versions takes on this device, but for a share of `REFUSED`."""
    wild = random.random() < REFUSED
    version = random.choices(versions, [WEIGHTS.get(name, 1.5) for name in versions])[0]
    if wild and random.random() < 0.5:
        version = random.choice(list(flashzoo.versions()))
    spec = spec_of(version)
    ways = [(dtype, None) for dtype in (TORCH_DTYPES if wild else _dtypes(spec, device))]
    ways += [(dtype, "fp8") for dtype in (("fp16", "bf16") if wild else spec.quantizes)]
    dtype, precision = random.choice(ways)
    entry = random.choices(("attention", "sdpa", "quantize"), (0.8, 0.1, 0.1))[0]
    head_dim = random.choice([d for d in HEAD_DIMS if wild or d in spec.head_dims])
    if entry == "quantize":
        # bf16 is more than Triton's interpreter reads
        dtype, precision = "fp16" if device == "cpu" else random.choice(("fp16", "bf16")), None
        if "e4m3" not in _dtypes(spec, device) or head_dim % 16:
            entry, (dtype, precision) = "attention", random.choice(ways)
    if entry == "sdpa":  # which knows no precision
        plain = [way for way in ways if way[1] is None]
        entry, (dtype, precision) = ("sdpa", random.choice(plain)) if plain else ("attention", (dtype, precision))
    features, grad = spec.features, ""
    if wild:
        features = frozenset(FEATURES)
    # What `quantize` gives is recorded by nobody.
    if entry != "quantize" and (wild or (spec.backward is not None and dtype != "e4m3")) and random.random() < 0.65:
        grad = random.choice(("qkv", "qkv", "qkv", "q", "k", "v", "qk", "qv", "kv"))
        features = features if wild else features & (spec.backward or frozenset())

    def asks(name: str, share: float) -> bool:
        return name in features and entry != "sdpa" and random.random() < share

    head_dim_v = head_dim
    if entry != "quantize" and "head_dim_v" in features and random.random() < 0.2:
        head_dim, head_dim_v = random.choice(PAIRS)
    causal = "causal" in features and random.random() < 0.45
    sides = random.choice(((True, False), (False, True), (True, True))) if asks("window", 0.3) else (False, False)
    mask = ""
    if asks("block_mask", 0.7 if version == "blocksparse" else 0.35):
        kind, sizes = random.choice(MASKS), random.choice(("128x128", "128x128", "128x64", "64x128", "64x64"))
        mask = f"{kind}:{sizes}:{random.choice(('', 'h', 'bh', 'b')) if kind in MASKS_BY_HEAD else ''}"
        causal, sides = causal and random.random() < 0.3, sides if random.random() < 0.3 else (False, False)
    fp8_kv = dtype in QUANTIZABLE and precision is None and not grad and entry == "attention" and asks("fp8_kv", 0.3)
    lse = asks("lse", 0.5)
    in_e4m3 = entry == "quantize" or (dtype == "e4m3" and entry != "sdpa")
    unrounded = dtype in QUANTIZABLE and not in_e4m3 and asks("out_dtype", 0.2)
    call = Call(
        *(version, dtype, 1, 1, 1, 1, 1, head_dim, head_dim_v, entry, precision, causal),
        lse=lse,
        deterministic=asks("deterministic", 0.2),
        grad=grad,
        dtype_kv="e4m3" if fp8_kv else None,
        through=random.choice(("out", "both", "both", "lse")) if lse and grad else "out",
        out_dtype=random.choice((None, "bf16", "fp16")) if in_e4m3 else "fp32" if unrounded else None,
        lengths=() if (packed := not mask and entry == "attention" and asks("packed", 0.3)) else None,
        used=()
        if not mask and entry == "attention" and asks("used_k" if packed else "cache", 0.4 if packed else 0.3)
        else None,
        page_size=random.choice((1, 7, 16, 64))
        if not mask and not packed and entry == "attention" and asks("paged", 0.3)
        else None,
        scored=tuple(f"{name}:{random.choice(values)}" for name, (values, _) in SCORES.items() if asks(name, 0.3)),
        mask=mask,
    )
    if not mask and not packed and entry == "attention" and asks("packed_q", 0.3):
        call = replace(call, lengths=(), packed_q=True)
    if entry == "attention" and asks("dropout_p", 0.25):
        call = replace(call, dropout=random.choice((0.1, 0.5, 0.9)))
    if (in_e4m3 or (precision and entry == "attention")) and asks("fast_accum", 0.4):
        call = replace(call, fast_accum=True)
    if entry == "attention" and asks("score_mod", 0.3):
        score = random.choice(list(SCORE_MODS))
        if grad and SCORE_MODS[score].shape is not None:
            grad = random.choice((grad, f"{grad}m", f"{grad}m", "m"))
        call = replace(call, score=score, grad=grad)
    if entry == "attention" and asks("sinks", 0.25):
        of_q = ("fp64",) if dtype == "fp64" else ()
        grad = grad and random.choice((grad, f"{grad}s", f"{grad}s", "s"))
        call = replace(call, sinks=random.choice(("fp32", "bf16", "fp16", *of_q)), grad=grad)
    if packed and not wild and spec.unsupported(call.problem(device)):  # not everybody packs what is to be quantised
        call = replace(call, lengths=None, used=None)
    layouts = _layouts(random)
    if entry == "attention" and dtype != "fp32" and not fp8_kv and asks("mla", 0.15):
        widths = random.choice(spec.latent_dims or [pair for pair in PAIRS if pair[0] > pair[1]])
        call = replace(call, latent=True, head_dim=widths[0], head_dim_v=widths[1])
    return Configuration(call, sides, layouts, wild)


def _layouts(random: Random) -> tuple[tuple[str, ...], ...]:
    """Triton specialises a kernel for each stride and address that 16 divides: so all aligned, one not, or none."""
    how = random.choices(("aligned", "one", "none", "any"), (0.45, 0.3, 0.15, 0.1))[0]
    if how == "aligned":
        return (tuple(ALIGNED),) * 4
    if how == "one":
        odd = random.randrange(4)
        return tuple((random.choice(list(UNALIGNED)),) if i == odd else ("bshd", "bhsd") for i in range(4))
    return tuple((random.choice(list(UNALIGNED if how == "none" else LAYOUTS)),) for _ in range(4))


def calls(random: Random, drawn: Configuration, device: str) -> Iterator[Call]:
    """Calls of a configuration, without an end."""
    spec = spec_of(drawn.call.version)
    while True:
        call = _call(random, drawn, device)
        kind, by = call.mask.partition(":")[0], call.mask.rpartition(":")[2]
        nearest = [call]
        if call.mask and not drawn.wild:  # `Spec.check` may refuse sizes, or masks beside what else is asked
            nearest += [replace(call, mask=f"{kind}:128x128:{by}"), replace(call, mask=f"{kind}:128x128:")]
            nearest += [replace(x, deterministic=False) for x in nearest]
        if "m" in call.grad and not drawn.wild:  # not everybody keeps the order of what is summed
            nearest += [replace(x, deterministic=False) for x in nearest]
        if call.score and not drawn.wild:
            nearest += [replace(x, score="", grad=x.grad.replace("m", "")) for x in nearest]
        if call.dropout and not drawn.wild:
            nearest += [replace(x, dropout=0.0) for x in nearest]
        if call.scored and not drawn.wild:
            nearest += [replace(x, scored=()) for x in nearest]
        yield next((x for x in nearest if not spec.unsupported(x.problem(device))), call)


def _call(random: Random, drawn: Configuration, device: str) -> Call:
    plain, spec = drawn.call, spec_of(drawn.call.version)
    features = spec.features if not plain.grad else spec.features & (spec.backward or frozenset())
    group = random.choice((1, 1, 2, 3, 4, 8)) if "gqa" in features or drawn.wild else 1
    batch, heads_kv = random.choice((1, 1, 2, 3, 4)), random.choice((1, 2, 3))
    lengths = [_length(random, device) for _ in range(2)]
    if "cross" not in features or random.random() < 0.3 or (plain.entry == "sdpa" and plain.causal):
        lengths[1] = lengths[0]
    if (plain.mask or plain.entry == "quantize") and 0 in lengths:
        lengths = [max(1, x) for x in lengths]
    interpreted = device == "cpu" and ("triton" in spec.requires or plain.entry == "quantize")
    largest = INTERPRETED if interpreted else LARGEST[device]
    equal = lengths[0] == lengths[1]
    while batch * heads_kv * group * lengths[0] * lengths[1] > largest:
        if batch > 1:
            batch -= 1
        elif group * heads_kv > 4 or (interpreted and group * heads_kv > 2):
            group, heads_kv = (group // 2, heads_kv) if group > 1 else (group, heads_kv - 1)
        else:
            lengths = [-(-x * 2 // 3) if equal or x == max(lengths) else x for x in lengths]
    window = None
    if any(drawn.sides):
        far = sum(lengths)
        left, right = (
            random.choice((0, 1, random.randint(0, 40), random.randint(0, max(1, lengths[1])), far + 9))
            if side
            else random.choice((None, -1))
            for side in drawn.sides
        )
        window = (left, right)
    values, scale = _values(random, plain), None
    if values != "large_scores" and random.random() < 0.35:
        root = 1 / math.sqrt(plain.head_dim)
        fp8 = plain.dtype == "e4m3" or plain.precision == "fp8" or plain.entry == "quantize"
        scale = random.choice((0.0, 0.5 * root, -root, 0.01, *(() if fp8 else (0.5, 1.0, -0.3))))
        scale = None if scale == 0 and _known_fault(plain, "any_finite_scale") else scale
    layouts = tuple(random.choice(names) for names in drawn.layouts)
    descales = ("none",) * 3
    if "e4m3" in (plain.dtype, plain.dtype_kv) and plain.entry != "sdpa":
        kinds = ("none", "head", "block", "block") if plain.lengths is None else ("none", "head")
        if plain.packed_q and plain.dtype_kv:
            kinds = ("none", "head", "block")
        descales = tuple(
            kind if kind == "none" else f"{kind}/{random.choice(list(LAYOUTS))}" for kind in random.choices(kinds, k=3)
        )
        descales = descales if plain.dtype == "e4m3" else ("none", *descales[1:])
    rows: dict[str, Any] = {}
    if plain.lengths is not None:
        batch, count = 1, random.choice((1, 2, 3, 5) if plain.packed_q else (1, 2, 3, 5, 30))
        keys = rows["lengths"] = _lengths(random, lengths[0], count)
        if plain.packed_q:
            keys = (lengths[1],) * count
        elif not equal:
            keys = rows["lengths_k"] = _lengths(random, lengths[1], count)
        if plain.used is not None:
            rows["used"] = tuple(random.choice((0, n, random.randint(0, n))) for n in keys)
    elif plain.used is not None:
        rows["used"] = tuple(random.choice((0, lengths[1], random.randint(0, lengths[1]))) for _ in range(batch))
    if plain.page_size is not None:
        lengths[1] = -(-lengths[1] // plain.page_size) * plain.page_size
        if rows.get("used") is not None:
            rows["used"] = tuple(random.choice((0, lengths[1], random.randint(0, lengths[1]))) for _ in rows["used"])
    sizes = (batch, *lengths, heads_kv * group, heads_kv)
    names = ("batch", "seqlen_q", "seqlen_k", "heads", "heads_kv")
    more: dict[str, Any] = dict(zip(names, sizes, strict=True))
    return replace(
        plain,
        **more,
        **rows,
        window=window,
        scale=scale,
        values=values,
        layouts=layouts,
        descales=descales,
        seed=random.randrange(1 << 24),
    )


def _lengths(random: Random, total: int, count: int) -> tuple[int, ...]:
    """Lengths of so many sequences, of which some may have none, that leave rows over at times."""
    total = random.choice((total, random.randint(0, total)))
    cuts = sorted(
        random.choice((0, total, random.randint(0, total), random.randint(0, total))) for _ in range(count - 1)
    )
    return tuple(end - first for first, end in pairwise((0, *cuts, total)))


def _length(random: Random, device: str) -> int:
    if random.random() < 0.01:
        return 0
    if device == "cuda" and random.random() < 0.03:
        return random.randint(600, 2050)
    return random.choice(EDGES) if random.random() < 0.5 else random.randint(1, 600)


def _values(random: Random, call: Call) -> str:
    if random.random() < 0.4:
        return "randn"
    kinds = list(VALUES)
    if call.precision == "fp8" or call.entry == "quantize":
        kinds = [kind for kind in kinds if kind not in CAN_EXPLODE]
    elif call.dtype == "e4m3" or (call.grad and _known_fault(call, "large_scores")):
        kinds.remove("large_scores")
    return random.choice(kinds)


def _known_fault(call: Call, what: str) -> bool:
    """Whether a fault of torch's own kernels, which "auto" may choose, is declared of such calls:
    those are not drawn."""
    return call.version in ("sdpa", "auto") and any(what in where for _, where, _ in spec_of("sdpa").faults)
