"""One suite for every rollout engine: what they return is what a plain forward pass of transformers
says."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
from collections.abc import Coroutine, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from openrl.algorithms.collate import collate
from openrl.errors import UserError
from openrl.models.causal_lm import CausalLM
from openrl.models.headed import Origins
from openrl.models.kept import KeptIds
from openrl.rollout_engines.build import start_engine
from openrl.rollout_engines.engine import EngineDied, EngineSpec, RolloutEngine
from openrl.rollout_engines.vllm_engine import VLLMEngine
from openrl.token_origins import KeptSets
from openrl.types import (
    Completion,
    FinishReason,
    Prompt,
    PromptGroup,
    Sampling,
    Segment,
    Trajectory,
)
from openrl.weights.buckets import checksum, pack, split_into_buckets
from openrl.weights.transport import Route, Sender, SentBucket, make_sender
from tests.patience import PATIENCE
from tests.tiny import EOS, PAD, rollout_spec, tiny_model_dir

MAX_MODEL_LEN = 128
CLOSE = 1e-4  # fp32, two implementations
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": ({"tied": True}, {"enable_prefix_caching": True}),
    "untied": ({"tied": False}, {"deterministic": True}),
    "experts": ({"tied": True, "arch": "qwen3_moe"}, {}),
    # experts over two processes, one attention head on each
    "divided": ({"tied": True, "arch": "qwen3_moe"}, {"vllm_tensor_parallel_size": 2}),
}
BENCHES = [("hf", "tied"), ("vllm", "tied")]
MORE = [("hf", "untied"), ("hf", "experts"), ("vllm", "untied"), ("vllm", "divided")]
BENCHES += [pytest.param(bench, marks=pytest.mark.full) for bench in MORE]


@dataclass
class Bench:
    """An engine, the directory it started from, and the weights that it should hold by now."""

    engine: RolloutEngine
    runner: asyncio.Runner
    directory: Path
    spec: EngineSpec
    oracle: PreTrainedModel
    sender: Sender = field(default_factory=lambda: make_sender(Route(), 0, torch.device("cpu")))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, PATIENCE))

    def generate(self, prompts: list[list[int]], samplings: list[Sampling]) -> list[Completion]:
        async def together() -> list[Completion]:
            pairs = zip(prompts, samplings, strict=True)
            return await asyncio.gather(*(self.engine.generate(p, s) for p, s in pairs))

        return self.run(together())

    def sync(self, weights: dict[str, Tensor], version: int, bucket_bytes: int = 40_000) -> int:
        async def send() -> int:
            for sent in self.buckets(weights, version, bucket_bytes):
                await self.engine.load_bucket(sent)
            return await self.engine.finish_sync(version)

        return self.run(send())

    def buckets(
        self, weights: dict[str, Tensor], version: int, bucket_bytes: int = 40_000
    ) -> list[SentBucket]:
        """Packed and announced as the trainer does, with checksums."""
        self.sender.end()
        sent = []
        for named in split_into_buckets(weights.items(), bucket_bytes):
            announced = self.sender.announce(pack(named, version, self.sender.allocate))
            sent.append(
                replace(announced, checksums=tuple(checksum(tensor) for _, tensor in named))
            )
        return sent

    def expected(self, prompt: list[int], tokens: list[int], sampling: Sampling) -> Tensor:
        """Log-probs of ``tokens`` after ``prompt`` by one plain forward, the distribution cut token
        by token."""
        with torch.no_grad():
            logits = self.oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        rows = [slow_logprobs(row, prompt + tokens[:i], sampling) for i, row in enumerate(logits)]
        return torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)])


def slow_logprobs(logits: Tensor, seen: list[int], sampling: Sampling) -> Tensor:
    """The sampled distribution, written out: penalty, temperature, min_p, top_k, top_p."""
    logits = logits.clone()
    for token in set(seen):
        logits[token] = (
            logits[token] / sampling.repetition_penalty
            if logits[token] > 0
            else logits[token] * sampling.repetition_penalty
        )
    logits = logits / (sampling.temperature or 1.0)
    probs = logits.softmax(-1)
    probs[probs < sampling.min_p * probs.max()] = 0
    ranked = probs.argsort(descending=True).tolist()
    if sampling.top_k > 0:
        probs[ranked[sampling.top_k :]] = 0
    kept, mass = [], 0.0
    for token in ranked:
        if probs[token] == 0 or (sampling.top_p < 1 and mass >= sampling.top_p * probs.sum()):
            break
        kept.append(token)
        mass += probs[token].item()
    out = torch.full_like(probs, -torch.inf)
    out[kept] = (probs[kept] / probs[kept].sum()).log()
    return out


def checkpoint(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def prompts_of(count: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 40 ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (count,), generator=generator).tolist()
    return [torch.randint(4, 66, (n,), generator=generator).tolist() for n in lengths]


def new_weights(
    bench: Bench, tmp_path: Path, seed: int
) -> tuple[dict[str, Tensor], PreTrainedModel]:
    """Other random weights for the bench's model, as a checkpoint names them, and the model that
    has them."""
    shape = next(
        fields for name, (fields, _) in MODELS.items() if name == bench.directory.parent.name
    )
    path = tiny_model_dir(tmp_path, seed=seed, **shape)
    return checkpoint(path), AutoModelForCausalLM.from_pretrained(path)


def apart(directory: Path) -> str:
    """The model's tokenizer, moved to a directory of its own."""
    target = directory.with_name("tokenizer")
    target.mkdir()
    for file in directory.glob("tokenizer*"):
        file.rename(target / file.name)
    return str(target)


