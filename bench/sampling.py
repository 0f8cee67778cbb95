"""Sampling: tokens a second at 8, 16 and 32 rollouts at once, and what each flag of the recipe does to it.

    python3 -m bench.sampling                                          the recipe's flags
    … --variants recipe,eager,prefix --concurrency 8,16,32             each further variant starts its own server

Every request has a prompt of its own (8,192 tokens of which the first 4,096 are common, as OpenCode's are) and samples
512 tokens. `prefix` sends each conversation twice, the second time longer, as an agent does: that is what caching is
for. Limits: a decoding step reads all weights and the cache of every running request once: bytes over the card's copy
rate (reads and writes together, which is what its memory moves); the prompts take 2 FLOPs a weight and token at
its bf16 rate. `decoding` counts only while all requests decode, a second or less with many prompts: it varies by a
quarter between repetitions (`--concurrency 32,32,32,32`), where tokens/s of the whole varies by a tenth,
and by a sixth between servers.
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.common import Server, card_limits, parser, report, require_gpu, stream_tokens
from bench.model import make_model
from recipe.exits import EXIT_TERMINATED

# serve_policy.sh's own command, and one flag changed at a time
VARIANTS: dict[str, dict[str, str]] = {
    "recipe": {},
    "eager": {"VLLM_FLAGS": "--enforce-eager"},
    "prefix": {"PREFIX_CACHING": "1"},
    "one-gpu-share": {"GPUS": "1"},
    "raw-logprobs": {"VLLM_FLAGS": "--logprobs-mode raw_logprobs"},
    # a prompt in one piece must fit into a step
    "no-chunked-prefill": {"VLLM_FLAGS": "--no-enable-chunked-prefill --max-num-batched-tokens 40960"},
    "no-async": {"VLLM_FLAGS": "--no-async-scheduling"},
}


def prompts(count: int, tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    common = [rng.randrange(100, vocabulary) for _ in range(tokens // 2)]
    return [common + [rng.randrange(100, vocabulary) for _ in range(tokens - len(common))] for _ in range(count)]


def one(server: Server, prompt: list[int], tokens: int) -> tuple[float, list[float]]:
    """(seconds to the first token, arrival of each chunk) of one request."""
    began = time.monotonic()
    times = list(stream_tokens(server.url, server.model, prompt, tokens, logprobs=0, return_token_ids=True))
    return times[0] - began, times


def decoding(arrivals: list[list[float]], tokens: int) -> float | None:
    """Tokens a second while all requests decode: after the last one's first chunk, before the first one's last.

    None where no such time was. `tokens`: of each request; a chunk may hold several.
    """
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    if end <= begin:
        return None
    return sum(tokens / len(times) * sum(begin < at <= end for at in times) for times in arrivals) / (end - begin)


def measure(server: Server, at_once: int, args: Any, vocabulary: int, seed: int) -> dict[str, Any]:
    asked = prompts(at_once, args.prompt, vocabulary, seed)
    with ThreadPoolExecutor(at_once) as pool:
        began = time.monotonic()
        done = list(pool.map(lambda p: one(server, p, args.tokens), asked))
        wall = time.monotonic() - began
        longer = [p + prompts(1, 512, vocabulary, seed + i)[0] for i, p in enumerate(asked)]
        began = time.monotonic()
        again = list(pool.map(lambda p: one(server, p, args.tokens), longer))
        second = time.monotonic() - began
    first = sorted(d[0] for d in done)
    return {"wall": wall, "ttft": first[len(first) // 2], "second_wall": second,
            "decode": decoding([d[1] for d in done], args.tokens),
            "second_ttft": sorted(d[0] for d in again)[len(again) // 2]}


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--variants", default="recipe", help=f"comma-separated: {', '.join(VARIANTS)}")
    options.add_argument("--concurrency", default="8,16,32")
    options.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt")
    options.add_argument("--tokens", type=int, default=512, help="sampled tokens of a request")
    options.add_argument("--port", type=int, default=8402)
    args = options.parse_args(argv)
    require_gpu()
    import torch
    from transformers import AutoConfig

    make_model(args.model)
    limits = card_limits()
    torch.cuda.empty_cache()
    config = AutoConfig.from_pretrained(args.model)
    weights = sum(f.stat().st_size for f in args.model.glob("*.safetensors"))
    head = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.layer_types.count("full_attention") * config.num_key_value_heads * head * 2
    rows, failed, code = [], {}, 0
    for variant in args.variants.split(","):
        try:
            log = Path(f"/tmp/bench-sampling-{variant}.log")
            with Server(args.model, args.port, log, **VARIANTS[variant]) as server:
                measure(server, 2, args, config.vocab_size, 1)  # warm
                for number, at_once in enumerate(map(int, args.concurrency.split(","))):
                    found = measure(server, at_once, args, config.vocab_size, 10 + number)
                    read = weights + at_once * (args.prompt + args.tokens / 2) * per_token
                    step = read / limits["copy_bytes_per_s"]
                    prefill = at_once * args.prompt * weights / limits["bf16_flops"]  # 2 FLOPs, 2 bytes a weight
                    rows.append({"variant": variant, "at once": at_once, "s": round(found["wall"], 2),
                                 "tokens/s": round(at_once * args.tokens / found["wall"]),
                                 "decoding tokens/s": found["decode"] and round(found["decode"]),
                                 "decoding limit tokens/s": round(at_once / step),
                                 "first token s": round(found["ttft"], 2), "prefill limit s": round(prefill, 2),
                                 "second turn s": round(found["second_wall"], 2),
                                 "second turn first token s": round(found["second_ttft"], 2),
                                 "server start s": round(server.start_seconds)})
                    print(rows[-1], flush=True)
        except SystemExit as err:
            if err.code == EXIT_TERMINATED:  # a time limit: what is measured by now is kept
                failed[variant], code = "ended by a signal", EXIT_TERMINATED
                break
            failed[variant] = f"the server did not start ({err.code}), see /tmp/bench-sampling-{variant}.log"
    if not rows:
        print(failed, file=sys.stderr)
        return 1
    report("sampling", args, rows, limits=limits, not_run=failed, weights_bytes=weights, cache_bytes_a_token=per_token)
    return code


if __name__ == "__main__":
    sys.exit(main())
