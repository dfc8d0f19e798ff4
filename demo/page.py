"""The results as one self-contained HTML file."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from demo.modules import (
    MODULE_KILL_RANK,
    MODULE_MOVED,
    MODULE_RESUME_STEP,
    MODULE_SCENARIOS,
    ModuleResults,
    describe,
)
from demo.plan import KILL_RANK, KILLED, LOSS_BOUND, RESUME_STEP, SCENARIOS
from demo.results import Results
from demo.tables import loss_rows, module_rows, traffic_rows

STYLE = """
:root { color-scheme: light; --ink: #22303c; --faint: #6b7a87; --line: #e3e8ec; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); max-width: 1100px;
       margin: 2.5rem auto; padding: 0 1.25rem; background: #fff; }
h1 { font-size: 1.7rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { max-width: 46rem; } img { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
.left th, .left td { text-align: left; }
.good { color: #0a8f6a; font-weight: 700; } .bad { color: #d1495b; font-weight: 700; }
"""


def write_page(results: Results, *, modules: ModuleResults, picture: Path, out: Path) -> Path:
    """Write `out/demo.html`, with the picture inside; returns its path."""
    image = base64.b64encode(picture.read_bytes()).decode("ascii")
    verdict = (
        '<span class="good">All checks held.</span>'
        if results.is_good
        else '<span class="bad">Checks failed.</span>'
    )
    columns = ["step", *(f"{item.title}<br>{item.layout}" for item in SCENARIOS)]
    module_columns = [
        "step",
        *(f"{item.title}<br>{item.layout}" for item in MODULE_SCENARIOS),
    ]
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Holdfast: killed and resumed</title><style>{STYLE}</style></head><body>
<h1>Killed and resumed</h1>
<p>A model of {results.num_parameters:,} parameters is trained on 4 processes. In a second run
rank {KILL_RANK} gets SIGKILL; all start again from the newest committed checkpoint, step
{RESUME_STEP}, as {KILLED.layout} and under three other layouts. {verdict}</p>
<img alt="Loss curves, their differences, and which rank wrote what"
 src="data:image/png;base64,{image}">
<h2>Checks</h2>
{_checks(results)}
<h2>Loss per step (nats per byte)</h2>
{_table(columns, loss_rows(results))}
<p>Under the same layout nothing may differ. Under another one the same numbers are added in
another order; the bound for that is {LOSS_BOUND:g}.</p>
<h2>Several modules: an encoder that moves (nats per token)</h2>
<p>In the end {escape(describe())}. Rank {MODULE_KILL_RANK}, of the encoder, is killed; from step
{MODULE_RESUME_STEP} on the run continues with the {escape(MODULE_MOVED.layout)}.</p>
{_table(module_columns, module_rows(modules))}
<h2>Saves and loads</h2>
{_table(("run", "layout", "what", "step", "bytes", "seconds"), traffic_rows(results))}
</body></html>
"""
    path = out / "demo.html"
    path.write_text(text, encoding="utf-8")
    return path


def _checks(results: Results) -> str:
    """The table of promises, each kept or not."""
    rows = "".join(
        f'<tr><td class="{"good" if check.is_kept else "bad"}">{"✓" if check.is_kept else "✗"}</td>'
        f"<td>{escape(check.what)}</td><td>{escape(check.found)}</td></tr>"
        for check in results.checks
    )
    return (
        f'<div class="scroll"><table class="left"><tr><th></th><th>promise</th><th>found</th></tr>'
        f"{rows}</table></div>"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