@pytest.fixture(scope="module", params=BENCHES, ids="-".join)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    backend, name = request.param
    shape, options = MODELS[name]
    home = tmp_path_factory.mktemp("models") / name
    home.mkdir()
    directory = tiny_model_dir(home, **shape)
    if name == "untied":
        options = options | {"tokenizer_path": apart(directory)}
    spec = rollout_spec(directory, param_dtype="fp32", longest=MAX_MODEL_LEN, **options)
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(backend, spec))
        runner.run(engine.connect(Route(), 1))
        yield Bench(
            engine, runner, directory, spec, AutoModelForCausalLM.from_pretrained(directory)
        )
        runner.run(engine.close())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(24),
        Sampling(24, temperature=0.6),
        Sampling(24, temperature=1.4, top_k=5),
        Sampling(24, top_p=0.6),
        Sampling(24, min_p=0.2),
        Sampling(24, repetition_penalty=1.5),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"],
)
def test_logprobs_of_sampled_tokens(bench: Bench, sampling: Sampling) -> None:
    prompts = prompts_of(16, seed=1)
    samplings = [replace(sampling, seed=i, max_tokens=4 + 2 * i) for i in range(16)]
    for prompt, wanted, reply in zip(
        prompts, samplings, bench.generate(prompts, samplings), strict=True
    ):
        expected = bench.expected(prompt, reply.token_ids, wanted)
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected, atol=CLOSE, rtol=0)


