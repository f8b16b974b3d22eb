"""Settings of every test, of `tests/` and of the kernels: the CPU, strict JAX, no network, a cache of its own.

The environment is set before anything imports JAX, and processes that tests start inherit it. This file itself imports no JAX,
so the pure layers' tests stay fast. Fixtures are in `tests/conftest.py`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# A test reaches no hub; one about hubs sets HF_ENDPOINT to a stand-in of its own.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("HF_TOKEN", None)
if importlib.util.find_spec("jax_cuda12_plugin") is None:
    # Compiling is most of what tests wait for, and LLVM's optimizations are half of that. Tests of real models and some of tiny ones
    # ask for the usual level. Where NVIDIA's compiler is installed, it is tested, and the flag would reach it.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
else:
    # Threads of XLA's pool. Each warpgroup of an interpreted kernel holds one while it waits for another, and that one needs a thread too.
    os.environ.setdefault("NPROC", "16")


def pytest_configure(config: pytest.Config) -> None:
    """Keep tests away from the user's settings and cache: checkpoints are converted anew, compiled code is kept."""
    for name in [name for name in os.environ if name.startswith("JAXSERVE_")]:
        del os.environ[name]
    cache = Path(tempfile.mkdtemp(prefix="jaxserve-tests-"))
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    pytest_cache = getattr(config, "cache", None)  # absent under `-p no:cacheprovider`
    if pytest_cache is not None:
        for name in ("compile", "native"):
            kept = pytest_cache.mkdir(f"jaxserve-{name}")
            kept.chmod(0o700)
            (cache / name).symlink_to(kept, target_is_directory=True)
    os.environ["JAXSERVE_CACHE"] = str(cache)
    # Many tests compile the same programs, in either process. Engines keep theirs here, too.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache / "compile")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    if "jax" in sys.modules:  # a conftest that was named imported it, which has read the environment
        import jax

        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    # A shell ignores Ctrl-C for what it runs in the background, and programs under test would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look through it again and again."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def own_compile_cache() -> Iterator[None]:
    """What an engine of one module sets for this process, JAX's compile cache, is not left to the next."""
    yield
    if "jax" in sys.modules:
        import jax
        from jax.experimental.compilation_cache import compilation_cache

        if jax.config.jax_compilation_cache_dir != (kept := os.environ["JAX_COMPILATION_CACHE_DIR"]):
            jax.config.update("jax_compilation_cache_dir", kept)
            compilation_cache.reset_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged may be no Unicode, and goes from a process that runs tests to the one that reports."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report
