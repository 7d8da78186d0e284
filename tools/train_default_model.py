#!/usr/bin/env python3
r"""Train the small model of models/default: a Llama that has read the CPython standard library.

The script needs no network and no GPU. It collects the running interpreter's own library, trains a byte-level BPE
tokenizer and a Llama of about 5 million parameters, and exports both in Hugging Face's layout. A run that was
interrupted goes on from its checkpoint when it is started again with the same arguments. The two variables keep glibc
from handing every large tensor back to the kernel after use, which makes training slower.

    MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 nice -n 10 \
        python tools/train_default_model.py --steps 6000 --minutes 64 --out models/default --work .run/train
"""

from __future__ import annotations

import ast
import json
import math
import os
import random
import shutil
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, TURN, TURN_END, PAD = SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
VOCABULARY, CONTEXT = 4096, 2048
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "site-packages", "encodings", "pydoc_data", "lib-dynload", "__pycache__"}
SKIPPED_FILES = {"entities.py"}  # html/entities.py is one large table
# Newlines, indents and single digits stand alone; a word or an operator takes the one space before it.
PIECES = r"[\r\n]+| {2,}|\t+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
# Append-only: each message's rendering depends on that message alone, so a longer chat starts with the shorter one.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPTS = ["def main(", "import os\n", "class Node:\n    def __init__(self"]
SHARES = {"files": 0.76, "snippets": 0.12, "chats": 0.12}  # tokens of the training stream


class Snippet(NamedTuple):
    """One function or class: `kind` is "function" or "class", `source` is dedented."""

    kind: str
    name: str
    summary: str
    source: str


# ---- data


def library_texts() -> list[str]:
    """The sources of the standard library in a fixed order, without its tests, tables and build-specific files."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        skipped = SKIPPED_FOLDERS.intersection(path.relative_to(root).parts) or path.name in SKIPPED_FILES
        if not skipped and not path.name.startswith("_sysconfigdata"):
            texts.append(path.read_text(encoding="utf-8", errors="ignore"))
    return [text for text in texts if len(text) > 200]


def snippets_of(text: str) -> list[Snippet]:
    """The functions and classes of one file that are short enough to be an answer (3 to 60 lines)."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
        if 3 <= len(lines) <= 60:
            summary = (ast.get_docstring(node) or "").split("\n")[0]
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            found.append(Snippet(kind, node.name, summary, textwrap.dedent("\n".join(lines))))
    return found


def conversation(snippets: list[Snippet], first: int, rng: random.Random) -> list[dict[str, str]]:
    """A chat of one or two turns which asks for `snippets[first]` and then for its neighbour in the same file."""
    messages = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": "You are a helpful assistant."})
    for snippet in snippets[first : first + rng.choice([1, 1, 2])]:
        asks = [f"Write the {snippet.kind} {snippet.name}.", f"Write a {snippet.kind} {snippet.name}."]
        if snippet.summary:
            asks += [snippet.summary, f"Write a {snippet.kind}: {snippet.summary}"]
        messages.append({"role": "user", "content": rng.choice(asks)})
        messages.append({"role": "assistant", "content": snippet.source})
    return messages


def chat_text(tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]], asks: bool = False) -> str:
    """The chat as the template writes it; `asks` adds the beginning of the assistant's next turn."""
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks)
    assert isinstance(text, str)
    return text


