"""The paper's numbers beside ours: every reported number once, with our value, its interval and a verdict that says why.

`agrees` means that the reported number lies within our interval (bootstrap over problems, widened to the range of our seeds);
the paper gives no interval of its own. Statements about curves are predicates with fixed thresholds (`erpo.paper.curves`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from erpo.config import Cell, RunConfig
from erpo.paper import curves as statements
from erpo.paper.aggregate import Scores, problem_values, read_scores
from erpo.paper.curves import band, longest, read_curves, read_markers, seed_values, smooth
from erpo.paper.summaries import Place, difference, seeds_by_checkpoint, summarise
from erpo.paper.typeset import Block, Entry, Sheet
from erpo.paper.wording import NOTHING, listed, plain

REPORTED = Path(__file__).with_name("reported.yaml")
"""What the paper reports."""
_ROUNDING = 0.0005
"""Half of the last digit that every reported share has."""
_CHECKPOINTS = 3
"""A statement about the course of a long run needs at least this many evaluated checkpoints."""
_WINDOW = 10
"""Steps of the running mean in which training accuracy is judged."""
_SIGNIFICANT = 0.05
_OUTGROWN = 2.0
_COLLAPSED = 0.8

AGREES, DIFFERS, INCOMPARABLE, HOLDS, FAILS = "agrees", "differs", "not comparable", "holds", "does not hold"


class Verdict(NamedTuple):
    """What ours says to one reported number or statement."""

    verdict: str
    why: str
    ours: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    seeds: int = 0
    samples: int = 0
    samples_expected: int = 0


@dataclass(frozen=True)
class Results:
    """Everything of ours that a comparison may look at."""

    spec: dict[str, Any]
    scores: Scores | None
    curves: pd.DataFrame
    markers: Sequence[dict[str, Any]]
    seeds: dict[tuple[str, int], tuple[int, ...]]
    values: dict[str, np.ndarray]

    def metric(self, name: str) -> np.ndarray:
        """Values of a metric, computed once."""
        assert self.scores is not None
        if name not in self.values:
            self.values[name] = problem_values(self.scores, name)
        return self.values[name]

    def temperatures(self, choice: str | list[float]) -> tuple[float, ...]:
        """The sweep, a band of it, or given temperatures."""
        sweep = tuple(self.spec["temperatures"])
        if choice == "all":
            return sweep
        if isinstance(choice, str):
            low, high = self.spec[choice]
            return tuple(value for value in sweep if low - 1e-9 <= value <= high + 1e-9)
        return tuple(choice)

    def steps(self, run: str) -> list[int]:
        """Checkpoints of a run, ascending."""
        return sorted(step for name, step in self.seeds if name == run)

    def place(self, entry: dict[str, Any], run: str) -> Place | None:
        """The cell that an entry speaks of; None when the study does not evaluate that checkpoint."""
        step = 0 if self.steps(run) == [0] else entry["step"]
        if (run, step) not in self.seeds:
            return None
        benchmarks = tuple(entry.get("benchmarks", self.spec["benchmarks"]))
        return Place(run, step, self.seeds[run, step], benchmarks, self.temperatures(entry.get("temperatures", "all")))


def compare_with_paper(
    spec: dict[str, Any],
    scores: Sequence[Path],
    markers: Sequence[Path],
    reported: Path = REPORTED,
    counts: Path | None = None,
) -> tuple[pd.DataFrame, Sheet]:
    """Put every reported number and statement beside ours.

    Args:
        spec: `config.drawn_spec` of the comparison; its cells are all checkpoints it may use.
        scores: scores files.
        markers: training markers.
        reported: what the paper reports.
        counts: folder that keeps counts of samples by content (`erpo.paper.counting`).

    Returns:
        one row per number or statement, and the same laid out for readers.
    """
    paper = yaml.safe_load(reported.read_text(encoding="utf-8"))
    training = read_markers(path for path in markers if path.is_file())
    present = [path for path in scores if path.is_file()]
    found = read_scores(present, spec["samples"], cache=counts) if present else None
    results = Results(spec, found, read_curves(training), training, seeds_by_checkpoint(spec["cells"]), {})
    defaults = paper["defaults"]
    rows = [_row(entry, _judge({**defaults, **entry}, results)) for entry in paper["entries"]]
    rows += [_row(entry, _check({**defaults, **entry}, results)) for entry in paper["statements"]]
    frame = pd.DataFrame.from_records(rows)
    return frame, _sheet(spec, paper, frame)


def _row(entry: dict[str, Any], verdict: Verdict) -> dict[str, Any]:
    reported = float(entry["value"]) if "value" in entry else np.nan
    return {
        "id": entry["id"],
        "says": entry.get("says", ""),
        "reported": reported,
        "is_setting": "setting" in entry,
        "source": entry["source"],
        **verdict._asdict(),
        "difference": verdict.ours - reported,
        "reading": entry.get("reading", ""),
    }


# --- numbers -----------------------------------------------------------------------------------------------------------


def _judge(entry: dict[str, Any], results: Results) -> Verdict:
    if "why_not" in entry:
        return Verdict(INCOMPARABLE, entry["why_not"])
    if "setting" in entry:
        return _judge_setting(entry, results)
    if "/" in entry["metric"]:
        return _judge_logged(entry, results)
    return _judge_score(entry, results)


def _judge_score(entry: dict[str, Any], results: Results) -> Verdict:
    place = results.place(entry, entry["run"])
    other = results.place(entry, entry["minus"]) if "minus" in entry else None
    if place is None or ("minus" in entry and other is None):
        names = listed([entry["run"], *([entry["minus"]] if "minus" in entry else [])])
        return Verdict(INCOMPARABLE, f"{names} at step {entry['step']} is not part of this comparison")
    unknown = [name for name in place.benchmarks if name not in results.spec["benchmarks"]]
    if unknown or not set(place.temperatures) <= set(results.spec["temperatures"]):
        return Verdict(INCOMPARABLE, f"not evaluated here: {listed(unknown or place.temperatures)}")
    if results.scores is None:
        return Verdict(INCOMPARABLE, "nothing is evaluated yet")
    values = results.metric(entry["metric"])
    cell = summarise(results.scores, values, place)
    facts = {"seeds": len(cell.by_seed), "samples": cell.samples, "samples_expected": cell.samples_expected}
    if other is not None:
        change = difference(results.scores, values, place, other)
        if change is None:
            return Verdict(INCOMPARABLE, "no common samples of the two runs", **facts)
        lacking = _targets(results.spec, [*cell.missing, *summarise(results.scores, values, other).missing])
        return _verdict(entry["value"], change.value, change.low, change.high, list(change.by_seed.values()), lacking, facts)
    if not np.isfinite(cell.value):
        return Verdict(INCOMPARABLE, f"no samples yet: {_targets(results.spec, cell.missing)}", **facts)
    lacking = _targets(results.spec, cell.missing)
    return _verdict(entry["value"], cell.value, cell.low, cell.high, list(cell.by_seed.values()), lacking, facts)


def _verdict(
    reported: float, ours: float, low: float, high: float, by_seed: Sequence[float], lacking: str, facts: dict[str, int]
) -> Verdict:
    """`lacking`: what to run for the samples that are missing; empty where none are."""
    low, high = float(np.nanmin([low, *by_seed])), float(np.nanmax([high, *by_seed]))
    if lacking:
        return Verdict(INCOMPARABLE, f"samples are missing: {lacking}", ours, low, high, **facts)
    if low - _ROUNDING <= reported <= high + _ROUNDING:
        return Verdict(AGREES, "the reported number lies in our interval", ours, low, high, **facts)
    return Verdict(DIFFERS, f"ours is {100 * (ours - reported):+.1f} points from it", ours, low, high, **facts)


def _judge_logged(entry: dict[str, Any], results: Results) -> Verdict:
    seeds = results.seeds.get((entry["run"], entry["step"]), ())
    found = list(seed_values(results.curves, entry["run"], entry["step"], entry["metric"], seeds).values())
    if not found:
        return Verdict(INCOMPARABLE, f"{entry['metric']} of {entry['run']} at step {entry['step']} is not logged in this study")
    ours, low, high = float(np.mean(found)), min(found), max(found)
    if len(found) < len(seeds):
        return Verdict(INCOMPARABLE, f"logged by {len(found)} of {len(seeds)} seeds", ours, low, high, seeds=len(found))
    if len(found) < 2:
        return Verdict(INCOMPARABLE, "one seed gives no interval", ours, seeds=1)
    if low - _ROUNDING <= entry["value"] <= high + _ROUNDING:
        return Verdict(AGREES, "the reported number lies in the range of our seeds", ours, low, high, seeds=len(found))
    return Verdict(DIFFERS, f"ours is {ours / entry['value']:.3g} times it", ours, low, high, seeds=len(found))


def _judge_setting(entry: dict[str, Any], results: Results) -> Verdict:
    known: dict[str, float] = {
        "samples": results.spec["samples"],
        "lowest_temperature": min(results.spec["temperatures"]),
        "highest_temperature": max(results.spec["temperatures"]),
        "low_band_end": results.spec["low_band"][1],
        "high_band_start": results.spec["high_band"][0],
        "high_band_end": results.spec["high_band"][1],
    }
    trained = [step for step in results.steps(entry["run"]) if step > 0]
    if trained:
        known |= {"steps": trained[0], "long_run_steps": trained[-1]}
    marker = next((marker for marker in results.markers if marker["run"] == entry["run"]), None)
    if marker is not None:
        known |= RunConfig(**marker["spec"]["run"]).model_dump(include={entry["setting"]})
    if known.get(entry["setting"]) is None:
        return Verdict(INCOMPARABLE, f"{entry['run']} is not trained in this study")
    ours = float(known[entry["setting"]])
    return Verdict(AGREES if ours == entry["value"] else DIFFERS, "a setting, not a result", ours)


def _targets(spec: dict[str, Any], cells: Sequence[Cell]) -> str:
    """What to run for checkpoints that lack samples; empty without any."""
    names = dict.fromkeys(f"results/{spec['study']}/scores/{cell.run}/seed{cell.seed}/step{cell.step}.parquet" for cell in cells)
    return f"run `snakemake {' '.join(names)}`" if names else ""


# --- statements --------------------------------------------------------------------------------------------------------


def _check(entry: dict[str, Any], results: Results) -> Verdict:
    try:
        return _PREDICATES[entry["predicate"]](entry, results)
    except _LackingError as lacking:
        return Verdict(INCOMPARABLE, f"samples are missing: {lacking}")


class _LackingError(Exception):
    """Checkpoints of a statement lack samples: it is not judged on the rest of its curve."""


def _bands(entry: dict[str, Any], results: Results) -> tuple[list[int], list[float], list[float]]:
    """Steps of a run's evaluated checkpoints, and accuracy there in the low and in the high band."""
    steps, low, high, missing = [], [], [], []
    for step in results.steps(entry["run"]) if results.scores is not None else ():
        places = [results.place({**entry, "step": step, "temperatures": name}, entry["run"]) for name in ("low_band", "high_band")]
        pair = [summarise(results.scores, results.metric("avg@n"), place) for place in places if place and place.temperatures]
        missing += [lacking for cell in pair for lacking in cell.missing]
        if len(pair) == 2:
            steps.append(step)
            low.append(pair[0].value)
            high.append(pair[1].value)
    if missing:
        raise _LackingError(_targets(results.spec, missing))
    return steps, low, high


