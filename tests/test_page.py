"""The page of `flashzoo report` in a browser: its answers, its figures, its widths. Skipped where there is no Chromium,
but not on CI."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from page_questions import PLAIN, QUESTIONS

import flashzoo
from bench import choose, report, runs
from bench.browser import CHROMIUM, READY, WIDTHS, browser
from bench.contenders import parted
from bench.peers import PEERS
from bench.rows import read
from flashzoo.registry import Explanation

pytest.importorskip("bokeh")
pytest.importorskip("playwright")
if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("needs Chromium", allow_module_level=True)

BARS = """[...document.querySelectorAll("[data-choice] tbody tr")]
  .map(row => [...row.cells].map(cell => cell.textContent))"""
ASK = """([pass, answers]) => {
  const section = document.querySelector("[data-choice]");
  const choose = (label, answer) => {
    const found = [...section.querySelectorAll(".questions label")].find(one => one.firstChild.data === label);
    const select = found.querySelector("select");
    if (![...select.options].some(option => option.value === answer)) throw Error(`${label} has no ${answer}`);
    select.value = answer;
    select.dispatchEvent(new Event("change"));
  };
  choose("pass", pass);
  for (const [label, answer] of Object.entries(answers)) choose(label, answer);
  const text = query => section.querySelector(query).textContent;
  return {
    answer: text(".answer"), what: text("[data-what]"), code: text("pre code"), explained: text("details pre"),
    bars: BARS,
  };
}""".replace("BARS", BARS)
"""A reader who chooses, in the page's JavaScript, and what there is to read then."""
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const linear = x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(x => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = node => {
    for (; node; node = node.parentElement) {
      const { backgroundColor } = getComputedStyle(node);
      if (backgroundColor !== "rgba(0, 0, 0, 0)") return backgroundColor;
    }
  };
  const texts = document.querySelectorAll("p, a, label, td[style], .refused a, .none td, .soft, select, th");
  const ratios = [...texts].map(node => {
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => b - a);
    return (a + 0.05) / (b + 0.05);
  });
  return Math.min(...ratios);
})()"""
"""The least contrast of a text to its ground, as the Web Content Accessibility Guidelines have it."""
START = {"inputs": "16 bits (bf16)", "head dim": "128", "heads": "16:16", "mask": "causal", "feature": "nothing"}
"""What a question leaves open."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens the page of rows; what the console was told, and what the page asked of others, is in its `told`."""
    with browser() as chromium:

        def page_of(rows: list[dict[str, str]]):
            path = tmp_path_factory.mktemp("page") / "report.html"
            path.write_text(report.page(rows, runs.RESULTS), encoding="utf-8")
            assert path.stat().st_size < 4e6
            page = chromium.new_page(viewport={"width": WIDTHS[0], "height": 900})
            page.told = []
            page.on("console", lambda message: page.told.append(message.text))
            page.on("pageerror", lambda error: page.told.append(str(error)))
            page.on("request", lambda request: page.told.append(request.url))
            page.goto(path.as_uri())
            page.wait_for_selector(READY)
            assert page.told.pop(0) == path.as_uri()
            return page

        yield page_of


@pytest.fixture(scope="module")
def page(opened):
    """That of the committed results."""
    return opened(read(runs.RESULTS))


def explained(code: str) -> Explanation:
    """What `flashzoo.explain` says of the page's lines of Python, on tensors without data."""
    setup, call = code.replace('"cuda"', '"meta"').rsplit("\n", 1)
    scope = {"torch": torch, "flashzoo": flashzoo}
    exec(setup, scope)
    return eval(call.removeprefix("out = ").replace("attention(", "explain(")[:-1] + ", arch=90)", scope)


def fastest(rows: list[dict[str, str]], what: str) -> str:
    """Whom these rows have as the fastest in the run that the page names, in cells of as many heads and sequences."""
    told = re.search(r"Measured: (\d+) .*?(\d+):(\d+) heads.* run (\S+)\.(?: Alone: .*)?$", what)
    size, heads, heads_kv, run = told.groups()
    wanted = {"run": run, "batch": size, "heads": heads, "heads_kv": heads_kv}
    mine = [row for row in rows if wanted.items() <= row.items()]
    return parted(min(mine, key=lambda row: float(row["ms"]))["impl"])[0]


