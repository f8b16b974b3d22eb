"""Models as data and as modules. Start at `registry.resolve_spec` (config to spec), then `load.load_model` (spec to modules)."""
