"""The policy server of machines without a GPU: vLLM's HTTP contract on transformers, small models only.

    python -m recipe.policy_cpu --model tiny/model --port 8001 [--dev-mode | --enable-lora]

A request enters in `app.py` (routes, statuses and shapes of vLLM 0.31), becomes token ids in `chat.py`, waits in
`engine.py` (continuous batching in a thread of its own), runs through `model.py` (one flat batch of tokens) with
what `prefix_cache.py` still knows of its beginning, is sampled in `sampling.py`, and `lfm2_calls.py` reads the
tool calls of its text. `weights.py` holds the weights: the base, updates by file, LoRA adapters merged into copies.
"""
