# Samples live in a store keyed by policy, prompt and sampling: asking again, or for more, draws only what is missing.
rule generate:
    input:
        policy=policy_of_cell,
        benchmarks=benchmarks_of_run,
    output:
        marker="<results>/samples/{run}/seed{seed}/step{step}/{shard}.json",
    log:
        "<logs>/generate/{run}/seed{seed}/step{step}/{shard}.log",
    benchmark:
        "<benchmarks>/generate/{run}/seed{seed}/step{step}/{shard}.tsv"
    threads: machine("generate", "threads")
    resources:
        **placed("generate"),
        mem_mb=machine("generate", "mem_mb"),
        runtime=generation_minutes,
        gpu=machine("generate", "gpu"),
        generator=machine("generator"),
        tensor_parallel=machine("tensor_parallel"),
        batch_rows=machine("rows"),
    params:
        spec=generation_spec,
        store=f"{RESULTS}/store",
    shell:
        "python -m erpo generate --log {log:q} --spec {params.spec:q} --policy {input.policy:q} --benchmarks {input.benchmarks:q}"
        " --store {params.store:q} --marker {output.marker:q} --seed {wildcards.seed}"
        " --generator {resources.generator} --tensor-parallel {resources.tensor_parallel} --batch-rows {resources.batch_rows}"


rule score:
    input:
        samples=samples_of_cell,
        benchmarks=benchmarks_of_run,
    output:
        scores="<results>/scores/{run}/seed{seed}/step{step}.parquet",
    log:
        "<logs>/score/{run}/seed{seed}/step{step}.log",
    benchmark:
        "<benchmarks>/score/{run}/seed{seed}/step{step}.tsv"
    threads: machine("score", "threads")
    resources:
        **placed("score"),
        mem_mb=machine("score", "mem_mb"),
        runtime=machine("score", "runtime"),
    params:
        spec=scores_spec,
        store=f"{RESULTS}/store",
    shell:
        "python -m erpo score --log {log:q} --spec {params.spec:q} --markers {input.samples:q} --benchmarks {input.benchmarks:q}"
        " --store {params.store:q} --out {output.scores:q}"
