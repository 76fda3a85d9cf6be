"""The command line: one verb per workflow rule and a few for people. Arguments are files and settings; no logic lives here."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from erpo import __version__, operations
from erpo.operations import say
from erpo.options import add_machine_options, flag, json_option, machine_of, settings_of

_BAD_INPUT = 2
_OF_ARTEFACT = ("name", "study", "artefact", "runs", "cells")
"""What `--spec` says of every table and figure."""


def _calm_cpu() -> None:
    """Settings that must be in place before torch is imported; a user's own values win."""
    on_gpu = os.path.exists("/dev/nvidiactl")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if not on_gpu:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads spin against each other and against other jobs
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


# --- verbs of the workflow ---------------------------------------------------------------------------------------------


def prepare_model(args: argparse.Namespace) -> None:
    """Make or fetch a starting checkpoint."""
    from erpo.config import ModelEntry, SyntheticData
    from erpo.models import prepare_model as run

    spec = _spec(args, "entry", "prompt_suffix")
    texts = settings_of(SyntheticData, spec["texts"], "--spec texts") if "texts" in spec else None
    entry = settings_of(ModelEntry, spec["entry"], "--spec entry")
    run(entry, texts=texts, prompt_suffix=spec["prompt_suffix"], out=args.out, marker=args.marker, spec=spec)


def prepare_queries(args: argparse.Namespace) -> None:
    """Training problems -> queries with a manifest of every drop."""
    from erpo.data.queries import prepare_queries as run

    spec, benchmarks = _spec(args, "entry", "prompt_suffix", "max_query_tokens"), {path.stem: path for path in args.benchmarks}
    run(
        _data_entry(spec),
        tokenizer_dir=_policy_folder(args.model),
        trust_remote_code=_trusts(args.model),
        prompt_suffix=spec["prompt_suffix"],
        max_query_tokens=spec["max_query_tokens"],
        data_dir=_data_dir(args),
        benchmarks=benchmarks,
        out=args.out,
        manifest=args.manifest,
    )


def prepare_benchmark(args: argparse.Namespace) -> None:
    """Benchmark problems -> queries; flags oddities, drops nothing."""
    from erpo.data.queries import prepare_benchmark as run

    spec = _spec(args, "entry", "prompt_suffix")
    run(
        _data_entry(spec),
        tokenizer_dir=_policy_folder(args.model),
        trust_remote_code=_trusts(args.model),
        prompt_suffix=spec["prompt_suffix"],
        data_dir=_data_dir(args),
        out=args.out,
        manifest=args.manifest,
    )


def check_overlap(args: argparse.Namespace) -> None:
    """Which training queries a benchmark asks too, or nearly."""
    from erpo.data.contamination import check_overlap as run

    run(args.queries, {path.stem: path for path in args.benchmarks}, args.out)


def cache_reference(args: argparse.Namespace) -> None:
    """Score every training query once with the reference policy."""
    from erpo.reference import build_cache

    spec = _spec(args)
    folder, trust = _policy_folder(args.model), _trusts(args.model)
    build_cache(folder, args.queries, out=args.out, marker=args.marker, spec=spec, trust_remote_code=trust)


def train(args: argparse.Namespace) -> None:
    """Train a run up to a milestone."""
    from erpo.config import RunConfig
    from erpo.slurm import note_job_end
    from erpo.trainer import train as run

    spec = _spec(args, "run")
    settings = settings_of(RunConfig, spec["run"], "--spec run")
    note_job_end()
    run(
        spec=spec,
        run=settings,
        machine=machine_of(args),
        name=args.name,
        seed=args.seed,
        step=args.step,
        model_marker=args.model,
        queries_path=args.queries,
        reference_marker=args.reference,
        work=args.work,
        marker=args.marker,
        probe_paths=args.benchmarks,
        supersede=args.supersede,
    )


def generate(args: argparse.Namespace) -> None:
    """Sample responses of a checkpoint into the store; only what is missing."""
    from erpo.evaluation import generate_samples

    spec = _spec(args, "temperatures", "samples", "top_p", "max_response_tokens")
    generate_samples(
        policy_marker=args.policy,
        benchmarks={path.stem: path for path in args.benchmarks},
        temperatures=spec["temperatures"],
        samples=spec["samples"],
        top_p=spec["top_p"],
        max_response_tokens=spec["max_response_tokens"],
        keep_token_ids=spec.get("keep_token_ids", True),
        seed=args.seed,
        store=args.store,
        marker=args.marker,
        generator=args.generator,
        batch_rows=args.batch_rows,
        tensor_parallel=args.tensor_parallel,
    )


