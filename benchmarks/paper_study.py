"""Seconds to build every table, figure and the report of the paper study from an archive of its full size.

    python benchmarks/paper_study.py [--study paper] [--cores 2] [--folder DIR] [--one-process]

Scores and logs are made up (tests/paper_study.py): 43 checkpoints of 763,200 samples. Builds twice through the documented rebuild,
in two places, and says whether the files are the same. `--folder` keeps the archive: a second call goes straight to the builds.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from erpo.archive import unpack_archive, write_archive  # noqa: E402
from erpo.config import load_study, study_path  # noqa: E402
from tests.paper_study import draw_everything, write_results  # noqa: E402


def make_archive(folder, name):
    study_file = study_path(name, ROOT)
    results = folder / "made-up" / name
    begun = time.monotonic()
    scores = write_results(results, load_study(str(study_file)))
    packed = write_archive(study_file, results, folder / f"{name}.zip")
    size = packed.path.stat().st_size / 2**20
    print(f"{len(scores)} checkpoints made up and packed in {time.monotonic() - begun:.0f} s: {size:.0f} MiB", flush=True)
    return packed.path


def processor_seconds():
    """Of this process and its finished children: what a busy machine does not distort as it does the clock."""
    return sum(
        resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def build(archive, out, cores):
    begun, used = time.monotonic(), processor_seconds()
    study = unpack_archive(archive, out)
    unpacked = time.monotonic()
    command = ["--cores", str(cores), "--quiet", "all", "--directory", str(out), "--config", f"study={study}", "archive=true"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([sys.executable, "-m", "snakemake", *command], cwd=ROOT, env=environment, check=True)
    done = time.monotonic()
    made = {path.name: path.read_bytes() for kind in ("tables", "figures") for path in (out / "results" / study / kind).iterdir()}
    print(
        f"{len(made)} files and the report in {done - begun:.1f} s ({unpacked - begun:.1f} s of it unpacking); "
        f"{processor_seconds() - used:.1f} s of processor time",
        flush=True,
    )
    return made


def build_here(archive, out):
    """The same tables and figures in this process alone, one after the other."""
    study = load_study(str(out / "config" / f"{unpack_archive(archive, out)}.yaml"))
    begun, used = time.monotonic(), processor_seconds()
    draw_everything(out / "results" / study.name, study, out / "made")
    seconds, count = time.monotonic() - begun, len(study.tables) + len(study.figures)
    print(f"{count} tables and figures in one process in {seconds:.1f} s; {processor_seconds() - used:.1f} s of processor time")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--study", default="paper")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--once", action="store_true", help="build once, compare nothing")
    parser.add_argument("--one-process", action="store_true", help="without Snakemake and the report")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        archive = folder / f"{args.study}.zip"
        archive = archive if archive.is_file() else make_archive(folder, args.study)
        print(f"{platform.machine()}, {os.cpu_count()} cores, {args.cores} used")
        with tempfile.TemporaryDirectory(dir=temporary) as place:
            if args.one_process:
                build_here(archive, Path(place))
                return
            first = build(archive, Path(place) / "one", args.cores)
            if args.once:
                return
            second = build(archive, Path(place) / "two", args.cores)
            unlike = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
            print("second build: the same files" if not unlike else f"second build differs: {', '.join(unlike)}")


if __name__ == "__main__":
    main()
