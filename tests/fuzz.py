"""Seeded random calls of the whole public API, each held to an oracle of its own:
`python -m tests.fuzz`, or `make fuzz`.

1. A configuration is drawn (`configuration`): what kernels are specialised for. Then many calls of it (`calls`), whose
   lengths, heads, windows, values, scales and layouts differ: on a GPU what costs is to compile.
2. A call (`fuzz_call.Call`) is one line of text. Its tensors lie in one allocation, NaN wherever they are not.
3. `check` makes it and looks: refused if and only if its Spec says so; forms; out, LSE and gradients within what
   `fuzz_oracle` works out; the same bits twice where deterministic; not one byte of the allocation changed.
4. Processes do that side by side. One that dies or hangs is a finding of the call that it was at, and is replaced.

A finding is printed as the line, which `python -m tests.fuzz "LINE"` repeats, and what is wrong. Kept in
`tests/fuzz_found.txt` it is a case of `tests/test_fuzz.py`. A line gives the same numbers on every machine of one kind
of device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does, for `python -m tests.fuzz`

import torch
from fuzz_call import (
    ALIGNED,
    LAYOUTS,
    MASKS,
    MASKS_BY_HEAD,
    UNALIGNED,
    Call,
    Device,
    Operands,
    block_mask,
    cu_seqlens,
    operands,
    parsed,
)
from fuzz_oracle import SCORES, expected, shares, worst
from torch import Tensor

import flashzoo
from flashzoo import Spec, UnsupportedError
from flashzoo.call.problem import FEATURES, QUANTIZABLE
from flashzoo.workloads import TORCH_DTYPES, VALUES, in_pages

FOUND = Path(__file__).parent / "fuzz_found.txt"
CALLS = {"cuda": 100, "cpu": 8}
"""Calls of a configuration."""
WORKER_BYTES = 8 << 30
"""Of a GPU's memory for each process: `LARGEST` scores in float64, some thirty times over, and the poison."""
LARGEST = {"cuda": 1 << 23, "cpu": 1 << 15}
"""Scores of a call, all heads together."""
INTERPRETED = 1 << 11
"""The same where Triton's interpreter runs the kernels."""
POISON_EVERY = 25
"""Calls after which what the CUDA caching allocator holds is NaN again."""
HANGS_S = 150
"""Longer than any call takes, what it compiles included."""

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
    lse = asks("lse", 0.5)
    in_e4m3 = entry == "quantize" or (dtype == "e4m3" and entry != "sdpa")
    unrounded = dtype in QUANTIZABLE and not in_e4m3 and asks("out_dtype", 0.2)
    call = Call(
        *(version, dtype, 1, 1, 1, 1, 1, head_dim, head_dim_v, entry, precision, causal),
        lse=lse,
        deterministic=asks("deterministic", 0.2),
        grad=grad,
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
    if entry == "attention" and asks("sinks", 0.25):
        of_q = ("fp64",) if dtype == "fp64" else ()
        grad = grad and random.choice((grad, f"{grad}s", f"{grad}s", "s"))
        call = replace(call, sinks=random.choice(("fp32", "bf16", "fp16", *of_q)), grad=grad)
    if packed and not wild and spec.unsupported(call.problem(device)):  # not everybody packs what is to be quantised
        call = replace(call, lengths=None, used=None)
    return Configuration(call, sides, _layouts(random), wild)


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
    if plain.dtype == "e4m3" and plain.entry != "sdpa":
        kinds = ("none", "head", "block", "block") if plain.lengths is None else ("none", "head")
        descales = tuple(
            kind if kind == "none" else f"{kind}/{random.choice(list(LAYOUTS))}" for kind in random.choices(kinds, k=3)
        )
    rows: dict[str, Any] = {}
    if plain.lengths is not None:
        batch, count = 1, random.choice((1, 2, 3, 5, 30))
        keys = rows["lengths"] = _lengths(random, lengths[0], count)
        if not equal:
            keys = rows["lengths_k"] = _lengths(random, lengths[1], count)
        if plain.used is not None:
            rows["used"] = tuple(random.choice((0, n, random.randint(0, n))) for n in keys)
    elif plain.used is not None:
        rows["used"] = tuple(random.choice((0, lengths[1], random.randint(0, lengths[1]))) for _ in range(batch))
    if plain.page_size is not None:
        lengths[1] = -(-lengths[1] // plain.page_size) * plain.page_size
        if rows.get("used") is not None:
            rows["used"] = tuple(random.choice((0, lengths[1], random.randint(0, lengths[1]))) for _ in range(batch))
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


# Making a call, and looking at what comes back.


@dataclass
class Outcome:
    """What became of a call.

    Attributes:
        used: for each tensor the largest share of its bound, over elements and over blocks of rows.
        flaws: what is wrong, in words; none where the call is right.
        refused: it was refused, as its Spec says.
    """

    used: dict[str, float] = field(default_factory=dict)
    flaws: list[str] = field(default_factory=list)
    refused: bool = False


def check(call: Call, device: Device) -> Outcome:
    """Make the call, twice where it is deterministic, and hold it to everything that is promised."""
    refusal = spec_of(call.version).unsupported(call.problem(device))
    given = operands(call, device)
    before = given.storage.clone()
    mask, seen = block_mask(call, device) if call.mask else (None, None)
    try:
        found = answer(call, given, mask)
        again = answer(call, given, mask) if call.deterministic else None
    except UnsupportedError as error:
        return Outcome(refused=True) if refusal else Outcome(flaws=[f"refused, though its Spec takes it: {error}"])
    except Exception as error:  # whatever it is: that is what is looked for
        return Outcome(flaws=[f"{type(error).__name__}: {error}"])
    if refusal:
        return Outcome(flaws=[f"computed, though its Spec says: {'; '.join(refusal)}"])
    flaws = list(_misshapen(call, found))
    if flaws:
        return Outcome(flaws=flaws)
    answers = expected(call, given, seen)
    used = shares(found, answers)
    numbers = [share for pair in used.values() for share in pair] + [(given.storage != before).any().double()]
    *flat, changed = torch.stack(numbers).tolist()  # the one synchronisation
    outcome = Outcome({name: _top(flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(used)})
    for name, share in outcome.used.items():
        if not share <= 1:
            outcome.flaws.append(f"{name} takes {share:.3g} of its bound, {worst(name, found[name], answers[name])}")
    if changed:
        outcome.flaws.append("an input, or memory around one, was written to")
    for name in () if again is None else found:
        if not torch.equal(_bits(found[name]), _bits(again[name])):
            outcome.flaws.append(f"{name} has other bits in a second run, though deterministic=True")
    return outcome


def answer(call: Call, given: Operands, mask: Any) -> dict[str, Tensor]:
    """out, lse and gradients, as far as the call asks for them, in the shapes of `flashzoo.attention`."""
    leaves = {
        name: x.detach().requires_grad_(name in call.grad)
        for name, x in zip("qkv", (given.q, given.k, given.v), strict=True)
    }
    inputs = list(leaves.values())
    if given.sinks is not None:
        leaves["s"] = given.sinks.detach().requires_grad_("s" in call.grad)
    options: dict[str, Any] = {"version": call.version, "softmax_scale": call.scale, "causal": call.causal}
    if call.entry == "sdpa":
        turned = (x.transpose(1, 2) for x in inputs)
        gqa = call.group > 1
        out = flashzoo.sdpa(
            *turned, is_causal=call.causal, scale=call.scale, enable_gqa=gqa, version=call.version
        ).transpose(1, 2)
        lse = None
    else:
        options |= {
            "window_size": call.window,
            "deterministic": call.deterministic,
            "precision": call.precision,
            "block_mask": mask,
        }
        if call.out_dtype is not None:
            options["out_dtype"] = TORCH_DTYPES[call.out_dtype]
        descales, shift = given.descales, None
        if call.entry == "quantize":
            random = Random(call.seed)
            how = {
                "rotate": random.random() < 0.7,
                "smooth": random.random() < 0.7,
                "scales": random.choice(("block", "head")),
            }
            *inputs, q_scale, k_scale, v_scale, shift = flashzoo.quantize(*inputs, **how)
            descales = (q_scale, k_scale, v_scale)
        options |= dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True)) | call.on_scores
        options |= {**cu_seqlens(call, given.q.device), "sinks": leaves.get("s")}
        if call.page_size is not None:
            k, v, options["page_table"] = in_pages(call.problem(given.q.device), *inputs[1:], seed=call.seed)
            inputs = [inputs[0], k, v]
        out, lse = (
            flashzoo.attention(*inputs, return_lse=True, **options)
            if call.lse
            else (flashzoo.attention(*inputs, **options), None)
        )
        if lse is not None and shift is not None:
            lse = lse + call.softmax_scale * shift
    found = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if call.grad:
        through = {
            "out": [(out, given.dout)],
            "lse": [(lse, given.dlse)],
            "both": [(out, given.dout), (lse, given.dlse)],
        }[call.through]
        wanted = [leaves[name] for name in call.grad]
        gradients = torch.autograd.grad([x for x, _ in through], wanted, [gradient for _, gradient in through])
        found |= {
            "dsinks" if name == "s" else f"d{name}": gradient
            for name, gradient in zip(call.grad, gradients, strict=True)
        }
    return found


def _misshapen(call: Call, found: dict[str, Tensor]) -> Iterator[str]:
    stored = TORCH_DTYPES[call.dtype]
    of_keys = (call.batch, call.seqlen_k, call.heads_kv)
    forms = {
        "out": ((call.batch, call.seqlen_q, call.heads, call.head_dim_v), call.stored),
        "lse": ((call.batch, call.heads, call.seqlen_q), torch.float64 if call.dtype == "fp64" else torch.float32),
        "dq": ((call.batch, call.seqlen_q, call.heads, call.head_dim), stored),
        "dk": ((*of_keys, call.head_dim), stored),
        "dv": ((*of_keys, call.head_dim_v), stored),
        "dsinks": ((call.heads,), TORCH_DTYPES.get(call.sinks)),
    }
    for name, x in found.items():
        if (tuple(x.shape), x.dtype) != forms[name]:
            yield f"{name} is {tuple(x.shape)} {x.dtype}, expected {forms[name][0]} {forms[name][1]}"


def _bits(x: Tensor) -> Tensor:
    return x.flatten().view(torch.uint8)  # of an empty tensor too, whose strides may be anything


def _top(*numbers: float) -> float:
    """The largest, of which NaN is one beyond all."""
    return max(math.inf if math.isnan(x) else x for x in numbers)


# Many processes.


def poison(device: str) -> None:
    """What is not written next reads as NaN."""
    if device == "cpu":
        torch.use_deterministic_algorithms(True)  # fills every empty tensor
        return
    blocks = [torch.full((1 << power - 2,), torch.nan, device=device) for power in range(9, 27) for _ in range(3)]
    del blocks


def work(pipe: Connection, seed: int, versions: list[str], device: str) -> None:
    """Calls of the configurations whose numbers come, each with how many of its calls to leave out:
    the line, then its outcome."""
    torch.set_num_threads(1)
    os.environ.setdefault("FLASHZOO_CACHE_DIR", str(Path(".pytest_cache", "kernels").absolute()))
    while (task := pipe.recv()) is not None:
        number, skipped = task
        random = Random(f"{seed}/{number}")
        drawn = calls(random, configuration(random, versions, device), device)
        for nth in range(CALLS[device]):
            call = next(drawn)
            if nth < skipped:
                continue
            if nth % POISON_EVERY == 0:
                poison(device)
            pipe.send((number, nth, str(call)))
            pipe.send(check(call, device))
            if device == "cuda":
                torch.cuda.synchronize()  # an error that stays ends this process behind its call
        pipe.send(None)


@dataclass
class Worker:
    """A process, and the call that it is at."""

    process: Any
    pipe: Connection
    number: int = 0
    nth: int = -1
    line: str = ""
    since: float = 0.0


class Summary:
    """Calls, refusals, findings and the largest shares of bounds, by version."""

    def __init__(self, verbose: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.used: dict[str, dict[str, float]] = {}
        self.worst: dict[str, str] = {}
        self.findings: list[dict[str, Any]] = []
        self.begun = time.monotonic()
        self._shown = 0.0

    def add(self, line: str, outcome: Outcome) -> None:
        """What became of one more call; a finding is printed."""
        version = line.split()[0]
        self.calls[version] += 1
        self.refused[version] += outcome.refused
        used = self.used.setdefault(version, {})
        for name, share in outcome.used.items():
            if share > used.get(name, -1.0):
                used[name] = share
                if share >= max(used.values()):
                    self.worst[version] = line
        if outcome.flaws:
            self.findings.append({"line": line, "flaws": outcome.flaws})
            print("\n".join((f"\r{line}", *(f"    {flaw}" for flaw in outcome.flaws))), flush=True)
        self._progress()

    def _progress(self) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._shown > 0.5:
            self._shown, n = now, self.calls.total()
            rate = n / (now - self.begun)
            print(f"\r{n} calls, {rate:.1f}/s, {len(self.findings)} findings ", end="", file=sys.stderr, flush=True)

    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        of = {
            name: {"calls": n, "refused": self.refused[name], "used": self.used[name], "worst": self.worst.get(name)}
            for name, n in sorted(self.calls.items())
        }
        seconds = round(time.monotonic() - self.begun, 1)
        return {"calls": self.calls.total(), "seconds": seconds, "versions": of, "findings": self.findings}

    def __str__(self) -> str:
        record = self.record()
        lines = [f"{record['calls']} calls in {record['seconds']} s, {len(self.findings)} findings"]
        for name, of in record["versions"].items():
            used = ", ".join(f"{tensor} {share:.2f}" for tensor, share in of["used"].items())
            lines.append(f"  {name:<12}{of['calls']:>6} calls {of['refused']:>5} refused; of its bound at most: {used}")
        return "\n".join(lines)


def run(seed: int, versions: list[str], device: str, jobs: int, seconds: float, most: int) -> Summary:
    """So many calls, or as many as there is time for, in so many processes."""
    context, summary = get_context("spawn"), Summary()
    number, stop = 0, summary.begun + seconds

    def started() -> Worker:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, seed, versions, device), daemon=True)
        process.start()
        there.close()
        return Worker(process, here)

    def hand_out(worker: Worker, number: int, skipped: int = 0) -> None:
        worker.number, worker.nth, worker.line, worker.since = number, skipped - 1, "", time.monotonic()
        worker.pipe.send((number, skipped))

    workers = [started() for _ in range(jobs)]
    for number, worker in enumerate(workers):
        hand_out(worker, number)
    while time.monotonic() < stop and summary.calls.total() < most:
        ready = wait([worker.pipe for worker in workers], timeout=1)
        for i, worker in enumerate(workers):
            lost = ""
            if worker.pipe in ready:
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    worker.process.join()
                    lost = f"the process died, exit code {worker.process.exitcode}"
                else:
                    worker.since = time.monotonic()
                    if message is None:
                        number += 1
                        hand_out(worker, number)
                    elif isinstance(message, Outcome):
                        summary.add(worker.line, message)
                    else:
                        worker.number, worker.nth, worker.line = message
            elif time.monotonic() - worker.since > HANGS_S:
                worker.process.kill()
                lost = f"no answer in {HANGS_S} s"
            if lost:
                summary.add(worker.line or f"none: configuration {worker.number}", Outcome(flaws=[lost]))
                if summary.calls.total() >= most:
                    break
                workers[i] = started()
                hand_out(workers[i], worker.number, worker.nth + 1)
    for worker in workers:
        worker.process.kill()
    return summary


