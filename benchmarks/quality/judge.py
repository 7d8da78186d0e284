"""What forms of weights and KV cost on any model, as the engine serves it: `./everbatch bench quality --model MODEL`.

The reference is the same model by torch's kernels in float32, which round nothing. All forms read the same rows of a text:

    rise     of perplexity, exp of the mean difference of the losses of a token, with its standard error (paired, by tokens)
    KL       mean of KL(reference || form), in nats, with its standard error
    top      share of the positions at which both have the same most likely token
    weights  memory of the layers' weights and the output head's, and bits for each
    bits     of a weight of the decoder layers alone, scales included
"""

from __future__ import annotations

import json
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backend.api import EngineConfig, OutputConfig, Request
from backend.api.config.kv_bits import KV_TYPES, named
from backend.api.config.quantization import is_chosen
from backend.api.config.schema import KvCacheConfig, LimitsConfig, ModelConfigSection, SchedulerConfig
from backend.engine.core import EngineCore
from backend.models.decoder import Decoder
from backend.text.tokenizer import Tokenizer
from backend.worker.group import InProcessWorkerGroup
from benchmarks.quality.peers import Peer, llamacpp
from benchmarks.quality.plot import plot
from deploy.errors import UserError
from deploy.model_source import resolve_model
from deploy.progress import SteppedProgress

ROW_TOKENS = 512
MOST_BYTES = 1 << 30  # of the logits of a row
FORMS = ",".join(("none", "int8", "w8a8", "w6a8", "w4a8", *(f"kv:{name}" for name in KV_TYPES if name != "auto")))
BUILT_IN = ("statistics.py", "fractions.py", "pydoc.py", "doctest.py", "optparse.py")  # prose in docstrings, and code
console = Console()


class Judged(NamedTuple):
    """A form against the reference. Errors are standard errors."""

    model: str
    form: str
    rise: float
    rise_error: float
    kl: float
    kl_error: float
    top: float
    weights: str
    bits: float


class Served:
    """A model in one form: `kv:NAME` is an entry of KV_TYPES, anything else a model.quantization."""

    def __init__(self, model: Path, form: str, **section: str) -> None:
        kv = form.removeprefix("kv:") if form.startswith("kv:") else ""
        chosen = ModelConfigSection(
            path=str(model),
            device="cpu",
            max_seq_len=ROW_TOKENS + 1,
            gather_context_logits=True,
            quantization="none" if kv else form,
            **section,
        )  # type: ignore[arg-type]
        cache = KvCacheConfig(max_tokens=2 * ROW_TOKENS, **named(kv or "auto"))
        config = EngineConfig(
            chosen,
            cache,
            SchedulerConfig(max_batch_size=1),
            LimitsConfig(max_tensor_bytes=MOST_BYTES, max_live_tensor_bytes=MOST_BYTES),
        )
        self._workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache)
        self._core = EngineCore(config, self._workers)
        model = self._workers._ready.model
        self.weights = str(model.memory).split(" a weight")[0].removeprefix("linear layers ")
        layers = [each for each in model._linears if each is not model.lm_head] if isinstance(model, Decoder) else []
        weights = sum(math.prod(each.shape) for each in layers)
        self.bits = 8 * sum(each.num_bytes for each in layers) / weights if weights else math.nan

    def log_probs(self, rows: Tensor) -> Iterator[Tensor]:
        """rows [rows, length] -> for each of them the logarithms of the probabilities of the next token, [length, vocab]."""
        for number, row in enumerate(rows.tolist(), start=1):
            self._core.begin_poll()
            self._core.enqueue(number, Request(row, 1, output_config=OutputConfig(return_context_logits=True)))
            answered = self._core.take_responses()
            while self._core.has_work:
                answered += self._core.step()
            data = next(each.result.context_logits for each in answered if each.result.context_logits is not None)
            logits = torch.frombuffer(bytearray(data.data), dtype=torch.float32).reshape(data.shape)
            yield logits[: len(row)].log_softmax(1)


