# From problems to the paper's tables and figures.   snakemake --cores all all     (config/README.md: studies; docs/cluster.md: clusters)
from snakemake.utils import min_version

min_version("9.25")


include: "workflow/rules/common.smk"


pathvars:
    results=f"results/{STUDY.name}",
    logs=f"logs/{STUDY.name}",
    benchmarks=f"results/{STUDY.name}/timings",


wildcard_constraints:
    **WILDCARDS,


container: "workflow/envs/erpo.sif"


if not ARCHIVED:

    include: "workflow/rules/data.smk"
    include: "workflow/rules/training.smk"
    include: "workflow/rules/evaluation.smk"


include: "workflow/rules/paper.smk"


rule all:
    default_target: True
    input:
        f"results/{STUDY.name}/report.html",
        [] if ARCHIVED else prepared_data(),
        [] if ARCHIVED else [results_of(name) for name in STUDY.runs],
        [artefact_files(name) for name in (*STUDY.tables, *STUDY.figures)],
    localrule: True


onstart:
    None if ARCHIVED else refuse_missing_data()
    None if ARCHIVED else refuse_wrong_site()