def test_kept_sets_make_the_trainer_agree_with_the_engine(bench: Bench, tmp_path: Path) -> None:
    """After a sync: the engine's sets are those that the slow version keeps, and over them the
    trainer has the engine's log-probs. Over the whole vocabulary it does not."""
    version = bench.engine.policy_version + 1
    weights, bench.oracle = new_weights(bench, tmp_path, seed=7)
    assert bench.sync(weights, version) == version
    trainer = CausalLM(deepcopy(bench.oracle), 0.8, 5)
    prompts = prompts_of(12, seed=6)
    cut = Sampling(20, temperature=0.8, top_p=0.9, top_k=20, min_p=0.1, kept_ids=64)
    samplings = [replace(cut, seed=i, **off) for i, off in enumerate(4 * [*ONE_CUT])]
    replies = bench.generate(prompts, samplings)
    pairs = zip(prompts, replies, strict=True)
    rows = [Segment.answer(p, r.token_ids, r.logprobs, r.versions, kept=r.kept) for p, r in pairs]
    for prompt, reply, sampling in zip(prompts, replies, samplings, strict=True):
        assert reply.kept is not None and min(reply.kept.sizes) > 0
        logits = logits_after(bench, prompt, reply.token_ids)
        for i, ids in enumerate(sets_of(reply.kept)):
            slow = slow_logprobs(logits[i], prompt + reply.token_ids[:i], sampling)
            assert set(ids) == set(slow.isfinite().nonzero()[:, 0].tolist())
    sampled = [
        Trajectory(Prompt(str(n), [], ""), [row], FinishReason.STOP) for n, row in enumerate(rows)
    ]
    batch = collate([PromptGroup(t.prompt, [t]) for t in sampled], PAD)
    assert batch.kept is not None
    sets = KeptIds.of(batch.kept, batch.token_ids.shape[1], torch.device("cpu"))
    columns = batch.token_ids, batch.attention_mask, None, batch.loss_mask
    with torch.no_grad():
        whole, _ = trainer(*columns)
        own, _ = trainer(*columns, origins=Origins(sets))
    gaps = [(found - batch.rollout_logprobs)[batch.loss_mask].abs() for found in (whole, own)]
    assert float(gaps[0].mean()) > 0.01
    # fp32's roundings of log-probs of some nats have a mean of 1e-6
    assert float(gaps[1].mean()) < 1e-5 and float(gaps[1].max()) < 1e-4


def test_sets_with_too_many_tokens_are_unknown(bench: Bench) -> None:
    sampling = Sampling(20, temperature=1.5, top_p=0.9, seed=3, ignore_eos=True)
    all_of_them, few = bench.generate(
        [[7, 8, 9]] * 2, [replace(sampling, kept_ids=64), replace(sampling, kept_ids=3)]
    )
    assert all_of_them.kept is not None and few.kept is not None
    wanted = [ids if len(ids) <= 3 else None for ids in sets_of(all_of_them.kept)]
    assert few.kept == KeptSets.of(wanted) and None in wanted
    assert (few.token_ids, few.logprobs) == (all_of_them.token_ids, all_of_them.logprobs)


def test_the_likeliest_tokens_are_those_of_the_distribution_sampled(bench: Bench) -> None:
    """With their log-probs; and never all tokens, since the last one follows from the others."""
    sampling = Sampling(12, temperature=0.8, seed=5, likeliest=6)
    prompts = prompts_of(3, seed=9)
    for prompt, reply in zip(prompts, bench.generate(prompts, [sampling] * 3), strict=True):
        logits = logits_after(bench, prompt, reply.token_ids)
        assert reply.kept is not None and list(reply.kept.sizes) == [6] * len(reply.token_ids)
        found = torch.tensor(list(reply.kept.logprobs)).view(-1, 6)
        whole = torch.stack([slow_logprobs(row, [], sampling) for row in logits])
        torch.testing.assert_close(found, whole.topk(6).values.to(found), atol=CLOSE, rtol=0)
        ids = torch.tensor(list(reply.kept.ids)).view(-1, 6)
        torch.testing.assert_close(found, whole.gather(1, ids).to(found), atol=CLOSE, rtol=0)
    (all_but_one,) = bench.generate([[7, 8, 9]], [replace(sampling, likeliest=10**6)])
    assert all_but_one.kept is not None
    assert set(all_but_one.kept.sizes) == {whole.shape[1] - 1}


ONE_CUT: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": -1, "min_p": 0.0},
    {"top_p": 1.0, "top_k": -1},
)
"""What is off: nothing, all but top_p, all but min_p."""


def sets_of(kept: KeptSets) -> list[list[int]]:
    ends = [0, *accumulate(size for size in kept.sizes)]
    return [sorted(kept.ids[a:b]) for a, b in pairwise(ends)]


def logits_after(bench: Bench, prompt: list[int], tokens: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = bench.oracle(torch.tensor([prompt + tokens])).logits
    return found[0, len(prompt) - 1 : -1]


def answers_by_the_oracle(bench: Bench) -> None:
    prompts, sampling = prompts_of(4, seed=2), Sampling(12)
    for prompt, reply in zip(prompts, bench.generate(prompts, [sampling] * 4), strict=True):
        expected = bench.expected(prompt, reply.token_ids, sampling)
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected, atol=CLOSE, rtol=0)


