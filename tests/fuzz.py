"""Seeded random calls of the whole public API, each held to an oracle of its own:
`python -m tests.fuzz`, or `make fuzz`.

1. A configuration is drawn (`fuzz_draw`): what kernels are specialised for. Then many calls of it, whose
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
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does, for `python -m tests.fuzz`

import torch
from fuzz_call import (
    Call,
    Device,
    Operands,
    block_mask,
    cu_seqlens,
    operands,
    parsed,
)
from fuzz_draw import calls, configuration, spec_of, taken
from fuzz_dropout import seed_of
from fuzz_oracle import expected, shares, worst
from fuzz_scores import KINDS as SCORE_MODS
from fuzz_scores import sequences
from torch import Tensor

import flashzoo
from flashzoo import UnsupportedError
from flashzoo.dtypes import TORCH_DTYPES
from flashzoo.inputs import in_pages

FOUND = Path(__file__).parent / "fuzz_found.txt"
CALLS = {"cuda": 100, "cpu": 8}
"""Calls of a configuration."""
WORKER_BYTES = 8 << 30
"""Of a GPU's memory for each process: `LARGEST` scores in float64, some thirty times over, and the poison."""
POISON_EVERY = 25
"""Calls after which what the CUDA caching allocator holds is NaN again."""
HANGS_S = 150
"""Longer than any call takes, what it compiles included."""


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
    if given.read is not None:
        leaves["m"] = given.read.detach().requires_grad_("m" in call.grad)
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
            "fast_accum": call.fast_accum,
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
        if call.dropout:
            seed = seed_of(call)
            as_tensor = torch.tensor(seed, device=given.q.device) if call.seed % 2 else seed
            options |= {"dropout_p": call.dropout, "dropout_seed": as_tensor}
        if call.score:
            function, read = SCORE_MODS[call.score].function, leaves.get("m")
            options["score_mod"] = lambda s, b, h, i, j: function(s, b, h, i, j, lambda at: read[at])
        if call.page_size is not None:
            k, v, options["page_table"] = in_pages(call.problem(given.q.device), *inputs[1:], seed=call.seed)
            inputs = [inputs[0], k, v]
        if call.packed_q:
            inputs[0] = inputs[0][0]
        out, lse = (
            flashzoo.attention(*inputs, return_lse=True, **options)
            if call.lse
            else (flashzoo.attention(*inputs, **options), None)
        )
        if call.packed_q:
            out, lse = out[None], lse if lse is None else lse[None]
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
            {"s": "dsinks", "m": "dread"}.get(name, f"d{name}"): gradient
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
    if call.score and (shape := SCORE_MODS[call.score].shape) is not None:
        of = shape(sequences(call), call.heads, call.seqlen_q, call.seqlen_k)
        forms["dread"] = (of, SCORE_MODS[call.score].dtype)
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
