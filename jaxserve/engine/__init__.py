"""The engine: the step loop and its doors. `engine.py` is the loop's one turn; read it first.

`info.py` and `admission.py` are pure and shared with the front end; `build.py` puts an engine together from a configuration;
`loop.py` and `link*` run it behind EngineLink.
"""
