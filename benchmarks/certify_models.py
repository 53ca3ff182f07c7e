"""Certificates of small models of many architectures, and the page that shows them:

    python -m benchmarks.certify_models                      # all, on transformers' generation
    python -m benchmarks.certify_models --backend vllm qwen3 # one, on vLLM

Each is made from transformers' default config of its type, with few and small layers. What was
found is kept in ``benchmarks/measured/models.json``; ``docs/models.md`` shows all of that."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from openrl.config.groups.model import ModelFlags
from openrl.errors import UserError
from openrl.models.small import write_small_model
from openrl.trainer.planning.certificate import Subject, examine

KEPT = Path(__file__).parent / "measured" / "models.json"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TYPES = [
    "llama",
    "mistral",
    "ministral3",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "glm",
    "glm4",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "smollm3",
    "falcon",
    "falcon_h1",
    "cohere",
    "cohere2",
    "starcoder2",
    "stablelm",
    "ernie4_5",
    "ernie4_5_moe",
    "llama4_text",
    "seed_oss",
    "exaone4",
    "nemotron_h",
    "bamba",
    "jamba",
    "lfm2",
    "minimax",
    "gpt2",
    "gpt_neox",
    "arcee",
    "apertus",
]
OF_MODEL = ("loads, output head", "padded rows", "packed rows", "shared prefixes", "LoRA")
"""The checks that need neither an engine nor a tokenizer."""

BF16 = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Types of which vLLM runs a layer on a CPU in bf16 alone."""

MORE: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2": {"full_attn_idxs": [1]},
    "deepseek_v3": {"topk_method": "noaux_tc"},  # vLLM reads it
}
"""Fields that released models have and the default config of their type has not: a second kind of
layer, most often."""

HEAD = """# Models

```bash
python -m openrl.cli.check_model Qwen/Qwen3-0.6B --device cpu --gpu H100
python -m openrl.cli.check_model path/to/config --tiny    # its shape, from a config
```

`check_model` runs what a training run would run, and says in one table what holds, with numbers:
the model loads and its output head gives the model's own log-probs; rows side by side, packed,
and with a shared beginning have the log-probs and the gradient that each row has alone; adapters
on all linear layers learn; after a weight sync of changed weights the rollout engine samples with
the log-probs that the trainer computes, and after an image, too, if the model sees; the chat
template shows earlier turns, the parser of tool calls reads back a call as the template writes it,
and a reply with reasoning comes apart again. The flags that suit the model follow from what holds.
`--gpu` adds what a GRPO step takes on that GPU, `--output_json` keeps it all in a file. The exit
code is 0 if all of it holds.

The table below was made by these checks, on a CPU in fp32, with a small random model of each
architecture (few layers, but every kind that the config has; `python -m
benchmarks.certify_models`). A number is the largest difference: of log-probs in nats, and of
gradients as a share of the gradient's size. Under "packed rows" and "shared prefixes", "no" ends a
run with those flags before its first step, with what to do instead. Under an engine it is what that
engine said when it started or sampled; vLLM runs gated delta nets on a CPU in bf16 alone, so it
samples in bf16 there, and its number is a rounding of bf16. Empty: not tried.

"""


def certify(kind: str, backend: str) -> dict[str, Any]:
    """Return what every check found of a small model of this type."""
    with tempfile.TemporaryDirectory() as directory:
        config, model = Path(directory, "config"), Path(directory, "model")
        began = time.monotonic()
        AutoConfig.for_model(kind, **MORE.get(kind, {})).save_pretrained(config)
        try:
            write_small_model(str(config), model, trust_remote_code=False)
        except UserError as error:
            return {"cannot be made": {"verdict": "no", "measured": str(error)}}
        half = backend == "vllm" and kind in BF16
        flags = ModelFlags(pretrain=str(model), param_dtype="bf16" if half else "fp32")
        names = [*(OF_MODEL if backend == "hf" else OF_MODEL[:1]), "engine = trainer"]
        found = [asdict(f) for f in examine(Subject(flags, "cpu", backend), names)]
        print(f"{kind} on {backend}: {time.monotonic() - began:.0f} s", flush=True)
        for finding in found:
            finding["measured"] = finding["measured"].replace(str(model), "MODEL")
            if finding["verdict"] == "no":
                print(f"  {finding['check']}: {finding['measured']}", flush=True)
        return {finding.pop("check"): finding for finding in found}


def page(records: dict[str, dict[str, Any]]) -> str:
    """Return docs/models.md: a row for each architecture, and why a check does not hold."""
    columns = ["architecture", *OF_MODEL, "transformers", "vLLM"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    reasons: dict[str, list[str]] = {}
    for kind in (kind for kind in TYPES if kind in records):
        of_hf, of_vllm = records[kind].get("hf", {}), records[kind].get("vllm", {})
        found = [of_hf.get(name) for name in OF_MODEL]
        engines = [record.get("engine = trainer") for record in (of_hf, of_vllm)]
        lines.append(f"| {kind} | " + " | ".join(map(cell, [*found, *engines])) + " |")
        names = [*OF_MODEL, "transformers", "vLLM"]
        for name, finding in zip(names, [*found, *engines], strict=True):
            if finding and finding["verdict"] == "no":
                reason = re.sub(r"\s*try: .*", "", finding["measured"]).replace("<", "&lt;")
                reasons.setdefault(f"{name}: {reason}", []).append(kind)
    why = [f"- {', '.join(kinds)}: {reason}" for reason, kinds in reasons.items()]
    return HEAD + "\n".join(lines) + "\n\n## Why not\n\n" + "\n".join(why) + "\n"


def cell(finding: dict[str, Any] | None) -> str:
    if finding is None:
        return ""
    if finding["verdict"] != "yes":
        return str(finding["verdict"])
    numbers = re.findall(r"within ([\d.e-]+)|gap ([\d.e-]+)", finding["measured"])
    return ", ".join(a or b for a, b in numbers) or finding["measured"].partition(":")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=TYPES)
    parser.add_argument("--backend", choices=["hf", "vllm"], default="hf")
    given = parser.parse_args()
    for kind in given.types:
        found = certify(kind, given.backend)
        records = json.loads(KEPT.read_text()) if KEPT.exists() else {}
        records.setdefault(kind, {})[given.backend] = found
        KEPT.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(records))


if __name__ == "__main__":
    main()
