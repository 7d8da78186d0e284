"""Attack a server of one's own: `python -m tests.hostile [fuzz|numbers|growth|cancels|starts] [options]`.

fuzz (default)   malformed requests over HTTP and gRPC to every model, a canary after each 500
numbers          every number that no field should hold, in every field of every wire, an honest request after each
growth           how the memory of each process grows by each class of request, a fresh server for each
cancels          gRPC streams cancelled midway, in bounded cycles
starts           starts of the server, one after the other, with the logs kept

Everything stays on 127.0.0.1. Exit status 1 when something was found. Logs are kept under the run directory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deploy.rundir import default_run_directory
from tests.compiled_once import share_native_kernels
from tests.hostile import cycles, growth, named, report, served_numbers
from tests.hostile.campaign import Campaign, Settings
from tests.hostile.mix import KINDS, MODELS, Mix
from tests.hostile.target import Target

GRPC_ERROR_SHARE = {"never": 0.0, "half": 0.5, "always": 1.0}
LARGE_DEADLINE_S = 240.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "command", nargs="?", default="fuzz", choices=("fuzz", "numbers", "growth", "cancels", "starts")
    )
    parser.add_argument(
        "--cases", type=int, help="how many requests (fuzz: 20000; numbers: all; growth: 1000 of each class)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which ones; the same seed sends the same requests")
    parser.add_argument("--workers", type=int, default=8, help="clients at a time")
    parser.add_argument("--model", choices=MODELS, help="one model instead of all")
    parser.add_argument(
        "--kind", action="append", choices=sorted(KINDS), default=[], help="one class of requests; may be repeated"
    )
    parser.add_argument(
        "--with-grpc-error",
        choices=GRPC_ERROR_SHARE,
        default="half",
        help="how many gRPC calls carry triton_grpc_error",
    )
    parser.add_argument(
        "--known-fatal",
        action="store_true",
        help="that metadata also where a documented bug makes it fatal (docs/reliability.md)",
    )
    parser.add_argument("--large", action="store_true", help="then the named requests of many megabytes, one by one")
    parser.add_argument(
        "--replay",
        metavar="SEED:INDEX",
        help="send one request of a run (give the run's other options too) and show it",
    )
    parser.add_argument("--cycles", type=int, default=6000, help="cancels: how many streams")
    parser.add_argument("--times", type=int, default=45, help="starts: how many")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], help="section.key=value of the server's configuration"
    )
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    return parser.parse_args()


def mix_of(args: argparse.Namespace, seed: int) -> Mix:
    models = (args.model,) if args.model else MODELS
    return Mix(seed, models, tuple(args.kind), GRPC_ERROR_SHARE[args.with_grpc_error], args.known_fatal)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fuzz(args: argparse.Namespace, directory: Path) -> tuple[str, dict[str, Any], bool]:
    """Returns the report, the same as JSON, and whether something was found."""
    mix = mix_of(args, args.seed)
    target = Target(directory, tuple(args.overrides))
    campaign = Campaign(target, Settings(workers=args.workers), tell)
    try:
        campaign.start()
        campaign.run(mix.case, range(args.cases or 20_000))
        if args.large:
            send_large(campaign, target)
    finally:
        target.stop()
    return report.text(campaign.tally), report.as_json(campaign.tally), bool(campaign.tally.failures())


def numbers(args: argparse.Namespace, directory: Path) -> tuple[str, dict[str, Any], bool]:
    """The sweep of served_numbers.py; with --cases that many of them, spread over all."""
    cases = served_numbers.cases()
    target = Target(directory, tuple(args.overrides))
    campaign = Campaign(target, Settings(workers=args.workers, ask_after_each="everbatch"), tell)
    try:
        campaign.start()
        campaign.run(cases.__getitem__, range(0, len(cases), max(1, len(cases) // (args.cases or len(cases)))))
    finally:
        target.stop()
    return report.text(campaign.tally), report.as_json(campaign.tally), bool(campaign.tally.failures())


def send_large(campaign: Campaign, target: Target) -> None:
    """The large requests one by one, each with a canary after it."""
    cases = named.large()
    alone = Campaign(target, Settings(workers=1, chunk=1, deadline_s=LARGE_DEADLINE_S), tell)
    alone.tally, alone.canary = campaign.tally, campaign.canary
    for n, case in enumerate(cases):
        tell(f"large: {case.name} ({case.size >> 20} MiB)")
        alone.run(lambda index, case=case: case, [-1 - n])


def replay(args: argparse.Namespace, directory: Path) -> int:
    """Send one case to a fresh server and print what it says."""
    seed, _, index = args.replay.partition(":")
    case = mix_of(args, int(seed)).case(int(index))
    tell(f"{case.kind}, {case.model}, {case.name}: {str(case.call)[:2000]}")
    args.cases = 1
    target = Target(directory, tuple(args.overrides))
    campaign = Campaign(target, Settings(workers=1), tell)
    try:
        campaign.start()
        campaign.run(lambda _: case, [int(index)])
    finally:
        target.stop()
    print(report.text(campaign.tally))
    return 1 if campaign.tally.failures() else 0


def main() -> int:
    args = arguments()
    share_native_kernels()
    directory = default_run_directory(f"hostile-{args.command}-{args.seed}")
    if args.replay:
        return replay(args, directory)
    if args.command == "fuzz":
        shown, found, failed = fuzz(args, directory)
    elif args.command == "numbers":
        shown, found, failed = numbers(args, directory)
    elif args.command == "growth":
        shown, found, failed = growth.run(
            directory, args.cases or 1000, args.seed, tuple(args.kind) or tuple(KINDS), tell
        )
    elif args.command == "cancels":
        shown, found, failed = cycles.cancels(directory, args.cycles, args.seed, args.workers, tell)
    else:
        shown, found, failed = cycles.starts(directory, args.times, tell)
    print(shown)
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
