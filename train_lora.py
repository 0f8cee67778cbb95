"""Trains with asynchronous GRPO on rollouts of the unmodified OpenCode agent: a LoRA adapter, or all weights (LORA=0).

run_job.sh calls this when the policy server and the env server are up. By hand, against servers that run already:

    RUN_DIR=runs/try bash serve_policy.sh --mode train &      # vLLM, or the CPU engine where there is no GPU
    RUN_DIR=runs/try bash serve_env.sh &
    RUN_DIR=runs/try MAX_STEPS=20 python train_lora.py        # or PRESET=local for the tiny model on this machine

Each optimizer step trains one GRPO group: the graded ones of NUM_GENERATIONS rollouts of one task. A group whose
rewards are all equal is a step too, of zero gradient, unless ZERO_CONTRAST says otherwise; one that is too stale or has
no graded rollout never is. When the tasks run out, they come again in the same order. Every knob is an environment
variable (`python3 -m recipe.config table`); nothing is set twice.

Reads   the tasks that the env server serves (split `train`), in the order of $RUN_DIR/tasks/train.json where that
        is; a SEED other than 0 shuffles them
Writes  $RUN_DIR/checkpoints/checkpoint-N   adapter, optimizer and position in the tasks, every SAVE_STEPS steps
        $RUN_DIR/adapter                    the final adapter, as PEFT and vLLM load it
        $RUN_DIR/model                      with LORA=0 instead of it: the final model, in DTYPE
        $RUN_DIR/trained                    MAX_STEPS, when that is whole: run_job.sh goes on with the evaluation
        $RUN_DIR/metrics.jsonl              one JSON object a step; train_summary.json at the end
        $RUN_DIR/rollouts.jsonl             one JSON object a rollout: group, trial, reward, why it is ungraded
        $RUN_DIR/trackio, heartbeat.json    dashboard data (`trackio show`), sign of life for the watchdog

Exit codes: 0 done; 64 wrong settings; 69 a server or the rollout worker is gone, or no rollout can be graded;
143 stopped by SIGTERM after saving a checkpoint. With ADAPTER_REPO every checkpoint is pushed to that repository, and
RESUME=auto, the default, goes on at the newest whole checkpoint of run folder and repository.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

from recipe import checkpoints, disk, hub, resume_command, rollout_log
from recipe.config import Settings, SettingsError
from recipe.exits import EXIT_TERMINATED, EXIT_UNAVAILABLE, EXIT_USAGE, Parser, missing_package
from recipe.hub import CheckpointPusher
from recipe.resume import adopt, all_steps, mark_trained, open_checkpoints

HEALTH_LIMIT = 300.0  # seconds without a tick of the rollout worker's loop


def trainer_arguments(settings: Settings, gpu: bool) -> dict:
    """Keyword arguments of TRL's AsyncGRPOConfig."""
    run = settings.run_path
    return dict(
        output_dir=str(run / "checkpoints"), run_name=run.name, seed=settings.seed, max_steps=settings.max_steps,
        # optimisation: one group a step, a constant rate (a decay would need to know how many rows rollouts fork into)
        learning_rate=settings.learning_rate, lr_scheduler_type="constant",
        per_device_train_batch_size=settings.per_device_batch, gradient_accumulation_steps=1,
        token_budget=settings.token_budget, num_generations=settings.num_generations,
        max_staleness=settings.max_staleness, logging_nan_inf_filter=False,
        # precision: what is trained and its optimizer in fp32, since a bf16 weight takes no step below 0.4% of itself;
        # bf16 is the autocast
        dtype=settings.dtype if settings.lora else "float32", bf16=settings.dtype == "bfloat16", use_cpu=not gpu,
        gradient_checkpointing=gpu and settings.gradient_checkpointing != "off",
        # sampling: what the sampler logged is what the loss recomputes, so nothing is truncated
        temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
        max_completion_length=settings.max_output_tokens, max_tool_calling_iterations=settings.max_model_calls,
        max_inflight_tasks=settings.max_inflight,
        vllm_server_base_url=settings.policy_url, weight_sync_timeout=settings.weight_sync_timeout,
        heartbeat_stale_after_s=HEALTH_LIMIT,
        # saving and reporting
        save_strategy="steps" if settings.save_steps else "no", save_steps=settings.save_steps or 1,
        logging_steps=1, disable_tqdm=True,
        report_to=["trackio"], project=settings.trackio_project, trackio_space_id=settings.trackio_space or None,
    )