def test_the_choice_is_explains_and_the_results_files(page):
    assert len(QUESTIONS) == 20
    results = [row for row in read(runs.RESULTS) if not row["why"]]
    for question, (pass_, answers, who, columns) in QUESTIONS.items():
        page.evaluate(ASK, ["forward", START])
        found = page.evaluate(ASK, [pass_, answers])
        assert found["answer"].startswith(f"{who} takes it"), question
        wanted = {"pass": {"forward": "fwd", "backward": "bwd"}.get(pass_, pass_), **PLAIN, **(columns or {})}
        timed = [row for row in results if columns and wanted.items() <= row.items()]
        if timed:
            best = fastest(timed, found["what"])
            assert f"; {best} was the fastest measured" in found["answer"] and found["bars"][0][0] == best, question
        else:
            assert found["what"] == "Nothing like it was measured.", question
        names = [row[0] for row in found["bars"]]
        assert sorted(names) == sorted({*flashzoo.versions(), *PEERS}), question
        assert all(row[-1] for row in found["bars"] if len(row) == 2), "who has no bar says why"
        told = str(explained(found["code"]))
        assert found["explained"] == told.split("\n", 1)[1], question
    assert page.told == []


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_page(page, width):
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # What is wider is in a box that scrolls, and that the keyboard reaches.
    assert page.evaluate("[...document.querySelectorAll('.scroll, pre')].every(box => box.tabIndex === 0)")
    canvases = page.locator(".plot canvas").all()
    assert len(canvases) >= 4 and all(0 < canvas.bounding_box()["width"] <= width for canvas in canvases)


CURVES = "Bokeh.documents.flatMap(one => one.roots()).find(root => root.name === 'curves')"
POINT = """root => {
  const { data } = root.renderers.find(one => one.name === "v3").data_source, { frame } = Bokeh.index.find_one(root);
  return [frame.x_scale.compute(data.x[0]), frame.y_scale.compute(data.y[0])];
}"""
"""Where the first point of v3 is, in the figure's pixels."""


def test_a_figure_says_what_the_mouse_is_on_and_zooms(page):
    page.set_viewport_size({"width": WIDTHS[1], "height": 900})
    figure = page.locator("[data-figure=curves]")
    plot, cells = figure.locator(".plot"), figure.locator("select").nth(1)
    plot.scroll_into_view_if_needed()
    box, (x, y) = plot.bounding_box(), page.evaluate(f"({POINT})({CURVES})")
    page.mouse.move(box["x"] + x, box["y"] + y)
    page.get_by_text("at 512").wait_for()
    whole = page.evaluate(f"{CURVES}.y_range.end")
    page.mouse.down()
    page.mouse.move(box["x"] + x + 200, box["y"] + y + 60, steps=3)
    page.mouse.up()
    page.wait_for_function(f"{CURVES}.y_range.end < {whole} - 100")
    cells.select_option("head dim 64")
    page.wait_for_function(f"{CURVES}.y_range.end > 500")
    assert page.told == []


def test_figures_show_what_is_chosen_and_hide_what_is_not_wanted(page):
    figure = page.locator("[data-figure=curves]")
    drawn = f"{CURVES}.renderers.filter(one => one.name && one.data_source.data.x.length).map(one => one.name)"
    select = figure.locator("select")
    assert {"v3", "v2", "v1", "fa4"} <= set(page.evaluate(drawn))
    figure.get_by_label("v3", exact=True).uncheck()
    assert "v3" not in page.evaluate(drawn) and "v2" in page.evaluate(drawn)
    figure.get_by_label("v3", exact=True).check()
    select.first.select_option("Decoding")
    decoding = set(page.evaluate(drawn))
    assert {"decode", "sdpa_cudnn"} <= decoding and "v3" not in decoding
    table = figure.locator("details table")
    figure.locator("summary").click()
    heads = table.locator("th[scope=col]").all_inner_texts()
    assert heads[0].startswith("keys") and set(heads[1:]) == decoding
    assert "GB/s" in figure.locator("[role=img]").get_attribute("aria-label")
    assert page.told == []


