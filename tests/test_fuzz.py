"""A fixed share of the fuzzer's calls, those that were wrong once, and what it must find:
`tests/fuzz.py` is a test that can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random

import fuzz
import fuzz_call
import pytest
import torch
from fuzz_call import LAYOUTS, Call, Operands, operands, parsed

import flashzoo
from flashzoo import UnsupportedError
from flashzoo.call.problem import FEATURES
from flashzoo_suite.support import CHOSEN, DEVICE, ROOT, same_bits

SEED = 7
CONFIGURATIONS, CALLS = (6, 8) if DEVICE == "cpu" else (3, 16)  # there each is a kernel or two to compile
INTERPRETED = 2
"""Calls of a version whose kernels Triton's interpreter runs, each of a configuration of its own."""


@pytest.fixture(autouse=True)
def _one_thread():
    """Small products are no faster on more, and far slower where others load the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fuzzed" in metafunc.fixturenames:
        chosen = [spec.name for spec in metafunc.config.stash[CHOSEN]]
        everything = ["auto"] if chosen == list(flashzoo.versions()) else []
        taken = fuzz.taken(chosen + everything, DEVICE)
        if "configuration" in metafunc.fixturenames:
            numbered = [(version, number) for version in taken for number in range(drawn(version)[0])]
            metafunc.parametrize(("fuzzed", "configuration"), numbered)
        else:
            metafunc.parametrize("fuzzed", taken)


def drawn(version: str) -> tuple[int, int]:
    """How many configurations of a version, and calls of each."""
    interpreted = DEVICE == "cpu" and "triton" in fuzz.spec_of(version).requires
    return (INTERPRETED, 1) if interpreted else (CONFIGURATIONS, CALLS)


def assert_right(calls: list[Call]) -> None:
    flawed = {str(call): flaws for call in calls if (flaws := fuzz.check(call, DEVICE).flaws)}
    assert not flawed, "\n".join(f"{line}\n    {'; '.join(flaws)}" for line, flaws in flawed.items())


def test_drawn_calls_are_right(fuzzed, configuration):
    random = Random(f"{SEED}/{configuration}")
    calls = fuzz.calls(random, fuzz.configuration(random, [fuzzed], DEVICE), DEVICE)
    assert_right([*islice(calls, drawn(fuzzed)[1])])


def test_what_was_wrong_once(fuzzed):
    kept = [parsed(line) for line in fuzz.FOUND.read_text().splitlines() if line and not line.startswith("#")]
    assert_right([call for call in kept if call.version == fuzzed])


# What it draws.


@pytest.fixture
def hopper(monkeypatch):
    """Calls are drawn as for a GPU of Hopper's."""
    monkeypatch.setattr(fuzz_call, "hardware", lambda device: {"device": "cuda", "arch": 90})


def test_a_line_is_the_call(hopper):
    random = Random(SEED)
    for _ in range(100):
        configuration = fuzz.configuration(random, [*flashzoo.versions(), "auto"], "cuda")
        call = next(fuzz.calls(random, configuration, "cuda"))
        assert parsed(str(call)) == call
    for line in ("", "v2", "v2 fp16 b1 q1 k1 h1/1", "v2 fp16 b1 q1 k1 h1/1 d1/1 "):
        with pytest.raises(ValueError, match="expected"):
            parsed(f"{line} ?? ")


def test_draws_all_that_is_declared_and_little_that_is_refused(hopper):
    features, numerics, refused, calls = Counter(), Counter(), 0, 0
    for number in range(1500):
        random = Random(f"{SEED}/{number}")
        configuration = fuzz.configuration(random, list(flashzoo.versions()), "cuda")
        for call in islice(fuzz.calls(random, configuration, "cuda"), 4):
            problem, spec = call.problem("cuda"), fuzz.spec_of(call.version)
            calls += 1
            if spec.unsupported(problem):
                refused += 1
                assert configuration.wild
                continue
            features.update((call.version, name, bool(call.grad)) for name in problem.features)
            numerics[call.version, problem.numerics] += 1
    assert 0 < refused < 0.1 * calls
    for spec in flashzoo.versions().values():
        assert {name for version, name, _ in features if version == spec.name} == spec.features
        assert {name for version, name, grad in features if version == spec.name and grad} == (
            spec.backward or frozenset()
        )
        expected = {*spec.dtypes, *(["fp8"] if spec.quantizes else [])}
        assert {name for version, name in numerics if version == spec.name} == expected
    assert {name for _, name, _ in features} == FEATURES.keys()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "e4m3"])