def _short(steps: Sequence[int]) -> Verdict | None:
    if len(steps) < _CHECKPOINTS:
        return Verdict(INCOMPARABLE, f"{len(steps)} checkpoints with both bands; needs {_CHECKPOINTS}")
    return None


def _said(truth: bool, why: str) -> Verdict:
    return Verdict(HOLDS if truth else FAILS, why)


def _high_band_first(entry: dict[str, Any], results: Results) -> Verdict:
    steps, low, high = _bands(entry, results)
    drops = {"high": statements.first_drop(steps, high), "low": statements.first_drop(steps, low)}
    why = ", ".join(f"{name} band {'never falls' if at is None else f'falls at step {at}'}" for name, at in drops.items())
    spread = drops["low"] is not None
    return _short(steps) or _said(statements.drops_first(steps, high, low) and spread, f"{why} (a fifth below its best)")


def _low_band_holds(entry: dict[str, Any], results: Results) -> Verdict:
    steps, low, _ = _bands(entry, results)
    values = listed([f"{100 * value:.1f} at step {step}" for step, value in zip(steps, low, strict=True)])
    return _short(steps) or _said(statements.holds_until(steps, low, entry["step"]), f"low band: {values}")


def _high_band_rises(entry: dict[str, Any], results: Results) -> Verdict:
    steps, _, high = _bands(entry, results)
    if (short := _short(steps)) is not None or results.scores is None:
        return short or Verdict(INCOMPARABLE, "nothing is evaluated yet")
    best = steps[int(np.argmax(high))]
    places = [results.place({**entry, "step": step, "temperatures": "high_band"}, entry["run"]) for step in (best, steps[0])]
    change = difference(results.scores, results.metric("avg@n"), *places) if best != steps[0] else None
    if change is None:
        return Verdict(FAILS, f"the high band is best at the first checkpoint, step {steps[0]}")
    why = f"{100 * change.value:+.1f} points from step {steps[0]} to step {best} (p = {change.p_value:.2g})"
    return _said(change.value > 0 and change.p_value < _SIGNIFICANT, why)


