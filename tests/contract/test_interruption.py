"""Requests that a pause interrupts: what they hold afterwards is what nobody interrupted gives, and
each token knows the weights that sampled it."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrl.errors import UserError
from openrl.rollout_engines.build import start_engine
from openrl.rollout_engines.engine import EngineRequest, EngineSpec, RolloutEngine
from openrl.rollout_engines.hf_engine import HFEngine
from openrl.rollout_engines.vllm_engine import VLLMEngine, seed_after
from openrl.token_origins import VersionSpan
from openrl.types import Completion, FinishReason, Sampling
from openrl.weights.transport import Route
from tests.contract.test_rollout_engines import Bench, checkpoint
from tests.tiny import rollout_spec, tiny_model_dir

pytestmark = pytest.mark.full

LONG = Sampling(200, temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 8, 9], [11, 5], [30, 31, 32, 33, 34]]
CLOSE = 1e-4


async def started(backend: str, spec: EngineSpec) -> RolloutEngine:
    """An engine whose requests can be looked at while they run."""
    engine = await start_engine(backend, spec)
    await engine.connect(Route(), 1)
    if isinstance(engine, HFEngine):
        decode = engine._decode

        def seen(batch: list, loop: asyncio.AbstractEventLoop) -> None:
            engine.batch = batch
            decode(batch, loop)

        engine.batch, engine._decode = [], seen
    return engine


def spec_of(home: Path, **options) -> EngineSpec:
    return rollout_spec(tiny_model_dir(home), param_dtype="fp32", longest=512, **options)


def open_bench(backend: str, home: Path, runner: asyncio.Runner, **options) -> Bench:
    spec = spec_of(home, **options)
    engine = runner.run(started(backend, spec))
    oracle = AutoModelForCausalLM.from_pretrained(spec.model.pretrain)
    return Bench(engine, runner, Path(spec.model.pretrain), spec, oracle)


@pytest.fixture(scope="module", params=["hf", "vllm"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        home = tmp_path_factory.mktemp("interrupted")
        opened = open_bench(request.param, home, runner, enable_prefix_caching=True)
        yield opened
        runner.run(opened.engine.close())


@pytest.fixture(autouse=True)
def original_weights(request: pytest.FixtureRequest) -> None:
    """Each test begins with the weights that the engine was started with."""
    if "bench" in request.fixturenames:
        bench = request.getfixturevalue("bench")
        bench.sync(checkpoint(bench.directory), bench.engine.policy_version + 1)


async def sampled(engine, requests: int) -> None:
    """Returns once so many requests have ten tokens each, of hundreds."""
    while True:
        if isinstance(engine, VLLMEngine):
            states = engine._llm.output_processor.request_states.values()
            counts = [state.detokenizer.num_output_tokens() for state in states]
        else:
            counts = [len(row.tokens) for row in engine.batch if not row.reply.done()]
        if len(counts) == requests and min(counts) >= 10:
            return
        await asyncio.sleep(0)


def interrupted(
    bench: Bench,
    prompts: list[list[int]],
    sampling: Sampling,
    meanwhile: Callable[[], Awaitable[object]] | None = None,
    pauses: int = 1,
) -> list[Completion]:
    """The answers to ``prompts``, paused in the middle; ``meanwhile`` runs during the pause."""

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(bench.engine.generate(p, sampling)) for p in prompts]
        for _ in range(pauses):
            await sampled(bench.engine, len(tasks))
            await bench.engine.pause()
            assert not any(task.done() for task in tasks)
            if meanwhile is not None:
                await meanwhile()
            await bench.engine.resume()
        return await asyncio.gather(*tasks)

    return bench.run(scenario())


def spans_of(reply: Completion) -> list[int]:
    """The versions, after a check that their spans lie one behind the other over all tokens."""
    edges = [0, *(span.end for span in reply.versions)]
    assert edges[:-1] == [span.start for span in reply.versions]
    assert edges[-1] == len(reply.token_ids) == len(reply.logprobs)
    return [span.version for span in reply.versions]


def alike(replies: list[Completion], others: list[Completion]) -> None:
    assert [r.token_ids for r in replies] == [r.token_ids for r in others]
    assert [r.finish_reason for r in replies] == [r.finish_reason for r in others]
    for reply, other in zip(replies, others, strict=True):
        assert reply.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


@pytest.mark.parametrize("pauses", [1, 3])
def test_a_pause_changes_no_greedy_answer(bench: Bench, pauses: int) -> None:
    """Token for token up to the budget, which counts from the request's first token."""
    whole = bench.generate(PROMPTS, [LONG] * 3)
    found = interrupted(bench, PROMPTS, LONG, pauses=pauses)
    alike(found, whole)
    for reply in found:
        assert spans_of(reply) == [bench.engine.policy_version]
    short = replace(LONG, max_len=120)
    alike(interrupted(bench, PROMPTS[:1], short), bench.generate(PROMPTS[:1], [short]))