class Corpus:
    """The token pools that training rows are drawn from; every document ends with <|endoftext|>."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], rng: random.Random) -> None:
        self.rng = rng
        files = self._encode(tokenizer, texts)
        groups = [snippets_of(text) for text in texts]
        chats = [conversation(group, i, rng) for group in groups for i in range(len(group)) for _ in range(2)]
        self.documents = {
            "snippets": self._encode(tokenizer, [snippet.source + "\n" for group in groups for snippet in group]),
            "chats": self._encode(tokenizer, [chat_text(tokenizer, chat) for chat in chats]),
        }
        self.starts = [0]  # where each file begins in `stream`
        for document in files:
            self.starts.append(self.starts[-1] + len(document))
        self.stream = torch.tensor([token for document in files for token in document])  # [tokens], int64

    @staticmethod
    def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
        return [ids + [tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]

    def _row(self, length: int) -> torch.Tensor:
        """One row of `length` tokens: a window of the files, or whole snippets or chats packed one after another."""
        pool = self.rng.choices(list(SHARES), list(SHARES.values()))[0]
        if pool == "files":
            last = len(self.stream) - length
            start = self.rng.choice(self.starts[:-1]) if self.rng.random() < 0.05 else self.rng.randrange(last)
            start = min(start, last)
            return self.stream[start : start + length]
        row: list[int] = []
        while len(row) < length:
            row += self.rng.choice(self.documents[pool])
        return torch.tensor(row[:length])

    def batch(self, tokens: int, progress: float) -> torch.Tensor:
        """Token ids [rows, length] with rows * length = tokens; from 60 % on, half of the batches are longer."""
        length = 512 if progress < 0.6 else self.rng.choice([512, 512, 1024, 2048])
        return torch.stack([self._row(length) for _ in range(max(1, tokens // length))])


# ---- tokenizer, model


def train_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on `texts`, save it in `folder`, and return it as AutoTokenizer loads it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[TURN, TURN_END],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder)
    # transformers 5 writes names that older versions do not know; these are understood by both.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    settings.pop("backend", None)
    path.write_text(json.dumps(settings, indent=2) + "\n")
    return load_tokenizer(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `train_tokenizer` saved in `folder`, as AutoTokenizer loads it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 5.2 million float32 parameters with grouped-query attention and tied embeddings."""
    settings: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(TURN_END)],
    )
    return model