def main(arguments: list[str] | None = None) -> int:
    """The command: 0 where nothing was found."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Random calls of flashzoo, held to an oracle of their own."
    )
    parser.add_argument(
        "lines", nargs="*", metavar="LINE", help="make these calls, as a finding was printed, and no others"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: %(default)s)")
    parser.add_argument(
        "--calls", type=int, default=sys.maxsize, help="how many, at most (default: as many as there is time for)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, help="processes (default: one for each core, on a GPU as many as its memory holds)"
    )
    parser.add_argument(
        "--versions", default=",".join((*flashzoo.versions(), "auto")), help="of these alone (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help=f"add what is found to tests/{FOUND.name}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there")
    chosen = parser.parse_args(arguments)
    if chosen.lines:
        summary = Summary()
        for line in chosen.lines:
            poison(device)
            outcome = check(parsed(line), device)
            summary.add(line, outcome)
            print(line, "refused, as it should be" if outcome.refused else outcome.used, sep="\n    ")
    else:
        jobs = chosen.jobs or os.cpu_count() or 1
        if device == "cuda" and not chosen.jobs:
            jobs = max(1, min(jobs, torch.cuda.get_device_properties(0).total_memory // WORKER_BYTES))
        versions = taken(chosen.versions.split(","), device)
        summary = run(chosen.seed, versions, device, jobs, chosen.seconds, chosen.calls)
        print(f"\r{summary}")
    if chosen.json:
        chosen.json.write_text(json.dumps(summary.record(), indent=1))
    if chosen.keep:
        with FOUND.open("a") as file:
            file.writelines(f"{finding['line']}\n" for finding in summary.findings)
    return 1 if summary.findings else 0


if __name__ == "__main__":
    sys.exit(main())
