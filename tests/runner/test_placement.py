"""Where programs run, and how they are compiled for it."""

from jaxserve.runner.placement import gpu_options


def test_passes_that_the_user_disabled_stay_so() -> None:
    assert gpu_options("") == {"xla_disable_hlo_passes": "rematerialization"}
    flags = "--xla_disable_hlo_passes=algsimp,dot-merger --xla_dump_to=here"
    assert gpu_options(flags)["xla_disable_hlo_passes"] == "rematerialization,algsimp,dot-merger"