def test_finish_reasons(bench: Bench) -> None:
    prompts, samplings = prompts_of(24, seed=3), [Sampling(40, seed=i) for i in range(24)]
    replies = bench.generate(prompts, samplings)
    for reply in replies:
        assert EOS not in reply.token_ids[:-1]
        if reply.finish_reason is FinishReason.STOP:
            assert reply.token_ids[-1] == EOS
        else:
            assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.LENGTH, 40)
            assert reply.token_ids[-1] != EOS
    assert {reply.finish_reason for reply in replies} == {FinishReason.STOP, FinishReason.LENGTH}
    for reply in bench.generate(prompts, [replace(s, ignore_eos=True) for s in samplings]):
        assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.LENGTH, 40)


def test_stop_text_ends_and_stays(bench: Bench) -> None:
    decode = AutoTokenizer.from_pretrained(
        bench.spec.model.tokenizer_path or bench.directory
    ).decode
    free = Sampling(40, seed=5, ignore_eos=True)
    (whole,) = bench.generate([[7, 8, 9]], [free])
    stop = decode(whole.token_ids, skip_special_tokens=True)[10:12]
    until = next(
        n for n in range(41) if stop in decode(whole.token_ids[:n], skip_special_tokens=True)
    )
    (cut,) = bench.generate([[7, 8, 9]], [replace(free, stop=("never in it", stop))])
    assert (cut.finish_reason, cut.token_ids) == (FinishReason.STOP, whole.token_ids[:until])
    assert len(cut.logprobs) == until


def test_seeds(bench: Bench) -> None:
    def sample(seed: int) -> list[int]:
        return bench.generate([[7, 8, 9]], [Sampling(20, seed=seed, ignore_eos=True)])[0].token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    unseeded = bench.generate([[7, 8, 9]] * 4, [Sampling(20, ignore_eos=True)] * 4)
    assert len({tuple(reply.token_ids) for reply in unseeded}) == 4


def test_prompt_and_completion_together_have_a_limit(bench: Bench) -> None:
    (reply,) = bench.generate([[7] * 30], [Sampling(50, ignore_eos=True, max_len=40)])
    assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.LENGTH, 10)


def test_greedy(bench: Bench) -> None:
    """top_k 1 and temperature 0 both take the likeliest token; they differ in the log-prob by
    definition."""
    sharp, cold = bench.generate(
        [[7, 8, 9]] * 2,
        [Sampling(12, top_k=1, ignore_eos=True), Sampling(12, temperature=0.0, ignore_eos=True)],
    )
    tokens: list[int] = []
    for _ in range(12):
        with torch.no_grad():
            tokens.append(
                int(bench.oracle(torch.tensor([[7, 8, 9, *tokens]])).logits[0, -1].argmax())
            )
    assert sharp.token_ids == cold.token_ids == tokens
    assert sharp.logprobs == [0.0] * 12
    expected = bench.expected([7, 8, 9], tokens, Sampling(12))
    torch.testing.assert_close(torch.tensor(cold.logprobs), expected, atol=CLOSE, rtol=0)


def test_model_length_is_the_limit(bench: Bench) -> None:
    prompt = (list(range(4, 66)) * 3)[: MAX_MODEL_LEN - 3]
    (reply,) = bench.generate([prompt], [Sampling(50, seed=1, ignore_eos=True)])
    assert (reply.finish_reason, len(reply.token_ids)) == (FinishReason.LENGTH, 3)
    for bad in ([], [*prompt, 4, 5, 6]):
        with pytest.raises(UserError, match="leaves no room for an answer"):
            bench.generate([bad], [Sampling(1)])


