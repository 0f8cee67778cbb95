"""Measures the tiny model without OpenCode: the same prompts and sampling, commands run on the task's file, graded.

    python -m tiny.offline                          # pass@1 on the held-out local tasks
    python -m tiny.offline --learn 30 --lr 2e-3     # then GRPO steps with LoRA on the training tasks, and pass@1 again

It exists to tune the warm start and the local preset in minutes. The measure of the recipe is run_job.sh --local.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipe.config import Settings
from recipe.local_tasks import ANSWER_FILE, INPUT_DIR, LocalTask, generate
from recipe.rewards import reward_of
from tiny.transcripts import bash_call, request

CALL = re.compile(r"<\|tool_call_start\|>\[bash\(command='([^']*)'\)\]<\|tool_call_end\|>$")
PROGRAMS = {"cut", "grep", "head", "sort", "tail", "wc"}
# Only what the transcripts' language can say is run: these programs, on the task's file, into a file of /workdir.
SAFE = re.compile(r"[\w .,|+/-]+( > /workdir/\w+\.txt)?")
Turn = tuple[list[int], list[int]]  # token ids of prompt and completion


@dataclass
class Episode:
    task: LocalTask
    turns: list[Turn] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    answer: str = ""
    garbled: bool = False  # a turn was neither a well-formed call nor plain text that ended
    done: bool = False

    @property
    def correct(self) -> bool:
        return self.answer.strip() == self.task.answer

    def outcome(self) -> str:
        if self.correct:
            return "correct"
        if self.garbled or not self.commands:
            return "garbled" if self.garbled else "no call"
        last = self.commands[-1]
        if not last.endswith(f" > {ANSWER_FILE}"):
            return "wrong file"
        return "wrong command"


def run_command(command: str, folder: Path) -> str:
    """Output of a command of the transcripts' language in `folder`; an error text for any other."""
    words = {part.split()[0] for part in command.split("|") if part.strip()}
    if not SAFE.fullmatch(command) or not words <= PROGRAMS:
        return "bash: command not found\n"
    moved = command.replace(INPUT_DIR, str(folder / "input")).replace("/workdir", str(folder / "work"))
    done = subprocess.run(["bash", "-c", moved], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=folder,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=20)
    return done.stdout[:2000].replace(str(folder), "") or "(no output)"


@torch.no_grad()
def sample(model: PreTrainedModel, prompts: list[list[int]], eos: int, max_tokens: int) -> list[list[int]]:
    """One completion per prompt at temperature 1 from the whole vocabulary, in one batch padded on the left."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out: list[list[int]] = [[] for _ in prompts]
    cache = None
    for _ in range(max_tokens):
        step = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = step.past_key_values
        ids = torch.multinomial(step.logits[:, -1].float().softmax(-1), 1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        for row, token in zip(out, ids[:, 0].tolist(), strict=True):
            if not row or row[-1] != eos:
                row.append(token)
        if all(row[-1] == eos for row in out):
            break
    return out


def run_episodes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: list[LocalTask], *,
                 max_calls: int = 6, max_tokens: int = 256, training: bool = True) -> list[Episode]:
    """One episode per task, side by side. Uses torch's global generator."""
    model.eval()
    with tempfile.TemporaryDirectory(prefix="offline-") as root:
        episodes = [Episode(task) for task in tasks]
        messages = [request(task.instruction, training=training)[0] for task in tasks]
        tools = request("", training=training)[1]
        for index, task in enumerate(tasks):
            for name in ("input", "work"):
                (Path(root) / str(index) / name).mkdir(parents=True)
            (Path(root) / str(index) / "input" / task.file_name).write_text(task.csv)
        for _ in range(max_calls):
            live = [i for i, episode in enumerate(episodes) if not episode.done]
            if not live:
                break
            prompts = [tokenizer.apply_chat_template(messages[i], tools=tools, add_generation_prompt=True)["input_ids"]
                       for i in live]
            for i, prompt, ids in zip(live, prompts, sample(model, prompts, tokenizer.eos_token_id, max_tokens),
                                      strict=True):
                episode, text = episodes[i], tokenizer.decode(ids[:-1])
                episode.turns.append((prompt, ids))
                call = CALL.fullmatch(text)
                if call is None:
                    episode.done, episode.garbled = True, "tool_call" in text or ids[-1] != tokenizer.eos_token_id
                    continue
                episode.commands.append(call[1])
                messages[i] += [bash_call(call[1]),
                                {"role": "tool", "content": run_command(call[1], Path(root) / str(i))}]
        for i, episode in enumerate(episodes):
            path = Path(root) / str(i) / "work" / Path(ANSWER_FILE).name
            episode.answer = path.read_text() if path.is_file() else ""
    return episodes


