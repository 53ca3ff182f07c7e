"""Models with random weights that the steps of a window share; each is made once, below /tmp/models."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import torch

from tests.tiny import tiny_model_dir

HOME = Path("/tmp/models")
MIDDLE = {  # 200 million parameters: its parts show in the memory of a GPU
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
}
SIZES = {  # Qwen3, as published
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},  # for a CPU
}
PROMPT = 120  # tokens of a prompt
REWARD = '''
def reward_func(queries, prompts, labels, **kwargs):
    """Numbers that differ within a group."""
    return [float(len(query) % 7) for query in queries]
'''


def middle_model(device: str) -> Path:
    """Return the directory of the model that whole runs train; a tiny one for a CPU."""
    folder = HOME / f"middle-{device}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # runs start side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shape = MIDDLE if device == "cuda" else {"head_dim": 64}
            made = tiny_model_dir(folder, dtype=torch.bfloat16, **shape)
            (folder / "made").write_text(str(made))
    return Path((folder / "made").read_text())


def vocabulary(size: str) -> int:
    return 1000 if size == "tiny" else 151_936


def qwen3(size: str) -> Path:
    """Return the directory of a Qwen3 in bf16 with prompts.jsonl and reward.py. Its tokenizer has
    one word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    path, words_known = HOME / f"qwen3-{size}", vocabulary(size)
    if (path / "prompts.jsonl").exists():
        return path
    fields = SIZES[size] | {
        "head_dim": 128,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": words_known,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"  # seconds instead of half a minute
    with torch.device(device):
        config = AutoConfig.for_model("qwen3", **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to("cpu").save_pretrained(path)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    words |= {f"w{n}": n for n in range(4, words_known)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{n}_token": f"<{n}>" for n in ("pad", "bos", "eos", "unk")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(path)
    (path / "reward.py").write_text(REWARD)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(4, words_known, (512, PROMPT), generator=generator).tolist()
    lines = [{"input": " ".join(f"w{n}" for n in row), "label": "0"} for row in rows]
    (path / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path
