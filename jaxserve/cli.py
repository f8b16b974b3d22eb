"""The `jaxserve` command: picks the subcommand, turns flags into settings, and turns errors into one line and a status.

Every import of an engine, a model or a server happens inside the subcommand that needs it, so that help and errors are quick.
Names and values of the flags come from `jaxserve.settings`; what a command does lives below it in the layers.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.errors import ERROR_PREFIX, CheckpointError, ConfigError, InvalidRequest, JaxserveError
from jaxserve.settings import OTHER_VARIABLES, Parser, add_flags, nearest, resolve_settings

if TYPE_CHECKING:
    from jaxserve.answer_source import LocalSource, ServerSource

SAMPLING_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "Most tokens to generate for each prompt (default 16; in a chat what the context leaves)."),
    "min_tokens": (int, "Tokens before an end may be chosen."),
    "temperature": (float, "Randomness; 0 always takes the most likely token."),
    "top_p": (float, "Sample from the most likely tokens that reach this probability together."),
    "top_k": (int, "Sample from this many of the most likely tokens."),
    "min_p": (float, "Sample from tokens at least this likely, relative to the most likely one."),
    "presence_penalty": (float, "Against tokens that were generated before."),
    "frequency_penalty": (float, "The same, for each time they were generated."),
    "repetition_penalty": (float, "Against tokens of the prompt and the output; 1 is off."),
    "seed": (int, "Makes the output repeatable."),
    "n": (int, "Outputs for each prompt."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 when it failed, 2 for a wrong flag, setting, checkpoint or prompt."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from jaxserve import __version__

        print(f"jaxserve {__version__}")
        return 0
    try:
        if arguments[0] not in COMMANDS:
            raise ConfigError(f"unknown command {arguments[0]!r}.{nearest(arguments[0], list(COMMANDS))} See `jaxserve --help`.")
        status = COMMANDS[arguments[0]][1](arguments[1:])
        sys.stdout.flush()
        return status
    except JaxserveError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | CheckpointError | InvalidRequest) else 1
    except BrokenPipeError:  # the reader, such as `head`, has enough; the interpreter flushes once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def serve(argv: Sequence[str]) -> int:
    """`jaxserve serve MODEL`: engine, HTTP and gRPC until it is told to stop."""
    arguments = serve_arguments(argv)
    settings = resolve_settings(arguments, os.environ, arguments["config"])
    from jaxserve.serve.supervisor import serve as run_servers

    return run_servers(settings.engine, settings.server, settings.origins)


def serve_arguments(argv: Sequence[str]) -> dict[str, Any]:
    """What is given to `jaxserve serve`, by name: `config`, and what `resolve_settings` takes as flags."""
    parser = _parser("serve", "MODEL", "Serves a model over HTTP (OpenAI's protocol) and gRPC.")
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=_MODEL_HELP)
    _add_config_file(parser)
    add_flags(parser, EngineConfig, ServerConfig)
    return _parse(parser, argv)


def generate(argv: Sequence[str]) -> int:
    """`jaxserve generate MODEL PROMPT ...`: text on stdout, progress on stderr."""
    parser = _parser(
        "generate", "MODEL [PROMPT ...]", "Generates text for prompts given as arguments, or for the one read from standard input."
    )
    parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="A prompt; without any, standard input is the prompt.")
    parser.add_argument("--chat", action="store_true", help="Take each prompt as a user's message and use the chat template.")
    _add_sampling_flags(parser, SAMPLING_FLAGS)
    _add_config_file(parser)
    add_flags(parser, EngineConfig)
    arguments = _parse(parser, argv)
    settings = resolve_settings(arguments, os.environ, arguments.get("config"))
    sampling_values = _sampling_values(arguments)
    prompts = arguments["prompts"] or [_read_prompt()]
    _log_plainly(logging.INFO)
    from jaxserve.llm import LLM

    with LLM.from_config(settings.engine, _print_stage) as llm:
        params = llm.get_default_sampling_params().with_changes(**sampling_values)
        if arguments["chat"]:
            results = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            results = llm.generate(prompts, params)
    for result in results:
        for output in result.outputs:
            print(output.text)
    failures = [result.error for result in results if result.error is not None]
    for failure in failures:
        print(f"{ERROR_PREFIX}{failure}", file=sys.stderr)
    return 1 if failures else 0


def chat(argv: Sequence[str]) -> int:
    """`jaxserve chat`: a conversation with a server or with a model in this process."""
    parser = _parser("chat", "[MODEL]", "Talks with a model: one in this process, or that of a server (--url).")
    parser.add_argument("--message", metavar="TEXT", help="Answer this one message and end.")
    parser.add_argument("--system", metavar="TEXT", help="The system message.")
    arguments = _parse_source_flags(parser, argv)
    source = _answer_source(arguments)
    from jaxserve.chat_cli import run_chat

    with closing(source):
        return run_chat(source, arguments["system"], arguments["message"])


def complete(argv: Sequence[str]) -> int:
    """`jaxserve complete`: continuations of texts, by a server or by a model in this process."""
    parser = _parser(
        "complete", "[MODEL]", "Continues texts, without a chat template: with a model in this process, or a server's (--url)."
    )
    parser.add_argument("--prompt", metavar="TEXT", help="Continue this one text and end.")
    arguments = _parse_source_flags(parser, argv)
    source = _answer_source(arguments)
    from jaxserve.chat_cli import run_complete

    with closing(source):
        return run_complete(source, arguments["prompt"])


def convert(argv: Sequence[str]) -> int:
    """`jaxserve convert SRC DST`: the same as `python -m jaxserve.convert`."""
    from jaxserve.convert.__main__ import add_arguments, run

    parser = _parser("convert", "SRC DST", "Converts a checkpoint to the Orbax form that jaxserve reads.")
    add_arguments(parser)
    return run(argparse.Namespace(**_parse(parser, argv)))


def inspect(argv: Sequence[str]) -> int:
    """`jaxserve inspect CHECKPOINT`: what a converted checkpoint holds."""
    parser = _parser("inspect", "CHECKPOINT", "Shows what a converted checkpoint holds.")
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="Directory that `jaxserve convert` wrote.")
    arguments = _parse(parser, argv)
    from jaxserve.checkpoint_report import describe

    print("\n".join(describe(arguments["checkpoint"])))
    return 0


def doctor(argv: Sequence[str]) -> int:
    """`jaxserve doctor`: devices, versions, and what would be used and why."""
    _parse(_parser("doctor", "", "Shows devices and versions, and what jaxserve would use and why."), argv)
    from jaxserve.runner.device import report

    print(report())
    return 0


def bench(argv: Sequence[str]) -> int:
    """`jaxserve bench NAME`: runs `jaxserve.bench.NAME`."""
    import jaxserve.bench

    names = sorted(module.name for module in pkgutil.iter_modules(jaxserve.bench.__path__) if _has_main(module.name))
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: jaxserve bench NAME [flags]\n\nBenchmarks: {', '.join(names)}")
        return 0 if argv else 2
    if argv[0] not in names:
        raise ConfigError(f"unknown benchmark {argv[0]!r}; there are {', '.join(names)}.{nearest(argv[0], names)}")
    result: int = importlib.import_module(f"jaxserve.bench.{argv[0]}").main(list(argv[1:]))
    return result


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "serve": ("serve a model over HTTP and gRPC", serve),
    "generate": ("generate text for a few prompts", generate),
    "chat": ("talk with a model, in this process or on a server", chat),
    "complete": ("continue texts, in this process or on a server", complete),
    "convert": ("convert a Hugging Face or GGUF checkpoint", convert),
    "inspect": ("show what a converted checkpoint holds", inspect),
    "doctor": ("show devices and versions, and what would be used", doctor),
    "bench": ("measure", bench),
}

_MODEL_HELP = "A converted checkpoint, a Hugging Face directory, a GGUF file or a hub id."


def _parser(command: str, operands: str, description: str) -> Parser:
    return Parser(
        prog=f"jaxserve {command}",
        usage=f"jaxserve {command} {operands} [flags]".replace("  ", " "),
        description=description,
        allow_abbrev=False,
    )


def _add_config_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of settings. A flag wins over a JAXSERVE_* variable, that over the file."
    )
    variables = "\n".join(f"  {name}: {text}" for name, text in OTHER_VARIABLES.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"Every setting can be given as JAXSERVE_NAME too, such as JAXSERVE_MAX_MODEL_LEN. Other variables:\n{variables}"


def _add_sampling_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    group = parser.add_argument_group("Sampling")
    for name in names:
        kind, text = SAMPLING_FLAGS[name]
        flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
        group.add_argument(flag, dest=name, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__.upper(), help=text)
    group.add_argument("--stop", action="append", default=argparse.SUPPRESS, metavar="TEXT", help="End before this text; repeatable.")


def _sampling_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What was given of the sampling flags; a wrong value is told before a model is loaded."""
    values = {name: arguments[name] for name in (*SAMPLING_FLAGS, "stop") if name in arguments}
    from jaxserve.core.sampling_params import SamplingParams

    SamplingParams(**{"max_tokens": None} | values)
    return values


