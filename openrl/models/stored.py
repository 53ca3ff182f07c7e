"""What a model's directory holds, from the headers of its files; no weight is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from openrl.errors import UserError
from openrl.files import is_lfs_pointer
from openrl.models.towers import empty_model, require_backbone
from openrl.models.unread import HEADS, OUTPUTS, empty_backbone, warn_of_unread

CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")
OTHER_HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering", "MaskedLM")
UNDONE = ("fp8", "mxfp4")  # quantisations that transformers undoes where it has no kernels for them
INDEX, BIN_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
POSITIONS = "max_position_embeddings"
ROPE = ("rope_parameters", "rope_scaling")
# bytes; the header of a file with ten thousand tensors has one million
LONGEST_HEADER = 100_000_000
WHOLE = "a complete copy of the model: this one may be a download that broke off"


Shape = tuple[int, ...]


def load_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    """Load a model's config. Raises UserError if it does not load."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # classes of configs raise anything
        reason = str(error)
        if "trust_remote_code" in reason or "custom code" in reason:
            message, fix = (
                "its architecture needs code from its own repository",
                "--trust_remote_code",
            )
        elif "does not recognize this architecture" in reason:
            message = "transformers does not know its architecture"
            fix = "another model, or a version of transformers that knows it"
        elif "valid JSON" in reason:
            message, fix = "config.json is not JSON", WHOLE
        else:
            message = " ".join(reason.split())
            away = isinstance(error, OSError)
            message = "it is neither a directory here nor found on the Hub" if away else message
            fix = "a model directory, or a Hub name" if away else "fix its config.json"
        raise UserError(f"{path}: its config does not load: {message}", fix) from error


def stored_shapes(path: str) -> dict[str, Shape]:
    """Return the shape of each weight of a model: of a directory, or of a name of the Hub that is
    in its cache. Empty if it is not, and for pickles from before PyTorch 1.6. Raises UserError for
    a file of weights that is truncated, missing or of another kind."""
    directory, cached = Path(path).expanduser(), None
    if not directory.exists():
        cached = _cached_directory(path)
        directory = cached or directory
    for pattern, index, read in (
        ("*.safetensors", INDEX, shapes_in),
        ("pytorch_model*.bin", BIN_INDEX, _shapes_in_bin),
    ):
        files = _files(directory, pattern, index)
        absent = [file.name for file in files if not file.is_file()]
        if absent and cached:  # it is downloaded when the model is loaded
            return {}
        if absent:  # a link of the Hub's cache may lead nowhere after a copy
            raise UserError(f"{path}: {len(absent)} of its files missing, e.g. {absent[0]}", WHOLE)
        if files:
            return {name: shape for file in files for name, shape in read(file).items()}
    return {}


def _cached_directory(name: str) -> Path | None:
    """Return where the Hub's cache has the files of a model; None if it has not."""
    try:
        config = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name that the Hub would know
        return None
    return Path(config).parent if isinstance(config, str) else None


def _files(directory: Path, pattern: str, index_name: str) -> list[Path]:
    """Return the files of weights in a directory, by their index if it has one. Raises
    UserError."""
    index = directory / index_name
    if not index.is_file():
        return sorted(directory.glob(pattern))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} lists no weights", WHOLE) from error
    return [directory / name for name in names]


def _shapes_in_bin(file: Path) -> dict[str, Shape]:
    """Return the shape of each tensor in a file of torch.save. Raises UserError."""
    with open(file, "rb") as opened:
        old = opened.read(1) == b"\x80"  # a bare pickle, as PyTorch wrote before 1.6
    if old:
        return {}
    if not is_zipfile(file):
        raise UserError(f"{file} is no file of PyTorch's weights, or is cut", WHOLE)
    try:
        held = torch.load(file, map_location="meta", weights_only=True, mmap=True)
        return {name: tuple(tensor.shape) for name, tensor in held.items()}
    except Exception as error:  # unpickling raises anything
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        raise UserError(f"{file} holds no weights: {reason}", WHOLE) from error