def worker_arguments(settings: Settings, sessions, dataset, tokenizer, eos_token_ids: list[int]) -> dict:
    """Keyword arguments of TRL's HarnessRolloutWorker, all of which are pickled to the spawned worker."""
    from recipe.rewards import EfficiencyReward, deepcoder_reward

    reward = (deepcoder_reward if settings.recipe == "deepcoder"
              else EfficiencyReward(settings.efficiency_bonus, settings.max_model_calls))
    return dict(
        harness_session_factory=sessions, rollout_reward_fn=reward,
        lossless_capture=settings.fork_threshold == 0, fork_threshold_tokens=settings.fork_threshold,
        model_name=settings.model, dataset=dataset, reward_funcs=[], processing_class=tokenizer,
        eos_token_ids=eos_token_ids, num_generations=settings.num_generations,
        max_inflight_tasks=settings.max_inflight, max_tool_calling_iterations=settings.max_model_calls,
        vllm_server_url=settings.policy_url, max_tokens=settings.max_output_tokens,
        temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
        rollout_log=settings.run_path / rollout_log.FILE,
        log_completions=settings.print_completions > 0, num_completions_to_print=settings.print_completions or None,
    )


def task_dataset(settings: Settings, sessions):
    """The prompts of the env server's train split; the worker goes through them again and again.

    Their order is that of tasks/train.json in the run folder, the recipe's own; the server sorts them by name.
    """
    from datasets import Dataset

    rows, listing = sessions.prompt_rows(), settings.run_path / "tasks" / "train.json"
    if listing.exists():
        place = {name: i for i, name in enumerate(json.loads(listing.read_text())["tasks"])}
        rows = sorted(rows, key=lambda row: place.get(row["task"], len(place)))
    dataset = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    return dataset.shuffle(seed=settings.seed) if settings.seed else dataset


def save(settings: Settings, model, tokenizer) -> Path:
    """The final adapter or model, as PEFT, transformers and vLLM load it; returns its folder."""
    import torch
    from transformers.utils import cached_file

    final = settings.final_path
    if not settings.lora:
        model.to(getattr(torch, settings.dtype))
    model.save_pretrained(final)
    if not settings.lora:  # vLLM reads keys of LFM2's config that transformers does not write back
        shutil.copyfile(cached_file(settings.model, "config.json", **settings.hub_revision), final / "config.json")
    tokenizer.save_pretrained(final)
    return final


