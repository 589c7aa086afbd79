"""examples/my_variant.py passes `flashzoo check`; train_gpt.py at tiny sizes: what it holds a loss curve against, and
that a wrong version's curve is told from a right one's; generate.py writes what it would without a cache; llama.py
times implementations that give the same logits; fsdp.py trains sharded as it does whole."""

from __future__ import annotations

import csv
import functools
import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

import flashzoo
from flashzoo.baselines import sdpa
from flashzoo_suite.support import ROOT

CHECKED = "not bf16 and not fp32 and not compiled and not fakes and not layout and not every_place and not scale"
"""What `check` runs of my_variant.py: every feature, both passes, in one dtype; a third of all, in under a minute."""


def test_my_variant_is_all_that_it_declares():
    check = ["check", "examples/my_variant.py", "-q", "-k", CHECKED, "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "flashzoo", *check]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 100


TINY = "--device cpu --dtype fp32 --layers 2 --hidden 32 --head-dim 16 --seqlen 64 --batch 2"


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


train_gpt, generate, long_context = _load("train_gpt"), _load("generate"), _load("long_context")


def _train(options: str) -> int:
    return train_gpt.main(f"{TINY} {options}".split())


def without_gradient_of_k(q, k, v, problem, operands):
    """A version whose output is right and whose gradients are not."""
    return sdpa(q, k.detach(), v, problem, operands)


@pytest.fixture
def wrong():
    spec = flashzoo.Spec(
        name="wrong",
        title="no gradient for k",
        paper="none",
        impl=f"{__name__}:without_gradient_of_k",
        dtypes=("fp32",),
        cpu_dtypes=("fp32",),
        features=frozenset({"causal"}),
        backward=frozenset({"causal"}),
        auto=(),
    )
    yield flashzoo.register(spec).name
    flashzoo.unregister("wrong")


def test_right_versions_train_alike(tmp_path, capsys):
    assert _train(f"--steps 3 --versions v2,sdpa,standard --out {tmp_path}") == 0
    printed = capsys.readouterr().out
    assert "v2 agrees with sdpa" in printed and "standard agrees with sdpa" in printed
    with (tmp_path / "losses.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "sdpa", "sdpa, reordered 1", "sdpa, reordered 2", "v2", "standard"]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    first = torch.tensor([float(loss) for loss in rows[0][1:]])
    assert (first - torch.tensor(256.0).log()).abs().max() < 0.3, "before training all bytes are as likely"
    assert (tmp_path / "losses.png").stat().st_size > 0


def test_a_wrong_gradient_is_told_from_noise(wrong, capsys):
    assert _train(f"--steps 30 --lr 3e-3 --versions standard,{wrong}") == 1
    printed = capsys.readouterr().out
    assert "standard agrees with sdpa" in printed and "wrong PARTS from sdpa" in printed


def test_curves_go_down():
    args = train_gpt.arguments(f"{TINY} --steps 30 --lr 3e-3".split())
    losses, seconds = train_gpt.train(args, "sdpa", "sdpa", None)
    assert losses[-5:].mean() < losses[:5].mean() - 0.5 and seconds > 0


def test_reordered_channels_are_the_same_training():
    """In float64, where rounding is nothing: the yardstick is no other model."""
    args = train_gpt.arguments(TINY.split())
    ids = torch.randint(256, (2, args.seqlen))
    found = []
    for reordering in (None, 1):
        torch.manual_seed(0)
        model = train_gpt.GPT(args, "sdpa", reordering).double()
        logits = model(ids)
        logits.square().mean().backward()
        found.append((logits, model.blocks[0].qkv.weight, model.blocks[0].qkv.weight.grad))
    (logits, weight, gradient), (logits_1, weight_1, gradient_1) = found
    order = torch.randperm(args.hidden, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weight_1, weight[:, order]) and not torch.equal(weight_1, weight)
    torch.testing.assert_close(logits_1, logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient_1, gradient[:, order], rtol=1e-9, atol=1e-15)


def test_a_curve_of_nan_parts():
    args = train_gpt.arguments(f"{TINY} --steps 30 --versions standard".split())
    right = torch.linspace(5, 3, 30, dtype=torch.float64)
    curves = {"sdpa": right, "sdpa, reordered 1": right + 1e-3, "standard": right.clone()}
    seconds = dict.fromkeys(curves, 1.0)
    assert train_gpt.report(args, curves, seconds, ["sdpa, reordered 1"]) == 0
    curves["standard"][-1] = torch.nan
    assert train_gpt.report(args, curves, seconds, ["sdpa, reordered 1"]) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--versions v3", "v3 can't take batch 2, seqlen 64"),
        ("--versions v9", "version must be 'auto' or one of .*, got 'v9'"),
        ("--head-dim 24", "--hidden: expected a multiple of --head-dim 24, got 32"),
        ("--reorderings 0", "--reorderings: expected at least 1, got 0"),
        (f"--seqlen 4096 --text {ROOT / 'Makefile'}", r"--text: expected more than --seqlen 4096 bytes, got \d+"),
    ],
)
def test_refused_before_anything_is_trained(options, text, capsys):
    with pytest.raises(SystemExit) as refusal:
        _train(options)
    assert refusal.value.code == 2
    assert re.search(text, capsys.readouterr().err)


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["", "--compile"])
def test_what_auto_takes_trains_like_sdpa(options):
    sizes = "--layers 2 --hidden 256 --head-dim 64 --seqlen 256 --batch 4 --steps 60"
    assert train_gpt.main(f"{sizes} {options}".split()) == 0


