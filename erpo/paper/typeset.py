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
    corner: str = "run"
    """Heading of the labels."""

    @property
    def is_text(self) -> list[bool]:
        """Of each column: whether it holds words and no numbers."""
        return [any(_is_words(entries[column]) for _, entries in self.rows) for column in range(len(self.header))]

    def as_json(self) -> dict[str, Any]:
        """Plain data; a value that does not exist is null."""
        rows = [{"label": label, "entries": [_entry_json(entry) for entry in entries]} for label, entries in self.rows]
        return {"title": self.title, "corner": self.corner, "header": list(self.header), "rows": rows}


def _is_words(entry: Entry) -> bool:
    """Words have no value; a value that does not exist is one dash."""
    return not math.isfinite(entry.value) and len(entry.text) > 1


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
                block["corner"],
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
    texts = [[block.corner, *block.header]] + [
        [label, *(_markdown_entry(entry) for entry in entries)] for label, entries in block.rows
    ]
    texts = [[text.replace("|", "\\|") for text in row] for row in texts]
    widths = [max(3, *(len(row[column]) for row in texts)) for column in range(len(texts[0]))]
    is_left = [True, *block.is_text]
    rule = "|".join("-" * (width + 2) if left else f"{'-' * (width + 1)}:" for width, left in zip(widths, is_left, strict=True))
    lines = [f"| {' | '.join(map(_padded, row, widths, is_left))} |" for row in texts]
    return [lines[0], f"|{rule}|", *lines[1:]]


def _padded(text: str, width: int, is_left: bool) -> str:
    return text.ljust(width) if is_left else text.rjust(width)


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
    "`": r"\textasciigrave{}",
    "†": r"$^\dagger$",
    "±": r"$\pm$",
    "<": r"$<$",
    ">": r"$>$",
}


def escape_latex(text: str) -> str:
    """Text that LaTeX prints as it is."""
    return "".join(_LATEX.get(character, character) for character in text)


_ONE_PAGE = 40
"""Rows that fit on a page."""
_LONG = 24
"""Characters from which words are set as a paragraph."""
_CHARACTER = 0.012
"""Width of a small character, as a share of the page."""
_SHRINK = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"
"""Nothing is wider than the page; what fits keeps its size."""


def latex(sheet: Sheet) -> str:
    """The sheet for LaTeX with booktabs: a float no wider than the page, or, when it is long, tables that break over pages.

    The notes stand below in small type.
    """
    notes = rf"\parbox{{\textwidth}}{{\footnotesize {' '.join(escape_latex(note) for note in sheet.notes)}}}"
    head = [rf"\caption{{{escape_latex(sheet.caption)}}}", rf"\label{{tab:{sheet.name}}}"]
    if sum(len(block.rows) for block in sheet.blocks) > _ONE_PAGE:
        return "\n".join([*_long_latex(sheet, head), "", r"\noindent" + notes, ""])
    width = max(len(block.header) for block in sheet.blocks)
    lines = [
        r"% needs \usepackage{booktabs,graphicx}",
        r"\begin{table*}",
        r"\centering",
        *head,
        _SHRINK,
        rf"\begin{{tabular}}{{l{'r' * width}}}",
        r"\toprule",
    ]
    for number, block in enumerate(sheet.blocks):
        lines += [r"\midrule"] if number else []
        lines += [*_latex_title(block), *_latex_head(block), *_latex_rows(block)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", "", r"\smallskip", notes, r"\end{table*}", ""])


def _long_latex(sheet: Sheet, head: Sequence[str]) -> list[str]:
    """A longtable per block, the caption above the first."""
    lines = [r"% needs \usepackage{booktabs,longtable}; in one column (\onecolumn), since longtable has no two"]
    for number, block in enumerate(sheet.blocks):
        lines += [r"{\footnotesize\setlength{\tabcolsep}{3pt}", rf"\begin{{longtable}}{{{_latex_columns(block)}}}"]
        top = [r"\toprule", *_latex_title(block), *_latex_head(block)]
        lines += [" ".join(head) + r" \\", *top, r"\endfirsthead"] if number == 0 else []
        lines += [*top, r"\endhead", r"\bottomrule", r"\endfoot"]
        lines += [*_latex_rows(block), r"\end{longtable}}"]
    return lines


def _latex_columns(block: Block) -> str:
    """Numbers to the right, words to the left, sentences as paragraphs that share what the others leave of the page."""
    longest = [max(len(text) for text in (name, *_texts(block, column))) for column, name in enumerate(block.header)]
    is_paragraph = [words and length > _LONG for words, length in zip(block.is_text, longest, strict=True)]
    taken = max(len(label) for label, _ in block.rows) + sum(
        length for length, paragraph in zip(longest, is_paragraph, strict=True) if not paragraph
    )
    width = max(0.25, 0.92 - 0.02 * len(longest) - _CHARACTER * taken) / max(sum(is_paragraph), 1)
    kinds = [
        f"p{{{width:.2f}\\textwidth}}" if paragraph else "l" if words else "r"
        for words, paragraph in zip(block.is_text, is_paragraph, strict=True)
    ]
    return "l" + "".join(kinds)


def _texts(block: Block, column: int) -> list[str]:
    return [entries[column].text for _, entries in block.rows]


def _latex_title(block: Block) -> list[str]:
    return [rf"\multicolumn{{{len(block.header) + 1}}}{{l}}{{\emph{{{escape_latex(block.title)}}}}} \\"] if block.title else []


def _latex_head(block: Block) -> list[str]:
    return [_latex_row(["", *map(escape_latex, block.header)]), r"\midrule"]


def _latex_rows(block: Block) -> list[str]:
    return [_latex_row([escape_latex(label), *map(_latex_entry, entries)]) for label, entries in block.rows]


def _latex_row(cells: Sequence[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _latex_entry(entry: Entry) -> str:
    text = escape_latex(entry.text)
    if text.startswith("-") and math.isfinite(entry.value):
        text = f"$-${text[1:]}"  # a minus sign, no hyphen
    text = rf"\textbf{{{text}}}" if entry.is_best else text
    half = rf"\,{{\scriptsize$\pm${entry.half}}}" if entry.half else ""
    star = "$^{*}$" if entry.is_significant else ""
    return text + half + star + (r"$^\dagger$" if entry.is_incomplete else "")