def build(settings: Settings, gpu: bool, tokenizer, dataset, worker_kwargs: dict, pusher: CheckpointPusher | None):
    """The trainer with its worker, weight transfer and callbacks."""
    import torch
    from transformers import PrinterCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from recipe import attention, canary, gpu_memory, lfm2, rollout_worker, short_conv, speed, trl_cpu
    from recipe.callbacks import AtStep, HeartbeatCallback, MetricsCallback, StopCallback, StopRequested
    from recipe.checkpoint_callback import CheckpointCallback
    from recipe.group_trainer import GroupGRPOTrainer
    from recipe.isolation_check import IsolationCallback
    from recipe.policy_client import PolicyClient
    from recipe.weight_sync import transfer_of

    run = settings.run_path
    config = lfm2.load_config(settings)
    lora = lfm2.lora_config(settings) if settings.lora else None
    print(lfm2.plan_adapter(config, lora) if lora else "all weights are trained", flush=True)
    backend, why = attention.choose(settings.attention, settings.dtype)
    print(why, flush=True)
    print("adjustments to this machine:", ", ".join(trl_cpu.install(backend, gpu)) or "none", flush=True)
    rollout_worker.check_shape()

    heartbeat = HeartbeatCallback(run / "heartbeat.json", settings.max_steps)
    heartbeat.beat("train-setup")
    metrics = MetricsCallback(run / "metrics.jsonl", settings.token_budget, settings.ratio_stop, settings.recipe)
    worker = rollout_worker.RolloutWorker(**worker_kwargs)
    stop = StopCallback(worker)

    def while_waiting() -> None:
        if stop.requested:  # saved first: to end the rollouts under way takes seconds that nobody may grant
            trainer.save_between_steps()
            raise StopRequested

    sync_canary = canary.Canary(PolicyClient(settings.policy_url), settings.model, tokenizer(canary.TEXT).input_ids,
                                settings.canary_tolerance or canary.TOLERANCES[settings.dtype], settings.canary_every,
                                settings.prefix_caching)
    kept = sys.maxsize
    if gpu:
        kept = gpu_memory.kept_tokens(settings, gpu_memory.shape_of(settings), torch.cuda.mem_get_info()[1])
    packs = settings.token_budget > 0 or settings.per_device_batch > 1
    checks = [IsolationCallback(getattr(torch, settings.dtype))] if packs or lfm2.is_lfm2(config) else []
    trainer = GroupGRPOTrainer(
        model=settings.model,
        args=AsyncGRPOConfig(model_init_kwargs=settings.hub_revision, **trainer_arguments(settings, gpu)),
        train_dataset=dataset, processing_class=tokenizer, peft_config=lora,
        rollout_worker=worker,
        weight_transfer=transfer_of(settings.policy_url, run / "weights", settings.weight_sync == "stock",
                                    settings.weight_sync_timeout),
        callbacks=[*checks, heartbeat, metrics, stop, CheckpointCallback(run / "checkpoints", settings, pusher)],
        on_skip=heartbeat.on_skip,
        while_waiting=while_waiting, canary=sync_canary, zero_contrast=settings.zero_contrast,
        row_tokens=settings.max_model_len, kept_tokens=kept)
    trainer.remove_callback(PrinterCallback)
    AtStep.install(trainer.callback_handler.callbacks)
    if convolutions := short_conv.isolate(trainer.model):
        print(f"short convolutions that keep packed sequences apart: {convolutions}", flush=True)
    if settings.dtype == "bfloat16":
        speed.plain_inputs(trainer.model)  # every forward of the trainer's model is under its autocast
    why_not = speed.compiler_fails() if settings.compile == "auto" and gpu else None
    if why_not:
        print(f"WARN: layers are not compiled, steps will take longer: {why_not}", flush=True)
    elif settings.compile == "on" or (settings.compile == "auto" and gpu):
        print(f"layers that are compiled: {speed.compile_layers(trainer.model)}", flush=True)
    if gpu:
        print(f"gradient checkpointing: rows of more than {kept:,} tokens", flush=True)
    metrics.trainer = trainer
    return trainer, metrics, stop


