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
    wildcard_constraints:
        run=one_of(ONE_NODE),
    threads: machine("train", "threads")
    resources:
        **placed("train"),
        **HOW_TRAINED,
        gpu=machine("train", "gpu"),
        launcher=machine("launcher"),
    params:
        spec=run_spec,
        folder=subpath(output.marker, parent=True),
    shell:
        "{resources.launcher} erpo train --log {log:q} --spec {params.spec:q} --name {wildcards.run:q}"
        " --seed {wildcards.seed} --step {wildcards.step} --model {input.model:q} --queries {input.queries:q}"
        " --reference {input.reference:q} --benchmarks {input.probe:q} --previous {input.previous:q} --work {params.folder:q}/work --marker {output.marker:q}"
        " --generator {resources.generator} --tensor-parallel {resources.tensor_parallel}"
        " --rollout-gpus {resources.rollout_gpus} --engine-memory {resources.engine_memory} --zero-stage {resources.zero_stage}"
        " --micro-batch-tokens {resources.micro_batch_tokens}"
        " --activation-checkpointing {resources.activation_checkpointing}"
        " --save-every {resources.save_every} --supersede {resources.supersede}"


# The same on several nodes: one task per GPU, each of them a rank that finds the others through Slurm's variables.
use rule train as train_across_nodes with:
    wildcard_constraints:
        run=one_of(SEVERAL_NODES),
    resources:
        **spread(),
        **HOW_TRAINED,