def report(name: str, episodes: list[Episode]) -> float:
    """Prints and returns pass@1."""
    rate = sum(e.correct for e in episodes) / len(episodes)
    kinds = Counter(e.task.kind.name for e in episodes)
    right = Counter(e.task.kind.name for e in episodes if e.correct)
    print(f"{name}: pass@1 {rate:.3f} of {len(episodes)}; {dict(Counter(e.outcome() for e in episodes))}; "
          f"calls {sum(len(e.turns) for e in episodes) / len(episodes):.2f}; "
          + " ".join(f"{kind} {right[kind] / n:.2f}" for kind, n in sorted(kinds.items())), flush=True)
    return rate


def policy_loss(model: PreTrainedModel, episodes: list[Episode], advantages: list[float]) -> torch.Tensor:
    """-sum(advantage * log-prob) over all sampled tokens, divided by their number."""
    total, count = torch.zeros(()), 0
    for episode, advantage in zip(episodes, advantages, strict=True):
        for prompt, ids in episode.turns:
            logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False,
                           logits_to_keep=len(ids) + 1).logits[0, :-1].float()
            total = total - advantage * logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)].sum()
            count += len(ids)
    return total / count


def learn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings, steps: int,
          tasks: list[LocalTask]) -> None:
    """GRPO: each step one task, one group of rollouts, one AdamW update."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.learning_rate,
                                  weight_decay=0.0)
    order, curve = random.Random(settings.seed).choices(tasks, k=steps), []
    for step, task in enumerate(order, 1):
        group = run_episodes(model, tokenizer, [task] * settings.num_generations, max_calls=settings.max_model_calls)
        rewards = torch.tensor([reward_of(float(e.correct), len(e.commands), settings.efficiency_bonus,
                                          settings.max_model_calls) for e in group])
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)
        curve.append(rewards.mean().item())
        if rewards.std() > 0:
            policy_loss(model, group, advantages.tolist()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 5 == 0:
            print(f"  step {step}: mean reward of the last five groups {sum(curve[-5:]) / 5:.2f}", flush=True)


def main() -> None:
    settings = Settings.load(preset="local")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=settings.model)
    parser.add_argument("--repeat", type=int, default=2, help="episodes per held-out task (default %(default)s)")
    parser.add_argument("--learn", type=int, default=0, metavar="STEPS")
    parser.add_argument("--lr", type=float, default=settings.learning_rate)
    parser.add_argument("--seed", type=int, nargs="+", default=[settings.seed])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for seed in args.seed:
        run = Settings.load({"SEED": str(seed), "LEARNING_RATE": str(args.lr)}, preset="local")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        held_out = generate("test", run.n_tasks, seed) * args.repeat
        start = time.monotonic()
        base = report(f"seed {seed} base", run_episodes(model, tokenizer, held_out, training=False))
        if args.learn:
            lora = LoraConfig(r=run.lora_r, lora_alpha=run.lora_alpha, lora_dropout=run.lora_dropout,
                              target_modules=list(run.lora_targets), exclude_modules=r".*conv\.out_proj")
            model = get_peft_model(model, lora)
            learn(model, tokenizer, run, args.learn, generate("train", run.n_train_tasks, seed))
            trained = report(f"seed {seed} after {args.learn} steps at {args.lr:g}",
                             run_episodes(model, tokenizer, held_out, training=False))
            print(f"seed {seed}: gain {trained - base:+.3f}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
