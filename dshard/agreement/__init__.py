"""What all ranks must have alike: arguments, weights, buffers."""
