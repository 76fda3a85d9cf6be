"""What stands under a table or figure: checkpoint rule, samples, temperatures, interval, spread, honesty, holes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from erpo.config import Cell
from erpo.paper.summaries import ALPHA, CONFIDENCE
from erpo.paper.wording import LOGGED, listed, metric_sentence, percent, span

_RATES = {
    "truncated": "truncated",
    "no_answer": "without an answer",
    "grader_error": "grader errors",
    "gold_unparsed": "unreadable gold",
}


def checkpoint_rule(spec: dict[str, Any]) -> str:
    """How the checkpoints were chosen: never by their scores."""
    steps = sorted({step for _, _, step in spec["cells"]} - {0})
    if spec["artefact"]["steps"] is None:
        what = f"the last step of each run ({listed(steps)})" if steps else "untrained"
    else:
        what = f"steps {listed(steps)}"
    return f"Checkpoints: {what}, fixed before evaluation; {_seeds_rule(spec)}."


def _seeds_rule(spec: dict[str, Any]) -> str:
    """The seeds of most runs, and by name the runs that have others."""
    seeds: dict[str, set[int]] = {}
    for run, seed, _ in spec["cells"]:
        seeds.setdefault(run, set()).add(seed)
    sets = [tuple(sorted(found)) for found in seeds.values()]
    usual = max(sets, key=lambda found: (sets.count(found), len(found)))
    others = [f"{run}: {listed(found)}" for run, found in zip(seeds, sets, strict=True) if found != usual]
    return f"seed{'s' if len(usual) > 1 else ''} {listed(usual)}" + (f" ({'; '.join(others)})" if others else "")


def sampling_rule(spec: dict[str, Any]) -> str:
    """Samples, temperatures and the order of means."""
    several = len(spec["temperatures"]) > 1
    temperatures = f"temperature{'s' if several else ''} {span(spec['temperatures'])}"
    return f"{spec['samples']} samples per problem at {temperatures}" + (
        "; means over temperatures and over benchmarks are plain means." if several else "; means over benchmarks are plain means."
    )


def interval_rule(symbol: str, spread: str = "") -> str:
    """What an interval is, and where the spread over seeds stands."""
    return (
        f"{symbol} {CONFIDENCE:.0%} bootstrap interval over problems, of values averaged over seeds; "
        f"it does not cover how much another seed would differ{spread}."
    )


def table_notes(spec: dict[str, Any], frame: pd.DataFrame) -> list[str]:
    """Sentences under a table."""
    scored = frame[~frame["metric"].str.contains("/")]
    logged = list(dict.fromkeys(frame["metric"][frame["metric"].str.contains("/")]))
    notes = [checkpoint_rule(spec)]
    if len(scored):
        notes += [metric_sentence(metric, spec["samples"]) for metric in dict.fromkeys(scored["metric"])]
        notes += [
            "Percent. " + sampling_rule(spec),
            interval_rule("±: half of the", " (the spread over seeds stands in the CSV)"),
            *_comparison_notes(scored),
        ]
        notes += [honesty(scored)]
    if logged:
        names = [f"{LOGGED[name]} ({name})" if name in LOGGED else name for name in logged]
        notes.append(f"{listed(names)}: mean over seeds of what training logged at the row's step; - where it was not measured.")
    return [*notes, *hole_notes(frame)]


def _comparison_notes(scored: pd.DataFrame) -> list[str]:
    compared = scored[scored["baseline"] != ""]
    if compared.empty:
        return ["Bold: largest complete value of a column, without a test."]
    count, names = compared.groupby("metric").size().max(), list(dict.fromkeys(compared["baseline"]))
    baseline = names[0] if len(names) == 1 else "its own baseline"
    return [
        f"Bold: largest complete value of a column. *: differs from {baseline} at p < {ALPHA:g}, sign-flip test paired over "
        f"problems, Bonferroni-corrected for {count} comparison{'s' if count > 1 else ''} of a metric."
    ]


def honesty(scored: pd.DataFrame) -> str:
    """Range over cells of what went wrong with samples."""
    parts = []
    for name, words in _RATES.items():
        low, high = scored[name].min(), scored[name].max()
        parts.append(f"{words} {percent(low)}" + (f" to {percent(high)}" if percent(low) != percent(high) else ""))
    return f"Shares of the samples, by cell, in percent: {', '.join(parts)}."


def hole_notes(frame: pd.DataFrame) -> list[str]:
    """One sentence per checkpoint that lacks samples, with the target that fills the hole."""
    targets = [target for text in frame["missing"] for target in str(text).split(";") if target]
    notes = [f"† incomplete (left out of bold and *): run `snakemake {target}`." for target in sorted(set(targets))]
    lacking = frame[frame["metric"].str.contains("/") & ~frame["complete"]]
    notes += [
        f"† {metric} of {run} at step {step}: not logged by every seed."
        for metric, run, step in lacking[["metric", "run", "step"]].drop_duplicates().itertuples(index=False)
    ]
    return notes


def missing_cells(cells: Sequence[Cell], study: str) -> list[str]:
    """The same for figures."""
    targets = sorted({f"results/{study}/scores/{cell.run}/seed{cell.seed}/step{cell.step}.parquet" for cell in cells})
    return [f"Incomplete (hollow markers; a gap where there is nothing): run `snakemake {target}`." for target in targets]