def test_a_seeded_answer_goes_on_with_other_random_numbers(bench: Bench) -> None:
    """Each log-prob is of the distribution sampled, each token comes with the 40 that it was drawn
    from, and the stretches do not repeat each other."""
    sampling = Sampling(300, temperature=1.2, top_k=40, seed=5, ignore_eos=True, kept_ids=64)
    (reply,) = interrupted(bench, PROMPTS[:1], sampling, pauses=2)
    assert len(reply.token_ids) == 300
    assert reply.kept is not None and list(reply.kept.sizes) == [40] * 300
    sets = [reply.kept.ids[start : start + 40] for start in range(0, 300 * 40, 40)]
    assert all(token in ids for token, ids in zip(reply.token_ids, sets, strict=True))
    expected = bench.expected(PROMPTS[0], reply.token_ids, sampling)
    torch.testing.assert_close(torch.tensor(reply.logprobs), expected, atol=CLOSE, rtol=0)
    if isinstance(bench.engine, HFEngine):  # it keeps its generator
        alike([reply], bench.generate(PROMPTS[:1], [sampling]))


def test_an_interrupted_answer_keeps_the_likeliest_tokens_of_each_stretch(bench):
    sampling = Sampling(300, temperature=1.2, seed=5, ignore_eos=True, likeliest=5)
    (reply,) = interrupted(bench, [[7, 8, 9]], sampling)
    assert len(reply.token_ids) == 300 and list(reply.kept.sizes) == [5] * 300
    listed = zip(reply.kept.ids, reply.kept.logprobs, strict=True)
    for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True):
        found = dict([next(listed) for _ in range(5)])
        assert found.get(token, logprob) == pytest.approx(logprob, abs=1e-5)
        assert min(found.values()) >= logprob - 1e-5 or token in found


def test_seeds_of_later_stretches() -> None:
    seeds = [seed_after(3, n) for n in range(100)] + [seed_after(4, n) for n in range(100)]
    assert seeds[0] == 3 and seeds[100] == 4 and len({*seeds}) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_after(None, 7) is None


def test_new_weights_in_the_middle(bench: Bench, tmp_path: Path) -> None:
    """Tokens before the seam have the log-probs of the old weights, those after it of the new ones
    on the whole context."""
    old, path = bench.engine.policy_version, tiny_model_dir(tmp_path, seed=77)

    async def switch() -> None:
        for sent in bench.buckets(checkpoint(path), old + 1):
            await bench.engine.load_bucket(sent)
        await bench.engine.finish_sync(old + 1)

    models = {v: AutoModelForCausalLM.from_pretrained(p) for v, p in
              ((old, bench.directory), (old + 1, path))}  # fmt: skip
    for prompt, reply in zip(PROMPTS, interrupted(bench, PROMPTS, LONG, switch), strict=True):
        assert spans_of(reply) == [old, old + 1]
        for span in reply.versions:
            bench.oracle = models[span.version]
            expected = bench.expected(prompt, reply.token_ids, LONG)[span.start : span.end]
            got = torch.tensor(reply.logprobs[span.start : span.end])
            torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)
    # nothing that was cached under the old weights answers a later request
    (later,) = bench.generate(PROMPTS[:1], [LONG])
    bench.oracle = models[old + 1]
    expected = bench.expected(PROMPTS[0], later.token_ids, LONG)
    torch.testing.assert_close(torch.tensor(later.logprobs), expected, atol=1e-3, rtol=0)
    bench.oracle = models[old]


