rule table:
    input:
        scores=lambda wildcards: scores_of(wildcards.table),
        markers=lambda wildcards: markers_of(wildcards.table),
    output:
        multiext("<results>/tables/{table}", ".csv", ".md", ".tex", ".parquet", ".json"),
    log:
        "<logs>/table/{table}.log",
    benchmark:
        "<benchmarks>/table/{table}.tsv"
    localrule: True
    params:
        spec=table_spec,
        stem=lambda wildcards: f"{RESULTS}/tables/{wildcards.table}",
        counts=COUNTS,
    shell:
        "python -m erpo table --log {log:q} --spec {params.spec:q} --scores {input.scores:q} --markers {input.markers:q}"
        " --counts {params.counts:q} --out-stem {params.stem:q}"


rule figure:
    input:
        scores=lambda wildcards: scores_of(wildcards.figure),
        markers=lambda wildcards: markers_of(wildcards.figure),
        references=lambda wildcards: references_of(wildcards.figure),
    output:
        multiext("<results>/figures/{figure}", ".pdf", ".png", ".csv", ".json"),
    log:
        "<logs>/figure/{figure}.log",
    benchmark:
        "<benchmarks>/figure/{figure}.tsv"
    localrule: True
    params:
        spec=figure_spec,
        style=studies.canonical_json(studies.load_style().model_dump(mode="json")),
        stem=lambda wildcards: f"{RESULTS}/figures/{wildcards.figure}",
        counts=COUNTS,
    shell:
        "python -m erpo figure --log {log:q} --spec {params.spec:q} --scores {input.scores:q} --markers {input.markers:q}"
        " --references {input.references:q} --style {params.style:q} --counts {params.counts:q} --out-stem {params.stem:q}"


rule tables:
    input:
        [artefact_files(name) for name in STUDY.tables],
    localrule: True


rule figures:
    input:
        [artefact_files(name) for name in STUDY.figures],
    localrule: True


rule report:
    input:
        tables=[f"{RESULTS}/tables/{name}.json" for name in STUDY.tables],
        figures=[f"{RESULTS}/figures/{name}.json" for name in STUDY.figures],
        markers=report_markers(),
        scores=report_scores(),
    output:
        "<results>/report.html",
    log:
        "<logs>/report.log",
    benchmark:
        "<benchmarks>/report.tsv"
    localrule: True
    params:
        spec=studies.canonical_json(studies.report_spec(STUDY)),
        tables=[f"{RESULTS}/tables/{name}" for name in STUDY.tables],
        figures=[f"{RESULTS}/figures/{name}" for name in STUDY.figures],
        counts=COUNTS,
    shell:
        "python -m erpo report --log {log:q} --spec {params.spec:q} --tables {params.tables:q} --figures {params.figures:q}"
        " --markers {input.markers:q} --scores {input.scores:q} --counts {params.counts:q} --out {output:q}"


# Every run, table and figure is a target by its name.
for _name in () if ARCHIVED else STUDY.runs:

    rule:
        name:
            _name
        input:
            results_of(_name),
        localrule: True


for _name in ARTEFACTS:

    rule:
        name:
            _name
        input:
            artefact_files(_name),
        localrule: True
