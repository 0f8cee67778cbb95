"""A training step: forward, backward and AdamW of one group of 8 rollouts of about 12k tokens.

    python3 -m bench.train_step                                  each attention backend that runs here
    … --backends varlen --rollouts 8 --tokens 12288 --rows packed,single --isolation on,off --adapter-input cast,plain

The model is LFM2.5-2.6B's shape with random weights in bf16, LoRA r=32 in fp32, gradient checkpointing, TRL's fused LM
head on the trained 40% of the tokens: what recipe/group_trainer.py runs, without rollouts. `packed` is one row for the
group, `single` a row for each rollout (TOKEN_BUDGET=0).

FLOPs are counted here, in multiplications and additions (2 a weight and token):
    forward      2·N·T, N the weights of all linear layers; the LM head for trained tokens; attention 2·2·H·Σ len²/2 a
                 layer (queries by keys, weights by values, causal)
    backward     the same again for the gradients of inputs; attention's is 2.5 times its forward (flash); the base is
                 frozen, so no gradients of its weights; those of the adapter are below 2%
    recomputed   with checkpointing the forward once more; it is work, not progress
`useful` is forward + backward over the measured bf16 rate of the card, `busy` has the recomputation too.

--adapter-input plain hands the adapter its bf16 input as it is. PEFT makes an fp32 copy of it first (`cast`), which
autocast makes bf16 again: the same numbers, and two more passes over every activation that an adapter reads.

At a SIGTERM the cases that were measured are reported, and the exit code is 143.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

from bench.common import card_limits, end_on_sigterm, parser, report, require_gpu, spread
from bench.model import make_model
from recipe.config import Settings
from recipe.exits import EXIT_TERMINATED

TRAINED = 0.4  # share of the tokens that the policy sampled


def load(folder: Path, backend: str, isolated: bool, checkpointing: bool, plain: bool = False, compiled: bool = False
         ) -> Any:
    import torch
    from peft import get_peft_model
    from trl.trainer.utils import add_fused_lm_head, create_model_from_path

    from recipe import attention, lfm2, short_conv, speed

    attention.register()
    model = create_model_from_path(str(folder), dtype=torch.bfloat16, device_map=None,
                                   attn_implementation=attention.NAMES[backend]).cuda()
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    model = get_peft_model(model, lfm2.lora_config(Settings.load({"MODEL": str(folder)})))
    if plain:
        speed.plain_inputs(model)
    if isolated:
        short_conv.isolate(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if compiled:
        speed.compile_layers(model)
    return model.train()


def rows_of(lengths: list[int], packed: bool, vocabulary: int) -> list[dict[str, Any]]:
    """input_ids, position_ids and labels of the group, in one row or in one a rollout."""
    import torch

    made = []
    for group in ([lengths] if packed else [[n] for n in lengths]):
        ids = torch.randint(100, vocabulary, (1, sum(group)), device="cuda")
        positions = torch.cat([torch.arange(n, device="cuda") for n in group])[None]
        # turns: the first 60% of each tenth is prompt or tool result
        trained = positions % 1000 >= 1000 * (1 - TRAINED)
        made.append({"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(~trained, -100)})
    return made


def flops(model: Any, lengths: list[int]) -> tuple[float, float]:
    """(forward, backward) FLOPs of the group; see the module's docstring."""
    import torch

    config = model.config
    linear = sum(m.weight.numel() for name, m in model.named_modules()
                 if isinstance(m, torch.nn.Linear) and "lm_head" not in name and "lora_" not in name)
    tokens = sum(lengths)
    head = 2 * config.vocab_size * config.hidden_size * tokens * TRAINED
    attends = config.layer_types.count("full_attention")
    attention = attends * 2 * config.hidden_size * sum(n * n for n in lengths)
    forward = 2 * linear * tokens + head
    return forward + attention, forward + 2.5 * attention


