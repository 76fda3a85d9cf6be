"""A laid-out table as Markdown (columns aligned, so that it reads in a terminal too) and as LaTeX (booktabs)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

STAR, DAGGER = "*", "†"


@dataclass(frozen=True)
class Entry:
    """What one cell shows."""

    text: str
    value: float
    """Full precision, for sorting."""
    half: str = ""
    """Half of the interval, in the unit of `text`."""
    is_best: bool = False
    is_significant: bool = False
    is_incomplete: bool = False

    @property
    def marks(self) -> str:
        """`*` differs from the baseline, `†` incomplete."""
        return (STAR if self.is_significant else "") + (DAGGER if self.is_incomplete else "")


@dataclass(frozen=True)
class Block:
    """Rows under one heading."""

    title: str
    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Entry]]]

    def as_json(self) -> dict[str, Any]:
        """Plain data; a value that does not exist is null."""
        rows = [{"label": label, "entries": [_entry_json(entry) for entry in entries]} for label, entries in self.rows]
        return {"title": self.title, "header": list(self.header), "rows": rows}


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry), "value": float(entry.value) if math.isfinite(entry.value) else None}


@dataclass(frozen=True)
class Sheet:
    """A table ready to be set."""

    name: str
    caption: str
    blocks: Sequence[Block]
    notes: Sequence[str]

    @classmethod
    def from_json(cls, sidecar: Mapping[str, Any]) -> Sheet:
        """The sheet that a table's sidecar describes."""
        blocks = [
            Block(
                block["title"],
                block["header"],
                [(row["label"], [_entry(entry) for entry in row["entries"]]) for row in block["rows"]],
            )
            for block in sidecar["blocks"]
        ]
        return cls(sidecar["name"], sidecar["caption"], blocks, sidecar["notes"])


def _entry(data: Mapping[str, Any]) -> Entry:
    return Entry(**{**data, "value": math.nan if data["value"] is None else data["value"]})


# --- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(sheet: Sheet) -> str:
    """The sheet as Markdown: caption, a table per block, notes."""
    lines = [f"# {sheet.name}", "", sheet.caption, ""]
    for block in sheet.blocks:
        lines += [*([f"**{block.title}**", ""] if block.title else []), *block_lines(block), ""]
    return "\n".join([*lines, *(f"- {note}" for note in sheet.notes), ""])


def block_lines(block: Block) -> list[str]:
    """A block as an aligned Markdown table."""
    texts = [["run", *block.header]] + [[label, *(_markdown_entry(entry) for entry in entries)] for label, entries in block.rows]
    texts = [[text.replace("|", "\\|") for text in row] for row in texts]
    widths = [max(3, *(len(row[column]) for row in texts)) for column in range(len(texts[0]))]
    rule = "|".join(["-" * (widths[0] + 2), *(f"{'-' * (width + 1)}:" for width in widths[1:])])
    lines = [f"| {' | '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])} |" for row in texts]
    return [lines[0], f"|{rule}|", *lines[1:]]


def _markdown_entry(entry: Entry) -> str:
    text = f"**{entry.text}**" if entry.is_best else entry.text
    return f"{text} ±{entry.half}{entry.marks}" if entry.half else f"{text}{entry.marks}"


# --- LaTeX -------------------------------------------------------------------------------------------------------------

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    "<": r"$<$",
    ">": r"$>$",
}


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


def latex(sheet: Sheet) -> str:
    """The sheet as a LaTeX table environment for booktabs; the notes stand below it in small type."""
    width = max(len(block.header) for block in sheet.blocks)
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table*}",
        r"\centering",
        rf"\caption{{{escape_latex(sheet.caption)}}}",
        rf"\label{{tab:{sheet.name}}}",
        rf"\begin{{tabular}}{{l{'r' * width}}}",
        r"\toprule",
    ]
    for number, block in enumerate(sheet.blocks):
        lines += [r"\midrule"] if number else []
        lines += (
            [rf"\multicolumn{{{len(block.header) + 1}}}{{l}}{{\emph{{{escape_latex(block.title)}}}}} \\"] if block.title else []
        )
        lines += [_latex_row(["", *map(escape_latex, block.header)]), r"\midrule"]
        lines += [_latex_row([escape_latex(label), *map(_latex_entry, entries)]) for label, entries in block.rows]
    notes = " ".join(escape_latex(note) for note in sheet.notes)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", "", rf"\smallskip{{\footnotesize {notes}}}", r"\end{table*}", ""])


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _latex_entry(entry: Entry) -> str:
    text = rf"\textbf{{{escape_latex(entry.text)}}}" if entry.is_best else escape_latex(entry.text)
    half = rf"\,{{\scriptsize$\pm${entry.half}}}" if entry.half else ""
    star = "$^{*}$" if entry.is_significant else ""
    return text + half + star + (r"$^\dagger$" if entry.is_incomplete else "")
