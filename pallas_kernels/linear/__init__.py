"""Activations times a weight matrix, one `[T, in] x [out, in]` product. Start at `api`."""
