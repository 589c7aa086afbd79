"""Functions on scores as a Hopper kernel writes them, in numbers of torch's in place of registers: what a thread's rows
and columns are given is what the function gives there, and its derivative that of torch's autograd. And what a launch
gives such a kernel to read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from test_scores import everything
from torch import Tensor

from flashzoo import Problem, ScoreMod, score_mods
from flashzoo._cute.arguments import Packer
from flashzoo._cute.driver import TensorMap
from flashzoo._cute.hopper.scores import AT_LEAST_2, SMALL, TANH, polynomial, tanh_of_small
from flashzoo._cute.scoring import parameters_of
from flashzoo.call.forms import SOFTCAP, MaskForm, ScoreForm
from flashzoo.call.operands import Operands
from flashzoo.scores.evaluate import TORCH_DTYPES, evaluated
from flashzoo.scores.factors import factored
from flashzoo.scores.program import Program, Step
from flashzoo.scores.trace import with_gradient
from flashzoo.scores.walk import Index, Walk
from flashzoo.v3 import launch
from flashzoo.v3.explain import refusals
from flashzoo.v3.programs import arguments_of

SCALE, FIRST = 0.25, 20
COLUMNS = (0, 1, 8, 9, 16)
ROWS = {"h": (1, 0), "q": (29, 9), "k": (7, 29)}
BIAS = torch.linspace(-1, 1, 2 * 40 * 40).view(2, 40, 40)


@dataclass
class InNumbers:
    """A language of torch's numbers. It counts what it makes."""

    tensors: tuple[Tensor, ...]
    made: int = 0

    def typed(self, value: bool | int | float, dtype: str) -> Tensor:
        return torch.tensor(value, dtype=TORCH_DTYPES[dtype])

    def apply(self, operation: str, dtype: str, *arguments: Tensor) -> Tensor:
        self.made += 1
        names = ("q", "k", "b")[: len(arguments)]
        inputs = {"score": torch.zeros(()), **dict(zip(names, arguments, strict=True))}
        return evaluated(Program((Step(operation, dtype, names),), ("x0",)), inputs)[0]

    def load(self, tensor: int, dtype: str, indices: tuple[Index, ...]) -> Tensor:
        self.made += 1
        return self.tensors[tensor][tuple(int(index.base) + index.more for index in indices)]

    def load_pair(self, tensor: int, dtype: str, indices: tuple[Index, ...]) -> tuple[Tensor, Tensor] | None:
        *others, last = (int(index.base) + index.more for index in indices)
        row = self.tensors[tensor][tuple(others)]
        return (row[last], row[last + 1]) if last + 1 < len(row) else None


def squared_distance(s, b, h, i, j):
    apart = (5 - (j - i)).abs().float()
    return -2 * s + torch.where(apart % 2 == 0, apart * apart * 0.01, -apart) * (3 - j + 1).float()


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "everything": everything,
    "a multiple": lambda s, b, h, i, j: -3 * s * 2,
    "a square": lambda s, b, h, i, j: 3 * (s * s) * -0.5,
    "a sigmoid": lambda s, b, h, i, j: torch.sigmoid(-s) * 4 * 0.5,
    "nothing": lambda s, b, h, i, j: s,
    "a number": lambda s, b, h, i, j: torch.zeros_like(s) + 0.5,
    "softcap": score_mods.softcap(0.5),
    "alibi": score_mods.alibi(torch.tensor([0.5, 0.25])),
    "alibi as steep as float32 has numbers for": score_mods.alibi(torch.tensor([1e38, 2e38])),
    "bias": score_mods.bias(BIAS.masked_fill(BIAS > 0.9, -torch.inf)),
    "distance": score_mods.relative_position(torch.linspace(-1, 1, 2 * 9).view(2, 9)),
    "squared distance": squared_distance,
}


