"""The options that the commands of several measurements share."""

from __future__ import annotations

import argparse
import os

from openrl.cli.run import silence


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows the text as it is."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where models compute, in fp32"
    )


def work_options(parser: argparse.ArgumentParser, prompts: int, samples: int, tokens: int) -> None:
    """What a step does, with the defaults that are given."""
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--samples", type=int, default=samples, help="per prompt")
    parser.add_argument("--tokens", type=int, default=tokens, help="of a response")


def model_options(parser: argparse.ArgumentParser, hidden_size: int = 128, layers: int = 4) -> None:
    parser.add_argument("--pretrain", help="a model's directory; without it a random one")
    parser.add_argument("--hidden_size", type=int, default=hidden_size)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--zero_stage", type=int, default=0)
    device_option(parser)


def pair_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="pairs that are not counted")
    parser.add_argument("--cores", type=int, nargs="+", help="the only cores to run on")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of a measurement in pairs; this process, made quiet, keeps to their cores."""
    args = parser.parse_args()
    if args.cores:
        os.sched_setaffinity(0, args.cores)
    silence()
    return args
