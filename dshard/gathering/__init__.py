"""Full values outside of a forward: scopes, and what is written in them."""
