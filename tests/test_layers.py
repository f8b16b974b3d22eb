"""The pure layers and the front end really load no JAX: import-linter reads the code, this looks at a running process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(found.name)
loaded = {name.partition(".")[0] for name in sys.modules} & {"jax", "jaxlib", "flax", "orbax", "torch"}
sys.exit(f"loaded: {sorted(loaded)}" if loaded else 0)
"""


@pytest.mark.parametrize(
    "modules",
    [
        ("jaxserve.core", "jaxserve.cache", "jaxserve.scheduler", "jaxserve.config", "jaxserve.errors", "jaxserve.settings"),
        ("jaxserve.models.registry", "jaxserve.checkpoint", "jaxserve.checkpoint_report", "jaxserve.startup_report", "jaxserve.cli"),
        ("jaxserve.text",),
        ("jaxserve.serve", "jaxserve.engine.link_client"),
        ("jaxserve.engine.engine", "jaxserve.engine.loop", "jaxserve.engine.link_server", "jaxserve.engine.admission"),
    ],
    ids=lambda modules: modules[0],
)
def test_no_jax_is_loaded(modules: tuple[str, ...]) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, *modules], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
