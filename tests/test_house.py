"""The rules of the house: which way imports point, what importing costs,
and that kernels and papers' lines keep together."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

import flashzoo
from flashzoo_suite.support import ROOT, in_fresh_process

PACKAGE = ROOT / "flashzoo"
SOURCES = sorted(PACKAGE.rglob("*.py"))
VERSION_FOLDERS = sorted(path.parent for path in PACKAGE.glob("[!_]*/launch.py"))
HOST_CODE = ("__init__", "config", "explain", "launch", "launch_fp8", "launch_hopper", "programs", "traits")
DEVICE_CODE = {
    folder: [path for path in sorted(folder.glob("*.py")) if path.stem not in HOST_CODE] for folder in VERSION_FOLDERS
}

PLUMBING = {"flashzoo._sass", "flashzoo._triton", "flashzoo._cute"}
# What users hand to `attention`.
BLOCK_MASK, SCORES = "flashzoo.masks", "flashzoo.scores"
# What a version is handed.
HANDED = {"flashzoo.call.forms", "flashzoo.call.operands", "flashzoo.call.problem"}
CALL = {"flashzoo.call"}
# What each room, or file of `call`, may import besides the standard library; a version's folder may also import itself.
MAY_IMPORT = {
    "spec": {"flashzoo.call.problem"},
    "registry": {"flashzoo.call.problem", "flashzoo.spec"},
    "call.forms": set(),
    "call.features": {"flashzoo.call.forms"},
    "call.problem": {"flashzoo.call.features", "flashzoo.call.forms"},
    "call.operands": {
        "torch",
        BLOCK_MASK,
        SCORES,
        "flashzoo.call.forms",
        "flashzoo.call.problem",
        "flashzoo.lengths",
    },
    "call.check": {"torch", "flashzoo.dtypes"} | HANDED,
    "call.plan": {
        "torch",
        "flashzoo.autograd",
        "flashzoo.dtypes",
        "flashzoo.registry",
        "flashzoo.sinks",
        "flashzoo.spec",
        "flashzoo.transforms",
    }
    | CALL,
    "call.api": {
        "torch",
        "typing_extensions",
        BLOCK_MASK,
        SCORES,
        "flashzoo.autograd",
        "flashzoo.registry",
        "flashzoo.transforms",
        "flashzoo.untraced",
    }
    | CALL,
    "call.packed": {"torch"},
    "call.signs": {"torch"},
    "call.validate": {"torch", "flashzoo.lengths", "flashzoo.sinks"} | CALL,
    "call.backward": {"torch", "typing_extensions", "flashzoo.registry", "flashzoo.transforms", "flashzoo.untraced"}
    | CALL,
    "call.traced": {"torch", "flashzoo.autograd", "flashzoo.registry", "flashzoo.transforms"} | CALL,
    "autograd": {"torch", "flashzoo.call.problem", "flashzoo.transforms", "flashzoo.untraced"},
    "transforms": {"torch", "flashzoo.call.problem", "flashzoo.registry", "flashzoo.spec"},
    "reference": {
        "torch",
        SCORES,
        "flashzoo.autograd",
        "flashzoo.dropout",
        "flashzoo.dtypes",
        "flashzoo.lengths",
        "flashzoo.sinks",
    }
    | HANDED,
    "baselines": {"torch", "flashzoo.reference", "flashzoo.spec", "flashzoo.transforms"} | HANDED,
    "dropout": {"torch", "flashzoo.call.operands", "flashzoo.call.problem", "flashzoo.lengths"},
    "dtypes": {"torch"},
    "gpu": set(),
    "integers": set(),
    "tiles": set(),
    "timing": {"torch"},
    "comparison": {"flashzoo.accuracy", "flashzoo.call.problem", "flashzoo.timing"},
    "workloads": {"torch", "flashzoo.call.forms", "flashzoo.call.problem"},
    "inputs": {
        "torch",
        BLOCK_MASK,
        SCORES,
        "flashzoo.dtypes",
        "flashzoo.call.forms",
        "flashzoo.call.problem",
        "flashzoo.lengths",
        "flashzoo.workloads",
    },
    "counts": {"flashzoo.call.problem", "flashzoo.dtypes"},
    "accuracy": {
        "torch",
        SCORES,
        "flashzoo.counts",
        "flashzoo.dtypes",
        "flashzoo.reference",
        "flashzoo.roundings",
        "flashzoo.sinks",
    }
    | HANDED,
    "roundings": {
        "torch",
        SCORES,
        "flashzoo.dropout",
        "flashzoo.dtypes",
        "flashzoo.reference",
        "flashzoo.call.problem",
        "flashzoo.sinks",
    },
    "scores": {"torch", SCORES, "flashzoo.call.forms", "flashzoo.lengths"},
    "score_mods": {"torch", SCORES},
    "sinks": {"torch"},
    "untraced": {"torch"},
    "merge": {"torch", "flashzoo.call.check", "flashzoo.transforms"},
    "append": {"torch", "flashzoo.call.check", "flashzoo.call.signs", "flashzoo.registry", "flashzoo.transforms"}
    | {"flashzoo.untraced"}
    | HANDED,
    "lengths": {"torch", "flashzoo.call.forms"},
    "replace": {"torch", BLOCK_MASK, SCORES, "flashzoo.registry", "flashzoo.transforms"} | CALL,
    "masks": {"torch", "typing_extensions", BLOCK_MASK, "flashzoo.call.forms"},
    # Public names, and who is asked for where nobody is named.
    "parallel": {"torch", "flashzoo.parallel", "flashzoo.registry", "flashzoo.transforms", "flashzoo.untraced"}
    | {f"flashzoo.{name}" for name in flashzoo.__all__},
    "_sass": set(),
    "_triton": {
        "torch",
        "triton",
        "flashzoo._sass",
        "flashzoo._triton",
        SCORES,
        "flashzoo.dropout",
        "flashzoo.gpu",
        "flashzoo.tiles",
        "flashzoo.call.forms",
        "flashzoo.call.operands",
        "flashzoo.call.problem",
    },
    "_cute": {
        "torch",
        "cuda",
        "cutlass",
        "flashzoo.__imported__",
        "flashzoo._cute",
        SCORES,
        "flashzoo.dtypes",
        "flashzoo.gpu",
        "flashzoo.call.problem",
    },
}
# For other people's models: by public names alone.
DOORS = {
    "flash_attn": {"torch"},
    "nn": {"torch"},
    "integrations": {"torch", "transformers", "flashzoo.integrations"},
}
A_VERSION_MAY_IMPORT = {"torch", "triton", "cutlass", "flashzoo._triton", "flashzoo._cute"}
A_VERSION_MAY_IMPORT |= {
    BLOCK_MASK,
    SCORES,
    "flashzoo.autograd",
    "flashzoo.counts",
    "flashzoo.dtypes",
    "flashzoo.gpu",
    "flashzoo.sinks",
    "flashzoo.spec",
    "flashzoo.tiles",
} | HANDED
OUTSIDE = ("flashzoo_suite", "tests", "bench", "examples")
# These look inside versions because that is their work.
INSIDERS = {
    "tests/test_compile.py",
    "tests/test_compile_decode.py",
    "tests/test_decode_merge.py",
    "tests/test_compile_v3.py",
    "tests/test_docs.py",
    "tests/test_dropout.py",
    "tests/test_quantize.py",
    "tests/test_tune.py",
    "bench/ablation.py",
    "bench/stamps.py",
    "bench/traffic.py",
    "bench/tune.py",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Every module that a file imports, lazily too: `from flashzoo import v1` and `import flashzoo.v1`
    both as flashzoo.v1."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            whole = node.module or ""
            is_package = whole == "flashzoo" or (PACKAGE.parent / whole.replace(".", "/") / "__init__.py").is_file()
            found |= {f"{whole}.{alias.name}" if is_package else whole for alias in node.names}
    return {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names}


def within(name: str, allowed: set[str]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in allowed)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_one_way(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if room == "call":
        room = f"call.{path.stem}"
    if PACKAGE / room in VERSION_FOLDERS:
        allowed = A_VERSION_MAY_IMPORT | {f"flashzoo.{room}"}
    elif room in DOORS:
        names = imported(path) - {"flashzoo", *(f"flashzoo.{name}" for name in flashzoo.__all__)}
        assert {name for name in names if not within(name, DOORS[room])} == set()
        return
    elif room in MAY_IMPORT:
        allowed = MAY_IMPORT[room]
    else:  # __init__, compare, cli: anything but the inside of a version, of which __init__ registers the Specs
        inside = {f"flashzoo.{folder.name}.{file.stem}" for folder in VERSION_FOLDERS for file in folder.glob("*.py")}
        assert not {name for name in imported(path) if within(name, inside | {"triton", "cutlass"} | PLUMBING)}
        return
    assert {name for name in imported(path) if not within(name, allowed | {"flashzoo.integers"})} == set()


def divides_upwards(node: ast.AST) -> bool:
    """Whether it is `-(-x // y)`."""
    inside = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else None
    return (
        isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.FloorDiv) and isinstance(inside.left, ast.UnaryOp)
    )


@pytest.mark.parametrize("path", [path for path in SOURCES if path.stem != "integers"], ids=relative)
def test_rounding_up_has_one_way(path):
    """`flashzoo.integers.cdiv`, which all may import."""
    assert [node.lineno for node in ast.walk(ast.parse(path.read_text())) if divides_upwards(node)] == []


@pytest.mark.parametrize("folder", VERSION_FOLDERS, ids=relative)
def test_device_code_shares_nothing(folder):
    """A kernel file reads alone beside its paper: it imports its language and no more."""
    for path in folder.glob("kernels.py"):
        assert {name.partition(".")[0] for name in imported(path)} <= {"triton", "cutlass"}


@pytest.mark.parametrize(
    "path", [path for folder in OUTSIDE for path in sorted((ROOT / folder).glob("*.py"))], ids=relative
)
def test_tests_bench_and_examples_stay_outside(path):
    special = re.fullmatch(r"tests/test_v\d\w*\.py", relative(path))
    if relative(path) in INSIDERS or special:
        return
    inside = {f"flashzoo.{folder.name}" for folder in VERSION_FOLDERS} | PLUMBING
    assert {name for name in imported(path) if within(name, inside)} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "flashzoo_suite").glob("*.py")), ids=relative)
def test_the_suite_needs_no_more_than_the_extra_check_brings(path):
    assert {name.partition(".")[0] for name in imported(path)} <= {"flashzoo", "flashzoo_suite", "pytest", "torch"}


def test_import_loads_no_kernel_language_and_starts_no_gpu():
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import flashzoo
        assert not torch.cuda.is_initialized()
        print(*set(sys.modules) - before)
        assert flashzoo.parallel.attention
    """
    names = in_fresh_process(code).split()
    assert not [name for name in names if name.startswith(("flashzoo.parallel", "torch.distributed"))]
    loaded = {name.partition(".")[0] for name in names}
    assert "flashzoo" in loaded
    assert not loaded & {"triton", "cutlass", "rich", "matplotlib", "pytest", "pandas"}


