"use strict";
let DATA; // what `bench.report.data_of` has, compressed in the page
const NUMBER = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, useGrouping: false });
const FIRST = "head dim 128, causal"; // cells that a figure begins with
const WORDS = new Intl.Collator("en", { numeric: true });

/** An element with attributes, and with nodes and texts in it. */
function make(tag, attributes = {}, ...inside) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...inside);
  return made;
}

/** A labelled select of these texts, which calls `changed` when another is chosen. */
function question(label, answers, changed) {
  const select = make("select", {}, ...answers.map(answer => make("option", {}, answer)));
  select.addEventListener("change", changed);
  return { label, select, node: make("label", {}, label, select) };
}

/** A table of texts; a row's first cell is its head. */
function tableOf(columns, rows, heads = true) {
  const head = make("tr", {}, ...columns.map(name => make("th", { scope: "col" }, name)));
  const cell = (text, column) => heads && column === 0 ? make("th", { scope: "row" }, text) : make("td", {}, text);
  const body = rows.map(row => make("tr", {}, ...row.map(cell)));
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  sortable(table);
  return table;
}

// A click on a column's head sorts by it: upwards, downwards, as it was. What is empty comes last.
const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

function value(row, column) {
  const text = row.cells[column].textContent.trim();
  return /^-?[\d.]+(e[-+]?\d+)?%?( \(.*\))?$/.test(text) ? parseFloat(text) : text;
}

function compare(a, b, sign) {
  const empty = [a, b].map(x => x === "" || x === "-");
  if (empty[0] || empty[1]) return empty[0] - empty[1];
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : WORDS.compare(a, b));
}

function sortable(table) {
  const body = table.tBodies[0], rows = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = make("button", { type: "button" }, ...head.childNodes);
    head.append(button);
    head.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const order = NEXT[head.getAttribute("aria-sort")], sign = order === "descending" ? -1 : 1;
      for (const other of table.querySelectorAll("th[aria-sort]")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", order);
      const sorted = [...rows];
      if (order !== "none") sorted.sort((a, b) => compare(value(a, column), value(b, column), sign));
      body.append(...sorted);
    });
  });
}

/** Which kernel for me: the questions of a pass, and at the place that their answers give what explain says and the
 *  cell that was measured. */
class Choice {
  constructor(section) {
    this.find = query => section.querySelector(query);
    this.form = this.find(".questions");
    this.pass = question("pass", Object.keys(DATA.choice.grids), () => this.ask());
    this.model = question("a model's layers", ["-", ...Object.keys(DATA.choice.models)], () => this.preset());
    this.find("button").addEventListener("click", () => this.copy());
    this.questions = [];
    this.ask();
  }

  get grid() { return DATA.choice.grids[this.pass.select.value]; }

  /** The questions of the pass; answers that it has too are kept. */
  ask() {
    const before = Object.fromEntries(this.questions.map(({ label, select }) => [label, select.value]));
    const axes = Object.entries(this.grid.axes);
    this.questions = axes.map(([label, axis]) => question(label, axis.map(answer => answer.label), () => {
      this.model.select.value = "-";
      this.answer();
    }));
    this.set({ "head dim": "128", heads: "16:16", length: "8k", mask: "causal", ...before });
    this.form.replaceChildren(...[this.pass, this.model, ...this.questions].map(one => one.node));
    this.answer();
  }

  set(answers) {
    for (const { label, select } of this.questions) {
      if ([...select.options].some(option => option.value === answers[label])) select.value = answers[label];
    }
  }

  preset() {
    this.set(DATA.choice.models[this.model.select.value] ?? {});
    this.answer();
  }

  answer() {
    const { grids, outcomes, verdicts, cells, peers } = DATA.choice;
    const chosen = this.questions.map(({ label, select }) => this.grid.axes[label][select.selectedIndex]);
    const place = this.questions.reduce((n, { select }) => n * select.length + select.selectedIndex, 0);
    const outcome = outcomes[this.grid.outcomes[place]], cell = cells[this.grid.cells[place]];
    const [who, numbers] = typeof outcome === "string" ? [null, []] : outcome;
    const said = numbers.map(number => verdicts[number]);
    const best = cell?.bars[0];
    this.find(".answer").textContent = typeof outcome === "string" ? `No such call: ${outcome}`
      : `${who ?? "No version"} takes it` + (best ? `; ${best[0]} was the fastest measured, ${NUMBER.format(best[1])} ${cell.unit}.` : ".");
    const alone = cell?.bars.some(bar => bar[6]) ? " Alone: the same call again and again, once the GPU's clocks have settled." : "";
    this.find("[data-what]").textContent = cell ? `Measured: ${cell.what}, run ${cell.run}.${alone}` : "Nothing like it was measured.";
    this.bars(cell, said, who?.split(" ")[0]);
    this.find("pre code").textContent = this.code(chosen);
    this.find("details pre").textContent = said.map(([, , lines]) => lines).join("\n");
  }

