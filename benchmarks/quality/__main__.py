"""What weight formats cost in quality.

./everbatch bench quality --model MODEL          every form of one model, as it is served (--text FILE, --against MODEL2)
./everbatch bench quality --model DIR --peers llamacpp                  the same beside types that llama.cpp makes of it
./everbatch bench quality --model DIR --peers llamacpp --plot FILE      and a picture: rise and KL against bits
./everbatch bench quality                        checkpoints of `quantize` (--tokens 32768: all of the held-out text)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.quality import checkpoints, judge
from benchmarks.quality.perplexity import ROW_TOKENS


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of held-out text.", min=ROW_TOKENS)] = 4096,
    model: Annotated[str, typer.Option(help="A model of your own: directory, GGUF file or hub id.")] = "",
    against: Annotated[str, typer.Option(help="With --model: another model of the same tokens, as it is.")] = "",
    text: Annotated[Path | None, typer.Option(help="With --model: a file of text.")] = None,
    formats: Annotated[
        str, typer.Option(help="With --model: of model.quantization, and kv:int8, kv:k8v4, kv:int4.")
    ] = judge.FORMS,
    peers: Annotated[str, typer.Option(help="With --model, a directory: llamacpp, the types that it makes.")] = "",
    plot: Annotated[Path | None, typer.Option(help="With --model: draw rise and KL against bits here.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure every format; print a table and write the figures."""
    if model:
        return judge.run(model, against, text, formats, tokens, output, peers, plot)
    checkpoints.run(tokens, output)


if __name__ == "__main__":
    typer.run(main)