def test_every_row_of_a_run_is_a_click_away_and_sorts(page):
    every = read(runs.RESULTS)
    largest, _ = Counter(row["run"] for row in every).most_common(1)[0]
    rows = [row for row in every if row["run"] == largest]
    box = page.locator("[data-rows]")
    box.locator("select").select_option(rows[0]["run"])
    assert box.locator("tbody tr").count() == len(rows)
    head = box.locator("th", has_text=re.compile("^ms$"))
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    column = head.evaluate(
        "th => [...th.closest('table').tBodies[0].rows].map(row => row.cells[th.cellIndex].textContent)"
    )
    times = [float(text) for text in column if text]
    assert times == sorted(times) and len(times) > 100 and column[len(times) :] == [""] * (len(column) - len(times))


def test_light_and_dark_and_paper(page):
    axis = "Bokeh.documents[0].roots()[0].below[0].axis_label_text_color"
    of_body = "(({ color, backgroundColor }) => [color, backgroundColor])(getComputedStyle(document.body))"
    page.emulate_media(color_scheme="light")
    light, of_axis = page.evaluate(of_body), page.evaluate(axis)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => {axis} !== light", arg=of_axis)  # pictures are told of it by an event
    assert all(now != before for now, before in zip(page.evaluate(of_body), light, strict=True))
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible() and page.locator("main").is_visible()
    assert page.evaluate("Bokeh.documents[0].roots()[0].below[0].axis_label_text_color") == "#000", (
        "of dark screens too"
    )
    page.emulate_media(media="screen", color_scheme="light")


def test_what_a_screen_reader_needs(page):
    """Names for what is asked, headings in order, and text that stands out from its ground."""
    asked = "[...document.querySelectorAll('select, input, button')]"
    unnamed = f"{asked}.filter(one => !(one.labels?.length || one.textContent.trim())).length"
    assert page.evaluate(unnamed) == 0
    levels = [
        int(tag[1]) for tag in page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(head => head.tagName)")
    ]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert page.evaluate("[...document.querySelectorAll('th')].every(head => head.scope)")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(CONTRAST) >= 4.5, scheme
    page.emulate_media(color_scheme="light")


def test_who_was_timed_alone_tells_speed_and_joules(opened, monkeypatch):
    """In the choice, where each has what was measured of it, and in the figure, whose table has the cells."""
    grid, asked = choose.GRIDS["forward"], {**START, "length": "8k"}
    axes = {name: tuple(one for one in axis if one.label == asked[name]) for name, axis in grid.axes.items()}
    monkeypatch.setattr(choose, "GRIDS", {"forward": replace(grid, axes=axes)})
    of = {**PLAIN, "pass": "fwd", "head_dim": "128", "seqlen_k": "8192", "causal": "1", "why": ""}
    like = next(row for row in read(runs.RESULTS) if of.items() <= row.items())
    timed = {
        "v3": {"ms": "2.5", "tflops": "400", "settled_ms": "4", "joules": "2"},
        "fa4": {"ms": "5", "tflops": "200", "settled_ms": "10", "joules": ""},
        "v2": {"ms": "10", "tflops": "100", "settled_ms": "", "joules": ""},
    }
    page = opened([{**like, "impl": impl, **columns} for impl, columns in timed.items()])
    choice = page.locator("[data-choice]")
    assert choice.locator("thead th").all_text_contents()[-2:] == ["alone, TFLOP/s", "alone, J a call"]
    bars = {row[0]: row[-2:] for row in page.evaluate(BARS)}
    assert (bars["v3"], bars["fa4"], bars["v2"]) == (["250", "2"], ["100", ""], ["", ""])
    figure = page.locator("[data-figure=energy]")
    figure.locator("summary").press("Enter")
    assert figure.locator("details td, details th[scope=row]").all_inner_texts() == [
        *("v3", "250", "2", "head dim 128, causal, 8k: 2 J a call, 500 W")
    ]
    below = "[...document.querySelectorAll('h2')].map(head => head.id)"
    assert page.evaluate(f"{below}.indexOf('energy') - {below}.indexOf('errors')") == 1
    drawn = "Bokeh.documents.flatMap(one => one.roots()).find(root => root.name === 'energy').renderers"
    assert page.evaluate(f"{drawn}.map(one => [one.name, one.data_source.data.x])") == [["v3", [250]]]
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[0] and page.told == []
    page.close()
