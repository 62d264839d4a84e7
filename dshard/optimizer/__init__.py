"""What happens to parameters around an optimizer's step, and when shards move to other places."""