def test_storage_is_nan_around_operands_that_lie_anywhere(dtype, layout):
    call = Call("standard", dtype, 2, 3, 5, 4, 2, 16, 24, layouts=(layout,) * 4, seed=3)
    plain, laid = operands(replace(call, layouts=("bshd",) * 4), DEVICE), operands(call, DEVICE)
    for name in ("q", "k", "v", "dout"):
        x, same = getattr(laid, name), getattr(plain, name)
        first = tuple(slice(0, 1) if letter in LAYOUTS[layout].one else slice(None) for letter in "bshd")
        assert same_bits(x[first], same[first]) and x.stride(-1) == 1 and not x.float().isnan().any()
        mine, offset = x.untyped_storage(), x.storage_offset() * x.itemsize
        assert (
            mine.data_ptr() == laid.storage.data_ptr() and laid.storage[offset - 1] == fuzz_call.POISON
        ) or offset % 256
        whole = laid.storage.view(x.dtype).float()
        written = torch.zeros_like(whole, dtype=torch.bool)
        written.as_strided(x.shape, x.stride(), x.storage_offset())[first] = True
        assert written.sum() == x[first].numel()


# What it finds.

PLAIN = "standard bf16 b2 q70 k100 h4/2 d64/64 lse grad=qkv through=both layouts=packed,bhsd,padded1,cut1 seed=5"


def call_with(fault, call: Call, given: Operands, mask) -> dict:
    return ANSWER(*fault(call, given), mask)


def without_a_key(call, given):
    call = replace(call, seqlen_k=call.seqlen_k - 1)
    return call, replace(given, k=given.k[:, :-1], v=given.v[:, :-1])


def other_head_of_the_group(call, given):
    return call, replace(given, k=given.k.flip(2), v=given.v.flip(2))


def one_key_too_many(call, given):
    return replace(call, causal=False, window=(None, 1)), given


def coarse_products(call, given):
    return call, replace(given, q=(given.q.view(torch.int32) & ~0x1FFF).view(torch.float32))  # TF32's 10 bits


def forgets_dlse(call, given):
    return call, replace(given, dlse=torch.zeros_like(given.dlse))


def forgets_a_descale(call, given):
    return call, replace(given, descales=(None, *given.descales[1:]))


def last_row_of_dv(found):
    found["dv"][:, -1] = 0


def a_twentieth_of_one_head_of_dk(found):
    found["dk"][0, :, 1] *= 1.05


def lse_in_bits(found):
    found["lse"] *= 1.4427


def one_number_of_out(found):
    found["out"][1, 7, 2, 3] = torch.nan


def a_blind_row(found):
    found["out"][0, 0, 0, 0] = 1e-6


ANSWER = fuzz.answer
IN = {
    without_a_key: PLAIN,
    other_head_of_the_group: PLAIN,
    one_key_too_many: f"{PLAIN} causal",
    coarse_products: "standard fp32 b1 q70 k100 h2/2 d64/64 seed=1",
    forgets_dlse: PLAIN,
    forgets_a_descale: "standard e4m3 b1 q70 k100 h2/2 d64/64 descales=block/bshd,none,none seed=1",
}
OUT = {
    last_row_of_dv: (PLAIN, "dv"),
    a_twentieth_of_one_head_of_dk: (PLAIN, "dk"),
    lse_in_bits: (PLAIN, "lse"),
    one_number_of_out: (PLAIN, "out"),
    a_blind_row: ("standard fp32 b1 q70 k20 h2/2 d64/64 causal seed=1", "out"),
}