SMALL = ["--device", "cpu", "--layers", "1", "--hidden", "64", "--new", "8"]


@pytest.mark.parametrize("options", ["", "--page-size 7 --heads-kv 8 --batch 2", "--version sdpa --prompt 5"])
def test_tokens_are_those_of_no_cache(options, capsys):
    assert generate.main([*SMALL, *options.split()]) == 0
    assert capsys.readouterr().out.count("the tokens of no cache") == 2


def test_a_cache_that_forgets_is_told(monkeypatch, capsys):
    monkeypatch.setattr(flashzoo, "append", lambda *_, **__: None)
    assert generate.main([*SMALL, "--version", "sdpa"]) == 1
    assert "part from those of no cache" in capsys.readouterr().out


def test_generate_refuses_sizes_that_do_not_go_together(capsys):
    for options, text in (
        ("--hidden 65", "expected an even multiple of --heads 8, got 65"),
        ("--heads-kv 3", "a multiple of --heads-kv 3"),
    ):
        with pytest.raises(SystemExit):
            generate.main(options.split())
        assert text in capsys.readouterr().err


@pytest.fixture
def llama():
    pytest.importorskip("transformers", reason="needs the extra transformers, which make installs")
    return _load("llama")


TWO = ["--seqlen", "24", "--context", "24", "--new", "4", "--rounds", "2", "--implementations"]


def test_a_llama_of_transformers_is_timed(llama, capsys, tmp_path):
    kept = tmp_path / "llama.csv"
    asked = [*TWO, "eager,zoo,zoo:standard,flash_attention_2", "--measures", "train,write", "--csv", str(kept)]
    assert llama.main([*asked, "--commit", "abc"]) == 0
    with kept.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["flash_attention_2", "eager", "zoo", "zoo:standard"]
    assert [(row["measure"], row["implementation"]) for row in rows] == [
        (measure, name) for measure in ("train", "write") for name in names
    ]
    assert all(row["commit"] == "abc" and row["seqlen"] == "24" for row in rows)
    absent, present = rows[::4], [row for at, row in enumerate(rows) if at % 4]
    assert all(row["why"].startswith("missing: ImportError: ") and not row["tokens_s"] for row in absent)
    assert all(not row["why"] and row["rounds"] == "2" for row in present)
    assert all(0 < float(row["tokens_s_min"]) <= float(row["tokens_s"]) < float("inf") for row in present)
    assert len(re.findall(r"flash_attention_2 +missing: ImportError", capsys.readouterr().out)) == 2


def nothing(module, query, *_, **__):
    return torch.zeros_like(query.transpose(1, 2)), None


def without_gradients(module, query, key, value, *_, **__):
    groups = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, k.detach(), v, is_causal=True)
    return out.transpose(1, 2), None


@pytest.mark.parametrize(
    ("measure", "wrong"),
    [("train", nothing), ("write", nothing), ("train_compiled", nothing), ("train", without_gradients)],
)
def test_a_llama_with_other_results_is_not_timed(llama, capsys, monkeypatch, measure, wrong):
    """Nor is one taken for another whose graph is there already."""
    monkeypatch.setitem(llama.door.AttentionInterface._global_mapping, "wrong", wrong)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    assert llama.main([*TWO, "sdpa,wrong,eager", "--measures", measure]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"wrong +FAILED: ArithmeticError: its results are \S+ away from those of sdpa\n", printed)
    assert len(re.findall(r"(sdpa|eager) +\d", printed)) == 2 and not re.search(r"wrong +\d", printed)


