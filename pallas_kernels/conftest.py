"""Imports the package before pytest does: pytest would import an operation's folder a second time and put that module over the
function of the same name (`pallas_kernels.paged_attention`)."""

import pallas_kernels  # noqa: F401
