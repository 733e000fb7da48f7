"""Train the demo model: a 5.8 M parameter Llama whose linears all have multiples of 128 inputs and outputs.

The data is one JSONL file (plain or .xz) of {"title", "text"} lines, one line a book or speech. Whole books are held
out by their title, so neither the order of the lines nor a seed moves a book from one split to another (`split_of`):

    training    90 %  the tokenizer and the model see these
    recovery     5 %  never trained on; text/calibration.txt and text/training.txt are cut from these
    evaluation   5 %  never trained on; bits per byte is measured on all of them, text/evaluation.txt is cut from these

    python train_model.py books.jsonl.xz --text text                      # the excerpts, some seconds
    python train_model.py books.jsonl.xz --model model --seconds 300      # the model, one GPU

The optimizer is Muon for the decoder's matrices and AdamW for the embedding and the norms. The learning rate rises over
the first 200 steps, stays, and falls linearly to zero over the last 60 % of the steps. Without --steps their number
follows from --seconds and the speed measured on the first steps, and is printed: give it as --steps to repeat a run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 1024
VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"  # before each book; its id is 0
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
}

MUON_LR = 4e-3  # in AdamW's units: each update is scaled to the root mean square that AdamW's would have
ADAMW_LR = 2e-3
WEIGHT_DECAY = 0.1  # decoder matrices only
WARMUP_STEPS = 200
DECAY_FRACTION = 0.6
TIMED_STEPS = range(20, 70)  # after compilation and the first allocations, and within the warm-up
TOKENIZER_BYTES = 30_000_000  # of the training books, from each the same share
EXCERPT_BYTES = {"calibration": 250_000, "training": 900_000, "evaluation": 250_000}


class Book(NamedTuple):
    title: str  # "Author/Title", or "1865-Lincoln.txt" for a speech
    text: str


def read_books(path: Path) -> list[Book]:
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Book(row["title"].strip(), row["text"].strip()) for row in rows]


def split_of(title: str) -> str:
    """Two of twenty buckets of the title's SHA-256 are held out; 0 and 12 mix novels, essays and speeches."""
    bucket = int(hashlib.sha256(title.encode()).hexdigest(), 16) % 20
    return {0: "evaluation", 12: "recovery"}.get(bucket, "training")


def num_bytes(text: str) -> int:
    return len(text.encode())


def opening(book: Book, budget: int) -> list[str]:
    """The book's first paragraphs, as many as fit in `budget` bytes."""
    kept: list[str] = []
    for paragraph in book.text.split("\n\n"):
        budget -= num_bytes(paragraph) + 2
        if budget < 0:
            break
        kept.append(paragraph)
    return kept


def equal_share(books: list[Book], total: int) -> int:
    """The bytes per book that give `total` bytes when shorter books give all they have."""
    sizes = sorted(num_bytes(book.text) for book in books)
    for i, size in enumerate(sizes):
        share = total // (len(sizes) - i)
        if size >= share:
            return share
        total -= size
    raise ValueError(f"the held-out books are {total} bytes short of the excerpts asked for; use more books")