def test_sync_switches_weights(bench: Bench, tmp_path: Path) -> None:
    """Three times, in many buckets: nothing changes before finish_sync, and then everything
    does."""
    prompts, greedy = prompts_of(6, seed=4), [Sampling(8, temperature=0.0)]
    first = bench.engine.policy_version
    for version in (first + 1, first + 2, first + 3):
        weights, model = new_weights(bench, tmp_path / str(version), seed=version)
        buckets = bench.buckets(weights, version)
        assert len(buckets) > 3
        (before,) = bench.generate(prompts[:1], greedy)
        for bucket in buckets:
            bench.run(bench.engine.load_bucket(bucket))
        assert bench.generate(prompts[:1], greedy) == [before]
        assert (
            bench.run(bench.engine.finish_sync(version)) == bench.engine.policy_version == version
        )
        bench.oracle = model
        replies = bench.generate(prompts, [Sampling(16, seed=i) for i in range(6)])
        for prompt, reply in zip(prompts, replies, strict=True):
            expected = bench.expected(prompt, reply.token_ids, Sampling(16))
            torch.testing.assert_close(torch.tensor(reply.logprobs), expected, atol=CLOSE, rtol=0)
            assert [(s.start, s.end, s.version) for s in reply.versions] == [
                (0, len(reply.token_ids), version)
            ]
        (after,) = bench.generate(prompts[:1], greedy)
        assert after.token_ids != before.token_ids


def test_incomplete_sync_is_refused(bench: Bench) -> None:
    weights = checkpoint(bench.directory)
    version = bench.engine.policy_version + 1
    assert bench.sync(weights, version) == version
    bench.oracle = AutoModelForCausalLM.from_pretrained(bench.directory)
    (gone,) = [name for name in weights if name.endswith("layers.1.self_attn.k_proj.weight")]
    lacking = {name: tensor + 1 for name, tensor in weights.items() if name != gone}
    for bad, named in (
        (lacking, gone),
        (weights | {"model.surprise.weight": torch.ones(3)}, "surprise"),
        ({}, "embed_tokens"),
    ):
        with pytest.raises(UserError, match=named.replace(".", r"\.")):
            bench.sync(bad, version + 1)
    assert bench.engine.policy_version == version
    answers_by_the_oracle(bench)  # the old weights, whole
    assert bench.sync(weights, version + 2) == version + 2


def test_a_tensor_that_changed_on_the_way_is_named(bench: Bench) -> None:
    """One bit, in the memory that the bucket lies in, after it was announced; the old weights
    stay."""
    weights = checkpoint(bench.directory)
    version = bench.engine.policy_version + 1
    bench.sync(weights, version)
    bench.oracle = AutoModelForCausalLM.from_pretrained(bench.directory)
    buckets = bench.buckets({name: tensor + 1 for name, tensor in weights.items()}, version + 1)
    victim = buckets[1]
    with open(victim.where["path"], "r+b") as memory:
        byte = memory.read(1)[0]
        memory.seek(0)
        memory.write(bytes([byte ^ 1]))
    for sent in buckets:
        bench.run(bench.engine.load_bucket(sent))
    with pytest.raises(UserError, match=rf"{re.escape(victim.manifest.names[0])} arrived changed"):
        bench.run(bench.engine.finish_sync(version + 1))
    assert bench.engine.policy_version == version
    answers_by_the_oracle(bench)


def test_memory_that_is_gone(bench: Bench) -> None:
    """As when the trainer dies between the last bucket and the end of the sync."""
    sync_of_the_dead = [
        replace(sent, where=sent.where | {"path": "/proc/self/fd/999999"})
        for sent in bench.buckets(checkpoint(bench.directory), bench.engine.policy_version + 1)
    ]
    for sent in sync_of_the_dead:
        bench.run(bench.engine.load_bucket(sent))
    with pytest.raises(UserError, match="is gone"):
        bench.run(bench.engine.finish_sync(bench.engine.policy_version + 1))
    answers_by_the_oracle(bench)