@pytest.mark.parametrize("calls", [0, 3])
def test_a_llama_out_of_memory_is_left_out_and_the_others_go_on(llama, capsys, monkeypatch, tmp_path, calls):
    """Whether before anything is timed or in a round."""
    attend, left = llama.door.AttentionInterface._global_mapping["sdpa"], 2 * calls  # layers

    def hungry(*given, **options):
        nonlocal left
        if left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB")
        left -= 1
        return attend(*given, **options)

    monkeypatch.setitem(llama.door.AttentionInterface._global_mapping, "hungry", hungry)
    kept = tmp_path / "llama.csv"
    assert llama.main([*TWO, "eager,hungry,zoo", "--measures", "train,write", "--csv", str(kept)]) == 0
    with kept.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["implementation"] for row in rows] == 2 * ["hungry", "eager", "zoo"]
    assert all(bool(row["tokens_s"]) == (row["implementation"] != "hungry") for row in rows)
    assert all(row["why"].startswith("out of memory: OutOfMemoryError: CUDA") for row in rows[::3])
    assert capsys.readouterr().out.count("out of memory: OutOfMemoryError") == 2


def test_a_llama_begins_nothing_when_its_time_is_gone(llama, capsys, tmp_path):
    kept = tmp_path / "llama.csv"
    assert llama.main([*TWO, "sdpa", "--measures", "train", "--budget-s", "0", "--csv", str(kept)]) == 0
    assert "not measured: the budget ended" in capsys.readouterr().out and not kept.exists()


def test_a_llama_that_was_begun_in_time_has_a_round(llama, capsys, monkeypatch):
    """Though its check, where it is compiled, takes longer than there is."""
    distance = llama.distance

    def late(*given):
        monkeypatch.setattr(llama.time, "monotonic", lambda: float("inf"))
        return distance(*given)

    monkeypatch.setattr(llama, "distance", late)
    assert llama.main([*TWO, "sdpa,eager", "--measures", "train", "--budget-s", "1000"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"sdpa +\d", printed) and re.search(r"eager +not measured: the budget ended", printed)


@pytest.mark.parametrize("options", ["--new 0", "--rounds 0", f"--csv {ROOT / 'Makefile'}"])
def test_a_llama_refuses_what_gives_no_figure(llama, options, capsys):
    with pytest.raises(SystemExit):
        llama.main(options.split())
    assert re.search(r"(--new|--rounds): expected at least 1, got 0|--csv: expected a file", capsys.readouterr().err)


def test_a_sharded_model_trains_as_a_whole_one():
    command = [sys.executable, str(ROOT / "examples" / "fsdp.py"), "--seqlen", "16", "--hidden", "32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^(loss|gradients): .* on 2 ranks, .* apart$", done.stdout, re.MULTILINE)) == 2


def test_long_context_is_for_torchrun(monkeypatch, capsys):
    """What it trains, tests/test_parallel.py sees."""
    monkeypatch.delenv("RANK", raising=False)
    assert long_context.main([]) == 2 and "torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_long_context_refuses_lengths_that_ranks_do_not_divide(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert long_context.main(["--seqlen", "30"]) == 2
    assert "--seqlen: expected a multiple of 4, two chunks a rank, got 30" in capsys.readouterr().err


def test_long_context_tells_where_one_is_out_of_memory(monkeypatch, capsys):
    train = long_context.train

    def on_ranks_alone(args, group):
        if group is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has less")
        return train(args, group)

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)  # pyright: ignore[reportPrivateImportUsage]
    there = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    for name, value in (there | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(long_context, "train", on_ranks_alone)
    sizes = "--steps 1 --seqlen 32 --layers 1 --hidden 32 --head-dim 8 --device cpu"
    assert long_context.main([*sizes.split(), "--text", __file__]) == 0
    told = capsys.readouterr().out
    assert "1 rank:  out of memory, so there is nothing to compare: CUDA out of memory\n" in told
    assert "1 ranks: loss " in told and "a step" not in told, "the first step's time is no step's"
