"""Does it fit: what policy server and trainer need of their GPUs, before anything is started.

    python3 -m recipe.gpu_memory       prints the plan; exit code 64 says what does not fit and which setting to change

An ATTENTION that does not run here ends it likewise: the trainer would say so when the servers are up.

Trainer, in bytes (P: parameters of the base, A: of the adapter, T: tokens of the longest row, L layers of width H whose
MLP has width M):
    weights      P · 2 or 4 (DTYPE; 4 with LORA=0)
    adapter      A · 16: fp32 weights, gradients, AdamW's two moments; with LORA=0 the last three of the whole model
    sync buffer  as the weights: the merged policy in one piece (recipe/flat_weights.py); on the engine's GPU too
                 where that is another one
    activations  T · 2 · (L·H + 13·M): inputs of all layers, kept by gradient checkpointing, and one layer at work.
                 Fitted on an H200 to LFM2.5-2.6B's shape in bf16 with packed rows of 48k, 96k and 160k tokens, which
                 took 23, 41 and 65 GiB in all; the formula gives 23.4, 41.4 and 65.4. Rows that are short enough for
                 what is free then are computed without checkpointing: T · 2 · L · (3·M + 9·H), fitted to 53.4 GiB in
                 all for a row of 17,203 tokens with compiled layers.
    reserve      4 GiB: CUDA context, cuBLAS and kernel workspaces, fragmentation
Engine: its share of the card, in which vLLM places weights, graphs and cache by itself; the cache must hold one rollout
of MAX_MODEL_LEN tokens, or nothing runs at all.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass

from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_UNAVAILABLE, EXIT_USAGE, Parser, missing_package

GIB = 2**30
RESERVE = 4 * GIB
ENGINE_WORK = 6 * GIB  # CUDA graphs, compile and profiling peaks beside weights and cache: 5.6 GiB seen on an H200
SYNC_ROOM = 2 * GIB  # NCCL's buffers and whatever runs outside vLLM's count


@dataclass(frozen=True)
class Shape:
    """What the formulas need of a model."""

    parameters: int
    adapter: int
    layers: int
    hidden: int
    intermediate: int
    attention_layers: int
    kv_width: int  # key and value heads times their size


@dataclass(frozen=True)
class Plan:
    """Bytes of one GPU, by what takes them."""

    gpu: str
    total: int
    parts: dict[str, int]

    @property
    def free(self) -> int:
        return self.total - sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in self.parts.items())
        return f"{self.gpu}: {parts}; {self.free / GIB:.1f} of {self.total / GIB:.1f} GiB free"


def longest_row(settings: Settings) -> int:
    """Tokens of the longest row: a packed one, or a single sequence as long as the engine lets it be."""
    return max(settings.token_budget, settings.max_model_len)


def plans(settings: Settings, shape: Shape, total: int) -> list[Plan]:
    """One plan a GPU. Raises SettingsError with one sentence per thing that does not fit on cards of `total` bytes."""
    width = 4 if settings.dtype == "float32" else 2
    weights = shape.parameters * width  # in the engine
    held = 4 if not settings.lora else width  # LORA=0 trains fp32 weights, and their residual stream is fp32 too
    trained = shape.parameters * held
    optimizer = shape.adapter * 16 if settings.lora else 3 * trained
    trainer = {"trainer's weights": trained, "adapter and optimizer": optimizer, "sync buffer": trained,
               "activations": longest_row(settings) * (held * shape.layers * shape.hidden
                                                       + width * 13 * shape.intermediate),
               "trainer's reserve": RESERVE}
    share = int(total * settings.engine_memory_share)
    cache = share - weights - ENGINE_WORK
    per_token = 2 * shape.attention_layers * shape.kv_width * width
    engine = {"policy server": share}
    if settings.gpus == 1:
        made = [Plan("GPU of both", total, engine | trainer)]
    else:
        made = [Plan("GPU of the policy server", total, engine | {"sync buffer": trained, "NCCL": SYNC_ROOM}),
                Plan("GPU of the trainer", total, trainer)]
    errors = []
    if cache < settings.max_model_len * per_token:
        needs = (weights + ENGINE_WORK + settings.max_model_len * per_token) / total
        errors.append(f"The policy server's {share / GIB:.1f} GiB leave {max(cache, 0) / GIB:.1f} GiB for its cache, "
                      f"and one rollout of MAX_MODEL_LEN={settings.max_model_len} tokens takes "
                      f"{settings.max_model_len * per_token / GIB:.1f}: raise GPU_MEMORY_UTILIZATION to "
                      f"{needs + 0.01:.2f} or lower MAX_MODEL_LEN.")
    for plan in made:
        if plan.free < 0:
            errors.append(f"{plan.gpu} lacks {-plan.free / GIB:.1f} GiB ({plan}): " + remedy(settings, plan, trainer))
    if errors:
        raise SettingsError("\n".join(errors))
    return made


def kept_tokens(settings: Settings, shape: Shape, total: int) -> int:
    """Tokens of the longest row that is computed without gradient checkpointing on cards of `total` bytes."""
    if settings.gradient_checkpointing != "auto":
        return 0 if settings.gradient_checkpointing == "on" else sys.maxsize
    plan = plans(settings, shape, total)[-1]
    width = 4 if settings.dtype == "float32" or not settings.lora else 2
    a_token = width * shape.layers * (3 * shape.intermediate + 9 * shape.hidden)
    if settings.compile == "off":
        a_token *= 1.6  # what each operation reads is kept, not what each kernel does
    return int(0.9 * (plan.free + plan.parts["activations"]) / a_token)


def remedy(settings: Settings, plan: Plan, trainer: dict[str, int]) -> str:
    rows = "TOKEN_BUDGET" if settings.token_budget > settings.max_model_len else "MAX_MODEL_LEN"
    lower = f"lower {rows}={longest_row(settings)}, the tokens of the longest row"
    if settings.gpus == 1:
        left = (plan.total - sum(trainer.values())) / plan.total
        return f"lower GPU_MEMORY_UTILIZATION to {left:.2f}, {lower}, or set GPUS=2." if left > 0.1 else (
            f"{lower}, or set GPUS=2.")
    return f"{lower}." if plan.parts.keys() & {"activations"} else "lower GPU_MEMORY_UTILIZATION."


def shape_of(settings: Settings) -> Shape:
    """The model's shape, from its config alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from recipe import lfm2

    config = lfm2.load_config(settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    adapter = lfm2.plan_adapter(config, lfm2.lora_config(settings)).parameters if settings.lora else 0
    # LFM2's config may ask for a width that the model then rounds
    wide = [m.out_features for name, m in model.named_modules() if name.endswith((".w1", ".up_proj"))]
    return Shape(sum(p.numel() for p in model.parameters()), adapter, config.num_hidden_layers, config.hidden_size,
                 max(wide, default=config.intermediate_size), kinds.count("full_attention"),
                 config.num_key_value_heads * head)


def cards() -> list[int]:
    """Memory of each GPU that nvidia-smi shows, in bytes."""
    if not shutil.which("nvidia-smi"):
        return []
    done = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True)
    return [int(line) * 2**20 for line in done.stdout.split()] if done.returncode == 0 else []


def main(argv: list[str] | None = None) -> int:
    Parser(__doc__).parse_args(argv)
    try:
        settings = Settings.load()
        if settings.attention != "auto":
            from recipe import attention

            attention.choose(settings.attention, settings.dtype)
        found = cards()
        if settings.engine != "vllm" or not found:
            print("no vLLM on a GPU here: nothing to check")
            return 0
        if len(found) < settings.gpus:
            raise SettingsError(f"GPUS={settings.gpus}, but this machine has one GPU: set GPUS=1, with which policy "
                                "server and trainer share it, or start the job with flavor h200x2.")
        shape = shape_of(settings)
        for plan in plans(settings, shape, min(found)):
            print(plan)
        print(f"rows of up to {kept_tokens(settings, shape, min(found)):,} tokens are trained without gradient "
              "checkpointing")
    except SettingsError as err:
        print(f"Nothing was started:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as err:
        print(missing_package(err), file=sys.stderr)
        return EXIT_UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