def write_excerpts(books: list[Book], folder: Path) -> None:
    """Write the opening of every held-out book; of a recovery book's opening, calibration gets the first part."""
    held_out = {split: [b for b in books if split_of(b.title) == split] for split in ("recovery", "evaluation")}
    texts: dict[str, list[str]] = {name: [] for name in EXCERPT_BYTES}
    budget = equal_share(held_out["evaluation"], EXCERPT_BYTES["evaluation"])
    for book in held_out["evaluation"]:
        texts["evaluation"] += opening(book, budget)

    recovery_bytes = EXCERPT_BYTES["calibration"] + EXCERPT_BYTES["training"]
    budget = equal_share(held_out["recovery"], recovery_bytes)
    for book in held_out["recovery"]:
        both = opening(book, budget)
        size = sum(num_bytes(paragraph) + 2 for paragraph in both)
        first = opening(book, size * EXCERPT_BYTES["calibration"] // recovery_bytes)
        texts["calibration"] += first
        texts["training"] += both[len(first) :]

    folder.mkdir(parents=True, exist_ok=True)
    for name, paragraphs in texts.items():
        num_written = (folder / f"{name}.txt").write_bytes("\n\n".join(paragraphs).encode() + b"\n")
        print(f"text  {name}.txt  {num_written} bytes")
    (folder / "README.md").write_text(excerpts_readme(held_out), encoding="utf-8")


def excerpts_readme(held_out: dict[str, list[Book]]) -> str:
    def line(title: str) -> str:
        author, _, name = title.partition("/")
        return f"- {author}: *{name}*" if name else f"- US presidential address: {title.removesuffix('.txt')}"

    recovery, evaluation = (
        "\n".join(line(title) for title in sorted({book.title for book in held_out[split]}))
        for split in ("recovery", "evaluation")
    )

    return f"""# Text for the demo recipe

The opening paragraphs of books and speeches, cut by `../train_model.py DATA --text text`. The demo model was trained
on none of these books. The three files share no paragraph, and the evaluation books are in neither of the other two.

All are in the public domain in the United States: their copyright there has expired, or they are works of the federal
government. They were taken from a paragraph-deduplicated collection of 325 such texts.

## calibration.txt (first part of each excerpt) and training.txt (the rest of it)

{recovery}

## evaluation.txt

{evaluation}
"""


def train_tokenizer(books: list[Book]) -> Tokenizer:
    """Byte-level BPE, as GPT-2's: any text round-trips, there is no unknown token."""
    share = min(1.0, TOKENIZER_BYTES / sum(num_bytes(book.text) for book in books))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((book.text[: int(share * len(book.text))] for book in books), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, books: list[Book]) -> Tensor:
    end = tokenizer.token_to_id(END_OF_TEXT)
    return torch.cat([torch.tensor([end, *e.ids]) for e in tokenizer.encode_batch([book.text for book in books])])


def token_losses(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Negative log likelihoods in nats of ids[:, 1:], flattened; zero where the id is -100."""
    hidden = model.model(ids[:, :-1].clamp_min(0), use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100, reduction="none")


def bits_per_byte(model: LlamaForCausalLM, ids: Tensor, num_text_bytes: int, batch: int) -> float:
    """Over windows of CONTEXT tokens without overlap: each token is predicted once, the first of a window from one."""
    num_windows = math.ceil((len(ids) - 1) / CONTEXT)
    ids = pad(ids, (0, num_windows * CONTEXT + 1 - len(ids)), value=-100)
    windows = ids.unfold(0, CONTEXT + 1, CONTEXT)  # (windows, CONTEXT + 1), the last id of one is the first of the next
    with torch.inference_mode():
        nats = sum(token_losses(model, part).double().sum().item() for part in windows.split(batch))
    return nats / math.log(2) / num_text_bytes


def training_windows(ids: Tensor, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Epochs of (batch, CONTEXT + 1) tensors: windows without overlap, from a random start, in random order."""
    if len(ids) < (batch + 1) * CONTEXT:
        raise ValueError(f"{len(ids)} training tokens are less than a batch of {batch} x {CONTEXT}; lower --batch")
    while True:
        start = torch.randint(CONTEXT, (1,), generator=generator).item()
        windows = ids[start:].unfold(0, CONTEXT + 1, CONTEXT)
        order = torch.randperm(len(windows), generator=generator).to(ids.device)
        yield from (windows[part] for part in order.split(batch) if len(part) == batch)


def learning_rate_factor(step: int, num_steps: int | None) -> float:
    """Of the peak, for steps counted from 1. Until the number of steps is known this is the warm-up."""
    warmup = min(1.0, step / WARMUP_STEPS)
    return warmup if num_steps is None else min(warmup, (num_steps + 1 - step) / (DECAY_FRACTION * num_steps))


def train(model: LlamaForCausalLM, ids: Tensor, args: argparse.Namespace) -> None:
    decoder = [p for p in model.model.layers.parameters() if p.ndim == 2]
    other = [p for p in model.parameters() if all(p is not q for q in decoder)]
    optimizers = [
        torch.optim.Muon(decoder, lr=MUON_LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=ids.is_cuda),
    ]
    losses_of = token_losses if args.eager else torch.compile(token_losses)
    num_steps, started = args.steps, time.monotonic()
    batches = training_windows(ids, args.batch, torch.Generator().manual_seed(args.seed))
    for step, ids_batch in enumerate(batches, start=1):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * learning_rate_factor(step, num_steps)
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            loss = losses_of(model, ids_batch).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        if step == TIMED_STEPS.start:
            loss.item()  # wait for the GPU, which runs behind
            timed_from = time.monotonic()
        elif step == TIMED_STEPS.stop and num_steps is None:
            loss.item()
            step_seconds = (time.monotonic() - timed_from) / len(TIMED_STEPS)
            num_steps = step + max(1, int((args.seconds - (time.monotonic() - started)) / step_seconds))
            print(f"train  {step_seconds * 1e3:.1f} ms a step, {num_steps} steps fit in {args.seconds} s", flush=True)
        if num_steps and (step % 100 == 0 or step == num_steps):
            epoch = step * args.batch * CONTEXT / len(ids)
            loss_now, seconds = loss.item(), time.monotonic() - started
            line = f"step {step}/{num_steps}  epoch {epoch:.2f}  nats {loss_now:.4f}  {seconds:.0f} s"
            print(f"train  {line}  eta {seconds / step * (num_steps - step):.0f} s", flush=True)
        if step == num_steps:
            return


def make_model(books: list[Book], args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = [book for book in books if split_of(book.title) == "training"]
    evaluation = [book for book in books if split_of(book.title) == "evaluation"]
    PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(training),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(args.model)
    settings = args.model / "tokenizer_config.json"  # name the class as transformers 4 knows it too
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    tokenizer = AutoTokenizer.from_pretrained(args.model).backend_tokenizer  # the files as others will read them
    ids = encode(tokenizer, training).to(device)
    evaluation_ids = encode(tokenizer, evaluation).to(device)
    print(f"data  {len(training)} books to train on, {len(ids)} tokens; {len(evaluation)} held out", flush=True)

    end = tokenizer.token_to_id(END_OF_TEXT)
    config = LlamaConfig(**SHAPE, vocab_size=VOCAB_SIZE, tie_word_embeddings=True, bos_token_id=end, eos_token_id=end)
    model = LlamaForCausalLM(config).to(device)
    train(model, ids, args)
    model.bfloat16().save_pretrained(args.model)

    # measured on the file, as a user will load it: this includes what rounding the weights to bfloat16 costs
    written = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    evaluation_bytes = sum(num_bytes(book.text) for book in evaluation)
    result = bits_per_byte(written, evaluation_ids, evaluation_bytes, args.batch)
    nats = result * math.log(2) * evaluation_bytes / len(evaluation_ids)
    print(f"held out  {evaluation_bytes} bytes  nats {nats:.4f}  bits per byte {result:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help='JSONL or JSONL.xz of {"title", "text"} lines')
    parser.add_argument("--model", type=Path, help="folder to write the trained model to")
    parser.add_argument("--text", type=Path, help="folder to write the excerpts of held-out books to")
    parser.add_argument("--seconds", type=float, default=300, help="time to train for, on the clock (default 300)")
    parser.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument("--batch", type=int, default=128, help=f"windows of {CONTEXT} tokens a step (default 128)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile the model: for a short try on a CPU")
    args = parser.parse_args()
    if not args.model and not args.text:
        parser.error("nothing to write: give --model, --text or both")
    books = read_books(args.data)
    if args.text:
        write_excerpts(books, args.text)
    if args.model:
        make_model(books, args)


if __name__ == "__main__":
    main()
