"""`./everbatch bench guides`: what guided decoding gets right, and what it costs.

judge DIRECTORY     each backend on JSON schemas with valid and invalid instances (the form of MaskBench), token by token
decode              tokens per second at --rows rows with and without a guide, in turns
drafts              tokens per second under a guide with lookup and without, in turns
answers             how many of --count finished answers of the default model satisfy their schema
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks.guides import answers, decode, drafts, judge


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="everbatch bench guides", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("judge", "decode", "drafts", "answers"))
    parser.add_argument("directory", nargs="?", type=Path, help="of the schemas: JSON files with `schema` and `tests`")
    parser.add_argument("--backends", default="llguidance,xgrammar")
    parser.add_argument("--model", default="models/default", help="whose tokenizer, or which model")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    console = Console()
    if options.what == "judge":
        if options.directory is None or not options.directory.is_dir():
            parser.error("judge needs the directory of the schemas")
        figures = [judge.judge(name, options.directory, options.model) for name in options.backends.split(",")]
        console.print(judge.table(figures))
        for each in figures:
            for line in each.defects:
                console.print(f"{each.backend}: {line}", markup=False)
    elif options.what == "decode":
        console.print(decode.measure(options.model, options.rows, options.rounds), markup=False)
    elif options.what == "drafts":
        console.print(drafts.measure(options.model, options.rows, options.rounds), markup=False)
    else:
        console.print(answers.count(options.model, options.count), markup=False)


if __name__ == "__main__":
    main()
