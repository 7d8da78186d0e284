"""What guessing at tokens wins: `speculation.mode` lookup or draft_model against none, in one process, in turns.

    ./everbatch bench speculation --model DIR --rows 1,8,32           DIR: a checkpoint, best one of random weights
    ./everbatch bench speculation                                     the model that comes along, which is tiny
    ./everbatch bench speculation --model DIR/model --draft-model DIR/draft      DIR: what -m tools.make_draft_pair made

**Lookup.** A model of random weights quotes nobody, so the traces are made: first the model says what it says behind each prompt,
by plain greedy decoding. Then an *earlier version* of that text is written by script. The lookup of each row sees it as if it
stood ahead of the prompt or, with --source others, finds it among the outputs that the namespace has seen. What is measured is
therefore everything but a language model's own habit of quoting: lookup, choice of lengths, verification, bookkeeping. What the
earlier version shares with the text, each kind says:

    edit         runs of 60 tokens on average, between them 1 to 4 tokens that differ: a file with some lines changed
    summary      runs of 12 tokens, between them 1 to 3 others. Prompt lookup alone, without returning to where a match was
                 left, gets 2.5 tokens of a step here; published for summaries by Vicuna are 2.3 - 2.4 (Spec-Bench)
    paraphrase   runs of 12 tokens, between them 4 to 12 others
    chat         nothing: no run of three tokens. What guesses there are come of chance, and this column is their cost

**Draft models.** Two models of random weights never agree, so tools/make_draft_pair.py makes pairs that agree as often as one
likes. Off is the engine as if it had no draft model: prompts do not run through it, either.

All figures are ratios of tokens/s, on : off, medians over rounds in which both run the same requests; above 1 is faster.
`accepted`: drafts that were right, of those tried. `per step`: tokens that a row gets from a step. The texts of on and off are
compared, token by token.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from backend.api import EngineConfig, OutputConfig, Request, SamplingConfig
from backend.api.config.schema import KvCacheConfig, ModelConfigSection, SchedulerConfig, SpeculationConfig
from backend.api.processes.setup import calm_garbage_collector
from backend.core.sequence import Sequence
from backend.engine.core import EngineCore
from backend.scheduler.drafting import Drafter
from backend.scheduler.lookup import Lookup
from backend.scheduler.model_drafting import ModelDrafter
from backend.worker.group import InProcessWorkerGroup
from backend.worker.model_runner import ModelRunner
from benchmarks.harness import results

RESULTS = Path(__file__).parent / "results"
DEFAULT_MODEL = Path(__file__).parents[1] / "models" / "default"
PROMPT_TOKENS = 64
NAMESPACE = "bench"
# Mean length of a run, tokens that differ.
KINDS = {"edit": (60, (1, 4)), "summary": (12, (1, 3)), "paraphrase": (12, (4, 12)), "chat": (0, (1, 1))}
DRAFT_MODEL = "draft model"
console = Console()


class Source(StrEnum):
    PROMPT = "prompt"
    OTHERS = "others"


@dataclass
class Figures:
    kind: str
    rows: int
    sampled: bool
    speed_ups: list[float]  # of the rounds
    plain_tokens_per_s: float
    accepted: float
    per_step: float
    is_equal: bool


def earlier_version(text: list[int], kind: str, rng: random.Random, vocab: int) -> list[int]:
    """A text that shares runs of tokens with `text`, as the kind has it."""
    mean, (least, most) = KINDS[kind]
    if not mean:
        return [rng.randrange(vocab) for _ in text]
    version: list[int] = []
    at = 0
    while at < len(text):
        run = max(3, round(rng.expovariate(1 / mean)))
        version += text[at : at + run]
        version += [rng.randrange(vocab) for _ in range(rng.randint(least, most))]
        at += run + rng.randint(least, most)
    return version


class Quoting(Lookup):
    """Of a sequence whose prompt begins with `earlier`."""

    def __init__(self, earlier: list[int]) -> None:
        super().__init__(NAMESPACE, None)
        self._all, self._num_earlier = list(earlier), len(earlier)

    def see(self, ids: list[int]) -> None:
        self._all += ids[len(self._all) - self._num_earlier :]
        super().see(self._all)


class QuotingDrafter(Drafter):
    def __init__(self, config: SpeculationConfig, earlier: dict[tuple[int, ...], list[int]]) -> None:
        """earlier: the version that each prompt begins with."""
        super().__init__(config)
        self._earlier = earlier

    def _nothing_known(self, seq: Sequence) -> Lookup:
        return Quoting(self._earlier[tuple(seq.token_ids[:PROMPT_TOKENS])])


class Bench:
    def __init__(
        self,
        model: Path,
        dtype: str,
        quantization: str,
        max_rows: int,
        num_tokens: int,
        draft_model: Path | None = None,
        source: Source = Source.PROMPT,
    ) -> None:
        """`draft_model`: guesses in place of lookup."""
        self._source = source
        length = PROMPT_TOKENS + num_tokens
        config = EngineConfig(
            ModelConfigSection(path=str(model), dtype=dtype, quantization=quantization, max_seq_len=length + 1),
            KvCacheConfig(max_tokens=max_rows * (length + 64), enable_block_reuse=False),
            SchedulerConfig(max_batch_size=max_rows),
            speculation=SpeculationConfig("lookup", max_shared_tokens=1 << 20)
            if draft_model is None
            else SpeculationConfig("draft_model", str(draft_model)),
        )
        workers = InProcessWorkerGroup(config.model, config.scheduler, config.kv_cache, speculation=config.speculation)
        self.core, self._speculation = EngineCore(config, workers), config.speculation
        assert isinstance(workers.runner, ModelRunner)  # draft models run on CPUs only
        self._runner, self._draft_model = workers.runner, workers.runner.draft_model
        calm_garbage_collector()
        self.vocab, self.num_tokens, self._next_id = self.core.model.vocab_size, num_tokens, 1

    def run(self, rows: int, sampled: bool, drafter: Drafter | None) -> tuple[list[list[int]], float, int]:
        """Texts, seconds from the first step in which all rows generate to the end, and steps of that."""
        core = self.core
        core.scheduler._drafter = drafter
        self._runner.draft_model = None if drafter is None else self._draft_model
        first = self._next_id
        for row, prompt in enumerate(self._prompts(rows)):
            sampling = SamplingConfig(temperature=0.7, seed=row) if sampled else SamplingConfig()
            output = OutputConfig(exclude_input_from_output=True)
            request = Request(
                prompt, self.num_tokens, sampling_config=sampling, output_config=output, cache_salt=NAMESPACE
            )
            core.enqueue(self._next_id, request)
            self._next_id += 1
        texts: dict[int, list[int]] = {}
        started, num_steps = 0.0, 0
        while core.has_work:
            if (
                not started
                and len(core.scheduler.running) == rows
                and all(s.is_generating for s in core.scheduler.running)
            ):
                started = time.perf_counter()
            num_steps += bool(started)
            for response in core.step():
                texts[response.request_id - first] = response.result.output_token_ids[0]
        if not started:
            sys.exit(
                f"the first of {rows} rows had its {self.num_tokens} tokens before all generated; use --tokens {4 * rows}"
            )
        return [texts[row] for row in range(rows)], time.perf_counter() - started, num_steps

    def measure(self, kind: str, rows: int, sampled: bool, rounds: int) -> Figures:
        truth, _, _ = self.run(rows, sampled, None)
        ratios, plain_s, is_equal, steps = [], [], True, 0
        drafter, counters = self._fresh(kind, truth), self.core.counters
        self.run(rows, sampled, drafter)  # learns what steps cost
        before = counters.draft_tokens_total, counters.accepted_draft_tokens_total
        for number in range(rounds):
            if self._draft_model is None:
                cost, drafter = drafter.cost, self._fresh(kind, truth)
                drafter.cost = cost
            seconds = {}
            for is_on in ((False, True), (True, False))[number % 2]:
                texts, seconds[is_on], num_steps = self.run(rows, sampled, drafter if is_on else None)
                is_equal &= texts == truth
                steps += num_steps * is_on
            ratios.append(seconds[False] / seconds[True])
            plain_s.append(seconds[False])
        tried, right = counters.draft_tokens_total - before[0], counters.accepted_draft_tokens_total - before[1]
        return Figures(
            kind,
            rows,
            sampled,
            [round(ratio, 3) for ratio in ratios],
            round(rows * (self.num_tokens - 1) / statistics.median(plain_s), 1),
            round(right / tried, 3) if tried else 0.0,
            round(rounds * (self.num_tokens - 1) / steps, 2),
            is_equal,
        )

    def _prompts(self, rows: int) -> list[list[int]]:
        rng = random.Random(0)
        return [[rng.randrange(self.vocab) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]

    def _fresh(self, kind: str, truth: list[list[int]]) -> Drafter:
        """A drafter that has seen nothing but the earlier versions."""
        if self._draft_model is not None:
            return ModelDrafter(self._speculation)
        rng = random.Random(1)
        versions = [earlier_version(text, kind, rng, self.vocab) for text in truth]
        if self._source is Source.PROMPT:
            return QuotingDrafter(self._speculation, dict(zip(map(tuple, self._prompts(len(truth))), versions)))
        drafter = Drafter(self._speculation)
        assert drafter.others is not None  # the mode is lookup
        for version in versions:
            drafter.others.add(NAMESPACE, version)
        return drafter


def row_of(figures: Figures) -> dict[str, Any]:
    """A row of the results, as `bench compare` reads them."""
    cell = f"{figures.kind}, {figures.rows} rows, {'sampled' if figures.sampled else 'greedy'}"
    return {
        "cell": cell,
        "lane": "everbatch",
        "repeats": [{"speed_up": ratio} for ratio in figures.speed_ups],
    } | asdict(figures)


def main(
    model: Annotated[Path, typer.Option(help="checkpoint directory")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="model.dtype")] = "auto",
    quantization: Annotated[str, typer.Option(help="model.quantization")] = "none",
    rows: Annotated[str, typer.Option(help="rows that generate together")] = "1,8,32",
    kinds: Annotated[str, typer.Option(help="of texts that lookup finds")] = ",".join(KINDS),
    draft_model: Annotated[
        Path | None, typer.Option(help="checkpoint directory; it guesses in place of lookup")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="of output of each row")] = 256,
    rounds: Annotated[int, typer.Option(help="pairs of runs in a figure")] = 5,
    source: Annotated[Source, typer.Option(help="where the earlier versions stand")] = Source.PROMPT,
    sampled: Annotated[bool, typer.Option(help="with temperature 0.7 rather than greedily")] = False,
    save: Annotated[bool, typer.Option(help="write benchmarks/results/speculation.json")] = False,
) -> None:
    """Compare, and print a table."""
    sizes = [int(each) for each in rows.split(",")]
    bench = Bench(model, dtype, quantization, max(sizes), tokens, draft_model, source)
    figures = []
    for size in sizes:
        for kind in kinds.split(",") if draft_model is None else [DRAFT_MODEL]:
            figures.append(bench.measure(kind, size, sampled, rounds))
            print(json.dumps(asdict(figures[-1])), flush=True)
    table = Table("rows", "kind", "on : off", "least", "greatest", "accepted", "per step", "plain tokens/s", "equal")
    for each in figures:
        ups = each.speed_ups
        ratios = (f"{ratio:.2f}" for ratio in (statistics.median(ups), min(ups), max(ups)))
        table.add_row(
            str(each.rows), each.kind, *ratios, f"{each.accepted:.2f}", f"{each.per_step:.2f}",
            f"{each.plain_tokens_per_s:.0f}", "yes" if each.is_equal else "NO",
        )  # fmt: skip
    console.print(table)
    if save:
        results.write({"kind": results.KIND, "rows": [row_of(each) for each in figures]}, RESULTS, "speculation")


if __name__ == "__main__":
    typer.run(main)
