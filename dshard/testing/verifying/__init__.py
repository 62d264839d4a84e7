"""Train a user's model under every strategy beside the plain model: `programs`, then `runs`, then `invariants`."""