def test_sleep_and_sync_in_a_pause(bench: Bench) -> None:
    """The order of a step that shares its GPU: pause, sleep, weights awake, sync, cache awake,
    resume."""
    whole, version = bench.generate(PROMPTS, [LONG] * 3), bench.engine.policy_version

    async def step() -> None:
        await bench.engine.sleep("weights", "cache")
        with pytest.raises(RuntimeError, match="resuming needs weights and cache"):
            await bench.engine.resume()
        await bench.engine.wake("weights")
        for sent in bench.buckets(checkpoint(bench.directory), version + 1):
            await bench.engine.load_bucket(sent)
        await bench.engine.finish_sync(version + 1)
        await bench.engine.wake("cache")

    replies = interrupted(bench, PROMPTS, LONG, step)
    alike(replies, whole)
    assert [spans_of(reply) for reply in replies] == [[version, version + 1]] * 3


def test_requests_of_a_pause_wait_for_its_end(bench: Bench) -> None:
    """They carry the new version alone."""
    weights, version = checkpoint(bench.directory), bench.engine.policy_version

    async def scenario() -> Completion:
        await bench.engine.pause()
        task = asyncio.create_task(bench.engine.generate(PROMPTS[0], replace(LONG, max_tokens=8)))
        for sent in bench.buckets(weights, version + 1):
            await bench.engine.load_bucket(sent)
        await bench.engine.finish_sync(version + 1)
        assert not task.done()
        await bench.engine.resume()
        return await task

    assert bench.run(scenario()).versions == (VersionSpan(0, 8, version + 1),)


def test_a_request_given_up_in_a_pause_leaves_nothing_behind(bench: Bench) -> None:
    async def give_up() -> None:
        tasks = [asyncio.create_task(bench.engine.generate(p, LONG)) for p in PROMPTS]
        await sampled(bench.engine, 3)
        await bench.engine.pause()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        await bench.engine.resume()

    bench.run(give_up())
    if isinstance(bench.engine, VLLMEngine):
        assert not bench.engine._llm.output_processor.request_states
    else:
        assert not bench.engine._waiting
    bench.run(bench.engine.sleep("cache"))  # waits until nothing runs
    bench.run(bench.engine.wake("cache"))
    test_a_pause_changes_no_greedy_answer(bench, 1)


