"""The `generate` command, and how model text is written to a terminal.

Model text goes to standard output as it comes and is never read as markup; control characters other than newline and
tab are dropped, so that no model can move the cursor or rename the window.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from client.client import EverbatchClient
from client.errors import ClientError
from client.options import GenerateOptions
from client.statistics import AnswerClock

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_HARMFUL = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Text without terminal control characters."""
    return text.translate(_HARMFUL)


def write(text: str) -> None:
    """Model text to standard output: cleaned on a terminal, unchanged into a pipe."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def run_generate(
    client: EverbatchClient,
    prompt: str,
    options: GenerateOptions,
    timeout_s: float,
    quiet: bool,
    introduction: str | None = None,
    *,
    chat: bool = False,
) -> int:
    """Stream one completion; `introduction` says who answers. `chat`: the prompt is a message to the model's chat template.

    Returns the exit status: 0, or 130 after Ctrl-C (which cancels). Raises ClientError.
    """
    clock = AnswerClock()
    if chat:
        stream = client.stream(messages=[{"role": "user", "content": prompt}], timeout_s=timeout_s, **options)
    else:
        stream = client.stream(prompt, timeout_s=timeout_s, **options)
    if introduction is not None and not quiet:
        _remark(introduction)
    status = 0
    echoed = False
    try:
        for chunk in stream:
            if not echoed and not chat and sys.stdout.isatty():
                sys.stdout.write(f"{_DIM}{printable(prompt)}{_PLAIN}")
            echoed = True
            clock.add(chunk)
            write(chunk.text)
    except KeyboardInterrupt:
        status = 130
    except ClientError:
        write("\n" * bool(clock.text))
        raise
    finally:
        stream.close()
        client.close()
    if sys.stdout.isatty() or not clock.text.endswith("\n"):
        write("\n")
    if not quiet:
        if status == 0 and not clock.text and not chat:
            _remark("the model ends this text at once; --chat sends it as a message")
        _remark(clock.summary())
    return status


def _remark(text: str) -> None:
    Console(stderr=True).print(f"[dim]{escape(text)}[/dim]", highlight=False, soft_wrap=True)
