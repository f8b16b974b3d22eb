"""One file for each family of models: how its config becomes a spec, and what its tensors are called."""
