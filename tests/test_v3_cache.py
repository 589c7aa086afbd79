"""Compiled CuTe DSL kernels are kept on disk, for other processes and later runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flashzoo._cute import cache
from flashzoo._cute.cache import ENVIRONMENT, Image, cached
from flashzoo.v3 import programs
from flashzoo_suite.support import ROOT, in_fresh_process

gpu = pytest.mark.gpu
on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="v3 runs on Hopper, sm_90, alone"
)
V3, HOPPER_ROOM = ROOT / "flashzoo" / "v3", ROOT / "flashzoo" / "_cute" / "hopper"
DEVICE = {
    program.partition(":")[0].rpartition(".")[2]
    for each in programs.PROGRAMS.values()
    for program in (each.device, each.by_gradient, each.halved)
} - {""}
"""Files of v3's programs."""
IMAGE = Image("kernel_of_a_test", bytes(range(256)) * 8)


class Builder:
    """A build function that counts its calls."""

    def __init__(self, image: Image = IMAGE) -> None:
        self.image, self.calls = image, 0

    def __call__(self) -> Image:
        self.calls += 1
        return self.image


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """As if they had been there before flashzoo was imported."""
    monkeypatch.setattr(cache, "__imported__", sys.maxsize)
    return folder_of(tmp_path / "sources", "tile = 64")


def folder_of(path: Path, code: str) -> Path:
    path.mkdir()
    (path / "kernel.py").write_text(code)
    return path


def import_now(monkeypatch) -> None:
    """As if flashzoo were imported."""
    monkeypatch.setattr(cache, "__imported__", time.time_ns())
    time.sleep(0.05)  # the clock by which files change ticks more slowly


def kept(folder: Path) -> Path:
    """The one file in the folder."""
    (path,) = folder.iterdir()
    return path