def score(args: argparse.Namespace) -> None:
    """Grade stored samples."""
    from erpo.evaluation import score_samples

    score_samples(
        markers=args.markers,
        benchmarks={path.stem: path for path in args.benchmarks},
        store=args.store,
        out=args.out,
        provenance=_spec(args, "study", "run", "seed", "step", "temperatures", "samples"),
    )


def table(args: argparse.Namespace) -> None:
    """Scores -> one table in every format."""
    from erpo.paper.tables import make_table

    spec = _spec(args, *_OF_ARTEFACT, "temperatures", "benchmarks", "samples")
    make_table(spec=spec, scores=args.scores, markers=args.markers, out_stem=args.out_stem, counts=args.counts)


def figure(args: argparse.Namespace) -> None:
    """Scores and metrics -> one figure in every format."""
    from erpo.config import FigureStyle, load_style
    from erpo.paper.figures import make_figure

    make_figure(
        spec=_spec(args, *_OF_ARTEFACT),
        scores=args.scores,
        markers=args.markers,
        references=args.references,
        out_stem=args.out_stem,
        style=settings_of(FigureStyle, json_option(args.style, "--style"), "--style") if args.style else load_style(),
        counts=args.counts,
    )


def report(args: argparse.Namespace) -> None:
    """Tables and figures -> one self-contained HTML page."""
    from erpo.paper.report import make_report

    make_report(
        study_spec=_spec(args, "study", "title", "tables", "figures", "runs"),
        tables=args.tables,
        figures=args.figures,
        markers=args.markers,
        scores=args.scores,
        out=args.out,
        counts=args.counts,
    )


def regrade(args: argparse.Namespace) -> None:
    """Grade stored samples again, without a model; say which verdicts changed."""
    from erpo.evaluation import regrade_scores
    from erpo.inspection import find_samples

    changed = regrade_scores(scores=args.scores, **find_samples(args.scores, args.markers, args.benchmarks, args.store))
    say([f"{count} {what}" for what, count in sorted(changed.items())] or ["no verdict changed"])


# --- verbs for people --------------------------------------------------------------------------------------------------


def headline(args: argparse.Namespace) -> None:
    """Print the headline of a finished study and where its artefacts are."""
    from erpo.paper.tables import headline as run

    print(run(args.table))


def archive(args: argparse.Namespace) -> None:
    """Pack a study's scores and training logs into one file, from which tables and figures are built without a GPU."""
    from erpo.archive import write_archive
    from erpo.config import study_path

    packed = write_archive(study_path(args.study), Path("results", Path(args.study).stem), args.out, not args.without_samples)
    print(f"{packed.path}: {packed.files} files, {packed.checkpoints} evaluated checkpoints\nSHA-256 {packed.sha256}")
    print("\n".join(f"not there yet, so not in it: {name}" for name in packed.missing) or "complete")


def unpack(args: argparse.Namespace) -> None:
    """Check an archive and put its files into a folder; prints the study's name."""
    from erpo.archive import unpack_archive

    print(unpack_archive(args.archive, args.out))


def schema(args: argparse.Namespace) -> None:
    """Write or check the generated schema and key reference."""
    from erpo.schema import main as run

    run(check=args.check)


def inspect(args: argparse.Namespace) -> None:
    """Show samples with verdicts and reasons."""
    from erpo.inspection import find_samples, inspect_samples

    filters = {name: getattr(args, name) for name in ("benchmark", "temperature", "verdict", "disagreement", "limit")}
    where = find_samples(args.samples, args.markers, args.benchmarks, args.store)
    is_empty = True
    for sample in inspect_samples(**where, **filters):
        print(sample)
        is_empty = False
    if is_empty:
        print("no such sample", file=sys.stderr)


def verdicts(args: argparse.Namespace) -> None:
    """Verdicts by benchmark, and where grader and second opinion differ."""
    from erpo.inspection import verdict_table

    say([verdict_table(args.scores)])


# --- shared readings of arguments --------------------------------------------------------------------------------------


def _spec(args: argparse.Namespace, *keys: str) -> dict[str, Any]:
    return json_option(args.spec, "--spec", *keys)


def _policy_folder(marker: Path) -> Path:
    from erpo.checkpoint import read_marker

    return marker.parent / read_marker(marker, "policy")["policy"]


def _trusts(marker: Path) -> bool:
    """Whether the model's entry allows the code that comes with the checkpoint to run."""
    from erpo.checkpoint import read_marker

    return bool(read_marker(marker, "policy").get("trust_remote_code", False))


def _data_entry(spec: dict[str, Any]) -> Any:
    from erpo.config import DataEntry

    return settings_of(DataEntry, spec["entry"], "--spec entry")


