"""The CPU engine itself: exact log-probs whatever is batched, cached, chunked or paused, and how a completion ends."""

from __future__ import annotations

import threading

import pytest
import torch
from policy_fixture import make_model
from transformers import Lfm2ForCausalLM

from recipe.policy_cpu.__main__ import main, parse_args
from recipe.policy_cpu.engine import Completion, EngineDead
from recipe.policy_cpu.load import load_service
from recipe.policy_cpu.sampling import SamplingParams, processed_logprobs
from recipe.policy_cpu.service import Service
from recipe.ports import bind

TIMEOUT = 300  # of what takes seconds where nobody else computes


@pytest.fixture
def service(model_folder) -> Service:
    service = load_service(parse_args(["--model", str(model_folder), "--max-model-len", "2048"]))
    yield service
    service.engine.close()


@pytest.fixture(scope="module")
def reference(model_folder):
    return Lfm2ForCausalLM.from_pretrained(model_folder).eval()


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(12, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(service: Service, prompt: list[int], max_tokens: int = 30, **params) -> Completion:
    params = {"logprobs": 0, "ignore_eos": True, "seed": 1, **params}
    completion = Completion(service.store.base, prompt, SamplingParams(max_tokens=max_tokens, **params))
    service.engine.submit(completion)
    return completion


def assert_exact(reference, completion: Completion, temperature: float = 1.0) -> None:
    """The sampled log-probs are those of one plain forward over the whole sequence."""
    completion.done.result(TIMEOUT)
    ids, start = completion.prompt + completion.tokens, len(completion.prompt)
    with torch.no_grad():
        logprobs = (reference(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)
    got = [ranked[token][0] for token, ranked in zip(completion.tokens, completion.ranked, strict=True)]
    assert got == pytest.approx([float(logprobs[start + i - 1, t]) for i, t in enumerate(completion.tokens)], abs=1e-4)


def test_logprobs_are_exact_in_a_batch_with_shared_prefixes(service, reference):
    """Prompts of all lengths round the block of 64 and the chunk of 512, half of them sharing a prefix."""
    shared = random_ids(1100, seed=0)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 700, 1100]
    prompts = [shared[:n] for n in lengths] + [shared[:n] + random_ids(5, n) for n in lengths]
    completions = [ask(service, p, 40, seed=i, temperature=0.8) for i, p in enumerate(prompts)]
    for completion in completions:
        assert_exact(reference, completion, temperature=0.8)
    assert sum(c.cached for c in completions) > 3000


def test_a_conversation_continues_from_its_own_output(service, reference):
    first = ask(service, random_ids(150, seed=4), 100)
    first.done.result(TIMEOUT)
    second = ask(service, first.prompt + first.tokens + random_ids(20, seed=5))
    assert_exact(reference, second)
    assert second.cached == 192  # 150 + 100 tokens, of which the last was never computed: three blocks of 64


def test_without_a_cache_and_when_it_overflows(model_folder, reference):
    for megabytes, blocks in ((0, 0), (1, None)):
        service = load_service(parse_args(["--model", str(model_folder), "--max-model-len", "2048",
                                           "--prefix-cache-mb", str(megabytes)]))
        for seed in range(8):
            assert_exact(reference, ask(service, random_ids(900, seed), 5))
        cache = service.engine.cache
        assert cache.bytes <= cache.max_bytes and (blocks is None or len(cache) == blocks)
        assert_exact(reference, ask(service, random_ids(900, 7), 5))
        service.engine.close()


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("sampled", [5, 62, 500])
def test_pause_keep_freezes_between_two_tokens_and_new_weights_follow(service, reference, tmp_path, clear, sampled):
    """As vLLM does: anew by the new weights, or with clear_cache=false on what the old ones computed."""
    engine, paused, reached = service.engine, [], threading.Event()
    completion = Completion(service.store.base, random_ids(130, 1),
                            SamplingParams(max_tokens=sampled + 85, logprobs=0, ignore_eos=True, seed=2))

    def on_token() -> None:
        if len(completion.tokens) == sampled:
            paused.append(engine.pause("keep", clear_cache=clear))
            reached.set()

    completion.on_token = on_token
    others = [ask(service, random_ids(n, seed=n), 150 + sampled) for n in (700, 1, 64)]  # most of them are under way
    engine.submit(completion)
    assert reached.wait(TIMEOUT)
    paused[0].result(TIMEOUT)
    counts = {c: len(c.tokens) for c in (completion, *others)}
    assert len(completion.tokens) == sampled and not completion.done.done()
    other = Lfm2ForCausalLM.from_pretrained(make_model(tmp_path, seed=1)).eval()
    for function in (service.store.start_update,
                     lambda: service.store.update_from_file(str(tmp_path / "model.safetensors")),
                     service.store.finish_update):
        engine.call(function).result(TIMEOUT)
    assert len(completion.tokens) == sampled
    engine.resume().result(TIMEOUT)
    completion.done.result(TIMEOUT)
    assert len(completion.tokens) == sampled + 85
    for one, count in counts.items():
        one.done.result(TIMEOUT)
        before = Completion(one.policy, one.prompt, one.params, tokens=one.tokens[:count], ranked=one.ranked[:count])
        after = Completion(one.policy, one.prompt + before.tokens, one.params, tokens=one.tokens[count:],
                           ranked=one.ranked[count:])
        for part in (before, after):
            part.done.set_result(None)
        assert_exact(reference, before)
        if clear:
            assert_exact(other, after)
        elif one is completion:
            with pytest.raises(AssertionError):
                assert_exact(other, after)
    # Not cleared, its keys and values are of both weights: none of its blocks may serve a request under the new ones.
    again = ask(service, completion.prompt + completion.tokens)
    assert_exact(other, again)
    assert (again.cached > 0) == clear


def test_pause_wait_lets_running_completions_finish(service):
    """The running one ends before the pause is done; one that came later waits for the resume."""
    reached = threading.Event()
    first = Completion(service.store.base, random_ids(20, 1), SamplingParams(max_tokens=50, ignore_eos=True))
    first.on_token = reached.set
    service.engine.submit(first)
    assert reached.wait(TIMEOUT)
    done = service.engine.pause("wait", clear_cache=True)
    later = ask(service, random_ids(20, 2), 2)
    done.result(TIMEOUT)
    assert first.done.done() and len(first.tokens) == 50 and not later.done.done()
    service.engine.resume().result(TIMEOUT)
    later.done.result(TIMEOUT)


def test_pause_abort_ends_everything_and_abort_ends_one(service):
    service.engine.pause("keep", clear_cache=False).result(TIMEOUT)
    one, two = ask(service, random_ids(20, 1)), ask(service, random_ids(20, 2))
    service.engine.abort(one).result(TIMEOUT)
    assert one.finish_reason == "abort" and one.done.done() and two.finish_reason is None
    service.engine.pause("abort", clear_cache=True).result(TIMEOUT)
    assert two.finish_reason == "abort" and two.tokens == []


def test_eos_ends_without_a_stop_reason_and_other_eos_ids_with_their_id(service):
    tokens = _tokens(service)
    eos = tokens[4]
    service.engine.eos_id = eos
    stopped = ask(service, random_ids(50, 3), temperature=0, ignore_eos=False)
    stopped.done.result(TIMEOUT)
    assert stopped.tokens == tokens[: tokens.index(eos) + 1]  # the eos token is part of the tokens
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    assert service.text.output(stopped, True) == service.text.decode(stopped.tokens[:-1], True)
    assert len(_tokens(service)) == 30, "ignore_eos goes on"
    service.engine.eos_id, service.engine.extra_stop_ids = None, frozenset({eos})
    stopped = ask(service, random_ids(50, 3), temperature=0, ignore_eos=False)
    stopped.done.result(TIMEOUT)
    assert (stopped.tokens[-1], stopped.stop_reason) == (eos, eos)


def _tokens(service: Service) -> list[int]:
    completion = ask(service, random_ids(50, 3), temperature=0)
    completion.done.result(TIMEOUT)
    return completion.tokens


def test_generation_config_gives_the_other_eos_ids(service):
    assert service.engine.eos_id == 7 and service.engine.extra_stop_ids == {2}


def test_a_failed_step_reaches_every_client(service, capsys):
    fails, go = threading.Event(), threading.Event()

    def broken(*_):
        fails.set()
        go.wait(TIMEOUT)
        raise MemoryError("no room for keys")

    service.engine.runner.forward = broken
    completions = [ask(service, random_ids(20, 1))]
    assert fails.wait(TIMEOUT)
    completions.append(ask(service, random_ids(20, 2)))  # the engine fails before it looks for new ones
    go.set()
    for completion in completions:
        with pytest.raises(EngineDead, match="no room for keys"):
            completion.done.result(TIMEOUT)
    with pytest.raises(EngineDead):
        ask(service, random_ids(20, 1))
    assert "no room for keys" in capsys.readouterr().err


@pytest.mark.parametrize("params, kept", [
    ({"top_k": 2}, [0, 1]), ({"top_p": 0.6}, [0, 1]), ({"top_p": 0.4}, [0]), ({"min_p": 0.5}, [0, 1]),
    ({"temperature": 2.0}, [0, 1, 2, 3])], ids=str)
def test_processed_logprobs_are_of_the_truncated_distribution(params, kept):
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    got = processed_logprobs(probs.log(), SamplingParams(max_tokens=1, **params)).exp()
    wanted = torch.zeros(4)
    wanted[kept] = probs[kept] ** (1 / params.get("temperature", 1.0))
    assert torch.allclose(got, wanted / wanted.sum(), atol=1e-6)


def test_sampling_follows_the_distribution(service):
    """2,000 first tokens of one prompt: the most probable ones come as often as their log-prob says."""
    prompt = random_ids(30, 9)
    completions = [ask(service, prompt, 1, seed=i, logprobs=3) for i in range(2000)]
    for completion in completions:
        completion.done.result(TIMEOUT)
    best = {t: lp for c in completions for t, (lp, rank) in c.ranked[0].items() if rank == 1}
    (token, logprob), = best.items()
    share = sum(c.tokens[0] == token for c in completions) / len(completions)
    assert share == pytest.approx(torch.tensor(logprob).exp().item(), abs=0.04)


@pytest.mark.parametrize("arguments, code, said", [
    (["--max-parameters", "1000"], 64, "takes at most"), (["--max-model-len", "100000"], 64, "MAX_MODEL_LEN"),
    (["--model", "/no/such/model"], 64, "cannot read the model")])
def test_models_it_refuses(model_folder, capsys, arguments, code, said):
    assert main(["--model", str(model_folder), "--port", "0", *arguments]) == code
    assert said in capsys.readouterr().err


def test_busy_port_is_named(model_folder, capsys):
    with bind(0, "POLICY_PORT") as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--model", str(model_folder), "--port", port]) == 69
    assert port in capsys.readouterr().err