def test_bytes_from_another_machine(bench: Bench) -> None:
    """The paths mean nothing here; the bytes travel beside them."""
    weights, version = checkpoint(bench.directory), bench.engine.policy_version + 1
    sender = make_sender(Route(remote=True), 0, torch.device("cpu"))
    for named in split_into_buckets(
        [(name, tensor * 0.9) for name, tensor in weights.items()], 40_000
    ):
        sent = sender.announce(pack(named, version, sender.allocate))
        away = replace(sent, where=sent.where | {"machine": "elsewhere", "path": "/nowhere"})
        bench.run(bench.engine.load_bucket(away))
    assert bench.run(bench.engine.finish_sync(version)) == version
    bench.oracle = AutoModelForCausalLM.from_pretrained(bench.directory)
    with torch.no_grad():
        for parameter in bench.oracle.parameters():
            parameter.mul_(0.9)
    answers_by_the_oracle(bench)
    bench.sync(weights, version + 1)
    bench.oracle = AutoModelForCausalLM.from_pretrained(bench.directory)


def test_vllm_keeps_the_session(bench: Bench) -> None:
    """Its worker refuses what is out of order, and goes on."""
    if not isinstance(bench.engine, VLLMEngine):
        pytest.skip("sessions are vLLM's")
    if bench.spec.engine.sizes.width > 1:
        pytest.skip("an error in one of several workers leaves vLLM's executor out of step")
    messages = [sent.message() for sent in bench.buckets(checkpoint(bench.directory), 1)]

    def load(messages: list[dict[str, Any]], first: bool, last: bool) -> None:
        bench.run(
            bench.engine._llm.collective_rpc("openrl_load_weights", args=(messages, first, last))
        )

    with pytest.raises(Exception, match="start_weight_update must be called before"):
        load(messages, first=False, last=False)
    load(messages[:2], first=True, last=False)
    with pytest.raises(Exception, match="while a weight update is already active"):
        load(messages, first=True, last=False)
    load(messages[2:], first=False, last=True)
    bench.oracle = AutoModelForCausalLM.from_pretrained(bench.directory)
    answers_by_the_oracle(bench)