  bars(cell, said, who) {
    const timed = cell?.bars ?? [], names = new Set(timed.map(([name]) => name));
    const texts = timed.map(([, rate, ms, low, high, error, alone, joules]) => ({
      [cell.unit]: NUMBER.format(rate),
      "ms (p10 to p90)": `${NUMBER.format(ms)} (${low} to ${high})`,
      "RMS error": error?.toExponential(1) ?? "",
      [`alone, ${cell.unit}`]: alone ? NUMBER.format(alone) : "",
      "alone, J a call": joules ? NUMBER.format(joules) : "",
    }));
    const columns = Object.keys(texts[0] ?? {}).filter(head => texts.some(text => text[head]));
    const heads = this.find("thead tr"), always = [...heads.cells].slice(0, 2);
    heads.replaceChildren(...always, ...columns.map(head => make("th", { scope: "col" }, head)));
    const rows = timed.map(([name, rate], place) => {
      const fill = make("span", { class: "fill", style: `width:${100 * rate / timed[0][1]}%` });
      const own = !DATA.choice.peers.includes(name) ? "own" : "";
      return make("tr", { class: `${own} ${name === who ? "taken" : ""}` }, make("th", { scope: "row" }, name),
        make("td", { class: "bar" }, fill), ...columns.map(head => make("td", {}, texts[place][head])));
    });
    const absent = [
      ...said.map(([name, takes, lines]) => [name, takes ? "takes it, and was not measured" : lines.split(/\n\s+- /).slice(1).join("; ")]),
      ...DATA.choice.peers.map(name => [name, cell?.whys[name] ?? "not measured"]),
    ];
    for (const [name, why] of absent) {
      if (names.has(name)) continue;
      rows.push(make("tr", { class: `none ${name === who ? "taken" : ""}` }, make("th", { scope: "row" }, name), make("td", { colspan: columns.length + 1 }, why)));
    }
    this.find("tbody").replaceChildren(...rows);
  }

  /** The call, and what makes its tensors. */
  code(chosen) {
    const fields = Object.assign({}, ...chosen.map(answer => answer.fields));
    const { batch = Math.max(1, Math.floor(DATA.choice.tokens / fields.seqlen_k)), heads, heads_kv, head_dim, head_dim_v = head_dim } = fields;
    const [q, k] = chosen.map(answer => answer.shapes).filter(Boolean).at(-1) ?? this.grid.shapes;
    const made = (fields.dtype === "e4m3" ? ".to(torch.float8_e4m3fn)" : "")
      + (this.pass.select.value === "backward" ? ".requires_grad_()" : "");
    const drawn = (name, shape) => `${name} = torch.randn(${shape}, device="cuda", dtype=torch.bfloat16)${made}`;
    const asked = [this.grid.code, ...chosen.map(answer => answer.code)].filter(Boolean);
    return [
      `batch, seqlen, heads, heads_kv = ${batch}, ${fields.seqlen_k}, ${heads}, ${heads_kv}`,
      `head_dim, head_dim_v = ${head_dim}, ${head_dim_v}`,
      drawn("q", q), drawn("k", `${k}, head_dim`), drawn("v", `${k}, head_dim_v`),
      ...[this.grid.setup, ...chosen.map(answer => answer.setup)].filter(Boolean),
      `out = flashzoo.attention(${["q", "k", "v", ...asked].join(", ")})`,
    ].join("\n");
  }

  async copy() {
    const code = this.find("pre code"), told = this.find("[data-copied]");
    try {
      await navigator.clipboard.writeText(code.textContent);
      told.textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(code);
      told.textContent = "Selected: copy it with the keyboard.";
    }
  }
}

/** A figure of Bokeh's, which shows the group that a reader chose. */
class Figure {
  constructor(node, { tree, item, keys }) {
    Object.assign(this, { node, tree, item, keys, hidden: new Set(), questions: [] });
    this.plot = node.querySelector(".plot");
    this.choose(0, tree);
  }

  async draw() {
    [this.view] = (await Bokeh.embed.embed_item(this.item, this.plot)).roots;
    this.model = this.view.model;
    if (matchMedia("(pointer: coarse)").matches) this.model.toolbar.active_drag = null; // a finger scrolls the page
    this.themed();
    this.show();
  }

