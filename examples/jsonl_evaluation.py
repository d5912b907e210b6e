"""Evaluate a model on a jsonl file, and compute pass@k from several samples of each line.

``pip install -e '.[sglang]' && python examples/jsonl_evaluation.py`` runs on a CPU without a
download. With your own file and score function, only the command is needed. It continues where it
stopped if it was killed::

    sglrl eval Qwen/Qwen3-0.6B --input problems.jsonl --output results.jsonl \\
        --samples 8 --score jsonl_evaluation:passes
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import sglrl


def passes(item, text):
    """Return whether the text has the answer. ``item`` is a line of the file.

    The function may also be async, and may return a float. 1 counts as passed.
    """
    return item["answer"] in text


def main(engine="sglang"):
    model = sglrl.tiny_model(characters="0123456789+= ", initializer_range=0.02)
    items = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(1, 5)]
    with tempfile.TemporaryDirectory() as folder:
        problems, results = Path(folder, "problems.jsonl"), Path(folder, "results.jsonl")
        problems.write_text("".join(f"{json.dumps(item)}\n" for item in items), encoding="utf-8")
        command = [sys.executable, "-m", "sglrl", "eval", str(model), "--engine", engine]
        command += ["--input", str(problems), "--output", str(results), "--device", "cpu", "--json"]
        command += ["--samples", "8", "--max-new-tokens", "8"]
        # The command finds the module in the current folder.
        command += ["--score", f"{Path(__file__).stem}:passes"]
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, check=True)
        # A line of the results has an item and its samples.
        for line in results.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            passed = sum(sample["score"] for sample in record["samples"])
            print(f"{record['prompt']} {passed:.0f} of 8 samples pass")
    for k, share in json.loads(done.stdout)["pass_at_k"].items():
        print(f"pass@{k}: {share:.2f}")


if __name__ == "__main__":
    main()