def _collapses(entry: dict[str, Any], results: Results) -> Verdict:
    steps, low, high = _bands(entry, results)
    late = [index for index, step in enumerate(steps) if step > entry["step"]]
    if (short := _short(steps)) is not None or not late:
        return short or Verdict(INCOMPARABLE, f"no checkpoint beyond step {entry['step']}")
    left = {name: min(values[index] for index in late) / max(values) for name, values in (("low", low), ("high", high))}
    why = listed([f"the {name} band falls to {100 * share:.0f}% of its best" for name, share in left.items()])
    return _said(all(share <= _COLLAPSED for share in left.values()), f"{why} (80% or less asked of both)")


def _keeps_more(entry: dict[str, Any], results: Results) -> Verdict:
    """Whether a run keeps a larger share of its best than another does, in both bands, at the last checkpoint of both."""
    ours, theirs = (_bands({**entry, "run": name}, results) for name in (entry["run"], entry["than"]))
    common = sorted(set(ours[0]) & set(theirs[0]))
    if (short := _short(common)) is not None:
        return short
    kept = [[_kept(steps, values, common[-1]) for values in bands] for steps, *bands in (ours, theirs)]
    why = [
        f"{name} keeps {100 * low:.0f}% (low) and {100 * high:.0f}% (high)"
        for name, (low, high) in zip((entry["run"], entry["than"]), kept, strict=True)
    ]
    return _said(all(a > b for a, b in zip(*kept, strict=True)), f"of its best at step {common[-1]} {listed(why)}")


