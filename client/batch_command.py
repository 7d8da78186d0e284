"""Runs `everbatch batch`, and prints how it ended."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from client.batch_file import answer_file
from client.errors import ClientError
from client.option_names import on_the_command_line
from client.retry import Retry
from client.settings import DEFAULT_MODEL, DEFAULT_TIMEOUT_S, make_settings

INTERRUPTED = 130


def run_batch_file(url: str, api_key: str | None, ca_file: str | None, file: Path, output: Path | None) -> int:
    """Returns the exit status: 0, or 1 where lines or the whole batch failed. Raises ValueError for a wrong use."""
    settings = make_settings(
        *(url, "http", DEFAULT_MODEL, "", api_key), timeout_s=DEFAULT_TIMEOUT_S, retry=Retry(), ca_file=ca_file
    )
    target = file.with_suffix(".out.jsonl") if output is None else output
    console = Console(stderr=True)
    try:
        outcome = answer_file(settings, file, target, shown=sys.stderr.isatty())
    except ClientError as error:
        console.print(
            f"[red]everbatch: {escape(on_the_command_line(str(error)))}[/red]", highlight=False, soft_wrap=True
        )
        return 1
    except KeyboardInterrupt:
        console.print(
            "\nThe server goes on with the batch; run the same command again to get its answers.", soft_wrap=True
        )
        return INTERRUPTED
    for fault in outcome.faults:
        console.print(f"[red]{escape(str(file))}, {escape(fault)}[/red]", highlight=False, soft_wrap=True)
    if outcome.status == "failed":
        return 1
    text = f"{outcome.status}: {outcome.completed} lines answered, {outcome.failed} failed; {target}"
    console.print(escape(text), highlight=False, soft_wrap=True)
    return 1 if outcome.failed else 0
