"""Weights of the served policies: the base, its updates by file, and LoRA adapters as merged copies.

An adapter is served as W + scaling·B·A in copies of the modules it changes. For a model of this size that is the
exact result at no cost per token, and the base tensors are never touched, so base answers stay the base's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

LORA_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class WeightError(ValueError):
    """Weights do not fit the served model; the message names the tensor or the setting."""


class AdapterNotFound(WeightError):
    """There is no PEFT adapter at the path."""


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer, with the projections that read the same input fused: one product instead of three.

    norm, ffn_norm: (hidden,). w13: (2 · intermediate, hidden). w2: (hidden, intermediate). out: (hidden, …).
    Attention: qkv ((heads + 2 · kv heads) · head dim, hidden), qk_norm (heads + kv heads, head dim).
    Convolution: in_proj (3 · hidden, hidden), kernel (hidden, taps), and biases where the config has them.
    """

    norm: Tensor
    ffn_norm: Tensor
    w13: Tensor
    w2: Tensor
    out: Tensor
    qkv: Tensor | None = None
    qk_norm: Tensor | None = None
    in_proj: Tensor | None = None
    in_proj_bias: Tensor | None = None
    kernel: Tensor | None = None
    conv_bias: Tensor | None = None
    out_bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """Everything a forward pass needs. key: names policy and version; the root of its prefix cache blocks."""

    layers: list[LayerWeights]
    embed: Tensor
    final_norm: Tensor
    lm_head: Tensor
    key: bytes

    @classmethod
    def build(cls, config, tensors: Mapping[str, Tensor], key: bytes) -> ModelWeights:
        """From tensors named as in `Lfm2ForCausalLM.named_parameters()`."""
        layers = []
        for index, kind in enumerate(config.layer_types):
            here = f"model.layers.{index}."

            def get(name: str, here: str = here) -> Tensor | None:
                return tensors.get(here + name)

            w13 = torch.cat([get("feed_forward.w1.weight"), get("feed_forward.w3.weight")])
            shared = {"norm": get("operator_norm.weight"), "ffn_norm": get("ffn_norm.weight"), "w13": w13,
                      "w2": get("feed_forward.w2.weight")}
            if kind == "full_attention":
                q_norm, k_norm = get("self_attn.q_layernorm.weight"), get("self_attn.k_layernorm.weight")
                layers.append(LayerWeights(
                    **shared, out=get("self_attn.out_proj.weight"),
                    qkv=torch.cat([get(f"self_attn.{n}_proj.weight") for n in "qkv"]),
                    qk_norm=torch.cat([q_norm.expand(config.num_attention_heads, -1),
                                       k_norm.expand(config.num_key_value_heads, -1)])))
            else:
                layers.append(LayerWeights(
                    **shared, out=get("conv.out_proj.weight"), out_bias=get("conv.out_proj.bias"),
                    in_proj=get("conv.in_proj.weight"), in_proj_bias=get("conv.in_proj.bias"),
                    kernel=get("conv.conv.weight").squeeze(1), conv_bias=get("conv.conv.bias")))
        embed = tensors["model.embed_tokens.weight"]
        return cls(layers, embed, tensors["model.embedding_norm.weight"], tensors.get("lm_head.weight", embed), key)


@dataclass(eq=False)
class Policy:
    """One name that requests can ask for. `weights` is replaced, never changed, when new weights arrive."""

    name: str
    weights: ModelWeights
    path: str = ""
    deltas: dict[str, Tensor] | None = None  # parameter name → scaling·B·A in float32; None for the base


