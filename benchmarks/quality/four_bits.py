"""What 4 bits cost in quality, as each engine of `bench peers --weights int4` really computes: perplexity of the default model,
and the error of logits on it and on a model of random weights.

    error        rms of the difference of logits / rms of logits
    divergence   mean over the positions of KL(float32 || engine), in nats
    perplexity   exp of the mean loss of a next token, on files that the default model was not trained on

The reference is the same checkpoint in float32. Peers run themselves, in their environments (made by `bench peers` or here),
on the very files whose speed is measured; ours runs on torch operators, in float32, so that what the format costs shows alone,
and in bfloat16 as it is served. What the weights of a file are held as is said beside: rows that are no multiple of 256 make
llama.cpp take other types, of more bits, than Q4_K and Q6_K: for the default model's down projections, 640 wide, and nearly all
of M, 576 wide. `wide` has none such. In M and L, 30 and 22 layers of random weights, any error grows from layer to layer up to
1.0 (unrelated logits: 1.4): such models cannot tell formats apart.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backend.models.decoder import Decoder
from backend.models.linears import LinearOptions
from backend.models.loader import DEFAULT_MODEL, load_directory
from benchmarks.peers import commands, environments, models
from benchmarks.peers.engines import GIB, PEERS, EngineSpec
from benchmarks.peers.errors import Skipped
from benchmarks.peers.measure import available_memory
from benchmarks.peers.models import Model
from benchmarks.quality.perplexity import ROW_TOKENS, ROWS_AT_ONCE, Measured, compare, held_out_rows, row_logits
from deploy.errors import UserError
from deploy.progress import SteppedProgress
from tools.make_random_model import make_random_model

RESULTS = Path(__file__).resolve().parents[1] / "results"
RANDOM_ROWS = (2, ROW_TOKENS // 2)
FLOAT_COPIES = 1.8  # of the float32 weights: what the torch tier holds while it loads
WIDE = dict(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=4)
OURS = (("w4a8, float32", "float32"), ("w4a8, bfloat16", "bfloat16"))
console = Console()


class Result(NamedTuple):
    """One engine in one setting on one checkpoint. `held`: what its weights are held as. `rise`: of perplexity, relative."""

    engine: str
    setting: str
    model: str
    held: str
    measured: Measured
    rise: float | None


class Texts:
    """Rows of tokens of one model, and the logits that the float model has for them."""

    def __init__(self, model: Model, rows: Tensor, is_text: bool) -> None:
        """rows [rows, length]."""
        self.model, self.rows, self._is_text = model, rows, is_text
        self._expected = self._by_torch(LinearOptions(), "float32")
        self.perplexity = self._compare(self._expected).perplexity

    def ours(self) -> list[Result]:
        found = []
        for name, dtype in OURS:
            measured = self._compare(self._by_torch(LinearOptions(quantization="w4a8"), dtype))
            found.append(self._result("everbatch", name, "4.3 bits, output head int8", measured))
        return found

    def peer(self, engine: EngineSpec, setting: str, progress: SteppedProgress) -> Result:
        """Raises Skipped."""
        python = environments.python_of(engine, progress)
        converter = environments.python_of(PEERS[engine.converter], progress) if engine.converter else python
        form = models.form_for(engine, converter, self.model, "int4", setting, progress)
        with tempfile.TemporaryDirectory() as scratch:
            rows, logits = Path(scratch) / "rows.npy", Path(scratch) / "logits.npy"
            np.save(rows, self.rows.numpy())
            module, own = ("openvino", setting) if engine.name == "openvino" else ("llamacpp", engine.name)
            words = [str(form), str(rows), str(logits), str(torch.get_num_threads()), own]
            title = f"{self.model.name}: {engine.name} ({setting})"
            try:
                said = commands.run([str(python), "-m", f"benchmarks.peers.{module}_logits", *words], progress, title)
            except commands.CommandFailed as failure:
                raise Skipped(f"{engine.name} ({setting}) on {self.model.name}: {failure}") from None
            measured = self._compare(torch.from_numpy(np.load(logits)).split(ROWS_AT_ONCE))
        return self._result(engine.name, setting, said[-1], measured)

    def _by_torch(self, linears: LinearOptions, dtype: str) -> list[Tensor]:
        model: Decoder = load_directory(self.model.directory, None, dtype, torch.device("cpu"), linears)
        return [row_logits(model, part).float() for part in self.rows.split(ROWS_AT_ONCE)]

    def _compare(self, logits: Sequence[Tensor]) -> Measured:
        return compare(self._expected, logits, self.rows, self._is_text)

    def _result(self, engine: str, setting: str, held: str, measured: Measured) -> Result:
        rise = measured.perplexity / self.perplexity - 1 if self.perplexity else None
        return Result(engine, setting, self.model.name, held, measured, rise)


def wide() -> Model:
    """A small model of random weights whose rows are all multiples of 256, made by seed if it is not there yet."""
    directory = environments.BENCH / "models" / "wide"
    if not directory.exists():
        make_random_model(directory, vocab_size=4096, tokenizer_from=DEFAULT_MODEL, **WIDE)
    return models.of_directory(directory)


def random_rows(model: Model) -> Tensor:
    return torch.randint(model.vocab_size, RANDOM_ROWS, generator=torch.Generator().manual_seed(1))


def memory_needed(model: Model) -> int:
    """Bytes that the float model takes while it is loaded."""
    return int(FLOAT_COPIES * 2 * model.resident_bytes("bf16"))


def measure(texts: Texts, peers: Sequence[EngineSpec], progress: SteppedProgress) -> list[Result]:
    """Ours and every peer in every setting; one that cannot be measured is told and left out."""
    progress.step(f"{texts.model.name}: everbatch")
    results = texts.ours()
    for engine in peers:
        for setting in engine.settings["int4"]:
            try:
                results.append(texts.peer(engine, setting, progress))
            except Skipped as reason:
                progress.step(f"skipped: {reason}")
    return results


def table_of(results: Sequence[Result], perplexity: float) -> Table:
    """A line for each engine and setting."""
    names = list(dict.fromkeys(result.model for result in results))
    found = Table(title=f"quality of 4 bits (reference: float32, perplexity {perplexity:.4f})")
    for heading in ("engine", "setting", "perplexity", "rise"):
        found.add_column(heading, justify="left" if heading in ("engine", "setting") else "right")
    for name in names:
        found.add_column(f"{name}: error, KL", justify="right")
    found.add_column(f"held as, on {' / '.join(names)}")
    cases = dict.fromkeys((result.engine, result.setting) for result in results)
    for case in cases:
        of = {result.model: result for result in results if (result.engine, result.setting) == case}
        text = next((result for result in of.values() if result.rise is not None), None)
        measured = [
            f"{of[name].measured.error:.4f}, {of[name].measured.divergence:.1e}" if name in of else "-"
            for name in names
        ]
        held = " / ".join(dict.fromkeys(of[name].held for name in names if name in of))
        shown = (f"{text.measured.perplexity:.4f}", f"{100 * text.rise:+.2f} %") if text else ("", "")
        found.add_row(*case, *shown, *measured, held, style="bold" if case[0] == "everbatch" else "")
    return found


def run(tokens: int, shapes: str, peers: str) -> None:
    """Measure every engine; print a table and write the figures. `shapes` and `peers` are lists with commas."""
    progress = SteppedProgress()
    engines = [PEERS[name] for name in peers.split(",") if name in PEERS and PEERS[name].settings.get("int4")]
    results, perplexity = [], 0.0
    try:
        checkpoints = [models.of_directory(DEFAULT_MODEL), wide()]
        checkpoints += [models.of_shape(shape, progress) for shape in shapes.split(",") if shape]
        for model in checkpoints:
            if memory_needed(model) > available_memory():
                progress.step(f"{model.name} is left out: it needs {memory_needed(model) / GIB:.1f} GiB of free memory")
                continue
            is_text = model.directory == DEFAULT_MODEL
            progress.step(f"{model.name}: float32")
            texts = Texts(model, held_out_rows(tokens) if is_text else random_rows(model), is_text)
            perplexity = texts.perplexity or perplexity
            results += measure(texts, engines, progress)
    except UserError as error:
        console.print(f"[red]bench quality --bits 4: {error}[/red]", soft_wrap=True)
        raise typer.Exit(error.exit_code) from None
    console.print(table_of(results, perplexity))
    rows = [result._asdict() | {"measured": result.measured._asdict()} for result in results]
    document = {"held_out_tokens": tokens, "perplexity": perplexity, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quality_int4.json").write_text(json.dumps(document, indent=1) + "\n")
    console.print("written: benchmarks/results/quality_int4.json")