class TestCache:
    def test_builds_once(self, folder, sources):
        build = Builder()
        assert [cached(("a",), sources, build) for _ in range(3)] == [IMAGE] * 3
        assert build.calls == 1
        assert kept(folder).suffix == ".cubin"

    def test_is_by_identity(self, folder, sources):
        other = Builder(Image("another", b"code"))
        cached(("a",), sources, Builder())
        assert cached(("b",), sources, other) == other.image and other.calls == 1

    def test_is_by_sources_wherever_they_lie(self, folder, sources, tmp_path):
        cached(("a",), sources, Builder())
        moved, edited = Builder(), Builder()
        cached(("a",), folder_of(tmp_path / "moved", "tile = 64"), moved)
        cached(("a",), folder_of(tmp_path / "edited", "tile = 96"), edited)
        assert (moved.calls, edited.calls) == (0, 1)

    def test_is_by_sources_in_folders_too(self, folder, sources):
        cached(("a",), sources, Builder())
        folder_of(sources / "hopper", "stages = 2")
        build = Builder()
        cache._digest_of.cache_clear()
        cached(("a",), sources, build)
        assert build.calls == 1

    def test_is_by_all_that_kernels_are_made_of(self):
        """But for what is imported where the block of scales is said, of which kernels have nothing."""
        made, todo = set(), {path for path in HOPPER_ROOM.glob("*.py")} | {V3 / f"{name}.py" for name in DEVICE}
        while todo:
            made.add(path := todo.pop())
            text = path.read_text()
            names = re.findall(r"^from (flashzoo[.\w]*) import", text, re.MULTILINE)
            todo |= {ROOT / f"{name.replace('.', '/')}.py" for name in names} - made
        outside = {path for path in made if not path.is_relative_to(V3) and not path.is_relative_to(HOPPER_ROOM)}
        assert outside == {*cache.FACTS, *(ROOT / "flashzoo" / "call" / f"{name}.py" for name in ("features", "forms"))}

    def test_is_by_release_of_cute_dsl(self, folder, sources, monkeypatch):
        cached(("a",), sources, Builder())
        monkeypatch.setattr(cache, "version", lambda *_: "another")
        build = Builder()
        cached(("a",), sources, build)
        assert build.calls == 1

    @pytest.mark.parametrize("keeps_its_time", [False, True])
    def test_what_changed_since_the_import_is_not_kept_nor_taken(self, keeps_its_time, folder, sources, monkeypatch):
        """The process has loaded what was there before."""
        cached(("a",), sources, Builder())
        import_now(monkeypatch)
        new = folder_of(sources.parent / "new", "tile = 64") / "kernel.py"
        if keeps_its_time:
            os.utime(new, ns=(0, 0))
        new.replace(sources / "kernel.py")
        build = Builder()
        assert [cached((name,), sources, build) for name in "ab"] == [IMAGE] * 2
        assert build.calls == 2 and kept(folder)

    def test_what_changes_while_it_is_built_is_not_kept(self, folder, sources, monkeypatch):
        import_now(monkeypatch)

        def build() -> Image:
            (sources / "kernel.py").write_text("tile = 96")
            return IMAGE

        assert cached(("a",), sources, build) == IMAGE and not folder.exists()

    @pytest.mark.parametrize("length", [0, 5, 32, 40, 1000, -1])
    def test_a_file_cut_short_is_built_anew(self, length, folder, sources):
        cached(("a",), sources, Builder())
        path = kept(folder)
        path.write_bytes(path.read_bytes()[:length])
        self.is_built_anew(sources)

    @pytest.mark.parametrize("place", [0, 31, 32, 50, -1])
    def test_a_flipped_bit_is_built_anew(self, place, folder, sources):
        cached(("a",), sources, Builder())
        path = kept(folder)
        content = bytearray(path.read_bytes())
        content[place] ^= 16
        path.write_bytes(content)
        self.is_built_anew(sources)

    @pytest.mark.parametrize("rest", [b"", b"no line", b"\xff\xfe\ncode", b"no code\n"], ids=str)
    def test_a_whole_file_that_is_no_kernel_is_built_anew(self, rest, folder, sources):
        cached(("a",), sources, Builder())
        kept(folder).write_bytes(cache.hashlib.sha256(rest).digest() + rest)
        self.is_built_anew(sources)

    def is_built_anew(self, sources):
        build = Builder()
        assert [cached(("a",), sources, build) for _ in range(2)] == [IMAGE] * 2
        assert build.calls == 1

    def test_off(self, sources, monkeypatch, tmp_path):
        monkeypatch.setenv(ENVIRONMENT, "off")
        monkeypatch.chdir(tmp_path)
        build = Builder()
        assert [cached(("a",), sources, build) for _ in range(2)] == [IMAGE] * 2
        assert build.calls == 2 and list(tmp_path.iterdir()) == [sources]

    def test_lies_in_the_users_cache_folder_unless_told(self, sources, monkeypatch, tmp_path):
        monkeypatch.delenv(ENVIRONMENT)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        cached(("a",), sources, Builder())
        assert kept(tmp_path / "home" / ".cache" / "flashzoo").is_file()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        cached(("a",), sources, Builder())
        assert kept(tmp_path / "xdg" / "flashzoo").is_file()

    def test_a_folder_that_cannot_be_is_a_warning(self, sources, monkeypatch):
        # root may write anywhere, but not below a file
        monkeypatch.setenv(ENVIRONMENT, str(sources / "kernel.py" / "folder"))
        with pytest.warns(
            UserWarning, match=f"can't keep a compiled kernel in .*; set {ENVIRONMENT} to a folder, or to off"
        ):
            assert cached(("a",), sources, Builder()) == IMAGE

    def test_an_interrupted_writer_leaves_nothing_that_is_read(self, folder, sources, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", interrupt)
            with pytest.raises(KeyboardInterrupt):
                cached(("a",), sources, Builder(Image("half", b"written")))
        assert not list(folder.glob("*.cubin"))
        self.is_built_anew(sources)

    def test_many_processes_at_once(self, folder, sources):
        code = f"""if True:
            import sys
            from pathlib import Path
            from flashzoo._cute.cache import Image, cached
            print("ready", flush=True)
            sys.stdin.read()
            for i in range(100):
                image = Image(f"kernel_{{i}}", bytes([i]) * 100_000)
                assert cached((str(i),), Path({str(sources)!r}), lambda: image) == image
        """
        command, pipe = [sys.executable, "-c", code], subprocess.PIPE
        processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
        for process in processes:
            process.stdin.close()  # they all begin
        assert [process.wait(60) for process in processes] == [0] * 3
        assert sorted({path.suffix for path in folder.iterdir()}) == [".cubin"]
        assert len(list(folder.iterdir())) == 100
        for i in range(100):
            assert cached((str(i),), sources, Builder()) == Image(f"kernel_{i}", bytes([i]) * 100_000)


KERNEL_OF_A_FRESH_PROCESS = """if True:
    import hashlib, sys
    from flashzoo import Problem
    from flashzoo.v3 import programs
    from flashzoo.v3.config import kernel_for
    programs.Function = lambda image, *_: image  # what would load it on a GPU
    image = programs.function_for(kernel_for(Problem(1, 128, 128, 2, 2, 64, arch=90)))
    print(hashlib.sha256(image.cubin).hexdigest(), "cutlass" in sys.modules)
"""


def test_a_second_process_compiles_nothing_and_imports_no_cutlass(folder):
    first, second = (in_fresh_process(KERNEL_OF_A_FRESH_PROCESS).split() for _ in range(2))
    assert first == [second[0], "True"] and second[1] == "False"
    assert kept(folder).is_file()


FIRST_CALL = """if True:
    import sys, time, torch
    {imports}
    q = torch.randn(1, 256, 2, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    start = time.perf_counter()
    import flashzoo
    flashzoo.attention(q, q, q, causal=True, version="v3")
    torch.cuda.synchronize()
    print(time.perf_counter() - start, "cutlass" in sys.modules)
"""


@gpu
@on_hopper
@pytest.mark.alone  # it asks for seconds
def test_the_first_call_of_a_process(folder):
    empty, _ = in_fresh_process(FIRST_CALL.format(imports="import cutlass.cute")).split()
    again = [in_fresh_process(FIRST_CALL.format(imports="")).split() for _ in range(3)]
    filled = min(float(seconds) for seconds, _ in again)
    print(f"first call: {float(empty):.2f} s with an empty cache, {filled:.2f} s with a filled one")
    assert float(empty) < 5 and filled < 0.5
    assert {imported for _, imported in again} == {"False"}