def test_stop_texts_are_found_across_the_seam(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it falls, also into the stop text."""
    decode = AutoTokenizer.from_pretrained(bench.directory).decode
    free = Sampling(60, seed=5, ignore_eos=True, temperature=0.0)
    (whole,) = bench.generate(PROMPTS[:1], [free])
    texts = [decode(whole.token_ids[:n], skip_special_tokens=True) for n in range(61)]
    stop = texts[-1][20:28]
    until = next(n for n in range(61) if stop in texts[n])
    (expected,) = bench.generate(PROMPTS[:1], [replace(free, stop=(stop,))])
    assert expected.token_ids == whole.token_ids[:until]

    sample = bench.engine._sample

    async def seam_after(tokens: int) -> Completion:
        """As if a pause had fallen there."""
        first = await bench.engine.generate(PROMPTS[0], replace(free, max_tokens=tokens))
        parts = [replace(first, finish_reason=FinishReason.INTERRUPTED)]

        async def given(request: EngineRequest) -> Completion:
            monkeypatch.setattr(bench.engine, "_interrupting", bool(parts))
            return parts.pop() if parts else await sample(request)

        monkeypatch.setattr(bench.engine, "_sample", given)
        reply = await bench.engine.generate(PROMPTS[0], replace(free, stop=("never", stop)))
        monkeypatch.undo()
        return reply

    for tokens in range(until - 6, until):
        alike([bench.run(seam_after(tokens))], [expected])


def test_weights_do_not_change_below_a_running_request(bench: Bench) -> None:
    version = bench.engine.policy_version

    async def scenario() -> Completion:
        task = asyncio.create_task(bench.engine.generate(PROMPTS[0], LONG))
        await sampled(bench.engine, 1)
        with pytest.raises(RuntimeError, match="while 1 requests run: pause the engine first"):
            await bench.engine.load_bucket(bench.buckets(checkpoint(bench.directory), 1)[0])
        with pytest.raises(RuntimeError, match="pause the engine first"):
            await bench.engine.finish_sync(version + 1)
        return await task

    assert spans_of(bench.run(scenario())) == [version]


@pytest.mark.parametrize(("backend", "keep"), [("hf", False), ("vllm", False), ("vllm", True)])
def test_close_ends_what_a_pause_holds(backend: str, keep: bool, tmp_path: Path) -> None:
    async def scenario() -> list[BaseException | Completion]:
        spec = replace(spec_of(tmp_path), keep_cache_on_pause=keep)
        engine = await started(backend, spec)
        tasks = [asyncio.create_task(engine.generate(p, LONG)) for p in PROMPTS]
        await sampled(engine, 3)
        await engine.pause()
        tasks.append(asyncio.create_task(engine.generate(PROMPTS[0], LONG)))
        await engine.close()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    errors = asyncio.run(scenario())
    assert len(errors) == 4 and all(isinstance(error, UserError) for error in errors)
    assert all("out of use: it was closed" in str(error) for error in errors)


def test_vllm_that_dies_in_a_pause_says_so(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())

    async def scenario() -> list[BaseException | Completion]:
        engine = await started("vllm", spec_of(tmp_path))
        tasks = [asyncio.create_task(engine.generate(p, LONG)) for p in PROMPTS]
        await sampled(engine, 3)
        await engine.pause()
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        await engine.close()
        return errors

    errors = asyncio.run(scenario())
    assert all("a process of vLLM died" in str(error) for error in errors)


def test_keeping_the_cache(tmp_path: Path) -> None:
    """The same answer under the same weights; after a sync the labels come from vLLM, and later
    requests are answered by the new weights alone although prefixes are cached."""
    with asyncio.Runner() as runner:
        options = {"enable_prefix_caching": True, "keep_cache_on_pause": True}
        bench = open_bench("vllm", tmp_path, runner, **options)
        try:
            whole = bench.generate(PROMPTS, [LONG] * 3)
            alike(interrupted(bench, PROMPTS, LONG), whole)
            other = tiny_model_dir(tmp_path / "other", seed=77)

            async def switch() -> None:
                with pytest.raises(RuntimeError, match="would lose the keys and values"):
                    await bench.engine.sleep("cache")
                for sent in bench.buckets(checkpoint(other), 1):
                    await bench.engine.load_bucket(sent)
                await bench.engine.finish_sync(1)

            for reply in interrupted(bench, PROMPTS, LONG, switch):
                assert spans_of(reply) == [0, 1]
            bench.oracle = AutoModelForCausalLM.from_pretrained(other)
            for prompt, reply in zip(PROMPTS, bench.generate(PROMPTS, [LONG] * 3), strict=True):
                assert spans_of(reply) == [1]
                expected = bench.expected(prompt, reply.token_ids, LONG)
                torch.testing.assert_close(
                    torch.tensor(reply.logprobs), expected, atol=1e-3, rtol=0
                )
        finally:
            runner.run(bench.engine.close())


@pytest.mark.parametrize(
    ("backend", "options"),
    [("hf", {}), ("vllm", {"adapter_rank": 4}), ("vllm", {"sleep_level": 1})],
)
def test_who_cannot_keep_the_cache_says_so(backend: str, options, tmp_path: Path) -> None:
    spec = rollout_spec(tmp_path, keep_cache_on_pause=True, **options)
    with pytest.raises(UserError, match=r"(?s)--partial_rollout_cache keep.*refill"):
        asyncio.run(start_engine(backend, spec))