def _parse_source_flags(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """The flags of `chat` and `complete`, after those of their own."""
    served = "With --url: which of the served models, by default the first."
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=f"{_MODEL_HELP} {served}")
    server = parser.add_argument_group("Server")
    server.add_argument("--url", metavar="URL", help="A server that speaks OpenAI's HTTP protocol, such as http://127.0.0.1:8000.")
    server.add_argument(
        "--api-key",
        dest="server_key",
        metavar="KEY",
        help="Its key. Better given as JAXSERVE_API_KEY or OPENAI_API_KEY: other users can read a command line.",
    )
    _add_sampling_flags(parser, [name for name in SAMPLING_FLAGS if name != "n"])
    _add_config_file(parser)
    add_flags(parser, EngineConfig)
    return _parse(parser, argv)


def _answer_source(arguments: Mapping[str, Any]) -> LocalSource | ServerSource:
    sampling, url = _sampling_values(arguments), arguments["url"]
    from jaxserve.answer_source import LocalSource, ServerSource

    if url is None:
        if arguments["server_key"] is not None:
            raise ConfigError("--api-key is for a server; give its --url too, or leave the key out.")
        if not arguments.get("model") and not os.environ.get("JAXSERVE_MODEL") and not arguments["config"]:
            raise ConfigError("neither MODEL nor --url is given; name a model to load here, or a server to ask.")
        settings = resolve_settings(arguments, os.environ, arguments["config"])
        _log_plainly(logging.WARNING)
        return LocalSource(settings.engine, sampling, _print_stage)
    useless = [spec.name for spec in fields(EngineConfig) if spec.name != "model" and spec.name in arguments]
    if useless or arguments["config"]:
        flag = f"--{useless[0].replace('_', '-')}" if useless else "--config"
        raise ConfigError(f"{flag} is a setting of an engine, and the server at --url has its own; leave one of them out.")
    keys = os.environ.get("JAXSERVE_API_KEY", "").split(",")[0] or os.environ.get("OPENAI_API_KEY")
    return ServerSource(url, arguments.get("model"), arguments["server_key"] or keys, sampling)