def test_doors_are_opened_when_they_are_asked_for():
    code = """if True:
        import sys, flashzoo
        doors = {"flashzoo.flash_attn", "flashzoo.nn", "flashzoo.integrations"}
        print(*doors & set(sys.modules), flashzoo.flash_attn.flash_attn_func.__name__, *doors & set(sys.modules))
    """
    assert in_fresh_process(code).split() == ["flash_attn_func", "flashzoo.flash_attn"]
    assert "nn" in dir(flashzoo)
    with pytest.raises(AttributeError, match="module 'flashzoo' has no attribute 'attend'"):
        _ = flashzoo.attend


def test_asking_loads_no_kernel_language():
    code = """if True:
        import sys, torch, flashzoo
        q = torch.empty(1, 8, 2, 16, dtype=torch.float16)
        str(flashzoo.explain(q, q, q, arch=90)), flashzoo.versions(), flashzoo.attention(q, q, q, version="sdpa")
        print(*sys.modules)
    """
    assert not {"triton", "cutlass"} & set(in_fresh_process(code).split())


@pytest.mark.parametrize("where", ["torch.func.jvp(load, (x,), (x,))", "torch.set_default_device('meta'); load()"])
def test_modules_may_be_imported_wherever_a_first_call_is_made(where):
    """A version's are by its first call, and what they make of tensors as they are imported must do there."""
    code = f"""if True:
        import contextlib, importlib, pkgutil, torch, flashzoo
        x = torch.ones(1)
        def load(x=None):
            for module in pkgutil.walk_packages(flashzoo.__path__, "flashzoo."):
                if not module.name.endswith("__main__"):
                    with contextlib.suppress(ImportError):  # of an extra that is not there
                        found = vars(importlib.import_module(module.name)).items()
                        assert not [name for name, value in found if isinstance(value, torch.Tensor)], module.name
            return x
        {where}
    """
    in_fresh_process(code)


