"""The tutorial's kernel compiles, the programs of versions' READMEs run, and what the documents name is there.

The tutorial itself is followed by `make newcomer`.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from newcomer import PAGES as SHOWN
from newcomer import blocks
from test_learn import PAGES as TO_LEARN

import flashzoo
from flashzoo._triton.compile import resources
from flashzoo_suite.support import DEVICE, ROOT

TUTORIAL = (ROOT / "docs" / "write_a_variant.md").read_text()


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernel_compiles_for_a_gpu(tmp_path, monkeypatch, arch):
    """What the interpreter runs, the compiler may reject."""
    (text,) = (text for language, word, text in blocks(TUTORIAL) if word == "lazy.py")
    (tmp_path / "lazy.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        lazy = importlib.import_module("lazy")
        for head_dim, causal in ((64, False), (128, True)):
            problem = flashzoo.Problem(1, 4096, 4096, 16, 16, head_dim, causal=causal, arch=arch)
            launch = lazy.launch_of(problem, (4096 * 16 * head_dim, 16 * head_dim, head_dim) * 4)
            assert resources(launch, (*["bf16"] * 4, "fp32"), 1, arch).spills == 0
    finally:
        flashzoo.unregister("lazy")
        sys.modules.pop("lazy")


LONG, SEQLEN = "65536", 65536 if DEVICE == "cuda" else 1280
"""The length that a README's mask is for, and that which it has here."""
IN_READMES = {"v3": ({"causal": True}, 0.12), "blocksparse": ({"window_size": (1024, 0)}, 5e-3)}
"""By version the plain call that its README's programs are held against, and how far off a norm may be."""


@pytest.mark.parametrize("name", IN_READMES)
def test_the_programs_of_a_versions_readme_give_what_a_plain_call_does(name):
    """On a GPU as they stand there; elsewhere on the CPU, and shorter."""
    options, bound = IN_READMES[name]
    readme = (ROOT / "flashzoo" / name / "README.md").read_text()
    seqlen = SEQLEN if LONG in readme else 128
    q, k, v, dout = (torch.randn(1, seqlen, 1, 32, device=DEVICE, dtype=torch.float16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k + 1, v)]  # scores that smoothing takes something from
    plain = dict(zip(("out", "lse"), flashzoo.attention(*leaves, return_lse=True, **options), strict=True))
    gradients = torch.autograd.grad(plain["out"], leaves, dout)
    for program in (text for language, _, text in blocks(readme) if language == "python"):
        tensors = dict(zip("qkv", (x.detach().requires_grad_() for x in leaves), strict=True))
        found = {"flashzoo": flashzoo, "dout": dout, **tensors}
        exec(program.replace('"cuda"', f'"{DEVICE}"').replace(LONG, str(seqlen)), found)
        seen = [(found[key], x) for key, x in plain.items() if key in found]
        if found["out"].requires_grad:
            if tensors["q"].grad is None:
                found["out"].backward(dout)
            seen += [(x.grad, dx) for x, dx in zip(tensors.values(), gradients, strict=True)]
        for mine, theirs in seen:
            off = ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
            assert off <= bound, program
    assert len(seen) > 1, "the last of each has gradients"


def test_what_is_not_run_names_what_is_there():
    apart = {word: text for language, word, text in blocks(TUTORIAL) if language == "sh" and word in ("setup", "long")}
    asked = re.search(r'pip install -e "\$FLASHZOO\[([\w,]+)\]"', apart["setup"])
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert asked and set(asked[1].split(",")) <= set(extras)
    named = re.findall(r"\$FLASHZOO/([\w.-]+)", apart["setup"])
    assert named and all((ROOT / name).is_file() for name in named)
    short = "flashzoo check lazy.py -q -k test_counting"
    assert apart["long"].strip() == "flashzoo check lazy.py -q -n 2" and f"\n{short}\n" in TUTORIAL


def test_extras_that_are_named_are_there():
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = re.findall(r"\.\[([\w,]+)\]", (ROOT / "docs" / "start.md").read_text())
    assert {"v3", "report"} <= {name for names in named for name in names.split(",")} <= set(extras)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page, or to a line of code, may say behind its #."""
    if page.suffix == ".py":
        return {f"L{number}" for number, _ in enumerate(page.read_text().splitlines(), 1)}
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("flashzoo/*/README.md")]),
]


def test_every_program_of_the_documents_is_run():
    """By `make newcomer`, by test_use, by test_learn and, of versions' READMEs, above."""
    run = {*SHOWN, "docs/write_a_variant.md", "docs/use.md", *(f"docs/learn/{name}.md" for name in TO_LEARN)}
    run |= {f"flashzoo/{name}/README.md" for name in IN_READMES}
    programs = {page.relative_to(ROOT).as_posix() for page in PAGES if "\n```python" in page.read_text()}
    assert len(programs) > 5 and programs <= run


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    prose = re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link.partition("#") for link in re.findall(r"\]\((?!https?:)([^)]+)\)", prose)]
    assert links
    for name, _, anchor in links:
        target = page.parent / name if name else page
        assert target.exists() and (not anchor or anchor in anchors(target)), f"{name}#{anchor}"
