"""Tells `scripts/serve` whether its arguments, the variables and the file of --config name no model, and no name to serve it under.

Prints `model`, or `model served_model_name`. Prints nothing where a model is named, nor where something else is wrong:
`jaxserve serve` then says what.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from jaxserve.cli import serve_arguments
from jaxserve.errors import ConfigError
from jaxserve.settings import Settings, resolve_settings


def main(argv: Sequence[str]) -> None:
    if _resolve(argv) is None and (settings := _resolve(["some-model", *argv])) is not None:
        print("model" if settings.server.served_model_name else "model served_model_name")


def _resolve(argv: Sequence[str]) -> Settings | None:
    try:
        arguments = serve_arguments(argv)
        return resolve_settings(arguments, os.environ, arguments["config"])
    except ConfigError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
