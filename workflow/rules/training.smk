# The marker is the output; states, policies and metrics live beside it in work/, which no failed or repeated job empties.
rule train:
    input:
        unpack(training_inputs),
    output:
        marker="<results>/runs/{run}/seed{seed}/step{step}.json",
    log:
        "<logs>/train/{run}/seed{seed}/step{step}.log",
    benchmark:
        "<benchmarks>/train/{run}/seed{seed}/step{step}.tsv"
    threads: machine("train", "threads")
    resources:
        mem_mb=machine("train", "mem_mb"),
        runtime=machine("train", "runtime"),
        gpu=machine("train", "gpu"),
        launcher=machine("launcher"),
        generator=machine("generator"),
        zero_stage=machine("zero_stage"),
        micro_batch_tokens=machine("micro_batch_tokens"),
        activation_checkpointing=machine("activation_checkpointing"),
        save_every=STUDY.save_every,
        supersede=supersede,
    params:
        spec=run_spec,
        folder=subpath(output.marker, parent=True),
    shell:
        "{resources.launcher} -m erpo train --log {log:q} --spec {params.spec:q} --name {wildcards.run:q}"
        " --seed {wildcards.seed} --step {wildcards.step} --model {input.model:q} --queries {input.queries:q}"
        " --reference {input.reference:q} --benchmarks {input.probe:q} --previous {input.previous:q} --work {params.folder:q}/work --marker {output.marker:q}"
        " --generator {resources.generator} --zero-stage {resources.zero_stage}"
        " --micro-batch-tokens {resources.micro_batch_tokens}"
        " --activation-checkpointing {resources.activation_checkpointing}"
        " --save-every {resources.save_every} --supersede {resources.supersede}"
