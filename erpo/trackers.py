"""Experiment trackers: optional copies of metrics.jsonl, which alone is read by tables and figures.

A tracker that cannot be opened is refused before training; one that fails later is dropped with a warning: a run never ends for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from erpo.config import digest

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics also go."""

    errors: tuple[type[Exception], ...]
    """What it may raise when its disk or network fails."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the work folder. Steps repeated after a kill replace their first attempt."""

    errors = (OSError,)

    def __init__(self, title: str, work: Path, spec: Mapping[str, Any], start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(work / "tensorboard"), purge_step=start + 1)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """One scalar a metric."""
        for key, value in row.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class WeightsAndBiases:
    """A W&B run that a resumed job continues. Project and offline mode are W&B's own variables (WANDB_PROJECT, WANDB_MODE)."""

    def __init__(self, title: str, work: Path, spec: Mapping[str, Any], start: int) -> None:
        import wandb

        self.errors: tuple[type[Exception], ...] = (wandb.Error, OSError)
        identity = digest({"spec": spec, "work": str(work.resolve())})
        project = os.environ.get("WANDB_PROJECT", "erpo")
        try:
            self.run = wandb.init(project=project, name=title, id=identity, resume="allow", dir=str(work), config=dict(spec))
        except wandb.Error as error:  # no key, no network: an error that only rank 0 would see
            raise ValueError(f"trackers: wandb cannot be opened ({error}); `wandb login`, or WANDB_MODE=offline") from error

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """W&B ignores a step that it has: after a kill its first attempt stays, with the same numbers."""
        self.run.log(dict(row), step=step)

    def close(self) -> None:
        """Send what is left."""
        self.run.finish()


_KNOWN = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Trackers:
    """All trackers of a run.

    Args:
        names: which (`trackers` of the machine).
        title: the run's name for people.
        work: its work folder.
        spec: its settings.
        start: step after which training goes on.

    Raises:
        ValueError: an unknown name, a package that is not installed, or a tracker that cannot be opened.
    """

    def __init__(self, names: Sequence[str], title: str, work: Path, spec: Mapping[str, Any], start: int) -> None:
        self.open: list[Tracker] = []
        for name in names:
            if name not in _KNOWN:
                raise ValueError(f"trackers: {name!r} is not known; there are: {', '.join(_KNOWN)}")
            try:
                self.open.append(_KNOWN[name](title, work, spec, start))
            except ImportError as error:
                raise ValueError(f"trackers: {name} is not installed: `pip install 'erpo[trackers]'`, or leave it out") from error

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Pass the metrics of a step on."""
        for tracker in list(self.open):
            try:
                tracker.log(step, row)
            except tracker.errors as error:
                self.open.remove(tracker)
                logger.warning("%s failed at step %d (%s); the run goes on without it", type(tracker).__name__, step, error)

    def close(self) -> None:
        """Close all."""
        for tracker in self.open:
            try:
                tracker.close()
            except tracker.errors as error:
                logger.warning("%s could not be closed (%s)", type(tracker).__name__, error)
