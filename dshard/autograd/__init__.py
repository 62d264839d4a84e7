"""What autograd does around a model, as units must know it: modes, backwards that have passed, recompute."""