def paper_lines_in_comments(path: Path) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    comments = " ".join(token.string for token in tokens if token.type == tokenize.COMMENT)
    return set(re.findall(r"\b[AB]\d+\.\d+\b", comments))


@pytest.mark.parametrize("folder", VERSION_FOLDERS, ids=relative)
def test_kernel_and_readme_name_the_same_lines_of_the_paper(folder):
    in_code = set().union(*map(paper_lines_in_comments, DEVICE_CODE[folder]))
    in_readme = re.findall(r"^\| ([AB]\d+\.\d+) \|", (folder / "README.md").read_text(), re.MULTILINE)
    assert in_code and in_code == set(in_readme)
    assert len(in_readme) == len(set(in_readme)), "a line is listed twice"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_that_newer_triton_has_dropped(path):
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not names & {"make_block_ptr", "advance"}


def is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in node.decorator_list)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_public_names_have_docstrings(path):
    module = ast.parse(path.read_text())
    assert ast.get_docstring(module), "the file"
    if path.parent in VERSION_FOLDERS and path.stem in ("kernels", "launch", "launch_fp8"):
        return  # told in the file's head
    public = [
        node
        for node in module.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    assert [node.name for node in public if not ast.get_docstring(node) and not is_overload(node)] == []


@pytest.mark.parametrize("spec", flashzoo.versions().values(), ids=lambda spec: spec.name)
def test_every_impl_is_there_and_takes_the_contract(spec):
    module, _, name = spec.impl.partition(":")
    function = getattr(importlib.import_module(module), name)
    taken = list(inspect.signature(function).parameters)
    assert taken == ["q", "k", "v", "problem", "operands"]


@pytest.mark.parametrize("folder", VERSION_FOLDERS, ids=relative)
def test_a_version_is_data_readme_host_and_device(folder):
    assert (folder / "README.md").is_file()
    package = importlib.import_module(f"flashzoo.{folder.name}")
    assert package.SPEC is flashzoo.versions()[package.SPEC.name]
    assert package.SPEC.paper.partition("arXiv:")[2] in (folder / "README.md").read_text()


def of_every_feature(path: Path) -> list[int]:
    """Lines of a file where a `Spec` gets its features from `problem.FEATURES`, and so those that come later too."""
    tree = ast.parse(path.read_text())
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "flashzoo.call.problem"
    ]
    makes_one = any(isinstance(node, ast.Call) and "Spec" in ast.unparse(node.func) for node in ast.walk(tree))
    return [node.lineno for node in imports if makes_one and "FEATURES" in (name.name for name in node.names)]


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "examples").glob("*.py"))], ids=relative)
def test_features_are_declared_by_name(path):
    assert of_every_feature(path) == []


def test_the_example_is_short():
    assert len((ROOT / "examples" / "my_variant.py").read_text().splitlines()) <= 60


def test_readme_has_every_version_and_the_markers_of_its_tables():
    text = (ROOT / "README.md").read_text()
    assert [name for name in flashzoo.versions() if not re.search(rf"^\| \[?`{name}`", text, re.MULTILINE)] == []
    begins, ends = (re.findall(rf"<!-- ([\w-]+):{end} -->", text) for end in ("begin", "end"))
    assert begins and begins == ends


def test_readme_begins_with_the_two_commands():
    head = "\n".join((ROOT / "README.md").read_text().splitlines()[:15])
    assert "make compare" in head and "make test" in head


def test_the_fixed_order_of_auto():
    assert list(flashzoo.versions())[:7] == ["decode", "v3", "v3_fp8", "v2", "v1", "blocksparse", "sdpa"]
