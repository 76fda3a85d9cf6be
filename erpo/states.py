"""What a run leaves on the disk: training states that it resumes from, and the policies of its milestones.

All ranks call every method together; what one rank fails at is raised on all of them.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from erpo.checkpoint import (
    MANIFEST,
    begin_state,
    best_state,
    check_space,
    commit_folder,
    commit_state,
    file_facts,
    newest_state,
    policy_hash,
    prune_states,
    read_json,
    retry_free,
    saved_steps,
    why_invalid,
)
from erpo.config import Machine
from erpo.engine import Engine, gather_objects, together

logger = logging.getLogger(__name__)

_STATE_BYTES = 12
"""Bytes of a state per parameter: float32 weight and two moments."""


class States:
    """Training states under `work/states` and exported policies under `work/policies`."""

    def __init__(self, engine: Engine, machine: Machine, work: Path, rank: int, dtype_bytes: int) -> None:
        self.engine, self.machine, self.work, self.rank = engine, machine, work, rank
        self.root, self.policies = work / "states", work / "policies"
        self._dtype_bytes = dtype_bytes
        self.last_save: int | None = None

    # --- resuming

    def resume(self, target: int, spec_hash: str) -> tuple[int, dict[str, Any]] | None:
        """Load the newest verified state at or before `target`; its step and facts. None where there is none.

        Raises:
            ValueError: no state verifies although an earlier milestone was reached, or it is of other settings.
        """
        found = newest_state(self.root, at_most=target) if self.rank == 0 else None
        found = gather_objects(found)[0]
        if found is None:
            together(self._refuse_fresh_start, only_rank=0)
            return None
        step, folder = found
        facts = read_json(folder / MANIFEST)["info"]
        if facts.get("spec_hash", spec_hash) != spec_hash:
            raise ValueError(f"{folder} is a state of other settings than {self.work / 'spec.json'} says; move it away")
        together(lambda: self.engine.load(folder))
        logger.info("resumed from step %d", step)
        self.last_save = step
        return step, facts

    def _refuse_fresh_start(self) -> None:
        reached = self._milestones()
        if reached and min(reached) > 0:
            raise ValueError(
                f"step {max(reached)} was reached, but no training state under {self.root} verifies: put the states back, or "
                f"remove {self.policies} to train from the beginning"
            )

    def check_space(self) -> None:
        """Refuse to begin when states and policy will not fit.

        Raises:
            ValueError: too little free space.
        """
        kept = self.machine.keep_states + int(self.machine.keep_milestone_states) + int(self.machine.keep_best_state)
        missing = max(kept + 1 - len(saved_steps(self.root)), 1)  # one more while a save is not yet verified
        needed = missing * self.num_bytes + self.engine.num_parameters * self._dtype_bytes
        what = f"training ({missing} states of {self.num_bytes / 2**30:.2f} GiB and a policy)"
        together(lambda: check_space(self.work, needed, what), only_rank=0)

    @property
    def num_bytes(self) -> int:
        """Size of one state."""
        return _STATE_BYTES * self.engine.num_parameters

    # --- saving

    def save(self, step: int, facts: dict[str, Any]) -> float:
        """Write the state of a step, verify it, then delete older ones. Returns the seconds it took.

        Raises:
            ValueError: the disk is full; older states stand.
            FloatingPointError: weights or moments are not finite; nothing is written.
        """
        begun, folder = time.monotonic(), self.root / f".saving-step{step}"
        try:
            together(lambda: retry_free(lambda: begin_state(self.root, step), folder), only_rank=0)
            mine = together(lambda: retry_free(lambda: self._write_mine(folder), folder))
            files = {name: known for name, known in gather_objects(mine)}
            together(lambda: retry_free(lambda: commit_state(folder, self.root, step, facts, files), folder), only_rank=0)
        except (ValueError, OSError, FloatingPointError):
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # what it holds would keep the disk full
            raise
        self._verify(self.root / f"step{step}", mine[0])
        if self.rank == 0:
            prune_states(self.root, step, self.machine.keep_states, self._always())
        self.last_save = step
        return time.monotonic() - begun

    def _write_mine(self, folder: Path) -> tuple[str, dict[str, Any]]:
        path = self.engine.save(folder)
        return path.name, file_facts(path)

    def _verify(self, saved: Path, mine: str) -> None:
        """Each rank reads its own file again; only then may older states go."""
        reasons = [reason for reason in gather_objects(why_invalid(saved, only=mine)) if reason]
        if reasons:
            raise RuntimeError(f"the state just saved does not verify ({reasons[0]}); older states are kept: {saved}")

    def _always(self) -> list[int]:
        best = best_state(self.root) if self.machine.keep_best_state else None
        milestones = self._milestones() if self.machine.keep_milestone_states else []
        return [*milestones, *([best] if best is not None else [])]

    def _milestones(self) -> list[int]:
        return [int(path.name.removeprefix("step")) for path in self.policies.glob("step*")]

    # --- policies

    def export(self, step: int, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> None:
        """Write the policy of a milestone as an ordinary Hugging Face folder with its content hash.

        Raises:
            ValueError: the disk is full.
        """
        folder = self.policies / f".exporting-step{step}"
        try:
            together(lambda: retry_free(lambda: folder.mkdir(parents=True, exist_ok=True), folder), only_rank=0)
            together(lambda: retry_free(lambda: self.engine.export(folder, tokenizer), folder))
            together(lambda: retry_free(lambda: self._commit_policy(folder, step, facts), folder), only_rank=0)
        except (ValueError, OSError):
            if self.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _commit_policy(self, folder: Path, step: int, facts: dict[str, Any]) -> None:
        commit_folder(folder, self.policies / f"step{step}", {**facts, "policy_hash": policy_hash(folder)})