def shapes_in(file: Path) -> dict[str, Shape]:
    """Return the shape of each tensor. Raises UserError unless it is a whole safetensors file."""
    size = file.stat().st_size
    with open(file, "rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        text = opened.read(length) if 0 < length <= LONGEST_HEADER else b""
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if is_lfs_pointer(file):
            raise UserError(f"{file} is only a pointer of Git LFS", "git lfs pull") from error
        what = "is empty" if size == 0 else "is not a safetensors file"
        raise UserError(f"{file} {what}", WHOLE) from error
    if (needed := 8 + length + max(ends, default=0)) != size:
        raise UserError(f"{file} has {size} bytes instead of {needed}", WHOLE)
    return shapes


def check_language_model(
    path: str,
    trust_remote_code: bool,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    head: bool = True,
    scalar_head: str = "",
) -> None:
    """Raise UserError if the weights at ``path`` do not fit its config by names and shapes; unless
    ``head``, those of the output head may be missing. Warns of weights that are not used;
    ``scalar_head`` is used besides."""
    stored = stored_shapes(path)
    config = load_config(path, trust_remote_code)
    heads = config.architectures or []
    other = all(name.endswith(OTHER_HEADS) for name in heads)
    # configs of some causal models say False too; the name of their head tells them from encoders
    encodes = vars(config).get("is_decoder") is False
    causal = any(name.endswith(CAUSAL_HEADS) for name in heads)
    if heads and (other or (encodes and not causal)):
        message = f"{path} is a {heads[0]}, which writes no text"
        raise UserError(message, "a model with a language head")
    own_code = getattr(config, "auto_map", None)
    if not stored or own_code or getattr(config, "quantization_config", None):
        return
    try:
        for name, value in overrides.items():
            setattr(config, name, value)
        model = empty_model(config, trust_remote_code)
    except Exception as error:  # classes of models raise anything
        what = f"--model_config_overrides do not fit {path}" if overrides else f"{path}: no model"
        reason = shorten(str(error), 200)  # it may list all models there are
        fix = "leave --model_config_overrides out" if overrides else "fix its config.json"
        raise UserError(f"{what}: {type(error).__name__}: {reason}", fix) from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    prefix = f"{model.base_model_prefix}."
    # the backbone alone, as AutoModel saves it
    if all(prefix + name in expected for name in stored):
        stored = {prefix + name: shape for name, shape in stored.items()}
    for name in sorted(expected.keys() & stored.keys()):
        if expected[name] != stored[name]:
            raise UserError(
                f"{path}: {name} has the shape {stored[name]}, and by the config {expected[name]}",
                "leave --model_config_overrides out" if overrides else "fix its config.json",
            )
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    absent = sorted(expected.keys() - stored.keys() - set(tied))
    missing = [name for name in absent if head or name.startswith(prefix)]
    if missing and stored.keys() <= expected.keys():  # otherwise a loader may rename some
        raise UserError(f"{path}: {len(missing)} weights missing, e.g. {missing[0]}", WHOLE)
    used = (f"{scalar_head}.weight", f"{scalar_head}.bias")
    warn_of_unread(path, model, [name for name in stored if name not in used], HEADS)


def check_trainable(path: str, load_in_4bit: bool, trust_remote_code: bool) -> None:
    """Raise UserError for quantised weights that --load_in_4bit or transformers cannot undo, and
    for a model without a backbone of its own."""
    config = load_config(path, trust_remote_code)
    stored = getattr(config, "quantization_config", None)
    method = stored.get("quant_method") if isinstance(stored, dict) else None
    if method and method not in UNDONE and not (method == "bitsandbytes" and load_in_4bit):
        fix = "an unquantised checkpoint, with --load_in_4bit if memory is short"
        raise UserError(f"{path}: weights quantised by {method} cannot be trained", fix)
    try:
        model = empty_model(config, trust_remote_code)
    except Exception:  # classes of models raise anything; check_language_model says what
        return
    require_backbone(model, path)


def check_backbone(path: str, trust_remote_code: bool, head: str = "score") -> None:
    """Raise UserError unless the model at ``path`` has a scalar head, whose name is ``head`` unless
    its config has another, or is a language model."""
    config, stored = load_config(path, trust_remote_code), stored_shapes(path)
    heads, name = config.architectures or [], _head_name(config, head)
    if (outputs := _outputs(stored, name)) > 1:
        raise UserError(
            f"{path} has {outputs} outputs per text, of which none can be trained alone",
            "a model with num_labels 1, or a language model, which gets a head of one output",
        )
    if heads and all(kind.endswith("SequenceClassification") for kind in heads):
        _check_scalar(path, config, stored, name)
    else:
        check_language_model(path, trust_remote_code, head=False, scalar_head=name)


def check_head(path: str, head: str, trust_remote_code: bool) -> None:
    """Raise UserError if the reward model at ``path`` has no head, or one of several outputs."""
    stored, config = stored_shapes(path), load_config(path, trust_remote_code)
    name = _head_name(config, head)
    if stored and f"{name}.weight" not in stored:
        raise UserError(
            f"--reward_pretrain: {path} has no weights named {name}.weight, so it is not a reward"
            " model",
            "train one with train_rm, or name its head with --value_head_prefix",
        )
    if (outputs := _outputs(stored, name)) > 1:
        raise UserError(
            f"--reward_pretrain: {path} has {outputs} outputs per text, not a single reward",
            "a model with num_labels 1, such as train_rm saves",
        )
    _check_scalar(path, config, stored, name)


def _outputs(stored: Mapping[str, Shape], head: str) -> int:
    return stored.get(f"{head}.weight", (1,))[0]


def _head_name(config: PretrainedConfig, given: str) -> str:
    return getattr(config, "value_head_prefix", None) or given


def _check_scalar(
    path: str, config: PretrainedConfig, stored: Mapping[str, Shape], head: str
) -> None:
    """Warn of stored tensors that neither the backbone nor the head takes."""
    own_code = getattr(config, "auto_map", None)
    if not stored or own_code or getattr(config, "quantization_config", None):
        return
    taken = {f"{head}.weight", f"{head}.bias"}
    try:
        model = empty_backbone(config)
    except Exception as error:  # classes of models raise anything
        reason = f"{type(error).__name__}: {shorten(str(error), 200)}"
        raise UserError(f"{path}: no model: {reason}", "fix its config.json") from error
    warn_of_unread(path, model, [name for name in stored if name not in taken], OUTPUTS)


def check_tokens(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[Sequence[int]],
    trust_remote_code: bool,
) -> None:
    """Raise UserError if rows of the data hold a token that the model has no embedding for. A
    tokenizer may know such tokens, as that of Gemma 3 does."""
    text = load_config(path, trust_remote_code).get_text_config()
    known = getattr(text, "vocab_size", len(tokenizer))  # a model of images has no words
    if len(tokenizer) <= known:
        return
    if (token := max(map(max, filter(None, rows)), default=0)) >= known:
        raise UserError(
            f"{path}: the data holds token {token}, {tokenizer.decode(token)!r}, but the embedding"
            f" has {known} rows",
            "a model with resize_token_embeddings, or the tokenizer that it was trained with",
        )


JUDGED = "--reward_func_kwargs: what the engines are asked as judges, and their replies,"
JUDGED_FIX = 'a smaller "max_tokens" of the judge, or --generate_max_len'


def check_length(
    path: str,
    longest: int,
    trust_remote_code: bool,
    flags: str = "--prompt_max_len, --generate_max_len: prompt and response",
    fix: Callable[[int], str] = "--max_len {}".format,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise UserError if rows may grow longer than the model's positions. A config, or fields of
    ``overrides``, that stretch positions are taken at their word. ``flags`` says which rows, and
    which flags limit them; ``fix`` takes the number of positions and says what to do."""
    text = load_config(path, trust_remote_code).get_text_config()
    most = overrides.get(POSITIONS, getattr(text, POSITIONS, None))
    ropes = [overrides[name] for name in ROPE if name in overrides]
    rope = ropes or [getattr(text, name, None) for name in ROPE]
    if not most or "factor" in str(rope) or longest <= most:
        return
    message = f"{flags} may have {longest} tokens in all, and {path} knows {most} positions"
    raise UserError(message, fix(most))
