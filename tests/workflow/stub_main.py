"""Stands in for the command line where only plans are tested: makes every output at once and notes the call."""

import json
import os
import sys
import time
from pathlib import Path

ENDINGS = {"table": (".csv", ".md", ".tex", ".parquet", ".json"), "figure": (".pdf", ".png", ".csv", ".json")}


def parse(words):
    options, current = {}, None
    for word in words:
        if word.startswith("--"):
            current = word[2:]
            options[current] = []
        else:
            options[current].append(word)
    return options


verb, options = sys.argv[1], parse(sys.argv[2:])
time.sleep(float(os.environ.get("STUB_SECONDS", "0")))
targets = [Path(path) for name in ("marker", "out", "manifest") for path in options.get(name, ())]
targets = [path for path in targets if verb != "prepare-model" or path.suffix == ".json"]
targets += [Path(options["out-stem"][0] + ending) for ending in ENDINGS.get(verb, ())]
for path in targets:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([verb, options["spec"], options.get("seed"), options.get("step")]))
with open("calls.jsonl", "a") as calls:
    calls.write(json.dumps({"verb": verb, **options}) + "\n")
