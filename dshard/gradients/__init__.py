"""Gradients: from autograd to their reduction, and what all ranks know of them."""
