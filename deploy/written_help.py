"""Help without an environment: what `--help` prints, as tools/write_help.py has stored it in help/. Standard library only."""

from __future__ import annotations

from pathlib import Path

from deploy import __version__

DIRECTORY = Path(__file__).parent / "help"
ROOT_PAGE = "everbatch"
OWN_HELP = "bench"  # `bench NAME --help` is the help of the benchmark itself


def asked(arguments: list[str]) -> str | None:
    """The text that these arguments of the command line ask for; None where they ask for more than help or the version."""
    if arguments in ([], ["--help"]):
        return page(ROOT_PAGE)
    if arguments == ["--version"]:
        return f"everbatch {__version__}"
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    asks = own[1:2] == ["--help"] if own[0:1] == [OWN_HELP] else "--help" in own
    return page(own[0]) if asks else None


def page(name: str) -> str | None:
    """The stored help of a command; None where there is no such command."""
    known = {path.stem: path for path in DIRECTORY.glob("*.txt")}
    return known[name].read_text().rstrip() if name in known else None
