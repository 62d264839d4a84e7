"""The planner on this machine: what it measures of a model and of links, and the plan that comes of it."""