@pytest.mark.parametrize("moving", ["k", "q"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_thread_has_what_the_function_gives(name, moving):
    mod = ScoreMod.of(FUNCTIONS[name])
    function, language = factored(with_gradient(mod.text)), InNumbers(mod.tensors)
    products = torch.linspace(-4, 3, 2 * 17).view(2, 17)
    of_rows = frozenset("hq" if moving == "k" else "k")

    def number(name: str, row: int, column: int) -> Tensor:
        if name in ("score", "scale"):
            return products[row, column] if name == "score" else torch.tensor(SCALE)
        of_row = {"b": 0, "h": ROWS["h"][row if moving == "k" else 0], moving: FIRST}
        return torch.tensor(of_row[name] if name in of_row else ROWS[name][row], dtype=torch.int32)

    arguments = (function.program, language, moving, of_rows, number)
    walk = Walk(*arguments, Walk(*arguments, {}).kept({"b", "h", "scale", *of_rows}, 2))
    for row in range(2):
        for column in COLUMNS:
            score = (products[row, column] * SCALE).requires_grad_()
            at = {n: number(n, row, 0) for n in "bhqk"}
            at[moving] = at[moving] + column
            new = mod(score, *at.values())
            found, found_slope = walk.outputs(row, column)
            found = found * function.factor * (SCALE if function.scaled else 1)
            torch.testing.assert_close(found, new.detach(), rtol=1e-5, atol=1e-5)
            if new.requires_grad and new > -torch.inf:
                (slope,) = torch.autograd.grad(new, score)
                torch.testing.assert_close(found_slope, slope, rtol=1e-5, atol=1e-5, check_device=False)


def test_factors_are_one_and_places_cost_an_addition():
    """A softcap is one product more than its hyperbolic tangent; of ALiBi a score more is a product, and two sums."""
    softcap = factored(with_gradient(SOFTCAP))
    assert [step.operation for step in softcap.program.steps] == ["mul", "mul", "tanh", "mul", "sub"]
    assert (softcap.factor, softcap.scaled, softcap.slope) == (20.0, False, None)
    alibi = score_mods.alibi(torch.ones(2))
    function, language = factored(with_gradient(alibi.text)), InNumbers(alibi.tensors)
    given = {"score": torch.ones(()), "scale": torch.ones(())}
    walk = Walk(
        *(function.program, language, "k", frozenset("hq")),
        lambda name, row, column: given.get(name, torch.tensor(1, dtype=torch.int32)),
        {},
    )
    walk.outputs(0, 0)
    before = language.made
    walk.outputs(0, 8)
    assert language.made - before == 4 and (function.factor, function.slope) == (1.0, 1.0)


def test_tanh_is_as_exact_of_small_numbers_as_of_others():
    """In float32, and each number is of the one kind or the other."""
    y, x = torch.linspace(-2, 2, 1 << 16), torch.linspace(0, 20, 1 << 16)
    of_small = tanh_of_small(y).double() - torch.tanh(y.double() * SMALL / 2)
    of_others = polynomial(TANH, torch.exp(-2 * x)).double() - torch.tanh(x.double())
    assert max(of_small.abs().max(), of_others.abs().max()) < 2.5e-6  # each step is rounded here, and fused there
    large = torch.tensor([-7e5, -2.0, -1.9999999, 0.0, 1.9999999, 2.0, torch.inf, torch.nan]).view(torch.int32)
    assert (large.bitwise_and(AT_LEAST_2) != 0).tolist() == [True, True, False, False, False, True, True, True]


@pytest.mark.parametrize(("shape", "pairs"), [((2, 1, 9, 12), True), ((2, 1, 9, 11), False), ((0, 4), False)])
def test_a_launch_gives_what_is_read(shape, pairs, monkeypatch):
    """By name, in both passes; where there is nothing to read, an address at which something is."""
    bias, bound, given = torch.ones(shape, dtype=torch.bfloat16), [], []
    mod = score_mods.bias(bias)
    sizes = (2, 9, shape[-1], 4, 2, 64)
    problem = Problem(*sizes, arch=90, sinks=True, score_mod=mod.form)

    def bind(kernel):
        def bound_to(device, blocks, fixed, names, cluster=1):
            packer = Packer(arguments_of(kernel), 0, fixed, names)
            bound.append((kernel, names))
            return lambda stream, *values: given.append((dict(zip(names, values, strict=True)), packer(values)))

        return SimpleNamespace(bind=bound_to)

    one = torch.ones(1)
    monkeypatch.setattr(launch, "function_for", bind)
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(TensorMap, "_at", lambda self, address: bytes(128))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a CPU tensor gives as its own
    monkeypatch.setattr("flashzoo._cute.per_stream.PerStream.__call__", lambda self, device, stream, n=1: one)
    q, k, v = (
        torch.zeros(2, n, heads, 64, dtype=torch.bfloat16) for n, heads in ((9, 4), (sizes[2], 2), (sizes[2], 2))
    )
    launch.forward(q, k, v, problem, Operands(sinks=torch.ones(4), score_mod=mod))
    strides = [x.stride() for x in (q, k, v, q, q)]
    launch.backward_launch(replace(problem, grad=True), *strides, False, -1)
    (forward, _), (backward, names) = bound
    assert (forward.scoring.pairs, backward.scoring.pairs) == ((pairs,), (False,))
    read = (q.data_ptr(), *shape, *(0,) * len(shape)) if 0 in shape else (bias.data_ptr(), *shape, *bias.stride())
    expected = dict(zip([*parameters_of(forward.scoring)], read, strict=True))
    assert given[0][0].items() >= expected.items()
    assert names[-len(expected) :] == tuple(expected)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"block_mask": MaskForm()}, "without a block_mask, got both"),
        ({"seqlen_k": (1 << 22) + 1}, "up to 4194304 queries and keys, got 64 and 4194305"),
        ({"score_mod": ScoreForm(SOFTCAP.replace("f32", "f64"))}, "got one that computes in float64"),
        ({"score_mod": ScoreForm(grads=(0, 2)), "grad": True}, "has no gradients .* tensor 0, 2 requires"),
        ({"score_mod": ScoreForm(grads=(0,))}, None),
        ({"seqlen_k": 1 << 22, "grad": True, "deterministic": True}, None),
    ],
)
def test_what_is_refused(asked, said):
    problem = replace(Problem(1, 64, 64, 2, 2, 64, arch=90, score_mod=ScoreForm()), **asked)
    found = refusals(problem)
    assert bool(found) == (said is not None) and (said is None or re.search(said, found[0]))