def export(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Write model (bfloat16) and tokenizer files to `folder`, each file atomically."""
    scratch = folder / ".writing"
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    copy.bfloat16().save_pretrained(scratch)
    shutil.copytree(tokenizer_folder, scratch, dirs_exist_ok=True)
    for path in sorted(scratch.iterdir()):
        path.chmod(0o644)
        os.replace(path, folder / path.name)
    scratch.rmdir()


# ---- training

Counters = tuple[int, float, int, float]  # steps, seconds, tokens, running mean of the loss


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Linear warm-up over 100 steps, then a cosine from `peak` down to 3 % of it at progress 1."""
    return peak * min(1.0, (step + 1) / 100) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, ids: torch.Tensor, precision: str) -> float:
    """Mean next-token loss in nats over the held-out files; ids [tokens] is cut into rows of 512."""
    model.eval()
    rows = ids[: len(ids) // 512 * 512].view(-1, 512)
    losses: list[float] = []
    for part in rows.split(8):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            losses += [model(input_ids=part, labels=part).loss.item()] * len(part)
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def samples(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, length: int = 64) -> Iterator[str]:
    """Greedy continuations of `length` tokens at most of the fixed prompts and of one chat."""
    chat = [{"role": "user", "content": "Write the function read_lines."}]
    generator: Any = model  # the annotations of `generate` do not fit the class that has it
    model.eval()
    for prompt in [*PROMPTS, chat_text(tokenizer, chat, asks=True)]:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        text = tokenizer.decode(generator.generate(**inputs, max_new_tokens=length, do_sample=False)[0])
        assert isinstance(text, str)
        yield text
    model.train()


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor, precision: str) -> float:
    """One AdamW step on ids [rows, length]; returns the loss in nats per token."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.item())


def save(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, corpus: Corpus, counters: Counters) -> None:
    """Write what `restore` needs, atomically."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": corpus.rng.getstate()}
    torch.save(state | {"counters": counters}, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def restore(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, corpus: Corpus) -> Counters:
    """Load what `save` wrote and return its counters."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    corpus.rng.setstate(state["rng"])
    step, seconds, tokens, mean = state["counters"]
    return step, seconds, tokens, mean


class Training(NamedTuple):
    """What main() was told."""

    out: Path
    work: Path
    steps: int
    minutes: float
    batch_tokens: int
    lr: float
    every: int
    precision: str


def train(
    args: Training,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    held_out: torch.Tensor,
) -> None:
    """Run to `args.steps` or `args.minutes`, whichever comes first; the schedule follows the nearer end."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    checkpoint = args.work / "checkpoint.pt"
    step, spent, seen, mean = 0, 0.0, 0, math.log(VOCABULARY)  # `spent` in seconds, `seen` in tokens
    if checkpoint.exists():
        step, spent, seen, mean = restore(checkpoint, model, optimizer, corpus)
        print(f"resumed at step {step}")
    begun = time.monotonic() - spent
    while (progress := max(step / args.steps, spent / 60 / args.minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, args.lr)
        ids = corpus.batch(args.batch_tokens, progress)
        loss = train_step(model, optimizer, ids, args.precision)
        mean += (loss - mean) * max(0.02, 1 / (step + 1))  # running mean over about 50 steps
        step, seen, last = step + 1, seen + ids.numel(), spent
        spent = time.monotonic() - begun
        if step % 20 == 0:
            left = spent * (1 - progress) / max(progress, 1e-9) / 60
            print(
                f"step {step} loss {mean:.3f} lr {optimizer.param_groups[0]['lr']:.2e} tokens {seen / 1e6:.2f}M "
                f"{ids.numel() / (spent - last):.0f} tokens/s {spent / 60:.1f} min ETA {left:.1f} min",
                flush=True,
            )
        if step % args.every == 0 or step == min(100, args.every) or step >= args.steps or spent / 60 >= args.minutes:
            print(
                f"step {step} train loss {mean:.4f} validation loss "
                f"{validation_loss(model, held_out, args.precision):.4f}",
                flush=True,
            )
            for text in samples(model, tokenizer):
                print("  | " + text.replace("\n", "\n  | "), flush=True)
            export(model, args.work / "tokenizer", args.out)
            save(checkpoint, model, optimizer, corpus, (step, spent, seen, mean))
    print(f"done: {step} steps, {seen} tokens, {spent / 60:.1f} min, {seen / spent:.0f} tokens/s overall")


def main(
    out: Annotated[Path, typer.Option(help="where the model goes")] = Path("models/default"),
    work: Annotated[Path, typer.Option(help="where checkpoint and tokenizer go")] = Path(".run/train"),
    steps: int = 6000,
    minutes: Annotated[float, typer.Option(help="wall-clock budget of training")] = math.inf,
    batch_tokens: Annotated[int, typer.Option(help="tokens per step")] = 4096,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 2e-3,
    every: Annotated[int, typer.Option(help="steps between validations, exports and checkpoints")] = 250,
    precision: Annotated[Literal["bf16", "fp32"], typer.Option(help="bf16 means autocast")] = "bf16",
    threads: int = 2,
    seed: int = 0,
) -> None:
    """Train the model that comes along, on the files of Python's library."""
    args = Training(out, work, steps, minutes, batch_tokens, lr, every, precision)
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    texts = library_texts()
    rng.shuffle(texts)
    held, held_size = 0, 0
    while held_size < sum(map(len, texts)) / 100:  # 1 % of the characters
        held, held_size = held + 1, held_size + len(texts[held])
    kept = args.work / "tokenizer"
    tokenizer = load_tokenizer(kept) if kept.exists() else train_tokenizer(texts[held:], kept)
    corpus = Corpus(tokenizer, texts[held:], rng)
    held_out = torch.tensor([token for ids in Corpus._encode(tokenizer, texts[:held]) for token in ids])
    model = build_model(tokenizer)
    print(
        f"{len(texts) - held} files, {len(corpus.stream)} tokens; held out {held} files, {len(held_out)} tokens; "
        f"{ {name: sum(map(len, pool)) for name, pool in corpus.documents.items()} } tokens in snippets and chats; "
        f"{model.num_parameters()} parameters, vocabulary {len(tokenizer)}",
        flush=True,
    )
    train(args, model, tokenizer, corpus, held_out)


if __name__ == "__main__":
    typer.run(main)
