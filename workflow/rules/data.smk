rule prepare_model:
    output:
        marker="<results>/models/{model}.json",
    log:
        "<logs>/prepare_model/{model}.log",
    benchmark:
        "<benchmarks>/prepare_model/{model}.tsv"
    wildcard_constraints:
        model=SYNTHETIC_MODELS,
    threads: machine("train", "threads")
    resources:
        **placed("train"),
        mem_mb=machine("train", "mem_mb"),
        runtime=2 * _HOUR,
    params:
        spec=model_spec,
        folder=subpath(output.marker, strip_suffix=".json"),
    shell:
        "python -m erpo prepare-model --log {log:q} --spec {params.spec:q} --out {params.folder:q} --marker {output.marker:q}"


# On the machine with the network, also under Slurm.
rule fetch_model:
    output:
        marker="<results>/models/{model}.json",
    log:
        "<logs>/fetch_model/{model}.log",
    benchmark:
        "<benchmarks>/fetch_model/{model}.tsv"
    wildcard_constraints:
        model=PRETRAINED_MODELS,
    localrule: True
    params:
        spec=model_spec,
        folder=subpath(output.marker, strip_suffix=".json"),
    shell:
        "python -m erpo prepare-model --log {log:q} --spec {params.spec:q} --out {params.folder:q} --marker {output.marker:q}"


rule prepare_benchmark:
    input:
        model="<results>/models/{model}.json",
    output:
        queries="<results>/data/{model}/benchmarks/{benchmark}.parquet",
        manifest="<results>/data/{model}/benchmarks/{benchmark}.manifest.json",
    log:
        "<logs>/prepare_benchmark/{model}/{benchmark}.log",
    benchmark:
        "<benchmarks>/prepare_benchmark/{model}/{benchmark}.tsv"
    localrule: True
    resources:
        data_dir=DATA_DIR,
    params:
        spec=benchmark_spec,
    shell:
        "python -m erpo prepare-benchmark --log {log:q} --spec {params.spec:q} --model {input.model:q}"
        " --data-dir {resources.data_dir:q} --out {output.queries:q} --manifest {output.manifest:q}"


rule prepare_queries:
    input:
        model="<results>/models/{model}.json",
        benchmarks=excluded_benchmarks,
    output:
        queries="<results>/data/{model}/{train_set}.parquet",
        manifest="<results>/data/{model}/{train_set}.manifest.json",
    log:
        "<logs>/prepare_queries/{model}/{train_set}.log",
    benchmark:
        "<benchmarks>/prepare_queries/{model}/{train_set}.tsv"
    localrule: True
    resources:
        data_dir=DATA_DIR,
    params:
        spec=queries_spec,
    shell:
        "python -m erpo prepare-queries --log {log:q} --spec {params.spec:q} --model {input.model:q}"
        " --benchmarks {input.benchmarks:q}"
        " --data-dir {resources.data_dir:q} --out {output.queries:q} --manifest {output.manifest:q}"


rule check_overlap:
    input:
        queries="<results>/data/{model}/{train_set}.parquet",
        benchmarks=benchmarks_of_model,
    output:
        "<results>/data/{model}/{train_set}.overlap.json",
    log:
        "<logs>/check_overlap/{model}/{train_set}.log",
    benchmark:
        "<benchmarks>/check_overlap/{model}/{train_set}.tsv"
    localrule: True
    params:
        spec=overlap_spec,
    shell:
        "python -m erpo check-overlap --log {log:q} --spec {params.spec:q} --queries {input.queries:q}"
        " --benchmarks {input.benchmarks:q} --out {output:q}"


rule cache_reference:
    input:
        model="<results>/models/{model}.json",
        queries="<results>/data/{model}/{train_set}.parquet",
    output:
        marker="<results>/reference/{model}/{train_set}.json",
    log:
        "<logs>/cache_reference/{model}/{train_set}.log",
    benchmark:
        "<benchmarks>/cache_reference/{model}/{train_set}.tsv"
    threads: machine("reference", "threads")
    resources:
        **placed("reference"),
        mem_mb=machine("reference", "mem_mb"),
        runtime=machine("reference", "runtime"),
        gpu=machine("reference", "gpu"),
    params:
        spec=reference_spec,
        stem=subpath(output.marker, strip_suffix=".json"),
    shell:
        "python -m erpo cache-reference --log {log:q} --spec {params.spec:q} --model {input.model:q} --queries {input.queries:q}"
        " --out {params.stem:q}.parquet --marker {output.marker:q}"


rule data:
    input:
        prepared_data(),
    localrule: True
