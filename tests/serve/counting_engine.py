"""An engine process with the CountingRunner instead of a model; takes the same orders as `python -m jaxserve.engine`.

COUNTING_ENGINE_STEP_S is how long a step takes; COUNTING_ENGINE_FAILS and COUNTING_ENGINE_HANGS spoil the start.
"""

import os
import sys
import time
from dataclasses import asdict

from jaxserve.config import SchedulerLimits
from jaxserve.engine.child_process import Reports, read_orders
from jaxserve.engine.engine import Engine
from jaxserve.engine.info import EngineInfo
from jaxserve.engine.link_server import run_engine_process
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.testing import CountingRunner

orders = read_orders()
if os.environ.get("COUNTING_ENGINE_FAILS"):
    print("jaxserve: error: no such model", file=sys.stderr)
    sys.exit(2)
if os.environ.get("COUNTING_ENGINE_HANGS"):
    time.sleep(60)
reports = Reports(orders["report_fd"])
reports.stage("weights", 0.25, "none")
limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_pages=129)
step_s = float(os.environ.get("COUNTING_ENGINE_STEP_S", "0.01"))
runner = CountingRunner(num_pages=129, page_size=16, max_num_seqs=8, vocab_size=320, step_s=step_s)
info = EngineInfo(
    model_path=orders["config"]["model"], model="counting", model_type="llama", dtype="float32", max_model_len=256, vocab_size=320,
    eos_token_ids=(1,), num_pages=129, page_size=16, max_num_seqs=8, max_num_batched_tokens=64,
    max_waiting=orders["server"]["max_waiting"] or 32,
)  # fmt: skip
engine = Engine(Scheduler(limits), runner, info)
stall_timeout_s = orders["server"]["stall_timeout"]
status = run_engine_process(
    engine,
    info,
    orders["engine_address"],
    lambda: reports.ready(asdict(info)),
    stall_timeout_s=stall_timeout_s,
    beat=reports.beat,
)
sys.exit(status)
