"""The tiny model's tokenizer: a byte-level BPE with LFM2.5's special tokens at their ids, and OpenCode's prompt whole.

OpenCode sends the same 26,000 characters with every call. Each ~400-character piece of them is one token of its own
(an added token), so a prompt is about 200 tokens and a rollout is cheap on a CPU. Everything else, and a piece that
another version of OpenCode words differently, goes through the BPE: any text encodes without loss.
"""

from __future__ import annotations

import json
import random
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import lfm2_2_5_v2_chat_template

from recipe.local_tasks import INPUT_DIR, generate
from tiny.transcripts import behaviour, opencode_prompt, request

SPECIAL = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|fim_pre|>", "<|fim_mid|>", "<|fim_suf|>", "<|im_start|>",
           "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
           "<|tool_response_start|>", "<|tool_response_end|>")
BPE_SIZE = 1536  # special tokens, 256 bytes and merges; the pieces of the prompt come on top
PIECE = 400  # characters
# Digits stand alone and words keep their leading space, so that numbers and names can be copied token by token.
WORDS = r" ?-\p{L}|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n|\s+"
# Lines of the system prompt that differ between runs: only what stands between these fragments goes through the BPE.
VARIES = r"(?m)^(?:You are powered by|  \w[^\n:]*: )[^\n]*\n"
FRAGMENTS = ("You are powered by the model named ", ". The exact model ID is intercepted/", "\n  Working directory: ",
             "\n  Workspace root folder: /\n  Is directory a git repo: yes\n  Platform: linux\n  Today's date: ",
             "\nList of tools: [", "system\n", "assistant\n", f"{INPUT_DIR}/", "/workdir/",
             " is a CSV file with a header row. Columns: ", "Write only the value to ", ", then stop.")


def prompt_pieces() -> list[str]:
    """The constant parts of OpenCode's prompt, cut at line and sentence ends into pieces of about PIECE characters."""
    prompt = opencode_prompt()
    texts = re.split(VARIES, prompt["system"])
    texts += [json.dumps(tool, ensure_ascii=False) for tool in prompt["tools"]]  # as the chat template's tojson does
    pieces: dict[str, None] = {}
    for text in texts:
        piece = ""
        for part in re.split(r"(?<=\n)|(?<=\\n)|(?<=\. )|(?<=, )", text):
            if piece and len(piece) + len(part) > PIECE:
                pieces[piece] = None
                piece = ""
            piece += part
        pieces[piece] = None
    # A piece must be ASCII: the byte-level decoder takes other characters for its own byte alphabet.
    return [piece for piece in pieces if len(piece) >= 20 and piece.isascii()]


def corpus(rng: random.Random) -> list[str]:
    """Texts that the merges are learned from: the transcripts' language, and OpenCode's prompt once."""
    texts = [opencode_prompt()["system"], json.dumps(opencode_prompt()["tools"])]
    for task in generate("warm", 3000, rng.randint(0, 2**31)):
        texts += [request(task.instruction)[0][1]["content"], task.csv]
        for message in behaviour(task, rng):
            calls = [call["function"]["arguments"]["command"] for call in message.get("tool_calls", ())]
            texts += [*(f"bash(command='{command}')]" for command in calls), message.get("content", "")]
    return texts


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer, with LFM2.5's chat template and chat end-of-turn token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=BPE_SIZE, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=20)
    backend.train_from_iterator(corpus(random.Random(seed)), trainer)
    pieces = [*prompt_pieces(), *FRAGMENTS]
    backend.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", bos_token="<|startoftext|>", eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False, chat_template=lfm2_2_5_v2_chat_template, model_max_length=32768)
