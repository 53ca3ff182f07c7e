"""Command lines that cannot work: each ends before anything is started, with a sentence that names
what is wrong, and without a traceback."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    ViTModel,
)

from openrl.cli import batch_inference, evaluate, lora_combiner, serve_rm, supervised, train_ppo_ray
from openrl.cli.run import command
from openrl.config.commands import COMMANDS
from tests.e2e.runs import make_task

pytestmark = pytest.mark.full


TRAINING = (
    "--pretrain ./model --device cpu --param_dtype fp32 --save_path ./out --ckpt_path ./out/steps"
    " --dry_run"
)
SUPERVISED = f"{TRAINING} --train_batch_size 8 --micro_train_batch_size 4 --max_len 64"
ANSWERS = "--pretrain ./model --device cpu --param_dtype fp32 --prompt_max_len 16"
SOUND = {  # command -> its module, and flags that work
    "train_ppo_ray": (
        train_ppo_ray,
        f"{TRAINING} --prompt_data ./ok.jsonl --label_key label --remote_rm_url ./reward.py"
        " --advantage_estimator group_norm --n_samples_per_prompt 4 --rollout_batch_size 8"
        " --train_batch_size 16 --micro_train_batch_size 8 --prompt_max_len 16"
        " --generate_max_len 12 --max_steps 4",
    ),
    "train_sft": (supervised, f"{SUPERVISED} --dataset ./ok.jsonl --output_key output"),
    "train_rm": (supervised, f"{SUPERVISED} --dataset ./prefs.jsonl"),
    "train_dpo": (supervised, f"{SUPERVISED} --dataset ./prefs.jsonl"),
    "serve_rm": (
        serve_rm,
        "--reward_pretrain ./m_rm --device cpu --param_dtype fp32 --port 0 --max_len 64",
    ),
    "batch_inference": (
        batch_inference,
        f"{ANSWERS} --eval_task generate --dataset ./ok.jsonl --output_path ./out.jsonl"
        " --generate_max_len 8",
    ),
    "evaluate": (
        evaluate,
        f"{ANSWERS} --prompt_data ./ok.jsonl --label_key label --reward_funcs number"
        " --rollout_backend hf --generate_max_len 8",
    ),
    "lora_combiner": (
        lora_combiner,
        "--model_path ./model --lora_path . --output_path ./merged",
    ),
}

WORDS = {  # in bad_lines.txt -> flags that they stand for
    "LONG": "x" * 300,
    "CHAT": "--apply_chat_template --tokenizer_chat_template ./chat.jinja --prompt_max_len 64",
    "SEEDS": "--remote_rm_url None --prompt_data None --label_key None",
}


def read_lines() -> list[tuple[str, str, str]]:
    """(command, flags that spoil it, what is said) of bad_lines.txt."""
    text = (Path(__file__).parent / "bad_lines.txt").read_text(encoding="utf-8").splitlines()
    pairs = zip(text[::2], text[1::2], strict=True)
    return [(*line.partition(" ")[::2], words.strip()) for line, words in pairs]


LINES = read_lines()


def test_there_are_enough_of_them():
    assert len({line[:2] for line in LINES}) >= 400


@pytest.mark.parametrize(("prog", "extra", "words"), LINES, ids=[f"{p} {e}" for p, e, _ in LINES])
def test_what_is_wrong_is_named(prog, extra, words, workshop, capsys, monkeypatch):
    monkeypatch.chdir(workshop)
    monkeypatch.setattr(sys, "path", [str(workshop), *sys.path])
    for name in ("OPENRL_RM_TOKEN", "RAY_ADDRESS", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    module, sound = SOUND[prog]
    for word, meaning in WORDS.items():
        extra = extra.replace(word, meaning)
    argv = shlex.split(f"{sound} {extra}")
    run = module.run if "--dry_run" in argv else must_not_run
    try:
        code = command(COMMANDS[prog], module.prepare, run, argv=argv)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err.replace(f"{workshop}/", "").replace("./", "")
    assert code == 2 and words.replace("./", "") in said, said
    assert "nothing was started" in said


def must_not_run(config, inputs):
    raise AssertionError("what should have been refused would start now")


# -- where all is kept that is spoilt --------------------------------------------------------------


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    folder = make_task(tmp_path_factory.mktemp("workshop"))
    for name, spoil in MODELS.items():
        spoil(shutil.copytree(folder / "model", folder / name))
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "d_empty").mkdir()
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    return folder


def with_weights(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def spoil(model: Path) -> None:
        path = model / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def with_config(**fields: object) -> Callable[[Path], object]:
    def spoil(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return spoil


def with_torch_file(content: bytes) -> Callable[[Path], object]:
    def spoil(model: Path) -> None:
        (model / "model.safetensors").rename(model / "pytorch_model.bin")
        (model / "pytorch_model.bin").write_bytes(content)

    return spoil


def without_a_tensor(model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})


def a_model(kind: type, **settings: object) -> Callable[[Path], object]:
    def spoil(model: Path) -> None:
        kind(kind.config_class(**SMALL, **settings)).save_pretrained(model)

    return spoil


def without_a_head(model: Path) -> None:
    config = AutoConfig.from_pretrained(model, tie_word_embeddings=False)
    AutoModel.from_config(config).save_pretrained(model)


def a_classifier(outputs: int) -> Callable[[Path], object]:
    def spoil(model: Path) -> None:
        kind = AutoModelForSequenceClassification
        kind.from_pretrained(model, num_labels=outputs).save_pretrained(model)

    return spoil


def with_a_token(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<new>"]})
    tokenizer.save_pretrained(model)


def a_link_to_nothing(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("../blobs/0a1b2c")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b2c\nsize 123\n"
OWN_CODE = {"AutoConfig": "conf.C", "AutoModelForCausalLM": "conf.M"}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: dict[str, Callable[[Path], object]] = {
    "m_empty": with_weights(lambda weights: b""),
    "m_cut": with_weights(lambda weights: weights[:-500]),
    "m_garbage": with_weights(lambda weights: b"x" * 5000),
    "m_vocab": with_config(vocab_size=73),
    "m_width": with_config(hidden_size=128),
    "m_layers": with_config(num_hidden_layers=3),
    "m_drop": without_a_tensor,
    "m_bert": a_model(BertForMaskedLM),
    "m_encoder": a_model(BertModel),
    "m_pretraining": a_model(BertForPreTraining),
    "m_image": a_model(ViTModel, image_size=16, patch_size=8),
    "m_backbone": without_a_head,
    "m_token": with_a_token,
    "run_critic": lambda model: None,
    "m_rm": a_classifier(1),
    "m_two": a_classifier(2),
    "m_heads": with_config(num_attention_heads=3),
    "m_index": lambda model: (model / "model.safetensors").rename(model / "model.index"),
    "m_nojson": lambda model: (model / "config.json").write_text("{"),
    "m_listcfg": lambda model: (model / "config.json").write_text("[]"),
    "m_unknown": with_config(model_type="nosuch"),
    "m_owncode": with_config(model_type="own", auto_map=OWN_CODE),
    "m_notok": lambda model: [path.unlink() for path in model.glob("tokenizer*")],
    "m_badtok": lambda model: (model / "tokenizer.json").write_text("{}"),
    "m_pickle": with_torch_file(b"junk"),
    "m_lfs": with_weights(lambda weights: POINTER),
    "m_dangling": a_link_to_nothing,
    "m_badindex": lambda model: (model / "model.safetensors.index.json").write_text("[]"),
    "m_gptq": with_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "m_noweights": lambda model: (model / "model.safetensors").unlink(),
}

ROWS: dict[str, dict[str, object]] = {
    "ok": {"input": "1+1=", "label": "2", "output": "2"},
    "prefs": {"chosen": "a b", "rejected": "c d", "prompt": "p"},
    "new": {"input": "1+1=<new>", "label": "2", "output": "2"},
    "nulls": {"input": None, "label": "1"},
    "nums": {"input": 5, "label": "1"},
    "blank": {"input": "", "label": "1"},
    "chat_roles": {"input": [{"role": "nobody", "content": "x"}], "label": "1"},
    "chat_bad": {"input": [{"text": "x"}], "label": "1"},
    "lists": {"input": ["a"], "label": "1"},
    "long": {"input": "1" * 600, "label": "1"},
    "long2": {"input": "1" * 600, "output": "1"},
    "longprefs": {"chosen": "1" * 600, "rejected": "2"},
    "nolabel": {"input": "a"},
    "emptylabel": {"input": "a", "label": ""},
    "oddlabel": {"input": "a", "label": "no formula here"},
    "dictlabel": {"input": "a", "label": {"x": 1}},
    "badpattern": {"input": "a", "label": "(unclosed"},
    "imgs": {"input": "a", "label": "1", "images": ["nope.png"]},
    "noprefs": {"chosen": "a"},
    "emptyprefs": {"chosen": "", "rejected": "b"},
    "sameprefs": {"chosen": "a", "rejected": "a"},
    "surrogate": {"input": "\ud800", "label": "1"},
}

OK = f"{json.dumps(ROWS['ok'])}\n"
BOMB = "".join(
    f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcde", "bcdef", strict=True)
)
TAKEN = '@policy_losses.register("ppo")\ndef f(inputs, options):\n  "x"\n'
FILES: dict[str, str | bytes] = {
    "utf16.jsonl": (OK * 4).encode("utf-16"),
    "utf16.csv": "input,label\na,b\n".encode("utf-16"),
    "latin.jsonl": '{"input":"é","label":"1"}\n'.encode("latin-1") * 40,
    "zeros.jsonl": b"\0" * 1000,
    "empty.jsonl": "",
    "text.jsonl": "hello\n" * 5,
    "list.jsonl": "[1]\n" * 5,
    "cut.jsonl": (OK * 4)[:-8],
    "deep.jsonl": f'{{"input": {"[" * 1100}{"]" * 1100}, "label": "1"}}\n',
    "twice.jsonl": '{"input": "a", "input": "b", "label": "1"}\n' * 40,
    "mixed.jsonl": OK * 20 + '{"input": {"a": 1}, "label": "1"}\n' * 20,
    "pointer.parquet": POINTER,
    "x.jsonl.gz": b"junk",
    "x.parquet": b"PAR1junk",
    "x.arrow": b"junk",
    "x.txt": "x",
    "loader.py": "x",
    "obj.json": '{"a": 1}',
    "dir.json/a": "",
    "damaged.jsonl": "",
    "damaged.jsonl.flags.json": "{",
    "bad.json": '{"a": ',
    "head.csv": "input,label\n",
    "d_junk/a.bin": b"x",
    "y_bomb.yaml": f"a: &a [x,x]\n{BOMB}",
    "y_rec.yaml": "a: &a [*a]\n",
    "y_nest.yaml": "actor:\n  lr: 1\n",
    "y_list.yaml": "- a\n",
    "y_bad.yaml": "a: [\n",
    "y_dup.yaml": "seed: 1\nseed: 2\n",
    "y_type.yaml": "seed: [1,2]\n",
    "y_unknown.yaml": "lerning_rate: 1\n",
    "y_bin.yaml": b"\xff\xfe\0\0",
    "y_text.yaml": "hello",
    "y_tag.yaml": "seed: !!python/object/apply:os.system ['id']\n",
    "y_null.yaml": "seed:\n",
    "y_deep.yaml": f"a: {'[' * 1100}{']' * 1100}\n",
    "y_key.yaml": "? [a, b]\n: 1\n",
    "y_hyphen.yaml": "actor-learning-rate: 1e-6\n",
    "y_short.yaml": "bf16: true\n",
    "y_two.yaml": "seed: 1\n---\nseed: 2\n",
    "e_option.yaml": "bandit: {nosuch: 1}\n",
    "e_tag.yaml": "nosuch: {x: 1}\n",
    "route.yaml": "a: {nosuch: 1}\n",
    "r_syntax.py": "def reward_func(:\n",
    "r_none.py": "x=1\n",
    "r_import.py": "import nosuch\n",
    "r_exit.py": "import os; os._exit(3)\n",
    "r_args.py": "def reward_func(): return 1\n",
    "r_class.py": "class reward_func:\n  pass\n",
    "r_raise.py": "1/0\n",
    "r_var.py": "reward_func=3\n",
    "t.jinja": "{{ content",
    "chat.jinja": "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}",
    "agent.py": "class Agent: pass\n",
    "untyped.py": "def add(a, b):\n    return a + b\n",
    "adapter/adapter_config.json": "{}",
    "m_adapter/adapter_config.json": "{}",
    "m_adapter/adapter_model.safetensors": b"x" * 100,
    "occupied": "",
    "earlier/metrics.jsonl": '{"step": 1}\n',
    "ep.json": "{",
    "plug_exit.py": "import sys\nsys.exit(3)\n",
    "plug_taken.py": f"from openrl.extension_points import policy_losses\n{TAKEN}",
    "plug_err.py": "1/0\n",
    "plug_syn.py": "def (\n",
    "ck/step_000002/manifest.json": "{",
    "ck2/step_000002/manifest.json": '{"schema_version": 1}',
}