def _data_dir(args: argparse.Namespace) -> Path:
    return Path(os.environ.get("ERPO_DATA") or args.data_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="erpo", description="Environment-Regularized Policy Optimization.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(action: Callable[[argparse.Namespace], int | None], *options: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(action.__name__.replace("_", "-"), help=(action.__doc__ or "").splitlines()[0])
        sub.set_defaults(action=action)
        sub.add_argument("--log", type=Path, help="file that receives the log")
        for option in options:
            many = option.endswith("*")
            sub.add_argument(f"--{option.rstrip('*')}", type=Path, nargs="*" if many else None, required=not many, default=[])
        return sub

    for action, options in {
        prepare_model: ("out", "marker"),
        prepare_queries: ("model", "benchmarks*", "data-dir", "out", "manifest"),
        prepare_benchmark: ("model", "data-dir", "out", "manifest"),
        check_overlap: ("queries", "benchmarks*", "out"),
        cache_reference: ("model", "queries", "out", "marker"),
        train: ("model", "queries", "reference", "benchmarks*", "work", "marker"),
        generate: ("policy", "benchmarks*", "store", "marker"),
        score: ("markers*", "benchmarks*", "store", "out"),
        table: ("scores*", "markers*", "out-stem"),
        figure: ("scores*", "markers*", "references*", "out-stem"),
        report: ("tables*", "figures*", "markers*", "scores*", "out"),
    }.items():
        sub = verb(action, *options)
        sub.add_argument("--spec", required=True, help="canonical JSON of everything that decides the result")
        _extra_options(action, sub)
    verb(headline, "table")
    pack = verb(archive, "out")
    pack.add_argument("--study", required=True, help="name of a study (config/NAME.yaml)")
    pack.add_argument("--without-samples", action="store_true", help="leave out the samples that training kept (pages of runs)")
    verb(unpack, "archive", "out")
    verb(regrade, "scores", "markers*", "benchmarks*").add_argument("--store", type=Path)
    verb(verdicts).add_argument("scores", type=Path, nargs="+", help="scores files, or folders of them")
    verb(schema).add_argument("--check", action="store_true", help="fail if the generated files are stale")
    for action in operations.VERBS:
        operations.add_options(action, verb(action))
    look = verb(inspect, "markers*", "benchmarks*")
    look.add_argument(
        "samples", type=Path, nargs="?", help="results/STUDY/samples/RUN/seedS/stepN; else --markers, --benchmarks, --store"
    )
    look.add_argument("--store", type=Path)
    for option, kind in (("benchmark", str), ("temperature", float), ("verdict", str)):
        look.add_argument(f"--{option}", type=kind)
    look.add_argument("--disagreement", action="store_true", help="only where grader and second opinion differ")
    look.add_argument("--limit", type=int, default=20)
    return parser


def _extra_options(action: Callable[[argparse.Namespace], None], sub: argparse.ArgumentParser) -> None:
    if action in (table, figure, report):
        sub.add_argument("--counts", type=Path, help="folder that keeps counts of samples by content of the scores")
    if action is figure:
        sub.add_argument("--style", help="JSON of the look (erpo/config/style.yaml)")
    if action in (train, generate):
        sub.add_argument("--seed", type=int, required=True)
    if action is train:
        sub.add_argument("--step", type=int, required=True)
        sub.add_argument("--name", required=True)
        sub.add_argument("--previous", type=Path, nargs="*", help="marker of the milestone before (orders the jobs)")
        sub.add_argument("--supersede", type=flag, default=False, help="true: move work made under other settings aside")
        add_machine_options(sub)
    if action is generate:
        sub.add_argument("--generator", choices=("sampler", "vllm"), default="sampler")
        sub.add_argument("--batch-rows", type=int, default=512)
        sub.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the vLLM engine")


def _start_log(path: Path | None) -> None:
    """Warnings to standard error; everything to the file.

    Raises:
        ValueError: the file cannot be written.
    """
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    handlers[0].setLevel(logging.WARNING)
    handlers[0].addFilter(lambda record: record.exc_info is None)  # Python prints the traceback itself
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(path, mode="a", encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"--log {path} cannot be written: {error.strerror} ({error.filename})") from error
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 done, 2 unusable input (one sentence), 75 stopped early and saved, 1 anything else."""
    _calm_cpu()
    args = _parser().parse_args(arguments)
    try:
        _start_log(args.log)
        return args.action(args) or 0
    except ValueError as error:
        logging.getLogger("erpo").debug("refused", exc_info=True)
        sys.stderr.write(f"erpo {args.verb}: {error}\n")
        if args.log is not None:
            logging.getLogger("erpo").info("refused: %s", error, exc_info=True)
        return _BAD_INPUT
    except Exception:  # logged and raised again
        logging.getLogger("erpo").exception("%s failed", args.verb)
        raise


if __name__ == "__main__":
    sys.exit(main())