def arrivals(bench: Bench, order: list[int]) -> list[Completion]:
    """The same 12 requests, started in the given order, each after a different number of turns of
    the loop."""
    prompts = prompts_of(12, seed=6)
    replies: dict[int, Completion] = {}

    async def one(request: int, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        replies[request] = await bench.engine.generate(prompts[request], Sampling(24, seed=request))

    async def all_of_them() -> None:
        await asyncio.gather(*(one(request, 7 * place % 5) for place, request in enumerate(order)))

    bench.run(all_of_them())
    return [replies[request] for request in range(12)]


@pytest.mark.full
@pytest.mark.parametrize(
    "bench", [("hf", "untied"), ("vllm", "untied")], ids="-".join, indirect=True
)
def test_deterministic_engine_ignores_order_and_restarts(
    bench: Bench, request: pytest.FixtureRequest
) -> None:
    """Bit for bit: in another order, after a sync of the same weights, and in an engine started
    anew."""
    assert bench.spec.deterministic
    bench.sync(checkpoint(bench.directory), bench.engine.policy_version + 1)
    bench.oracle = AutoModelForCausalLM.from_pretrained(bench.directory)
    outcomes = [arrivals(bench, order) for order in (list(range(12)), list(range(11, -1, -1)))]
    again = bench.runner.run(start_engine(request.node.callspec.params["bench"][0], bench.spec))
    bench.run(again.connect(Route(), 1))
    other = replace(bench, engine=again)
    try:
        outcomes.append(arrivals(other, [5, 1, 9, 0, 11, 3, 7, 2, 10, 4, 8, 6]))
        wrong_names = {
            f"module.{name}": tensor for name, tensor in checkpoint(bench.directory).items()
        }
        with pytest.raises(UserError, match="module"):
            # the first sync of this engine: it cannot know better than the model
            other.sync(wrong_names, 1)
        refuses_or_keeps(other)
    finally:
        bench.run(again.close())
    bits = [
        [(reply.token_ids, reply.logprobs, reply.finish_reason) for reply in outcome]
        for outcome in outcomes
    ]
    assert bits[0] == bits[1] == bits[2]


def test_sleep_changes_no_answer_and_refuses_what_needs_it(bench: Bench) -> None:
    """The order of a step: all asleep, weights awake for a sync, then the cache; greedy answers
    before and after."""
    weights, version = checkpoint(bench.directory), bench.engine.policy_version + 1
    bench.sync(weights, version)
    bench.oracle = AutoModelForCausalLM.from_pretrained(bench.directory)
    prompts, sampling = prompts_of(6, seed=11), [Sampling(16, temperature=0.0)] * 6
    before = bench.generate(prompts, sampling)
    bench.run(bench.engine.sleep("weights", "cache"))
    for work in (
        bench.engine.generate(prompts[0], sampling[0]),
        bench.engine.load_bucket(bench.buckets(weights, 1)[0]),
        bench.engine.finish_sync(1),
        bench.engine.sleep("cache"),
    ):
        with pytest.raises(RuntimeError, match="asleep now"):
            bench.run(work)
    bench.run(bench.engine.wake("weights"))
    assert bench.sync(weights, version + 1) == version + 1
    with pytest.raises(RuntimeError, match="a request needs cache of this engine"):
        bench.run(bench.engine.generate(prompts[0], sampling[0]))
    bench.run(bench.engine.sleep("weights"))  # as a checkpoint between two rollouts makes it
    bench.run(bench.engine.wake("weights", "cache"))
    with pytest.raises(RuntimeError, match="weights of this engine is awake already"):
        bench.run(bench.engine.wake("weights"))
    after = bench.generate(prompts, sampling)
    assert [reply.token_ids for reply in before] == [reply.token_ids for reply in after]
    for old, new in zip(before, after, strict=True):
        assert new.logprobs == pytest.approx(old.logprobs, abs=CLOSE)


def test_sleep_waits_for_requests_that_run(bench: Bench) -> None:
    async def scenario() -> tuple[list[Completion], bool]:
        running = [
            asyncio.create_task(bench.engine.generate([5, 6, 7 + i], Sampling(40, ignore_eos=True)))
            for i in range(3)
        ]
        await asyncio.sleep(0)
        await bench.engine.sleep("weights", "cache")
        done = all(task.done() for task in running)
        await bench.engine.wake("weights", "cache")
        return await asyncio.gather(*running), done

    replies, done = bench.run(scenario())
    assert done and [len(reply.token_ids) for reply in replies] == [40, 40, 40]


def refuses_or_keeps(bench: Bench) -> None:
    """After a failed sync: the old weights, or a clear refusal; never something in between."""
    try:
        answers_by_the_oracle(bench)
    except UserError as error:
        assert "out of use" in str(error)


@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_missing_model(backend: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        asyncio.run(start_engine(backend, rollout_spec(tmp_path / "nowhere")))


@pytest.mark.full
def test_dead_vllm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle of a request, as the kernel does when memory runs out; then nothing is
    left behind, and nothing fails at the exit of the process."""
    before = set(multiprocessing.active_children())

    async def die() -> None:
        engine = await start_engine(
            "vllm", rollout_spec(tiny_model_dir(tmp_path), param_dtype="fp32", longest=512)
        )
        address = engine._llm.engine_core.input_socket.last_endpoint  # type: ignore[attr-defined]
        scheme, path = address.decode().split("://")
        assert scheme == "ipc" and Path(path).is_socket()
        request = asyncio.create_task(engine.generate([5, 6, 7], Sampling(500, ignore_eos=True)))
        await asyncio.sleep(0)
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        with pytest.raises(EngineDied, match="a process of vLLM died"):
            await asyncio.wait_for(request, 60)
        with pytest.raises(EngineDied, match="a process of vLLM died"):
            await engine.generate([5, 6, 7], Sampling(4))
        with pytest.raises(EngineDied):
            await engine.check()
        await engine.close()
        assert not Path(path).parent.exists()
        # the exit of a process clears modules before it deletes what their frames still hold
        monkeypatch.setattr("vllm.v1.engine.async_llm.shutdown_prometheus", None)
        engine._llm.__del__()  # type: ignore[attr-defined]

    asyncio.run(die())
    assert set(multiprocessing.active_children()) <= before
