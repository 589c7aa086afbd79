"""What `examples/llama.py` measured of a whole model, as sections of docs/use.md and, once there is anything, of the
README. `bench.plot` writes them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.readmes import Sections, table
from bench.runs import RESULTS, Row

MEASURED = RESULTS.with_name("llama.csv")
MEASURES = {
    "train": "training",
    "train_compiled": "training, compiled",
    "write": "writing",
    "write_compiled": "writing, compiled",
}
"""What the table calls what the example measures."""
BASELINE = "sdpa"


def rows_of(path: Path) -> list[Row]:
    """Those of the last model that was measured: of each measure, whose implementations take turns in one run, those of
    its last; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    of = ("gpu", "torch", "transformers", "size", "seqlen", "context", "new")
    same = [row for row in rows if all(row[name] == rows[-1][name] for name in of)]
    last = {row["measure"]: row["commit"] for row in same}
    of_last = [row for row in same if row["commit"] == last[row["measure"]]]
    return list({(row["measure"], row["implementation"]): row for row in of_last}.values())


def section(rows: list[Row]) -> Iterator[str]:
    """What was measured in a sentence, and a table of it."""
    if not rows:
        yield "Nothing of it is measured yet."
        return
    first = rows[0]
    yield (
        f"Tokens a second of a Llama of {float(first['parameters']) / 1e9:.1f} billion parameters with random weights, "
        f"{doing(rows)}, in bf16; in brackets over `{BASELINE}`'s. {first['gpu']}, torch {first['torch']}, "
        f"transformers {first['transformers']}, {runs_of(rows)} ([rows](bench/results/{MEASURED.name})). {turns(rows)}"
    )
    yield shown(rows)


def short(rows: list[Row]) -> Iterator[str]:
    """The same for the first page: nothing where nothing is measured."""
    if not rows:
        return
    first = rows[0]
    yield (
        f"In a whole model, Hugging Face transformers' Llama of {float(first['parameters']) / 1e9:.1f} billion "
        f"parameters, tokens a second on one {first['gpu']}, {doing(rows)}; in brackets over `{BASELINE}`'s. "
        f"{turns(rows)} [In your model](docs/use.md#hugging-face-transformers) says what was run."
    )
    yield shown(rows)


def measures_by(rows: list[Row], said: Callable[[Row], str]) -> dict[str, str]:
    """In words the measures of whose rows the same is said."""
    told: dict[str, dict[str, None]] = {}
    for measure, word in MEASURES.items():
        for row in rows:
            if row["measure"] == measure:
                told.setdefault(said(row), {})[word] = None
    return {text: "; ".join(words) for text, words in told.items()}


def runs_of(rows: list[Row]) -> str:
    """At which commit each measure was made, and when."""
    told = measures_by(rows, lambda row: f"commit {row['commit']} of {row['date']}")
    return " and ".join(f"{run} ({words})" if len(told) > 1 else run for run, words in told.items())


def turns(rows: list[Row]) -> str:
    """Of how many turns the figures are medians."""
    told = measures_by([row for row in rows if row["tokens_s"]], lambda row: row["rounds"])
    of = (f"of {n} turn{'s' * (n != '1')} ({words})" for n, words in told.items())
    return f"Medians {', '.join(of)}."


def doing(rows: list[Row]) -> str:
    """What the model did, of what was measured."""
    of, measures = rows[0], {row["measure"].partition("_")[0] for row in rows}
    did = {"train": f"training on {of['seqlen']} tokens", "write": f"writing {of['new']} behind {of['context']}"}
    return " and ".join(words for measure, words in did.items() if measure in measures)


def shown(rows: list[Row]) -> str:
    """A table: of each implementation the speed in each measure, or in a word why there is none."""
    of = {(row["measure"], row["implementation"]): row for row in rows}
    found = {key: float(row["tokens_s"]) for key, row in of.items() if row["tokens_s"]}
    measures = [measure for measure in MEASURES if any(measure == its for its, _ in of)]
    lines = []
    names = dict.fromkeys(row["implementation"] for row in rows)
    for name in sorted(names, key=lambda name: all(name != its for _, its in found)):
        cells = []
        for measure in measures:
            mine, base = found.get((measure, name)), found.get((measure, BASELINE))
            over = f" ({mine / base:.2f}x)" if mine and base and name != BASELINE else ""
            why = of[measure, name]["why"].partition(":")[0] if (measure, name) in of else "-"
            cells.append(f"{mine:.{0 if mine >= 1000 else 1}f}{over}" if mine else why)
        lines.append([f"`{name}`" + (", torch's" if name == BASELINE else ""), *cells])
    return table(("", *(MEASURES[measure] for measure in measures)), lines)


SECTIONS: dict[str, Sections] = {
    "docs/use.md": {"llama": lambda _: section(rows_of(MEASURED))},
    "README.md": {"llama": lambda _: short(rows_of(MEASURED))},
}
"""By file, then by the name of the section."""