def measure(model: Any, rows: list[dict[str, Any]], steps: int) -> tuple[list[dict[str, float]], float]:
    """Seconds of forward, backward and optimizer in each step, and the peak memory in GiB."""
    import torch

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    torch.cuda.reset_peak_memory_stats()
    found = []
    for step in range(steps + 1):
        marks = {"forward": 0.0, "backward": 0.0}
        for row in rows:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(**row, fused_lm_head=True, use_cache=False)
                loss = -out.log_probs.float().mean()
            torch.cuda.synchronize()
            middle = time.perf_counter()
            loss.backward()
            torch.cuda.synchronize()
            marks["forward"] += middle - begin
            marks["backward"] += time.perf_counter() - middle
        begin = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        marks["optimizer"] = time.perf_counter() - begin
        if step:  # the first compiles kernels
            found.append(marks)
    return found, torch.cuda.max_memory_allocated() / 2**30


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--backends", default="flash-attn3,varlen,sdpa-packed", help="comma-separated")
    options.add_argument("--rollouts", type=int, default=8)
    options.add_argument("--tokens", type=int, default=12_288, help="of a rollout, on average")
    options.add_argument("--rows", default="packed,single", help="packed, single or both")
    options.add_argument("--isolation", default="on,off", help="on, off or both (off on packed rows only)")
    options.add_argument("--adapter-input", default="cast", help="cast, plain or both")
    options.add_argument("--compile", default="off", help="off, on or both: the decoder layers by torch.compile")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--no-checkpointing", action="store_true", help="also without gradient checkpointing")
    options.add_argument("--profile", type=Path, help="write the kernels of one step, by time, to this file")
    args = options.parse_args(argv)
    require_gpu()
    import torch

    from recipe.attention import unavailable

    end_on_sigterm()
    torch.manual_seed(0)
    make_model(args.model)
    limits = card_limits()
    torch.cuda.empty_cache()
    # unequal, as rollouts are: 0.6 to 1.4 of the mean
    spreaded = torch.linspace(0.6, 1.4, args.rollouts) if args.rollouts > 1 else torch.ones(1)
    lengths = [int(args.tokens * factor) for factor in spreaded.tolist()]
    rows, skipped, code = [], {}, 0
    cases = [(backend, kind, isolation, source, compiled, checkpointing)
             for backend in args.backends.split(",") for kind in args.rows.split(",")
             for isolation in args.isolation.split(",") if kind == "packed" or isolation == "on"
             for source in args.adapter_input.split(",") for compiled in args.compile.split(",")
             for checkpointing in ((True, False) if args.no_checkpointing else (True,))]
    for backend, kind, isolation, source, compiled, checkpointing in cases:
        why = unavailable(backend, "bfloat16")
        if why:
            skipped[backend] = why
            continue
        name = (f"{backend}, {kind}, isolation {isolation}, adapter input {source}, "
                f"compile {compiled}{'' if checkpointing else ', no checkpointing'}")
        try:
            model = load(args.model, backend, isolation == "on", checkpointing, source == "plain", compiled == "on")
            found, peak = measure(model, rows_of(lengths, kind == "packed", model.config.vocab_size), args.steps)
            forward, backward = flops(model, lengths)
            seconds = {part: spread([f[part] for f in found])[0] for part in found[0]}
            both = seconds["forward"] + seconds["backward"]
            rate = limits["bf16_flops"]
            rows.append({"attention": backend, "rows": kind, "isolation": isolation, "adapter input": source,
                         "compile": compiled, "checkpointing": "on" if checkpointing else "off",
                         "step s": round(both + seconds["optimizer"], 3), "forward s": round(seconds["forward"], 3),
                         "backward s": round(seconds["backward"], 3), "optimizer s": round(seconds["optimizer"], 4),
                         "tokens/s": round(sum(lengths) / both), "useful %": round(
                             100 * (forward + backward) / both / rate, 1),
                         "busy %": round(100 * (forward * (2 if checkpointing else 1) + backward) / both / rate, 1),
                         "limit s": round((forward + backward) / rate, 2), "peak GiB": round(peak, 1)})
            print(name, rows[-1], flush=True)
            if args.profile:
                profile(model, rows_of(lengths, kind == "packed", model.config.vocab_size), args.profile, name)
        except SystemExit:  # a time limit: what is measured by now is kept
            skipped[name], code = "ended by a signal, as the cases after it", EXIT_TERMINATED
            break
        except Exception as err:  # noqa: BLE001 - one backend must not hide the others
            skipped[name] = f"{type(err).__name__}: {err}"[:300]
        model = None
        gc.collect()
        torch.cuda.empty_cache()
    if not rows:
        print(f"nothing ran: {skipped}", file=sys.stderr)
        return code or 1
    report("train_step", args, rows, limits=limits, lengths=lengths, not_run=skipped)
    return code


def profile(model: Any, rows: list[dict[str, Any]], path: Path, name: str) -> None:
    """Appends the kernels of one forward and backward, by device time."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for row in rows[:1]:
            with torch.autocast("cuda", torch.bfloat16):
                loss = -model(**row, fused_lm_head=True, use_cache=False).log_probs.float().mean()
            loss.backward()
        torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    with path.open("a") as file:
        file.write(f"## {name}\n{prof.key_averages().table(sort_by='cuda_time_total', row_limit=25)}\n")


if __name__ == "__main__":
    sys.exit(main())
