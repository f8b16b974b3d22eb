"""Doubles whose results a person can compute by hand: `CountingRunner`, a fake device, and `CountingLoop`, an engine around it.

The runner keeps what a real device keeps (slots with page tables, pages with contents) and checks every access, so that a leaked, shared
or prematurely freed page, a wrong start or a wrong table entry is an AssertionError at the row that meets it. Imports no JAX.
Read `counting`, `serial_device`, `counting_runner`, `counting_loop`.
"""

from jaxserve.testing.counting import hidden_state, logprobs_of, next_token, solo_output
from jaxserve.testing.counting_loop import CountingLoop, Output
from jaxserve.testing.counting_runner import CountingRunner
from jaxserve.testing.serial_device import SerialDevice

__all__ = ["CountingLoop", "CountingRunner", "Output", "SerialDevice", "hidden_state", "logprobs_of", "next_token", "solo_output"]
