"""The front end: OpenAI's HTTP protocol and gRPC in front of engines. No module here imports JAX.

Read `service.py` first (what both doors share), then `http.py` with `openai_*.py`, `grpc_server.py`, `server.py` (the process)
and `supervisor.py` with `child.py` (engine and front ends as processes that are kept running).
"""
