"""Panels of the query weights: their distribution, their relation to query length, and what training logged of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from erpo.checkpoint import read_json
from erpo.config import RunConfig
from erpo.paper.curves import band
from erpo.paper.panels import Line, Panel, Picture, Sources
from erpo.paper.wording import listed

_BIN = 0.1
"""Width of a histogram bar."""
_LENGTH_BINS = 10
"""Queries are grouped by length into this many equal parts."""
_CENTRE, _LOW, _HIGH = 0.5, 0.1, 0.9


def query_weights(sources: Sources) -> Picture:
    """Distribution over the training set and against length (from the reference cache), and statistics over training."""
    found = {run: _weights(run, sources) for run in sources.spec["runs"]}
    known = {run: value for run, value in found.items() if value is not None}
    panels = [
        Panel("Distribution", "weight", "percent of queries", [_histogram(run, weights) for run, (weights, _) in known.items()]),
        Panel("By query length", "tokens", "weight", [_by_length(run, *value) for run, value in known.items()]),
        Panel("Mean weight in training", "step", "weight", [_logged(sources, run, "query_weight/mean", 1.0) for run in found]),
        Panel(
            "Effective sample size",
            "step",
            "percent of queries",
            [_logged(sources, run, "query_weight/ess", 100.0) for run in found],
        ),
    ]
    notes = [
        "Distribution: bars of 0.1, outlined; by length: median and 10% to 90% of queries in ten equal parts by length.",
        "Online weights are shown as they are before the first update, when the policy is the reference.",
        "In training: mean over seeds, band from smallest to largest seed.",
    ]
    lacking = [run for run in found if run not in known]
    if lacking:
        notes.append(f"No distribution for {listed(lacking)}: no query weight, or no reference cache.")
    return Picture([panel for panel in panels if not panel.is_empty] or panels[:1], notes)


def _weights(run: str, sources: Sources) -> tuple[np.ndarray, np.ndarray] | None:
    """Weights and predicted tokens of every training query under a run's settings; None without a weight or a cache."""
    marker = next((marker for marker in sources.markers if marker["run"] == run), None)
    if marker is None:
        return None
    settings = RunConfig(**marker["spec"]["run"])
    cache = _cache_of(marker["spec"], sources)
    if settings.query_weight == "none" or cache is None:
        return None
    import torch  # slow to import, and only this needs it

    from erpo.weights import query_weights as weigh

    rows = pq.read_table(cache, columns=["nll", "num_tokens"])
    nll, tokens = (torch.from_numpy(rows[name].to_numpy().copy()) for name in ("nll", "num_tokens"))
    weights = weigh(
        settings.query_weight, nll, tokens, cap=settings.query_weight_cap, renormalise=settings.renormalise_query_weights
    )
    return weights.numpy(), tokens.numpy()


def _cache_of(spec: dict[str, Any], sources: Sources) -> Path | None:
    """The reference cache of the run's model and training set."""
    for path in sources.references:
        marker = read_json(path)
        if all(marker["spec"].get(key) == spec.get(key) for key in ("model", "train_set")):
            return path.parent / marker["cache"]
    return None


def _histogram(run: str, weights: np.ndarray) -> Line:
    edges = np.arange(0.0, weights.max() + 2 * _BIN, _BIN)
    counts, _ = np.histogram(weights, edges)
    share = 100 * counts / len(weights)
    return Line(run, edges[:-1] + _BIN / 2, share, share, share, "steps")


def _by_length(run: str, weights: np.ndarray, tokens: np.ndarray) -> Line:
    parts = [part for part in np.array_split(np.argsort(tokens, kind="stable"), _LENGTH_BINS) if len(part)]
    x = np.array([tokens[part].mean() for part in parts])
    y, low, high = (np.array([np.quantile(weights[part], at) for part in parts]) for at in (_CENTRE, _LOW, _HIGH))
    return Line(run, x, y, low, high)


def _logged(sources: Sources, run: str, key: str, scale: float) -> Line:
    curve = band(sources.curves, run, key)
    return Line(run, curve.steps, scale * curve.mean, scale * curve.low, scale * curve.high)
