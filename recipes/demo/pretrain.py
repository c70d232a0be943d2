"""Makes the demo's base model from nothing: `python recipes/demo/pretrain.py OUT`.

A byte-level BPE tokenizer and a small Llama, both from the texts of corpus.py. It runs on one
thread, so that the same seed gives the same weights on any number of cores.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Chat, Document, Text, documents, echo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from words import Draw

CONTEXT = 256
VOCABULARY = 1024
ROWS_PER_STEP = 8
STEPS = 1050
PEAK_LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 60

ECHO_STEPS = 300
ECHO_ROWS = 48
ECHO_TOKENS = 32
"""First the model learns to look back and copy, on short rows of nonsense said twice. On the whole
corpus it does not find that out in this time, and at 4e-3 not even on these rows (docs/log.md)."""

SEED = 0
HELD_OUT_SEED = 1_000_000
HELD_OUT_ROWS = 200

PAD, END, SYSTEM, USER, ASSISTANT = "<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    # With a space, so that a word at the start of an answer is the token it is elsewhere.
    "{{ '<|' + message['role'] + '|> ' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, SYSTEM, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for document in islice(documents(seed), 8000) for text in contents(document))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def contents(document: Document) -> list[str]:
    if isinstance(document, Chat):
        return [content for _, content in document.turns]
    return [document.text]


def render(document: Document, tokenizer: PreTrainedTokenizerFast) -> str:
    if isinstance(document, Chat):
        return str(tokenizer.apply_chat_template(document.messages(), tokenize=False))
    return document.text + END


def rows(seed: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """Without end, of CONTEXT tokens each."""
    return filled(documents(seed), tokenizer, CONTEXT)


def echo_rows(seed: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    draw = Draw(f"echo {seed}")
    return filled((Text(echo(draw)) for _ in count()), tokenizer, ECHO_TOKENS)


def filled(
    stream: Iterator[Document], tokenizer: PreTrainedTokenizerFast, length: int
) -> Iterator[list[int]]:
    """Rows that begin with a document, the last one cut."""
    while True:
        row: list[int] = []
        while len(row) < length:
            row += tokenizer.encode(render(next(stream), tokenizer), add_special_tokens=False)
        yield row[:length]


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        # Long wavelengths tell nothing apart in so short a context.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, steps: int, echo_steps: int) -> float:
    """Linear warm-up, level while it learns to copy, then a cosine to nothing."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    progress = max(0, step - echo_steps) / steps
    return PEAK_LEARNING_RATE * warmup * 0.5 * (1 + math.cos(math.pi * progress))


def pretrain(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    steps: int,
    echo_steps: int,
) -> None:
    """`echo_steps` on short rows, then `steps` on the corpus."""
    echoes, texts = echo_rows(seed, tokenizer), rows(seed, tokenizer)
    optimiser = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    model.train()
    for step in range(echo_steps + steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, echo_steps)
        chosen = islice(echoes, ECHO_ROWS) if step < echo_steps else islice(texts, ROWS_PER_STEP)
        loss = token_losses(model, torch.tensor(list(chosen))).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if step % 50 == 0 or step == echo_steps + steps - 1:
            seconds = time.perf_counter() - started
            print(
                f"step {step + 1}/{echo_steps + steps} loss {loss.item():.3f} {seconds:.0f} s",
                flush=True,
            )
    model.eval()


def token_losses(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    losses = [token_losses(model, part) for part in ids.split(ROWS_PER_STEP)]
    return math.exp(torch.cat(losses).mean().item())


def unigram_perplexity(ids: torch.Tensor) -> float:
    """Of the best unigram model there can be: the one with these very tokens' frequencies."""
    counts = ids[:, 1:].flatten().bincount().double()
    shares = counts[counts > 0] / counts.sum()
    return math.exp(-(shares * shares.log()).sum().item())


def held_out(tokenizer: PreTrainedTokenizerFast, seed: int, count: int) -> torch.Tensor:
    return torch.tensor(list(islice(rows(seed, tokenizer), count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--echo-steps", type=int, default=ECHO_STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    tokenizer = train_tokenizer(arguments.seed)
    model = new_model(tokenizer, arguments.seed)
    echo_steps = arguments.echo_steps
    pretrain(model, tokenizer, seed=arguments.seed, steps=arguments.steps, echo_steps=echo_steps)
    ids = held_out(tokenizer, HELD_OUT_SEED, HELD_OUT_ROWS)
    record = {
        "v": 1,
        "command": "python recipes/demo/pretrain.py OUT",
        "seed": arguments.seed,
        "echo_steps": echo_steps,
        "steps": arguments.steps,
        "tokens": echo_steps * ECHO_ROWS * ECHO_TOKENS + arguments.steps * ROWS_PER_STEP * CONTEXT,
        "parameters": model.num_parameters(),
        "held_out": {
            "seed": HELD_OUT_SEED,
            "tokens": ids.numel(),
            "perplexity": round(perplexity(model, ids), 3),
            "unigram_perplexity": round(unigram_perplexity(ids), 3),
        },
        "torch": torch.__version__,
    }
    model.save_pretrained(arguments.out)
    # safetensors writes for the owner's eyes only.
    (arguments.out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(arguments.out, save_jinja_files=False)
    (arguments.out / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
