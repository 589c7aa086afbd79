"""What `examples/llama.py` measured of a whole model, as the section of docs/use.md. `bench.plot` writes it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
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
    """Those of the last model that was measured, the last of each measure and implementation; none where there is no
    file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    of = ("commit", "gpu", "torch", "transformers", "size", "seqlen", "context", "new")
    same = [row for row in rows if all(row[name] == rows[-1][name] for name in of)]
    return list({(row["measure"], row["implementation"]): row for row in same}.values())


def section(rows: list[Row]) -> Iterator[str]:
    """What was measured in a sentence, and a table of it."""
    if not rows:
        yield "Nothing of it is measured yet."
        return
    first = rows[0]
    yield (
        f"Tokens a second of a Llama of {float(first['parameters']) / 1e9:.1f} billion parameters with random weights, "
        f"training on {first['seqlen']} tokens and writing {first['new']} behind {first['context']}, in bf16; in "
        f"brackets over `{BASELINE}`'s. {first['gpu']}, torch {first['torch']}, transformers {first['transformers']}, "
        f"commit {first['commit']}, {first['date']} ([rows](bench/results/{MEASURED.name}))."
    )
    found = {(row["measure"], row["implementation"]): float(row["tokens_s"]) for row in rows}
    measures = [measure for measure in MEASURES if any(measure == of for of, _ in found)]
    lines = []
    for name in dict.fromkeys(row["implementation"] for row in rows):
        cells = []
        for measure in measures:
            mine, base = found.get((measure, name)), found.get((measure, BASELINE))
            over = f" ({mine / base:.2f}x)" if mine and base and name != BASELINE else ""
            cells.append(f"{mine:.{0 if mine >= 1000 else 1}f}{over}" if mine else "-")
        lines.append([f"`{name}`" + (", torch's" if name == BASELINE else ""), *cells])
    yield table(("", *(MEASURES[measure] for measure in measures)), lines)


SECTIONS: dict[str, Sections] = {"docs/use.md": {"llama": lambda _: section(rows_of(MEASURED))}}
"""By file, then by the name of the section."""