def _kept(steps: Sequence[int], values: Sequence[float], step: int) -> float:
    return values[list(steps).index(step)] / max(values)


def _explodes(entry: dict[str, Any], results: Results) -> Verdict:
    curve = band(longest(results.curves, entry["run"]), entry["run"], entry["metric"])
    if len(curve.steps) == 0 or curve.steps[-1] <= entry["step"]:
        return Verdict(INCOMPARABLE, f"{entry['metric']} of {entry['run']} is not logged beyond step {entry['step']}")
    after = curve.steps > entry["step"]
    why = f"largest up to step {entry['step']} {plain(curve.mean[~after].max())}, after it {plain(curve.mean[after].max())}"
    return _said(statements.explodes_after(curve.steps, curve.mean, entry["step"]), why + " (tenfold asked)")


def _query_kl_outgrows(entry: dict[str, Any], results: Results) -> Verdict:
    query, response = (band(results.curves, entry["run"], key, entry["step"]) for key in ("kl/query", "kl/response"))
    if len(query.steps) == 0 or len(response.steps) == 0:
        return Verdict(INCOMPARABLE, f"both KLs of {entry['run']} are not logged in this study")
    why = f"at the end Query-KL {plain(query.mean[-1])}, Policy-KL {plain(response.mean[-1])} (twice asked)"
    return _said(query.mean[-1] > _OUTGROWN * response.mean[-1], why)