def rows_of(model: Path, text: Path | None, tokens: int) -> Tensor:
    """int64 [rows, ROW_TOKENS] of a text, or of Python's library."""
    library = Path(sysconfig.get_path("stdlib"))
    content = (
        "".join((library / name).read_text(encoding="utf-8") for name in BUILT_IN)
        if text is None
        else text.read_text(encoding="utf-8")
    )
    ids = Tokenizer.from_directory(model).encode(content)
    count = min(tokens, len(ids)) // ROW_TOKENS
    if count == 0:
        raise typer.BadParameter(f"the text has {len(ids)} tokens, at least {ROW_TOKENS} are needed")
    return torch.tensor(ids[: len(ids) // ROW_TOKENS * ROW_TOKENS]).view(-1, ROW_TOKENS)[
        torch.arange(count) * (len(ids) // ROW_TOKENS) // count
    ]


def judged(name: str, peer: Peer, rows: Tensor, expected: Sequence[Tensor]) -> Judged:
    """`expected`: the reference's log_probs."""
    losses, divergences, same = [], [], []
    for row, reference, found in zip(rows, expected, peer.log_probs, strict=True):
        wanted = reference
        target = row[1:, None]
        losses.append((wanted[:-1].gather(1, target) - found[:-1].gather(1, target))[:, 0])
        divergences.append((wanted.exp() * (wanted - found)).sum(1))
        same.append((wanted.argmax(1) == found.argmax(1)).float())
    loss, kl = torch.cat(losses).double(), torch.cat(divergences).double()
    mean = loss.mean().item()
    errors = [each.std().item() / math.sqrt(len(each)) for each in (loss, kl)]
    return Judged(
        name,
        peer.form,
        math.expm1(mean),
        math.exp(mean) * errors[0],
        kl.mean().item(),
        errors[1],
        torch.cat(same).mean().item(),
        peer.weights,
        peer.bits,
    )


def run(
    model: str,
    against: str,
    text: Path | None,
    forms: str,
    tokens: int,
    output: Path | None,
    peers: str = "",
    picture: Path | None = None,
) -> None:
    """Measure every form of `model`, and `against` as it is; print a table, write a JSON object, draw a picture."""
    progress = SteppedProgress()
    if unknown := [form for form in forms.split(",") if form not in FORMS.split(",") and not is_chosen(form)]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {FORMS}, nor auto:BITS", param_hint="--formats")
    if peers not in ("", "llamacpp"):
        raise typer.BadParameter(f"{peers!r} is not llamacpp", param_hint="--peers")
    try:
        directory = resolve_model(model)
        other = resolve_model(against) if against else None
    except UserError as error:
        raise typer.BadParameter(str(error)) from None
    rows = rows_of(directory, text, tokens)
    progress.step(f"{directory.name}: reference, {rows.numel():,} tokens")
    reference = list(Served(directory, "none", kernels="torch", dtype="float32").log_probs(rows))
    loss = torch.cat([-each[:-1].gather(1, row[1:, None])[:, 0] for each, row in zip(reference, rows)]).mean()
    found = []
    wanted = [(directory, form) for form in forms.split(",")]
    for path, form in [*wanted, *([(other, "none")] if other else [])]:
        progress.step(f"{path.name}: {form}")
        served = Served(path, form)
        of = Peer(form, served.bits, served.log_probs(rows), served.weights)
        found.append(judged(path.name, of, rows, reference))
    if peers:
        found += [judged(directory.name, peer, rows, reference) for peer in llamacpp(directory, rows, progress)]
    title = f"{directory.name}, {rows.numel():,} tokens, perplexity {math.exp(loss):.3f} in float32"
    console.print(table_of(found, title, bool(against)))
    if output is not None:
        document = {"tokens": rows.numel(), "perplexity": math.exp(loss), "forms": [each._asdict() for each in found]}
        output.write_text(json.dumps(document, indent=1) + "\n")
    if picture is not None:
        plot([each for each in found if not each.form.startswith("kv:") and each.bits < 16], picture, title)


def table_of(found: Sequence[Judged], title: str, has_models: bool) -> Table:
    """A line for each form."""
    table = Table(title=title)
    for heading in (*["model"] * has_models, "form", "rise of perplexity", "KL", "equal top", "bits", "weights"):
        table.add_column(heading, justify="left" if heading in ("model", "form") else "right")
    for each in found:
        rise = f"{100 * each.rise:+.2f} ± {100 * each.rise_error:.2f} %"
        kl = f"{each.kl:.4f} ± {each.kl_error:.4f}"
        figures = rise, kl, f"{100 * each.top:.1f} %", f"{each.bits:.2f}"
        table.add_row(*[each.model] * has_models, each.form, *figures, each.weights)
    return table