def _print_stage(name: str, seconds: float, detail: str) -> None:
    from jaxserve.startup_report import stage_line

    print(stage_line(name, seconds, detail), file=sys.stderr, flush=True)


def _log_plainly(level: int) -> None:
    """Our messages from `level` on, and others' warnings, to stderr as bare text."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("jaxserve").setLevel(level)


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    # Intermixed: by default, argparse ends the list of prompts at the first flag.
    namespace, unknown = parser.parse_known_intermixed_args(list(argv))
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        name = unknown[0].partition("=")[0]  # what follows may be a secret
        raise ConfigError(f"unknown argument {name!r}.{nearest(name, known)} See `{parser.prog} --help`.")
    return vars(namespace)


def _read_prompt() -> str:
    if sys.stdin.isatty():
        print("Type the prompt; end it with Ctrl-D.", file=sys.stderr)
    prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise InvalidRequest("standard input is empty: give a prompt there or as an argument.")
    return prompt


def _has_main(name: str) -> bool:
    # What a benchmark has and a helper module beside it lacks; reading the text spares importing JAX.
    spec = importlib.util.find_spec(f"jaxserve.bench.{name}")
    return spec is not None and spec.origin is not None and "\ndef main(" in Path(spec.origin).read_text(encoding="utf-8")


def _usage() -> str:
    lines = [f"  {name:<10} {text}" for name, (text, _) in COMMANDS.items()]
    return "usage: jaxserve COMMAND [flags]\n\n" + "\n".join(lines) + "\n\n`jaxserve COMMAND --help` lists a command's flags."


if __name__ == "__main__":
    sys.exit(main())