@pytest.mark.parametrize("fault", IN, ids=lambda fault: fault.__name__)
def test_finds_wrong_arithmetic(monkeypatch, fault):
    call = parsed(IN[fault])
    assert fuzz.check(call, DEVICE).flaws == []

    def answer(call, given, mask):
        found = ANSWER(*fault(call, given), mask)
        if fault is without_a_key:
            found |= {name: torch.nn.functional.pad(found[name], (0, 0, 0, 0, 0, 1)) for name in ("dk", "dv")}
        return found

    monkeypatch.setattr(fuzz, "answer", answer)
    assert any("of its bound" in flaw for flaw in fuzz.check(call, DEVICE).flaws)


@pytest.mark.parametrize("fault", OUT, ids=lambda fault: fault.__name__)
def test_finds_wrong_results(monkeypatch, fault):
    line, name = OUT[fault]

    def answer(call, given, mask):
        found = ANSWER(call, given, mask)
        fault(found)
        return found

    monkeypatch.setattr(fuzz, "answer", answer)
    (flaw,) = fuzz.check(parsed(line), DEVICE).flaws
    assert flaw.startswith(f"{name} takes")


def test_finds_another_mask(monkeypatch):
    line = PLAIN.replace("q70 k100", "q150 k200")
    monkeypatch.setattr(
        fuzz, "answer", lambda call, given, mask: ANSWER(call, given, fuzz.block_mask(replace(call, seed=1), DEVICE)[0])
    )
    for kind in ("blocks", "blocks_full", "dense", "documents"):
        assert fuzz.check(parsed(f"{line} mask={kind}:64x64:"), DEVICE).flaws


def test_finds_what_is_written_to_inputs_and_around_them(monkeypatch):
    for index in (0, -1, None):

        def answer(call, given, mask, index=index):
            found = ANSWER(call, given, mask)
            if index is None:
                given.q[0, 0, 0, 0] += 1
            else:
                given.storage[index] = 0
            return found

        monkeypatch.setattr(fuzz, "answer", answer)
        assert "was written to" in fuzz.check(parsed(PLAIN), DEVICE).flaws[-1]


def test_finds_other_bits_other_forms_and_wrong_refusals(monkeypatch):
    runs = iter(range(9))

    def answers(change):
        def answer(call, given, mask):
            found = ANSWER(call, given, mask)
            return found | {"dq": change(found["dq"])}

        monkeypatch.setattr(fuzz, "answer", answer)

    answers(lambda dq: dq * (1 + next(runs) * 2**-7))
    assert "other bits" in fuzz.check(parsed(f"{PLAIN} deterministic"), DEVICE).flaws[-1]
    answers(lambda dq: dq.float())
    assert "expected" in fuzz.check(parsed(PLAIN), DEVICE).flaws[0]

    def refuses(call, given, mask):
        raise UnsupportedError("not today")

    monkeypatch.setattr(fuzz, "answer", refuses)
    assert "though its Spec takes it" in fuzz.check(parsed(PLAIN), DEVICE).flaws[0]
    assert fuzz.check(parsed(PLAIN.replace("standard", "v1") + " window=1,1"), DEVICE).refused
    monkeypatch.setattr(fuzz, "answer", lambda call, given, mask: {})
    assert "computed, though" in fuzz.check(parsed(PLAIN.replace("standard", "v1") + " window=1,1"), DEVICE).flaws[0]


def test_a_process_that_dies_is_a_finding_of_its_call(tmp_path):
    variant = tmp_path / "doomed.py"
    variant.write_text(
        "import os, flashzoo\n"
        "def attention(q, k, v, problem, operands):\n    os._exit(3)\n"
        "flashzoo.register(flashzoo.Spec('doomed', '', '', 'doomed:attention', cpu_dtypes=('fp32',)))\n"
    )
    command = [sys.executable, "-m", "tests.fuzz", "--versions", "doomed", "--calls", "2", "--jobs", "1", "--seed", "3"]
    record = tmp_path / "record.json"
    environment = {**os.environ, "FLASHZOO_VARIANTS": str(variant), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(
        [*command, "--json", str(record)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 1, process.stderr
    findings = json.loads(record.read_text())["findings"]
    assert [finding["flaws"] for finding in findings] == [["the process died, exit code 3"]] * 2
    assert len({parsed(finding["line"]) for finding in findings}) == 2