def _accuracy_falls(entry: dict[str, Any], results: Results) -> Verdict:
    curve = smooth(band(results.curves, entry["run"], "reward/accuracy", entry["step"]), _WINDOW)
    if len(curve.steps) == 0:
        return Verdict(INCOMPARABLE, f"{entry['run']} is not trained in this study")
    at = statements.first_drop(curve.steps, curve.mean)
    why = "never a fifth below its best" if at is None else f"a fifth below its best from step {at}"
    return _said(at is not None, f"training accuracy, mean over {_WINDOW} steps: {why}")


_PREDICATES: dict[str, Callable[[dict[str, Any], Results], Verdict]] = {
    "high_band_first": _high_band_first,
    "low_band_holds": _low_band_holds,
    "high_band_rises": _high_band_rises,
    "collapses": _collapses,
    "keeps_more": _keeps_more,
    "explodes": _explodes,
    "query_kl_outgrows": _query_kl_outgrows,
    "accuracy_falls": _accuracy_falls,
}


# --- for readers -------------------------------------------------------------------------------------------------------


def _sheet(spec: dict[str, Any], paper: dict[str, Any], frame: pd.DataFrame) -> Sheet:
    numbers, said = frame[frame["reported"].notna()], frame[frame["reported"].isna()]
    blocks = [
        Block(
            "Numbers",
            ["reported", "ours", "95% interval", "verdict", "why"],
            [_number(line) for line in numbers.to_dict("records")],
            "number",
        ),
        Block("Statements", ["statement", "verdict", "why"], [_statement(line) for line in said.to_dict("records")], "name"),
    ]
    parts = {"numbers": numbers[~numbers["is_setting"]], "settings": numbers[numbers["is_setting"]], "statements": said}
    notes = [
        f"{'; '.join(f'{len(part)} {name}: {_tally(part)}' for name, part in parts.items() if len(part))}.",
        "agrees: the reported number lies within our interval, a bootstrap over problems widened to the range of our seeds; for "
        "training metrics the range of seeds. The paper reports no interval of its own.",
        "Reported numbers were read from two digests of the paper and the README of the released patch, as noted in the CSV.",
    ]
    return Sheet(spec["name"], spec["artefact"]["caption"] or f"Ours beside {paper['paper']}.", blocks, notes)


_PLURAL = {AGREES: "agree", DIFFERS: "differ", HOLDS: "hold", FAILS: "do not hold", INCOMPARABLE: "are not comparable"}


def _tally(part: pd.DataFrame) -> str:
    """How many there are of each verdict: `25 agree and 3 differ`."""
    counts = part["verdict"].value_counts()
    return listed([f"{counts[name]} {words if counts[name] > 1 else name}" for name, words in _PLURAL.items() if name in counts])


def _text(text: str) -> Entry:
    return Entry(text, float("nan"))


def _number(line: dict[str, Any]) -> tuple[str, list[Entry]]:
    interval = f"{plain(line['low'])} to {plain(line['high'])}" if np.isfinite(line["low"]) else NOTHING
    why = f"{line['why']} ({line['reading']})" if line["reading"] else line["why"]
    shown = [Entry(plain(line[name]), line[name]) for name in ("reported", "ours")]
    return line["id"], [*shown, _text(interval), _text(line["verdict"]), _text(why)]


def _statement(line: dict[str, Any]) -> tuple[str, list[Entry]]:
    return line["id"], [_text(line["says"]), _text(line["verdict"]), _text(line["why"])]