  /** Selects from this depth of the tree on; a choice that is there below too is kept. */
  choose(depth, tree) {
    const before = this.questions.splice(depth).map(({ select }) => select.value);
    for (let below = tree; !below.points;) {
      const at = this.questions.length, labels = Object.keys(below), here = below;
      const one = question(["of", "cells", "shown"][at], labels, () => {
        this.choose(at + 1, here[one.select.value]);
        this.fill();
      });
      const kept = [before[at - depth], FIRST].find(label => labels.includes(label));
      if (kept) one.select.value = kept;
      this.questions.push(one);
      below = below[one.select.value];
    }
    this.node.querySelector(".questions").replaceChildren(...this.questions.map(({ node }) => node));
  }

  get group() { return this.questions.reduce((tree, { select }) => tree[select.value], this.tree); }

  fill() {
    const { x, y, words, points } = this.group, names = Object.keys(points);
    const title = this.questions.map(({ select }) => select.value).join(", ");
    this.plot.setAttribute("aria-label", `${title}: ${y} by ${x}, of ${names.join(", ")}. The table below has the numbers.`);
    const boxes = names.map(name => {
      const box = make("input", { type: "checkbox", "aria-label": name });
      box.checked = !this.hidden.has(name);
      box.addEventListener("change", () => {
        this.hidden[box.checked ? "delete" : "add"](name);
        this.show();
      });
      const [colour, mark] = this.keys[name];
      return make("label", {}, box, make("span", { class: "key", style: `color:${colour}`, "aria-hidden": "true" }, mark), name);
    });
    const field = this.node.querySelector("fieldset");
    field.replaceChildren(field.firstElementChild, ...boxes);
    this.show();
    this.view?.reset(); // no zoom of other points
    const cell = (name, place) => points[name].filter(([x]) => x === place).map(([, y]) => NUMBER.format(y)).join(", ");
    const table = words ? tableOf([x, ...names], words.map(place => [place, ...names.map(name => cell(name, place))]))
      : tableOf(["name", x, y, "what"], names.flatMap(name => points[name].map(([x, y, more]) => [name, NUMBER.format(x), NUMBER.format(y), more])));
    this.node.querySelector("details .scroll").replaceChildren(table);
  }

  /** Give each source its points, those that are hidden none. */
  show() {
    if (!this.model) return;
    const { x, y, words, points } = this.group;
    this.model.below[0].axis_label = x;
    this.model.left[0].axis_label = y;
    if (words) this.model.x_range.factors = words;
    for (const source of new Set(this.model.renderers.map(renderer => renderer.data_source))) {
      const mine = this.hidden.has(source.name) ? [] : points[source.name] ?? [];
      const column = place => mine.map(point => point[place]);
      source.data = { x: column(0), y: column(1), more: column(2) };
    }
  }

  /** The page's colours, which may change with those of the system. */
  themed() {
    const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue(name).trim();
    if (!this.model) return;
    for (const axis of [...this.model.below, ...this.model.left]) {
      Object.assign(axis, { major_label_text_color: of("--text"), axis_label_text_color: of("--text"),
        axis_line_color: of("--line"), major_tick_line_color: of("--line"), minor_tick_line_color: null });
    }
    for (const grid of this.model.center) grid.grid_line_color = of("--line");
  }
}

/** Every row of the run that a reader chooses. */
class Rows {
  constructor(node) {
    this.node = node;
    this.run = question("every row of", ["-", ...Object.keys(DATA.rows)], () => this.fill());
    node.querySelector(".questions").replaceChildren(this.run.node);
  }

  fill() {
    const { columns, rows } = DATA.rows[this.run.select.value] ?? { columns: [], rows: [] };
    this.node.querySelector(".scroll").replaceChildren(...(rows.length ? [tableOf(columns, rows, false)] : []));
  }
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), character => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function main() {
  document.querySelectorAll("table.sorts").forEach(sortable);
  DATA = await unpacked(document.getElementById("data").textContent);
  new Choice(document.querySelector("[data-choice]"));
  new Rows(document.querySelector("[data-rows]"));
  const nodes = [...document.querySelectorAll("[data-figure]")];
  const figures = nodes.map(node => new Figure(node, DATA.figures[node.dataset.figure]));
  Bokeh.logger.set_level("error"); // set_log_level tells the console so
  figures.forEach(figure => figure.fill());
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => figures.forEach(figure => figure.themed()));
  }
  await Promise.all(figures.map(figure => figure.draw()));
  document.documentElement.dataset.ready = "";
}

main();