def run_to_end(settings: Settings, trainer, metrics, stop, checkpoint: Path | None, pusher: CheckpointPusher | None):
    """Trains to MAX_STEPS or SIGTERM, and returns when all checkpoints are pushed. Raises HubError."""
    from recipe.callbacks import StopRequested, summary_text

    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except StopRequested:
        pass
    except hub.HubError:
        pusher.abandon()
        raise
    except Exception:
        if pusher:  # what was saved last may still be on its way
            try:
                with hub.pushing(settings.run_path, pusher.report()):
                    pusher.finish()
            except hub.HubError as err:
                print(err, file=sys.stderr, flush=True)
        raise
    summary = metrics.summary()
    (settings.run_path / "train_summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(summary_text(summary), flush=True)
    if pusher:
        if stop.requested:
            print(pusher.report(), flush=True)  # whoever sent the signal may not wait
        with hub.pushing(settings.run_path, pusher.report()):
            pusher.finish()


def train(settings: Settings, resume: str, sessions=None) -> int:
    """Trains to MAX_STEPS and saves what was trained; returns the exit code. `sessions` is the source of rollouts."""
    # trackio reads its folder when it is imported, and the trainer's import brings it in
    os.environ.setdefault("TRACKIO_DIR", str(settings.run_path / "trackio"))
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # we know: recipe/trl_shape.py is the answer to it
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import torch

    from recipe import lfm2
    from recipe.harbor_sessions import HarborSessionFactory

    checkpoint, pusher = open_checkpoints(settings, resume)
    if checkpoint and (done := all_steps(checkpoint, settings)):
        adopt(checkpoint, settings.final_path)
        mark_trained(settings)
        print(f"{done}. It is the final {settings.final_path.name}", flush=True)
        return 0
    gpu = torch.cuda.is_available()
    if not gpu:
        # The engine and the agents need the other half; threads that wait for a busy core spin and slow all of them.
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    sessions = sessions or HarborSessionFactory.from_settings(settings, "train")
    tokenizer = lfm2.load_tokenizer(settings)
    dataset = task_dataset(settings, sessions)
    print(f"{len(dataset)} training tasks", flush=True)
    eos = lfm2.eos_token_ids(settings, tokenizer)
    trainer, metrics, stop = build(settings, gpu, tokenizer, dataset,
                                   worker_arguments(settings, sessions, dataset, tokenizer, eos), pusher)
    print(f"resuming from {checkpoint}" if checkpoint else "starting from the base model", flush=True)
    try:
        run_to_end(settings, trainer, metrics, stop, checkpoint, pusher)
        if trainer.state.global_step < settings.max_steps:
            print(f"Stopped at step {trainer.state.global_step} of {settings.max_steps}; checkpoints are in "
                  f"{settings.run_path / 'checkpoints'}. The same command goes on from there.", flush=True)
            return EXIT_TERMINATED
        # a SIGTERM that comes now lets it end, and the job gives it time
        with hub.pushing(settings.run_path, f"The final {settings.final_path.name} was not saved whole. The same "
                         "command trains on after the newest checkpoint, or anew where there is none."):
            final = save(settings, trainer.model, tokenizer)
            mark_trained(settings)
    finally:
        stop.uninstall()
    print(f"{final.name} saved to {final}", flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--resume", choices=("auto", "never"),
                        help="auto: go on at the newest checkpoint; never: start anew (default: RESUME)")
    args = parser.parse_args(argv)
    try:
        settings = Settings.load()
        settings.run_path.mkdir(parents=True, exist_ok=True)
    except SettingsError as err:
        print(f"Settings are wrong, nothing was started:\n{err}", file=sys.stderr)
        return EXIT_USAGE
    try:
        return train(settings, args.resume or settings.resume)
    except (SettingsError, checkpoints.CheckpointError) as err:
        print(err, file=sys.stderr)
        return EXIT_USAGE
    except ModuleNotFoundError as err:
        print(missing_package(err), file=sys.stderr)
        return EXIT_UNAVAILABLE
    except Exception as err:
        if not isinstance(err, hub.HubError):  # its message says all
            traceback.print_exc()
        if disk.is_full(err, settings.run_path):
            print(disk.advice(settings.run_path), file=sys.stderr)
        print(f"\nTraining ended with {type(err).__name__}: {err}\nCheckpoints in {settings.run_path / 'checkpoints'} "
              f"are kept. Resume with:\n  {resume_command.of_this_job()}", file=sys.stderr, flush=True)
        return EXIT_UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