class WeightStore:
    """The base and its adapters. Not thread-safe: the engine calls it between two steps.

    tensors: `dict(model.named_parameters())` of an Lfm2ForCausalLM; the store owns them from here on.
    """

    def __init__(self, config, tensors: dict[str, Tensor], name: str, max_lora_rank: int = 32) -> None:
        self.config, self.tensors, self.max_lora_rank = config, tensors, max_lora_rank
        self.version = self._loads = 0
        self._staged: dict[str, Tensor] | None = None
        self.base = Policy(name, ModelWeights.build(config, tensors, b"base:0"))
        self.adapters: dict[str, Policy] = {}

    # -- new base weights, in vLLM's three phases -----------------------------------------------------------------
    def start_update(self) -> None:
        if self._staged is not None:
            raise WeightError("start_weight_update called while a weight update is already active. "
                              "Call finish_weight_update first.")
        self._staged = {}

    def update_from_file(self, path: str) -> int:
        """Reads a safetensors file of parameters, all of them or some; returns how many.

        The file is checked whole before a tensor is taken, and nothing is served before `finish_update`.
        """
        if self._staged is None:
            raise WeightError("update_weights called before start_weight_update.")
        if not Path(path).is_file():
            raise WeightError(f"there is no weight file {path}: the trainer must write it on this machine first.")
        staged = {}
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                known = self.tensors.get("model.embed_tokens.weight" if self._tied(name) else name)
                if known is None:
                    raise WeightError(f"{path} has a tensor {name} that the served model lacks: "
                                      "names must be those of Lfm2ForCausalLM.named_parameters().")
                tensor = file.get_tensor(name)
                if tensor.shape != known.shape:
                    raise WeightError(f"{path}: {name} has shape {tuple(tensor.shape)}, "
                                      f"the served model has {tuple(known.shape)}.")
                if not self._tied(name):
                    staged[name] = tensor.to(known.dtype).clone()  # the trainer may delete or reuse the file
        self._staged |= staged
        return len(staged)

    def finish_update(self) -> None:
        """Serves what arrived, under a new version, to the base and to every adapter on it."""
        if self._staged is None:
            raise WeightError("finish_weight_update called before start_weight_update.")
        self.tensors = self.tensors | self._staged
        self._staged = None
        self.version += 1
        self.base.weights = ModelWeights.build(self.config, self.tensors, b"base:%d" % self.version)
        for policy in self.adapters.values():
            policy.weights = self._merge(policy.deltas, policy.weights.key.rsplit(b":", 1)[0])

    def _tied(self, name: str) -> bool:
        return name == "lm_head.weight" and name not in self.tensors

    # -- adapters -------------------------------------------------------------------------------------------------
    def load_adapter(self, name: str, path: str) -> Policy:
        deltas = read_adapter(path, self.tensors, self.max_lora_rank)
        self._loads += 1
        # The load's number, not its name, is in the key: a name that is loaded again is another policy.
        self.adapters[name] = Policy(name, self._merge(deltas, b"adapter:%d" % self._loads), path, deltas)
        return self.adapters[name]

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def _merge(self, deltas: dict[str, Tensor], key: bytes) -> ModelWeights:
        merged = {n: (self.tensors[n].float() + delta).to(self.tensors[n].dtype) for n, delta in deltas.items()}
        return ModelWeights.build(self.config, self.tensors | merged, b"%s:%d" % (key, self.version))


def read_adapter(path: str, tensors: Mapping[str, Tensor], max_rank: int) -> dict[str, Tensor]:
    """Reads a PEFT LoRA folder into `parameter name → scaling·B·A`.

    Raises AdapterNotFound without adapter_config.json or weights, WeightError for what vLLM does not serve either
    (DoRA, trained biases, modules_to_save, a rank above `max_rank`) and for tensors that fit no parameter.
    """
    folder = Path(path)
    config_file, weight_file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not config_file.is_file() or not weight_file.is_file():
        raise AdapterNotFound(path)
    config = json.loads(config_file.read_text())
    rank = config["r"]
    if rank > max_rank:
        raise WeightError(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}.")
    for field, neutral in (("use_dora", False), ("bias", "none"), ("modules_to_save", None),
                           ("rank_pattern", {}), ("alpha_pattern", {})):
        if config.get(field, neutral) not in (neutral, None):
            raise WeightError(f"{config_file} sets {field}={config[field]!r}, which is not served: only plain LoRA is.")
    scaling = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    pairs: dict[str, dict[str, Tensor]] = {}
    with safe_open(str(weight_file), framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
            match = LORA_KEY.fullmatch(key)
            if match is None or f"{match[1]}.weight" not in tensors:
                raise WeightError(f"{weight_file}: {key} fits no module of the served model.")
            pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = file.get_tensor(key).float()
    deltas = {}
    for name, pair in pairs.items():
        if set(pair) != {"A", "B"} or (pair["B"] @ pair["A"]).shape != tensors[name].shape:
            raise WeightError(f"{weight_file}: lora_A and lora_B of {name} do not make its shape.")
        deltas[name] = scaling * (pair["B"] @ pair["A"])
    return deltas
