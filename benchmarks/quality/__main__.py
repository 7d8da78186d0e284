"""What weight formats cost in quality.

./everbatch bench quality --model MODEL          every form of one model, as it is served (--text FILE, --against MODEL2)
./everbatch bench quality                        8 bits, beside llama.cpp's and OpenVINO's, and checkpoints of `quantize`
./everbatch bench quality --tokens 32768         the same on all of the held-out text
./everbatch bench quality --bits 4               4 bits, beside each engine of `bench peers --weights int4`
./everbatch bench quality --bits 4 --shapes M,L  the same on more models; L takes 8 GiB
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.quality import eight_bits, four_bits, judge
from benchmarks.quality.perplexity import ROW_TOKENS


def main(
    bits: Annotated[int, typer.Option(help="Formats of 8 or of 4 bits.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of held-out text.", min=ROW_TOKENS)] = 4096,
    shapes: Annotated[str, typer.Option(help="With 4 bits: more models of random weights, from S, M, L.")] = "",
    peers: Annotated[
        str, typer.Option(help="With 4 bits: engines, from openvino, llamacpp, ik_llamacpp.")
    ] = "llamacpp,ik_llamacpp,openvino",
    model: Annotated[str, typer.Option(help="A model of your own: directory, GGUF file or hub id.")] = "",
    against: Annotated[str, typer.Option(help="With --model: another model of the same tokens, as it is.")] = "",
    text: Annotated[Path | None, typer.Option(help="With --model: a file of text.")] = None,
    formats: Annotated[
        str, typer.Option(help="With --model: of model.quantization, and kv:int8, kv:k8v4, kv:int4.")
    ] = judge.FORMS,
    output: Annotated[Path | None, typer.Option("--json", help="With --model: write the figures here.")] = None,
) -> None:
    """Measure every format; print a table and write the figures."""
    if model:
        return judge.run(model, against, text, formats, tokens, output)
    match bits:
        case 8:
            eight_bits.run(tokens)
        case 4:
            four_bits.run(tokens, shapes, peers)
        case _:
            raise typer.BadParameter(f"{bits} is neither 8 nor 4", param_hint="--bits")


if __name__ == "__main__":
    typer.run(main)
