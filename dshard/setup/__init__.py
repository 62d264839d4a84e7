"""`fully_shard`: from its arguments to units, hooks and classes; and strategies that change later."""
